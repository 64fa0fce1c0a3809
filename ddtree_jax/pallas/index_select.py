"""The k best of each row of index scores, k in the thousands and rows of 200k columns: exact, and without a sort.

A score's float32 bits are a key in the order of scores (`thresholds.ordered_bits`). A few passes find the class of keys
in which the k-th best lies, several bits a pass from the top: each counts a row's keys by their next digit. What lies
above the class is chosen; inside it, a few hundred columns as a rule, one program a row finds the exact threshold. The
rows (14 MB at 17 x 200k) stay in the L2 cache from pass to pass.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, load, require_kernels, store, triton_call
from ddtree_jax.thresholds import largest_key, ordered_bits

_SMALLEST = np.int32(-(2**31))
_INVISIBLE = np.int32(-2139095040)  # key of -inf
_KEY_BITS = 32
MISSING = -1


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the selection.

    Attributes:
      digits: bits that each counting pass settles, from the top; 3 to 6 a pass.
      lanes, steps: a program counts steps x lanes columns, a power of two; at most 15 steps, for counters of 4 bits.
      counting_warps, gathering_warps: warps of a program of a counting pass, and of one that writes columns down.
      class_size: columns of the last class that one program holds at a time; more of them cost passes over the row.
      final_warps: warps of that program.
    """

    digits: tuple[int, ...] = (4, 4, 4, 4)
    lanes: int = 512
    steps: int = 8
    counting_warps: int = 4
    gathering_warps: int = 8
    class_size: int = 4096
    final_warps: int = 8

    @property
    def columns(self) -> int:
        return self.lanes * self.steps


def select_tiles(columns: int, platform: Platform) -> Tiles:
    del platform
    return Tiles() if columns > 16384 else Tiles(steps=2)


def select_top_k_indices_reference(
    prefix_scores: jax.Array, block_scores: jax.Array, k: int, *, platform: Platform | None = None
) -> jax.Array:
    """The columns of the k best visible scores of each row; the set of `models.layers.select_top_k`.

    Args:
      prefix_scores: float32[B, T, S]; -inf = not visible.
      block_scores: float32[B, T, U], of the columns behind the prefix; -inf = not visible.
      k: static, >= 1.

    Returns:
      int32[B, T, k]: prefix slot s is s, block column u is S + u. Equal scores go by the lower column. Where fewer than
      k are visible: all of them, then MISSING (-1). In what order a list is, but for MISSING at its end, is left to the
      implementation; it depends on the scores alone, so that equal calls give equal lists.

    Raises:
      ValueError: other shapes or dtypes, or k < 1.
    """
    del platform
    _check(prefix_scores, block_scores, k)
    scores = jnp.concatenate([prefix_scores, block_scores], axis=-1)
    visible = scores != -jnp.inf
    ordered = jnp.where(visible, ordered_bits(scores), _SMALLEST)
    threshold = largest_key(lambda key: jnp.sum(ordered >= key, axis=-1, keepdims=True, dtype=jnp.int32) >= k)
    above, equal = (ordered > threshold) & visible, (ordered == threshold) & visible
    spare = k - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    kept = above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= spare))
    places = jnp.where(kept, jnp.cumsum(kept, axis=-1, dtype=jnp.int32) - 1, k)
    columns = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    put = jax.vmap(lambda at: jnp.full((k,), MISSING, jnp.int32).at[at].set(columns, mode="drop"))
    return put(places.reshape(-1, places.shape[-1])).reshape(*scores.shape[:-1], k)


