"""Rounds of a batch in which some sequences follow a grammar, driven from the host.

`HostRounds` splits each round into its three programs and works the grammar rows out while the target runs.
`TableRounds` runs whole rounds on the device, where the grammars are small tables, and only keeps account. Both are
called as `decoding.round_step` is, without the plan. Failures stay with their sequence: it is finished, the others go
on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from ddtree_jax import decoding
from ddtree_jax.algorithm import capabilities
from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar_automaton import NO_STATE, TokenAutomaton
from ddtree_jax.grammar_tree import FilteredTree, filtered_chain, filtered_tree
from ddtree_jax.grammar_walk import SequenceGrammar
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import DraftTree, RoundOutput, RoundState, TokenTable, stack_tables

DEAD_END = "grammar: dead end: none of the model's tokens continues the text as the grammar demands"

Grammars = Sequence[SequenceGrammar | None]  # one a row of the batch; None: a free sequence


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a sequence can not go on: a finish reason, and the message of the result."""

    finish_reason: str
    message: str


def first_rows(grammars: Grammars, num_words: int) -> np.ndarray:
    """int32[B, W]: the tokens allowed first; all of them for a free sequence."""
    rows = np.full((len(grammars), num_words), -1, np.int32)
    for row, grammar in enumerate(grammars):
        if grammar is not None:
            rows[row] = grammar.root_row()
    return rows


class GrammarRounds:
    """What both kinds of rounds share: the grammars, and what went wrong with which sequence."""

    def __init__(self, plan: decoding.Plan, grammars: Grammars):
        self.plan = plan
        self.grammars = list(grammars)
        self.failures: dict[int, Failure] = {}
        self._finished = np.zeros((len(self.grammars),), bool)

    def begin(self, state: RoundState) -> RoundState:
        """Takes the first tokens, which prefill chose; returns the state that the first round starts from."""
        roots, remaining, finished = jax.device_get((state.root_token_ids, state.remaining, state.finished))
        return self._account(state, roots[:, None], np.ones((len(roots),), np.int32), remaining, finished)

    def _account(
        self,
        state: RoundState,
        token_ids: np.ndarray,
        counts: np.ndarray,
        remaining: np.ndarray,
        finished: np.ndarray,
    ) -> RoundState:
        """Moves the grammars by the emitted tokens, and finishes the sequences that can not go on."""
        for row, grammar in enumerate(self.grammars):
            if grammar is None or self._finished[row]:
                continue
            try:
                grammar.advance(token_ids[row, : counts[row]].tolist())
                if remaining[row] > 0 and not grammar.is_finished and grammar.is_dead:
                    self.failures[row] = Failure("dead_end", DEAD_END)
            except ValueError as error:
                if not finished[row]:  # what is over needs no state any more
                    self.failures[row] = Failure("error", str(error))
        return self._finish_failed(state, finished)

    def _finish_failed(self, state: RoundState, finished: np.ndarray) -> RoundState:
        """The state in which the sequences that failed are finished."""
        failed = np.isin(np.arange(len(finished)), list(self.failures))
        self._finished = finished | failed
        if np.any(failed & ~finished):
            state = dataclasses.replace(state, finished=state.finished | jnp.asarray(failed))
        return state


class _TableSequence:
    """A sequence's place in its table; what `GrammarRounds` asks of a grammar."""

    def __init__(self, automaton: TokenAutomaton):
        self._automaton = automaton
        self.state = 0

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.state = self._automaton.step(self.state, token)
            if self.state == NO_STATE:
                raise InvariantError(f"token {token} was emitted and the grammar does not allow it there")

    @property
    def is_finished(self) -> bool:
        return self.state == self._automaton.num_states - 1

    @property
    def is_dead(self) -> bool:
        return not np.any(self._automaton.allowed[self.state])


class TableRounds(GrammarRounds):
    """Rounds whose grammars are tables on the device."""

    def __init__(self, plan: decoding.Plan, grammars: Grammars, vocab_size: int):
        automata = [None if one is None else one.compiled.automaton for one in grammars]
        super().__init__(plan, [None if one is None else _TableSequence(one) for one in automata])
        self.table: TokenTable = stack_tables(automata, vocab_size)
        self._step = round_runner(plan, decoding.run_round, decoding.round_step)

    def begin(self, state: RoundState) -> RoundState:
        state = super().begin(state)
        places = np.array([0 if one is None else one.state for one in self.grammars], np.int32)
        # As the other fields lie, so that the first round is the same program as the later ones.
        return dataclasses.replace(state, grammar=jax.device_put(places, state.root_token_ids.sharding))

    def finish(self, state: RoundState, token_ids: np.ndarray, counts: np.ndarray) -> None:
        """Takes all the tokens that a device loop emitted after the first, and the state that it ended in."""
        self._account(state, token_ids, counts, *jax.device_get((state.remaining, state.finished)))

    def __call__(
        self, weights: decoding.Weights, state: RoundState, sampling: SamplingParams, stop_token_ids: jax.Array
    ) -> tuple[RoundState, RoundOutput]:
        state, out = self._step(weights, state, sampling, stop_token_ids, self.table)
        emitted = jax.device_get((out.token_ids, out.counts, state.remaining, state.finished))
        return self._account(state, *emitted), out


