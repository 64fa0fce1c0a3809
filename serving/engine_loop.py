"""The device thread: requests queue, join a slot, run in rounds with the others, and leave.

One thread owns JAX. Between two rounds it takes new requests and aborts, checks deadlines, gives free slots away, and
runs at most one chunk of one prompt, so that a long prompt holds the running streams up by a chunk and no more.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from ddtree_jax.engine import Engine
from serving.errors import CancelledError, DeadlineError, InternalError, NotReadyError, QueueFullError, status_of
from serving.jobs import (
    DRAINING,
    LOADING,
    READY,
    STOPPED,
    Event,
    Failed,
    Finished,
    Job,
    Load,
    LoopSettings,
    Observer,
    RoundRecord,
    Tokens,
)
from serving.runner import RoundResult, Runner
from serving.sequences import RunningSequence, waiting_record
from serving.slots import SlotTable

RATE_WINDOW_S = 5.0  # over which tokens per second are counted

_log = logging.getLogger(__name__)


class DeviceThread:
    """Runs jobs on an engine; an `EngineLoop` of `serving.jobs`.

    `start`, then `submit` once `state` is ready. `drain` refuses new jobs and lets those that are there end; `stop`
    ends what is left as unavailable and joins the thread.
    """

    def __init__(
        self,
        engine: Engine,
        settings: LoopSettings,
        observer: Observer,
        progress: Callable[[str], None] = lambda message: None,
    ):
        self._engine, self._settings, self._observer, self._progress = engine, settings, observer, progress
        self._thread = threading.Thread(target=self._run, name="ddtree-device", daemon=True)
        # Shared between threads, under the lock.
        self._changed = threading.Condition()
        self._state = LOADING
        self._inbox: collections.deque[tuple[Job, float]] = collections.deque()
        self._aborted: set[str] = set()
        self._live: set[str] = set()  # ids of jobs that have not ended
        self._faulty = False
        self._watchers: list[Callable[[], None]] = []
        # The device thread's own.
        self._waiting: collections.deque[tuple[Job, float]] = collections.deque()
        self._running: list[RunningSequence] = []  # in the order in which they got their slots
        self._slots = SlotTable(settings.max_running_requests, prefix_reuse=False)
        self._recent: collections.deque[tuple[float, int]] = collections.deque()  # (when, tokens) of each step
        self._step_tokens = 0
        self._told_state = LOADING  # what the observer knows
        self._prompt_tokens = self._cached_tokens = 0

    # --- any thread -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """loading (until the first programs are compiled), ready, draining or stopped."""
        return self._state

    def start(self) -> None:
        self._thread.start()

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """True once jobs are taken; False if that was not so within the time, or will not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._state != LOADING, timeout_s)
            return self._state == READY

    def watch(self, callback: Callable[[], None]) -> None:
        with self._changed:
            if not self._faulty:
                self._watchers.append(callback)
                return
        callback()

    def submit(self, job: Job) -> None:
        """Queues a job. Raises QueueFullError, NotReadyError, or ValueError for an id that is in use."""
        with self._changed:
            if self._state != READY:
                raise NotReadyError(f"the server is {self._state}; try again later, or another server")
            tokens, limit = len(job.request.prompts[0]) + job.request.max_new_tokens, self._settings.context_length
            if tokens > limit:
                raise ValueError(f"request: got {tokens} tokens, prompt and output together, allowed are {limit}")
            if job.request_id in self._live:
                raise ValueError(f"request_id: got {job.request_id!r}, which is in use; allowed is one that is not")
            queued = len(self._inbox) + len(self._waiting)
            limit = self._settings.max_queued_requests
            # A free slot is no queue: with limit 0 a request still runs when there is room for it.
            room = self._settings.max_running_requests - len(self._running)
            if queued >= limit + max(room, 0):
                raise QueueFullError(f"{queued} requests wait, allowed are {limit}; try again later")
            self._live.add(job.request_id)
            self._inbox.append((job, time.monotonic()))
            self._changed.notify_all()

    def abort(self, request_id: str) -> None:
        with self._changed:
            if request_id in self._live:
                self._aborted.add(request_id)
                self._changed.notify_all()

    def load(self) -> Load:
        """What runs and waits now. Reads what the device thread writes: a count may be one step old, never torn."""
        settings = self._settings
        running = list(self._running)
        with self._changed:
            state = self._state
            waiting = [job for job, _ in (*self._waiting, *self._inbox)]
        since = time.monotonic() - RATE_WINDOW_S
        recent = sum(count for at, count in list(self._recent) if at >= since)
        return Load(
            state=state,
            running=len(running),
            waiting=len(waiting),
            waiting_tokens=sum(len(job.request.prompts[0]) for job in waiting),
            used_tokens=sum(sequence.length for sequence in running),
            max_tokens=settings.max_running_requests * settings.context_length,
            max_running_requests=settings.max_running_requests,
            tokens_per_second=recent / RATE_WINDOW_S,
            cache_hit_rate=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )

    def drain(self) -> None:
        with self._changed:
            if self._state in (LOADING, READY):
                self._state = DRAINING
                self._changed.notify_all()

    def stop(self) -> None:
        """Ends what is left with NotReadyError, and the thread. May be called twice, and before `start`."""
        with self._changed:
            self._state = STOPPED
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    # --- the device thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        end: Exception = NotReadyError("the server shuts down")
        try:
            runner = Runner(self._engine, self._settings)
            self._slots = SlotTable(self._settings.max_running_requests, prefix_reuse=runner.reuses_prefixes)
            runner.warm_up(self._progress, stopped=lambda: self._state != LOADING)
            with self._changed:
                if self._state == LOADING:
                    self._state = READY
                self._changed.notify_all()
            while self._take_news():
                self._turn(runner)
        except Exception:
            _log.exception("the device thread cannot go on")
            end = InternalError("the server cannot go on; its log says why")
        with self._changed:
            self._state = STOPPED
            self._faulty = isinstance(end, InternalError)
            watchers = self._watchers if self._faulty else []
            self._changed.notify_all()
        self._end_all(end)
        for callback in watchers:
            callback()

    def _turn(self, runner: Runner) -> None:
        try:
            self._step(runner)
            self._publish()
        except Exception:
            # Nothing is known about who was hit: all that runs ends, and the next request finds new caches.
            _log.exception("fault in the device thread")
            for sequence in list(self._running):
                self._fail(sequence, _internal(sequence.job.request_id), intact=False)
            self._slots.forget()
            runner.reset()

    def _take_news(self) -> bool:
        """Waits for something to do or to tell; False when the thread must end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._inbox or self._aborted or self._running or self._waiting or self._state != self._told_state
                ),
                # Once nothing runs any more, the rate of the last seconds is told to be 0.
                timeout=RATE_WINDOW_S if self._recent else None,
            )
            if self._state == STOPPED:
                return False
            self._waiting.extend(self._inbox)
            self._inbox.clear()
            aborted, self._aborted = self._aborted, set()
        now = time.monotonic()
        kept: collections.deque[tuple[Job, float]] = collections.deque()
        for job, submitted in self._waiting:
            error = _over(job, aborted, now)
            if error is None:
                kept.append((job, submitted))
            else:
                self._fail_waiting(job, submitted, error)
        with self._changed:
            self._waiting = kept
        for sequence in list(self._running):
            error = _over(sequence.job, aborted, now)
            if error is not None:
                self._fail(sequence, error)
        return True

    def _step(self, runner: Runner) -> None:
        """Gives slots away, runs one chunk of a prompt, and a round."""
        while self._waiting and self._slots.num_free:
            self._open(runner, *self._waiting.popleft())
        prompts = [s for s in self._running if not s.token_ids]
        if prompts:
            self._prefill(runner, prompts[0])
        ready = [s for s in self._running if s.token_ids]
        if ready:
            self._round(runner, ready)

    def _open(self, runner: Runner, job: Job, submitted: float) -> None:
        for sequence in self._running:
            self._slots.hold(sequence.slot, sequence.committed())
        place = self._slots.acquire(job.request.prompts[0])
        assert place is not None
        try:
            sequence = RunningSequence.open(job, place, submitted, self._engine.tokenizer)
        except Exception:
            _log.exception("fault in opening request %s", job.request_id)
            self._slots.hold(place.slot, ())  # what the place promises has not been copied
            self._slots.release(place.slot)
            self._fail_waiting(job, submitted, _internal(job.request_id))
            return
        self._running.append(sequence)
        try:
            runner.open(place)
        except Exception as error:
            self._recover(runner, error, [sequence], "opening a slot")
            return
        self._prompt_tokens += len(sequence.prompt)
        self._cached_tokens += place.length

    def _prefill(self, runner: Runner, sequence: RunningSequence) -> None:
        started, before = time.perf_counter(), sequence.prefilled
        try:
            token = runner.prefill(sequence)
        except Exception as error:
            self._recover(runner, error, [sequence], "prefill")
            return
        self._observer.prefill_finished(sequence.prefilled - before, time.perf_counter() - started)
        if token is not None:
            self._take(runner, sequence, [token])

    def _round(self, runner: Runner, sequences: list[RunningSequence]) -> None:
        try:
            result = runner.round(sequences)
        except Exception as error:
            self._recover(runner, error, sequences, "a round")
            return
        now = time.monotonic()
        waits = []
        for row, sequence in enumerate(sequences):
            tokens = result.token_ids[row]
            if tokens:
                sequence.acceptance_lengths.append(result.acceptance_lengths[row])
                sequence.num_nodes += result.num_nodes[row]
                waits.append((now - sequence.last_token_at) / len(tokens))
        self._observe(result, tuple(waits))
        for row, sequence in enumerate(sequences):
            failure = result.failures.get(row)
            if failure is not None:
                self._finish(sequence, sequence.finished(failure.finish_reason, None, failure.message))
            else:
                self._take(runner, sequence, result.token_ids[row])

    def _observe(self, result: RoundResult, waits: tuple[float, ...]) -> None:
        lengths = tuple(n for n in result.acceptance_lengths if n > 0)
        self._observer.round_finished(
            RoundRecord(
                algorithm=self._settings.algorithm,
                width=result.width,
                acceptance_lengths=lengths,
                tree_sizes=tuple(result.num_nodes),
                num_tokens=sum(map(len, result.token_ids)),
                stage_s=result.stage_s,
                inter_token_s=waits,
            )
        )

    def _take(self, runner: Runner, sequence: RunningSequence, token_ids: list[int]) -> None:
        """Hands new tokens on, and ends the sequence where they end it."""
        try:
            taken, finished = sequence.take(token_ids)
        except Exception as error:  # a broken rule of its grammar: the others have nothing to do with it
            self._recover(runner, error, [sequence], "what a round emitted")
            return
        self._step_tokens += len(taken)
        if taken:
            self._emit(sequence.job, Tokens(tuple(taken), sequence.place.length))
        if finished is not None:
            self._finish(sequence, finished)

    def _finish(self, sequence: RunningSequence, finished: Finished) -> None:
        self._leave(sequence)
        self._observer.request_finished(sequence.record(finished.finish_reason, finished.error))
        self._end(sequence.job, finished)

    def _fail(self, sequence: RunningSequence, error: Exception, *, intact: bool = True) -> None:
        """intact: the caches hold what the host believes."""
        self._leave(sequence, intact=intact)
        self._observer.request_finished(sequence.record(status_of(error).name, str(error)))
        self._end(sequence.job, Failed(error))

    def _fail_waiting(self, job: Job, submitted: float, error: Exception) -> None:
        self._observer.request_finished(waiting_record(job, submitted, status_of(error).name, str(error)))
        self._end(job, Failed(error))

    def _leave(self, sequence: RunningSequence, *, intact: bool = True) -> None:
        self._slots.hold(sequence.slot, sequence.committed() if intact else ())
        self._running.remove(sequence)
        self._slots.release(sequence.slot)

    def _end(self, job: Job, event: Event) -> None:
        # Before the event: who hears of the end may use the id again at once.
        with self._changed:
            self._live.discard(job.request_id)
            self._aborted.discard(job.request_id)  # an abort that came too late is not for the next job of the id
            self._changed.notify_all()
        self._emit(job, event)

    def _emit(self, job: Job, event: Event) -> None:
        try:
            job.on_event(event)
        except Exception:
            _log.exception("request %s: its listener raised", job.request_id)

    def _recover(self, runner: Runner, error: Exception, sequences: list[RunningSequence], what: str) -> None:
        """Ends the sequences that an exception hit; the others go on."""
        ids = ", ".join(s.job.request_id for s in sequences)
        _log.error("fault in %s of requests %s", what, ids, exc_info=error)
        for sequence in sequences:
            self._fail(sequence, _internal(sequence.job.request_id), intact=False)
        if not runner.recover():
            return
        # The caches went into the program that failed: prompts start anew, and streams cannot go on.
        self._slots.forget()
        for sequence in list(self._running):
            if sequence.token_ids:
                self._fail(sequence, _internal(sequence.job.request_id), intact=False)
            else:
                sequence.restart()
                runner.open(sequence.place)

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            self._waiting.extend(self._inbox)
            self._inbox.clear()
        while self._waiting:
            self._fail_waiting(*self._waiting.popleft(), error)
        for sequence in list(self._running):
            self._fail(sequence, error)

    def _publish(self) -> None:
        now = time.monotonic()
        if self._step_tokens:
            self._recent.append((now, self._step_tokens))
            self._step_tokens = 0
        since = now - RATE_WINDOW_S
        while self._recent and self._recent[0][0] < since:
            self._recent.popleft()
        load = self.load()
        self._told_state = load.state
        self._observer.load_changed(load)


def _over(job: Job, aborted: set[str], now: float) -> Exception | None:
    """Why a job ends before its end."""
    if job.request_id in aborted:
        return CancelledError(f"request {job.request_id}: cancelled")
    if job.deadline is not None and now >= job.deadline:
        return DeadlineError(f"request {job.request_id}: its deadline has passed")
    return None


def _internal(request_id: str) -> InternalError:
    return InternalError(f"request {request_id}: a fault of the server; its log says more")