def select_top_k_indices_digits(
    prefix_scores: jax.Array, block_scores: jax.Array, k: int, *, platform: Platform, tiles: Tiles | None = None
) -> jax.Array:
    """`select_top_k_indices_reference` by counting digits: one launch a digit, one to gather, one to finish.

    The list: columns above the last class in their order, then those of the class in theirs.
    """
    _check(prefix_scores, block_scores, k)
    require_kernels(platform)
    batch, tokens, slots = prefix_scores.shape
    own = block_scores.shape[-1]
    rows, total = batch * tokens, slots + own
    tiles = select_tiles(total, platform) if tiles is None else tiles
    if tiles.columns & (tiles.columns - 1) or tiles.steps > 15 or not all(3 <= width <= 6 for width in tiles.digits):
        raise ValueError(f"tiles: got {tiles}; see its attributes for what is allowed")
    if own > tiles.columns:
        raise NotImplementedError(f"needs at most {tiles.columns} block columns; got {own}")
    if total >= 2**30:
        raise NotImplementedError(f"needs fewer than 2**30 columns; got {total}")
    scores = prefix_scores.reshape(rows, slots), block_scores.reshape(rows, own)
    plan = _Plan(tiles, k, slots, own)

    state, settled = (), 0
    for width in tiles.digits:
        settled += width
        state = _count(plan, scores, state, _Digit(_KEY_BITS - settled, width), rows, platform)
    last = _Digit(_KEY_BITS - settled, tiles.digits[-1])
    gathered = _gather(plan, scores, state, last, rows, platform)
    return _finish(plan, scores, gathered, last.shift, rows, platform).reshape(batch, tokens, k)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What all kernels of a call share; `own` block columns are one chunk more, behind those of the prefix."""

    tiles: Tiles
    k: int
    slots: int
    own: int

    @property
    def prefix_chunks(self) -> int:
        return pl.cdiv(self.slots, self.tiles.columns)

    @property
    def chunks(self) -> int:
        return self.prefix_chunks + 1

    @property
    def padded_chunks(self) -> int:
        return pl.next_power_of_2(self.chunks)


@dataclasses.dataclass(frozen=True)
class _Digit:
    """A digit of a key: `width` bits above the lowest `shift`."""

    shift: int
    width: int

    @property
    def values(self) -> int:
        return 1 << self.width


def _count(
    plan: _Plan, scores: tuple, state: tuple, digit: _Digit, rows: int, platform: Platform
) -> tuple[jax.Array, ...]:
    """One pass: (int32[rows, chunks, digit values] of keys in the class, int32[rows, chunks] above it, int32[rows, 2]).

    The last is of the class counted: its smallest key, and how many of it are wanted. state: of the pass before.
    """
    previous = _Digit(digit.shift + digit.width, plan.tiles.digits[0])
    if state:
        previous = _Digit(previous.shift, state[0].shape[-1].bit_length() - 1)
    call = triton_call(
        functools.partial(_count_kernel, plan=plan, digit=digit, previous=previous if state else None),
        name="index_select_count",
        platform=platform,
        grid=(plan.chunks, rows),
        out_shape=(
            jax.ShapeDtypeStruct((rows, plan.padded_chunks, digit.values), jnp.int32),
            jax.ShapeDtypeStruct((rows, plan.padded_chunks), jnp.int32),
            jax.ShapeDtypeStruct((rows, 2), jnp.int32),
        ),
        num_warps=plan.tiles.counting_warps,
        num_stages=1,
    )
    return call(*scores, *state)


def _count_kernel(*refs, plan: _Plan, digit: _Digit, previous: _Digit | None):
    (prefix_ref, own_ref), state, (counts_ref, above_ref, class_ref) = refs[:2], refs[2:-3], refs[-3:]
    chunk, row = pl.program_id(0), pl.program_id(1)
    if previous is None:
        low, wanted = _SMALLEST, np.int32(plan.k)
    else:
        low, wanted, _, _ = _narrow(state, row, previous, plan)

    @pl.when(chunk == 0)
    def _():
        class_ref[row, 0] = jnp.int32(low)
        class_ref[row, 1] = jnp.int32(wanted)

    def count(ref, first, limit, steps, offset):
        del offset
        counts, above = _histogram(ref, row, first, limit, steps, low, digit, plan.tiles)
        store(counts_ref.at[row, chunk, jnp.arange(digit.values, dtype=jnp.int32)], counts)
        above_ref[row, chunk] = above

    _each_part(plan, chunk, prefix_ref, own_ref, count)


def _each_part(plan: _Plan, chunk, prefix_ref, own_ref, body) -> None:
    """Runs body(ref, first column, number of columns in the ref, steps, offset) on the chunk's part of the row."""

    @pl.when(chunk < plan.prefix_chunks)
    def _():
        body(prefix_ref, chunk * plan.tiles.columns, plan.slots, plan.tiles.steps, 0)

    @pl.when(chunk == plan.prefix_chunks)
    def _():
        body(own_ref, 0, plan.own, pl.cdiv(plan.own, plan.tiles.lanes), plan.slots)


