"""Grammars that are tables, inside a program: states and rows of a tree's nodes, and trees of allowed nodes only.

What `grammar_walk` and `grammar_tree` do on the host with a matcher, for grammars that have a `TokenAutomaton`, as
pure functions. A batch may mix grammars with free requests: a free request has one state that allows everything.

Dimension letters besides those of `base`: S states, C classes of tokens, W = ceil(V / 32) words of a row (see
`grammar_rows`). A state is an int32, NO_STATE where no text of the grammar begins with the path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.grammar import pack
from ddtree_jax.grammar_automaton import NO_STATE, TokenAutomaton
from ddtree_jax.tree import checks, mask
from ddtree_jax.tree.base import DraftTree
from ddtree_jax.tree.build import assemble_tokens, root_tree, with_padding
from ddtree_jax.tree.formulations import replace_and_insert
from ddtree_jax.tree.grammar_rows import num_words


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TokenTable:
    """The automata of a batch, padded to one size. State 0 is the start.

    Attributes:
      class_of: int32[B, V], the class of each token.
      next_state: int32[B, S, C], NO_STATE where a token of the class is not allowed, and in padding.
      allowed: int32[B, S, W], the row of each state; padding 0. Bits from V on are 0, those of free requests too.
      forced: int32[B, S], the one token that a state allows, if it allows just one and that is text; else -1.
      num_allowed: int32[B, S], how many tokens a state allows.
      stopped: int32[B], the state after a stop token; NO_STATE for a free request, which has none.
    """

    class_of: jax.Array  # [B, V]
    next_state: jax.Array  # [B, S, C]
    allowed: jax.Array  # [B, S, W]
    forced: jax.Array  # [B, S]
    num_allowed: jax.Array  # [B, S]
    stopped: jax.Array  # [B]


def stack_tables(automata: Sequence[TokenAutomaton | None], vocab_size: int) -> TokenTable:
    """The table of a batch, on the host.

    S and C are powers of two, so that grammars of similar size share compiled programs.

    Args:
      automata: one for each sequence; None for a free request.
      vocab_size: V, that of the automata.

    Raises:
      ValueError: an automaton over another vocabulary.
    """
    vocab_size = checks.static_int(vocab_size, "vocab_size", minimum=1)
    for number, automaton in enumerate(automata):
        if automaton is not None and automaton.class_of.shape != (vocab_size,):
            raise ValueError(
                f"automata: number {number} is over {automaton.class_of.shape[0]} tokens; vocab_size is {vocab_size}."
            )
    sizes = [(1, 1) if automaton is None else automaton.next_state.shape for automaton in automata]
    states, classes = (_power_of_two(max((size[axis] for size in sizes), default=1)) for axis in (0, 1))
    batch = len(sizes)
    class_of = np.zeros((batch, vocab_size), np.int32)
    next_state = np.full((batch, states, classes), NO_STATE, np.int32)
    allowed = np.zeros((batch, states, num_words(vocab_size)), np.int32)
    forced = np.full((batch, states), -1, np.int32)
    num_allowed = np.zeros((batch, states), np.int32)
    stopped = np.full((batch,), NO_STATE, np.int32)
    for number, (automaton, size) in enumerate(zip(automata, sizes, strict=True)):
        if automaton is None:
            next_state[number, 0] = 0
            allowed[number, 0] = pack(np.ones((vocab_size,), bool))
            continue
        class_of[number] = automaton.class_of
        next_state[number, : size[0], : size[1]] = automaton.next_state
        allowed[number, : size[0]] = automaton.allowed
        forced[number, : size[0]] = _forced(automaton)
        num_allowed[number, : size[0]] = np.bitwise_count(automaton.allowed.view(np.uint32)).sum(axis=1)
        stopped[number] = automaton.num_states - 1
    return TokenTable(*(jnp.asarray(array) for array in (class_of, next_state, allowed, forced, num_allowed, stopped)))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _forced(automaton: TokenAutomaton) -> np.ndarray:
    """int32[S], as `TokenTable.forced`."""
    words = automaton.allowed
    is_forced = (np.bitwise_count(words.view(np.uint32)).sum(axis=1) == 1) & ~automaton.accepting
    word = np.argmax(words != 0, axis=1)
    bits = np.take_along_axis(words, word[:, None], axis=1)[:, 0].view(np.uint32)
    lowest = np.bitwise_count((bits & -bits) - np.uint32(1))  # of zero: 32, not used
    return np.where(is_forced, word * 32 + lowest, -1).astype(np.int32)


# --- states -------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="max_depth")
def node_states(
    tree: DraftTree, table: TokenTable, root_states: jax.Array, *, max_depth: int | None = None
) -> jax.Array:
    """The state after every node of a tree, by `max_depth` steps that each take all nodes one token further.

    Args:
      tree: any valid tree.
      table: of the B sequences.
      root_states: int32[B], after the root's own token.
      max_depth: static upper bound on the tree's depth, default N - 1; a tight bound only saves work.

    Returns:
      int32[B, N]; NO_STATE where a token of the path is not allowed after those before it, and for padding.
    """
    batch, slots = checks.check_tree_shapes(tree)
    _check_table(table, batch)
    root_states = checks.as_int32(root_states, "root_states", (batch,), "B")
    bound = slots - 1 if max_depth is None else min(checks.static_int(max_depth, "max_depth", minimum=0), slots - 1)
    with jax.named_scope("node_states"):
        is_root = (jnp.arange(slots, dtype=jnp.int32) == 0)[None, :]
        parents = mask.parent_jumps(tree)
        start = jnp.where(is_root, root_states[:, None], NO_STATE)

        # Padding stands below itself and so keeps NO_STATE.
        def deepen(_, states):
            above = jnp.take_along_axis(states, parents, axis=1)
            return jnp.where(is_root, states, jax.vmap(_step)(table, above, tree.token_ids))

        return lax.fori_loop(0, bound, deepen, start)


@jax.jit
def state_rows(table: TokenTable, states: jax.Array) -> jax.Array:
    """The row of each state: int32[B, N] -> int32[B, N, W]; zero where there is NO_STATE."""
    states = checks.as_int32(states, "states", (None, None), "B, N")
    _check_table(table, states.shape[0])
    rows = jnp.take_along_axis(table.allowed, jnp.maximum(states, 0)[:, :, None], axis=1)
    return jnp.where(states[:, :, None] == NO_STATE, 0, rows)


@jax.jit
def advance_states(table: TokenTable, states: jax.Array, token_ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Moves each sequence by its emitted tokens.

    Args:
      table: of the B sequences.
      states: int32[B].
      token_ids: int32[B, D + 1], in order; entries at and beyond the count are ignored.
      counts: int32[B], 0..D+1.

    Returns:
      int32[B]; NO_STATE where a token was not allowed.
    """
    states = checks.as_int32(states, "states", (None,), "B")
    batch = states.shape[0]
    _check_table(table, batch)
    token_ids = checks.as_int32(token_ids, "token_ids", (batch, None), "B, D + 1")
    counts = checks.as_int32(counts, "counts", (batch,), "B")

    def step(place, states):
        tokens = lax.dynamic_index_in_dim(token_ids, place, axis=1, keepdims=False)
        return jnp.where(place < counts, jax.vmap(_step)(table, states, tokens), states)

    with jax.named_scope("advance_states"):
        return lax.fori_loop(0, token_ids.shape[1], step, states)


