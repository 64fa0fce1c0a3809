"""Top-K and logsumexp of long rows in two kernels: one pass over the logits, and a descent with one program a row.

The first writes the maxima of blocks of 16 columns and of 256, and each chunk's sum of exponentials. The K best blocks
by (maximum, smaller index) hold the K best elements, so the second goes from blocks of 256 to those of 16 to elements,
and keeps at most a few times K of each. What it keeps is all from some key on: found by counting, several bits a step,
and as a rule one search serves all levels, because the K-th largest maximum of blocks bounds the K-th largest element
from below, and seldom do many more reach it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, barrier, load, require_kernels, store, triton_call
from ddtree_jax.thresholds import ordered_bits

MAX_K = 128
MAX_VOCAB = 2**18  # what is beyond would have over 1024 blocks of blocks
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

_BLOCK = 16
_SMALLEST = np.int32(-(2**31))  # the key of no float: of columns that are not there
_KEY_BITS = 32
_RANKED = 64  # of what is kept: so many at a time are compared with all


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the two kernels.

    Attributes:
      columns: of a row that a program of the first kernel reads; a power of two, 256 or more.
      reading_warps, choosing_warps: warps of a program of the first kernel, and of the second.
      digit: bits that a step of a search settles: 1, 2, 4 or 8. It counts as many thresholds as such a digit has
        values.
      short_digit: the same where more than 1024 keys are searched.
      enough: a search among blocks of 256 ends when at most this many times K are left; 1 to 2.
    """

    columns: int = 4096
    reading_warps: int = 4
    choosing_warps: int = 4
    digit: int = 4
    short_digit: int = 2
    enough: float = 1.25


def select_tiles(num_rows: int, vocab: int, k: int, platform: Platform) -> Tiles:
    """columns does not depend on k: the logsumexp of a row is then the same for every k."""
    # Four programs a multiprocessor or more, so that reading does not wait for its slowest.
    columns = 4096
    while columns > 1024 and num_rows * pl.cdiv(vocab, columns) < 4 * platform.cores:
        columns //= 2
    return Tiles(columns=columns, choosing_warps=8 if k <= 64 else 16)


def check_served(num_rows: int, vocab: int, k: int, dtype: jnp.dtype, platform: Platform) -> None:
    """NotImplementedError where the kernels cannot serve."""
    require_kernels(platform)
    if k > MAX_K:
        raise NotImplementedError(f"needs k <= {MAX_K}; got {k}")
    if vocab > MAX_VOCAB:
        raise NotImplementedError(f"needs a vocabulary of at most {MAX_VOCAB}; got {vocab}")
    if dtype not in DTYPES:
        raise NotImplementedError(f"needs logits of 32 or 16 bits; got {dtype}")
    if num_rows == 0:
        raise NotImplementedError("needs a row; got none")


def topk_logsumexp(
    logits: jax.Array, k: int, *, platform: Platform, tiles: Tiles | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The k best of each row with its logsumexp, as `vocab_topk.vocab_topk` defines them.

    Args:
      logits: [R, V] of one of DTYPES.
      k: static, 1..V.
      platform: static.
      tiles: static; None: `select_tiles`.

    Returns:
      (values float32[R, k], token ids int32[R, k], logsumexp float32[R]).

    Raises:
      NotImplementedError: as `check_served` says.
      ValueError: tiles that there are not.
    """
    num_rows, vocab = logits.shape
    check_served(num_rows, vocab, k, logits.dtype, platform)
    tiles = select_tiles(num_rows, vocab, k, platform) if tiles is None else tiles
    if tiles.columns < _BLOCK * _BLOCK or tiles.columns & (tiles.columns - 1):
        raise ValueError(f"tiles.columns: got {tiles.columns}; it must be a power of two >= {_BLOCK * _BLOCK}")
    if not {tiles.digit, tiles.short_digit} <= {1, 2, 4, 8} or not 1 <= tiles.enough <= 2:
        raise ValueError(f"tiles: got {tiles}; see its attributes for what is allowed")
    plan = _Plan(tiles, k, vocab, platform)
    spec = jax.ShapeDtypeStruct
    maxima = triton_call(
        functools.partial(_read_kernel, plan=plan),
        name="vocab_topk_read",
        platform=platform,
        grid=(num_rows, plan.chunks),
        out_shape=(
            spec((num_rows, plan.coarse_blocks), jnp.int32),
            spec((num_rows, plan.fine_blocks), jnp.int32),
            spec((num_rows, 2, plan.chunks), jnp.float32),
        ),
        num_warps=tiles.reading_warps,
        num_stages=1,
    )(logits)
    values, ids, total, _ = triton_call(
        functools.partial(_choose_kernel, plan=plan),
        name="vocab_topk_choose",
        platform=platform,
        grid=(num_rows,),
        out_shape=(
            spec((num_rows, k), jnp.float32),
            spec((num_rows, k), jnp.int32),
            spec((num_rows,), jnp.float32),
            spec((num_rows, 4, plan.slots), jnp.int32),
        ),
        num_warps=tiles.choosing_warps,
        num_stages=1,
    )(logits, *maxima)
    return values, ids, total


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What both kernels share. Blocks reach to the end of the last chunk; keys of missing columns are _SMALLEST."""

    tiles: Tiles
    k: int
    vocab: int
    platform: Platform

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.vocab, self.tiles.columns)

    @property
    def fine_blocks(self) -> int:
        return self.chunks * self.tiles.columns // _BLOCK

    @property
    def coarse_blocks(self) -> int:
        return self.fine_blocks // _BLOCK

    @property
    def slots(self) -> int:
        """How many of a level are kept; twice k, so that what reaches a bound from the level above mostly fits."""
        return max(16, pl.next_power_of_2(2 * self.k))


