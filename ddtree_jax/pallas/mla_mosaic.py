"""`mla_attention` in Mosaic GPU for Hopper: tree attention of GLM-5's latent rows, 512 of rank and 64 of rope.

A block of threads takes 64 query rows (heads of one block row) and one split of the keys. Queries stay in shared
memory; a warpgroup copies tiles of 64 keys into two slots by TMA, and two warpgroups compute. Each of these holds half
of the output's columns, for 64 x 512 sums do not fit the registers of one. A tile is cut into the columns of the two
halves and the rope, so that a piece is refilled as soon as its last reader is done.

The tiles that need a mask or hold rows that nobody may read are few: the last one of a prefix, unless it is full, and
those of the block. They are copied like the others, with whatever lies behind the rows that count; their scores are
masked, and what no product may meet, as 0 * NaN is NaN, is cleaned from their values in shared memory. TMA reads tiles
that start at a multiple of eight rows of an array, so XLA pads the block, and its mask lies beside it. Parts of the
splits are merged by the Triton kernel that serves the other attention kernels; a single split writes the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import HOPPER, Platform
from ddtree_jax.pallas.split_attention import (
    LOG2_E,
    Tiles,
    cdiv,
    check_registers,
    merge,
    num_splits,
    parts_shape,
    split_range,
)

RANK, ROPE = 512, 64
_TILE = 64  # query rows, and keys: the M side of wgmma, and what two slots of shared memory hold
_HALF = RANK // 2
_SLOTS = 2
_ALIGN = 8  # rows: the swizzled tiles that TMA copies; it would fill those of a tile cut in two with zeros
_LOWEST = -1e30  # as in split_attention: finite, so that -inf - _LOWEST is no NaN
# Pieces of a row by their first column and width, in the order in which a slot becomes free.
_PIECES = {"left": (0, _HALF), "rope": (RANK, ROPE), "right": (_HALF, _HALF)}
_HALVES = ("left", "right")
_MASK = "mask"  # of a tile of the block; copied like a piece


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the two computing warpgroups share the work.

    Attributes:
      seesaw: they compute the scores of every other tile and pass weights and maxima to each other through shared
        memory. Otherwise both compute all scores, half again as many products, and pass nothing.
      overlap: in the seesaw, the second warpgroup weighs its scores while the values of the tile before are added.
      pair: two blocks of threads with different query rows form a cluster, in which each copies half of every key tile
        to both: half of the traffic from the L2 cache.
      splits: of the keys, or None: chosen by `split_attention.num_splits`.
      together: two splits, where there are two, form a cluster and merge their parts in shared memory; not with `pair`.
        Mosaic's interpreter cannot store into another block's memory: there they are merged like others.
      registers: of a thread that computes, and of one that copies.
    """

    seesaw: bool = False
    overlap: bool = True
    pair: bool = False
    splits: int | None = None
    together: bool = False
    registers: tuple[int, int] = (240, 24)

    def __post_init__(self) -> None:
        check_registers(self.registers)


def _at(name: str, slot: Any = 0, slots: int = _SLOTS) -> Any:
    """Index of the barrier of a piece's slot. Of all pieces there is one array of barriers: the phases of an array are
    kept in one register.
    """
    return (*_PIECES, _MASK).index(name) * slots + slot


def _check(q: Any, cache: Any, rank: int, platform: Platform) -> None:
    if platform.generation != HOPPER:
        raise NotImplementedError(f"needs wgmma (compute capability 9.0), got {platform.generation}")
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dtype {q.dtype}: bfloat16 only")
    if (rank, q.shape[-1] - rank) != (RANK, ROPE):
        raise NotImplementedError(f"rank {rank} and rope {q.shape[-1] - rank}: {RANK} and {ROPE} only")
    if q.shape[2] % _TILE or not q.shape[1]:
        raise NotImplementedError(f"{q.shape[1]} rows of {q.shape[2]} heads: a multiple of {_TILE} heads only")
    if cache.shape[2] % _ALIGN:
        raise NotImplementedError(f"a cache of {cache.shape[2]} slots: a multiple of {_ALIGN} only")
    try:
        import jax.experimental.pallas.mosaic_gpu  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"Mosaic GPU cannot be imported: {error}") from None


