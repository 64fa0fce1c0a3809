"""The device side of the loop: one pool, and its programs called for the sequences that are there."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ddtree_jax import decoding
from ddtree_jax import slots as device
from ddtree_jax.algorithm import capabilities
from ddtree_jax.engine import Engine
from ddtree_jax.grammar_rounds import Failure, GrammarWork
from ddtree_jax.tree import DraftTree, Verified
from ddtree_jax.tree.grammar_rows import num_words
from serving.jobs import LoopSettings
from serving.sequences import RunningSequence
from serving.slots import Place

# Of grammar work in one round, for one sequence, which usually takes some milliseconds. A call of the grammar library
# cannot be interrupted, so a grammar that is as slow as that holds the other streams up once, and its request ends.
MAX_GRAMMAR_S = 2.0
TIMED_EVERY = 16  # rounds; a round that is timed by stage waits for the device after each
MIN_CHUNK_TOKENS = 32
FULL_CHUNK = 0.75  # of a chunk that must be real for it to be preferred to a smaller one


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What one round gave each of its sequences, in their order.

    failures: sequences whose grammar cannot go on; they have no tokens in this round.
    """

    token_ids: list[list[int]]
    acceptance_lengths: list[int]
    num_nodes: list[int]
    failures: dict[int, Failure]
    width: int
    stage_s: dict[str, float]


def chunk_sizes(largest: int) -> tuple[int, ...]:
    """The chunk lengths that programs are compiled for, ascending: powers of two."""
    sizes = [MIN_CHUNK_TOKENS]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes)


def chunk_size(remaining: int, largest: int) -> int:
    """The chunk for a prompt of which `remaining` tokens are left: not one that would be mostly padding."""
    sizes = chunk_sizes(largest)
    fitting = next((size for size in sizes if size >= remaining), largest)
    if remaining >= FULL_CHUNK * fitting or fitting == sizes[0]:
        return fitting
    return fitting // 2


def widths(num_slots: int) -> tuple[int, ...]:
    """The batch widths that rounds are compiled for, ascending: powers of two, and all slots."""
    out = [1]
    while out[-1] < num_slots:
        out.append(min(out[-1] * 2, num_slots))
    return tuple(out)


