"""`mla_attention` in Mosaic GPU for Hopper: tree attention of GLM-5's latent rows, 512 of rank and 64 of rope.

A block of threads takes 64 query rows (heads of one block row) and one split of the keys. Queries stay in shared
memory; a warpgroup copies tiles of 64 keys into two slots by TMA, and two warpgroups compute. Each of these holds half
of the output's columns, for 64 x 512 sums do not fit the registers of one. A tile is cut into the columns of the two
halves and the rope, so that products begin with the first piece and a piece is refilled as soon as its last reader is
done.

A call is short: at short contexts most of it goes to instructions that are not in their cache yet. So both computing
warpgroups share one body where they can, and what follows aims at few instructions as much as at short loops.

The tiles that need a mask or hold rows that nobody may read are few: the last one of a prefix, unless it is full, and
those of the block. They are copied like the others, with whatever lies behind the rows that count; their scores are
masked, and what no product may meet, as 0 * NaN is NaN, is cleaned from their values in shared memory. TMA reads tiles
that start at a multiple of eight rows of an array, so XLA pads the block, and its mask lies beside it. Parts of the
splits are merged by the Triton kernel that serves the other attention kernels; a single split writes the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, mosaic_interpreter, require_wgmma
from ddtree_jax.pallas.mla_mosaic_compute import (
    HALF,
    MASK,
    PIECES,
    RANK,
    ROPE,
    SLOTS,
    TILE,
    Compute,
    Schedule,
    barrier_of,
    piece_of,
    plain_tiles,
)
from ddtree_jax.pallas.split_attention import (
    LOG2_E,
    Tiles,
    cdiv,
    merge,
    num_splits,
    parts_shape,
    split_range,
)

_ALIGN = 8  # rows: the swizzled tiles that TMA copies; it would fill those of a tile cut in two with zeros


def check(q: Any, rank: int, scale: float, platform: Platform) -> None:
    """NotImplementedError for what the kernels do not serve."""
    require_wgmma(platform)
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dtype {q.dtype}: bfloat16 only")
    if (rank, q.shape[-1] - rank) != (RANK, ROPE):
        raise NotImplementedError(f"rank {rank} and rope {q.shape[-1] - rank}: {RANK} and {ROPE} only")
    if q.shape[2] % TILE or not q.shape[1]:
        raise NotImplementedError(f"{q.shape[1]} rows of {q.shape[2]} heads: a multiple of {TILE} heads only")
    if scale <= 0:
        raise NotImplementedError(f"scale {scale}: maxima are taken before it")


def mla_mosaic(
    q, cache, layer, lengths, new, mask, *, rank: int, scale: float, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.mla_attention` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    check(q, rank, scale, platform)
    if cache.shape[2] % _ALIGN:
        raise NotImplementedError(f"a cache of {cache.shape[2]} slots: a multiple of {_ALIGN} only")
    schedule = Schedule() if schedule is None else schedule
    b, t, heads, c = q.shape
    rows, block_tiles = t * heads, cdiv(t, TILE)
    tiles, splits = cut(q, cdiv(cache.shape[2], TILE) + block_tiles, schedule, platform)
    run = _kernel(
        batch=b, block=t, heads=heads, slots=cache.shape[2], splits=splits, tiles=tiles, schedule=schedule,
        scale=scale, interpret=mosaic_interpreter(platform, interpret),
    )  # fmt: skip
    block = _block_rows(new, mask, block_tiles)
    parts = run(
        layer.reshape(1), lengths, q.reshape(b * rows, c), cache.reshape(-1, c), block.reshape(-1, block.shape[-1])
    )
    return joined(parts, lengths, q, splits, tiles, platform, block_tiles)


def cut(q: jax.Array, key_tiles: int, schedule: Schedule, platform: Platform) -> tuple[Tiles, int]:
    """The tiles, and how many splits of the keys there are."""
    tiles = Tiles(TILE, TILE, TILE, num_warps=4, num_stages=1, splits=schedule.splits)
    query_tiles = math.prod(q.shape[:3]) // TILE
    return tiles, num_splits(tiles, query_tiles=query_tiles, key_tiles=key_tiles, platform=platform)


def joined(
    parts: tuple[jax.Array, ...], lengths: jax.Array, q: jax.Array, splits: int, tiles: Tiles, platform: Platform,
    block_tiles: int,
) -> jax.Array:  # fmt: skip
    """[B, T, H, rank] of what a kernel of `launch` has written; lengths: of the keys that are split."""
    values, *weights = parts
    (b, t, heads, _), result = q.shape, (*q.shape[:3], RANK)
    if not weights:
        return values.reshape(result)
    shape = parts_shape(splits, b, t * heads, RANK, values.dtype)
    parts = values.reshape(shape.values.shape), weights[0].reshape(shape.weights.shape)
    out = merge(lengths, parts, q.dtype, name="mla_merge", tiles=tiles, platform=platform, block_tiles=block_tiles)
    return out.reshape(result)


def _block_rows(new, mask, block_tiles: int) -> jax.Array:
    """[B, T up to a multiple of 8, C + block_tiles * 64]: rows of the block, and behind each its row of the mask as 0
    and 1.
    """
    t = new.shape[1]
    seen = jnp.pad(mask.astype(new.dtype), ((0, 0), (0, 0), (0, block_tiles * TILE - t)))
    return jnp.pad(jnp.concatenate([new, seen], axis=-1), ((0, 0), (0, -t % _ALIGN), (0, 0)))


def _kernel(
    *, batch: int, block: int, heads: int, slots: int, splits: int, tiles: Tiles, schedule: Schedule, scale: float,
    interpret: Any,
) -> Callable[..., tuple[jax.Array, jax.Array]]:  # fmt: skip
    """(layer [1], lengths [B], q [B * rows, C], cache [R * B * S, C], block of `_block_rows`) -> parts, or the result.

    Parts are those of `launch`.
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    query_tiles, block_tiles = block * heads // TILE, cdiv(block, TILE)
    whole = splits == 1
    block_rows = block + -block % _ALIGN

    def body(layer_ref, lengths_ref, q_ref, cache_ref, block_ref, values_ref, *weights_ref, shared):
        split, b = lax.axis_index("split"), lax.axis_index("batch")
        own = lax.axis_index("tile")
        length, layer = lengths_ref[b], layer_ref[0]
        span = split_range(length, split, tiles, splits, block_tiles)
        first = span.prefix[0] + span.block[0]
        steps = span.prefix[1] + span.block[1] - first
        prefix = cdiv(length, TILE)
        group = lax.axis_index("group")
        full = shared["full"]

        @pl.when(span.some)
        def _():
            @pl.when(group == 2)
            def _copy():
                plgpu.set_max_registers(schedule.registers[1], action="decrease")
                copy_queries(plgpu, q_ref, b * query_tiles + own, shared)
                cached = (layer * batch + b) * slots

                # Not just SLOTS: for a constant, LLVM takes the first tiles out of the loop.
                refill = first + jnp.minimum(steps, SLOTS)
                pairs = first + plain_tiles(first, length, steps) // 2 * 2

                def copy(step, carry):
                    slot = lax.rem(step - first, jnp.int32(SLOTS))
                    after = jnp.where(step >= pairs, 1, 0)
                    column = (step - prefix) * TILE  # of the block, where not negative

                    def rows(ref, row):
                        for name, (start, width) in PIECES.items():

                            @pl.when(step >= refill)
                            def _wait(name=name):
                                plgpu.barrier_wait(shared["free"].at[barrier_of(name, slot)])

                            plgpu.copy_gmem_to_smem(
                                ref.at[pl.ds(row, TILE), pl.ds(start, width)],
                                piece_of(shared["k"], name, slot),
                                full.at[barrier_of(name, slot, after)],
                            )

                    def cached_rows():
                        rows(cache_ref, cached + step * TILE)

                    def own_rows():
                        rows(block_ref, b * block_rows + column)
                        # Behind the waits above: who frees the keys has read the mask.
                        mask = block_ref.at[b * block_rows + own * TILE // heads, pl.ds(RANK + ROPE + column, TILE)]
                        plgpu.copy_gmem_to_smem(mask, shared[MASK].at[slot], full.at[barrier_of(MASK, slot, 1)])

                    lax.cond(column < 0, cached_rows, own_rows)
                    return carry

                lax.fori_loop(first, first + steps, copy, None)

            # One body for both: they share the instruction cache.
            @pl.when(group != 2)
            def _compute():
                plgpu.set_max_registers(schedule.registers[0], action="increase")
                compute = Compute(
                    plgpu, group, shared, first=first, length=length, block=block, scale=scale,
                    interpreted=interpret is not None,
                )  # fmt: skip
                part = 0 if whole else split * batch
                finish(compute, steps, (part + b) * query_tiles + own, values_ref, *weights_ref)

    shared = {MASK: plgpu.SMEM((SLOTS, TILE), jnp.bfloat16)}
    return launch(plgpu, body, (query_tiles, splits, batch), "mla_attention_mosaic", shared, interpret)


def launch(
    plgpu: Any, body: Callable[..., None], grid: tuple[int, int, int], name: str, shared: dict[str, Any], interpret: Any
) -> Callable[..., tuple[jax.Array, ...]]:
    """A kernel of three warpgroups that calls `finish`. grid: tiles of 64 queries of a sequence, splits, batch.

    It gives parts: values, bfloat16 [splits * B * rows, rank], and weights, float32 [splits * B * rows]; those of
    splits without tiles stay unwritten. Of one split there are values only, and they are the result.
    """
    count = math.prod(grid) * TILE
    weights = [] if grid[1] == 1 else [jax.ShapeDtypeStruct((count,), jnp.float32)]
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((count, RANK), jnp.bfloat16), *weights),
        grid=grid,
        grid_names=("tile", "split", "batch"),
        num_threads=3,
        thread_name="group",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=dict(shared={**scratch(plgpu), **shared}),
    )


