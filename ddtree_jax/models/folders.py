"""Model folders: opening them checks configs and headers, reading them places the weights, saving them writes both."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ddtree_jax.checkpoint import save_leaves
from ddtree_jax.encodings import Stored, find, layer_number, left_out
from ddtree_jax.errors import CheckpointError
from ddtree_jax.hub import resolve
from ddtree_jax.loading import Meter, Progress, load_leaves
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.glm5 import Glm5, PackedKernels, layer_plan
from ddtree_jax.models.moe import DENSE_EXPERTS_LIMIT
from ddtree_jax.models.orbax_files import MANIFEST_NAME, Manifest, leaf_name, read_leaves, read_manifest
from ddtree_jax.models.pair import Drafter, Target, check_pair, flat_leaves, resolve_dtype
from ddtree_jax.models.params import TensorSpec, drafter_tensors, packed_kernels, target_tensors
from ddtree_jax.models.sharding import check_mesh, drafter_dims, leaf_sharding, target_dims
from ddtree_jax.safetensors_files import CheckpointReader, is_folder, read_json, shown, write_json


def load_target(
    path: str | Path,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    scan: bool = True,
) -> Target:
    """Loads a GLM-5 folder: HF format in any encoding of `encodings.Encoding`, or what `ddtree-jax convert` wrote.

    Args:
      path: folder with config.json and safetensors, or a converted one; or a repository id `owner/name` of the Hugging
        Face hub, found in its cache or downloaded (`hub.resolve`).
      dtype: "auto" (float32 on CPU, bfloat16 on GPU), "float32" or "bfloat16": of whatever is not packed NVFP4. A
        converted folder has one dtype: "auto" takes it, and another one raises ValueError.
      mesh: None for one device, or a mesh from `make_mesh`; each device reads only its part.
      progress: called with a line of text now and then.
      scan: whether layers of one kind run as a loop, so that compile time does not grow with depth; False unrolls
        them, which trains faster and decodes slower. A converted folder keeps the layout that it was saved with.

    Raises:
      CheckpointError: what is missing or does not fit, before any device work. Whether the memory suffices is for
        `ddtree_jax.load` to check.
    """
    return open_target(path, dtype=dtype, mesh=mesh, scan=scan).read(progress)


def load_drafter(
    path: str | Path,
    target: Target,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    progress: Progress | None = None,
) -> Drafter:
    """Loads an HF-format DFlash folder for `target`; arguments as for `load_target`, the mesh by default the target's.

    Raises `CheckpointError` if the drafter was made for another target: tap layers, width, vocabulary, mask token;
    ValueError on a mesh that is not the target's.
    """
    if mesh is None:
        mesh = target.mesh
    elif check_mesh(mesh) != target.mesh:
        raise ValueError(f"mesh: got {mesh!r}, allowed are None and the target's, which is {target.mesh!r}")
    return open_drafter(path, target.config, dtype=dtype, mesh=mesh, auto_dtype=target.dtype).read(progress)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A folder whose config and headers have been checked, and of whose weights nothing has been read yet; or a model
    that is only described (`describe_target`), which has none.

    stored: tensor name -> where and how it lies on disk.
    specs: the name map.
    build: makes the module, given `rngs`; its arguments are hashable.
    shard: (leaf path, shape) -> its sharding; None without a mesh.
    dtype: of whatever is neither packed nor always float32.
    ignored: what the folder holds beside the weights, in words.
    converted: the manifest of a converted folder, which has no `stored` tensors; None: an HF folder.
    """

    config: Glm5Config | DFlashConfig
    folder: Path
    kind: type[Target] | type[Drafter]
    specs: Callable[[], Iterable[TensorSpec]]
    build: functools.partial
    mesh: Mesh | None
    shard: Callable[[tuple, tuple[int, ...]], NamedSharding] | None
    dtype: jnp.dtype
    stored: Mapping[str, Stored] = dataclasses.field(default_factory=dict)
    ignored: str = ""
    converted: Manifest | None = None

    @functools.cached_property
    def abstract(self) -> tuple[nnx.GraphDef, Any]:
        """The static structure, and the parameter tree of shapes and dtypes."""
        return _abstract(self.build.func, self.build.args, tuple(self.build.keywords.items()))

    @property
    def leaves(self) -> dict[tuple, jax.ShapeDtypeStruct]:
        """path -> shape, dtype and sharding of every parameter leaf."""
        shard = self.shard or (lambda path, shape: None)
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shard(path, leaf.shape))
            for path, leaf in flat_leaves(self.abstract[1]).items()
        }

    @property
    def tree_states(self) -> bool:
        """As `Target.tree_states`."""
        return getattr(self.build.func, "tree_states", False)

    def checked(self) -> Opened:
        """Itself; `CheckpointError` if a manifest names other leaves than these."""
        if self.converted is not None:
            self.converted.check_leaves(self.folder, self.leaves)
        return self

    @property
    def bytes_on_disk(self) -> int:
        if self.converted is not None:
            return self.converted.bytes_on_disk
        return sum(tensor.num_bytes for tensor in self.stored.values())

    def bytes_per_device(self) -> int:
        """Bytes of parameters on the fullest device."""
        return leaf_bytes_per_device(self.leaves.values())

    def read(self, progress: Progress | None = None) -> Any:
        """The `Target` or `Drafter`. Raises ValueError on a mesh without devices, and where there are no weights."""
        if not self.stored and self.converted is None:
            raise ValueError(f"{self.folder}: described by its config alone, without weights to read; open a folder")
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(f"mesh: got {self.mesh!r}, allowed is a mesh of devices that are here")
        say = progress or (lambda message: None)
        graphdef, params = self.abstract
        name, leaves = self.folder.name, self.leaves
        if self.converted is None:
            say(f"loading {name}: {len(self.stored)} tensors{self.ignored}")
            meter = Meter(self.stored.values(), name, progress)
            arrays = load_leaves(self.specs(), self.stored, leaves, meter)
        else:
            say(f"loading {name}: {len(leaves)} arrays of a converted checkpoint")
            parts = {Path(leaf_name(path)): leaf.size * leaf.dtype.itemsize for path, leaf in leaves.items()}
            arrays = read_leaves(self.folder, leaves, Meter.of_parts(parts, "arrays", name, progress))
        say(f"loaded {self.folder.name}: {sum(a.nbytes for a in arrays.values()) / 1e6:.1f} MB")
        return self.kind(self.config, graphdef, with_arrays(params, arrays), self.folder, self.mesh)


