"""build_tree against the plain best-first heap, exactly, for every formulation."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_cases

from ddtree_jax.tree import (
    FORMULATIONS,
    build_tree,
    build_tree_from_candidates,
    chain_tree,
    default_formulation,
    draft_candidates,
    formulations,
    invariants,
    reference,
    root_tree,
)


def build_and_candidates(logits, roots, **kwargs):
    """The tree, and the candidates as the same program computed them: a logsumexp may round apart in another
    one.
    """

    @jax.jit
    def both(logits, roots):
        k = min(kwargs.get("top_k") or kwargs["budget"], kwargs["budget"], logits.shape[-1])
        return build_tree(logits, roots, **kwargs), draft_candidates(logits[:, : kwargs["budget"]], k)

    return both(logits, roots)


# (L, V, top_k, budget): square, deep, V < budget, fewer reachable than budget, K < budget, one row, one
# candidate.
SHAPES = [
    (6, 20, None, 16),
    (15, 40, None, 32),
    (3, 4, None, 50),
    (2, 3, None, 20),
    (5, 30, 4, 24),
    (1, 9, None, 12),
    (7, 5, 1, 4),
    (9, 70, None, 64),
]


@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("depth, vocab, top_k, budget", SHAPES)
def test_equals_plain_heap(depth, vocab, top_k, budget, formulation):
    logits = tree_cases.logits_batch(seed=budget, per_kind=12, depth=depth, vocab=vocab)
    roots = np.arange(len(logits), dtype=np.int32)
    tree, best = build_and_candidates(logits, roots, budget=budget, top_k=top_k, formulation=formulation)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, budget))


# Besides: as deep as the budget, deeper than the budget, one node.
@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("depth, vocab, top_k, budget", [*SHAPES, (8, 12, None, 8), (9, 12, 3, 5), (3, 5, None, 1)])
def test_with_the_spine_forced_equals_plain_search(depth, vocab, top_k, budget, formulation):
    logits = tree_cases.logits_batch(seed=budget, per_kind=12, depth=depth, vocab=vocab)
    roots = np.arange(len(logits), dtype=np.int32)
    arguments = dict(budget=budget, top_k=top_k, formulation=formulation, force_spine=True)
    tree, best = build_and_candidates(logits, roots, **arguments)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, budget, force_spine=True))
    assert bool(invariants.parent_before_child(tree).all()) and bool(invariants.scores_non_increasing(tree).all())
    assert bool(invariants.siblings_distinct(tree).all()) and bool(invariants.padding_inert(tree).all())


def reference_chains(log_probs, token_ids):
    """Token ids of each sequence's top-1 chain, up to the first row without candidates."""
    live = np.cumprod(np.asarray(log_probs)[:, :, 0] > -np.inf, axis=1).sum(axis=1)
    return [np.asarray(token_ids)[b, :length, 0].tolist() for b, length in enumerate(live)]


def paths(tree, b):
    """Token ids from the root (left out) to each node of sequence b."""
    found = [[]]
    for n in range(1, int(tree.num_nodes[b])):
        found.append([*found[int(tree.parents[b, n])], int(tree.token_ids[b, n])])
    return found


def test_the_forced_spine_changes_the_trees_that_lack_it_and_no_others():
    """Negative control of the tests of `force_spine`: both kinds of tree are among their cases."""
    logits = tree_cases.logits_batch(seed=16, per_kind=12, depth=6, vocab=20)
    roots = np.zeros(len(logits), np.int32)
    forced, plain = (build_tree(logits, roots, budget=16, force_spine=flag) for flag in (True, False))
    same = np.asarray((forced.token_ids == plain.token_ids) & (forced.parents == plain.parents)).all(axis=1)
    chains = reference_chains(*draft_candidates(logits, 1))
    for b, chain in enumerate(chains):
        whole = set(map(tuple, paths(plain, b))) >= {tuple(chain[: d + 1]) for d in range(len(chain))}
        assert same[b] == whole
    assert 0.2 < same.mean() < 0.8


