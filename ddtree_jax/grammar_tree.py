"""Draft trees and chains that spend no node on what the grammar forbids. Host only.

Filtering changes which nodes are drafted, never what is emitted: that is decided by the rows, which the target's
choices are made under. A tree brings along the rows of its nodes, so it needs no second visit of the matcher.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import operator
from typing import Any, NamedTuple

import numpy as np

from ddtree_jax.grammar_walk import Candidates, SequenceGrammar, Visit
from ddtree_jax.tree.base import NO_PARENT

FORCED = ("off", "token", "text")


class FilteredTree:
    """One sequence's tree in the fields and order of `tree.DraftTree`, without the batch axis, and its rows.

    Attributes:
      token_ids: int32[N], slot 0 the root; padding 0.
      parents: int32[N], NO_PARENT for the root and padding.
      depths: int32[N].
      log_probs: float32[N], cumulative; root 0, padding -inf.
      num_nodes: valid slots, the root included.
    """

    def __init__(self, visit: Visit, nodes: list[_Node], num_slots: int):
        padding = num_slots - len(nodes)
        self._visit = visit
        self._rows: np.ndarray | None = None
        self.token_ids = np.array([node.token for node in nodes] + [0] * padding, np.int32)
        self.parents = np.array([node.parent for node in nodes] + [NO_PARENT] * padding, np.int32)
        self.depths = np.array([len(node.ranks) for node in nodes] + [0] * padding, np.int32)
        self.log_probs = np.array([node.score for node in nodes] + [-np.inf] * padding, np.float32)
        self.num_nodes = len(nodes)

    def rows(self) -> np.ndarray:
        """int32[N, W], the tokens allowed after each slot, padding 0: what `SequenceGrammar.walk` gives.

        The first call computes the rows that the tree itself did not need, those of nodes below which it did not look.
        That work can run beside the verification of the tree; it must be done before the sequence advances.

        Raises:
          InvariantError: the sequence has advanced before the first call.
          ValueError: a grammar too complex at some node.
        """
        if self._rows is None:
            self._rows = self._visit.complete()
        return self._rows


def filtered_tree(
    sequence: SequenceGrammar,
    root_token_id: int,
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    budget: int,
    *,
    renormalise: bool = True,
    forced: str = "off",
) -> FilteredTree:
    """The `budget` best prefixes among those that the grammar allows.

    The order is that of the unfiltered tree: higher cumulative log-probability (float32 sums from the root outward),
    ties by the lexicographically smaller tuple of ranks; a candidate's rank is its place below its parent by higher
    log-probability as given, then smaller token id, forbidden candidates included. A stop token ends its prefix:
    nothing is expanded below one.

    With `renormalise` the log-probability of a child given its parent is log q(child) - log q(allowed): the drafter's
    estimate of the constrained target. q(allowed) is the sum of q over those of the K candidates that the parent's row
    allows, and of what q leaves to the tokens that are no candidates a share: the number of those that are allowed over
    V (nothing for pair scores, which are over the candidates alone). So the only allowed token costs nothing, text that
    leaves little choice costs little, and where all is allowed scores are nearly the drafter's. Without `renormalise`
    they are unchanged everywhere: the best-first tree of all prefixes with every forbidden one left out.

    Args:
      sequence: the grammar's state after the root; left as it is.
      root_token_id: the newest emitted token.
      log_probs: float[L, K], each <= 0; anything else is no candidate. Or float[L, K, K], entry [l, p, c]: of candidate
        c below candidate p of the row above, the root reading [0, 0] (a DFlash2 drafter's pair scores).
      token_ids: int[L, K], distinct in a row.
      budget: nodes besides the root, >= 0.
      renormalise: see above. The difference is taken in float64 and rounded to float32.
      forced: what to add below a node of which no candidate with a score is allowed. "off": nothing. "token": the one
        token that the row allows, if it allows just one; the target will choose it for certain if it gets there.
        "text": also the next token of a text that is forced but can be cut in several ways, in the tokenizer's own
        cut; likely, not certain. An added node has log-probability 0 (its parent's score) and rank K; below it a pair
        score reads as if each candidate had its best parent.

    Returns:
      A `FilteredTree` with N = budget + 1 slots, never deeper than L.

    Raises:
      ValueError: shapes that do not fit, a negative budget, or a grammar too complex at some prefix.
    """
    proposals = _Proposals(sequence, log_probs, token_ids, renormalise, forced)
    budget = operator.index(budget)
    if budget < 0:
        raise ValueError(f"budget: got {budget}, allowed is an integer >= 0")
    return sequence.recovering(lambda: _grow(sequence, int(root_token_id), proposals, budget))


def filtered_chain(
    sequence: SequenceGrammar,
    root_token_id: int,
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    *,
    renormalise: bool = True,
    forced: str = "off",
) -> FilteredTree:
    """The chain of each row's best allowed candidate below the one before (DFlash under a grammar).

    It ends after a stop token, and where neither a candidate is allowed nor a token is forced. Arguments, scores and
    errors are those of `filtered_tree`; `renormalise` makes no difference but to the scores.

    Returns:
      A `FilteredTree` with N = L + 1 slots.
    """
    proposals = _Proposals(sequence, log_probs, token_ids, renormalise, forced)

    def follow() -> FilteredTree:
        nodes = [_Node(int(root_token_id), NO_PARENT, 0, (), np.float32(0.0))]
        with np.errstate(over="ignore"), Visit(sequence, proposals.depth + 1) as visit:
            while (best := proposals.below(visit, len(nodes) - 1, nodes[-1]).node(0)) is not None:
                visit.enter(len(nodes), len(nodes) - 1, best.token, fill=False)
                nodes.append(best)
        return FilteredTree(visit, nodes, proposals.depth + 1)

    return sequence.recovering(follow)


_UNKNOWN = -1


class _Node(NamedTuple):
    token: int
    parent: int  # slot
    column: int  # among its row's candidates; -1: forced, none of them
    ranks: tuple[int, ...]
    score: np.float32


@dataclasses.dataclass(frozen=True, eq=False)
class _Children:
    """The allowed candidates below one node by rank. As arrays: most of them never become nodes."""

    parent: int  # slot
    above: tuple[int, ...]  # the parent's ranks
    scores: np.ndarray  # float32[R], non-increasing
    ranks: np.ndarray  # int[R]
    columns: np.ndarray  # int[K'], of every rank
    tokens: np.ndarray  # int[K], of every column

    def node(self, which: int) -> _Node | None:
        """The child at a place, or None beyond the last with a finite score."""
        if which >= len(self.scores) or self.scores[which] == -np.inf:
            return None
        rank = int(self.ranks[which])
        column = int(self.columns[rank])
        return _Node(int(self.tokens[column]), self.parent, column, (*self.above, rank), self.scores[which])


@dataclasses.dataclass(frozen=True, eq=False)
class _ForcedChild:
    """In place of `_Children` where none of them is allowed."""

    child: _Node | None

    def node(self, which: int) -> _Node | None:
        return self.child if which == 0 else None


def _grow(sequence: SequenceGrammar, root_token_id: int, proposals: _Proposals, budget: int) -> FilteredTree:
    """The heap of `tree.reference`, with the grammar's word on every prefix that is about to enter it.

    A node's children need its row. Until then an entry without a child stands for all of them, with a score that none
    of them exceeds and the node's own ranks, which precede theirs: so it comes up before each of them would.
    """
    nodes = [_Node(root_token_id, NO_PARENT, 0, (), np.float32(0.0))]
    children: dict[int, _Children | _ForcedChild] = {}
    # -score, ranks, parent slot, which child or _UNKNOWN, the child. No two have the same ranks at one time.
    heap: list[tuple[float, tuple[int, ...], int, int, _Node | None]] = []

    def push_child(parent: int, which: int) -> None:
        if (child := children[parent].node(which)) is not None:
            heapq.heappush(heap, (-float(child.score), child.ranks, parent, which, child))

    def push_unknown(slot: int) -> None:
        bound = proposals.bound(nodes[slot])
        if bound > -np.inf:
            heapq.heappush(heap, (-float(bound), nodes[slot].ranks, slot, _UNKNOWN, None))

    # A sum of scores beyond float32 is -inf: no node.
    with np.errstate(over="ignore"), Visit(sequence, budget + 1) as visit:
        push_unknown(0)
        while heap and len(nodes) <= budget:
            _, _, parent, which, child = heapq.heappop(heap)
            if child is None:
                children[parent] = proposals.below(visit, parent, nodes[parent])
                push_child(parent, 0)
                continue
            slot = len(nodes)
            visit.enter(slot, parent, child.token, fill=False)
            nodes.append(child)
            push_child(parent, which + 1)
            push_unknown(slot)
    return FilteredTree(visit, nodes, budget + 1)


class _Proposals:
    """What the drafter proposes, and what the grammar leaves of it below a node."""

    def __init__(self, sequence: SequenceGrammar, log_probs: Any, token_ids: Any, renormalise: bool, forced: str):
        self._scores, self._tokens = _checked(log_probs, token_ids)
        if forced not in FORCED:
            raise ValueError(f"forced: got {forced!r}, allowed: {', '.join(FORCED)}")
        self.depth, self._k = self._tokens.shape
        self._renormalise, self._forced = bool(renormalise), forced
        self._candidates = Candidates(sequence, self._tokens)
        self._vocab_size = sequence.compiled.vocabulary.vocab_size
        self._rest = np.zeros((self.depth,))  # what the drafter gives to tokens that are no candidates
        if self._scores.ndim == 2:
            self._rest = np.maximum(1.0 - np.exp(self._scores.astype(np.float64)).sum(axis=1), 0.0)
        self._by_token = np.argsort(self._tokens, axis=-1)
        self._ranked: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def bound(self, node: _Node) -> np.float32:
        """What no child's score exceeds, as far as that is known without the node's row; -inf: no child."""
        if len(node.ranks) == self.depth:
            return np.float32(-np.inf)
        if self._renormalise or self._forced != "off":
            return node.score
        values = self._ranking(node)[1]
        return node.score + np.float32(values[0]) if len(values) else np.float32(-np.inf)

    def below(self, visit: Visit, slot: int, node: _Node) -> _Children | _ForcedChild:
        """The allowed children of a node; gives its slot a row where it can have any."""
        row = len(node.ranks)
        if row == self.depth or visit.is_finished(slot):
            return _ForcedChild(None)
        visit.fill(slot)
        columns, values = self._ranking(node)
        ranks = visit.allowed_of(slot, self._candidates, row)[columns].nonzero()[0]
        if len(ranks):
            values = values[ranks]
            if self._renormalise:
                best = values[0]
                values = values - best
                mass = math.log1p(np.exp(values[1:]).sum())
                others = self._rest[row] * max(visit.num_allowed(slot) - len(ranks), 0) / self._vocab_size
                if others > 0.0:
                    mass = np.logaddexp(mass, math.log(others) - best)
                values = values - mass
            scores = node.score + values.astype(np.float32)
            return _Children(slot, node.ranks, scores, ranks, columns, self._tokens[row])
        token = None if self._forced == "off" else visit.only_token(slot)
        if token is None and self._forced == "text":
            token = visit.suggested_token(slot)
        return _ForcedChild(token if token is None else _Node(token, slot, -1, (*node.ranks, self._k), node.score))

    def _ranking(self, node: _Node) -> tuple[np.ndarray, np.ndarray]:
        """(columns int[R], log_probs float64[R]) of the candidates below a node by rank, those with a score."""
        row = len(node.ranks)
        above = node.column if self._scores.ndim == 3 else 0
        if (row, above) not in self._ranked:
            values = self._scores[row]
            if self._scores.ndim == 3:
                values = values[above] if 0 <= above < self._k else values.max(axis=0, initial=-np.inf)
            values = values[self._by_token[row]]
            # Stable, so that equal values stay in the order of their tokens.
            order = np.argsort(-values, kind="stable")[: np.count_nonzero(values > -np.inf)]
            self._ranked[row, above] = self._by_token[row][order], values[order].astype(np.float64)
        return self._ranked[row, above]


def _checked(log_probs: Any, token_ids: Any) -> tuple[np.ndarray, np.ndarray]:
    scores, tokens = np.asarray(log_probs), np.asarray(token_ids)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"token_ids: got {tokens.dtype}{list(tokens.shape)}, allowed is int[L, K]")
    depth, k = tokens.shape
    if scores.shape not in ((depth, k), (depth, k, k)) or not np.issubdtype(scores.dtype, np.floating):
        raise ValueError(
            f"log_probs: got {scores.dtype}{list(scores.shape)}, allowed with token_ids[{depth}, {k}] is "
            f"float[{depth}, {k}] or float[{depth}, {k}, {k}]"
        )
    scores = scores.astype(np.float32)
    return np.where(scores <= 0, scores, np.float32(-np.inf)), tokens