def _keys(ref, row, columns, limit) -> jax.Array:
    """int32 keys of some columns; those at or beyond `limit` are invisible."""
    values = load(ref.at[row, columns], mask=columns < limit, other=-jnp.inf)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, _SMALLEST - bits, bits)


def _histogram(ref, row, first, limit, steps: int, low, digit: _Digit, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """(int32[digit values], int32[]): visible keys of the class from `low` on by their digit, and those above it."""
    lane = jnp.arange(tiles.lanes, dtype=jnp.int32)
    # Eight counters of 4 bits a word: an element costs one shift and one addition, not a comparison a digit value.
    words = [jnp.zeros((tiles.lanes,), jnp.int32) for _ in range(digit.values // 8)]
    above = jnp.zeros((tiles.lanes,), jnp.int32)
    for step in range(steps):
        keys = _keys(ref, row, first + step * tiles.lanes + lane, limit)
        visible = keys > _INVISIBLE
        distance = keys - low  # of the class: unsigned and smaller than its size
        inside = visible
        if digit.shift + digit.width < _KEY_BITS:
            inside &= jax.lax.shift_right_logical(distance, jnp.full_like(keys, digit.shift + digit.width)) == 0
            above += (visible & ~inside & (keys > low)).astype(jnp.int32)
        value = jax.lax.shift_right_logical(distance, jnp.full_like(keys, digit.shift)) & (digit.values - 1)
        one = jax.lax.shift_left(jnp.ones_like(keys), (value & 7) * 4)
        for i in range(len(words)):
            words[i] += jnp.where(inside & (value >> 3 == i), one, 0)
    values = jnp.arange(digit.values, dtype=jnp.int32)
    counts = jnp.zeros((digit.values,), jnp.int32)
    for i, word in enumerate(words):
        for j in range(4):
            fields = jax.lax.shift_right_logical(word, jnp.full_like(word, 4 * j)) & 0x000F000F
            pair = jnp.sum(fields)
            counts = jnp.where(values == 8 * i + j, pair & 0xFFFF, counts)
            counts = jnp.where(values == 8 * i + j + 4, pair >> 16, counts)
    return counts, jnp.sum(above)


def _narrow(state, row, digit: _Digit, plan: _Plan) -> tuple[jax.Array, ...]:
    """(smallest key, wanted, int32[chunks] above, int32[chunks] inside) of the class that the last pass leaves.

    Fewer visible keys than wanted leave the lowest class, which holds the last of them, and `wanted` beyond its size.
    """
    counts_ref, above_ref, class_ref = state
    chunk, value = jnp.arange(plan.padded_chunks, dtype=jnp.int32), jnp.arange(digit.values, dtype=jnp.int32)
    real = chunk < plan.chunks
    counts = load(counts_ref.at[row, chunk[:, None], value[None, :]], mask=real[:, None], other=0)
    by_value = jnp.sum(counts, axis=0)
    low, wanted = class_ref[row, 0], class_ref[row, 1]
    from_here = jnp.sum(jnp.where(value[None, :] >= value[:, None], by_value[None, :], 0), axis=1)
    chosen = jnp.maximum(jnp.sum((from_here >= wanted).astype(jnp.int32)) - 1, 0)
    beyond = jnp.sum(jnp.where((value > chosen)[None, :], counts, 0), axis=1)
    inside = jnp.sum(jnp.where((value == chosen)[None, :], counts, 0), axis=1)
    above = load(above_ref.at[row, chunk], mask=real, other=0) + beyond
    return low + (chosen << digit.shift), wanted - jnp.sum(beyond), above, inside


def _gather(
    plan: _Plan, scores: tuple, state: tuple, digit: _Digit, rows: int, platform: Platform
) -> tuple[jax.Array, ...]:
    """(columns int32[rows, k] of which those above the class are set, the class's keys and columns, int32[rows, 4]).

    The last: the class's smallest key, how many of it are wanted, how many it has, how many columns are above it.
    """
    size = plan.tiles.class_size
    call = triton_call(
        functools.partial(_gather_kernel, plan=plan, digit=digit),
        name="index_select_gather",
        platform=platform,
        grid=(plan.chunks, rows),
        out_shape=(
            jax.ShapeDtypeStruct((rows, plan.k), jnp.int32),
            jax.ShapeDtypeStruct((rows, size), jnp.int32),
            jax.ShapeDtypeStruct((rows, size), jnp.int32),
            jax.ShapeDtypeStruct((rows, 4), jnp.int32),
        ),
        num_warps=plan.tiles.gathering_warps,
        num_stages=1,
    )
    return call(*scores, *state)


def _gather_kernel(*refs, plan: _Plan, digit: _Digit):
    (prefix_ref, own_ref), state, (out_ref, keys_ref, columns_ref, summary_ref) = refs[:2], refs[2:-4], refs[-4:]
    chunk, row = pl.program_id(0), pl.program_id(1)
    low, wanted, above, inside = _narrow(state, row, digit, plan)
    earlier = jnp.arange(plan.padded_chunks, dtype=jnp.int32) < chunk
    above_before, inside_before = (jnp.sum(jnp.where(earlier, counts, 0)) for counts in (above, inside))

    @pl.when(chunk == 0)
    def _():
        for i, value in enumerate((low, wanted, jnp.sum(inside), jnp.sum(above))):
            summary_ref[row, i] = value

    size = plan.tiles.class_size

    def gather(ref, first, limit, steps, offset):
        lane = jnp.arange(pl.next_power_of_2(steps * plan.tiles.lanes), dtype=jnp.int32)
        keys = _keys(ref, row, first + lane, limit)
        distance = jax.lax.shift_right_logical(keys - low, jnp.full_like(keys, digit.shift))
        visible = keys > _INVISIBLE
        in_class = visible & (distance == 0)
        is_above = visible & (distance != 0) & (keys > low)
        # Both running counts in one: a chunk has fewer than 2**15 columns.
        running = jnp.cumsum(is_above.astype(jnp.int32) + (in_class.astype(jnp.int32) << 16))
        columns = offset + first + lane
        place = above_before + (running & 0xFFFF) - 1
        store(out_ref.at[row, jnp.where(is_above, place, plan.k)], columns, mask=is_above)
        place = inside_before + (running >> 16) - 1
        held = in_class & (place < size)
        place = jnp.where(held, place, size)
        store(keys_ref.at[row, place], keys, mask=held)
        store(columns_ref.at[row, place], columns, mask=held)

    _each_part(plan, chunk, prefix_ref, own_ref, gather)


def _finish(
    plan: _Plan, scores: tuple, gathered: tuple[jax.Array, ...], bits: int, rows: int, platform: Platform
) -> jax.Array:
    """int32[rows, k]: `gathered` with the best of the class, whose keys differ in the lowest `bits`, and MISSING."""
    call = triton_call(
        functools.partial(_finish_kernel, plan=plan, bits=bits),
        name="index_select_finish",
        platform=platform,
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, plan.k), jnp.int32),
        num_warps=plan.tiles.final_warps,
        num_stages=1,
        aliases={2: 0},
    )
    return call(*scores, *gathered)


def _finish_kernel(
    prefix_ref,  # float32[rows, S]
    own_ref,  # float32[rows, U]
    _,  # out_ref before
    keys_ref,  # int32[rows, class size]
    columns_ref,  # int32[rows, class size]
    summary_ref,  # int32[rows, 4]
    out_ref,  # int32[rows, k]
    *,
    plan: _Plan,
    bits: int,
):
    row = pl.program_id(0)
    low, wanted, size, start = (summary_ref[row, i] for i in range(4))
    taken = jnp.minimum(wanted, size)
    held = plan.tiles.class_size

    rest = jnp.arange(pl.next_power_of_2(plan.k), dtype=jnp.int32)
    missing = (rest >= start + taken) & (rest < plan.k)
    store(out_ref.at[row, jnp.where(missing, rest, plan.k)], jnp.full_like(rest, MISSING), mask=missing)

    def largest(count_from) -> jax.Array:
        """The largest distance from `low` at or above which `taken` of the class lie."""

        def refine(i, threshold):
            trial = threshold + (np.int32(1) << (bits - 1 - i))
            return jnp.where(count_from(trial) >= taken, trial, threshold)

        return jax.lax.fori_loop(0, bits, refine, jnp.int32(0))

    def emit(distance, columns, threshold, spare, done):
        """Stores what is chosen of some columns; (equal to the threshold, chosen) among them and before."""
        equal = distance == threshold
        chosen = (distance > threshold) | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= spare))
        place = jnp.where(chosen, start + done + jnp.cumsum(chosen.astype(jnp.int32)) - 1, plan.k)
        store(out_ref.at[row, place], columns, mask=chosen)
        return spare - jnp.sum(equal.astype(jnp.int32)), done + jnp.sum(chosen.astype(jnp.int32))

    @pl.when((size <= held) & (taken > 0))
    def _():
        lane = jnp.arange(held, dtype=jnp.int32)
        live = lane < size
        distance = jnp.where(live, load(keys_ref.at[row, lane], mask=live, other=0) - low, -1)
        threshold = largest(lambda trial: jnp.sum((distance >= trial).astype(jnp.int32)))
        spare = taken - jnp.sum((distance > threshold).astype(jnp.int32))
        emit(distance, load(columns_ref.at[row, lane], mask=live, other=0), threshold, spare, 0)

    # Thousands of keys with the same upper bits, as where every score is equal: passes over the whole row.
    @pl.when(size > held)
    def _():
        lane = jnp.arange(held, dtype=jnp.int32)

        def part(ref, chunk, limit):
            keys = _keys(ref, row, chunk * held + lane, limit)
            inside = (keys > _INVISIBLE) & (keys >= low) & (keys - low >= 0) & (keys - low < np.int32(1 << bits))
            return jnp.where(inside, keys - low, -1)

        parts = (prefix_ref, plan.slots, 0), (own_ref, plan.own, plan.slots)

        def over_row(add, carry):
            for ref, limit, _ in parts:

                def step(chunk, carry, ref=ref, limit=limit):
                    return add(carry, part(ref, chunk, limit))

                carry = jax.lax.fori_loop(0, pl.cdiv(limit, held), step, carry)
            return carry

        def count(reaches):
            return over_row(lambda total, distance: total + jnp.sum(reaches(distance).astype(jnp.int32)), jnp.int32(0))

        def extend(carry, distance):
            least, most = carry
            inside = jnp.where(distance >= 0, distance, np.int32(1 << bits))
            return jnp.minimum(least, jnp.min(inside)), jnp.maximum(most, jnp.max(distance))

        # One value for all of them is the likeliest case.
        least, most = over_row(extend, (jnp.int32(1 << bits), jnp.int32(-1)))
        threshold = jax.lax.cond(
            least == most,
            lambda: most,
            lambda: largest(lambda trial: count(lambda distance: distance >= trial)),
        )
        carry = taken - count(lambda distance: distance > threshold), jnp.int32(0)
        for ref, limit, offset in parts:

            def write(chunk, carry, ref=ref, limit=limit, offset=offset):
                return emit(part(ref, chunk, limit), offset + chunk * held + lane, threshold, *carry)

            carry = jax.lax.fori_loop(0, pl.cdiv(limit, held), write, carry)


def _check(prefix_scores: jax.Array, block_scores: jax.Array, k: int) -> None:
    for name, array in (("prefix_scores", prefix_scores), ("block_scores", block_scores)):
        if array.ndim != 3 or array.dtype != jnp.float32 or 0 in array.shape:
            raise ValueError(
                f"{name}: got {array.dtype}{list(array.shape)}; it must be float32[B, T, columns], not empty"
            )
    if prefix_scores.shape[:2] != block_scores.shape[:2]:
        raise ValueError(f"block_scores: got shape {block_scores.shape}; prefix_scores has {prefix_scores.shape}")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k: got {k!r}; it must be an int >= 1")
