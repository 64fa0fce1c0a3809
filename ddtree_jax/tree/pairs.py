"""Trees whose scores depend on the parent: a DFlash2 drafter scores pairs of (parent's token, own token).

Each of the L rows has the same K candidates for all parents, but their log-probabilities depend on which candidate
of the row above is the parent. Otherwise all is as in `build`: the score of a prefix is the float32 sum from the root
outward, and the tree is the `budget` best prefixes in the order of (score, tuple of ranks), where a rank counts among
the children of one parent. Log-probabilities are <= 0 and rounded addition is monotone, so a prefix never comes before
its parent or its previous sibling: the plain heap and both formulations here give the same nodes.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.pallas.vocab_topk import exact_topk
from ddtree_jax.tree import checks
from ddtree_jax.tree.base import DraftTree
from ddtree_jax.tree.build import assemble, root_tree, with_padding
from ddtree_jax.tree.formulations import Nodes, replace_and_insert

PAIR_FORMULATIONS = ("sequential_frontier", "level_merge")


class Ranked(NamedTuple):
    """Each parent's candidates in the order of their ranks: higher log-prob first, equal ones by smaller token id."""

    log_probs: jax.Array  # float32[..., L, K, R], -inf where there is no candidate
    columns: jax.Array  # int32[..., L, K, R], place of the candidate among the K of its row


def default_pair_formulation(*, backend: str) -> str:
    """Loop steps are nearly free on a CPU; elsewhere each costs launches: L of them there instead of `budget`."""
    return "sequential_frontier" if backend == "cpu" else "level_merge"


@functools.partial(jax.jit, static_argnames=("budget", "formulation"))
def build_tree_from_pairs(
    pair_log_probs: jax.Array,
    token_ids: jax.Array,
    root_token_ids: jax.Array,
    *,
    budget: int,
    formulation: str = "auto",
) -> DraftTree:
    """Builds the tree of the `budget` best prefixes under a sum of pair log-probabilities.

    Best first: higher cumulative log-probability, ties by the lexicographically smaller tuple of ranks. The rank of a
    node is its place among its parent's candidates: higher pair log-probability first, equal ones by the smaller token
    id. The set is prefix-closed.

    Args:
      pair_log_probs: float[B, L, K, K], entry [b, l, p, c]: of candidate c of row l when candidate p of row l - 1 is
        the parent. The root is the only parent of the first row, of which only [:, 0, 0, :] is read. Each is <= 0;
        anything else (-inf, NaN, a positive number) is no candidate.
      token_ids: int32[B, L, K], distinct in a row.
      root_token_ids: int32[B], the current tokens.
      budget: static number of nodes besides the root, >= 0 (0: root only).
      formulation: one of `PAIR_FORMULATIONS`, all exactly equal, or "auto".

    Returns:
      A `DraftTree` with N = budget + 1 slots; `num_nodes` is smaller than N where fewer than `budget` prefixes are
      reachable with a finite score.

    Raises:
      ValueError: a wrong static argument.
    """
    budget = checks.static_int(budget, "budget", minimum=0)
    if formulation != "auto" and formulation not in PAIR_FORMULATIONS:
        raise ValueError(f"formulation: got {formulation!r}; allowed: auto, {', '.join(PAIR_FORMULATIONS)}.")
    pair_log_probs, token_ids, root_token_ids = _checked(pair_log_probs, token_ids, root_token_ids)
    depth, k = min(pair_log_probs.shape[1], budget), pair_log_probs.shape[2]
    if depth == 0 or k == 0:
        return with_padding(root_tree(root_token_ids), budget)
    num_ranks = min(k, budget)  # a node of rank r needs its r elder siblings
    if budget * (num_ranks + 1) >= 2**31:
        raise ValueError(f"budget: got {budget} with {k} candidates; their product must stay below 2**31.")
    if formulation == "auto":
        formulation = default_pair_formulation(backend=jax.default_backend())
    with jax.named_scope("build_tree_from_pairs"):
        token_ids = token_ids[:, :depth]
        ranked = _ranked(pair_log_probs[:, :depth], token_ids, num_ranks)
        nodes = jax.vmap(_pick(formulation, num_ranks, budget))(ranked)
        return assemble(nodes, token_ids, root_token_ids)