# The functions below that take a table without being public take one sequence's (*unbatched*).


def _step(table: TokenTable, states: jax.Array, token_ids: jax.Array) -> jax.Array:
    """The states after one token each; both of one shape."""
    classes = _classes(table, token_ids)
    found = table.next_state[jnp.maximum(states, 0), jnp.maximum(classes, 0)]
    return jnp.where((states == NO_STATE) | (classes < 0), NO_STATE, found)


def _classes(table: TokenTable, token_ids: jax.Array) -> jax.Array:
    """-1 for an id outside the vocabulary."""
    vocab = table.class_of.shape[0]
    return jnp.where((token_ids >= 0) & (token_ids < vocab), table.class_of[jnp.clip(token_ids, 0, vocab - 1)], -1)


# --- trees --------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="budget")
def build_constrained_tree(
    log_probs: jax.Array,
    token_ids: jax.Array,
    root_token_ids: jax.Array,
    table: TokenTable,
    root_states: jax.Array,
    *,
    budget: int,
) -> DraftTree:
    """Builds the tree of the `budget` best prefixes among those that the grammar of each sequence allows.

    The tree of `grammar_tree.filtered_tree` with `renormalise=True, forced="token"`: a child's log-probability is the
    drafter's, less the logarithm of what the drafter is taken to give to all tokens that are allowed there; where no
    candidate is and the state allows a single text token, that token is added with log-probability 0; nothing comes
    below a stop token. Best first, ties by the lexicographically smaller tuple of ranks.

    The arithmetic is float32, that of the host float64 before rounding. So two prefixes whose scores differ by no more
    than rounding may change places, and the last place, against the host's tree; all others stand as there.

    A free sequence gets, to the bit, what `build_tree_from_candidates` or `build_tree_from_pairs` makes of the same
    arguments: its scores are not renormalised.

    Args:
      log_probs: float[B, L, K], each row non-increasing and <= 0, its order that of the ranks (`draft_candidates`).
        Or float[B, L, K, K] as for `build_tree_from_pairs`, where a rank is the place among the parent's candidates by
        log-probability, then smaller token id; below a forced token each candidate reads as under its best parent.
        What is not <= 0 is no candidate.
      token_ids: int32[B, L, K], distinct in a row.
      root_token_ids: int32[B], the current tokens.
      table: of the B sequences.
      root_states: int32[B], the states after the current tokens. NO_STATE gives the root alone.
      budget: static number of nodes besides the root, >= 0.

    Returns:
      A `DraftTree` with N = budget + 1 slots, fewer of them valid where the grammar leaves fewer prefixes.

    Raises:
      ValueError: a wrong static argument.
    """
    budget = checks.static_int(budget, "budget", minimum=0)
    proposals = _checked(log_probs, token_ids, root_token_ids, table, root_states)
    depth, k = min(proposals.token_ids.shape[1], budget), proposals.token_ids.shape[2]
    if depth == 0:
        return with_padding(root_tree(proposals.root_token_ids), budget)
    if budget * (k + 1) >= 2**31:
        raise ValueError(f"budget: got {budget} with {k} candidates; their product must stay below 2**31.")
    with jax.named_scope("build_constrained_tree"):
        return _lifted(functools.partial(_grow, budget=budget), proposals, table, depth)


