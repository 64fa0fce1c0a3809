"""Makes a loaded model run on GPU kernels: lays packed weights out for them, keeps plain ones whole, tells modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.folders import drafter_sharding, target_sharding
from ddtree_jax.models.linear import GridKernel, LayerKernel, Linear, PackedKernel, grid_specs
from ddtree_jax.models.moe import MoE
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.nvfp4_grid import BYTES, SHIFTED, GridWeight, make_grid


def with_kernels(model: Any, choice: KernelChoice, *, free: bool = False) -> Any:
    """A target or drafter whose modules run on `choice`.

    Args:
      model: a `Target` or `Drafter` with its weights.
      choice: one without kernels gives the model back as it is.
      free: deletes each packed weight of `model` once it is laid out anew, so that not all are there twice; `model`
        cannot be used afterwards.

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
        if isinstance(node, Linear) and isinstance(node.kernel, PackedKernel):
            node.kernel = lay(node.kernel, (*path, "kernel"), _LINEAR[len(node.letters)])
        elif isinstance(node, Linear) and _is_stacked(node):
            values = node.kernel[...]
            axes = () if place is None else _axes(place, (*path, "kernel"), values)[1:]
            node.kernel = LayerKernel(values, _indices(values.shape[0], model.mesh), choice, axes)
        if isinstance(node, MoE) and isinstance(node.gate_up, PackedKernel) and isinstance(node.down, PackedKernel):
            node.gate_up = lay(node.gate_up, (*path, "gate_up"), _BY_WIDTH if node.dense else _BY_EXPERT)
            node.down = lay(node.down, (*path, "down"), _DOWN)
        if hasattr(node, "kernels"):
            node.kernels = choice
    graphdef, params = nnx.split(module)
    return dataclasses.replace(model, graphdef=graphdef, params=params)


Place = Callable[[tuple, tuple[int, ...]], NamedSharding]


def _is_stacked(linear: Linear) -> bool:
    """Whether the kernel, a plain parameter, has an axis of layers in front of [in, *out]."""
    return isinstance(linear.kernel, nnx.Param) and linear.kernel.ndim > 1 + len(linear.letters)


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
    named = {"codes": kernel.codes[...], "scales": kernel.scales[...], "global_scale": kernel.global_scale[...]}
    arrangement = BYTES if choice.platform.converts_fp4 else SHIFTED
    if place is None:
        axes, specs = (None, None, None), None
    else:
        found = {name: _axes(place, (*path, name), array) for name, array in named.items()}
        axes = tuple(None if at is None else found["codes"][at] for at in form.axes)
        specs = tuple(PartitionSpec(*own) for own in found.values())
    weight = _laid_out(*named.values(), form=form, arrangement=arrangement, axes=axes, specs=specs, mesh=choice.mesh)
    for array in named.values() if free else ():
        array.delete()
    stacked = len(weight.lead) > (form.axes[0] is not None)
    layer = _indices(weight.lead[0], choice.mesh) if stacked else None
    return GridKernel(weight, layer, choice, axes)


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