def mla_mosaic(
    q, cache, layer, lengths, new, mask, *, rank: int, scale: float, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.mla_attention` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    _check(q, cache, rank, platform)
    schedule = Schedule() if schedule is None else schedule
    b, t, heads, c = q.shape
    rows, block_tiles = t * heads, cdiv(t, _TILE)
    cluster = 2 if schedule.pair else 1
    groups = cdiv(rows // _TILE, cluster)
    tiles = Tiles(_TILE, _TILE, _TILE, num_warps=4, num_stages=1, splits=schedule.splits)
    key_tiles = cdiv(cache.shape[2], _TILE) + block_tiles
    splits = num_splits(tiles, query_tiles=groups * cluster * b, key_tiles=key_tiles, platform=platform)
    if platform.interpret and interpret is None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    run = _kernel(
        batch=b, block=t, heads=heads, slots=cache.shape[2], splits=splits, tiles=tiles, schedule=schedule,
        scale=scale, interpret=interpret if platform.interpret else None,
    )  # fmt: skip
    block = _block_rows(new, mask, block_tiles)
    values, *weights = run(
        layer.reshape(1), lengths, q.reshape(b * rows, c), cache.reshape(-1, c), block.reshape(-1, block.shape[-1])
    )
    if not weights:
        return values.reshape(b, t, heads, RANK)
    shape = parts_shape(splits, b, rows, RANK, values.dtype)
    parts = values.reshape(shape.values.shape), weights[0].reshape(shape.weights.shape)
    out = merge(lengths, parts, q.dtype, name="mla_merge", tiles=tiles, platform=platform, block_tiles=block_tiles)
    return out.reshape(b, t, heads, RANK)


def _block_rows(new, mask, block_tiles: int) -> jax.Array:
    """[B, T up to a multiple of 8, C + block_tiles * 64]: rows of the block, and behind each its row of the mask as 0
    and 1.
    """
    t = new.shape[1]
    seen = jnp.pad(mask.astype(new.dtype), ((0, 0), (0, 0), (0, block_tiles * _TILE - t)))
    return jnp.pad(jnp.concatenate([new, seen], axis=-1), ((0, 0), (0, -t % _ALIGN), (0, 0)))


def _kernel(
    *, batch: int, block: int, heads: int, slots: int, splits: int, tiles: Tiles, schedule: Schedule, scale: float,
    interpret: Any,
) -> Callable[..., tuple[jax.Array, jax.Array]]:  # fmt: skip
    """(layer [1], lengths [B], q [B * rows, C], cache [R * B * S, C], block of `_block_rows`) -> parts, or the result.

    Parts are values, bfloat16 [splits * B * rows, rank], and weights, float32 [splits * B * rows]; those of splits
    without tiles stay unwritten. Of one split there are values only, and they are the result.
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    query_tiles, block_tiles = block * heads // _TILE, cdiv(block, _TILE)
    cluster = 2 if schedule.pair else 1
    together = schedule.together and splits == 2 and not schedule.pair and interpret is None
    whole = together or splits == 1
    rows, block_rows = block * heads, block + -block % _ALIGN

    def wide(x: jax.Array, columns: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (_TILE, columns), [0])

    def body(layer_ref, lengths_ref, q_ref, cache_ref, block_ref, values_ref, *weights_ref, shared):
        split, b = lax.axis_index("split"), lax.axis_index("batch")
        tile = lax.axis_index("tile")
        if schedule.pair:
            tile = tile * 2 + lax.axis_index("pair")
        # The second of the last pair may have no rows: it copies its half of the keys and writes nothing.
        own = jnp.minimum(tile, query_tiles - 1)
        length = lengths_ref[b]
        span = split_range(length, split, tiles, splits, block_tiles)
        first = span.prefix[0] + span.block[0]
        steps = span.prefix[1] + span.block[1] - first
        prefix = cdiv(length, _TILE)
        both = split_range(length, jnp.int32(1), tiles, splits, block_tiles).some
        group = lax.axis_index("group")
        full, free = shared["full"], shared["free"]

        @pl.when(span.some)
        def _():
            @pl.when(group == 2)
            def _copy():
                plgpu.set_max_registers(schedule.registers[1], action="decrease")
                at = pl.ds((b * query_tiles + own) * _TILE, _TILE)
                cached = (layer_ref[0] * batch + b) * slots

                def copy(i, carry):
                    slot = lax.rem(i, jnp.int32(_SLOTS))
                    step = first + i
                    column = (step - prefix) * _TILE  # of the block, where not negative

                    def from_(ref, row, name):
                        start, width = _PIECES[name]
                        plgpu.copy_gmem_to_smem(
                            ref.at[pl.ds(row, _TILE), pl.ds(start, width)],
                            shared["k"][name].at[slot],
                            full.at[_at(name, slot)],
                            collective_axes="pair" if schedule.pair else None,
                        )

                    for name, (start, width) in _PIECES.items():

                        @pl.when(i >= _SLOTS)
                        def _wait(name=name):
                            plgpu.barrier_wait(free.at[_at(name, slot)])

                        def ask(axes, name=name, start=start, width=width):
                            piece, asked = q_ref.at[at, pl.ds(start, width)], shared["asked"].at[_at(name, slots=1)]
                            plgpu.copy_gmem_to_smem(piece, shared["q"][name], asked, collective_axes=axes)

                        # Blocks with the same queries copy half of them each, to both.
                        alone = jnp.logical_not(both) if together else True
                        pl.when((i == 0) & alone)(functools.partial(ask, None))
                        if together:
                            pl.when((i == 0) & both)(functools.partial(ask, "split"))

                        @pl.when(column < 0)
                        def _prefix(name=name):
                            from_(cache_ref, cached + step * _TILE, name)

                        @pl.when(column >= 0)
                        def _block(name=name):
                            from_(block_ref, b * block_rows + column, name)

                    @pl.when(column >= 0)
                    def _mask():
                        # Behind the waits above: who frees the keys has read the mask.
                        mask = block_ref.at[b * block_rows + own * _TILE // heads, pl.ds(RANK + ROPE + column, _TILE)]
                        plgpu.copy_gmem_to_smem(mask, shared[_MASK].at[slot], full.at[_at(_MASK, slot)])

                    return carry

                lax.fori_loop(0, steps, copy, None)
                if schedule.pair:
                    # The other block arrives here for the last tiles, too: shared memory must not be gone by then.
                    for slot in range(_SLOTS):

                        @pl.when(steps > slot)
                        def _last(slot=slot):
                            for name in _PIECES:
                                plgpu.barrier_wait(free.at[_at(name, slot)])

            for which in (0, 1):

                @pl.when(group == which)
                def _compute(which=which):
                    plgpu.set_max_registers(schedule.registers[0], action="increase")
                    compute = _Compute(
                        plgpu, which, shared, schedule, first=first, length=length, block=block, scale=scale,
                        interpreted=interpret is not None,
                    )  # fmt: skip
                    acc, top, total = (compute.seesaw if schedule.seesaw else compute.twice)(steps)
                    safe = jnp.where(total == 0.0, 1.0, total)
                    acc = acc / wide(safe, _HALF)
                    log = top + jnp.log(safe) * LOG2_E
                    part = 0 if whole else split * batch
                    at = pl.ds(((part + b) * query_tiles + own) * _TILE, _TILE)

                    def write(acc):
                        # Nobody needs the queries any more.
                        out = shared["q"][_HALVES[which]]
                        out[...] = acc.astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out, values_ref.at[at, pl.ds(which * _HALF, _HALF)])
                        if which == 0 and not whole:
                            weights_ref[0].at[at][...] = log
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    if together:
                        pl.when(both)(lambda: _exchange(plgpu, shared, which, split, acc, log, write))
                        pl.when(jnp.logical_not(both))(lambda: write(acc))
                    else:
                        pl.when(tile < query_tiles)(lambda: write(acc))

    def pieces(*leading: int) -> dict[str, Any]:
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return {
            name: plgpu.SMEM((*leading, _TILE, width), jnp.bfloat16, transforms=transforms)
            for name, (_, width) in _PIECES.items()
        }

    readers = 1 if schedule.seesaw else 2

    freed = {"num_arrivals": readers, "num_barriers": len(_PIECES) * _SLOTS}
    count = (1 if whole else splits) * batch * rows
    clustered = {"open": plgpu.ClusterBarrier(collective_axes=("split",)), "given": plgpu.Barrier(num_arrivals=3)}
    grid, names = (cdiv(query_tiles, cluster), splits, batch), ("tile", "split", "batch")
    if together:
        grid, names = (query_tiles, batch), ("tile", "batch")
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((count, RANK), jnp.bfloat16),
            *([] if whole else [jax.ShapeDtypeStruct((count,), jnp.float32)]),
        ),
        grid=grid,
        grid_names=names,
        **({"cluster": (2,), "cluster_names": ("split" if together else "pair",)} if together or schedule.pair else {}),
        num_threads=3,
        thread_name="group",
        kernel_name="mla_attention_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=dict(
            shared={
                "q": pieces(),
                "k": pieces(_SLOTS),
                "row": plgpu.SMEM((_SLOTS, _TILE), jnp.float32),
                "sums": plgpu.SMEM((2, _TILE), jnp.float32),
                _MASK: plgpu.SMEM((_SLOTS, _TILE), jnp.bfloat16),
                "asked": plgpu.Barrier(num_barriers=len(_PIECES)),
                "full": plgpu.Barrier(num_barriers=(len(_PIECES) + 1) * _SLOTS),
                "free": plgpu.ClusterBarrier(collective_axes=("pair",), **freed)
                if schedule.pair
                else plgpu.Barrier(**freed),
                "ready": plgpu.Barrier(num_barriers=2),
                "met": plgpu.Barrier(num_arrivals=2),
                **(clustered if together else {}),
            },
        ),
    )


def _exchange(plgpu, shared, which: int, split, acc, log, write: Callable[[jax.Array], None]) -> None:
    """Split s of two writes half s of the columns: its other warpgroup gives its part to the other block.

    The key slots are free when both blocks have come here. The logarithms of the weights go as two bfloat16 in place of
    ropes, for what is stored in another block's memory must be swizzled tiles.
    """
    half, keys = _HALVES[which], shared["k"]
    if which == 0:
        plgpu.barrier_arrive(shared["open"])

    @pl.when(split != which)
    def _give():
        plgpu.barrier_wait(shared["open"])
        high = log.astype(jnp.bfloat16)
        low = (log - high.astype(jnp.float32)).astype(jnp.bfloat16)
        logs = [lax.broadcast_in_dim(x, (_TILE, ROPE), [0]) for x in (high, low)]
        places = [(acc.astype(jnp.bfloat16), half, 0), (logs[0], "rope", 0), (logs[1], "rope", 1)]
        for value, name, slot in places:
            plgpu.async_store_smem(
                value, keys[name].at[slot], shared["given"], cluster_idx=1 - split, cluster_dim="split", optimized=False
            )

    @pl.when(split == which)
    def _take():
        plgpu.barrier_wait(shared["given"])
        load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
        theirs = sum(jnp.max(load(keys["rope"].at[slot]).astype(jnp.float32), axis=1) for slot in range(2))
        top = jnp.maximum(log, theirs)
        own, other = jnp.exp2(log - top), jnp.exp2(theirs - top)
        own, other = (lax.broadcast_in_dim(x / (own + other), acc.shape, [0]) for x in (own, other))
        write(acc * own + load(keys[half].at[0]).astype(jnp.float32) * other)


class _Compute:
    """A computing warpgroup, `which` of two; the one that holds columns [which * 256, which * 256 + 256)."""

    def __init__(
        self, plgpu, which: int, shared, schedule: Schedule, *, first, length, block: int, scale: float,
        interpreted: bool,
    ):  # fmt: skip
        self.plgpu, self.which, self.half, self.shared, self.schedule = plgpu, which, _HALVES[which], shared, schedule
        self.first, self.length, self.block = first, length, block
        self.scale, self.interpreted = scale, interpreted
        self.across, self.down = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

    def meet(self) -> None:
        """Waits for the other computing warpgroup."""
        self.plgpu.barrier_arrive(self.shared["met"])
        self.plgpu.barrier_wait(self.shared["met"])

    def is_masked(self, step: jax.Array) -> jax.Array:
        return self.first + step >= self.length // _TILE

    def plain(self, steps: jax.Array) -> jax.Array:
        """How many tiles come before the first masked one. A loop of their own leaves them the registers."""
        return jnp.clip(self.length // _TILE - self.first, 0, steps)

    def block_tile(self, step: jax.Array) -> jax.Array:
        """Which tile of the block; negative: of the prefix."""
        return self.first + step - cdiv(self.length, _TILE)

    def count(self, step: jax.Array) -> jax.Array:
        """Rows of the tile that count, from its first one on; may be more than there are."""
        tile = self.block_tile(step)
        return jnp.where(tile < 0, self.length - (self.first + step) * _TILE, self.block - tile * _TILE)

    def empty(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        cast = self.plgpu.layout_cast
        return (
            cast(jnp.zeros((_TILE, _HALF), jnp.float32), self.plgpu.Layout.WGMMA),
            cast(jnp.full((_TILE,), _LOWEST, jnp.float32), self.down),
            cast(jnp.zeros((_TILE,), jnp.float32), self.down),
        )

    def scores(self, step: jax.Array, slot: Any, masked: bool | None = None) -> jax.Array:
        """float32 [64, 64] of a tile, times scale * log2(e), masked; `masked`: whether it is, where that is known."""
        plgpu, shared = self.plgpu, self.shared

        def product(acc):
            for name in _PIECES:

                @pl.when(step == (self.which if self.schedule.seesaw else 0))
                def _first_scores(name=name):
                    plgpu.barrier_wait(shared["asked"].at[_at(name, slots=1)])

                plgpu.barrier_wait(shared["full"].at[_at(name, slot)])
                plgpu.wgmma(acc, shared["q"][name], shared["k"][name].at[slot].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(product, plgpu.ACC((_TILE, _TILE), jnp.float32)) * (self.scale * LOG2_E)

        def mask_row():
            plgpu.barrier_wait(shared["full"].at[_at(_MASK, slot)])
            return plgpu.load(shared[_MASK].at[slot], layout=self.across, optimized=False).astype(jnp.float32)

        def all_seen():
            return plgpu.layout_cast(jnp.ones((_TILE,), jnp.float32), self.across)

        def mask(scores):
            seen = lax.cond(self.block_tile(step) >= 0, mask_row, all_seen)
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (_TILE,), 0), self.across)
            visible = lax.broadcast_in_dim((seen > 0.0) & (column < self.count(step)), scores.shape, [1])
            # A key with an infinity may give -inf, which would hide it, where its values are NaN for those that see it.
            return jnp.where(visible, jnp.where(jnp.abs(scores) < jnp.inf, scores, jnp.nan), -jnp.inf)

        if masked is None:
            return lax.cond(self.is_masked(step), mask, lambda scores: scores, scores)
        return mask(scores) if masked else scores

    def clean(self, slot: Any) -> None:
        """Zeros for what is not finite in this half of the values of a masked tile.

        No scores may need them any more. Rows that see what is not finite have it in their weights; for the others, and
        in rows of keys that do not count, weights of zero meet it.
        """
        plgpu, values = self.plgpu, self.shared["k"][self.half].at[slot]

        # A few columns at a time, for registers.
        for start in range(0, _HALF, ROPE):
            part = values.at[pl.ds(0, _TILE), pl.ds(start, ROPE)]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(jnp.bfloat16)
        plgpu.commit_smem()

    def weigh(self, scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(weights bf16 [64, 64], their sums, the new maxima, what older sums fade by)."""
        new = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new, scores.shape, [0]))
        return weights.astype(jnp.bfloat16), jnp.sum(weights, axis=1), new, jnp.exp2(top - new)

    def add(
        self, acc: jax.Array, fade: jax.Array, weights: jax.Array | None, slot: Any,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """(acc * fade + weights @ the values of this half, what `meanwhile` gives while the product is under way).

        Shared memory has then been read. `weights` None: those that the other warpgroup has left in the slot.
        """
        plgpu, keys = self.plgpu, self.shared["k"]
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        if self.interpreted:
            # Mosaic's interpreter has neither sums that start from a value nor operands in registers.
            given = keys["rope"].at[slot][...] if weights is None else weights
            values = keys[self.half].at[slot][...]
            plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
            acc = acc + jnp.dot(given, values, preferred_element_type=jnp.float32)
            return acc, meanwhile()

        def product(ref):
            ref[...] = acc
            plgpu.wgmma(ref, keys["rope"].at[slot] if weights is None else weights, keys[self.half].at[slot])
            other = meanwhile()
            return ref[...], other

        return pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def twice(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(sums of weighted values, maxima, sums of weights) of all tiles; all scores by both warpgroups."""

        def step(i, carry, masked):
            acc, top, total = carry
            slot = lax.rem(i, jnp.int32(_SLOTS))
            weights, sums, top, fade = self.weigh(self.scores(i, slot, masked), top)
            if masked:
                self.meet()  # both have read the keys
                self.clean(slot)
            acc, _ = self.add(acc, fade, weights, slot)
            for name in _PIECES:
                self.plgpu.barrier_arrive(self.shared["free"].at[_at(name, slot)])
            return acc, top, total * fade + sums

        plain = self.plain(steps)
        carry = lax.fori_loop(0, plain, functools.partial(step, masked=False), self.empty())
        carry = lax.fori_loop(plain, steps, functools.partial(step, masked=True), carry)
        self.meet()  # both have read the queries
        return carry

    def seesaw(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `twice`; warpgroup w computes the scores of the tiles of slot w."""
        plgpu, shared, which = self.plgpu, self.shared, self.which
        ready, row = shared["ready"], shared["row"]

        def give(slot, weights, top):
            # The scores are done, so the piece of the keys that no value needs has room for the weights.
            shared["k"]["rope"].at[slot][...] = weights
            row.at[slot][...] = top
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])

        def take(slot, top):
            plgpu.barrier_wait(ready.at[slot])
            new = plgpu.load(row.at[slot], layout=self.down)
            return new, jnp.exp2(top - new)

        def clean(step, slot, masked):
            # The scores are done: by this warpgroup, or it has taken the maxima of the other.
            if masked is None:
                pl.when(self.is_masked(step))(lambda: self.clean(slot))

        def theirs(acc, fade, step, slot, masked, meanwhile=lambda: None):
            plgpu.barrier_wait(shared["full"].at[_at(self.half, slot)])
            clean(step, slot, masked)
            acc, other = self.add(acc, fade, None, slot, meanwhile)
            plgpu.barrier_arrive(shared["free"].at[_at("rope", slot)])
            plgpu.barrier_arrive(shared["free"].at[_at(self.half, slot)])
            return acc, other

        def ours(acc, fade, weights, step, slot, masked):
            clean(step, slot, masked)
            acc, _ = self.add(acc, fade, weights, slot)
            plgpu.barrier_arrive(shared["free"].at[_at(self.half, slot)])
            return acc

        def first_alone(i, carry, masked):
            """The tile of slot 0 by itself."""
            acc, top, total = carry
            if which == 0:
                weights, sums, top, fade = self.weigh(self.scores(i, 0, masked), top)
                give(0, weights, top)
                return ours(acc, fade, weights, i, 0, masked), top, total * fade + sums
            top, fade = take(0, top)
            return theirs(acc, fade, i, 0, masked)[0], top, total * fade

        def two(j, carry, masked):
            i = 2 * j
            if which == 0:
                acc, top, total = first_alone(i, carry, masked)
                top, fade = take(1, top)
                return theirs(acc, fade, i + 1, 1, masked)[0], top, total * fade
            acc, top, total = carry
            scores = self.scores(i + 1, 1, masked)
            top, early = take(0, top)

            def own_weights():
                weights, sums, new, fade = self.weigh(scores, top)
                give(1, weights, new)
                return weights, sums, new, fade

            if self.schedule.overlap:
                acc, (weights, sums, top, fade) = theirs(acc, early, i, 0, masked, own_weights)
            else:
                weights, sums, top, fade = own_weights()
                acc, _ = theirs(acc, early, i, 0, masked)
            return ours(acc, fade, weights, i + 1, 1, masked), top, total * early * fade + sums

        carry = lax.fori_loop(0, self.plain(steps) // 2, functools.partial(two, masked=False), self.empty())
        carry = lax.fori_loop(self.plain(steps) // 2, steps // 2, functools.partial(two, masked=None), carry)
        last = lambda *c: first_alone(steps - 1, c, None)  # noqa: E731
        acc, top, total = lax.cond(steps % 2 == 1, last, lambda *c: c, *carry)
        # Each has summed the weights of its own tiles.
        return acc, top, self.sum_of_both(total)

    def sum_of_both(self, total: jax.Array) -> jax.Array:
        plgpu, row = self.plgpu, self.shared["sums"]
        row.at[self.which][...] = total
        plgpu.commit_smem()
        self.meet()
        return total + plgpu.load(row.at[1 - self.which], layout=self.down)
