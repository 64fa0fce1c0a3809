"""Makes a loaded model run on GPU kernels: lays packed weights out for them, keeps plain ones whole, tells modules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.models.linear import GridKernel, LayerKernel, Linear, PackedKernel
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

    Raises:
      ValueError: kernels for a model over a mesh.
    """
    if not choice.any:
        return model
    if model.mesh is not None:
        raise ValueError("choice: got kernels for a model over a mesh; allowed there is KernelChoice(), plain JAX")
    module = model.module()
    for _, node in list(nnx.iter_modules(module)):
        if isinstance(node, Linear) and isinstance(node.kernel, PackedKernel):
            node.kernel = _grid(node.kernel, _LINEAR[len(node.letters)], 0, choice, free)
        elif isinstance(node, Linear) and _is_stacked(node):
            node.kernel = LayerKernel(node.kernel[...], choice)
        if isinstance(node, MoE) and isinstance(node.gate_up, PackedKernel) and isinstance(node.down, PackedKernel):
            node.gate_up = _grid(node.gate_up, _by_expert if node.dense else _as_is, 1, choice, free)
            node.down = _grid(node.down, _one_part, 1, choice, free)
        if hasattr(node, "kernels"):
            node.kernels = choice
    graphdef, params = nnx.split(module)
    return dataclasses.replace(model, graphdef=graphdef, params=params)


def _is_stacked(linear: Linear) -> bool:
    """Whether the kernel, a plain parameter, has an axis of layers in front of [in, *out]."""
    return isinstance(linear.kernel, nnx.Param) and linear.kernel.ndim > 1 + len(linear.letters)


def _as_is(array: jax.Array) -> jax.Array:
    return array


def _one_part(array: jax.Array) -> jax.Array:
    """[.., in, out] -> [.., in, 1, out]."""
    return jnp.expand_dims(array, -2)


def _by_expert(array: jax.Array) -> jax.Array:
    """[.., D, 2, E, I] -> [.., E, D, 2, I]."""
    return jnp.moveaxis(array, -2, -4)


_LINEAR = {1: _one_part, 2: _as_is}  # by how many output axes a kernel has


def _grid(
    kernel: PackedKernel, form: Callable[[jax.Array], jax.Array], own_axes: int, choice: KernelChoice, free: bool
) -> GridKernel:
    """form: brings the kernel's arrays to [.., in, parts, width]; own_axes: in front of these, without a stack's."""
    arrays = (kernel.codes[...], kernel.scales[...], kernel.global_scale[...])
    arrangement = BYTES if choice.platform.converts_fp4 else SHIFTED
    weight = _laid_out(*arrays, form=form, arrangement=arrangement)
    for array in arrays if free else ():
        array.delete()
    stacked = len(weight.lead) > own_axes
    layer = jnp.arange(weight.lead[0], dtype=jnp.int32) if stacked else None
    return GridKernel(weight, layer, choice)


@functools.partial(jax.jit, static_argnames=("form", "arrangement"))
def _laid_out(
    codes: jax.Array, scales: jax.Array, factor: jax.Array, *, form: Callable[[jax.Array], jax.Array], arrangement: str
) -> GridWeight:
    codes, scales, factor = map(form, (codes, scales, factor))
    return make_grid(codes, scales, factor[..., 0, :, 0], arrangement=arrangement)
