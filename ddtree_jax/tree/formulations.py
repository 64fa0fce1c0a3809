"""Three exact ways to find the most probable prefixes, all equal to the plain best-first heap.

All take one sequence's candidates (*unbatched*; `build_tree` lifts them with vmap): `log_probs` float32[L,
K], each row non-increasing, -inf where there is no candidate. All return the first `budget` prefixes in the
heap's order: higher score first, ties by the lexicographically smaller tuple of ranks.

Why they agree: scores are float32 sums from the root outward. Rounded addition is monotone, so a score never
exceeds that of the parent or of the previous sibling, and both precede it lexicographically too. The heap
therefore pops in the global order of (score, rank tuple), and "the first N of all prefixes in that order" is
what each of these computes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.pallas.vocab_topk import exact_topk

# Largest static universe: beyond it the one-shot selection loses to the others on every device, and tracing
# is slow.
MAX_UNIVERSE = 1 << 18


class Nodes(NamedTuple):
    """The nodes besides the root, best first; entries with score -inf are absent."""

    scores: jax.Array  # float32[M]
    parents: jax.Array  # int32[M], tree slots: 0 the root, m + 1 the m-th node
    depths: jax.Array  # int32[M], from 1
    ranks: jax.Array  # int32[M]


def chain(log_probs: jax.Array, budget: int) -> Nodes:
    """K = 1: the only prefixes are those of the top-1 chain."""
    depth = log_probs.shape[0]
    scores = [log_probs[0, 0]]
    for d in range(1, depth):
        scores.append(scores[-1] + log_probs[d, 0])
    scores = jnp.stack(scores[:budget] + [jnp.float32(-jnp.inf)] * (budget - depth))
    slots = jnp.arange(budget, dtype=jnp.int32)
    return Nodes(scores=scores, parents=slots, depths=slots + 1, ranks=jnp.zeros_like(slots))


def replace_and_insert(values: jax.Array, at: jax.Array, new: jax.Array, after: jax.Array) -> jax.Array:
    """values[at] = new, with `after` inserted behind it; the rest moves up by one and the last entry is lost."""
    order = jnp.arange(values.shape[0], dtype=jnp.int32)
    shifted = jnp.concatenate([values[:1], values[:-1]])
    moved = jnp.where(order == at + 1, after, shifted)
    return jnp.where(order < at, values, jnp.where(order == at, new, moved))


def sequential_frontier(log_probs: jax.Array, budget: int) -> Nodes:
    """Formulation A: the heap itself, with its frontier in an array that is kept in lexicographic order.

    Popping entry j puts its first child at j and its next sibling at j + 1: nothing else in the frontier lies
    between the popped tuple and its sibling. So argmax, which prefers the smaller index, breaks ties
    lexicographically with no comparison of tuples. O(budget^2) work in `budget` sequential steps.
    """
    depth, k = log_probs.shape
    # A row of -inf below and a column of -inf to the right end the children and the siblings.
    padded = jnp.pad(log_probs, ((0, 1), (0, 1)), constant_values=-jnp.inf)
    order = jnp.arange(budget + 1, dtype=jnp.int32)

    class Carry(NamedTuple):
        frontier_scores: jax.Array  # float32[M + 1]
        frontier_codes: jax.Array  # int32[M + 1], parent slot * k + rank
        slot_scores: jax.Array  # float32[M + 1], indexed by tree slot
        slot_depths: jax.Array  # int32[M + 1]
        slot_codes: jax.Array  # int32[M + 1]

    def pop(slot, carry):
        best = jnp.argmax(carry.frontier_scores).astype(jnp.int32)
        score, code = carry.frontier_scores[best], carry.frontier_codes[best]
        parent, rank = code // k, code % k
        parent_depth = carry.slot_depths[parent]
        # Unused entries have score -inf and a meaningless code: they must not breed.
        alive = score > -jnp.inf
        child = jnp.where(alive, score + padded[parent_depth + 1, 0], -jnp.inf)
        sibling = jnp.where(alive, carry.slot_scores[parent] + padded[parent_depth, rank + 1], -jnp.inf)

        return Carry(
            frontier_scores=replace_and_insert(carry.frontier_scores, best, child, sibling),
            frontier_codes=replace_and_insert(carry.frontier_codes, best, slot * k, code + 1),
            slot_scores=carry.slot_scores.at[slot].set(score),
            slot_depths=carry.slot_depths.at[slot].set(parent_depth + 1),
            slot_codes=carry.slot_codes.at[slot].set(code),
        )

    start = Carry(
        frontier_scores=jnp.where(order == 0, log_probs[0, 0], -jnp.inf),
        frontier_codes=jnp.zeros_like(order),
        slot_scores=jnp.zeros((budget + 1,), jnp.float32),
        slot_depths=jnp.zeros_like(order),
        slot_codes=jnp.zeros_like(order),
    )
    end = lax.fori_loop(jnp.int32(1), jnp.int32(budget + 1), pop, start)
    codes = end.slot_codes[1:]
    return Nodes(scores=end.slot_scores[1:], parents=codes // k, depths=end.slot_depths[1:], ranks=codes % k)


def level_merge(log_probs: jax.Array, budget: int, *, by_counting: bool = False) -> Nodes:
    """Formulation B: level by level, the best `budget` prefixes of depth <= d, for d = 1..L.

    The best of depth <= d + 1 are among those of depth <= d and the children of their depth-d members. The
    i-th of these members (from 1, best first) can only place its first budget / i children, which makes the
    candidates a static list of about budget * ln(budget) pairs. Exact ties: every kept prefix carries its
    lexicographic position among the kept, and a child follows its parent immediately, so (position of the
    parent, rank + 1) orders old and new prefixes alike. L sequential steps, whatever the data; each orders
    its candidates by one two-key sort, or by counting those ahead of each (`by_counting`), which a GPU does
    in one kernel.
    """
    depth, k = log_probs.shape
    member_ids, child_ranks = map(jnp.asarray, _hyperbola(budget, k))
    own = jnp.arange(budget, dtype=jnp.int32)

    missing = budget - min(k, budget)
    scores = jnp.pad(log_probs[0, :budget], (0, missing), constant_values=-jnp.inf)
    nodes = Nodes(scores=scores, parents=jnp.full_like(own, -1), depths=jnp.ones_like(own), ranks=own)

    def deepen(d, carry):
        nodes, lexicographic = carry
        is_member = (nodes.depths == d) & (nodes.scores > -jnp.inf)
        # Members in score order; entry `budget` of the padded arrays below stands for "no such member".
        place = jnp.where(is_member, jnp.cumsum(is_member, dtype=jnp.int32) - 1, budget)
        members = jnp.full_like(own, budget).at[place].set(own, mode="drop")
        parents = members[member_ids]
        parent_scores = jnp.append(nodes.scores, jnp.float32(-jnp.inf))[parents]
        parent_lexicographic = jnp.append(lexicographic, jnp.int32(0))[parents]

        candidate_scores = jnp.concatenate([nodes.scores, parent_scores + log_probs[d][child_ranks]])
        keys = jnp.concatenate([lexicographic * (k + 1), parent_lexicographic * (k + 1) + child_ranks + 1])
        select = _best_by_counting if by_counting else _best_by_sorting
        kept = select(candidate_scores, keys, budget)

        # A kept prefix has a kept parent, because the parent precedes it: its new place is always defined.
        new_place = jnp.zeros((budget + 1,), jnp.int32).at[kept].set(own, mode="drop")
        old_parents = jnp.where(nodes.parents < 0, -1, new_place[nodes.parents])
        nodes = Nodes(
            scores=candidate_scores[kept],
            parents=jnp.concatenate([old_parents, new_place[parents]])[kept],
            depths=jnp.concatenate([nodes.depths, jnp.full_like(parents, d + 1)])[kept],
            ranks=jnp.concatenate([nodes.ranks, child_ranks])[kept],
        )
        keys = keys[kept]
        lexicographic = jnp.sum(keys[None, :] < keys[:, None], axis=1, dtype=jnp.int32)
        return nodes, lexicographic

    nodes, _ = lax.fori_loop(1, depth, deepen, (nodes, own))
    return nodes._replace(parents=nodes.parents + 1)


def static_universe(log_probs: jax.Array, budget: int) -> Nodes:
    """Formulation C: score every prefix that any data could place among the best `budget`, then select once.

    A rank tuple is preceded by all componentwise smaller-or-equal tuples of all its prefix lengths. Where
    these fill the budget it can never be chosen; the others are a finite set known at trace time. In
    lexicographic order, the smaller-index rule of top_k is the tie rule.
    """
    depth, k = log_probs.shape
    universe = _universe(budget, depth, k)
    # Absent depths read an appended 0.0, which leaves the sum as it is.
    flat = jnp.append(log_probs.reshape(-1), jnp.float32(0.0))
    scores = flat[universe.reads[0]]
    for reads in universe.reads[1:]:
        scores = scores + flat[reads]
    scores = jnp.pad(scores, (0, max(0, budget - scores.shape[0])), constant_values=-jnp.inf)
    scores, chosen = exact_topk(scores, budget)
    chosen = jnp.minimum(chosen, len(universe.parents) - 1).astype(jnp.int32)
    parents = jnp.asarray(universe.parents)[chosen]
    is_parent = parents[:, None] == chosen[None, :]
    slots = jnp.where(parents < 0, 0, jnp.argmax(is_parent, axis=1).astype(jnp.int32) + 1)
    return Nodes(
        scores=scores,
        parents=slots,
        depths=jnp.asarray(universe.depths)[chosen],
        ranks=jnp.asarray(universe.ranks)[chosen],
    )


def with_spine(nodes: Nodes, log_probs: jax.Array) -> Nodes:
    """The best nodes among which the whole top-1 chain (the spine) is, from the best nodes without that demand.

    The spine is rank 0 at every depth, min(L, budget) deep or up to the first row without candidates. What is
    wanted is the spine and, in the rest of the budget, the first other prefixes in the heap's order. That set is
    prefix-closed: a parent lies on the spine or is another prefix, and then precedes its child. Its other
    prefixes are the first ones of `nodes`, which holds at least as many; the spine nodes that `nodes` lacks come
    after all of it in the heap's order. So the last other nodes leave and the end of the spine is appended.

    Args:
      nodes: all `budget` entries of a formulation.
      log_probs: float32[L, K], what the formulation was given.

    Returns:
      `budget` entries in the heap's order.
    """
    budget = nodes.scores.shape[0]
    spine = chain(log_probs[:budget], budget)
    spine_length = jnp.sum(spine.scores > -jnp.inf, dtype=jnp.int32)

    alive = nodes.scores > -jnp.inf
    # By tree slot, the root on the spine: a node is on it iff it and all its ancestors have rank 0. Absent
    # entries have meaningless parents; their own False is enough.
    on_spine = jnp.append(True, alive & (nodes.ranks == 0))
    ancestors = jnp.append(jnp.int32(0), jnp.where(alive, nodes.parents, 0))
    for _ in range((min(log_probs.shape[0], budget) - 1).bit_length()):
        on_spine, ancestors = on_spine & on_spine[ancestors], ancestors[ancestors]
    on_spine = on_spine[1:]
    num_present = jnp.sum(on_spine, dtype=jnp.int32)

    is_other = alive & ~on_spine
    kept = on_spine | (is_other & (jnp.cumsum(is_other, dtype=jnp.int32) <= budget - spine_length))
    places = jnp.cumsum(kept, dtype=jnp.int32) - 1
    num_kept = jnp.sum(kept, dtype=jnp.int32)
    new_slots = jnp.append(jnp.int32(0), places + 1)
    tip = jnp.max(jnp.where(on_spine, places + 1, 0), initial=0)  # slot of the deepest spine node in `nodes`

    order = jnp.arange(budget, dtype=jnp.int32)
    appended = (order >= num_present) & (order < spine_length)  # entry d of the spine has depth d + 1
    targets = jnp.concatenate(
        [jnp.where(kept, places, budget), jnp.where(appended, num_kept + order - num_present, budget)]
    )
    spine_parents = jnp.where(order == num_present, tip, num_kept + order - num_present)

    def merged(fill, from_nodes, from_spine):
        values = jnp.concatenate([from_nodes, from_spine])
        return jnp.full((budget,), fill, values.dtype).at[targets].set(values, mode="drop")

    return Nodes(
        scores=merged(-jnp.inf, nodes.scores, spine.scores),
        parents=merged(0, new_slots[jnp.where(alive, nodes.parents, 0)], spine_parents),
        depths=merged(0, nodes.depths, spine.depths),
        ranks=merged(0, nodes.ranks, spine.ranks),
    )


def _best_by_sorting(scores: jax.Array, keys: jax.Array, count: int) -> jax.Array:
    """Indices of the `count` best entries by (higher score, smaller key), best first."""
    ids = jnp.arange(scores.shape[0], dtype=jnp.int32)
    return lax.sort((-scores, keys, ids), num_keys=2)[2][:count]


def _best_by_counting(scores: jax.Array, keys: jax.Array, count: int) -> jax.Array:
    """As `_best_by_sorting`, by comparing all pairs."""
    ids = jnp.arange(scores.shape[0], dtype=jnp.int32)
    # Absent entries (-inf) share keys: the index makes all ranks distinct.
    key_ahead = (keys[None, :] < keys[:, None]) | ((keys[None, :] == keys[:, None]) & (ids[None, :] < ids[:, None]))
    ahead = (scores[None, :] > scores[:, None]) | ((scores[None, :] == scores[:, None]) & key_ahead)
    ranks = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return jnp.zeros((count,), jnp.int32).at[ranks].set(ids, mode="drop")


def universe_size(budget: int, depth: int, k: int) -> int:
    """Number of prefixes in the static universe, or MAX_UNIVERSE + 1 where it is larger than that."""
    universe = _universe(budget, depth, k)
    return MAX_UNIVERSE + 1 if universe is None else len(universe.parents)


class _Universe(NamedTuple):
    """All prefixes that can be chosen, in lexicographic order of their rank tuples."""

    reads: tuple[np.ndarray, ...]  # per depth: int32[U], index into the flattened [L, K] log-probs; L * K for none
    parents: np.ndarray  # int32[U], -1 for the root
    depths: np.ndarray  # int32[U]
    ranks: np.ndarray  # int32[U]


@functools.lru_cache(maxsize=16)
def _universe(budget: int, depth: int, k: int) -> _Universe | None:
    """Enumerates the universe depth first; None if it exceeds MAX_UNIVERSE."""
    tuples: list[tuple[int, ...]] = []
    parents: list[int] = []

    def visit(prefix: tuple[int, ...], parent: int, product: int, preceding: int) -> bool:
        for rank in range(k):
            # `preceding` counts the tuples that precede or equal this one, summed over prefix lengths.
            below = product * (rank + 1)
            if preceding + below > budget:
                return True
            index = len(tuples)
            if index >= MAX_UNIVERSE:
                return False
            tuples.append((*prefix, rank))
            parents.append(parent)
            if len(prefix) + 1 < depth and not visit(tuples[index], index, below, preceding + below):
                return False
        return True

    if not visit((), -1, 1, 0):
        return None
    absent = depth * k
    reads = np.full((depth, len(tuples)), absent, np.int32)
    for index, ranks in enumerate(tuples):
        reads[: len(ranks), index] = np.arange(len(ranks)) * k + np.asarray(ranks)
    return _Universe(
        reads=tuple(reads),
        parents=np.asarray(parents, np.int32),
        depths=np.asarray([len(ranks) for ranks in tuples], np.int32),
        ranks=np.asarray([ranks[-1] for ranks in tuples], np.int32),
    )


@functools.lru_cache(maxsize=64)
def _hyperbola(budget: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Static pairs (i, rank), both from 0, with (i + 1) * (rank + 1) <= budget and rank < k."""
    counts = np.minimum(budget // np.arange(1, budget + 1), k)
    members = np.repeat(np.arange(budget), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    return members.astype(np.int32), ranks.astype(np.int32)
