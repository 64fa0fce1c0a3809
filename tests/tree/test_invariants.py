"""Every rule holds on what the library makes, and corrupting one field fires exactly the rule that speaks of
it.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree_cases

from ddtree_jax.tree import (
    RoundOutput,
    RoundState,
    accept,
    build_tree,
    chain_tree,
    check_grammar,
    check_path,
    check_tree,
    root_tree,
)
from ddtree_jax.tree import invariants as rules


def set_at(tree, field, index, value):
    return dataclasses.replace(tree, **{field: getattr(tree, field).at[index].set(value)})


def broken(rule_list, *args) -> list[str]:
    return [rule.__name__ for rule in rule_list if not bool(jnp.all(rule(*args)))]


@pytest.fixture(scope="module")
def tree():
    """Two sequences of 7 slots: 0 -> 1, 2; 1 -> 3, 4; 3 -> 5, and one padding slot."""
    parents, tokens = [-1, 0, 0, 1, 1, 3], [9, 4, 5, 4, 6, 4]
    return tree_cases.tree_from_lists([parents] * 2, [tokens] * 2, 7)


@pytest.fixture(scope="module")
def target():
    """Follows 0 -> 1 -> 3, then leaves with 8."""
    return jnp.asarray([[4, 4, 0, 8, 0, 0, 0]] * 2, jnp.int32)


def test_every_rule_holds_on_built_trees():
    logits = tree_cases.logits_batch(seed=0, per_kind=6, depth=5, vocab=8)
    roots = np.arange(len(logits), dtype=np.int32)
    for made in (build_tree(logits, roots, budget=20), chain_tree(logits, roots), root_tree(roots)):
        assert broken(rules.TREE_RULES, made) == []
        choices = jnp.asarray(np.random.default_rng(0).integers(0, 8, made.token_ids.shape), jnp.int32)
        assert broken(rules.PATH_RULES, made, accept(made, choices, max_depth=3), choices) == []


@pytest.mark.parametrize(
    "field, index, value, rule",
    [
        ("num_nodes", (1,), 0, "num_nodes_in_range"),
        ("num_nodes", (1,), 8, "num_nodes_in_range"),
        ("parents", (0, 0), 0, "root_first"),
        ("depths", (0, 0), 1, "root_first"),
        ("log_probs", (0, 0), -1e-3, "root_first"),
        ("parents", (1, 2), 2, "parent_before_child"),
        ("parents", (1, 2), 5, "parent_before_child"),
        ("parents", (1, 2), -1, "parent_before_child"),
        ("depths", (0, 5), 2, "depth_is_parent_depth_plus_one"),
        ("parents", (0, 5), 2, "depth_is_parent_depth_plus_one"),
        ("token_ids", (0, 2), -1, "token_ids_non_negative"),
        ("token_ids", (0, 0), -1, "token_ids_non_negative"),
        ("token_ids", (1, 2), 4, "siblings_distinct"),
        ("log_probs", (1, 5), -np.inf, "scores_finite"),
        ("log_probs", (1, 5), np.nan, "scores_finite"),
        ("log_probs", (1, 5), -0.5, "scores_non_increasing"),
        ("log_probs", (1, 1), 0.25, "scores_non_increasing"),
        ("parents", (0, 6), 0, "padding_inert"),
        ("depths", (0, 6), 1, "padding_inert"),
        ("log_probs", (0, 6), -9.0, "padding_inert"),
    ],
)
def test_one_corrupted_tree_field_fires_one_rule(tree, field, index, value, rule):
    assert broken(rules.TREE_RULES, tree) == []
    wrong = set_at(tree, field, index, value)
    fired = broken(rules.TREE_RULES, wrong)
    # Moving the count, or the root's depth, is also seen from the slots next to it.
    also = {"num_nodes": {"padding_inert", "parent_before_child", "scores_finite"}, "depths": set()}.get(field, set())
    if field == "depths" and index[1] == 0:
        also = {"depth_is_parent_depth_plus_one"}
    assert fired[0] == rule
    assert set(fired) - {rule} <= also
    sequence = getattr(rules, rule)(wrong)
    assert np.asarray(sequence).tolist() == [i != index[0] for i in range(2)]


@pytest.mark.parametrize(
    "field, index, value, rule",
    [
        ("length", (0,), 0, "path_length_in_range"),
        ("length", (0,), 6, "path_length_in_range"),
        ("node_ids", (1, 0), 2, "path_starts_at_root"),
        ("node_ids", (1, 3), 5, "path_padded_by_length"),
        ("node_ids", (1, 2), -1, "path_padded_by_length"),
        ("node_ids", (0, 2), 5, "path_connected"),
        ("node_ids", (0, 2), 4, "path_follows_target"),
        ("bonus_token_ids", (0,), 7, "bonus_is_last_choice"),
    ],
)
def test_one_corrupted_path_field_fires_its_rule(tree, target, field, index, value, rule):
    path = accept(tree, target, max_depth=4)
    assert broken(rules.PATH_RULES, tree, path, target) == []
    assert np.asarray(path.node_ids)[0].tolist() == [0, 1, 3, -1, -1]
    fired = broken(rules.PATH_RULES, tree, set_at(path, field, index, value), target)
    assert rule in fired
    # The other rules that read the same node or count.
    neighbours = {
        "path_length_in_range": {"path_padded_by_length", "bonus_is_last_choice", "path_maximal"},
        "path_starts_at_root": {"path_connected"},
        "path_padded_by_length": {"bonus_is_last_choice", "path_maximal"},
        "path_connected": {"bonus_is_last_choice", "path_follows_target"},
        "path_follows_target": {"bonus_is_last_choice"},
    }
    assert set(fired) - {rule} <= neighbours.get(rule, set())


def test_a_path_cut_short_is_not_maximal(tree, target):
    path = accept(tree, target, max_depth=4)
    short = dataclasses.replace(
        path,
        node_ids=path.node_ids.at[0].set(jnp.asarray([0, 1, -1, -1, -1])),
        length=path.length.at[0].set(2),
        bonus_token_ids=path.bonus_token_ids.at[0].set(4),
    )
    assert broken(rules.PATH_RULES, tree, short, target) == ["path_maximal"]


@pytest.mark.parametrize(
    "part, field, value, rules_fired",
    [
        (
            "output",
            "counts",
            4,
            {"counts_within_limits", "counters_advance_together", "root_is_newest_token"},
        ),
        ("after", "lengths", 99, {"counters_advance_together"}),
        ("after", "remaining", 99, {"counters_advance_together"}),
        ("after", "root_token_ids", 3, {"root_is_newest_token"}),
    ],
)
def test_one_corrupted_round_field_fires_its_rule(tree, target, part, field, value, rules_fired):
    path = accept(tree, target, max_depth=4)
    two = jnp.asarray([5, 5], jnp.int32)
    off = jnp.asarray([False, False])
    before = RoundState(None, None, two, two, two, two, off)
    after = RoundState(None, None, two * 0 + 4, two + 2, two + 2, two - 2, off)
    tokens = jnp.asarray([[4, 4, 8, 0, 0]] * 2, jnp.int32)
    output = RoundOutput(tokens, two * 0 + 2, path.length, off, tree, path)
    parts = {"before": before, "after": after, "output": output}
    assert broken(rules.ROUND_RULES, *parts.values()) == []
    parts[part] = set_at(parts[part], field, 0, value)
    assert set(broken(rules.ROUND_RULES, *parts.values())) == rules_fired
    idle = dataclasses.replace(before, finished=~off)
    assert "finished_unchanged" in broken(rules.ROUND_RULES, idle, after, output)


@pytest.mark.parametrize("node, bit, fires", [(0, 4, True), (1, 4, True), (3, 8, True), (3, 4, False), (2, 4, False)])
def test_one_corrupted_grammar_row_fires_its_rule(tree, target, node, bit, fires):
    """The path is 0 -> 1 -> 3 with bonus 8: each token needs the row before it, and no other row counts."""
    path = accept(tree, target, max_depth=4)
    rows = jnp.full((2, 7, 1), -1, jnp.int32)
    active = jnp.asarray([True, True])
    tokens = jnp.asarray([[4, 4, 8, 0, 0]] * 2, jnp.int32)
    assert broken(rules.GRAMMAR_RULES, path, tokens, rows, active) == []
    wrong = rows.at[1, node, 0].set(~(1 << bit))
    fired = broken(rules.GRAMMAR_RULES, path, tokens, wrong, active)
    assert fired == (["emitted_tokens_allowed"] if fires else [])
    # A sequence that emits nothing in this round breaks nothing.
    assert broken(rules.GRAMMAR_RULES, path, tokens, wrong, jnp.asarray([True, False])) == []
    if fires:
        assert np.asarray(rules.emitted_tokens_allowed(path, tokens, wrong, active)).tolist() == [True, False]
        with pytest.raises(ValueError, match="emitted_tokens_allowed"):
            check_grammar(path, tokens, wrong, active)


def test_checks_raise_with_the_rule_quoted(tree, target):
    path = accept(tree, target, max_depth=4)
    check_tree(tree)
    check_path(tree, path, target)
    wrong = set_at(tree, "token_ids", (1, 2), 4)
    with pytest.raises(ValueError, match="siblings_distinct: No two valid children of one parent"):
        check_tree(wrong)

    @jax.jit
    def traced(tree, path, target):
        check_tree(tree)
        check_path(tree, path, target)
        return tree.num_nodes

    checked = chex.chexify(traced, async_check=False)
    checked(tree, path, target)
    with pytest.raises(ValueError, match="siblings_distinct"):
        checked(wrong, path, target)
    with pytest.raises(ValueError, match="bonus_is_last_choice"):
        checked(tree, set_at(path, "bonus_token_ids", (0,), 7), target)


def test_every_rule_quotes_itself():
    for rule in (*rules.TREE_RULES, *rules.PATH_RULES, *rules.ROUND_RULES, *rules.GRAMMAR_RULES):
        assert rule.__doc__ and len(rule.__doc__) > 20