def leaf_bytes_per_device(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes on the fullest device of leaves with their shardings."""
    total = 0
    for leaf in leaves:
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += math.prod(shape) * np.dtype(leaf.dtype).itemsize
    return total


@functools.lru_cache(maxsize=16)
def _abstract(
    module: type[nnx.Module], args: tuple[Any, ...], keywords: tuple[tuple[str, Any], ...]
) -> tuple[nnx.GraphDef, Any]:
    """Tracing a module's initialisers takes a second or more; loading the same shapes again need not wait for it."""
    return nnx.split(nnx.eval_shape(lambda: module(*args, **dict(keywords), rngs=nnx.Rngs(0))))


def with_arrays(params: Any, arrays: Mapping[tuple, jax.Array]) -> Any:
    """An abstract parameter tree with its leaves replaced; paths as in `flat_leaves`."""

    def replaced(node: Any, path: tuple) -> Any:
        if isinstance(node, dict):
            return {key: replaced(value, (*path, key)) for key, value in node.items()}
        return arrays[path]

    filled = jax.tree.map(lambda leaf: leaf, params)  # `Opened.abstract` stays as it is
    nnx.replace_by_pure_dict(filled, replaced(nnx.to_pure_dict(params), ()))
    return filled


def describe_target(
    config: Glm5Config,
    *,
    folder: Path = Path("target"),
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    scan: bool = True,
    packed: PackedKernels | None = None,
    **found: Any,
) -> Opened:
    """A target by its config, with what was found in its folder; without that it can be measured and not read.

    dtype: of whatever is neither packed nor float32 by nature.
    """
    mesh, dtype = check_mesh(mesh), jnp.dtype(dtype)
    return Opened(
        config=config,
        folder=folder,
        kind=Target,
        specs=functools.partial(target_tensors, config, scan=scan, packed=packed),
        build=functools.partial(Glm5, config, dtype=dtype, scan=scan, packed=packed, mesh=mesh),
        mesh=mesh,
        shard=None if mesh is None else target_sharding(config, mesh),
        dtype=dtype,
        **found,
    )


def describe_drafter(
    config: DFlashConfig,
    target: Glm5Config,
    *,
    folder: Path = Path("drafter"),
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    **found: Any,
) -> Opened:
    """The same for a drafter; `CheckpointError` if it does not fit the target."""
    check_pair(config, target, str(folder))
    mesh, dtype, width = check_mesh(mesh), jnp.dtype(dtype), target.hidden_size
    return Opened(
        config=config,
        folder=folder,
        kind=Drafter,
        specs=functools.partial(drafter_tensors, config, width),
        build=functools.partial(DFlash, config, dtype=dtype, target_hidden_size=width),
        mesh=mesh,
        shard=None if mesh is None else drafter_sharding(config, mesh),
        dtype=dtype,
        **found,
    )


def open_target(path: str | Path, *, dtype: Any = "auto", mesh: Mesh | None = None, scan: bool = True) -> Opened:
    """Checks a target folder as `load_target` does and reads no weights."""
    mesh = check_mesh(mesh)
    resolved, folder = resolve_dtype(dtype), _model_folder(path)
    converted = read_manifest(folder)
    config = read_target_config(folder)
    if converted is not None:
        converted.check_kind(folder, "target")
        resolved, packed, scan = converted.check_dtype(folder, dtype), converted.packed, converted.scan
        _check_packed(folder, config, packed)
        found = {"converted": converted}
    else:
        reader = CheckpointReader(folder)
        # Lazily: the first tensor that is missing tells before a wrong config becomes a long list.
        stored = {s.name: find(reader.entries, folder, s.name, s.shape) for s in target_tensors(config)}
        packed = packed_kernels(config, lambda name: stored[name].is_nvfp4)
        found = {"stored": stored, "ignored": _ignored(reader, stored, config.num_hidden_layers, with_mtp=True)}
    opened = describe_target(config, folder=folder, dtype=resolved, mesh=mesh, scan=scan, packed=packed, **found)
    return opened.checked()


def open_drafter(
    path: str | Path,
    target: Glm5Config,
    *,
    dtype: Any = "auto",
    mesh: Mesh | None = None,
    auto_dtype: Any = "auto",
) -> Opened:
    """Checks a drafter folder, and that it fits the target, as `load_drafter` does, and reads no weights.

    auto_dtype: what "auto" means for an HF folder: the target's dtype, if that is known.
    """
    mesh = check_mesh(mesh)
    auto = isinstance(dtype, str) and dtype == "auto"
    resolved, folder = resolve_dtype(auto_dtype if auto else dtype), _model_folder(path)
    converted = read_manifest(folder)
    config = with_context(folder, DFlashConfig.from_hf)
    check_pair(config, target, str(folder))
    if converted is not None:
        converted.check_kind(folder, "drafter")
        resolved = converted.check_dtype(folder, dtype)
        found = {"converted": converted}
    else:
        reader = CheckpointReader(folder)
        _no_own_head(folder, reader)
        _no_unused_parts(config, reader)
        specs = drafter_tensors(config, target.hidden_size)
        stored = {s.name: find(reader.entries, folder, s.name, s.shape) for s in specs}
        found = {"stored": stored, "ignored": _ignored(reader, stored, config.num_hidden_layers)}
    return describe_drafter(config, target, folder=folder, dtype=resolved, mesh=mesh, **found).checked()


def _check_packed(folder: Path, config: Glm5Config, packed: PackedKernels | None) -> None:
    """What a manifest says of packing must be sayable of this network before one is built by it."""
    names = () if packed is None else packed.layers
    can = packed_kernels(config, lambda name: True)
    if packed is not None and len(names) != config.num_hidden_layers:
        raise CheckpointError(
            f"{folder / MANIFEST_NAME}: packed: found {len(names)} layers, config.json has {config.num_hidden_layers}"
        )
    for layer, (own, allowed) in enumerate(zip(names, can.layers, strict=False)):
        unknown = next((name for name in own if name not in allowed), None)
        if unknown is not None or list(own) != sorted(set(own)):
            raise CheckpointError(
                f"{folder / MANIFEST_NAME}: packed: layer {layer} has {shown(list(own))}, expected some of "
                f"{', '.join(allowed)}, in this order"
            )


def target_sharding(config: Glm5Config, mesh: Mesh) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
    """(leaf path, shape) -> sharding of a target's parameters."""
    dense = config.n_routed_experts <= DENSE_EXPERTS_LIMIT
    return functools.partial(leaf_sharding, table=target_dims(config), mesh=mesh, dense_experts=dense)


def drafter_sharding(config: DFlashConfig, mesh: Mesh) -> Callable[[tuple, tuple[int, ...]], NamedSharding]:
    """(leaf path, shape) -> sharding of a drafter's parameters."""
    return functools.partial(leaf_sharding, table=drafter_dims(config), mesh=mesh)


def save_target(target: Target, folder: str | Path, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json, generation_config.json and the weights (router and selection bias stay float32).

    Kernels that are packed are written as they are, in the ModelOpt layout.
    """
    folder, config = Path(folder), target.config
    scan, packed = layout_of(target)
    specs = target_tensors(config, scan=scan, packed=packed)
    save_leaves(folder, specs, flat_leaves(target.params), dtype=jnp.dtype(dtype))
    write_target_config(config, folder, dtype)


def layout_of(target: Target) -> tuple[bool, PackedKernels | None]:
    """(whether layers of one kind are stacked, which kernels are packed): what decides where leaves lie."""
    module = target.module()
    return module.plan == layer_plan(target.config, packed=module.packed), module.packed


def write_target_config(config: Glm5Config, folder: Path, dtype: Any) -> None:
    """config.json and generation_config.json of a target."""
    write_json(folder / "config.json", config.to_hf() | {"dtype": jnp.dtype(dtype).name})
    ids = {"eos_token_id": list(config.eos_token_ids), "pad_token_id": config.pad_token_id}
    write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})


def save_drafter(drafter: Drafter, target: Target, folder: str | Path, *, dtype: Any = jnp.bfloat16) -> None:
    """Writes config.json and the weights of a drafter."""
    specs = drafter_tensors(drafter.config, target.config.hidden_size)
    save_leaves(Path(folder), specs, flat_leaves(drafter.params), dtype=jnp.dtype(dtype))
    write_json(Path(folder) / "config.json", drafter.config.to_hf() | {"dtype": jnp.dtype(dtype).name})


def _ignored(reader: CheckpointReader, stored: Mapping[str, Stored], layers: int, *, with_mtp: bool = False) -> str:
    """What a folder holds beside the weights, in words; a bias is refused, as it would belong to another network."""
    used = {name for tensor in stored.values() for name in tensor.names}
    bias = next((name for name in reader.entries if name.endswith(".bias") and _stands_for(name, stored)), None)
    if bias is not None:
        raise CheckpointError(
            f"{reader.entries[bias].file}: tensor {bias!r}: this network has no such bias; expected a checkpoint of "
            "GLM-5 or DFlash without it"
        )
    _no_further_layers(reader.entries, layers, with_mtp=with_mtp)
    counts = left_out(reader.entries, used, layers)
    named = ", ".join(f"{count} of {category}" for category, count in counts.items())
    return f"; left out: {named}" if named else ""


def _no_further_layers(entries: Mapping[str, Any], layers: int, *, with_mtp: bool) -> None:
    """A config with too few layers would silently load the beginning of a network.

    with_mtp: one more layer may follow, if it is the multi-token-prediction layer, which has an `eh_proj`.
    """
    is_mtp = with_mtp and any(name.startswith(f"model.layers.{layers}.eh_proj.") for name in entries)
    for name, entry in entries.items():
        number = layer_number(name)
        if number is not None and number >= layers + is_mtp:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r}: config.json has num_hidden_layers {layers}, expected no tensor of a "
                "later layer but those of one multi-token-prediction layer"
            )


def _stands_for(name: str, stored: Mapping[str, Stored]) -> bool:
    return name not in stored and f"{name.removesuffix('bias')}weight" in stored


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


def _model_folder(name: str | Path) -> Path:
    """The folder of a path or of a repository id."""
    folder = resolve(name)
    if not is_folder(folder):
        raise CheckpointError(f"{folder}: no such folder; expected an HF-format checkpoint folder")
    return folder


def with_context(folder: Path, parse: Callable[[Any], Any]) -> Any:
    """A folder's config.json, parsed; errors name the file."""
    path = folder / "config.json"
    content = read_json(path)
    try:
        return parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_target_config(folder: Path) -> Glm5Config:
    """config.json, with the end tokens of generation_config.json where that names any."""
    config = with_context(folder, Glm5Config.from_hf)
    path = folder / "generation_config.json"
    if not os.path.lexists(path):  # a dangling link is a broken download, not the absence of the file
        return config
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: found {type(content).__name__}, expected an object")
    ids = content.get("eos_token_id")
    if ids is None or ids == []:
        return config
    ids = ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and 0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(f"{path}: eos_token_id {ids}, expected token ids in [0, {config.vocab_size})")
    return dataclasses.replace(config, eos_token_ids=tuple(ids))
