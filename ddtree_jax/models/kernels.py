"""Makes a loaded model run on GPU kernels: lays packed weights out or unpacks them, keeps plain ones whole, takes
routers apart into terms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.folders import Opened, drafter_sharding, target_sharding
from ddtree_jax.models.glm5 import MLA
from ddtree_jax.models.linear import (
    GridKernel,
    LayerHeads,
    LayerKernel,
    Linear,
    PackedKernel,
    grid_specs,
    kernel_arrays,
)
from ddtree_jax.models.moe import MoE, bfloat16_terms
from ddtree_jax.models.quant import dequantise
from ddtree_jax.models.sharding import PACKED_LEAVES
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.nvfp4_grid import GridWeight, make_grid

# Weights of one matrix, on one device, from which on it stays packed. Products of 17 rows with smaller ones took up to
# 3 us longer on an H200 than with bfloat16 weights, in Triton, where ordering the rows is a launch of its own.
PACKED_FROM = 1 << 24


def with_kernels(model: Any, choice: KernelChoice, *, free: bool = False, packed_from: int = PACKED_FROM) -> Any:
    """A target or drafter whose modules run on `choice`.

    Args:
      model: a `Target` or `Drafter` with its weights.
      choice: one without kernels gives the model back as it is.
      free: deletes each weight of `model` that is made anew in another form, so that not all are there twice; `model`
        cannot be used afterwards.
      packed_from: a packed linear layer with fewer weights on a device is unpacked, to its values in the model's dtype,
        and runs as plain ones do; 0: none is. Routed experts stay packed.

    The result computes the same function; it cannot be saved, since its weights are no longer in a checkpoint's form.
    Over a mesh every weight stays split as it is, and each device lays out its own part.
    """
    if not choice.any:
        return model
    choice = dataclasses.replace(choice, mesh=model.mesh)
    module = model.module()
    place = None
    if model.mesh is not None:
        sharding = target_sharding if isinstance(model.config, Glm5Config) else drafter_sharding
        place = sharding(model.config, model.mesh)
    lay = functools.partial(_grid, place=place, choice=choice, free=free)
    for path, node in list(nnx.iter_modules(module)):
        own = (*path, "kernel")
        if isinstance(node, Linear) and isinstance(node.kernel, PackedKernel):
            if _part_size((*own, "codes"), node.kernel.codes.shape, place) < packed_from:
                node.kernel = _plain(node.kernel, own, model.dtype, place=place, mesh=model.mesh, free=free)
            else:
                node.kernel = lay(node.kernel, own, _LINEAR[len(node.letters)])
        if isinstance(node, Linear) and _is_stacked(node.kernel, 1 + len(node.letters)):
            values = node.kernel[...]
            axes = () if place is None else _axes(place, own, values)[1:]
            node.kernel = LayerKernel(values, _indices(values.shape[0], model.mesh), choice, axes)
        if isinstance(node, MoE) and isinstance(node.gate_up, PackedKernel) and isinstance(node.down, PackedKernel):
            node.gate_up = lay(node.gate_up, (*path, "gate_up"), _BY_WIDTH if node.dense else _BY_EXPERT)
            node.down = lay(node.down, (*path, "down"), _DOWN)
        if isinstance(node, MoE) and _is_stacked(node.router, 2) and model.dtype == jnp.bfloat16:
            weights = node.router[...]
            terms = jax.jit(bfloat16_terms)(weights)
            node.router = LayerKernel(terms, _indices(terms.shape[0], model.mesh), choice)
            if free:
                weights.delete()
        for name in ("k_b", "v_b") if isinstance(node, MLA) else ():
            if _is_stacked(getattr(node, name), 3):
                values = getattr(node, name)[...]
                heads = None if place is None else _axes(place, (*path, name), values)[2]
                setattr(node, name, LayerHeads(values, _indices(values.shape[0], model.mesh), choice, heads))
        if hasattr(node, "kernels"):
            node.kernels = choice
    graphdef, params = nnx.split(module)
    return dataclasses.replace(model, graphdef=graphdef, params=params)


Place = Callable[[tuple, tuple[int, ...]], NamedSharding]


def leaves_on_kernels(opened: Opened) -> dict[tuple, jax.ShapeDtypeStruct]:
    """`Opened.leaves` with those that `with_kernels` unpacks or takes apart as it does; the others as they are."""
    leaves = opened.leaves
    for path in [path for path in leaves if path[-1] == "router" and _lead(path) and opened.dtype == jnp.bfloat16]:
        terms = jax.eval_shape(bfloat16_terms, leaves[path])
        leaves[path] = jax.ShapeDtypeStruct(terms.shape, terms.dtype, sharding=leaves[path].sharding)
    for path in [path for path in leaves if path[-2:] == ("kernel", "codes")]:
        codes = leaves[path]
        if _part_size(path, codes.shape, opened.shard) < PACKED_FROM:
            for name in PACKED_LEAVES:
                del leaves[*path[:-1], name]
            shape = tuple(n * (1 + (i == _lead(path))) for i, n in enumerate(codes.shape))
            leaves[path[:-1]] = jax.ShapeDtypeStruct(shape, opened.dtype, sharding=codes.sharding)
    return leaves


def _lead(path: tuple) -> int:
    """How many axes of layers a parameter has."""
    return int(path[0] == "stacks")


def _part_size(path: tuple, shape: tuple[int, ...], place: Place | None) -> int:
    """Weights of one layer's matrix on one device. path, shape: of the codes."""
    part = shape if place is None else place(path, shape).shard_shape(shape)
    return 2 * math.prod(part[_lead(path) :])


