"""The grammar work of a round on the host, timed for each sequence: one that stalls the others ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ddtree_jax import decoding
from ddtree_jax.grammar_rounds import Failure, Visits, filter_drafts, tree_walks, visited_rows
from ddtree_jax.grammar_walk import SequenceGrammar
from ddtree_jax.tree import DraftTree

# Of one round, for one sequence, which usually takes some milliseconds. A call of the grammar library cannot be
# interrupted, so a grammar that is as slow as that holds the other streams up once, and then its request ends.
MAX_ROUND_S = 2.0


class GrammarWork:
    """One round's. `failures`: by row of the batch, what cannot go on.

    grammars: by row of the batch, of the sequences that follow one.
    """

    def __init__(self, grammars: Mapping[int, SequenceGrammar], *, max_seconds: float = MAX_ROUND_S):
        self.failures: dict[int, Failure] = {}
        self._grammars, self._max_seconds = grammars, max_seconds
        self._visits: Visits = {}
        self._spent = dict.fromkeys(grammars, 0.0)

    def filter(self, plan: decoding.Plan, tree: DraftTree, candidates: tuple[Any, Any]) -> DraftTree:
        """The tree with the drafts of these sequences kept from what their grammars forbid; NumPy arrays in and out."""
        for row, grammar in self._grammars.items():
            with self._timed(row):
                tree, visits, failures = filter_drafts(plan, {row: grammar}, tree, candidates)
            self._visits |= visits
            self.failures |= failures
        return tree

    def walk(self, tree: DraftTree) -> None:
        """Takes a tree that was drafted without the grammars."""
        self._visits = tree_walks(self._grammars, tree)

    def rows(self, shape: tuple[int, int], num_words: int) -> np.ndarray:
        """int32[B, N, W]: the tokens allowed after each node of the trees of `shape` [B, N]."""
        allowed = np.full((*shape, num_words), -1, np.int32)
        for row, visit in self._visits.items():
            with self._timed(row):
                rows, failures = visited_rows({0: visit}, (1, shape[1]), num_words)
            if failures:
                self.failures[row] = failures[0]
            else:
                allowed[row] = rows[0]
        for row, seconds in self._spent.items():
            if seconds > self._max_seconds and row not in self.failures:
                text = (
                    f"grammar: took {seconds:.1f} s for one round, allowed are {self._max_seconds:g}; make it simpler"
                )
                self.failures[row] = Failure("error", text)
        return allowed

    @contextlib.contextmanager
    def _timed(self, row: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._spent[row] += time.perf_counter() - started
