"""`mla_attention_selected` in Mosaic GPU for Hopper: the kernel of `mla_mosaic` over the keys chosen for a row.

A block of threads takes 64 heads of one row of the block and one split of its selection, of which 64 entries are a tile
of keys. The warpgroup that copies gathers a tile by itself, 16 bytes a thread and instruction, from the cache or from
the block's own rows, and puts zeros where an entry is nothing. Only what the row sees is read, so all tiles are alike:
what is nothing is kept out of the sums by a bias of its scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, mosaic_interpreter
from ddtree_jax.pallas.mla_gather import commit, gatherer, landed
from ddtree_jax.pallas.mla_mosaic import check, copy_queries, cut, finish, joined, launch
from ddtree_jax.pallas.mla_mosaic_compute import (
    PIECES,
    SLOTS,
    TILE,
    Compute,
    Schedule,
    barrier_of,
    piece_of,
)
from ddtree_jax.pallas.split_attention import Tiles, cdiv, split_range

# The warpgroup that copies works out addresses, so it has more registers than that of `mla_mosaic`.
SCHEDULE = Schedule(registers=(224, 56))
MOST_TILES = 16  # of a split: shared memory has room for the selection of no more
_NOTHING = -1  # of the rows to gather: 0 and up are rows of the cache, -2 and down of the block


def mla_selected_mosaic(
    q, cache, layer, lengths, new, selected, *, rank: int, scale: float, platform: Platform,
    schedule: Schedule | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.mla_attention_selected` on Mosaic GPU.

    `schedule` overrides the choice; `interpret` gives the parameters of Mosaic's interpreter where the platform is
    interpreted.
    """
    check(q, rank, scale, platform)
    if not selected.shape[2]:
        raise NotImplementedError("a selection of nothing")
    schedule = SCHEDULE if schedule is None else schedule
    b, t, heads, c = q.shape
    rows, count = t * heads, selected.shape[2]
    key_tiles = cdiv(count, TILE)
    tiles, splits = cut(q, key_tiles, schedule, platform)
    splits = max(splits, cdiv(key_tiles, MOST_TILES))
    interpreter = mosaic_interpreter(platform, interpret)
    run = _kernel(
        batch=b, block=t, heads=heads, slots=cache.shape[2], count=count, splits=splits, tiles=tiles,
        schedule=schedule, scale=scale, interpret=interpreter,
    )  # fmt: skip
    chosen = jnp.pad(selected, ((0, 0), (0, 0), (0, -count % TILE)), constant_values=-1)
    keys = (cache.reshape(-1, c), new.reshape(-1, c))
    if interpreter is not None:  # which cannot gather
        keys = (_gathered(cache, layer, lengths, new, chosen).reshape(-1, c),) * 2
    parts = run(layer.reshape(1), lengths, q.reshape(b * rows, c), *keys, chosen.reshape(-1, TILE))
    return joined(parts, jnp.full((b,), count, jnp.int32), q, splits, tiles, platform, block_tiles=0)


def _gathered(cache, layer, lengths, new, chosen) -> jax.Array:
    """[B, T, K, C]: the rows that are chosen, zeros for nothing."""
    b, t, _ = chosen.shape
    slots = cache.shape[2]
    rows = jnp.concatenate([lax.dynamic_index_in_dim(cache, layer, keepdims=False), new], axis=1)
    of_block = (chosen >= slots) & (chosen < rows.shape[1])
    some = ((chosen >= 0) & (chosen < lengths[:, None, None])) | of_block
    taken = rows[jnp.arange(b, dtype=jnp.int32)[:, None, None], jnp.where(some, chosen, 0)]
    return jnp.where(some[..., None], taken, jnp.zeros((), taken.dtype))


class _Selected(Compute):
    """A computing warpgroup of tiles that are all alike, each with a bias of its keys."""

    def plain(self, steps: jax.Array) -> jax.Array:
        return steps

    def scores(self, step: jax.Array, slot: Any, tail: bool, zero: jax.Array) -> jax.Array:
        scores = self.products(slot, tail, zero)
        bias = self.plgpu.load(self.shared["bias"].at[slot], layout=self.across, optimized=False)
        # NaN from infinities too: -inf would hide a key from those that see it.
        return scores + (scores * 0.0 + lax.broadcast_in_dim(bias, scores.shape, [1]))

    def clean(self, step: jax.Array, slot: Any) -> None:
        """Nothing: what nobody sees has not been copied."""


