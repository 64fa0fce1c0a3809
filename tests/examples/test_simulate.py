"""The simulator against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from demo_training import simulate

from ddtree_jax import tree


def test_chain_lengths_count_the_leading_matches() -> None:
    labels = jnp.asarray([[1, 2, 3], [1, 2, 3], [1, 2, 3], [9, 9, 9]], jnp.int32)
    drafted = jnp.asarray([[1, 2, 3], [1, 9, 3], [9, 2, 3], [9, 9, 0]], jnp.int32)
    assert simulate.chain_lengths(drafted, labels).tolist() == [4, 2, 1, 3]


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_tree_lengths_are_the_deepest_prefix_of_the_text_in_the_tree(budget: int) -> None:
    rng = np.random.default_rng(budget)
    logits = jnp.asarray(rng.normal(size=(40, 3, 4)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 4, (40, 3)), jnp.int32)
    roots = jnp.asarray(rng.integers(0, 4, 40), jnp.int32)
    lengths = simulate.tree_lengths(logits, roots, labels, budget)
    built = tree.build_tree(logits, roots, budget=budget)
    seen = set()
    for row in range(40):
        prefixes = {()}
        paths = {0: ()}
        for node in range(1, int(built.num_nodes[row])):
            paths[node] = (*paths[int(built.parents[row, node])], int(built.token_ids[row, node]))
            prefixes.add(paths[node])
        text = tuple(labels[row].tolist())
        deepest = max(d for d in range(4) if text[:d] in prefixes)
        assert int(lengths[row]) == 1 + deepest
        seen.add(deepest)
    assert len(seen) > 1


def test_hop_follows_the_accepted_lengths_and_stops_at_an_end_token() -> None:
    lengths = np.asarray([3, 9, 9, 1, 4, 9, 9, 9, 2])
    text = np.arange(100, 120)
    assert simulate.hop(lengths, text, 10, [0]) == [3, 1, 4, 2]
    text[5] = 0
    assert simulate.hop(lengths, text, 10, [0]) == [3, 1, 4]
    text[0] = 0
    assert simulate.hop(lengths, text, 10, [0]) == []


def test_summary_gives_prompts_rounds_and_median_their_own_weights() -> None:
    values = simulate.summary([[4, 4], [1, 1, 1, 1], []])
    assert values == {"mean": 2.5, "token_weighted": 2.0, "median": 2.5}
