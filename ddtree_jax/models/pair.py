"""Targets and drafters as plain values: config, structure and parameters; loading them, and checking that they fit.

`graphdef` is static and hashable, `params` is a pytree: jitted functions take the two apart, so nothing in the
decoding code holds a Module.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.checkpoint import CheckpointReader, is_folder, load_leaves, read_json, save_leaves, write_json
from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.cache import Cache
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.dflash2 import PairProposal
from ddtree_jax.models.glm5 import Glm5, causal_mask, layer_plan
from ddtree_jax.models.params import TensorSpec, drafter_tensors, target_tensors

Progress = Callable[[str], None]
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class StaticModel:
    """The static half of a model: what a list of its parameter arrays is turned back into a module with.

    A static argument of a jitted function is hashed at each call, so the hash is computed once; and parameters go in as
    a plain list, because flattening a tree of Flax variables costs more than launching a round.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any):
        self.graphdef = graphdef
        self.treedef = jax.tree.structure(params)
        self._hash = hash((graphdef, self.treedef))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, StaticModel) and self._hash == other._hash
        return same and self.graphdef == other.graphdef and self.treedef == other.treedef

    def merge(self, arrays: list[jax.Array]) -> Any:
        """The module over these arrays (`Target.arrays`, `Drafter.arrays`); call it inside a jitted function."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, arrays))


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A loaded GLM-5 target. `module(params)` rebuilds the network inside a jitted function."""

    config: Glm5Config
    graphdef: nnx.GraphDef
    params: Any
    folder: Path | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return flat_leaves(self.params)["embed",].dtype

    @functools.cached_property
    def static(self) -> StaticModel:
        return StaticModel(self.graphdef, self.params)

    @functools.cached_property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(self.params)

    def module(self, params: Any = None) -> Glm5:
        return nnx.merge(self.graphdef, self.params if params is None else params)


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A loaded DFlash drafter; it runs with the embedding table and the head of the target it was loaded for."""

    config: DFlashConfig
    graphdef: nnx.GraphDef
    params: Any
    folder: Path | None = None

    @functools.cached_property
    def static(self) -> StaticModel:
        return StaticModel(self.graphdef, self.params)

    @functools.cached_property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(self.params)

    def module(self, params: Any = None) -> DFlash:
        return nnx.merge(self.graphdef, self.params if params is None else params)


def resolve_dtype(dtype: Any) -> jnp.dtype:
    """ "auto" is float32 on CPU and bfloat16 elsewhere; otherwise float32 or bfloat16 by name or as a dtype."""
    if isinstance(dtype, str) and dtype == "auto":
        return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):  # numpy's parser of dtype strings raises all of them
        name = ""
    if name not in DTYPES:
        raise ValueError(f"dtype: got {dtype!r}, allowed are 'auto', 'float32' and 'bfloat16'")
    return jnp.dtype(DTYPES[name])


def flat_leaves(params: Any) -> dict[tuple, Any]:
    """Parameter path -> array, paths as in `params.py`."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(params))[0]:
        out[tuple(key.key if hasattr(key, "key") else key.idx for key in path)] = leaf
    return out


def make_target(config: Glm5Config, *, dtype: Any = "auto", seed: int = 0, scan: bool = True) -> Target:
    """A target with random weights, for tests, training and benchmarks of shapes."""
    module = Glm5(config, dtype=resolve_dtype(dtype), rngs=nnx.Rngs(seed), scan=scan)
    return Target(config, *nnx.split(module))


def make_drafter(config: DFlashConfig, target: Target, *, seed: int = 0) -> Drafter:
    """A drafter with random weights for `target`."""
    check_pair(config, target.config, "drafter")
    module = DFlash(config, dtype=target.dtype, rngs=nnx.Rngs(seed), target_hidden_size=target.config.hidden_size)
    return Drafter(config, *nnx.split(module))


def load_target(
    path: str | Path,
    *,
    dtype: Any = "auto",
    mesh: Any = None,
    progress: Progress | None = None,
    scan: bool = True,
) -> Target:
    """Loads an HF-format GLM-5 folder.

    Args:
      path: folder with config.json and safetensors.
      dtype: "auto" (float32 on CPU, bfloat16 on GPU), "float32" or "bfloat16".
      mesh: only None in this version (one device).
      progress: called with a line of text now and then.
      scan: whether layers of one kind run as a loop, so that compile time does not grow with depth; False unrolls
        them, which trains faster and decodes slower.

    Raises:
      CheckpointError: what is missing or does not fit, before any device work.
    """
    return open_target(path, dtype=dtype, mesh=mesh, scan=scan).read(progress)