class Runner:
    """Owns the pool. Not for use by several threads.

    Every method that writes gives the pool to its program: where one raises, `recover` says whether the caches are
    gone.
    """

    def __init__(self, engine: Engine, settings: LoopSettings):
        self.settings = settings
        self._has_tokenizer = engine.tokenizer is not None
        self._num_words = num_words(engine.target.config.vocab_size)
        algorithm, budget = settings.algorithm, settings.budget
        self._plan, self._weights = decoding.make_plan(engine, algorithm, budget, device.SAMPLING_MODE)
        # Without rows where the algorithm's row promises none: admission has refused the request, and where it has not,
        # the round does.
        takes_rows = capabilities(algorithm).grammar
        self._grammar_plan = dataclasses.replace(self._plan, grammar="rows") if takes_rows else self._plan
        self._prompt_plan = self._plan.for_prefill(keep_mode=True)
        self.capacity = device.pool_capacity(
            settings.context_length, settings.chunked_prefill_size, self._plan.max_depth
        )
        self._rounds = 0
        self._pool: device.Pool | None = self._new_pool()

    @property
    def reuses_prefixes(self) -> bool:
        """Recurrent layers keep the state of one place only, so there is none of a prefix."""
        return self.settings.prefix_reuse and self._pool.cache.states is None

    def _new_pool(self) -> device.Pool:
        return device.make_pool(self._prompt_plan, self._weights, self.settings.max_running_requests, self.capacity)

    def recover(self) -> bool:
        """After an exception: a new pool, and True, if the old one went into a program that failed, or came from it."""
        try:
            jax.block_until_ready(self._pool)
        except Exception:  # the reason is that of the exception before
            self.reset()
            return True
        return False

    def reset(self) -> None:
        """New, empty caches in place of the old ones."""
        self._pool = None  # first: there may be no room for both
        self._pool = self._new_pool()

    def open(self, place: Place) -> None:
        """Starts a sequence in its slot."""
        copied = 0 if place.source == place.slot or place.length == 0 else place.length
        extent = device.extent_of(copied, self.capacity) if copied else 0
        slot, length, source = (np.int32(x) for x in (place.slot, place.length, place.source))
        self._pool = device.open_slot(self._prompt_plan, self._weights, self._pool, slot, length, source, extent)

    def prefill(self, sequence: RunningSequence) -> int | None:
        """Runs the next chunk of a prompt; returns the first new token once the prompt is through."""
        rest = sequence.prompt[sequence.prefilled :]
        size = chunk_size(len(rest), self.settings.chunked_prefill_size)
        chunk = np.zeros((1, size), np.int32)
        count = min(len(rest), size)
        chunk[0, :count] = rest[:count]
        self._pool, hidden = device.prefill_slots(
            self._prompt_plan,
            self._weights,
            self._pool,
            np.array([sequence.slot], np.int32),
            chunk,
            np.array([count], np.int32),
            device.extent_of(sequence.prefilled, self.capacity) if sequence.prefilled else 0,
        )
        sequence.prefilled += count
        if sequence.prefilled < len(sequence.prompt):
            return None
        rows = None if sequence.grammar is None else sequence.grammar.root_row()[None]
        batch = device.SlotBatch.pack([_row(sequence)], self.settings.max_running_requests)
        root = device.first_tokens(self._prompt_plan, self._weights, hidden, batch, rows)
        return int(root[0])

    def round(self, sequences: Sequence[RunningSequence]) -> RoundResult:
        """One round of these sequences, all through with their prompts."""
        num_slots = self.settings.max_running_requests
        width = next(w for w in widths(num_slots) if w >= len(sequences))
        by_slot = {s.slot: s for s in sequences}
        # Rows that only fill the width get slots of their own: what lies behind the length of a slot is no one's.
        others = [slot for slot in range(num_slots) if slot not in by_slot][: width - len(sequences)]
        slots = sorted([*by_slot, *others])
        rows = [_row(by_slot[slot]) if slot in by_slot else device.SlotRow(slot) for slot in slots]
        at = [slots.index(s.slot) for s in sequences]
        batch = device.SlotBatch.pack(rows, num_slots)
        grammars = {row: s.grammar for row, s in zip(at, sequences, strict=True) if s.grammar is not None}
        constrained = bool(grammars)
        extent = device.extent_of(max(s.length for s in sequences), self.capacity)
        self._rounds += 1
        clock = _Clock(timed=self._rounds % TIMED_EVERY == 0)

        tree, candidates = self._draft(batch, extent, constrained)
        clock.lap("draft", tree)
        work = GrammarWork(grammars, max_seconds=MAX_GRAMMAR_S)
        if candidates is not None:
            tree = work.filter(self._plan, *jax.device_get((tree, candidates)))
            clock.lap("grammar")
        verified = self._verify(batch, tree, extent)
        allowed = None
        if constrained:
            # Beside the target's pass.
            if candidates is None:
                work.walk(jax.device_get(tree))
            allowed = work.rows(tree.token_ids.shape, self._num_words)
            clock.lap("grammar")
        clock.lap("verify", verified)
        failures = work.failures
        if failures:
            rows = [dataclasses.replace(row, finished=True) if i in failures else row for i, row in enumerate(rows)]
            batch = device.SlotBatch.pack(rows, num_slots)
        out = device.SlotOutput.fetch(self._finish(batch, tree, verified, allowed, constrained))
        clock.lap("finish")
        return RoundResult(
            token_ids=[out.token_ids[row, : out.counts[row]].tolist() for row in at],
            acceptance_lengths=[int(out.acceptance_lengths[row]) for row in at],
            num_nodes=[int(out.num_nodes[row]) for row in at],
            failures={at.index(row): failure for row, failure in failures.items()},
            width=width,
            stage_s=clock.seconds(),
        )

    def warm_up(self, progress: Callable[[str], None], *, stopped: Callable[[], bool] = lambda: False) -> None:
        """Compiles what short sequences need: every chunk and every width, with and without a grammar.

        Longer sequences need programs of a larger extent, each compiled when the first of them comes. stopped: asked
        between programs; True ends the warm-up early.
        """
        zero = np.zeros((1,), np.int32)
        extent = device.extent_of(0, self.capacity)
        takes_grammars = self._has_tokenizer and self._grammar_plan.grammar != "none"
        grammar_rows = (None, -np.ones((1, self._num_words), np.int32)) if takes_grammars else (None,)
        self.open(Place(0, 0, 0))
        for size in chunk_sizes(self.settings.chunked_prefill_size):
            if stopped():
                return
            progress(f"compiling prefill of {size} tokens ...")
            for shown in (0, extent):  # the first chunk of a prompt, and one behind others
                chunk = np.zeros((1, size), np.int32)
                self._pool, hidden = device.prefill_slots(
                    self._prompt_plan, self._weights, self._pool, zero, chunk, zero + 1, shown
                )
                self.open(Place(0, 0, 0))
        num_slots = self.settings.max_running_requests
        for rows in grammar_rows:
            batch = device.SlotBatch.pack([device.SlotRow(0)], num_slots)
            device.first_tokens(self._prompt_plan, self._weights, hidden, batch, rows)
        for width in widths(num_slots):
            batch = device.SlotBatch.pack([device.SlotRow(i) for i in range(width)], num_slots)
            for constrained in (False, True) if takes_grammars else (False,):
                if stopped():
                    return
                progress(f"compiling the round of {width} sequences{', grammar' * constrained} ...")
                self._idle_round(batch, constrained=constrained)
        jax.block_until_ready(self._pool)

    def _idle_round(self, batch: device.SlotBatch, *, constrained: bool) -> None:
        extent = device.extent_of(0, self.capacity)
        tree, candidates = self._draft(batch, extent, constrained)
        if candidates is not None:
            tree = jax.device_get(tree)  # as a filtered one is
        verified = self._verify(batch, tree, extent)
        rows = -np.ones((*tree.token_ids.shape, self._num_words), np.int32) if constrained else None
        self._finish(batch, tree, verified, rows, constrained)

    # The three programs of a round, over the pool.

    def _draft(self, batch: device.SlotBatch, extent: int, constrained: bool) -> tuple[DraftTree, Any]:
        plan = self._grammar_plan if constrained else self._plan
        return device.draft_slots(plan, self._weights, self._pool, batch, extent=extent, constrained=constrained)

    def _verify(self, batch: device.SlotBatch, tree: DraftTree, extent: int) -> Verified:
        return device.verify_slots(self._plan, self._weights, self._pool, batch, tree, extent=extent)

    def _finish(
        self, batch: device.SlotBatch, tree: DraftTree, verified: Verified, rows: np.ndarray | None, constrained: bool
    ) -> jax.Array:
        plan = self._grammar_plan if constrained else self._plan
        self._pool, out = device.finish_slots(
            plan, self._weights, self._pool, batch, tree, verified, rows, constrained=constrained
        )
        return out


class _Clock:
    """Seconds by stage; the ones between start and end only where each stage is waited for."""

    def __init__(self, *, timed: bool):
        self._timed = timed
        self._started = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, stage: str, result: object = None) -> None:
        if self._timed:
            jax.block_until_ready(result)
            now = time.perf_counter()
            self._laps[stage] = self._laps.get(stage, 0.0) + now - self._last
            self._last = now

    def seconds(self) -> dict[str, float]:
        return self._laps | {"round": time.perf_counter() - self._started}


def _row(sequence: RunningSequence) -> device.SlotRow:
    request = sequence.job.request
    return device.SlotRow(
        slot=sequence.slot,
        root_token_id=sequence.token_ids[-1] if sequence.token_ids else 0,
        emitted=len(sequence.token_ids),
        remaining=sequence.remaining,
        finished=False,
        temperature=request.temperature,
        top_k=request.top_k or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        key=sequence.key,
    )
