"""Trees from pair scores against the plain heap and against enumeration of all prefixes, exactly."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas.vocab_topk import exact_topk
from ddtree_jax.tree import (
    PAIR_FORMULATIONS,
    build_tree_from_candidates,
    build_tree_from_pairs,
    chain_from_pairs,
    default_pair_formulation,
    invariants,
    reference,
)
from ddtree_jax.tree import pairs as pairs_module

KINDS = ("continuous", "integer", "few_values", "uniform", "sparse", "overflowing")


def random_pairs(rng, kind, shape):
    """(pair_log_probs float32[L, K, K], token_ids int32[L, K]) of one awkward kind."""
    depth, k = shape
    values = -np.abs(rng.normal(size=(depth, k, k)) * 3).astype(np.float32)
    if kind == "integer":
        values = np.round(values)
    elif kind == "few_values":
        # Sums of these round: equal scores then come from unequal steps.
        values = rng.choice(np.float32([-0.1, -0.2, -0.3, -0.4]), size=values.shape)
    elif kind == "uniform":
        values = np.full_like(values, -0.7)
    elif kind == "sparse":
        values = np.where(rng.random(values.shape) < 0.6, -np.inf, np.round(values))
        values = np.where(rng.random(values.shape) < 0.1, np.float32(np.nan), values)
        values = np.where(rng.random(values.shape) < 0.1, np.float32(0.5), values)  # not <= 0: no candidate
    elif kind == "overflowing":
        values = np.where(rng.random(values.shape) < 0.5, np.float32(-3e38), values)
    token_ids = np.stack([rng.permutation(3 * k)[:k] for _ in range(depth)])
    return values.astype(np.float32), token_ids.astype(np.int32)


def batch_of(seed, per_kind, depth, k):
    rng = np.random.default_rng(seed)
    pairs = [random_pairs(rng, kind, (depth, k)) for kind in KINDS for _ in range(per_kind)]
    return np.stack([p for p, _ in pairs]), np.stack([t for _, t in pairs])


def heap_trees(pairs, token_ids, roots, budget):
    rows = zip(pairs, token_ids, roots, strict=True)
    return [reference.best_first_tree_from_pairs(p, ids, int(root), budget) for p, ids, root in rows]


def enumerated(pairs, token_ids, budget):
    """[(score, ranks, tokens)] of the `budget` best prefixes: all prefixes, sorted."""
    depth, k = token_ids.shape
    found = []
    for length in range(1, depth + 1):
        for path in itertools.product(range(k), repeat=length):
            score, ranks, above = np.float32(0.0), (), 0
            for level, column in enumerate(path):
                row = np.where(pairs[level, above] <= 0, pairs[level, above], -np.inf)
                ahead = [
                    c for c in range(k) if (-row[c], token_ids[level, c]) < (-row[column], token_ids[level, column])
                ]
                ranks, above = (*ranks, len(ahead)), column
                with np.errstate(over="ignore"):
                    score = np.float32(score + row[column])
            if score > -np.inf:
                found.append((score, ranks, tuple(int(token_ids[i, c]) for i, c in enumerate(path))))
    return sorted(found, key=lambda item: (-item[0], item[1]))[:budget]


def paths_of(tree, b):
    """[(score, tokens)] of the nodes of one sequence besides the root, in slot order."""
    out, tokens = [], {0: ()}
    for node in range(1, int(tree.num_nodes[b])):
        tokens[node] = (*tokens[int(tree.parents[b, node])], int(tree.token_ids[b, node]))
        out.append((np.float32(tree.log_probs[b, node]), tokens[node]))
    return out


# (L, K, budget): square, more ranks than budget, fewer reachable than budget, one row, one candidate, one node.
SHAPES = [(6, 5, 16), (7, 16, 40), (5, 12, 6), (2, 3, 20), (1, 6, 9), (4, 1, 7), (3, 4, 1)]


@pytest.mark.parametrize("formulation", PAIR_FORMULATIONS)
@pytest.mark.parametrize("depth, k, budget", SHAPES)
def test_equals_plain_heap(depth, k, budget, formulation):
    pairs, token_ids = batch_of(budget, 10, depth, k)
    roots = np.arange(len(pairs), dtype=np.int32)
    tree = build_tree_from_pairs(pairs, token_ids, roots, budget=budget, formulation=formulation)
    tree_cases.assert_trees_equal(tree, heap_trees(pairs, token_ids, roots, budget))
    invariants.check_tree(tree)


@pytest.mark.slow
@pytest.mark.parametrize("formulation", PAIR_FORMULATIONS)
@pytest.mark.parametrize("depth, k, budget", [(7, 16, 128), (15, 8, 256), (5, 3, 64)])
def test_equals_plain_heap_thousands(depth, k, budget, formulation):
    pairs, token_ids = batch_of(1000 + budget, 100, depth, k)
    roots = np.arange(len(pairs), dtype=np.int32)
    tree = build_tree_from_pairs(pairs, token_ids, roots, budget=budget, formulation=formulation)
    tree_cases.assert_trees_equal(tree, heap_trees(pairs, token_ids, roots, budget))


@pytest.mark.parametrize("formulation", PAIR_FORMULATIONS)
def test_equals_enumeration_of_all_prefixes(formulation):
    """Neither side uses a heap: all prefixes are listed and sorted by (score, tuple of ranks)."""
    budget = 12
    pairs, token_ids = batch_of(3, 6, 3, 4)
    roots = np.zeros(len(pairs), np.int32)
    tree = jax.device_get(build_tree_from_pairs(pairs, token_ids, roots, budget=budget, formulation=formulation))
    for b in range(len(pairs)):
        wanted = enumerated(pairs[b], token_ids[b], budget)
        assert paths_of(tree, b) == [(score, tokens) for score, _, tokens in wanted]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_few_levels_of_ties(data):
    """Entries from a handful of values, so that most comparisons are ties; both formulations, the heap, and a list."""
    depth, k, budget = 3, 3, 10
    entries = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, float("-inf")])
    values = data.draw(st.lists(entries, min_size=depth * k * k, max_size=depth * k * k))
    pairs = np.asarray(values, np.float32).reshape((1, depth, k, k))
    token_ids = np.stack([data.draw(st.permutations(range(k))) for _ in range(depth)])[None].astype(np.int32)
    roots = np.zeros(1, np.int32)
    expected = heap_trees(pairs, token_ids, roots, budget)
    for formulation in PAIR_FORMULATIONS:
        tree = build_tree_from_pairs(pairs, token_ids, roots, budget=budget, formulation=formulation)
        tree_cases.assert_trees_equal(tree, expected)
    listed = enumerated(pairs[0], token_ids[0], budget)
    assert [node.ranks for node in expected[0][1:]] == [ranks for _, ranks, _ in listed]


@pytest.mark.parametrize("formulation", PAIR_FORMULATIONS)
def test_scores_that_ignore_the_parent_give_the_tree_of_the_rows(formulation):
    """The independent case is that of `build_tree`."""
    rng = np.random.default_rng(4)
    rows = -np.sort(rng.integers(0, 9, size=(20, 6, 5))).astype(np.float32)
    token_ids = np.sort(np.stack([[rng.permutation(40)[:5] for _ in range(6)] for _ in range(20)])).astype(np.int32)
    roots = np.zeros(20, np.int32)
    pairs = np.broadcast_to(rows[:, :, None], (20, 6, 5, 5))
    tree = build_tree_from_pairs(pairs, token_ids, roots, budget=24, formulation=formulation)
    chex.assert_trees_all_equal(tree, build_tree_from_candidates(rows, token_ids, roots, budget=24))


def test_the_parent_decides():
    """By hand: the likelier first token has the unlikelier continuations."""
    pairs = np.full((1, 2, 2, 2), -9.0, np.float32)
    pairs[0, 0, 0] = [-0.5, -1.0]
    pairs[0, 1] = [[-4.0, -3.0], [-0.25, -2.0]]
    tree = build_tree_from_pairs(pairs, np.asarray([[[7, 8], [5, 6]]], np.int32), np.asarray([1], np.int32), budget=4)
    assert tree.token_ids[0].tolist() == [1, 7, 8, 5, 6]
    assert tree.parents[0].tolist() == [-1, 0, 0, 2, 2]
    assert tree.log_probs[0].tolist() == [0.0, -0.5, -1.0, -1.25, -3.0]


def test_rows_of_the_first_table_beyond_the_root_are_not_read():
    pairs, token_ids = batch_of(5, 2, 4, 5)
    roots = np.zeros(len(pairs), np.int32)
    changed = pairs.copy()
    changed[:, 0, 1:] = 0.0
    for build in (functools.partial(build_tree_from_pairs, budget=9), chain_from_pairs):
        chex.assert_trees_all_equal(build(pairs, token_ids, roots), build(changed, token_ids, roots))


def test_chain_picks_the_best_candidate_given_the_last_pick():
    pairs, token_ids = batch_of(6, 12, 7, 6)
    roots = np.arange(len(pairs), dtype=np.int32)
    tree = jax.device_get(chain_from_pairs(pairs, token_ids, roots))
    assert tree.token_ids.shape == (len(pairs), 8)
    for b in range(len(pairs)):
        above, score, wanted = 0, np.float32(0.0), []
        for level in range(7):
            row = np.where(pairs[b, level, above] <= 0, pairs[b, level, above], -np.inf)
            above = min(range(6), key=lambda c, row=row, level=level: (-row[c], token_ids[b, level, c]))
            with np.errstate(over="ignore"):
                score = np.float32(score + row[above])
            if not score > -np.inf:
                break
            wanted.append((score, int(token_ids[b, level, above])))
        length = len(wanted) + 1
        assert int(tree.num_nodes[b]) == length
        assert tree.parents[b].tolist() == [*range(-1, length - 1), *[-1] * (8 - length)]
        assert list(zip(tree.log_probs[b, 1:length], tree.token_ids[b, 1:length].tolist(), strict=True)) == wanted
    invariants.check_tree(tree)


def test_chain_is_the_tree_of_one_rank_where_that_is_best():
    """A deterministic drafter: the chain and the tree of as many nodes agree."""
    pairs = np.full((1, 5, 3, 3), -20.0, np.float32)
    pairs[0, :, [0, 1, 2], [1, 2, 0]] = -1e-3
    token_ids = np.broadcast_to(np.asarray([3, 1, 2], np.int32), (1, 5, 3))
    roots = np.zeros(1, np.int32)
    chain, tree = chain_from_pairs(pairs, token_ids, roots), build_tree_from_pairs(pairs, token_ids, roots, budget=5)
    chex.assert_trees_all_equal(chain, tree)
    assert chain.token_ids[0].tolist() == [0, 1, 2, 3, 1, 2]


def test_selection_by_blocks_gives_the_same_tree(monkeypatch):
    """The way to select the best of a row on a GPU, which no CPU default reaches."""
    values, token_ids = batch_of(9, 4, 5, 6)
    roots = np.arange(len(values), dtype=np.int32)
    by_blocks = functools.partial(exact_topk, implementation="block_descent")
    monkeypatch.setattr(pairs_module, "exact_topk", by_blocks)
    # The functions under the jit decorators: what those have compiled has the other selection in it.
    build = functools.partial(build_tree_from_pairs.__wrapped__, budget=20, formulation="level_merge")
    tree = jax.jit(lambda *arguments: build(*arguments))(values, token_ids, roots)
    tree_cases.assert_trees_equal(tree, heap_trees(values, token_ids, roots, 20))


def test_a_smaller_budget_is_a_prefix():
    pairs, token_ids = batch_of(7, 3, 6, 8)
    roots = np.zeros(len(pairs), np.int32)
    large, small = (build_tree_from_pairs(pairs, token_ids, roots, budget=n) for n in (30, 11))
    for field in ("token_ids", "parents", "depths", "log_probs"):
        np.testing.assert_array_equal(getattr(large, field)[:, :12], getattr(small, field), err_msg=field)


def test_shapes_for_every_degenerate_size():
    roots = np.asarray([3, 4], np.int32)
    for depth, k, budget in ((0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (2, 1, 5)):
        pairs, ids = np.full((2, depth, k, k), -1.0, np.float32), np.zeros((2, depth, k), np.int32)
        ids += np.arange(k, dtype=np.int32)
        tree = build_tree_from_pairs(pairs, ids, roots, budget=budget)
        assert tree.token_ids.shape == (2, budget + 1)
        np.testing.assert_array_equal(tree.token_ids[:, 0], roots)
        np.testing.assert_array_equal(tree.num_nodes, [1 + (min(depth, budget) if k else 0)] * 2)
        assert chain_from_pairs(pairs, ids, roots).token_ids.shape == (2, depth + 1)
    empty = np.zeros((0, 3, 4, 4), np.float32), np.zeros((0, 3, 4), np.int32), np.zeros((0,), np.int32)
    assert build_tree_from_pairs(*empty, budget=4).token_ids.shape == (0, 5)


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"budget": -1}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"budget": 4, "formulation": "static_universe"}, "formulation"),
        ({"budget": 2**31 // 4}, "budget"),
    ],
)
def test_wrong_static_argument_is_named(kwargs, name):
    with pytest.raises(ValueError, match=name):
        build_tree_from_pairs(np.zeros((1, 3, 4, 4), np.float32), np.zeros((1, 3, 4), np.int32), [0], **kwargs)


@pytest.mark.parametrize(
    "pairs, ids, roots, name",
    [
        ((2, 3, 4, 5), (2, 3, 4), (2,), "pair_log_probs"),
        ((2, 3, 4), (2, 3, 4), (2,), "pair_log_probs"),
        ((2, 3, 4, 4), (2, 3, 5), (2,), "token_ids"),
        ((2, 3, 4, 4), (2, 3, 4), (3,), "root_token_ids"),
    ],
)
def test_wrong_array_is_named_at_trace_time(pairs, ids, roots, name):
    arguments = np.zeros(pairs, np.float32), np.zeros(ids, np.int32), np.zeros(roots, np.int32)
    for build in (functools.partial(build_tree_from_pairs, budget=3), chain_from_pairs):
        with pytest.raises(AssertionError, match=name):
            jax.eval_shape(build, *arguments)


def test_default_formulation_by_backend():
    assert default_pair_formulation(backend="cpu") == "sequential_frontier"
    assert default_pair_formulation(backend="gpu") == "level_merge"


@pytest.mark.parametrize("formulation", PAIR_FORMULATIONS)
def test_clean_under_strict_promotion_and_debug_nans(formulation):
    pairs, ids = batch_of(8, 1, 4, 5)
    roots = np.zeros(len(ids), np.int32)
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        pairs = np.where(np.isnan(pairs), -np.inf, pairs)
        tree = build_tree_from_pairs(pairs, ids, roots, budget=9, formulation=formulation)
    chex.assert_type([tree.token_ids, tree.parents, tree.depths, tree.num_nodes], jnp.int32)
    chex.assert_type(tree.log_probs, jnp.float32)


def test_one_trace_per_shape():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def build(pairs, ids, roots):
        return build_tree_from_pairs(pairs, ids, roots, budget=5), chain_from_pairs(pairs, ids, roots)

    for seed in range(3):
        pairs, ids = batch_of(seed, 1, 3, 4)
        build(pairs, ids, jnp.zeros((len(ids),), jnp.int32))