@pytest.mark.parametrize("kind", ["continuous", "integer", "uniform"])
def test_the_plain_search_with_a_spine_equals_enumeration(kind):
    """The oracle itself: the spine and the best of all other prefixes, all 3 + 9 + 27 of them written down."""
    for seed, budget in itertools.product(range(10), (1, 2, 3, 4, 7, 12, 39, 50)):
        logits = tree_cases.random_logits(np.random.default_rng(seed), kind, (3, 3))
        log_probs, token_ids = reference.candidates(logits, 3)
        every = {}
        for length in (1, 2, 3):
            for ranks in itertools.product(range(3), repeat=length):
                above = -every[ranks[:-1]][0] if length > 1 else np.float32(0)
                every[ranks] = -(above + log_probs[length - 1, ranks[-1]]), ranks
        spine = [every[(0,) * d] for d in range(1, min(3, budget) + 1)]
        others = sorted(key for key in every.values() if key not in spine)[: budget - len(spine)]
        tree = reference.best_first_tree(log_probs, token_ids, 0, budget, force_spine=True)
        assert [(-node.log_prob, node.ranks) for node in tree[1:]] == sorted(spine + others)
        for node in tree[1:]:
            assert tree[node.parent].ranks == node.ranks[:-1]
            assert node.token_id == token_ids[node.depth - 1, node.ranks[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("formulation", FORMULATIONS)
@pytest.mark.parametrize("force_spine", [False, True])
@pytest.mark.parametrize("depth, vocab, budget", [(15, 70, 64), (4, 6, 40), (12, 16, 16)])
def test_equals_plain_heap_thousands(depth, vocab, budget, formulation, force_spine):
    logits = tree_cases.logits_batch(seed=1000 + budget, per_kind=200, depth=depth, vocab=vocab)
    roots = np.arange(len(logits), dtype=np.int32)
    arguments = dict(budget=budget, formulation=formulation, force_spine=force_spine)
    tree, best = build_and_candidates(logits, roots, **arguments)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, budget, force_spine=force_spine))


@pytest.mark.slow
@pytest.mark.parametrize("formulation", ["sequential_frontier", "level_merge"])
@pytest.mark.parametrize("budget", [256, 1024])
def test_large_budgets_equal_plain_heap(budget, formulation):
    logits = tree_cases.logits_batch(seed=budget, per_kind=2, depth=15, vocab=budget + 10)
    roots = np.arange(len(logits), dtype=np.int32)
    tree, best = build_and_candidates(logits, roots, budget=budget, formulation=formulation)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, budget))


def test_budget_1024_on_this_backend():
    logits, roots = (
        tree_cases.logits_batch(seed=5, per_kind=1, depth=15, vocab=1100)[:2],
        np.zeros(2, np.int32),
    )
    tree, best = build_and_candidates(logits, roots, budget=1024)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, 1024))


def test_counting_selection_equals_sorting():
    """The GPU's way to order a level, which no CPU default reaches."""
    logits = tree_cases.logits_batch(seed=3, per_kind=4, depth=5, vocab=24)
    log_probs, _ = draft_candidates(logits, 20)
    sort, count = (
        jax.jit(jax.vmap(functools.partial(formulations.level_merge, budget=20, by_counting=flag)))(log_probs)
        for flag in (False, True)
    )
    alive = np.asarray(sort.scores) > -np.inf
    for a, b in zip(sort, count, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[alive], np.asarray(b)[alive])


def test_candidates_equal_plain_ones():
    """The vocabulary pass against numpy: ids exactly, log-probabilities to float32 rounding."""
    logits = tree_cases.logits_batch(seed=8, per_kind=4, depth=4, vocab=30)
    log_probs, token_ids = map(np.asarray, draft_candidates(logits, 10))
    for row, (got, ids) in enumerate(zip(log_probs, token_ids, strict=True)):
        wanted, wanted_ids = reference.candidates(logits[row], 10)
        np.testing.assert_array_equal(ids, wanted_ids)
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)


def test_a_prefix_of_a_larger_tree_is_the_smaller_tree():
    logits = tree_cases.logits_batch(seed=9, per_kind=3, depth=6, vocab=40)
    roots = np.zeros(len(logits), np.int32)
    large, small = (build_tree(logits, roots, budget=32), build_tree(logits, roots, budget=16, top_k=16))
    for field in ("token_ids", "parents", "depths", "log_probs"):
        np.testing.assert_array_equal(getattr(large, field)[:, :17], getattr(small, field), err_msg=field)


