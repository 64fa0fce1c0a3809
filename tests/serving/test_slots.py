"""Slots, chunks, widths and stop strings: the host's bookkeeping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax import slots as device
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.models.cache import Cache, take_slots, write_rows, write_states
from ddtree_jax.sampling import SamplingParams
from serving import runner
from serving.jobs import LoopSettings
from serving.slots import MIN_REUSED_TOKENS, Place, SlotTable
from serving.stops import StopStrings
from tests.engine.conftest import text_tokenizer

PREFIX = list(range(MIN_REUSED_TOKENS))


def test_slots_are_taken_in_the_order_in_which_they_were_given_back():
    table = SlotTable(3, prefix_reuse=True)
    assert [table.acquire([1]).slot for _ in range(3)] == [0, 1, 2]
    assert table.acquire([1]) is None
    table.release(2)
    table.release(0)
    assert [table.acquire([1]).slot for _ in range(2)] == [2, 0]
    with pytest.raises(ValueError, match="free already"):
        table.release(1)
        table.release(1)


def test_a_prefix_is_reused_where_it_lies_or_copied():
    table = SlotTable(3, prefix_reuse=True)
    assert table.acquire([*PREFIX, 99]) == Place(0, 0, 0)
    table.hold(0, PREFIX)
    # Its owner still runs: a copy, which may not take the last token, whose logits are needed.
    assert table.acquire(PREFIX) == Place(1, 0, 1)
    assert table.acquire([*PREFIX, 98, 97]) == Place(2, len(PREFIX), 0)
    table.release(1)
    table.release(0)
    # All that slot 0 holds is reused: there is no second copy of it, although slot 1 is free for longer.
    assert table.acquire([*PREFIX, 98]) == Place(0, len(PREFIX), 0)
    table.hold(0, [*PREFIX, 98, 1, 2, 3])
    table.release(0)
    # Less than all: the rest stays for others.
    assert table.acquire([*PREFIX, 98, 5]) == Place(1, len(PREFIX) + 1, 0)


def test_nothing_is_reused_that_is_short_or_gone_or_not_wanted():
    table = SlotTable(2, prefix_reuse=True)
    table.hold(0, PREFIX)
    assert table.acquire(PREFIX[:-1] + [77, 78]).length == 0
    table.hold(1, PREFIX)
    table.forget()
    assert table.acquire([*PREFIX, 1]).length == 0
    table = SlotTable(2, prefix_reuse=False)
    table.hold(0, PREFIX)
    assert table.acquire([*PREFIX, 1]) == Place(0, 0, 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_place_promises_lies_in_its_source(data):
    table = SlotTable(3, prefix_reuse=True)
    held = {slot: [] for slot in range(3)}  # what each cache really holds
    taken = set()
    for _ in range(data.draw(st.integers(1, 25))):
        if taken and data.draw(st.booleans()):
            slot = data.draw(st.sampled_from(sorted(taken)))
            taken.remove(slot)
            table.release(slot)
            continue
        prompt = [7] * data.draw(st.integers(1, 40)) + data.draw(st.lists(st.integers(0, 1), max_size=20)) + [3]
        place = table.acquire(prompt)
        if place is None:
            assert len(taken) == 3
            continue
        assert place.slot not in taken
        assert place.length < len(prompt)
        assert held[place.source][: place.length] == prompt[: place.length]
        assert place.length == 0 or place.length >= MIN_REUSED_TOKENS
        held[place.slot] = prompt[: place.length] + prompt[place.length :]
        table.hold(place.slot, held[place.slot])
        taken.add(place.slot)


@given(st.integers(1, 2000), st.sampled_from([32, 64, 256]))
def test_chunks_come_to_an_end_and_are_of_compiled_sizes(remaining, largest):
    chunks = 0
    while remaining > 0:
        size = runner.chunk_size(remaining, largest)
        assert size in runner.chunk_sizes(largest)
        assert remaining >= size or remaining > size / 2 or size == runner.MIN_CHUNK_TOKENS
        remaining -= size
        chunks += 1
    assert chunks <= 2000 // 32 + 4


def test_widths_and_extents_end_with_everything():
    assert runner.widths(1) == (1,)
    assert runner.widths(6) == (1, 2, 4, 6)
    assert runner.widths(8) == (1, 2, 4, 8)
    assert device.extents(200) == (200,)
    assert device.extents(1025) == (256, 1024, 1025)
    assert [device.extent_of(n, 1025) for n in (0, 256, 257, 1025)] == [256, 256, 1024, 1025]


def test_capacity_leaves_room_for_the_widest_write():
    assert device.pool_capacity(192, 32, 5) == 256  # full, and then a chunk
    assert device.pool_capacity(192, 32, 64) == 320  # full, and then a tree's deepest path


@pytest.mark.parametrize(
    ("strings", "text", "found"),
    [
        (["bc"], "abcd", ("bc", 3)),
        (["x"], "abcd", None),
        (["cd", "bc"], "abcd", ("bc", 3)),
        (["bcd", "cd"], "abcd", ("bcd", 4)),
        (["aab"], "aaab", ("aab", 4)),
        (["a"], "ba", ("a", 2)),
    ],
)
def test_stop_strings_are_found_where_they_are_complete(strings, text, found):
    tokenizer = text_tokenizer()
    token_ids = [tokenizer.encode(character)[0] for character in text]
    stops = StopStrings(tokenizer, strings)
    hits = [(stops.push(token), i) for i, token in enumerate(token_ids, 1)]
    hits = [hit for hit in hits if hit[0] is not None]
    assert (hits[0] if hits else None) == found


@pytest.mark.parametrize(("slots", "num_slots"), [([1, 1], 4), ([1, 0], 2), ([0, 2], 2)])
def test_a_batch_of_slots_is_distinct_and_in_order_where_it_is_whole(slots, num_slots):
    with pytest.raises(ValueError, match="allowed are distinct ones"):
        device.SlotBatch.pack([device.SlotRow(slot) for slot in slots], num_slots)


def test_what_is_packed_comes_out():
    row = device.SlotRow(3, 7, 2, 9, False, 0.5, 40, 0.9, 0.1, device.key_words(-1))
    batch = device.SlotBatch.pack([row, device.SlotRow(1)], 4)
    assert (batch.slots.tolist(), batch.root_token_ids.tolist(), batch.emitted.tolist()) == ([3, 1], [7, 0], [2, 0])
    assert (batch.remaining.tolist(), batch.finished.tolist()) == ([9, 0], [False, True])
    sampling = batch.sampling()
    expected = SamplingParams.create(1, temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, seed=-1)
    for field in ("temperature", "top_k", "top_p", "min_p"):
        assert getattr(sampling, field)[0] == getattr(expected, field)[0]
    assert jax.random.key_data(sampling.keys)[0].tolist() == jax.random.key_data(expected.keys)[0].tolist()
    assert device.SlotBatch.pack([device.SlotRow(i) for i in range(4)], 4).slots is None


@pytest.mark.parametrize("slots", [[2, 0], [3], [0, 1, 2, 3]])
def test_rows_and_states_are_written_where_their_slots_are_and_nowhere_else(slots):
    rng = np.random.default_rng(0)
    lengths = np.array([3, 0, 6, 1], np.int32)
    cache = Cache(
        rows={"a": jnp.asarray(rng.normal(size=(2, 4, 12, 3)), jnp.float32)},
        lengths=jnp.asarray(lengths),
        states=jnp.asarray(rng.normal(size=(2, 4, 5)), jnp.float32),
    )
    new = rng.normal(size=(2, len(slots), 4, 3)).astype(np.float32)
    states = rng.normal(size=(2, len(slots), 4, 5)).astype(np.float32)
    counts = np.array([2, 0, 4, 1][: len(slots)], np.int32)
    at = jnp.asarray(slots, jnp.int32)
    written = write_states(write_rows(cache, {"a": new}, counts, at), states, counts, slots=at)

    rows, kept = np.array(cache.rows["a"]), np.array(cache.states)
    for i, slot in enumerate(slots):
        rows[:, slot, lengths[slot] : lengths[slot] + 4] = new[:, i]
        if counts[i]:
            kept[:, slot] = states[:, i, counts[i] - 1]
        lengths[slot] += counts[i]
    np.testing.assert_array_equal(written.rows["a"], rows)
    np.testing.assert_array_equal(written.lengths, lengths)
    np.testing.assert_array_equal(written.states, kept)
    view = take_slots(written, at, 7)
    np.testing.assert_array_equal(view.rows["a"], rows[:, slots, :7])
    np.testing.assert_array_equal(view.lengths, lengths[slots])
    np.testing.assert_array_equal(view.states, kept[:, slots])
    whole = take_slots(written, None, 7)
    np.testing.assert_array_equal(whole.rows["a"], rows[:, :, :7])


def test_caches_that_cannot_be_read_are_replaced(text_engine):
    class Broken:
        """As an array that a program gave whose run on the device failed."""

        def block_until_ready(self):
            raise RuntimeError("the run failed")

    member = SpeculativeAlgorithm.NONE
    one = runner.Runner(
        text_engine,
        LoopSettings(algorithm=member, budget=0, max_running_requests=1, max_queued_requests=0, context_length=64),
    )
    assert one.recover() is False
    one._pool = Broken()
    assert one.recover() is True
    assert one.recover() is False
    jax.tree.leaves(one._pool)[0].delete()
    assert one.recover() is True