def _kernel(
    *, batch: int, block: int, heads: int, slots: int, count: int, splits: int, tiles: Tiles, schedule: Schedule,
    scale: float, interpret: Any,
) -> Callable[..., tuple[jax.Array, ...]]:  # fmt: skip
    """(layer [1], lengths [B], q [B * rows, C], cache [R * B * S, C], new [B * T, C], chosen [B * T * tiles, 64]) ->
    parts of `launch`. Interpreted, both arrays of keys are those of `_gathered`: a row for each of chosen.
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    query_tiles, per_row = block * heads // TILE, heads // TILE
    key_tiles = cdiv(count, TILE)
    most = min(max(cdiv(key_tiles, splits), tiles.min_tiles), key_tiles)  # tiles of a split
    gather = None if interpret is not None else gatherer(plgpu)

    def body(layer_ref, lengths_ref, q_ref, cache_ref, new_ref, chosen_ref, values_ref, *weights_ref, shared):
        split, b = lax.axis_index("split"), lax.axis_index("batch")
        own = lax.axis_index("tile")
        length, layer = lengths_ref[b], layer_ref[0]
        span = split_range(jnp.int32(count), split, tiles, splits, 0)
        first = span.prefix[0]
        steps = span.prefix[1] - first
        group = lax.axis_index("group")
        full, free = shared["full"], shared["free"]

        @pl.when(span.some)
        def _():
            @pl.when(group == 2)
            def _copy():
                plgpu.set_max_registers(schedule.registers[1], action="decrease")
                mine = (b * block + own // per_row) * key_tiles + first  # of chosen, in tiles
                asked = jnp.minimum(mine, batch * block * key_tiles - most)  # within the array
                plgpu.copy_gmem_to_smem(chosen_ref.at[pl.ds(asked, most)], shared["chosen"], shared["told"])
                copy_queries(plgpu, q_ref, b * query_tiles + own, shared)
                plgpu.barrier_wait(shared["told"])
                cached = (layer * batch + b) * slots
                across = plgpu.Layout.WGMMA.reduce(0)
                refill = jnp.minimum(steps, SLOTS)
                pairs = steps // 2 * 2

                def look_up(i, slot):
                    """Which rows the tile has, and the bias of their scores."""
                    entry = plgpu.load(shared["chosen"].at[mine - asked + i], layout=across, optimized=False)
                    of_cache = (entry >= 0) & (entry < length)
                    of_block = (entry >= slots) & (entry < slots + block)
                    of_block_row = -2 - (b * block + entry - slots)
                    row = jnp.where(of_cache, cached + entry, jnp.where(of_block, of_block_row, _NOTHING))
                    shared["rows"].at[slot][...] = row
                    shared["bias"].at[slot][...] = jnp.where(of_cache | of_block, 0.0, -jnp.inf)
                    plgpu.commit_smem()  # all threads have written

                def hand_over(slot, after, later):
                    """Tells of a tile, piece by piece, when `later` more pieces have been asked for."""
                    for index, name in enumerate(PIECES, 1):
                        landed(plgpu, len(PIECES) - index + later)
                        plgpu.barrier_arrive(full.at[barrier_of(name, slot, after)])

                def copy(i, carry):
                    slot = lax.rem(i, jnp.int32(SLOTS))
                    after = jnp.where(i >= pairs, 1, 0)
                    for name, (start, width) in PIECES.items():

                        @pl.when(i >= refill)
                        def _wait(name=name):
                            plgpu.barrier_wait(free.at[barrier_of(name, slot)])

                        # Behind the first wait: who frees that piece has read the bias.
                        if name == next(iter(PIECES)):
                            look_up(i, slot)
                        if interpret is not None:
                            plgpu.copy_gmem_to_smem(
                                cache_ref.at[pl.ds((mine + i) * TILE, TILE), pl.ds(start, width)],
                                piece_of(shared["k"], name, slot),
                                full.at[barrier_of(name, slot, after)],
                            )
                        else:
                            gather(cache_ref, new_ref, shared["rows"].at[slot], shared["k"], slot, name)
                            commit(plgpu)
                    if interpret is None:
                        # Before the next wait for a free piece: who computes may need this tile to free one. There is
                        # none before the second tile, so the first two are under way together.
                        pl.when(i == 1)(lambda: hand_over(0, 0, len(PIECES)))
                        pl.when((i > 0) | (steps == 1))(lambda: hand_over(slot, after, 0))
                    return carry

                lax.fori_loop(0, steps, copy, None)

            # One body for both: they share the instruction cache.
            @pl.when(group != 2)
            def _compute():
                plgpu.set_max_registers(schedule.registers[0], action="increase")
                compute = _Selected(
                    plgpu, group, shared, first=first, length=length, block=block, scale=scale,
                    interpreted=interpret is not None,
                )  # fmt: skip
                finish(compute, steps, (split * batch + b) * query_tiles + own, values_ref, *weights_ref)

    shared = {
        "chosen": plgpu.SMEM((most, TILE), jnp.int32),
        "rows": plgpu.SMEM((SLOTS, TILE), jnp.int32),
        "bias": plgpu.SMEM((SLOTS, TILE), jnp.float32),
        "told": plgpu.Barrier(),
    }
    return launch(plgpu, body, (query_tiles, splits, batch), "mla_selected_mosaic", shared, interpret)