def _is_stacked(param: Any, axes: int) -> bool:
    """Whether it is a plain parameter with an axis of layers in front of its own."""
    return isinstance(param, nnx.Param) and param.ndim > axes


def _axes(place: Place, path: tuple, array: jax.Array) -> tuple[str | None, ...]:
    """The mesh axis of every axis of a parameter."""
    spec = tuple(place(path, array.shape).spec)
    return (*spec, *[None] * (array.ndim - len(spec)))


def _indices(count: int, mesh: Mesh | None) -> jax.Array:
    """int32[count], 0 and on, whole on every device."""
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda: jnp.arange(count, dtype=jnp.int32), out_shardings=whole)()


def _as_is(array: jax.Array) -> jax.Array:
    return array


def _one_part(array: jax.Array) -> jax.Array:
    """[.., in, out] -> [.., in, 1, out]."""
    return jnp.expand_dims(array, -2)


def _by_expert(array: jax.Array) -> jax.Array:
    """[.., D, 2, E, I] -> [.., E, D, 2, I]."""
    return jnp.moveaxis(array, -2, -4)


@dataclasses.dataclass(frozen=True)
class _Form:
    """A checkpoint's layout of a packed kernel.

    bring: its arrays to [.., in, parts, width].
    axes: those of experts (None: it has none), inputs and outputs in the arrays as they are, from the end.
    """

    bring: Callable[[jax.Array], jax.Array]
    axes: tuple[int | None, int, int]


_LINEAR = {1: _Form(_one_part, (None, -2, -1)), 2: _Form(_as_is, (None, -3, -1))}  # by the number of output axes
_BY_EXPERT, _BY_WIDTH = _Form(_as_is, (-4, -3, -1)), _Form(_by_expert, (-2, -4, -1))
_DOWN = _Form(_one_part, (-3, -2, -1))


def _grid(
    kernel: PackedKernel, path: tuple, form: _Form, *, place: Place | None, choice: KernelChoice, free: bool
) -> GridKernel:
    """path: of the kernel, for `place`, which says how its arrays are split; None: they are not."""
    arrays, specs = _placed(kernel, path, place)
    arrangement = choice.fp4_arrangement
    axes = (None,) * 3 if specs is None else tuple(None if at is None else tuple(specs[0])[at] for at in form.axes)
    weight = _laid_out(*arrays, form=form, arrangement=arrangement, axes=axes, specs=specs, mesh=choice.mesh)
    for array in arrays if free else ():
        array.delete()
    stacked = len(weight.lead) > (form.axes[0] is not None)
    layer = _indices(weight.lead[0], choice.mesh) if stacked else None
    return GridKernel(weight, layer, choice, axes)


def _plain(
    kernel: PackedKernel, path: tuple, dtype: jnp.dtype, *, place: Place | None, mesh: Mesh | None, free: bool
) -> nnx.Param:
    """path, place: as for `_grid`."""
    arrays, specs = _placed(kernel, path, place)
    values = _unpacked(*arrays, stacked=_lead(path) > 0, dtype=dtype, specs=specs, mesh=mesh)
    for array in arrays if free else ():
        array.delete()
    return nnx.Param(values)


def _placed(
    kernel: PackedKernel, path: tuple, place: Place | None
) -> tuple[tuple[jax.Array, ...], tuple[PartitionSpec, ...] | None]:
    """Codes, scales and global scale, and where they lie, with an entry for every axis."""
    arrays = kernel_arrays(kernel)
    if place is None:
        return arrays, None
    named = zip(PACKED_LEAVES, arrays, strict=True)
    return arrays, tuple(PartitionSpec(*_axes(place, (*path, name), array)) for name, array in named)


@functools.partial(jax.jit, static_argnames=("form", "arrangement", "axes", "specs", "mesh"))
def _laid_out(
    codes: jax.Array,
    scales: jax.Array,
    factor: jax.Array,
    *,
    form: _Form,
    arrangement: str,
    axes: tuple[str | None, str | None, str | None],
    specs: tuple[PartitionSpec, ...] | None,
    mesh: Mesh | None,
) -> GridWeight:
    """axes, specs: where a mesh is given, those of the `GridKernel` and the places of the three arrays."""

    def lay(codes: jax.Array, scales: jax.Array, factor: jax.Array) -> GridWeight:
        codes, scales, factor = map(form.bring, (codes, scales, factor))
        return make_grid(codes, scales, factor[..., 0, :, 0], arrangement=arrangement)

    if mesh is None:
        return lay(codes, scales, factor)
    parts = [
        jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)
        for spec, array in zip(specs, (codes, scales, factor), strict=True)
    ]
    places = grid_specs(jax.eval_shape(lay, *parts), axes)
    return jax.shard_map(lay, mesh=mesh, in_specs=specs, out_specs=places, check_vma=False)(codes, scales, factor)


@functools.partial(jax.jit, static_argnames=("stacked", "dtype", "specs", "mesh"))
def _unpacked(
    codes: jax.Array,
    scales: jax.Array,
    factor: jax.Array,
    *,
    stacked: bool,
    dtype: jnp.dtype,
    specs: tuple[PartitionSpec, ...] | None,
    mesh: Mesh | None,
) -> jax.Array:
    """[(R,) in, *out] in `dtype`. specs: with a mesh, the places of the three arrays; the result lies as the codes."""

    def unpack(*arrays: jax.Array) -> jax.Array:
        one = functools.partial(dequantise, axis=0, dtype=dtype)
        # One layer at a time, as `make_grid` does: what is between is wider than the result.
        return jax.lax.map(lambda layer: one(*layer), arrays) if stacked else one(*arrays)

    if mesh is not None:
        unpack = jax.shard_map(unpack, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return unpack(codes, scales, factor)
