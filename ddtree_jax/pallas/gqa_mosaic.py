"""`gqa_attention` in Mosaic GPU for Hopper: tree attention of grouped heads of width 128.

A row tile is 64 query rows of a KV head: 64 / group block rows of each head of its group, one head behind the other,
as TMA can gather them from [B, T, Hq, 128]. A block of threads takes two row tiles and one split of the keys, so that
the keys are read once for 128 rows; where there is one row tile only, its two computing warpgroups take every other key
tile. A third warpgroup copies the tiles of keys and values.

The splits of a row tile form a cluster, and there is no second kernel for their merge: all read each other's sums of
weights, then each sends every other one some columns of its sums, times their share of the whole, into the shared
memory of that one, which adds them up and writes them. Where the splits are no cluster (Mosaic's interpreter knows no
shared memory of other blocks), XLA adds the parts up.

The last tile of the prefix and those of the block are masked: rows of values that nobody may see, or that are not
finite, become zeros in shared memory, for 0 * NaN would spread them; scores of the latter become NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import HOPPER, Platform
from ddtree_jax.pallas.gqa_mosaic_compute import ROWS, WIDTH, Compute, Schedule, Sizes
from ddtree_jax.pallas.split_attention import cdiv

_GROUPS = (1, 2, 4, 8)  # heads of a group: a row tile holds multiples of 8 rows of each


def choose_splits(blocks: int, key_tiles: int, most: int, platform: Platform) -> int:
    """Splits for a grid that fills the cores in few, full waves; `blocks` without splits, `key_tiles` at capacity."""

    def time(splits: int) -> float:
        # A cluster lies within a GPC, which has 16 cores or a few more.
        at_once = platform.cores // 16 * (16 // splits) if splits > 1 else platform.cores
        # A block costs its tiles, about three more for the queries and the masks, and something for each part.
        tiles = (math.ceil(key_tiles / splits) + key_tiles / splits) / 2
        return math.ceil(blocks / max(at_once, 1)) * (tiles + 3 + 0.1 * splits)

    return min(range(1, max(1, min(most, key_tiles)) + 1), key=lambda n: (time(n), n))


def _check(q: Any, k_cache: Any, scale: float, schedule: Schedule, platform: Platform) -> None:
    if platform.generation != HOPPER:
        raise NotImplementedError(f"needs wgmma (compute capability 9.0), got {platform.generation}")
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
    if k_cache.shape[2] < schedule.keys:
        raise NotImplementedError(f"a cache of {k_cache.shape[2]} slots: {schedule.keys} or more only")
    if schedule.slots % 2:
        # Every other tile is a warpgroup's own where both have the same rows, and so must be every other slot.
        raise NotImplementedError(f"{schedule.slots} slots: an even number only")
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"Mosaic GPU cannot be imported: {error}") from None


def gqa_mosaic(
    q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, *, scale: float, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.gqa_attention` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    schedule = Schedule() if schedule is None else schedule
    _check(q, k_cache, scale, schedule, platform)
    b, t, heads, _ = q.shape
    width = k_cache.shape[3]
    kv_heads = width // WIDTH
    sizes = Sizes(b, t, heads, kv_heads, k_cache.shape[2], 1)
    block_tiles = cdiv(t, schedule.keys)
    key_tiles = cdiv(k_cache.shape[2], schedule.keys) + block_tiles
    splits = schedule.splits or choose_splits(sizes.tiles * kv_heads * b, key_tiles, schedule.most, platform)
    pad = cdiv(t, 8) * 8
    if platform.interpret:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        schedule = dataclasses.replace(schedule, cluster=schedule.cluster and splits == 1)
        interpret = plgpu.InterpretGPUParams() if interpret is None else interpret
        # TMA fills what lies beyond an array with zeros; the interpreter does not.
        pad = max(2 * sizes.tiles * sizes.part, block_tiles * schedule.keys)
    seen = jnp.pad(mask.astype(q.dtype), ((0, 0), (0, 0), (0, block_tiles * schedule.keys - t)))
    block, firsts = (q.reshape(b, t, -1), new_k, new_v, seen), (0, 0, 0, 0)
    if pad != t:
        # TMA takes tiles of 8 rows, and there may be 17: one array of whole tiles, as each kernel costs a launch.
        whole = jnp.pad(jnp.concatenate(block, axis=-1), ((0, 0), (0, pad - t), (0, 0)))
        block, firsts = (whole,) * 4, (0, heads, heads + kv_heads, heads + 2 * kv_heads)
    sizes = dataclasses.replace(sizes, splits=splits)
    run = _kernel(
        sizes=sizes, firsts=firsts, schedule=schedule, scale=scale, interpret=interpret if platform.interpret else None
    )
    out = run(layer.reshape(1), lengths, *block, k_cache.reshape(-1, width), v_cache.reshape(-1, width))
    if splits > 1 and not schedule.cluster:
        out = _merged(*out, sizes)
    return out[:, :t].reshape(b, t, heads, WIDTH)


def _merged(values: jax.Array, weights: jax.Array, sizes: Sizes) -> jax.Array:
    """bf16 [B, rows, Hq * 128] from parts [splits, B, Hkv, tiles, 2, 64, 128] and their weights."""
    s, axes = sizes, (0,)
    if not s.pairs:
        axes = (0, 4)  # the two warpgroups hold parts of the same rows
    weights = jnp.exp2(weights - jnp.max(weights, axis=axes, keepdims=True))
    total = jnp.sum(weights, axis=axes, keepdims=True)
    merged = jnp.sum(values * (weights / total)[..., None], axis=axes)
    merged = merged.reshape(s.batch, s.kv_heads, -1, s.group, s.part, WIDTH).transpose(0, 2, 4, 1, 3, 5)
    return merged.astype(jnp.bfloat16).reshape(s.batch, -1, s.heads * WIDTH)


def _kernel(
    *, sizes: Sizes, firsts: tuple[int, ...], schedule: Schedule, scale: float, interpret: Any
) -> Callable[..., jax.Array | tuple[jax.Array, jax.Array]]:
    """(layer [1], lengths, queries, keys, values and mask of the block, caches [R * B * S, Hkv * 128]) -> out.

    bf16 [B, T, Hq * 128], or parts as `_merged` takes them. Arrays of the block are bf16 [B, T, ...] with whole tiles
    of 8 rows; `firsts`: where each begins in a row, in heads. The mask is 0 or 1.
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    s, keys, slots = sizes, schedule.keys, schedule.slots
    inside = s.splits > 1 and schedule.cluster
    apart = s.splits > 1 and not schedule.cluster
    block_tiles = cdiv(s.block, keys)
    readers = 2 if s.pairs else 1

    def body(layer_ref, lengths_ref, q_ref, new_k_ref, new_v_ref, mask_ref, k_ref, v_ref, *outs, shared):
        if "either" in shared:
            for some in shared["either"]:
                shared = shared | some
        tile, head, b = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("batch")
        split = lax.axis_index("split") if s.splits > 1 else jnp.int32(0)
        length = lengths_ref[b]
        prefix_tiles = cdiv(length, keys)
        total = prefix_tiles + block_tiles
        first = split * total // s.splits
        steps = (split + 1) * total // s.splits - first
        group = lax.axis_index("group")
        columns = pl.ds(head * WIDTH, WIDTH)

        def start_of(step):
            """Row of the prefix where a tile is read: the last one of the cache may overlap the one before."""
            return jnp.minimum(step * keys, s.slots - keys)

        @pl.when(group == 2)
        def _copy():
            plgpu.set_max_registers(schedule.registers[1], action="decrease")

            def gather(ref, columns, into, barrier):
                """The rows of each row tile, those of the first head of the group first."""
                for which in range(readers):
                    at = pl.ds((tile * 2 + which) * s.part, s.part)
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
                        plgpu.copy_gmem_to_smem(ref.at[pl.ds(cached + start_of(step), keys), columns], into, full)

                    @pl.when(step >= prefix_tiles)
                    def _block(new_ref=new_ref, before=before, into=into, full=full):
                        at = pl.ds((step - prefix_tiles) * keys, keys)
                        own = pl.ds((before + head) * WIDTH, WIDTH)
                        plgpu.copy_gmem_to_smem(new_ref.at[b, at, own], into, full)

                @pl.when(step >= prefix_tiles)
                def _mask():
                    @pl.when(step > jnp.maximum(first, prefix_tiles))
                    def _wait():
                        plgpu.barrier_wait(shared["used"])

                    column = firsts[3] * WIDTH + (step - prefix_tiles) * keys
                    gather(mask_ref, lambda g: pl.ds(column, keys), shared["mask"], shared["seen"])

                return carry

            lax.fori_loop(0, steps, copy, None)

        # One body for both: what is lowered twice takes more than twice as long.
        @pl.when(group != 2)
        def _compute():
            plgpu.set_max_registers(schedule.registers[0], action="increase")
            plgpu.barrier_wait(shared["asked"])
            compute = Compute(
                plgpu, group, shared, s, schedule, scale, interpret is not None,
                first=first, length=length, start_of=start_of,
            )  # fmt: skip
            acc, weight = compute.normalised(*compute.run(steps))
            if apart:
                at = split, b, head, tile, group
                outs[0].at[at][...] = acc
                outs[1].at[at][...] = weight
                return
            merge = _Merge(plgpu, group, shared, s, split)
            merge.give(acc, weight)
            merge.take(outs[0], b=b, tile=tile * 2 + compute.own, head=head)

    def tiled(*shape: int) -> Any:
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

    tiles = {"k": tiled(slots, keys, WIDTH), "v": tiled(slots, keys, WIDTH)}
    shared = {
        "q": tiled(readers, ROWS, WIDTH),
        "mask": tiled(readers, ROWS, keys),
        "broken": plgpu.SMEM((slots, keys), jnp.float32),
        "asked": plgpu.Barrier(num_arrivals=readers * s.group),
        "full": {name: plgpu.Barrier(num_barriers=slots) for name in "kv"},
        "free": {name: plgpu.Barrier(num_arrivals=readers, num_barriers=slots) for name in "kv"},
        "clean": plgpu.Barrier(num_barriers=slots),
        "seen": plgpu.Barrier(num_arrivals=readers * s.group),
        "used": plgpu.Barrier(num_arrivals=readers),
        "turn": plgpu.Barrier(num_arrivals=2),
    }
    if apart:
        shared |= tiles
    else:
        minor = min(s.columns, 32)
        transforms = plgpu.TilingTransform((8, minor)), plgpu.SwizzleTransform(4 * minor)
        parts = {"parts": plgpu.SMEM((2, s.sources, ROWS, s.columns), jnp.float32, transforms=transforms)}
        barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("split",)) if inside else plgpu.Barrier
        shared |= {
            # Apart: jax 0.11.2 cannot read a slice of the shared memory of another block.
            "weights": [plgpu.SMEM((ROWS,), jnp.float32) for _ in range(2)],
            "out": plgpu.SMEM((2, ROWS, s.columns), jnp.bfloat16),
            "weighed": barrier(num_arrivals=2),
            "arrived": plgpu.Barrier(num_arrivals=s.sources, num_barriers=2),
            "left": barrier(num_arrivals=2),
        }
        # Parts arrive when all of the cluster are through with their tiles, and take the place of these.
        shared |= tiles | parts if interpret is not None else {"either": plgpu.RefUnion(tiles, parts)}
    out_type: Any = jax.ShapeDtypeStruct((s.batch, s.block, s.heads * WIDTH), jnp.bfloat16)
    if apart:
        shape = s.splits, s.batch, s.kv_heads, s.tiles, 2, ROWS
        out_type = jax.ShapeDtypeStruct((*shape, WIDTH), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(s.tiles, *((s.splits,) if apart else ()), s.kv_heads, s.batch),
        grid_names=("tile", *(("split",) if apart else ()), "head", "batch"),
        **({"cluster": (s.splits,), "cluster_names": ("split",)} if inside else {}),
        num_threads=3,
        thread_name="group",
        kernel_name="gqa_attention_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=dict(shared=shared),
    )