def load_drafter(
    path: str | Path,
    target: Target,
    *,
    dtype: Any = "auto",
    mesh: Any = None,
    progress: Progress | None = None,
) -> Drafter:
    """Loads an HF-format DFlash folder for `target`; arguments as for `load_target`.

    Raises `CheckpointError` if the drafter was made for another target: tap layers, width, vocabulary, mask token.
    """
    chosen = target.dtype if isinstance(dtype, str) and dtype == "auto" else dtype
    return open_drafter(path, target.config, dtype=chosen, mesh=mesh).read(progress)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A folder whose config and headers have been checked, and of whose weights nothing has been read yet."""

    config: Glm5Config | DFlashConfig
    folder: Path
    kind: type[Target] | type[Drafter]
    reader: CheckpointReader
    specs: Callable[[], Iterable[TensorSpec]]
    build: Callable[..., Any]

    def read(self, progress: Progress | None = None) -> Any:
        """The `Target` or `Drafter`."""
        graphdef, params = _load(self.build, self.reader, list(self.specs()), self.folder, progress)
        return self.kind(self.config, graphdef, params, self.folder)


def open_target(path: str | Path, *, dtype: Any = "auto", mesh: Any = None, scan: bool = True) -> Opened:
    """Checks a target folder as `load_target` does and reads no weights."""
    _one_device(mesh)
    resolved, folder = resolve_dtype(dtype), Path(path)
    _require_folder(folder)
    config = _with_context(folder, Glm5Config.from_hf)
    config = dataclasses.replace(config, eos_token_ids=_generation_eos(folder, config))
    reader = CheckpointReader(folder)
    specs = functools.partial(target_tensors, config, scan=scan)
    reader.check(specs())  # lazily: before a wrong config becomes a long list or an array
    build = functools.partial(Glm5, config, dtype=resolved, scan=scan)
    return Opened(config, folder, Target, reader, specs, build)


def open_drafter(path: str | Path, target: Glm5Config, *, dtype: Any = "auto", mesh: Any = None) -> Opened:
    """Checks a drafter folder, and that it fits the target, as `load_drafter` does, and reads no weights."""
    _one_device(mesh)
    resolved, folder = resolve_dtype(dtype), Path(path)
    _require_folder(folder)
    config = _with_context(folder, DFlashConfig.from_hf)
    check_pair(config, target, str(folder))
    reader = CheckpointReader(folder)
    _no_own_head(folder, reader)
    _no_unused_parts(config, reader)
    specs = functools.partial(drafter_tensors, config, target.hidden_size)
    reader.check(specs())
    build = functools.partial(DFlash, config, dtype=resolved, target_hidden_size=target.hidden_size)
    return Opened(config, folder, Drafter, reader, specs, build)


def save_target(target: Target, folder: str | Path, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json, generation_config.json and the weights (router and selection bias stay float32)."""
    folder, config = Path(folder), target.config
    scan = target.module().plan == layer_plan(config)
    save_leaves(folder, target_tensors(config, scan=scan), flat_leaves(target.params), dtype=jnp.dtype(dtype))
    write_json(folder / "config.json", config.to_hf() | {"dtype": jnp.dtype(dtype).name})
    ids = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
    write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})


