"""Mask, positions, walk and row gathering against the sequential plain-Python versions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_cases

from ddtree_jax.tree import NO_NODE, accept, ancestor_mask, gather_rows, positions, reference

SLOTS, VOCAB = 24, 4


@pytest.fixture(scope="module")
def trees():
    """300 random trees of 1..SLOTS nodes: lists and the padded DraftTree."""
    rng = np.random.default_rng(0)
    lists = [tree_cases.random_tree(rng, int(rng.integers(1, SLOTS + 1)), VOCAB) for _ in range(300)]
    parents, tokens = [list(part) for part in zip(*lists, strict=True)]
    return parents, tokens, tree_cases.tree_from_lists(parents, tokens, SLOTS)


@pytest.fixture(scope="module")
def choices(trees):
    """Target choices that follow the tree often enough for deep paths."""
    rng = np.random.default_rng(1)
    parents, tokens, _ = trees
    target = rng.integers(0, VOCAB, size=(len(parents), SLOTS))
    for b, row in enumerate(parents):
        for node in range(1, len(row)):
            if rng.random() < 0.8:
                target[b, row[node]] = tokens[b][node]
    return target.astype(np.int32)


def test_ancestor_mask_equals_walking_up(trees):
    parents, _, tree = trees
    mask = np.asarray(jax.jit(ancestor_mask)(tree))
    for b, row in enumerate(parents):
        expected = np.eye(SLOTS, dtype=bool)
        expected[: len(row), : len(row)] = reference.visibility(row)
        np.testing.assert_array_equal(mask[b], expected)


def test_a_tight_depth_bound_changes_nothing(trees, choices):
    _, _, tree = trees
    deepest = int(tree.depths.max())
    np.testing.assert_array_equal(ancestor_mask(tree), ancestor_mask(tree, max_depth=deepest))
    loose, tight = accept(tree, choices), accept(tree, choices, max_depth=deepest)
    np.testing.assert_array_equal(loose.length, tight.length)
    np.testing.assert_array_equal(np.asarray(loose.node_ids)[:, : deepest + 1], tight.node_ids)


def test_positions_are_prefix_plus_depth(trees):
    _, _, tree = trees
    prefix = jnp.arange(300, dtype=jnp.int32)
    np.testing.assert_array_equal(positions(tree, prefix), np.asarray(prefix)[:, None] + np.asarray(tree.depths))


@pytest.mark.parametrize("max_depth", [None, 0, 1, 2, SLOTS + 3])
def test_accept_equals_the_sequential_walk(trees, choices, max_depth):
    parents, tokens, tree = trees
    path = accept(tree, choices, max_depth=max_depth)
    limit = SLOTS - 1 if max_depth is None else max_depth
    assert path.node_ids.shape == (300, limit + 1)
    lengths = []
    for b in range(300):
        nodes, bonus = reference.walk(tokens[b], parents[b], choices[b])
        if len(nodes) > limit + 1:
            nodes, bonus = nodes[: limit + 1], tokens[b][nodes[limit + 1]]
        lengths.append(len(nodes))
        assert int(path.length[b]) == len(nodes)
        assert np.asarray(path.node_ids)[b].tolist() == nodes + [NO_NODE] * (limit + 1 - len(nodes))
        assert int(path.bonus_token_ids[b]) == bonus
    assert max_depth == 0 or len(set(lengths)) > 1


def test_padding_never_matches():
    """A padding slot whose stale token and parent would match the target's choice."""
    tree = tree_cases.tree_from_lists([[-1]], [[3]], 4)
    stale = jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
    tree = type(tree)(
        token_ids=jnp.asarray([[3, 1, 1, 1]], jnp.int32),
        parents=stale,
        depths=jnp.asarray([[0, 1, 2, 3]], jnp.int32),
        log_probs=tree.log_probs,
        num_nodes=tree.num_nodes,
    )
    path = accept(tree, jnp.ones((1, 4), jnp.int32))
    assert int(path.length[0]) == 1 and int(path.bonus_token_ids[0]) == 1


def test_wrong_arguments_are_named(trees, choices):
    _, _, tree = trees
    with pytest.raises(ValueError, match="max_depth"):
        accept(tree, choices, max_depth=-1)
    with pytest.raises(ValueError, match="max_depth"):
        ancestor_mask(tree, max_depth=-1)
    with pytest.raises(AssertionError, match="target_token_ids"):
        accept(tree, choices[:, :-1])
    with pytest.raises(AssertionError, match="target_token_ids"):
        accept(tree, choices.astype(np.float32))
    with pytest.raises(AssertionError, match="prefix_lengths"):
        positions(tree, np.zeros((3,), np.int32))


def test_gather_rows_on_any_axes():
    rng = np.random.default_rng(0)
    node_ids = np.asarray([[0, 2, 5, NO_NODE], [0, 1, NO_NODE, NO_NODE]], np.int32)
    rows = {
        "keys": rng.normal(size=(3, 2, 6, 5)).astype(np.float32),  # [layers, B, N, width]
        "scales": rng.normal(size=(3, 2, 6)).astype(np.float32),
    }
    got = gather_rows(rows, node_ids, node_axis=2, batch_axis=1)
    for name, leaf in rows.items():
        for b in range(2):
            for d, node in enumerate(node_ids[b]):
                np.testing.assert_array_equal(np.asarray(got[name])[:, b, d], leaf[:, b, max(node, 0)])
    before_batch = gather_rows(rng.normal(size=(6, 2)), node_ids, node_axis=0, batch_axis=-1)
    assert before_batch.shape == (4, 2)
    assert gather_rows(None, node_ids, node_axis=0, batch_axis=1) is None


@pytest.mark.parametrize(
    "shape, axes, name",
    [
        ((2, 6), (2, 0), "node_axis"),
        ((2, 6), (1, 4), "batch_axis"),
        ((2, 6), (1, -1), "node_axis"),
        ((3, 6), (1, 0), "rows"),
    ],
)
def test_gather_rows_names_a_wrong_axis(shape, axes, name):
    with pytest.raises(ValueError, match=name):
        gather_rows(np.zeros(shape), np.zeros((2, 3), np.int32), node_axis=axes[0], batch_axis=axes[1])
