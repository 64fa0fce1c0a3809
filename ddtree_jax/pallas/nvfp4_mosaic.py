"""NVFP4 W4A16 products in Mosaic GPU for Hopper: weights on the 64-row side of wgmma, unpacked in registers.

One kernel (`nvfp4_mosaic_kernel`) serves linear layers and routed experts. Its work is cut into units: the rows of one
tile (of one expert) times `across` grid blocks of 64 columns. Blocks of threads, one a core, take units in turn; in
each a warpgroup copies steps of 256 inputs ahead, into the next unit too, and the others compute. A computing warpgroup
has one grid block (of gate and up, for SwiGLU, both) and every `depth`-th step; those of the same columns add their
sums through shared memory at the end of a unit.

A tile of packed weights lies in memory as the threads of a warpgroup need it (`nvfp4_grid.FRAGMENTS`): 16 bytes a
thread and 64 inputs, whose codes become registers of wgmma's left operand by shifts and masks. Activations are read as
they are: inputs keep their order.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, mosaic_interpreter, require_wgmma
from ddtree_jax.pallas.nvfp4_grid import FRAGMENTS, STEP, GridWeight, num_parts, split_float32
from ddtree_jax.pallas.nvfp4_matmul import check_arguments
from ddtree_jax.pallas.nvfp4_mosaic_kernel import SCALES, WORDS, Schedule, Units, kernel

TILE_ROWS = 8  # activation rows come in multiples of it
# Rows of a tile of a linear layer at most, by the number of bfloat16 terms: two steps of many more have no room in
# shared memory, and 64 take less than half as long as 128 (H200).
_MOST_TILE_ROWS = {1: 64, 3: 32}
MAX_ROWS = 512  # in one call; with more, unpacking the weight once for the call is cheaper
# Computing warpgroups of a block of threads: how much longer a tile takes a core than with the most (H200). More than
# three have too few registers each: ptxas then runs one product after the other.
_WORKERS = {1: 1.35, 2: 1.12, 3: 1.0}


def require(weight: GridWeight, platform: Platform) -> None:
    """NotImplementedError for what the kernel does not serve."""
    require_wgmma(platform)
    if weight.arrangement != FRAGMENTS:
        raise NotImplementedError(f"weights laid out as {weight.arrangement!r}: {FRAGMENTS!r} only")


def cut_rows(rows: int, terms: int) -> tuple[int, int]:
    """(tiles, rows of each) of a linear layer's rows, the last tile padded."""
    tiles = pl.cdiv(rows, _MOST_TILE_ROWS[terms])
    return tiles, pl.cdiv(pl.cdiv(rows, tiles), TILE_ROWS) * TILE_ROWS


def choose_schedule(units: Units, out_dtype: Any, platform: Platform) -> Schedule:
    """The one that gives the busiest core the fewest tiles of weights (benchmarks/RESULTS.md).

    Raises:
      NotImplementedError: the activations of two steps do not fit into shared memory.
    """
    cores = max(platform.cores, 1)

    def cost(schedule: Schedule) -> tuple[float, int]:
        waves = -(-units.tiles * (units.blocks // schedule.across) // cores)
        # To add their sums costs about two tiles.
        tiles = waves * (schedule.across * units.steps + 2 * (schedule.depth > 1))
        return tiles * _WORKERS[schedule.workers], schedule.workers

    candidates = [
        Schedule(across, depth)
        for across in _WORKERS
        for depth in _WORKERS
        if across * depth in _WORKERS and units.blocks % across == 0 and units.steps % depth == 0
    ]
    fitting = [one for one in candidates if units.slots(one, out_dtype)]
    if not fitting:
        raise NotImplementedError(f"{units.rows} rows: two steps of them do not fit into shared memory")
    return min(fitting, key=cost)


def nvfp4_matmul_mosaic(
    x: jax.Array, weight: GridWeight, layer: jax.Array | None = None, *, out_dtype: Any, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`nvfp4_matmul` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    check_arguments(x, weight, layer)
    require(weight, platform)
    rows = x.shape[0]
    if not 0 < rows <= MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; the kernel is made for 1 to {MAX_ROWS}")
    if layer is None:
        weight, layer = jax.tree.map(lambda a: a[None], weight), jnp.int32(0)
    out = product(
        x, weight, layer.reshape(1), swiglu=False, out_dtype=out_dtype, platform=platform, schedule=schedule,
        interpret=interpret,
    )  # fmt: skip
    return out[:rows].reshape(rows, weight.parts, -1)[:, :, : weight.width]


def product(
    x: jax.Array, weight: GridWeight, layer: jax.Array, experts: jax.Array | None = None, used: jax.Array | None = None,
    *, swiglu: bool, out_dtype: Any, platform: Platform, schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """Each tile of rows times the weight of its expert.

    Args:
      x: bfloat16 or float32 [tiles * rows, K], rows a multiple of 8, or of a linear layer any number in all.
      weight: a stack [R] of linear layers, or [R, E] of experts, in fragments.
      layer: int32[1].
      experts: int32[tiles]; None: a linear layer, whose rows are cut into tiles here.
      used: int32[1], how many tiles are in use, the first ones. The rows of the others stay unwritten.
      swiglu: of two parts, silu(first) * second.
      schedule, interpret: as for `nvfp4_matmul_mosaic`.

    Returns:
      [tiles * rows, columns] of `out_dtype`; rows and the columns of each part are padded to whole tiles and blocks.

    Raises:
      NotImplementedError: as `choose_schedule`.
    """
    parts, terms = 2 if swiglu else 1, num_parts(x.dtype)
    if experts is None:
        tiles, rows = cut_rows(x.shape[0], terms)
    else:
        tiles, rows = experts.shape[0], x.shape[0] // experts.shape[0]
    units = Units(
        rows=rows, terms=terms, tiles=tiles,
        experts=1 if experts is None else weight.words.shape[1], parts=parts, blocks=weight.num_blocks // parts,
        steps=weight.num_steps, routed=experts is not None,
    )  # fmt: skip
    if schedule is None:
        schedule = choose_schedule(units, out_dtype, platform)
    x = jnp.pad(x, ((0, tiles * rows - x.shape[0]), (0, weight.num_steps * STEP - x.shape[1])))
    given = jnp.stack(split_float32(x)) if terms > 1 else x[None]
    run = kernel(units, schedule, out_dtype, platform, mosaic_interpreter(platform, interpret))
    words, scales = weight.words.reshape(-1, *WORDS), weight.scales.reshape(-1, *SCALES)
    routing = () if experts is None else (experts, used)
    return run(layer, *routing, given, words, scales, weight.factors.reshape(-1))
