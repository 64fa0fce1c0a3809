"""Draft trees that spend no node on what the grammar forbids. Host only.

Filtering changes which nodes are drafted, never what is emitted: that is decided by the rows, which the target's
choices are made under. The tree comes with the rows of its nodes, so it needs no second visit.
"""

from __future__ import annotations

import dataclasses
import heapq
import operator
from typing import Any

import numpy as np

from ddtree_jax.grammar_walk import SequenceGrammar, Visit
from ddtree_jax.tree.base import NO_PARENT

FORCED = ("off", "token", "text")


@dataclasses.dataclass(frozen=True, eq=False)
class FilteredTree:
    """One sequence's tree in the fields and order of `tree.DraftTree`, without the batch axis, and its rows.

    Attributes:
      token_ids: int32[N], slot 0 the root; padding 0.
      parents: int32[N], NO_PARENT for the root and padding.
      depths: int32[N].
      log_probs: float32[N], cumulative; root 0, padding -inf.
      num_nodes: valid slots, the root included.
      rows: int32[N, W], the tokens allowed after each slot; padding 0. What `SequenceGrammar.walk` gives.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_probs: np.ndarray
    num_nodes: int
    rows: np.ndarray


def filtered_tree(
    sequence: SequenceGrammar,
    root_token_id: int,
    log_probs: np.ndarray,
    token_ids: np.ndarray,
    budget: int,
    *,
    forced: str = "off",
) -> FilteredTree:
    """The `budget` best prefixes among those that the grammar allows.

    The order is that of the unfiltered tree: higher cumulative log-probability (float32 sums from the root outward),
    ties by the lexicographically smaller tuple of ranks; a candidate's rank is its place in its row by higher
    log-probability, then smaller token id, forbidden candidates included. So what is kept is the best-first tree of
    all prefixes with every forbidden one left out, and scores are the drafter's, unchanged. A stop token ends its
    prefix: nothing is expanded below one.

    Args:
      sequence: the grammar's state after the root; left as it is.
      root_token_id: the newest emitted token.
      log_probs: float[L, K], each <= 0; anything else is no candidate. Or float[L, K, K], entry [l, p, c]: of candidate
        c below candidate p of the row above, the root reading [0, 0] (a DFlash2 drafter's pair scores).
      token_ids: int[L, K], distinct in a row.
      budget: nodes besides the root, >= 0.
      forced: what to add where a node's forced continuation is not among its candidates with a score.
        "off": nothing. "token": the one token that the row allows, if it allows just one; the target will choose it
        for certain if it gets there. "text": also the next token of a text that is forced but can be cut in several
        ways, in the tokenizer's own cut; likely, not certain. An added node has log-probability 0 (its parent's score)
        and the last rank; below it a pair score reads as if each candidate had its best parent.

    Returns:
      A `FilteredTree` with N = budget + 1 slots, never deeper than L.

    Raises:
      ValueError: shapes that do not fit, a negative budget, or a grammar too complex at some prefix.
    """
    scores, tokens = _checked(log_probs, token_ids)
    budget = operator.index(budget)
    if budget < 0:
        raise ValueError(f"budget: got {budget}, allowed is an integer >= 0")
    if forced not in FORCED:
        raise ValueError(f"forced: got {forced!r}, allowed: {', '.join(FORCED)}")
    return sequence.recovering(lambda: _grow(sequence, int(root_token_id), scores, tokens, budget, forced))


def _grow(
    sequence: SequenceGrammar, root_token_id: int, scores: np.ndarray, tokens: np.ndarray, budget: int, forced: str
) -> FilteredTree:
    """The heap of `tree.reference`, with the grammar's word on every prefix that is about to enter it."""
    depth, k = tokens.shape
    ranked = _Ranked(scores, tokens)
    node_tokens, parents, depths = [root_token_id], [NO_PARENT], [0]
    log_prob, ranks, columns = [np.float32(0.0)], [()], [0]
    heap: list[tuple[np.float32, tuple[int, ...], int, int, int]] = []

    def push(parent: int, first_rank: int) -> None:
        """The parent's best allowed candidate from a rank on."""
        row = depths[parent]
        if row >= depth or visit.is_finished(parent):
            return
        order, values = ranked.of(row, columns[parent])
        for rank in range(first_rank, k):
            value = values[rank]
            if value == -np.inf:
                break
            token = int(tokens[row, order[rank]])
            if visit.allows(parent, token):
                with np.errstate(over="ignore"):
                    score = log_prob[parent] + value
                if score > -np.inf:
                    heapq.heappush(heap, (-score, (*ranks[parent], rank), parent, int(order[rank]), token))
                return

    def push_forced(parent: int) -> None:
        row = depths[parent]
        if forced == "off" or row >= depth:
            return
        token = visit.only_token(parent)
        if token is None and forced == "text":
            token = visit.suggested_token(parent)
        if token is None:
            return
        order, values = ranked.of(row, columns[parent])
        if token not in tokens[row, order[values > -np.inf]]:
            heapq.heappush(heap, (-log_prob[parent], (*ranks[parent], k), parent, -1, token))

    with Visit(sequence, budget + 1) as visit:
        push_forced(0)
        push(0, 0)
        while heap and len(node_tokens) <= budget:
            negated, its_ranks, parent, column, token = heapq.heappop(heap)
            slot = len(node_tokens)
            visit.enter(slot, parent, token)
            node_tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            log_prob.append(np.float32(-negated))
            ranks.append(its_ranks)
            columns.append(column)
            if column >= 0:
                push(parent, its_ranks[-1] + 1)
            push_forced(slot)
            push(slot, 0)

    padding = budget + 1 - len(node_tokens)
    return FilteredTree(
        token_ids=np.array(node_tokens + [0] * padding, np.int32),
        parents=np.array(parents + [NO_PARENT] * padding, np.int32),
        depths=np.array(depths + [0] * padding, np.int32),
        log_probs=np.array([*log_prob, *[-np.inf] * padding], np.float32),
        num_nodes=len(node_tokens),
        rows=visit.rows(),
    )


class _Ranked:
    """Each parent's candidates in the order of their ranks, sorted when first asked for."""

    def __init__(self, scores: np.ndarray, tokens: np.ndarray):
        self._scores, self._tokens = scores, tokens
        self._known: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, row: int, above: int) -> tuple[np.ndarray, np.ndarray]:
        """(columns int[K], log_probs float32[K]) below candidate `above` of the row above; -1: below a forced node."""
        paired = self._scores.ndim == 3
        key = (row, (0 if row == 0 else above) if paired else 0)
        if key not in self._known:
            values = self._scores[row]
            if paired:
                values = values.max(axis=0) if key[1] < 0 else values[key[1]]
            order = np.lexsort((self._tokens[row], -values))
            self._known[key] = order, values[order]
        return self._known[key]


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