@jax.jit
def constrained_chain(
    log_probs: jax.Array, token_ids: jax.Array, root_token_ids: jax.Array, table: TokenTable, root_states: jax.Array
) -> DraftTree:
    """The chain of each row's best allowed candidate below the one before: `grammar_tree.filtered_chain`.

    Arguments, forced tokens and scores are those of `build_constrained_tree`. A free sequence gets what `chain_tree`
    or `chain_from_pairs` gives.

    Returns:
      A `DraftTree` with N = L + 1 slots. It ends after a stop token, and where nothing is allowed or forced.
    """
    proposals = _checked(log_probs, token_ids, root_token_ids, table, root_states)
    depth = proposals.token_ids.shape[1]
    if depth == 0:
        return root_tree(proposals.root_token_ids)
    with jax.named_scope("constrained_chain"):
        return _lifted(_follow, proposals, table, depth)


class _Proposals(NamedTuple):
    log_probs: jax.Array  # float32[B, L, K] or [B, L, K, K]
    token_ids: jax.Array  # int32[B, L, K], K >= 1
    root_token_ids: jax.Array  # int32[B]
    root_states: jax.Array  # int32[B]


class _Found(NamedTuple):
    """One sequence's nodes besides the root, as `formulations.Nodes` with their tokens."""

    scores: jax.Array  # float32[M]
    parents: jax.Array  # int32[M]
    depths: jax.Array  # int32[M]
    tokens: jax.Array  # int32[M]


class _Rows(NamedTuple):
    """One sequence's candidates, each row in an order in which the first of equal log-probs has the smaller rank."""

    log_probs: jax.Array  # float32[L, K] by place, or [L, K, K] as given
    best_parent: jax.Array | None  # float32[L, K], pairs only: of each column the best under any parent
    columns: jax.Array | None  # int32[L, K], pairs only: the column of each place
    rest: jax.Array  # float32[L], what the drafter gives to tokens that are no candidates
    token_ids: jax.Array  # int32[L, K], by place
    classes: jax.Array  # int32[L, K], by place


def _checked(log_probs, token_ids, root_token_ids, table, root_states) -> _Proposals:
    paired = jnp.ndim(log_probs) == 4
    log_probs = checks.as_float32(
        log_probs, "log_probs", (None,) * (4 if paired else 3), "B, L, K, K" if paired else "B, L, K"
    )
    batch, depth, k = log_probs.shape[:3]
    if paired:
        checks.as_float32(log_probs, "log_probs", (batch, depth, k, k), "B, L, K, K")
    proposals = _Proposals(
        log_probs=log_probs,
        token_ids=checks.as_int32(token_ids, "token_ids", (batch, depth, k), "B, L, K"),
        root_token_ids=checks.as_int32(root_token_ids, "root_token_ids", (batch,), "B"),
        root_states=checks.as_int32(root_states, "root_states", (batch,), "B"),
    )
    _check_table(table, batch)
    if k == 0:  # forced tokens need no candidates
        shape = (batch, depth, 1, 1) if paired else (batch, depth, 1)
        return proposals._replace(
            log_probs=jnp.full(shape, -jnp.inf, jnp.float32), token_ids=jnp.zeros((batch, depth, 1), jnp.int32)
        )
    return proposals