def save_drafter(drafter: Drafter, target: Target, folder: str | Path, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json and the weights of a drafter."""
    specs = drafter_tensors(drafter.config, target.config.hidden_size)
    save_leaves(Path(folder), specs, flat_leaves(drafter.params), dtype=jnp.dtype(dtype))
    write_json(Path(folder) / "config.json", drafter.config.to_hf() | {"dtype": jnp.dtype(dtype).name})


def check_pair(drafter: DFlashConfig, target: Glm5Config, name: str) -> None:
    """Raises `CheckpointError` naming the first thing in which a drafter does not fit a target."""

    def require(ok: bool, what: str, found: Any, expected: Any) -> None:
        if not ok:
            raise CheckpointError(f"{name}: made for another target: {what} {found}, the target has {expected}")

    require(drafter.hidden_size == target.hidden_size, "hidden_size", drafter.hidden_size, target.hidden_size)
    require(drafter.vocab_size == target.vocab_size, "vocab_size", drafter.vocab_size, target.vocab_size)
    layers, taps = target.num_hidden_layers, drafter.target_layer_ids
    require(max(taps) < layers, "target_layer_ids", list(taps), f"layers 0..{layers - 1}")
    count = drafter.num_target_layers
    require(count is None or count == layers, "num_target_layers", count, layers)
    mask = drafter.mask_token_id
    require(mask not in target.eos_token_ids, "mask_token_id", mask, f"end tokens {list(target.eos_token_ids)}")


def _no_own_head(folder: Path, reader: CheckpointReader) -> None:
    """A drafter with a head or an embedding of its own would run with the target's and accept next to nothing."""
    for name in reader.entries:
        if name.removeprefix("model.") in ("lm_head.weight", "embed_tokens.weight"):
            raise CheckpointError(
                f"{folder}: tensor {name!r}: a drafter with its own lm_head or embed_tokens is not supported; "
                "expected one that borrows the target's"
            )


def _no_unused_parts(config: DFlashConfig, reader: CheckpointReader) -> None:
    """DFlash2 weights under a config without its keys would run as DFlash v1 and draft badly."""
    unused = {".attention_conv.": "conv_kernel_size", ".mlp_conv.": "conv_kernel_size"} if config.conv is None else {}
    if config.selector is None:
        unused["candidate_selector."] = "selector_rank"
    for name, entry in reader.entries.items():
        for part, key in unused.items():
            if part in name:
                raise CheckpointError(
                    f"{entry.file}: tensor {name!r}: belongs to a DFlash2 drafter, but config.json has no {key!r}; "
                    "expected a DFlash2 config, or weights without this tensor"
                )


def _one_device(mesh: Any) -> None:
    if mesh is not None:
        raise ValueError(f"mesh: got {mesh!r}, this version runs on one device; allowed is None")


def _require_folder(folder: Path) -> None:
    if not is_folder(folder):
        raise CheckpointError(f"{folder}: no such folder; expected an HF-format checkpoint folder")


def _with_context(folder: Path, parse: Callable[[Any], Any]) -> Any:
    path = folder / "config.json"
    content = read_json(path)
    try:
        return parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _generation_eos(folder: Path, config: Glm5Config) -> tuple[int, ...]:
    """End tokens: generation_config.json if it names any, else config.json."""
    path = folder / "generation_config.json"
    if not path.exists():
        return config.eos_token_ids
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: found {type(content).__name__}, expected an object")
    ids = content.get("eos_token_id")
    if ids is None:
        return config.eos_token_ids
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and 0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(f"{path}: eos_token_id {ids}, expected token ids in [0, {config.vocab_size})")
    return tuple(ids)


def _load(
    build: Callable[..., Any],
    reader: CheckpointReader,
    specs: list[TensorSpec],
    folder: Path,
    progress: Progress | None,
) -> tuple[nnx.GraphDef, Any]:
    say = progress or (lambda message: None)
    say(f"loading {folder.name}: {len(specs)} tensors")
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
    arrays = load_leaves(reader, specs, flat_leaves(abstract), progress)
    pure = nnx.to_pure_dict(abstract)
    nnx.replace_by_pure_dict(abstract, _replaced(pure, arrays, ()))
    say(f"loaded {folder.name}: {sum(a.nbytes for a in arrays.values()) / 1e6:.1f} MB")
    return graphdef, abstract


def _replaced(node: Any, arrays: dict[tuple, np.ndarray], path: tuple) -> Any:
    if isinstance(node, dict):
        return {key: _replaced(value, arrays, (*path, key)) for key, value in node.items()}
    return jnp.asarray(arrays[path])


@functools.partial(jax.jit, static_argnames=("graphdef", "layer_ids", "with_logits"))
def _full_forward(
    graphdef: nnx.GraphDef, params: Any, token_ids: jax.Array, layer_ids: tuple[int, ...], with_logits: bool
) -> tuple[jax.Array | None, jax.Array]:
    module = nnx.merge(graphdef, params)
    b, t = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    out = module(token_ids, positions, causal_mask(b, t), layer_ids=layer_ids, keep_rows=False)
    return module.logits(out.hidden) if with_logits else None, out.features


def _checked_ids(target: Target, token_ids: Any) -> jax.Array:
    try:  # in NumPy first: JAX would wrap an id beyond 32 bits silently
        ids = np.asarray(token_ids)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"token_ids: got no array ({error}), allowed is int[B, T] with B, T >= 1") from None
    if ids.ndim != 2 or 0 in ids.shape or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token_ids: got {ids.dtype}{list(ids.shape)}, allowed is int[B, T] with B, T >= 1")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.config.vocab_size:
        raise ValueError(f"token_ids: got ids in [{low}, {high}], allowed are [0, {target.config.vocab_size})")
    return jnp.asarray(ids, jnp.int32)


