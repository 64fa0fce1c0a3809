"""What passes between the RPCs and the device thread: jobs in, events out, and records for metrics and logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.requests import Request
from ddtree_jax.stats import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """What the device thread is started with.

    algorithm, budget: of every request; budget is 0 for an algorithm that does not branch.
    max_running_requests: slots, sequences decoded together.
    max_queued_requests: requests that may wait for a slot, one more is refused; 0: only what finds a slot free.
    context_length: tokens that a sequence may have, prompt and output together.
    chunked_prefill_size: prompt tokens that run between two rounds at most, a power of two >= 32.
    compact_json: JSON under a schema has no white space between its tokens, with which a model may go on for ever.
    prefix_reuse: keep what finished sequences left in their slots for prompts that begin as they did.
    """

    algorithm: SpeculativeAlgorithm
    budget: int
    max_running_requests: int
    max_queued_requests: int
    context_length: int
    chunked_prefill_size: int = 256
    prefix_reuse: bool = True
    compact_json: bool = False


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The next tokens of a job: the first one from prefill, then those of one round."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int  # prompt tokens that were not computed, because an earlier prompt began so


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a job that ran to its end.

    finish_reason: as in `ddtree_jax.Result`: stop, length, dead_end, error.
    matched_stop: the token id or the stop string that ended it, else None.
    num_draft_tokens, num_accepted_draft_tokens: tree nodes besides the roots, and those of them that were accepted.
    mean_tree_size: nodes a round, the root included; 0.0 without a round.
    error: what happened, for the last two reasons.
    """

    finish_reason: str
    stats: Stats
    matched_stop: int | str | None
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_tree_size: float
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The end of a job that did not run to its end: one of the exceptions of `serving.errors`."""

    error: Exception


Event = Tokens | Finished | Failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request for the device thread.

    request: from `ddtree_jax.requests.check_request`, with one prompt.
    stop_strings: texts that end the output once they are complete; the tokens up to there are part of it.
    deadline: seconds of `time.monotonic()`, checked between rounds; None: no limit.
    on_event: called by the device thread, Tokens any number of times, then Finished or Failed exactly once. Must
      return at once and never raise.
    """

    request_id: str
    request: Request
    on_event: Callable[[Event], None]
    stop_strings: tuple[str, ...] = ()
    deadline: float | None = None


STATES = (LOADING, READY, DRAINING, STOPPED) = ("loading", "ready", "draining", "stopped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """A snapshot of the device thread.

    state: one of `STATES`.
    waiting_tokens: prompt tokens of the requests that wait.
    used_tokens: tokens in the caches of running requests; max_tokens: room for them in all slots.
    tokens_per_second: of the last seconds; cache_hit_rate: prompt tokens that were reused, of all so far.
    """

    state: str
    running: int
    waiting: int
    waiting_tokens: int
    used_tokens: int
    max_tokens: int
    max_running_requests: int
    tokens_per_second: float
    cache_hit_rate: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One finished request, for the log line and the metrics. The defaults are those of one that never got a slot.

    outcome: finish reason, or the name of the status that it failed with (CANCELLED, DEADLINE_EXCEEDED, ...).
    queue_s: seconds until it got a slot (all its time, if it never did).
    time_to_first_token_s: None where it ended before.
    """

    request_id: str
    outcome: str
    algorithm: SpeculativeAlgorithm
    num_prompt_tokens: int
    queue_s: float
    total_s: float
    has_grammar: bool
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token_s: float | None = None
    num_rounds: int = 0
    mean_acceptance_length: float = 0.0
    mean_tree_size: float = 0.0
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One round of the running requests.

    width: rows of the program, of which `len(acceptance_lengths)` were real.
    tree_sizes: nodes of each sequence's tree, the root included.
    stage_s: seconds by stage. "round" is always there; draft, verify, grammar and finish only where the thread waited
      for each of them, which it does now and then.
    inter_token_s: for each sequence, seconds since its last tokens over the tokens that came now.
    """

    algorithm: SpeculativeAlgorithm
    width: int
    acceptance_lengths: tuple[int, ...]
    tree_sizes: tuple[int, ...]
    num_tokens: int
    stage_s: Mapping[str, float]
    inter_token_s: tuple[float, ...]


class Observer(Protocol):
    """What metrics and logs learn from the device thread; called on it, so every method returns at once."""

    def request_finished(self, record: RequestRecord) -> None: ...

    def round_finished(self, record: RoundRecord) -> None: ...

    def prefill_finished(self, num_tokens: int, seconds: float) -> None: ...

    def load_changed(self, load: Load) -> None: ...


class EngineLoop(Protocol):
    """The device thread as the RPCs see it. Every method may be called from any thread and returns at once."""

    def submit(self, job: Job) -> None:
        """Queues a job. Raises `QueueFullError`, or `NotReadyError` while loading, draining or stopped."""

    def abort(self, request_id: str) -> None:
        """Ends a job as cancelled, between rounds; an id that is not (or no longer) known is fine."""

    def drain(self) -> None:
        """Takes no new jobs; those that are there go on."""

    def stop(self) -> None:
        """Ends what is left with `NotReadyError`, and the thread; returns, unlike the others, once it has ended."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Calls back, from any thread, if the thread ends by a fault: nothing will be served any more. At once where
        that has happened.
        """

    def load(self) -> Load:
        """What runs and waits now."""
