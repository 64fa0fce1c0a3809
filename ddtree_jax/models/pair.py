"""Targets and drafters as plain values: config, structure and parameters; and what they compute without a cache.

`graphdef` is static and hashable, `params` is a pytree: jitted functions take the two apart, so nothing in the
decoding code holds a Module.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.cache import Cache
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.dflash2 import PairProposal
from ddtree_jax.models.glm5 import Glm5, causal_mask

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class StaticModel:
    """The static half of a model: what a list of its parameter arrays is turned back into a module with.

    A static argument of a jitted function is hashed at each call, so the hash is computed once; and parameters go in as
    a plain list, because flattening a tree of Flax variables costs more than launching a round.
    """

    def __init__(self, graphdef: nnx.GraphDef, params: Any, mesh: Mesh | None = None):
        self.graphdef, self.mesh = graphdef, mesh
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
    """A loaded GLM-5 target. `module(params)` rebuilds the network inside a jitted function.

    mesh: over which the parameters lie; None: one device.
    """

    config: Glm5Config
    graphdef: nnx.GraphDef
    params: Any
    folder: Path | None = None
    mesh: Mesh | None = None

    @property
    def dtype(self) -> jnp.dtype:
        return flat_leaves(self.params)["embed",].dtype

    @functools.cached_property
    def static(self) -> StaticModel:
        return StaticModel(self.graphdef, self.params, self.mesh)

    @functools.cached_property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves(self.params)

    @functools.cached_property
    def tree_states(self) -> bool:
        """Whether its recurrent layers give every node of a tree the state of its parent: the module's own word."""
        return getattr(self.module(), "tree_states", False)

    def module(self, params: Any = None) -> Glm5:
        return nnx.merge(self.graphdef, self.params if params is None else params)


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    """A loaded DFlash drafter; it runs with the embedding table and the head of the target it was loaded for."""

    config: DFlashConfig
    graphdef: nnx.GraphDef
    params: Any
    folder: Path | None = None
    mesh: Mesh | None = None

    @functools.cached_property
    def static(self) -> StaticModel:
        return StaticModel(self.graphdef, self.params, self.mesh)

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