def test_surrogate_is_not_beaten_by_other_prefix_sets():
    """Optimality by enumeration: no set of 4 prefixes has a larger sum of path probabilities."""
    logits = np.random.default_rng(0).normal(size=(20, 3, 3)).astype(np.float32)
    tree = build_tree(logits, np.zeros(20, np.int32), budget=4)
    for row, log_probs in zip(logits, np.asarray(tree.log_probs), strict=True):
        q = np.exp(row) / np.exp(row).sum(-1, keepdims=True)
        every = [np.prod(q[range(n), tokens]) for n in (1, 2, 3) for tokens in itertools.product(range(3), repeat=n)]
        np.testing.assert_allclose(np.exp(log_probs[1:]).sum(), np.sort(every)[-4:].sum(), rtol=1e-5)


def test_chain_is_argmax_chain():
    logits = tree_cases.logits_batch(seed=2, per_kind=6, depth=7, vocab=9)
    roots = np.arange(len(logits), dtype=np.int32)
    tree, best = jax.jit(lambda x, r: (chain_tree(x, r), draft_candidates(x, 1)))(logits, roots)
    tree_cases.assert_trees_equal(tree, tree_cases.heap_trees(*best, roots, 7))
    finite = np.isfinite(logits).any(-1).all(-1)
    argmax = np.argmax(np.where(np.isfinite(logits), logits, -np.inf), axis=-1)
    np.testing.assert_array_equal(np.asarray(tree.token_ids)[finite, 1:], argmax[finite])


def test_negative_zero_ties_with_zero():
    logits = np.asarray([[[-0.0, 0.0, -0.0, 0.0]]], np.float32)
    for implementation in ("top_k", "block_descent"):
        tree = build_tree(logits, np.zeros(1, np.int32), budget=4, topk_implementation=implementation)
        np.testing.assert_array_equal(np.asarray(tree.token_ids)[0, 1:], [0, 1, 2, 3])


def test_overflowing_scores_end_the_tree():
    """Finite logits whose path score is below the float32 range: absent nodes, and no NaN."""
    logits = np.full((1, 3, 2), -3e38, np.float32)
    logits[:, :, 0] = [[0.0, 0.0, 0.0]]
    tree = build_tree(logits, np.zeros(1, np.int32), budget=12)
    # A depth-d prefix survives with at most one -3e38 step: d + 1 of them.
    assert int(tree.num_nodes[0]) == 1 + 2 + 3 + 4
    assert np.isfinite(np.asarray(tree.log_probs)[0, : int(tree.num_nodes[0])]).all()


def test_float16_and_float64_inputs_rank_as_float32():
    logits = tree_cases.logits_batch(seed=4, per_kind=1, depth=3, vocab=8)[:1].astype(np.float16)
    wide, narrow = (build_tree(logits.astype(d), np.zeros(1, np.int64), budget=8) for d in (np.float64, np.float16))
    chex.assert_trees_all_equal(wide, narrow)
    chex.assert_type([wide.token_ids, wide.parents, wide.depths, wide.num_nodes], jnp.int32)
    chex.assert_type(wide.log_probs, jnp.float32)


def test_shapes_for_every_degenerate_size():
    for depth, vocab, budget in ((0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (2, 1, 5)):
        tree = build_tree(np.zeros((2, depth, vocab), np.float32), np.asarray([3, 4], np.int32), budget=budget)
        assert tree.token_ids.shape == (2, budget + 1)
        np.testing.assert_array_equal(tree.token_ids[:, 0], [3, 4])
        expected = 1 + (min(depth, budget) if vocab else 0)
        np.testing.assert_array_equal(tree.num_nodes, [expected] * 2)
    empty = build_tree(np.zeros((0, 3, 5), np.float32), np.zeros((0,), np.int32), budget=4)
    assert empty.token_ids.shape == (0, 5)
    assert root_tree(np.asarray([7], np.int32)).token_ids.tolist() == [[7]]


@pytest.mark.parametrize(
    "kwargs, name",
    [
        ({"budget": -1}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"budget": True}, "budget"),
        ({"budget": 4, "top_k": 0}, "top_k"),
        ({"budget": 4, "formulation": "heap"}, "formulation"),
        ({"budget": 4, "topk_implementation": "magic"}, "implementation"),
        ({"budget": 4, "force_spine": 1}, "force_spine"),
        ({"budget": 600, "formulation": "static_universe"}, "static_universe"),
    ],
)
def test_wrong_static_argument_is_named(kwargs, name):
    with pytest.raises(ValueError, match=name):
        build_tree(np.zeros((1, 15, 700), np.float32), np.zeros(1, np.int32), **kwargs)