def _check_table(table: TokenTable, batch: int) -> None:
    vocab = checks.as_int32(table.class_of, "table.class_of", (batch, None), "B, V").shape[1]
    states = checks.as_int32(table.next_state, "table.next_state", (batch, None, None), "B, S, C").shape[1]
    checks.as_int32(table.allowed, "table.allowed", (batch, states, num_words(vocab)), "B, S, W")
    checks.as_int32(table.forced, "table.forced", (batch, states), "B, S")
    checks.as_int32(table.num_allowed, "table.num_allowed", (batch, states), "B, S")
    checks.as_int32(table.stopped, "table.stopped", (batch,), "B")


def _lifted(make: Callable[..., _Found], proposals: _Proposals, table: TokenTable, depth: int) -> DraftTree:
    def one(log_probs, token_ids, table, root_state):
        return make(_rows(log_probs, token_ids, table), table, root_state)

    found = jax.vmap(one)(proposals.log_probs[:, :depth], proposals.token_ids[:, :depth], table, proposals.root_states)
    return assemble_tokens(*found, proposals.root_token_ids)


def _rows(log_probs: jax.Array, token_ids: jax.Array, table: TokenTable) -> _Rows:
    if log_probs.ndim == 2:
        mass = jnp.sum(jnp.where(log_probs <= 0.0, jnp.exp(log_probs), 0.0), axis=-1)
        return _Rows(log_probs, None, None, jnp.maximum(1.0 - mass, 0.0), token_ids, _classes(table, token_ids))
    columns = jnp.argsort(token_ids, axis=-1).astype(jnp.int32)
    token_ids = jnp.take_along_axis(token_ids, columns, axis=-1)
    best_parent = jnp.max(jnp.where(log_probs <= 0.0, log_probs, -jnp.inf), axis=1)
    rest = jnp.zeros((token_ids.shape[0],), jnp.float32)
    return _Rows(log_probs, best_parent, columns, rest, token_ids, _classes(table, token_ids))


def _children(rows: _Rows, table: TokenTable, state: jax.Array, depth: jax.Array, column: jax.Array) -> jax.Array:
    """float32[K + 1]: log-probs below a node by place, -inf where nothing is allowed; the last: a forced token.

    `column` is the node's own among the K of the row above, K for a forced token.
    """
    num_rows, k = rows.token_ids.shape
    row = jnp.minimum(depth, num_rows - 1)
    if rows.columns is None:
        values = rows.log_probs[row]
    else:
        given = rows.log_probs[row, jnp.minimum(column, k - 1)]
        values = jnp.where(column == k, rows.best_parent[row], given)[rows.columns[row]]
    # Below a stop token nothing, though its state allows the next one. A free sequence is never stopped.
    is_open = (depth < num_rows) & (state != NO_STATE) & (state != table.stopped)
    classes = rows.classes[row]
    after = table.next_state[jnp.maximum(state, 0), jnp.maximum(classes, 0)]
    values = jnp.where(is_open & (classes >= 0) & (after != NO_STATE) & (values <= 0.0), values, -jnp.inf)

    best = jnp.max(values)
    is_any = best > -jnp.inf
    relative = values - jnp.where(is_any, best, 0.0)
    mass = jnp.log(jnp.where(is_any, jnp.sum(jnp.exp(relative)), 1.0))
    num_others = jnp.maximum(table.num_allowed[jnp.maximum(state, 0)] - jnp.sum(values > -jnp.inf), 0)
    rest = rows.rest[row] * num_others / table.class_of.shape[0]
    others = jnp.where(rest > 0.0, jnp.log(jnp.where(rest > 0.0, rest, 1.0)) - jnp.where(is_any, best, 0.0), -jnp.inf)
    shares = jnp.minimum(relative - jnp.logaddexp(mass, others), 0.0)
    is_free = table.stopped == NO_STATE
    is_forced = is_open & ~is_any & (table.forced[jnp.maximum(state, 0)] >= 0)
    return jnp.append(jnp.where(is_free, values, shares), jnp.where(is_forced, 0.0, -jnp.inf))