def target_logits(target: Target, token_ids: Any) -> jax.Array:
    """float32[B, T, V]: next-token logits of a full causal forward without cache. token_ids: int[B, T]."""
    return _full_forward(target.graphdef, target.params, _checked_ids(target, token_ids), (), True)[0]


def target_features(target: Target, token_ids: Any, layer_ids: tuple[int, ...] | list[int]) -> jax.Array:
    """[B, T, len(layer_ids) * D]: the residual stream after each listed 0-based layer, the last one before its norm."""
    ids, allowed = _checked_ids(target, token_ids), target.config.num_hidden_layers
    try:
        layers = tuple(operator.index(i) for i in layer_ids)
        ok = all(0 <= i < allowed for i in layers) and len(set(layers)) == len(layers)
    except TypeError:
        ok = False
    if not ok:
        raise ValueError(f"layer_ids: got {layer_ids!r}, allowed are distinct layers in [0, {allowed})")
    return _full_forward(target.graphdef, target.params, ids, layers, False)[1]


def draft_logits(drafter: Drafter, target: Target, token_ids: Any) -> jax.Array:
    """float32[B, L, V]: what the drafter proposes after `token_ids` int[B, T].

    The first T - 1 tokens are the context, the last is the root; row r predicts the token at position T + r. Of a
    DFlash2 drafter: the logits before its candidate selector.
    """
    return _drafted(propose, drafter, target, token_ids)


def draft_pairs(drafter: Drafter, target: Target, token_ids: Any) -> PairProposal:
    """What the candidate selector of a DFlash2 drafter makes of `draft_logits`; arguments as there.

    Raises ValueError for a drafter without a selector.
    """
    if drafter.config.selector is None:
        raise ValueError("drafter: got a DFlash drafter without a candidate selector, allowed is a DFlash2 drafter")
    return _drafted(propose_pairs, drafter, target, token_ids)


def _drafted(proposal: Callable[..., Any], drafter: Drafter, target: Target, token_ids: Any) -> Any:
    check_pair(drafter.config, target.config, "drafter")
    ids = _checked_ids(target, token_ids)
    features = target_features(target, ids, drafter.config.target_layer_ids)[:, :-1]
    return _draft(proposal, drafter.graphdef, drafter.params, target.graphdef, target.params, features, ids[:, -1])


@functools.partial(jax.jit, static_argnames=("proposal", "graphdef", "target_graphdef"))
def _draft(
    proposal: Callable[..., Any],
    graphdef: nnx.GraphDef,
    params: Any,
    target_graphdef: nnx.GraphDef,
    target_params: Any,
    features: jax.Array,
    root_token_ids: jax.Array,
) -> Any:
    drafter = nnx.merge(graphdef, params)
    b, m, _ = features.shape
    positions = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (b, m))
    rows = drafter.context_rows(features, positions)
    cache = Cache(rows=rows, lengths=jnp.full((b,), m, jnp.int32))
    return proposal(drafter, nnx.merge(target_graphdef, target_params), cache, root_token_ids)


def propose(drafter: DFlash, target: Glm5, cache: Cache, root_token_ids: jax.Array) -> jax.Array:
    """float32[B, L, V] for roots int32[B] over a context cache: block [root, mask, ...] through drafter and head."""
    return _hidden_and_logits(drafter, target, cache, root_token_ids)[1]


def propose_pairs(drafter: DFlash, target: Glm5, cache: Cache, root_token_ids: jax.Array) -> PairProposal:
    """As `propose`, through the drafter's candidate selector, which it must have."""
    return drafter.selector(*_hidden_and_logits(drafter, target, cache, root_token_ids), root_token_ids)


def _hidden_and_logits(
    drafter: DFlash, target: Glm5, cache: Cache, root_token_ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
    chex.assert_rank(root_token_ids, 1)
    c = drafter.config
    mask = jnp.full((root_token_ids.shape[0], c.draft_depth), c.mask_token_id, jnp.int32)
    block = jnp.concatenate([root_token_ids[:, None], mask], axis=1)
    hidden = drafter.draft(cache, target.embed_tokens(block))
    return hidden, drafter.scale_logits(target.head_logits(hidden))