@jax.jit
def chain_from_pairs(pair_log_probs: jax.Array, token_ids: jax.Array, root_token_ids: jax.Array) -> DraftTree:
    """The greedy chain: each row's best candidate given the one picked above it.

    Args:
      pair_log_probs: float[B, L, K, K], as for `build_tree_from_pairs`.
      token_ids: int32[B, L, K], distinct in a row.
      root_token_ids: int32[B].

    Returns:
      A `DraftTree` with N = L + 1 slots; node l + 1 is the pick of row l (the smaller token id among equals) below
      node l. A parent without candidates ends the chain.
    """
    pair_log_probs, token_ids, root_token_ids = _checked(pair_log_probs, token_ids, root_token_ids)
    depth, k = pair_log_probs.shape[1:3]
    if depth == 0 or k == 0:
        return with_padding(root_tree(root_token_ids), depth)
    nodes = jax.vmap(functools.partial(_chain, budget=depth))(_ranked(pair_log_probs, token_ids, 1))
    return assemble(nodes, token_ids, root_token_ids)


def _checked(
    pair_log_probs: jax.Array, token_ids: jax.Array, root_token_ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    pair_log_probs = checks.as_float32(pair_log_probs, "pair_log_probs", (None,) * 4, "B, L, K, K")
    batch, depth, k, _ = pair_log_probs.shape
    checks.as_float32(pair_log_probs, "pair_log_probs", (batch, depth, k, k), "B, L, K, K")
    token_ids = checks.as_int32(token_ids, "token_ids", (batch, depth, k), "B, L, K")
    return pair_log_probs, token_ids, checks.as_int32(root_token_ids, "root_token_ids", (batch,), "B")


def _ranked(pair_log_probs: jax.Array, token_ids: jax.Array, num_ranks: int) -> Ranked:
    """The `num_ranks` best candidates of every parent: [B, L, K, K] -> [B, L, K, R]."""
    # -0.0 == 0.0, but the selection ranks bits.
    values = jnp.where(pair_log_probs == 0.0, 0.0, pair_log_probs)
    values = jnp.where(values <= 0.0, values, -jnp.inf)
    # With the candidates in the order of their tokens, the smaller index among equals is the smaller token.
    by_token = jnp.argsort(token_ids, axis=-1).astype(jnp.int32)[:, :, None, :]
    best, places = exact_topk(jnp.take_along_axis(values, by_token, axis=-1), num_ranks)
    return Ranked(log_probs=best, columns=jnp.take_along_axis(by_token, places, axis=-1))


def _pick(formulation: str, num_ranks: int, budget: int) -> Callable[[Ranked], Nodes]:
    if num_ranks == 1:
        return functools.partial(_chain, budget=budget)
    pick = {"sequential_frontier": _sequential_frontier, "level_merge": _level_merge}[formulation]
    return functools.partial(pick, budget=budget)


# The formulations take one sequence's candidates (*unbatched*, Ranked of [L, K, R]) and return `Nodes` of
# length `budget` whose `ranks` are columns: what `assemble` reads tokens with.


def _chain(ranked: Ranked, budget: int) -> Nodes:
    """R = 1: every node has at most one child, and they come in the order of the rows."""
    depth = ranked.log_probs.shape[0]

    def step(carry: tuple[jax.Array, jax.Array], row: Ranked):
        score, column = carry
        carry = score + row.log_probs[column, 0], row.columns[column, 0]
        return carry, carry

    scores, columns = lax.scan(step, (jnp.float32(0.0), jnp.int32(0)), ranked)[1]
    slots = jnp.arange(budget, dtype=jnp.int32)
    return Nodes(
        scores=jnp.pad(scores, (0, budget - depth), constant_values=-jnp.inf),
        parents=slots,
        depths=slots + 1,
        ranks=jnp.pad(columns, (0, budget - depth)),
    )


def _sequential_frontier(ranked: Ranked, budget: int) -> Nodes:
    """The heap itself, one pop a step, as `formulations.sequential_frontier`: see there for the order of ties."""
    num_ranks = ranked.log_probs.shape[-1]
    # A row of -inf below and a rank of -inf to the right end the children and the siblings.
    log_probs = jnp.pad(ranked.log_probs, ((0, 1), (0, 0), (0, 1)), constant_values=-jnp.inf)
    columns = jnp.pad(ranked.columns, ((0, 1), (0, 0), (0, 0)))
    order = jnp.arange(budget + 1, dtype=jnp.int32)

    class Carry(NamedTuple):
        frontier_scores: jax.Array  # float32[M + 1]
        frontier_codes: jax.Array  # int32[M + 1], parent slot * R + rank
        slot_scores: jax.Array  # float32[M + 1], indexed by tree slot
        slot_depths: jax.Array  # int32[M + 1]
        slot_columns: jax.Array  # int32[M + 1]; the root reads as column 0
        slot_parents: jax.Array  # int32[M + 1]

    def pop(slot, carry):
        best = jnp.argmax(carry.frontier_scores).astype(jnp.int32)
        score, code = carry.frontier_scores[best], carry.frontier_codes[best]
        parent, rank = code // num_ranks, code % num_ranks
        row, above = carry.slot_depths[parent], carry.slot_columns[parent]
        column = columns[row, above, rank]
        # Unused entries have score -inf and a meaningless code: they must not breed.
        alive = score > -jnp.inf
        child = jnp.where(alive, score + log_probs[row + 1, column, 0], -jnp.inf)
        sibling = jnp.where(alive, carry.slot_scores[parent] + log_probs[row, above, rank + 1], -jnp.inf)

        return Carry(
            frontier_scores=replace_and_insert(carry.frontier_scores, best, child, sibling),
            frontier_codes=replace_and_insert(carry.frontier_codes, best, slot * num_ranks, code + 1),
            slot_scores=carry.slot_scores.at[slot].set(score),
            slot_depths=carry.slot_depths.at[slot].set(row + 1),
            slot_columns=carry.slot_columns.at[slot].set(column),
            slot_parents=carry.slot_parents.at[slot].set(parent),
        )

    start = Carry(
        frontier_scores=jnp.where(order == 0, ranked.log_probs[0, 0, 0], -jnp.inf),
        frontier_codes=jnp.zeros_like(order),
        slot_scores=jnp.zeros((budget + 1,), jnp.float32),
        slot_depths=jnp.zeros_like(order),
        slot_columns=jnp.zeros_like(order),
        slot_parents=jnp.zeros_like(order),
    )
    end = lax.fori_loop(jnp.int32(1), jnp.int32(budget + 1), pop, start)
    return Nodes(
        scores=end.slot_scores[1:], parents=end.slot_parents[1:], depths=end.slot_depths[1:], ranks=end.slot_columns[1:]
    )


def _level_merge(ranked: Ranked, budget: int) -> Nodes:
    """Row by row: the best `budget + 1` prefixes of depth <= d, the root included, for d = 1..L.

    The best of depth <= d + 1 are among those of depth <= d and the children of their depth-d members. The kept
    prefixes stand in lexicographic order, and a member's new children follow it immediately: all others are shorter,
    or differ from it earlier. So the flattened table of (prefix, its children) is in lexicographic order too, and the
    selection's rule for ties, smaller index first, is the one wanted. L sequential steps, whatever the data.
    """
    depth, _, num_ranks = ranked.log_probs.shape
    slots = budget + 1
    own = jnp.arange(slots, dtype=jnp.int32)

    def deepen(d, nodes):
        above = nodes.ranks
        is_member = (nodes.depths == d) & (nodes.scores > -jnp.inf)
        children = jnp.where(is_member[:, None], nodes.scores[:, None] + ranked.log_probs[d][above], -jnp.inf)

        def table(of_nodes, of_children):
            of_children = jnp.broadcast_to(of_children, (slots, num_ranks))
            return jnp.concatenate([of_nodes[:, None], of_children], axis=1).reshape(-1)

        scores = table(nodes.scores, children)
        kept = jnp.sort(exact_topk(scores, slots)[1])
        # A kept prefix has a kept parent, because the parent precedes it: its new place is always defined.
        new_place = jnp.zeros((slots * (1 + num_ranks),), jnp.int32).at[kept].set(own)
        parents = table(nodes.parents, own[:, None])[kept]
        return Nodes(
            scores=scores[kept],
            parents=jnp.where(kept == 0, -1, new_place[jnp.maximum(parents, 0) * (1 + num_ranks)]),
            depths=table(nodes.depths, jnp.int32(d + 1).reshape(1, 1))[kept],
            ranks=table(nodes.ranks, ranked.columns[d][above])[kept],
        )

    start = Nodes(
        scores=jnp.where(own == 0, 0.0, -jnp.inf),
        parents=jnp.full_like(own, -1),
        depths=jnp.where(own == 0, 0, -1),
        ranks=jnp.zeros_like(own),
    )
    nodes = lax.fori_loop(0, depth, deepen, start)
    best = exact_topk(nodes.scores, slots)[1]
    slot_of = jnp.zeros_like(own).at[best].set(own)
    nodes = Nodes(*(values[best] for values in nodes))
    return Nodes(
        scores=nodes.scores[1:],
        parents=slot_of[jnp.maximum(nodes.parents[1:], 0)],
        depths=nodes.depths[1:],
        ranks=nodes.ranks[1:],
    )
