"""`gqa_attention` in Mosaic GPU for Hopper: tree attention of grouped heads of width 128.

A row tile is 64 query rows of a KV head: 64 / group block rows of each head of its group, one head behind the other,
as TMA can gather them from [B, T, Hq, 128]. A block of threads takes two row tiles and one split of the keys, so that
the keys are read once for 128 rows; for the last one of an odd number of row tiles its two computing warpgroups take
every other key tile of twice as long a split. A third warpgroup copies the tiles of keys and values.

Parts of the splits are merged by the Triton kernel that serves the other attention kernels: a merge through the shared
memory of a cluster of splits took 20 us on an H200 where that kernel takes 2.

The last tile of the prefix and those of the block are masked: rows of values that nobody may see, or that are not
finite, become zeros in shared memory, for 0 * NaN would spread them; scores of the latter become NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, mosaic_interpreter, require_wgmma
from ddtree_jax.pallas.gqa_mosaic_compute import KEYS, ROWS, WIDTH, Compute, Schedule, Sizes
from ddtree_jax.pallas.split_attention import Tiles, cdiv, merge, num_splits

_GROUPS = (1, 2, 4, 8)  # heads of a group: a row tile holds multiples of 8 rows of each
# Measured on an H200: tiles that the masked one of a block costs, and what a block of threads costs besides its own.
_BLOCK_WORK, _START_WORK = 2, 6


def _check(q: Any, k_cache: Any, scale: float, platform: Platform) -> None:
    require_wgmma(platform)
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dtype {q.dtype}: bfloat16 only")
    if q.shape[3] != WIDTH:
        raise NotImplementedError(f"head dim {q.shape[3]}: {WIDTH} only")
    group = q.shape[2] // (k_cache.shape[3] // WIDTH)
    if group not in _GROUPS:
        raise NotImplementedError(f"{group} query heads a KV head: {_GROUPS} only")
    if scale <= 0:
        raise NotImplementedError(f"scale {scale}: maxima are taken before it")
    if not q.shape[1]:
        raise NotImplementedError("a block without rows")
    if k_cache.shape[2] < KEYS:
        raise NotImplementedError(f"a cache of {k_cache.shape[2]} slots: {KEYS} or more only")


def gqa_mosaic(
    q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, *, scale: float, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.gqa_attention` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    schedule = Schedule() if schedule is None else schedule
    _check(q, k_cache, scale, platform)
    b, t, heads, _ = q.shape
    width = k_cache.shape[3]
    kv_heads, block_tiles = width // WIDTH, cdiv(t, KEYS)
    sizes, tiles = cut(Sizes(b, t, heads, kv_heads, k_cache.shape[2], 1), schedule, platform)
    splits = sizes.splits
    pad = cdiv(t, 8) * 8
    if platform.interpret:
        # TMA fills what lies beyond an array with zeros; the interpreter does not.
        pad = max(sizes.row_tiles * sizes.part, block_tiles * KEYS)
    seen = jnp.pad(mask.astype(q.dtype), ((0, 0), (0, 0), (0, block_tiles * KEYS - t)))
    block, firsts = (q.reshape(b, t, -1), new_k, new_v, seen), (0, 0, 0, 0)
    if pad != t:
        # TMA takes tiles of 8 rows, and there may be 17: one array of whole tiles, as each kernel costs a launch.
        whole = jnp.pad(jnp.concatenate(block, axis=-1), ((0, 0), (0, pad - t), (0, 0)))
        block, firsts = (whole,) * 4, (0, heads, heads + kv_heads, heads + 2 * kv_heads)
    run = _kernel(
        sizes=sizes, firsts=firsts, schedule=schedule, scale=scale, interpret=mosaic_interpreter(platform, interpret)
    )
    values, weights = run(layer.reshape(1), lengths, *block, k_cache.reshape(-1, width), v_cache.reshape(-1, width))
    parts = values.reshape(splits, b, -1, WIDTH), weights.reshape(splits, b, -1)
    out = merge(
        lengths, parts, q.dtype, name="gqa_merge", tiles=tiles, platform=platform, block_tiles=block_tiles,
        active=lambda length: jnp.int32(splits), rows=t * heads, place=sizes.place,
    )  # fmt: skip
    return out.reshape(b, t, heads, WIDTH)


def cut(sizes: Sizes, schedule: Schedule, platform: Platform) -> tuple[Sizes, Tiles]:
    """The sizes with the number of splits, and the tiles of the merge."""
    # What is chosen is the number of splits of a tile that is alone, or of a pair.
    each = 1 + sizes.row_tiles % 2
    tiles = Tiles(
        ROWS, KEYS, KEYS, num_warps=4, num_stages=1, min_tiles=1, start=_START_WORK, merge_rows=8,
        splits=None if schedule.splits is None else cdiv(schedule.splits, each),
    )  # fmt: skip
    blocks = dataclasses.replace(sizes, splits=each).units * sizes.kv_heads * sizes.batch
    key_tiles = cdiv(sizes.slots, KEYS) + cdiv(sizes.block, KEYS)
    chosen = num_splits(tiles, query_tiles=blocks, key_tiles=key_tiles // each, platform=platform, even=True)
    return dataclasses.replace(sizes, splits=each * chosen), tiles


def _kernel(
    *, sizes: Sizes, firsts: tuple[int, ...], schedule: Schedule, scale: float, interpret: Any
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(layer [1], lengths, queries, keys, values and mask of the block, caches [R * B * S, Hkv * 128]) -> parts.

    Values, bf16 [splits * B * Hkv * row tiles * 64, 128], and weights, float32 of the same rows. Arrays of the block
    are bf16 [B, T, ...] with whole tiles of 8 rows; `firsts`: where each begins in a row, in heads. The mask is 0 or 1.
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s, slots = sizes, schedule.slots
    block_tiles = cdiv(s.block, KEYS)

    def body(
        layer_ref, lengths_ref, q_ref, new_k_ref, new_v_ref, mask_ref, k_ref, v_ref, values_ref, weights_ref, shared
    ):
        unit, head, b = lax.axis_index("unit"), lax.axis_index("head"), lax.axis_index("batch")
        # Pairs of the same keys come first: those that run together read them from the L2 cache.
        paired = s.pairs * s.splits
        alone = unit >= paired
        split = jnp.where(alone, unit - paired, unit // max(s.pairs, 1))
        splits = jnp.where(alone, s.splits // 2, s.splits)
        length = lengths_ref[b]
        prefix_tiles = cdiv(length, KEYS)
        work = prefix_tiles + _BLOCK_WORK * block_tiles

        def begin(split):
            at = split * work // splits
            return jnp.minimum(at, prefix_tiles) + jnp.maximum(at - prefix_tiles, 0) // _BLOCK_WORK

        first = begin(split)
        steps = begin(split + 1) - first
        group = lax.axis_index("group")
        columns = pl.ds(head * WIDTH, WIDTH)

        def start_of(step):
            """Row of the prefix where a tile is read: the last one of the cache may overlap the one before."""
            return jnp.minimum(step * KEYS, s.slots - KEYS)

        def row_tile(which):
            return jnp.where(alone, s.row_tiles - 1, unit % max(s.pairs, 1) * 2 + which)

        @pl.when(group == 2)
        def _copy():
            plgpu.set_max_registers(schedule.registers[1], action="decrease")

            def gather(ref, columns, into, barrier):
                """The rows of each row tile, those of the first head of the group first."""
                for which in range(2):
                    at = pl.ds(row_tile(which) * s.part, s.part)
                    for g in range(s.group):
                        rows = into.at[which, pl.ds(g * s.part, s.part)]
                        plgpu.copy_gmem_to_smem(ref.at[b, at, columns(g)], rows, barrier)

            def queries(g):
                return pl.ds((firsts[0] + head * s.group + g) * WIDTH, WIDTH)

            gather(q_ref, queries, shared["q"], shared["asked"])
            cached = (layer_ref[0] * s.batch + b) * s.slots

            def copy(i, carry):
                slot, step = lax.rem(i, jnp.int32(slots)), first + i
                for name, ref, new_ref, before in (
                    ("k", k_ref, new_k_ref, firsts[1]),
                    ("v", v_ref, new_v_ref, firsts[2]),
                ):

                    @pl.when(i >= slots)
                    def _wait(name=name):
                        plgpu.barrier_wait(shared["free"][name].at[slot])

                    into, full = shared[name].at[slot], shared["full"][name].at[slot]

                    @pl.when(step < prefix_tiles)
                    def _prefix(ref=ref, into=into, full=full):
                        plgpu.copy_gmem_to_smem(ref.at[pl.ds(cached + start_of(step), KEYS), columns], into, full)

                    @pl.when(step >= prefix_tiles)
                    def _block(new_ref=new_ref, before=before, into=into, full=full):
                        at = pl.ds((step - prefix_tiles) * KEYS, KEYS)
                        own = pl.ds((before + head) * WIDTH, WIDTH)
                        plgpu.copy_gmem_to_smem(new_ref.at[b, at, own], into, full)

                @pl.when(step >= prefix_tiles)
                def _mask():
                    @pl.when(step > jnp.maximum(first, prefix_tiles))
                    def _wait():
                        plgpu.barrier_wait(shared["used"])

                    column = firsts[3] * WIDTH + (step - prefix_tiles) * KEYS
                    seen = shared["seen"].at[lax.rem(i, jnp.int32(2))]
                    gather(mask_ref, lambda g: pl.ds(column, KEYS), shared["mask"], seen)

                return carry

            lax.fori_loop(0, steps, copy, None)

        # One body for both: what is lowered twice takes more than twice as long.
        @pl.when(group != 2)
        def _compute():
            plgpu.set_max_registers(schedule.registers[0], action="increase")
            plgpu.barrier_wait(shared["asked"])
            compute = Compute(
                plgpu, group, shared, schedule, scale, interpret is not None,
                held=s.row_tiles > 2, alone=alone, first=first, length=length, start_of=start_of,
            )  # fmt: skip
            acc, weight = compute.normalised(*compute.run(steps))
            part = jnp.where(alone, 2 * split + group, split)
            at = (((part * s.batch + b) * s.kv_heads + head) * s.row_tiles + row_tile(group)) * ROWS
            out = shared["out"].at[group]
            out[...] = acc.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, values_ref.at[pl.ds(at, ROWS)])
            weights_ref.at[pl.ds(at, ROWS)][...] = weight
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tiled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    shared = {
        "q": tiled(2, ROWS, WIDTH),
        "k": tiled(slots, KEYS, WIDTH),
        "v": tiled(slots, KEYS, WIDTH),
        "out": tiled(2, ROWS, WIDTH),
        "mask": tiled(2, ROWS, KEYS),
        "broken": plgpu.SMEM((slots, KEYS), jnp.float32),
        "asked": plgpu.Barrier(num_arrivals=2 * s.group),
        "full": {name: plgpu.Barrier(num_barriers=slots) for name in "kv"},
        "free": {name: plgpu.Barrier(num_arrivals=2, num_barriers=slots) for name in "kv"},
        "clean": plgpu.Barrier(num_barriers=slots),
        "seen": plgpu.Barrier(num_arrivals=2 * s.group, num_barriers=2),
        "used": plgpu.Barrier(num_arrivals=2),
    }
    count = s.splits * s.batch * s.kv_heads * s.row_tiles * ROWS
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, WIDTH), jnp.bfloat16),
            jax.ShapeDtypeStruct((count,), jnp.float32),
        ),
        grid=(s.units, s.kv_heads, s.batch),
        grid_names=("unit", "head", "batch"),
        num_threads=3,
        thread_name="group",
        kernel_name="gqa_attention_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=dict(shared=shared),
    )