def _place(rows: _Rows, table: TokenTable, state: jax.Array, depth: jax.Array, place: jax.Array):
    """(token, its column, the state after it) of the child at a place of `_children`."""
    num_rows, k = rows.token_ids.shape
    row, within = jnp.minimum(depth, num_rows - 1), jnp.minimum(place, k - 1)
    is_forced = place == k
    token = jnp.where(is_forced, table.forced[jnp.maximum(state, 0)], rows.token_ids[row, within])
    column = within if rows.columns is None else rows.columns[row, within]
    return token, jnp.where(is_forced, k, column), _step(table, state, token)


def _grow(rows: _Rows, table: TokenTable, root_state: jax.Array, budget: int) -> _Found:
    """`formulations.sequential_frontier` with a place for each node's children; see there for the order of ties.

    The frontier holds of each node's children the first that is not yet in the tree, and stays in lexicographic order.
    """
    width = rows.token_ids.shape[1] + 1
    order = jnp.arange(budget + 1, dtype=jnp.int32)
    places = jnp.arange(width, dtype=jnp.int32)

    class Carry(NamedTuple):
        frontier_scores: jax.Array  # float32[M + 1]
        frontier_codes: jax.Array  # int32[M + 1], parent slot * (K + 1) + place
        children: jax.Array  # float32[M + 1, K + 1], indexed by tree slot
        slot_scores: jax.Array  # float32[M + 1]
        slot_depths: jax.Array  # int32[M + 1]
        slot_states: jax.Array  # int32[M + 1]
        slot_parents: jax.Array  # int32[M + 1]
        slot_tokens: jax.Array  # int32[M + 1]

    def pop(slot, carry):
        best = jnp.argmax(carry.frontier_scores).astype(jnp.int32)
        score, code = carry.frontier_scores[best], carry.frontier_codes[best]
        parent, place = code // width, code % width
        above = carry.slot_depths[parent]
        token, column, state = _place(rows, table, carry.slot_states[parent], above, place)
        below = _children(rows, table, state, above + 1, column)
        first = jnp.argmax(below).astype(jnp.int32)

        # Unused entries have score -inf, which their children get too, and a meaningless code: no siblings.
        siblings = carry.children[parent]
        own = siblings[place]
        is_later = (siblings < own) | ((siblings == own) & (places > place))
        later = jnp.where((score > -jnp.inf) & is_later, siblings, -jnp.inf)
        following = jnp.argmax(later).astype(jnp.int32)

        return Carry(
            frontier_scores=replace_and_insert(
                carry.frontier_scores, best, score + below[first], carry.slot_scores[parent] + later[following]
            ),
            frontier_codes=replace_and_insert(
                carry.frontier_codes, best, slot * width + first, parent * width + following
            ),
            children=carry.children.at[slot].set(below),
            slot_scores=carry.slot_scores.at[slot].set(score),
            slot_depths=carry.slot_depths.at[slot].set(above + 1),
            slot_states=carry.slot_states.at[slot].set(state),
            slot_parents=carry.slot_parents.at[slot].set(parent),
            slot_tokens=carry.slot_tokens.at[slot].set(token),
        )

    of_root = _children(rows, table, root_state, jnp.int32(0), jnp.int32(0))
    first = jnp.argmax(of_root).astype(jnp.int32)
    start = Carry(
        frontier_scores=jnp.where(order == 0, of_root[first], -jnp.inf),
        frontier_codes=jnp.where(order == 0, first, 0),
        children=jnp.full((budget + 1, width), -jnp.inf, jnp.float32).at[0].set(of_root),
        slot_scores=jnp.zeros((budget + 1,), jnp.float32),
        slot_depths=jnp.zeros_like(order),
        slot_states=jnp.where(order == 0, root_state, NO_STATE),
        slot_parents=jnp.zeros_like(order),
        slot_tokens=jnp.zeros_like(order),
    )
    end = lax.fori_loop(jnp.int32(1), jnp.int32(budget + 1), pop, start)
    return _Found(end.slot_scores[1:], end.slot_parents[1:], end.slot_depths[1:], end.slot_tokens[1:])


def _follow(rows: _Rows, table: TokenTable, root_state: jax.Array) -> _Found:
    num_rows = rows.token_ids.shape[0]

    def step(carry, depth):
        score, state, column = carry
        below = _children(rows, table, state, depth, column)
        first = jnp.argmax(below).astype(jnp.int32)
        token, column, after = _place(rows, table, state, depth, first)
        score = score + below[first]
        return (score, after, column), (score, token)

    depths = jnp.arange(num_rows, dtype=jnp.int32)
    scores, tokens = lax.scan(step, (jnp.float32(0.0), root_state, jnp.int32(0)), depths)[1]
    return _Found(scores, depths, depths + 1, tokens)
