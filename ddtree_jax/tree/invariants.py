"""The rules of a tree, a path and a round as value predicates, one named function per rule.

Shapes and dtypes are checked at trace time by every public function. The rules here speak of values: each
predicate is a pure jittable function of arrays that returns bool[B], True where the rule holds. A predicate
judges its own rule only: it skips nodes whose links are already broken, so that one corrupted field fires one
rule.

`check_tree`, `check_path`, `check_round` and `check_grammar` raise for the first broken rule. They work on concrete
arrays, and inside a jitted function that the caller wraps in `chex.chexify`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from ddtree_jax.tree.base import NO_NODE, NO_PARENT, AcceptedPath, DraftTree


def num_nodes_in_range(tree: DraftTree) -> jax.Array:
    """`num_nodes` counts the root and at most all slots: 1 <= num_nodes <= N."""
    return (tree.num_nodes >= 1) & (tree.num_nodes <= tree.num_slots)


def root_first(tree: DraftTree) -> jax.Array:
    """Slot 0 is the root: parent NO_PARENT, depth 0, log-probability 0."""
    return (tree.parents[:, 0] == NO_PARENT) & (tree.depths[:, 0] == 0) & (tree.log_probs[:, 0] == 0.0)


def parent_before_child(tree: DraftTree) -> jax.Array:
    """A valid node besides the root has a parent in a smaller slot."""
    return _all(~_is_child(tree) | _has_parent(tree))


def depth_is_parent_depth_plus_one(tree: DraftTree) -> jax.Array:
    """A valid node stands one deeper than its parent."""
    parent_depths = jnp.take_along_axis(tree.depths, _safe(tree.parents, tree.num_slots), axis=1)
    return _all(~_is_child(tree) | ~_has_parent(tree) | (tree.depths == parent_depths + 1))


def token_ids_non_negative(tree: DraftTree) -> jax.Array:
    """Token ids never act as sentinels: those of valid nodes are >= 0."""
    return _all(~_is_valid(tree) | (tree.token_ids >= 0))


def siblings_distinct(tree: DraftTree) -> jax.Array:
    """No two valid children of one parent carry the same token."""
    linked = _is_child(tree) & _has_parent(tree)
    same = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (
        tree.token_ids[:, :, None] == tree.token_ids[:, None, :]
    )
    earlier = _slots(tree)[:, :, None] < _slots(tree)[:, None, :]
    return ~jnp.any(same & earlier & linked[:, :, None] & linked[:, None, :], axis=(1, 2))


def scores_finite(tree: DraftTree) -> jax.Array:
    """The log-probabilities of valid nodes are finite."""
    return _all(~_is_valid(tree) | jnp.isfinite(tree.log_probs))


def scores_non_increasing(tree: DraftTree) -> jax.Array:
    """Valid nodes besides the root come best first: log-probabilities <= 0 that never increase from slot to
    slot.
    """
    previous = jnp.pad(tree.log_probs[:, :-1], ((0, 0), (1, 0)))
    previous = jnp.where(_slots(tree) <= 1, 0.0, previous)
    # Negated, so that a NaN is left to `scores_finite`.
    return _all(~(_is_child(tree) & (tree.log_probs > previous)))


def padding_inert(tree: DraftTree) -> jax.Array:
    """Padding slots are nobody's child and have no score: parent NO_PARENT, depth 0, log-probability -inf."""
    inert = (tree.parents == NO_PARENT) & (tree.depths == 0) & (tree.log_probs == -jnp.inf)
    return _all(_is_valid(tree) | inert)


