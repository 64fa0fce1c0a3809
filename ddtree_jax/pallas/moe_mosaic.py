"""Routed NVFP4 experts on the kernel of `nvfp4_mosaic`: two grouped products that read each chosen expert once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.pallas import nvfp4_mosaic
from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.moe_tiles import combine, make_tiles
from ddtree_jax.pallas.nvfp4_grid import GridWeight, num_parts
from ddtree_jax.pallas.nvfp4_mosaic_kernel import Schedule

# Slots of a tile: the fewest of these that hold 1.75 times what an expert gets on average, so that few are read twice.
_TILE_ROWS = (8, 16, 32, 64)


def tile_rows(pairs: int, num_experts: int, dtype: Any) -> int:
    """Slots of a tile for so many pairs of row and expert under even routing."""
    # Two steps of 64 float32 rows, three bfloat16 terms each, do not fit into shared memory.
    choices = _TILE_ROWS[:-1] if num_parts(dtype) > 1 else _TILE_ROWS
    return next((rows for rows in choices if 4 * rows * num_experts >= 7 * pairs), choices[-1])


def run_mosaic(
    x: jax.Array, expert_ids: jax.Array, weights: jax.Array, gate_up: GridWeight, down: GridWeight, layer: jax.Array,
    *, platform: Platform, rows: int | None = None, schedules: tuple[Schedule | None, Schedule | None] = (None, None),
    interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """float32[M, D]. Arguments as `moe.moe_reference` has them, of stacks; layer: int32[1].

    rows: slots of a tile, a multiple of 8; schedules: of both products; None: chosen.
    """
    num_experts = gate_up.words.shape[1]
    if rows is None:
        rows = tile_rows(expert_ids.size, num_experts, x.dtype)
    groups = make_tiles(expert_ids, num_experts, rows)
    used = jnp.sum(groups.experts < num_experts, dtype=jnp.int32).reshape(1)
    # Empty slots take row 0: what becomes of it is not used.
    given = jnp.take(x, jnp.maximum(groups.rows, 0), axis=0)
    common: dict[str, Any] = {"platform": platform, "interpret": interpret}
    h = nvfp4_mosaic.product(
        given, gate_up, layer, groups.experts, used, swiglu=True, out_dtype=x.dtype, schedule=schedules[0], **common
    )
    y = nvfp4_mosaic.product(
        h, down, layer, groups.experts, used, swiglu=False, out_dtype=jnp.float32, schedule=schedules[1], **common
    )
    return combine(y, groups.slots, weights)[:, : down.width]