def _logit_keys(values: jax.Array, present: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(float32 logits without NaN and +inf, their int32 keys); -inf and _SMALLEST where none is `present`."""
    values = values.astype(jnp.float32)
    values = jnp.where(present & (values < jnp.inf), values, -jnp.inf)
    return values, jnp.where(present, ordered_bits(values), _SMALLEST)


def _from_keys(keys: jax.Array) -> jax.Array:
    """The float32 logits that have these keys; 0.0 of the two zeros."""
    bits = jnp.where(keys < 0, _SMALLEST - keys, keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _read_kernel(
    logits_ref,  # [rows, V]
    coarse_ref,  # int32[rows, coarse blocks]
    fine_ref,  # int32[rows, fine blocks]
    sums_ref,  # float32[rows, 2, chunks]: the maximum of a chunk, and the sum of exponentials relative to it
    *,
    plan: _Plan,
):
    row, chunk = pl.program_id(0), pl.program_id(1)
    blocks = plan.tiles.columns // _BLOCK
    block, lane = jnp.arange(blocks, dtype=jnp.int32), jnp.arange(_BLOCK, dtype=jnp.int32)
    columns = chunk * plan.tiles.columns + block[:, None] * _BLOCK + lane[None, :]
    present = columns < plan.vocab
    values, keys = _logit_keys(load(logits_ref.at[row, columns], mask=present, other=-jnp.inf), present)
    fine = jnp.max(keys, axis=1)
    store(fine_ref.at[row, chunk * blocks + block], fine)
    coarse = jnp.max(fine.reshape(blocks // _BLOCK, _BLOCK), axis=1)
    first = chunk * (blocks // _BLOCK)
    store(coarse_ref.at[row, first + jnp.arange(blocks // _BLOCK, dtype=jnp.int32)], coarse)
    peak = _from_keys(jnp.max(coarse))
    sums_ref[row, 0, chunk] = peak
    # Guarded before the subtraction: -inf - -inf would be a NaN.
    sums_ref[row, 1, chunk] = jnp.sum(jnp.exp(values - jnp.where(peak > -jnp.inf, peak, 0.0)))


def _choose_kernel(
    logits_ref,  # [rows, V]
    coarse_ref,  # int32[rows, coarse blocks]
    fine_ref,  # int32[rows, fine blocks]
    sums_ref,  # float32[rows, 2, chunks]
    values_ref,  # float32[rows, k]
    ids_ref,  # int32[rows, k]
    total_ref,  # float32[rows]
    kept_ref,  # int32[rows, 4, slots]: what the levels keep, for the program itself
    *,
    plan: _Plan,
):
    row = pl.program_id(0)
    slot, lane = jnp.arange(plan.slots, dtype=jnp.int32), jnp.arange(_BLOCK, dtype=jnp.int32)

    def expand(blocks):
        """int32[slots * 16], ascending: the members of blocks."""
        return (blocks[:, None] * _BLOCK + lane[None, :]).reshape(plan.slots * _BLOCK)

    def keep(keys, bound, enough, parts, places):
        """The best `slots` or fewer of some keys, K or more of them if there are, in their order.

        bound: a key that K of these or more reach. parts: (what of each is kept, fill of slots left over); places: in
        kept_ref. Returns (a key as `bound` for the members of what is kept, how many are kept, the parts).
        """
        threshold, count = _threshold(keys, bound, enough, plan)
        above, equal = keys > threshold, keys == threshold
        # Both running counts in one: there are fewer than 2**15 keys.
        running = jnp.cumsum(above.astype(jnp.int32) + (equal.astype(jnp.int32) << 16))
        spare = jax.lax.cond(count > plan.slots, lambda: plan.slots - jnp.sum(above.astype(jnp.int32)), lambda: count)
        ties = running >> 16
        chosen = above | (equal & (ties <= spare))
        place = jnp.where(chosen, (running & 0xFFFF) + jnp.minimum(ties, spare) - 1, plan.slots)
        for (part, _), at in zip(parts, places, strict=True):
            store(kept_ref.at[row, at, place], part, mask=chosen)
        barrier(plan.platform)
        filled = slot < count
        return (
            threshold,
            count,
            [
                load(kept_ref.at[row, at, slot], mask=filled, other=fill)
                for (_, fill), at in zip(parts, places, strict=True)
            ],
        )

    coarse = jnp.arange(pl.next_power_of_2(plan.coarse_blocks), dtype=jnp.int32)
    keys = load(coarse_ref.at[row, coarse], mask=coarse < plan.coarse_blocks, other=_SMALLEST)
    few = min(int(plan.tiles.enough * plan.k), plan.slots)
    bound, _, (blocks,) = keep(keys, _SMALLEST, few, [(coarse, plan.coarse_blocks)], (0,))

    fine = expand(blocks)
    keys = load(fine_ref.at[row, fine], mask=fine < plan.fine_blocks, other=_SMALLEST)
    bound, _, (blocks,) = keep(keys, bound, plan.slots, [(fine, plan.fine_blocks)], (1,))

    columns = expand(blocks)
    present = columns < plan.vocab
    _, keys = _logit_keys(load(logits_ref.at[row, columns], mask=present, other=-jnp.inf), present)
    parts = [(keys, _SMALLEST), (columns, plan.vocab)]
    _, count, (keys, columns) = keep(keys, bound, plan.slots, parts, (2, 3))

    # Places are in the order of columns. All pairs at once would not fit into registers.
    rank = jnp.zeros_like(slot)
    size = min(plan.slots, _RANKED)
    for first in range(0, plan.slots, size):
        place = first + jnp.arange(size, dtype=jnp.int32)
        other = load(kept_ref.at[row, 2, place], mask=place < count, other=_SMALLEST)[None, :]
        ahead = (other > keys[:, None]) | ((other == keys[:, None]) & (place[None, :] < slot[:, None]))
        rank += jnp.sum(ahead.astype(jnp.int32), axis=1)
    best = rank < plan.k
    rank = jnp.where(best, rank, plan.k)
    store(values_ref.at[row, rank], _from_keys(keys), mask=best)
    store(ids_ref.at[row, rank], columns, mask=best)

    chunk = jnp.arange(pl.next_power_of_2(plan.chunks), dtype=jnp.int32)
    real = chunk < plan.chunks
    peaks = load(sums_ref.at[row, 0, chunk], mask=real, other=-jnp.inf)
    sums = load(sums_ref.at[row, 1, chunk], mask=real, other=0.0)
    peak = jnp.max(peaks)
    some = peak > -jnp.inf
    total = jnp.sum(sums * jnp.exp(peaks - jnp.where(some, peak, 0.0)))
    total_ref[row] = jnp.where(some, peak + jnp.log(jnp.where(some, total, 1.0)), -jnp.inf)


def _threshold(keys: jax.Array, bound, enough: int, plan: _Plan) -> tuple[jax.Array, jax.Array]:
    """(a key that K or more reach, how many do): `bound` where no more than `slots` do, else a larger one.

    It is at most the K-th largest key, and that key itself where still more than `enough` reach it.
    """
    digit = plan.tiles.digit if keys.shape[0] <= 1024 else plan.tiles.short_digit
    values = jnp.arange(1 << digit, dtype=jnp.int32)

    def unsettled(state):
        _, count, shift = state
        return (count > enough) & (shift > 0)

    def settle(state):
        low, _, shift = state
        shift = shift - digit
        # The topmost digit starts at the smallest key, and its sums wrap into the positive ones.
        trials = low + (values << shift)
        counts = jnp.sum((keys[:, None] >= trials[None, :]).astype(jnp.int32), axis=0)
        reached = counts >= plan.k
        chosen = jnp.maximum(jnp.sum(reached.astype(jnp.int32)) - 1, 0)
        return low + (chosen << shift), jnp.sum(jnp.where(values == chosen, counts, 0)), shift

    count = jnp.sum((keys >= bound).astype(jnp.int32))
    low = jnp.where(count > enough, _SMALLEST, bound)
    low, count, _ = jax.lax.while_loop(unsettled, settle, (low, count, jnp.int32(_KEY_BITS)))
    return low, count
