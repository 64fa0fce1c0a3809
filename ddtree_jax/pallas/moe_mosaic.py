"""Routed NVFP4 experts on the Mosaic kernel of `nvfp4_mosaic`: two grouped products that read each chosen expert once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ddtree_jax.pallas import nvfp4_mosaic
from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.moe_tiles import combine, make_tiles
from ddtree_jax.pallas.nvfp4_grid import STEP, GridWeight
from ddtree_jax.pallas.nvfp4_mosaic import Schedule


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: slots of an expert's tile, a multiple of 8. gate_up, down: how the products are cut."""

    rows: int
    gate_up: Schedule
    down: Schedule


@functools.partial(jax.jit, static_argnames=("tiles", "platform"))
def run(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, gate_up: GridWeight, down: GridWeight, layer: jax.Array,
    tiles: Tiles, platform: Platform,
) -> jax.Array:  # fmt: skip
    """float32[M, D]. Arguments as `moe.moe_reference`; layer: int32[1], of stacks."""
    num_experts = gate_up.words.shape[1]
    groups = make_tiles(expert_ids, num_experts, tiles.rows)
    count = jnp.sum(groups.experts < num_experts, dtype=jnp.int32).reshape(1)
    padded = jnp.pad(x, ((0, 0), (0, gate_up.num_steps * STEP - x.shape[1])))
    # Empty slots take row 0: what becomes of it is not used.
    rows = jnp.take(padded, jnp.maximum(groups.rows, 0), axis=0)
    routing = groups.experts, count
    h = nvfp4_mosaic.product(
        rows, gate_up, layer, *routing, swiglu=True, out_dtype=x.dtype, schedule=tiles.gate_up, platform=platform
    )
    h = jnp.pad(h, ((0, 0), (0, down.num_steps * STEP - h.shape[1])))
    y = nvfp4_mosaic.product(
        h, down, layer, *routing, swiglu=False, out_dtype=jnp.float32, schedule=tiles.down, platform=platform
    )
    return combine(y, groups.slots, weights)[:, : down.width]
