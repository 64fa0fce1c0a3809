"""Makes a loaded model run on GPU kernels: lays packed weights out for them, and tells its modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.models.linear import GridKernel, Linear, PackedKernel
from ddtree_jax.models.moe import MoE
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.nvfp4_grid import BYTES, SHIFTED, make_grid


def with_kernels(model: Any, choice: KernelChoice, *, free: bool = False) -> Any:
    """A target or drafter whose modules run on `choice`.

    Args:
      model: a `Target` or `Drafter` with its weights.
      choice: one without kernels gives the model back as it is.
      free: deletes each packed weight of `model` once it is laid out anew, so that not all are there twice; `model`
        cannot be used afterwards.

    The result computes the same function; it cannot be saved, since its weights are no longer in a checkpoint's form.
    """
    if not choice.any:
        return model
    module = model.module()
    for _, node in list(nnx.iter_modules(module)):
        old: tuple[PackedKernel, ...] = ()
        if isinstance(node, Linear) and isinstance(node.kernel, PackedKernel):
            old, node.kernel = (node.kernel,), _linear_grid(node, choice)
        if isinstance(node, MoE) and isinstance(node.gate_up, PackedKernel) and isinstance(node.down, PackedKernel):
            old = (node.gate_up, node.down)
            node.gate_up, node.down = _expert_grids(node, choice)
        for array in (array for kernel in old for array in _arrays(kernel) if free):
            array.delete()
        if hasattr(node, "kernels"):
            node.kernels = choice
    graphdef, params = nnx.split(module)
    return dataclasses.replace(model, graphdef=graphdef, params=params)


def _linear_grid(linear: Linear, choice: KernelChoice) -> GridKernel:
    codes, scales, factor = _arrays(linear.kernel)
    if len(linear.letters) == 1:  # [.., in, out] -> [.., in, 1, out]
        codes, scales, factor = (jnp.expand_dims(a, -2) for a in (codes, scales, factor))
    stacked = codes.ndim == 4
    return _grid(codes, scales, factor[..., 0, :, 0], stacked, choice)


def _expert_grids(moe: MoE, choice: KernelChoice) -> tuple[GridKernel, GridKernel]:
    gate_up, down = _arrays(moe.gate_up), _arrays(moe.down)
    stacked = down[0].ndim == 4
    if moe.dense:  # [.., D, 2, E, I] -> [.., E, D, 2, I]
        gate_up = tuple(jnp.moveaxis(a, -2, -4) for a in gate_up)
    down = tuple(jnp.expand_dims(a, -2) for a in down)  # [.., E, I, D] -> [.., E, I, 1, D]
    grids = [_grid(c, s, f[..., 0, :, 0], stacked, choice) for c, s, f in (gate_up, down)]
    return grids[0], grids[1]


def _arrays(kernel: PackedKernel) -> tuple[jax.Array, jax.Array, jax.Array]:
    return kernel.codes[...], kernel.scales[...], kernel.global_scale[...]


def _grid(codes: jax.Array, scales: jax.Array, factor: jax.Array, stacked: bool, choice: KernelChoice) -> GridKernel:
    arrangement = BYTES if choice.platform.converts_fp4 else SHIFTED
    weight = make_grid(codes, scales, factor, arrangement=arrangement)
    layer = jnp.arange(codes.shape[0], dtype=jnp.int32) if stacked else None
    return GridKernel(weight, layer, choice)