class HostRounds(GrammarRounds):
    """Rounds whose grammar rows the host works out, any grammar."""

    def __init__(self, plan: decoding.Plan, grammars: Grammars, num_words: int, *, filtered: bool):
        """filtered: keep the drafts of constrained sequences from what their grammars forbid."""
        super().__init__(plan, grammars)
        self._num_words = num_words
        self._filtered = filtered and plan.drafter is not None
        self._finish = round_runner(plan, decoding.run_finish, decoding.finish_step)

    def __call__(
        self, weights: decoding.Weights, state: RoundState, sampling: SamplingParams, stop_token_ids: jax.Array
    ) -> tuple[RoundState, RoundOutput]:
        plan = self.plan
        live = {row: one for row, one in enumerate(self.grammars) if one is not None and not self._finished[row]}
        work = GrammarWork(live)
        # Told by who there is, not by who still runs: each of the two is another program.
        with_tree = not self._filtered or None in self.grammars
        tree, candidates = decoding.draft_step(
            plan, weights, state, with_candidates=self._filtered, with_tree=with_tree
        )
        # The target's pass is launched as soon as its tree is known; the host's work below runs beside it.
        if self._filtered:
            tree = work.filter(plan, *jax.device_get((tree, candidates)))
            verified = decoding.verify_step(plan, weights, state, tree)
        else:
            verified = decoding.verify_step(plan, weights, state, tree)
            work.walk(jax.device_get(tree))
        rows = work.rows(tree.token_ids.shape, self._num_words)
        self.failures.update(work.failures)
        state = self._finish_failed(state, self._finished)
        state, out = self._finish(weights, state, tree, verified, rows, sampling, stop_token_ids)
        emitted = jax.device_get((out.token_ids, out.counts, state.remaining, state.finished))
        return self._account(state, *emitted), out


class GrammarWork:
    """The host's grammar work of one round: drafts kept from what grammars forbid, and the rows of every tree node.

    Attributes:
      failures: by row of the batch, why a sequence can not go on; filled by the methods.
    """

    def __init__(self, grammars: Mapping[int, SequenceGrammar], *, max_seconds: float = math.inf):
        """grammars: by row of the batch, of the sequences that follow one. max_seconds: of one sequence's work; one
        that took more fails.
        """
        self.failures: dict[int, Failure] = {}
        self._grammars, self._max_seconds = grammars, max_seconds
        self._visits: dict[int, Callable[[], np.ndarray]] = {}  # row -> what gives int32[N, W] of its tree
        self._spent = dict.fromkeys(grammars, 0.0)

    def filter(self, plan: decoding.Plan, tree: DraftTree, candidates: tuple[np.ndarray, np.ndarray]) -> DraftTree:
        """The tree with the filtered drafts of these sequences. tree, candidates: of the drafting program, as NumPy
        arrays.
        """
        make = filtered_chain
        if capabilities(plan.algorithm).branching:
            make = functools.partial(filtered_tree, budget=plan.budget)
        found = {}
        for row, grammar in self._grammars.items():
            with self._watched(row):
                root = int(tree.token_ids[row, 0])
                found[row] = make(grammar, root, candidates[0][row], candidates[1][row], forced="text")
        self._visits = {row: one.rows for row, one in found.items()}
        return _merged(tree, found)

    def walk(self, tree: DraftTree) -> None:
        """Takes a tree that was drafted without the grammars, as NumPy arrays."""
        self._visits = {
            row: functools.partial(_walked, grammar, tree.token_ids[row], tree.parents[row], int(tree.num_nodes[row]))
            for row, grammar in self._grammars.items()
        }

    def rows(self, shape: tuple[int, int], num_words: int) -> np.ndarray:
        """int32[B, N, W] for trees of `shape` [B, N], where a free sequence allows everything."""
        rows = np.full((*shape, num_words), -1, np.int32)
        for row, visit in self._visits.items():
            with self._watched(row):
                rows[row] = visit()
        for row, seconds in self._spent.items():
            if seconds > self._max_seconds:
                message = f"grammar: took {seconds:.1f} s for one round, allowed are {self._max_seconds:g}; simplify it"
                self.failures.setdefault(row, Failure("error", message))
        return rows

    @contextlib.contextmanager
    def _watched(self, row: int) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        except ValueError as error:
            self.failures[row] = Failure("error", str(error))
        self._spent[row] += time.perf_counter() - started


def _merged(tree: DraftTree, filtered: dict[int, FilteredTree]) -> DraftTree:
    """The batch's tree with the filtered drafts in their rows."""
    fields = {field.name: np.array(getattr(tree, field.name)) for field in dataclasses.fields(DraftTree)}
    for row, one in filtered.items():
        for name, values in fields.items():
            values[row] = getattr(one, name)
    return DraftTree(**fields)


def round_runner(plan: decoding.Plan, function: Callable[..., Any], jitted: Callable[..., Any]) -> Callable[..., Any]:
    """The jitted form of a function, its plan filled in; in debug mode one whose broken rules raise InvariantError."""
    if not plan.debug:
        return functools.partial(jitted, plan)
    # Not chex.chexify: it registers every function it wraps for the life of the process, and warns at exit.
    checked = jax.jit(checkify.checkify(functools.partial(function, plan)))

    def step(*args: Any) -> Any:
        error, out = checked(*args)
        message = error.get()
        if message is not None:
            raise InvariantError(message)
        return out

    return step


def _walked(grammar: SequenceGrammar, token_ids: np.ndarray, parents: np.ndarray, num_nodes: int) -> np.ndarray:
    return grammar.walk(token_ids, parents, num_nodes)[0]