def path_length_in_range(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """A path has its root and at most D matched nodes: 1 <= length <= D + 1."""
    del tree, target_token_ids
    return (path.length >= 1) & (path.length <= path.node_ids.shape[1])


def path_starts_at_root(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """The first node of a path is slot 0."""
    del tree, target_token_ids
    return path.node_ids[:, 0] == 0


def path_padded_by_length(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """`node_ids` holds valid nodes before `length` and NO_NODE at and beyond it."""
    del target_token_ids
    is_node = (path.node_ids >= 0) & (path.node_ids < tree.num_nodes[:, None])
    return _all(jnp.where(_on_path(path), is_node, path.node_ids == NO_NODE))


def path_connected(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """Each node of a path is the parent of the next."""
    del target_token_ids
    parents = jnp.take_along_axis(tree.parents, _safe(path.node_ids, tree.num_slots), axis=1)
    return _all(~_steps(path) | (parents[:, 1:] == path.node_ids[:, :-1]))


def path_follows_target(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """Each node of a path carries the target's choice after its parent."""
    nodes = _safe(path.node_ids, tree.num_slots)
    tokens = jnp.take_along_axis(tree.token_ids, nodes, axis=1)
    parents = _safe(jnp.take_along_axis(tree.parents, nodes, axis=1), tree.num_slots)
    choices = jnp.take_along_axis(target_token_ids, parents, axis=1)
    return _all(~_steps(path) | (tokens == choices)[:, 1:])


def bonus_is_last_choice(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """The bonus is the target's choice after the last node of the path."""
    return path.bonus_token_ids == _at_last(tree, path, target_token_ids)


def path_maximal(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> jax.Array:
    """The path ends only where no child carries the target's choice, or at the depth limit D."""
    last = jnp.take_along_axis(path.node_ids, jnp.clip(path.length - 1, 0, path.node_ids.shape[1] - 1)[:, None], axis=1)
    continues = (
        _is_child(tree) & (tree.parents == last) & (tree.token_ids == _at_last(tree, path, target_token_ids)[:, None])
    )
    return (path.length == path.node_ids.shape[1]) | ~jnp.any(continues, axis=1)


def counts_within_limits(before, after, output) -> jax.Array:
    """A round emits 1..min(length, remaining) tokens for a running sequence."""
    del after
    limit = jnp.minimum(output.path.length, before.remaining)
    return ~_running(before) | ((output.counts >= 1) & (output.counts <= limit))


def finished_unchanged(before, after, output) -> jax.Array:
    """A finished sequence emits nothing and keeps its root, length and counters."""
    same = (output.counts == 0) & (output.acceptance_lengths == 0)
    for field in ("root_token_ids", "lengths", "emitted", "remaining"):
        same = same & (getattr(before, field) == getattr(after, field))
    return _running(before) | same


def counters_advance_together(before, after, output) -> jax.Array:
    """`lengths` and `emitted` grow, and `remaining` shrinks, by the emitted count."""
    return (
        (after.lengths - before.lengths == output.counts)
        & (after.emitted - before.emitted == output.counts)
        & (before.remaining - after.remaining == output.counts)
    )


def root_is_newest_token(before, after, output) -> jax.Array:
    """The next root is the last emitted token."""
    index = jnp.clip(output.counts - 1, 0, output.token_ids.shape[1] - 1)
    newest = jnp.take_along_axis(output.token_ids, index[:, None], axis=1)[:, 0]
    return ~_running(before) | (after.root_token_ids == newest)


def emitted_tokens_allowed(path: AcceptedPath, token_ids: jax.Array, rows: jax.Array, active: jax.Array) -> jax.Array:
    """Of a running sequence each token of the path, and the bonus, is allowed by the row of the node before it.

    A row that allows nothing has no bonus.
    """
    words = jnp.take_along_axis(rows, _safe(path.node_ids, rows.shape[1])[:, :, None], axis=1)
    word = jnp.take_along_axis(words, jnp.clip(token_ids >> 5, 0, rows.shape[2] - 1)[:, :, None], axis=2)[:, :, 0]
    index = jnp.arange(path.node_ids.shape[1], dtype=jnp.int32)[None, :]
    has_no_bonus = (index == path.length[:, None] - 1) & ~jnp.any(words != 0, axis=2)
    return ~active | _all(~_on_path(path) | has_no_bonus | (((word >> (token_ids & 31)) & 1) == 1))


TREE_RULES: tuple[Callable[[DraftTree], jax.Array], ...] = (
    num_nodes_in_range,
    root_first,
    parent_before_child,
    depth_is_parent_depth_plus_one,
    token_ids_non_negative,
    siblings_distinct,
    scores_finite,
    scores_non_increasing,
    padding_inert,
)
PATH_RULES: tuple[Callable[[DraftTree, AcceptedPath, jax.Array], jax.Array], ...] = (
    path_length_in_range,
    path_starts_at_root,
    path_padded_by_length,
    path_connected,
    path_follows_target,
    bonus_is_last_choice,
    path_maximal,
)
ROUND_RULES = (counts_within_limits, finished_unchanged, counters_advance_together, root_is_newest_token)
GRAMMAR_RULES = (emitted_tokens_allowed,)


def check_tree(tree: DraftTree) -> None:
    """Raises for the first of `TREE_RULES` that some sequence breaks."""
    _check(TREE_RULES, tree)


def check_path(tree: DraftTree, path: AcceptedPath, target_token_ids: jax.Array) -> None:
    """Raises for the first of `PATH_RULES` that some sequence breaks."""
    _check(PATH_RULES, tree, path, target_token_ids)


def check_round(before, after, output) -> None:
    """Raises for the first of `ROUND_RULES` that some sequence breaks (RoundState before and after,
    RoundOutput).
    """
    _check(ROUND_RULES, before, after, output)


def check_grammar(path: AcceptedPath, token_ids: jax.Array, rows: jax.Array, active: jax.Array) -> None:
    """Raises for the first of `GRAMMAR_RULES` that some sequence breaks.

    token_ids: int32[B, D + 1], the round's tokens as in `RoundOutput`; rows: int32[B, N, W], the tokens allowed after
    each slot; active: bool[B], sequences that emit in this round.
    """
    _check(GRAMMAR_RULES, path, token_ids, rows, active)


def _check(rules, *args) -> None:
    for rule in rules:
        quoted = " ".join(rule.__doc__.split()).replace("{", "{{").replace("}", "}}")
        checkify.check(jnp.all(rule(*args)), f"{rule.__name__}: {quoted}")


def _all(holds: jax.Array) -> jax.Array:
    return jnp.all(holds, axis=-1)


def _slots(tree: DraftTree) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tree.num_slots, dtype=jnp.int32), tree.token_ids.shape)


def _is_valid(tree: DraftTree) -> jax.Array:
    return _slots(tree) < tree.num_nodes[:, None]


def _is_child(tree: DraftTree) -> jax.Array:
    """Valid and not the root."""
    return _is_valid(tree) & (_slots(tree) > 0)


def _has_parent(tree: DraftTree) -> jax.Array:
    return (tree.parents >= 0) & (tree.parents < _slots(tree))


def _safe(slots: jax.Array, num_slots: int) -> jax.Array:
    """Slots clipped into range, for reads whose result another rule's mask discards."""
    return jnp.clip(slots, 0, num_slots - 1)


def _on_path(path: AcceptedPath) -> jax.Array:
    return jnp.arange(path.node_ids.shape[1], dtype=jnp.int32)[None, :] < path.length[:, None]


def _steps(path: AcceptedPath) -> jax.Array:
    """bool[B, D]: the path has both a node at depth d and a valid one at depth d + 1."""
    return _on_path(path)[:, 1:] & (path.node_ids[:, 1:] >= 0)


def _at_last(tree: DraftTree, path: AcceptedPath, values: jax.Array) -> jax.Array:
    index = jnp.clip(path.length - 1, 0, path.node_ids.shape[1] - 1)[:, None]
    last = _safe(jnp.take_along_axis(path.node_ids, index, axis=1), tree.num_slots)
    return jnp.take_along_axis(values, last, axis=1)[:, 0]


def _running(state) -> jax.Array:
    return ~state.finished & (state.remaining > 0)
