"""Grouping of rows by expert against a plain Python oracle."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas.moe_tiles import combine, make_tiles, max_tiles

# (M, k, E, rows of a tile); one program each
SHAPES = ((1, 1, 1, 1), (1, 3, 4, 2), (5, 2, 3, 16), (7, 2, 4, 2), (9, 3, 5, 4), (20, 2, 2, 16), (6, 2, 40, 1))
tiles_of = jax.jit(make_tiles, static_argnums=(1, 2))


def oracle(ids, num_experts, rows):
    """(expert and row list of every used tile, slot of each pair), pairs in order."""
    by_expert = {}
    for m, choices in enumerate(ids):
        for c, e in enumerate(choices):
            if 0 <= e < num_experts:
                by_expert.setdefault(int(e), []).append((m, c))
    tiles, slots = [], np.full(np.shape(ids), -1)
    for e in sorted(by_expert):
        for start in range(0, len(by_expert[e]), rows):
            some = by_expert[e][start : start + rows]
            for place, (m, c) in enumerate(some):
                slots[m, c] = len(tiles) * rows + place
            tiles.append((e, [m for m, _ in some] + [-1] * (rows - len(some))))
    return tiles, slots


def check(ids, num_experts, rows):
    got = tiles_of(jnp.asarray(ids, jnp.int32), num_experts, rows)
    tiles, slots = oracle(ids, num_experts, rows)
    count = got.experts.shape[0]
    assert len(tiles) <= count == max_tiles(np.size(ids), num_experts, rows)
    assert got.rows.shape == (count * rows,)
    unused = count - len(tiles)
    np.testing.assert_array_equal(got.experts, [e for e, _ in tiles] + [num_experts] * unused)
    np.testing.assert_array_equal(got.rows, [m for _, own in tiles for m in own] + [-1] * unused * rows)
    np.testing.assert_array_equal(got.slots, slots)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_tiles_equal_the_oracle(data):
    m, k, num_experts, rows = data.draw(st.sampled_from(SHAPES))
    # Ids of nobody on both sides; a row may even choose an expert twice.
    some = data.draw(st.lists(st.integers(-2, num_experts + 1), min_size=1, max_size=num_experts + 4))
    ids = data.draw(st.lists(st.sampled_from(some), min_size=m * k, max_size=m * k))
    check(np.reshape(ids, (m, k)), num_experts, rows)


@pytest.mark.parametrize("ids", [-1, 0, 3], ids=["nobody", "all to the first", "all to the last"])
def test_one_expert_for_all(ids):
    check(np.full((7, 2), ids), 4, 2)


def test_counts_that_fill_tiles_exactly():
    check(np.repeat([[0, 1], [2, 1], [2, 0]], [2, 2, 2], axis=0), 4, 2)
    check(np.tile([0, 1], (16, 1)), 2, 16)


def test_the_most_tiles_are_needed_by_some_routing_and_by_none_more():
    for pairs, num_experts, rows in itertools.product(range(1, 9), range(1, 5), range(1, 5)):
        most = max(
            sum(-(-count // rows) for count in counts)
            for counts in itertools.product(range(pairs + 1), repeat=num_experts)
            if sum(counts) == pairs
        )
        assert max_tiles(pairs, num_experts, rows) == most, (pairs, num_experts, rows)


def test_combine_leaves_out_pairs_of_nobody():
    rng = np.random.default_rng()
    outputs = rng.standard_normal((6, 3)).astype(np.float32)
    outputs[[0, 5]] = np.nan  # slots that nothing wrote
    slots = np.array([[1, 2], [-1, 4], [-1, -1]], np.int32)
    weights = rng.standard_normal((3, 2)).astype(np.float32)
    got = functools.partial(jax.jit(combine), outputs, slots)(weights)
    want = [weights[0] @ outputs[[1, 2]], weights[1, 1] * outputs[4], np.zeros(3)]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