def scratch(plgpu: Any) -> dict[str, Any]:
    """What `Compute` needs of shared memory."""
    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def pieces(leading: int) -> dict[str, Any]:
        shapes = {"halves": (leading, 2, TILE, HALF), "rope": (leading, TILE, ROPE)}
        return {name: plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms) for name, shape in shapes.items()}

    return {
        "q": pieces(1),
        "k": pieces(SLOTS),
        "asked": plgpu.Barrier(num_arrivals=len(PIECES)),
        "full": plgpu.Barrier(num_barriers=barrier_of(MASK, SLOTS, 1)),
        "free": plgpu.Barrier(num_barriers=len(PIECES) * SLOTS),
        "met": plgpu.Barrier(num_arrivals=2),
        "row": plgpu.SMEM((SLOTS, TILE), jnp.float32),
        "sums": plgpu.SMEM((2, TILE), jnp.float32),
        "ready": plgpu.Barrier(num_barriers=SLOTS),
    }


def copy_queries(plgpu: Any, q_ref: Any, tile: jax.Array, shared: dict[str, Any]) -> None:
    """Begins to copy 64 rows of q [rows, C], which `finish` waits for."""
    for name, (start, width) in PIECES.items():
        piece = q_ref.at[pl.ds(tile * TILE, TILE), pl.ds(start, width)]
        plgpu.copy_gmem_to_smem(piece, piece_of(shared["q"], name, 0), shared["asked"])


def finish(compute: Compute, steps: jax.Array, tile: jax.Array, values_ref: Any, weights_ref: Any = None) -> None:
    """Computes all tiles of keys and writes 64 rows of the parts, or of the result if there are no weights."""
    plgpu, shared, group = compute.plgpu, compute.shared, compute.which
    plgpu.barrier_wait(shared["asked"])
    acc, top, total = compute.run(steps)
    safe = jnp.where(total == 0.0, 1.0, total)
    acc = acc * lax.broadcast_in_dim(1.0 / safe, (TILE, HALF), [0])
    at = pl.ds(tile * TILE, TILE)
    out = shared["q"]["halves"].at[0, group]  # nobody needs the queries any more
    out[...] = acc.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out, values_ref.at[at, pl.ds(group * HALF, HALF)])
    if weights_ref is not None:

        @pl.when(group == 0)
        def _weights():
            weights_ref.at[at][...] = top + jnp.log(safe) * LOG2_E

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
