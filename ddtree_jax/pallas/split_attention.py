"""What the attention kernels share: the online softmax, how a prefix is split over the GPU, and the merge of the parts.

A prefix of `lengths[b]` rows and the block behind it are one sequence of tiles. Split s of a query tile takes the tiles
[s * chunk, (s + 1) * chunk), keeps a running maximum and sum in float32, and writes a normalised part with its
logarithmic weight; splits without tiles exit at once. The merge adds the parts of a row by their weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, dot, load, store, triton_call

LOG2_E = math.log2(math.e)
# The running maximum starts finite: masked scores are -inf, and -inf - -inf would be NaN.
LOWEST = -1e30
# Elements that one block of the merge has in flight, unless a single row has more; bytes that a warp of it has.
_MOST_MERGED, _WARP_BYTES = 16384, 16384
# Blocks of the merge for each core: it waits for memory and little else, so small ones that start together are best.
_MERGE_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile choices of an attention kernel; blocks are powers of two.

    Attributes:
      rows: query rows (pairs of block row and head) of a tile, the M side of the dots.
      keys: prefix rows of a tile.
      block_keys: columns of the block of a tile.
      num_warps, num_stages: as for Triton.
      per_core: blocks that fit on a streaming multiprocessor at once; more splits are made to fill them.
      min_tiles: fewest key tiles that are worth a split of their own.
      start: what a block costs for its queries and its part, in key tiles.
      splits: their number, or None: chosen by `num_splits`.
      merge_rows: rows of a tile of the merge, at most.
      apart: the products of the scores in a branch of their own, see `attend`.
    """

    rows: int
    keys: int
    block_keys: int
    num_warps: int
    num_stages: int
    per_core: int = 1
    min_tiles: int = 2
    start: int = 2
    splits: int | None = None
    merge_rows: int = 4
    apart: bool = False


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def cdiv(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def check_registers(registers: tuple[int, int]) -> None:
    """ValueError for registers of (two computing warpgroups, one that copies) that no block of three gets.

    A block starts with 168 registers for each of its 384 threads. A warpgroup that asks for more than the others have
    given back waits for ever.
    """
    compute, copy = registers
    if any(n % 8 or not 24 <= n <= 256 for n in registers) or 2 * compute + copy > 3 * 168:
        raise ValueError(f"registers: got {registers}; multiples of 8 from 24 on, 2 * first + second at most {3 * 168}")


def num_splits(tiles: Tiles, *, query_tiles: int, key_tiles: int, platform: Platform, even: bool = False) -> int:
    """Splits of each query tile for a grid that fills the cores in few, full waves.

    Args:
      query_tiles: of the whole call (batch, KV heads).
      key_tiles: at full capacity.
      even: splits differ by one tile at most. Else all but the last are of one length, `split_range`.
    """
    most = max(1, min(key_tiles // tiles.min_tiles, 64))
    if tiles.splits is not None:
        return max(1, min(tiles.splits, most))
    slots = max(platform.cores, 1) * tiles.per_core

    def time(splits: int) -> float:
        # More parts cost the merge.
        waves = math.ceil(query_tiles * splits / slots)
        mine = key_tiles / splits if even else math.ceil(key_tiles / splits)
        return waves * (mine + tiles.start) * (1.0 if splits == 1 else 1.02)

    return min(range(1, most + 1), key=lambda n: (time(n), n))


class Range(NamedTuple):
    """Key tiles of one split; int32 scalars. Prefix tiles first, then block tiles."""

    prefix: tuple[jax.Array, jax.Array]
    block: tuple[jax.Array, jax.Array]
    some: jax.Array  # bool: not empty


def _chunk(length: jax.Array, tiles: Tiles, splits: int, block_tiles: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    prefix = cdiv(length, tiles.keys)
    total = prefix + block_tiles
    return prefix, total, jnp.maximum(cdiv(total, splits), tiles.min_tiles)


def split_range(length: jax.Array, split: jax.Array, tiles: Tiles, splits: int, block_tiles: int) -> Range:
    prefix, total, chunk = _chunk(length, tiles, splits, block_tiles)
    first = split * chunk
    last = jnp.minimum(first + chunk, total)
    return Range(
        (jnp.minimum(first, prefix), jnp.minimum(last, prefix)),
        (jnp.maximum(first - prefix, 0), jnp.maximum(last - prefix, 0)),
        first < total,
    )


class State(NamedTuple):
    """Online softmax of M rows: largest score (base 2), sum of weights, weighted values."""

    top: jax.Array  # float32[M]
    total: jax.Array  # float32[M]
    acc: jax.Array  # float32[M, N]


def empty_state(rows: int, width: int) -> State:
    return State(
        jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, width), jnp.float32)
    )


def attend(
    state: State, queries: tuple[jax.Array, ...], keys: tuple[jax.Array, ...], values: jax.Array, visible: jax.Array,
    scale: float, *, busy: jax.Array | None = None, broken: jax.Array | None = None,
) -> State:  # fmt: skip
    """Adds one tile of keys; those that some row does not see must be finite.

    Args:
      queries, keys: parts [M, Ci] and [K, Ci] whose products add up to the scores.
      values: [K, N].
      visible: bool[M or 1, K].
      busy: a scalar that is True. A product in a branch of its own is laid out over the warps by itself; Triton
        otherwise makes a product that feeds another one twice where 64 rows are spread over eight warps.
      broken: bool[K], columns whose keys or values were not finite: NaN for every row that sees them.
    """
    turned = [k.T for k in keys]

    def weigh() -> tuple[jax.Array, ...]:
        # Scaled one by one: a plain sum would be fused into one product on top of the other, which is a chain again.
        products = [dot(q, k) * (scale * LOG2_E) for q, k in zip(queries, turned, strict=True)]
        scores = functools.reduce(operator.add, products)
        if broken is not None:
            scores = jnp.where(broken[None, :], jnp.nan, scores)
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(state.top, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - top[:, None])
        fade = jnp.exp2(state.top - top)
        return weights.astype(values.dtype), top, state.total * fade + jnp.sum(weights, axis=1), fade

    if busy is None:
        weights, top, total, fade = weigh()
    else:
        # The branch that is never taken: constants would be given places in shared memory.
        idle = jnp.broadcast_to(state.total[:, None], (queries[0].shape[0], values.shape[0])).astype(values.dtype)
        weights, top, total, fade = jax.lax.cond(busy, weigh, lambda: (idle, state.top, state.total, state.total))
    return State(top, total, state.acc * fade[:, None] + dot(weights, values))


def finite_rows(parts: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Parts [K, Ci] with zeros for NaN and infinities, and which rows had any: bool[K].

    0 * NaN would carry a row that nobody sees into every row of the products.
    """
    clean, broken = [], jnp.zeros((parts[0].shape[0],), jnp.float32)
    for part in parts:
        wide = part.astype(jnp.float32)
        finite = jnp.abs(wide) < jnp.inf
        clean.append(jnp.where(finite, wide, 0.0).astype(part.dtype))
        broken += jnp.sum(jnp.where(finite, 0.0, 1.0), axis=1)
    return tuple(clean), broken > 0


def plain_loop(start: jax.Array, stop: jax.Array, body: Callable[[jax.Array, State], State], state: State) -> State:
    """A loop that Triton does not pipeline: for the block's few tiles its buffers would cost shared memory."""
    # A bare comparison would be recognised as fori_loop and pipelined.
    run = jax.lax.while_loop(
        lambda carry: (carry[0] < stop) & (start < stop), lambda carry: (carry[0] + 1, body(*carry)), (start, state)
    )
    return run[1]


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """(values [M, N], logarithm to base 2 of the sum of weights [M]); zeros, and a tiny weight, of a blind row."""
    safe = jnp.where(state.total == 0.0, 1.0, state.total)
    return state.acc / safe[:, None], state.top + jnp.log2(safe)


class Parts(NamedTuple):
    """Shapes of what the splits write: values [splits, B, rows, N] and float32 weights [splits, B, rows]."""

    values: jax.ShapeDtypeStruct
    weights: jax.ShapeDtypeStruct


def parts_shape(splits: int, batch: int, rows: int, width: int, dtype: Any = jnp.float32) -> Parts:
    return Parts(
        jax.ShapeDtypeStruct((splits, batch, rows, width), dtype),
        jax.ShapeDtypeStruct((splits, batch, rows), jnp.float32),
    )


def _merge_kernel(
    lengths_ref, values_ref, weights_ref, out_ref, *, tiles: Tiles, splits: int, rows: int, active: Callable,
    place: Callable[[jax.Array], jax.Array] | None,
) -> None:  # fmt: skip
    batch, start = pl.program_id(1), pl.program_id(0) * tiles.merge_rows
    count = active(lengths_ref[batch])
    live = start + jnp.arange(tiles.merge_rows) < rows
    at = pl.ds(start, tiles.merge_rows)
    width = out_ref.shape[-1]
    # All loads before the first use of one, so that they are in flight together; those of empty splits are masked and
    # touch no memory.
    given = [live & (i < count) for i in range(splits)]
    log_at, value_at = (at,), (at, pl.ds(0, width))
    if place is not None:
        placed = place(jnp.minimum(start + jnp.arange(tiles.merge_rows), rows - 1))
        log_at, value_at = (placed,), (placed[:, None], jnp.arange(width)[None, :])
    parts = [
        load(values_ref.at[jnp.int32(i), batch, *value_at], mask=mask[:, None], other=0.0)
        for i, mask in enumerate(given)
    ]
    logs = [
        load(weights_ref.at[jnp.int32(i), batch, *log_at], mask=mask, other=2 * LOWEST) for i, mask in enumerate(given)
    ]
    top = logs[0]
    for log in logs[1:]:
        top = jnp.maximum(top, log)
    total = jnp.zeros((tiles.merge_rows,), jnp.float32)
    acc = jnp.zeros((tiles.merge_rows, width), jnp.float32)
    for part, log in zip(parts, logs, strict=True):
        weight = jnp.exp2(log - top)
        total, acc = total + weight, acc + part.astype(jnp.float32) * weight[:, None]
    store(out_ref.at[batch, at, pl.ds(0, width)], (acc / total[:, None]).astype(out_ref.dtype), mask=live[:, None])


def merge(
    lengths: jax.Array, parts: tuple[jax.Array, jax.Array], dtype: Any, *, name: str, tiles: Tiles, platform: Platform,
    block_tiles: int, active: Callable[[jax.Array], jax.Array] | None = None, rows: int | None = None,
    place: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:  # fmt: skip
    """[B, rows, N] of `dtype` from the parts of `finish`; a split without tiles has written nothing and is not read.

    active: length of a prefix -> how many splits have written; None: those with tiles. rows, place: how many rows the
    result has, and rows of the result -> where the parts have them; None: the same rows.
    """
    splits, batch, stored, width = parts[0].shape
    rows = stored if rows is None else rows
    merge_rows = tiles.merge_rows
    while merge_rows > 1 and (
        merge_rows * width * splits > _MOST_MERGED
        or cdiv(rows, merge_rows) * batch < _MERGE_BLOCKS * max(platform.cores, 1)
    ):
        merge_rows //= 2
    tiles = dataclasses.replace(tiles, merge_rows=merge_rows)
    size = merge_rows * width * parts[0].dtype.itemsize
    warps = min(size // (32 * 16), 4)  # 16 bytes a load of a thread
    while warps < min(cdiv(size * splits, _WARP_BYTES), 8):  # all in registers
        warps = max(1, 2 * warps)

    def count(length: jax.Array) -> jax.Array:
        _, total, chunk = _chunk(length, tiles, splits, block_tiles)
        return (total + chunk - 1) // chunk

    def kernel(*refs: Any) -> None:
        _merge_kernel(*refs, tiles=tiles, splits=splits, rows=rows, active=active or count, place=place)

    return triton_call(
        kernel,
        name=name,
        platform=platform,
        grid=(cdiv(rows, tiles.merge_rows), batch),
        out_shape=jax.ShapeDtypeStruct((batch, rows, width), dtype),
        num_warps=warps,
        num_stages=1,
    )(lengths, *parts)