class _Merge:
    """Adds up the parts of a row tile: those of the blocks of a cluster, and of both warpgroups where they share it."""

    def __init__(self, plgpu, which: jax.Array, shared, sizes: Sizes, split: jax.Array):
        self.plgpu, self.which, self.shared, self.sizes, self.split = plgpu, which, shared, sizes, split
        self.cluster = sizes.splits > 1
        self.owners = range(sizes.owners)

    def _weights(self, split: int, which: int) -> Any:
        ref = self.shared["weights"][which]
        ref = self.plgpu.cluster_ref(ref, {"split": jnp.int32(split)}) if self.cluster else ref
        return self.plgpu.load(ref, layout=self.plgpu.Layout.WGMMA.reduce(1))

    def _total(self, *warpgroups: int) -> tuple[jax.Array, jax.Array]:
        """(largest weight, sum of all in units of it) of the parts of these warpgroups."""
        logs = [self._weights(i, w) for i in range(self.sizes.splits) for w in warpgroups]
        top = functools.reduce(jnp.maximum, logs)
        return top, functools.reduce(operator.add, [jnp.exp2(log - top) for log in logs])

    def _place(self, owner: int) -> tuple[int, Any]:
        """(block of the cluster, warpgroup) of an owner of columns."""
        return (owner, self.which) if self.sizes.pairs else divmod(owner, 2)

    def give(self, acc: jax.Array, weight: jax.Array) -> None:
        """Sends each owner its columns of the sums, times their share of the whole."""
        plgpu, shared, s = self.plgpu, self.shared, self.sizes
        for which in (0, 1):

            @pl.when(self.which == which)
            def _store(which=which):
                shared["weights"][which][...] = weight

        plgpu.commit_smem()
        plgpu.barrier_arrive(shared["weighed"])
        plgpu.barrier_wait(shared["weighed"])
        if s.pairs:
            top, total = lax.cond(self.which == 0, lambda: self._total(0), lambda: self._total(1))
        else:
            top, total = self._total(0, 1)
        acc = acc * lax.broadcast_in_dim(jnp.exp2(weight - top) / total, acc.shape, [0])
        source = self.split if s.pairs else 2 * self.split + self.which
        for owner in self.owners:
            block, warpgroup = self._place(owner)
            columns = acc[:, owner * s.columns : (owner + 1) * s.columns]
            ref, arrived = shared["parts"].at[warpgroup, source], shared["arrived"].at[warpgroup]
            if self.cluster:
                plgpu.async_store_smem(columns, ref, arrived, cluster_idx=jnp.int32(block), cluster_dim="split")
            else:
                ref[...] = columns
                plgpu.commit_smem()
                plgpu.barrier_arrive(arrived)

    def take(self, out_ref, *, b, tile, head) -> None:
        """Adds up the columns of this owner and writes them."""
        plgpu, shared, s = self.plgpu, self.shared, self.sizes

        def write(owner):
            plgpu.barrier_wait(shared["arrived"].at[self.which])
            sums = jnp.zeros((ROWS, s.columns), jnp.float32)
            for source in range(s.sources):
                sums = sums + plgpu.load(shared["parts"].at[self.which, source], layout=plgpu.Layout.WGMMA)
            ref = shared["out"].at[self.which]
            ref[...] = sums.astype(jnp.bfloat16)
            plgpu.commit_smem()
            first = tile * s.part

            def copy(g, row, rows):
                columns = pl.ds((head * s.group + g) * WIDTH + owner * s.columns, s.columns)
                plgpu.copy_smem_to_gmem(
                    ref.at[pl.ds(g * s.part + row, rows)], out_ref.at[b, pl.ds(first + row, rows), columns]
                )

            @pl.when(first + s.part <= s.block)
            def _whole():
                for g in range(s.group):
                    copy(g, 0, s.part)

            @pl.when(first + s.part > s.block)
            def _rows():
                def row(i, carry):
                    for g in range(s.group):
                        copy(g, i, 1)
                    return carry

                lax.fori_loop(0, jnp.maximum(s.block - first, 0), row, None)

            plgpu.wait_smem_to_gmem(0)

        owner = self.split if s.pairs else 2 * self.split + self.which
        if len(self.owners) == (1 if s.pairs else 2) * s.splits:
            write(owner)
        else:
            # One that owns nothing must stay until the others have read its weights.
            pl.when(owner < len(self.owners))(lambda: write(owner))
            plgpu.barrier_arrive(shared["left"])
            plgpu.barrier_wait(shared["left"])