@pytest.mark.parametrize(
    "logits, roots, name",
    [
        (np.zeros((2, 3), np.float32), np.zeros(2, np.int32), "draft_logits"),
        (np.zeros((2, 3, 4), np.int32), np.zeros(2, np.int32), "draft_logits"),
        (np.zeros((2, 3, 4), np.float32), np.zeros(3, np.int32), "root_token_ids"),
        (np.zeros((2, 3, 4), np.float32), np.zeros(2, np.float32), "root_token_ids"),
        (np.zeros((2, 3, 4), np.float32), np.zeros((2, 1), np.int32), "root_token_ids"),
    ],
)
def test_wrong_array_is_named_at_trace_time(logits, roots, name):
    with pytest.raises(AssertionError, match=name):
        jax.eval_shape(functools.partial(build_tree, budget=3), logits, roots)


def test_default_formulation_is_one_that_can_do_the_size():
    for backend in ("cpu", "gpu", "tpu"):
        for budget in (1, 16, 128, 129, 1024):
            for depth in (1, 31):
                choice = default_formulation(budget, depth, budget, backend=backend)
                assert choice in FORMULATIONS
                if choice == "static_universe":
                    assert formulations.universe_size(budget, depth, budget) <= formulations.MAX_UNIVERSE
    assert default_formulation(64, 15, 64, backend="cpu") == "sequential_frontier"
    assert default_formulation(64, 15, 64, backend="gpu") == "static_universe"
    assert default_formulation(512, 15, 512, backend="gpu") == "level_merge"


def test_universe_sizes_of_the_paper_table():
    """Counts by a closed recursion: tuples whose dominators fit the budget."""

    def count(product, used, depth, budget):
        total, rank = 0, 1
        while depth and used + product * rank <= budget:
            total += 1 + count(product * rank, used + product * rank, depth - 1, budget)
            rank += 1
        return total

    for budget, depth in ((16, 3), (16, 15), (32, 7)):
        assert formulations.universe_size(budget, depth, budget) == count(1, 0, depth, budget)
    assert formulations.universe_size(16, 3, 16) == 96  # ddtree formulation C, N = 16, L = 3


@pytest.mark.parametrize("force_spine", [False, True])
@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_clean_under_strict_promotion_and_debug_nans(formulation, force_spine):
    logits = tree_cases.logits_batch(seed=6, per_kind=1, depth=4, vocab=7)
    logits = np.where(np.isnan(logits), -np.inf, logits)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        roots = np.zeros(len(logits), np.int32)
        tree = build_tree(logits, roots, budget=9, formulation=formulation, force_spine=force_spine)
    assert int(tree.num_nodes.max()) == 10


def test_one_trace_per_shape():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def build(logits, roots):
        return build_tree(logits, roots, budget=5)

    for seed in range(3):
        build(tree_cases.logits_batch(seed, 1, 3, 6), jnp.zeros((len(tree_cases.KINDS),), jnp.int32))


def test_candidates_entry_checks_its_arguments():
    with pytest.raises(AssertionError, match="token_ids"):
        build_tree_from_candidates(
            np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 2), np.int32), np.zeros(1, np.int32), budget=2
        )
    with pytest.raises(ValueError, match="log_probs"):
        build_tree_from_candidates(
            np.zeros((1, 0, 3), np.float32), np.zeros((1, 0, 3), np.int32), np.zeros(1, np.int32), budget=2
        )
