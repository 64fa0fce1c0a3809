"""One request while it runs: what it has emitted, where it stands, and when it ends. Host only."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence as SequenceOf

from ddtree_jax.algorithm import capabilities
from ddtree_jax.grammar_rounds import DEAD_END, Failure
from ddtree_jax.grammar_walk import SequenceGrammar
from ddtree_jax.slots import key_words
from ddtree_jax.stats import Stats
from ddtree_jax.tokenizer import Tokenizer
from serving.jobs import Finished, Job, RequestRecord
from serving.slots import Place
from serving.stops import StopStrings


@dataclasses.dataclass(eq=False)
class RunningSequence:
    """A job with a slot. `prefilled` counts prompt tokens in the cache, the reused ones included."""

    job: Job
    place: Place
    submitted: float  # seconds of time.monotonic(), as all times here
    opened: float
    grammar: SequenceGrammar | None
    stops: StopStrings | None
    key: tuple[int, int]  # of `ddtree_jax.slots.key_words`
    prefilled: int = 0
    token_ids: list[int] = dataclasses.field(default_factory=list)
    acceptance_lengths: list[int] = dataclasses.field(default_factory=list)
    num_nodes: int = 0  # of all trees, the roots included
    first_token_at: float | None = None
    last_token_at: float = 0.0

    @classmethod
    def open(cls, job: Job, place: Place, submitted: float, tokenizer: Tokenizer | None) -> RunningSequence:
        request = job.request
        compiled = request.grammars[0]
        stops = StopStrings(tokenizer, job.stop_strings) if job.stop_strings and tokenizer is not None else None
        return cls(
            job=job,
            place=place,
            submitted=submitted,
            opened=time.monotonic(),
            grammar=None if compiled is None else compiled.start(),
            stops=stops,
            key=key_words(request.seeds[0]),
            prefilled=place.length,
        )

    def restart(self) -> None:
        """Back to before prefill, in the same slot, with nothing reused."""
        self.place = Place(self.slot, 0, self.slot)
        self.prefilled = 0

    @property
    def slot(self) -> int:
        return self.place.slot

    @property
    def prompt(self) -> list[int]:
        return self.job.request.prompts[0]

    @property
    def length(self) -> int:
        """Tokens in the cache: the newest one is in none yet."""
        return self.prefilled + max(len(self.token_ids) - 1, 0)

    @property
    def remaining(self) -> int:
        return self.job.request.max_new_tokens - len(self.token_ids)

    @property
    def mean_tree_size(self) -> float:
        """Nodes a round, the root included; 0.0 without a round."""
        return self.num_nodes / len(self.acceptance_lengths) if self.acceptance_lengths else 0.0

    def committed(self) -> list[int]:
        """The tokens whose rows the slot holds."""
        return (self.prompt[: self.prefilled] + self.token_ids)[: self.length]

    def take(self, token_ids: SequenceOf[int]) -> tuple[list[int], Finished | None]:
        """Takes what prefill or a round emitted, up to where the sequence ends.

        Returns:
          The tokens that belong to the output, and the end if this is it.
        """
        now = time.monotonic()
        taken: list[int] = []
        reason, matched = None, None
        for token in token_ids:
            taken.append(token)
            if token in self.job.request.stop_token_ids:
                reason, matched = "stop", token
            elif self.stops is not None and (found := self.stops.push(token)) is not None:
                reason, matched = "stop", found
            if reason is not None:
                break
        self.token_ids += taken
        if taken:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        if reason is None and self.remaining <= 0:
            reason = "length"
        failure = self._advance(taken, over=reason is not None)
        if reason is not None:
            return taken, self.finished(reason, matched)
        if failure is not None:
            return taken, self.finished(failure.finish_reason, None, failure.message)
        return taken, None

    def _advance(self, token_ids: list[int], *, over: bool) -> Failure | None:
        """Moves the grammar by emitted tokens; what is over needs no state any more."""
        if self.grammar is None or over:
            return None
        try:
            self.grammar.advance(token_ids)
            is_dead = not self.grammar.is_finished and self.grammar.is_dead
        except ValueError as error:  # too complex: to move through, or for the row at the new place
            return Failure("error", str(error))
        return Failure("dead_end", DEAD_END) if is_dead else None

    def finished(self, reason: str, matched: int | str | None, error: str | None = None) -> Finished:
        rounds = len(self.acceptance_lengths)
        return Finished(
            finish_reason=reason,
            stats=self.stats(),
            matched_stop=matched,
            num_cached_tokens=self.place.length,
            num_draft_tokens=self.num_nodes - rounds,
            num_accepted_draft_tokens=sum(self.acceptance_lengths) - rounds,
            mean_tree_size=self.mean_tree_size,
            error=error,
        )

    def stats(self) -> Stats:
        request = self.job.request
        seconds = (self.last_token_at or self.submitted) - self.submitted
        return Stats(
            algorithm=request.algorithm.value,
            budget=request.budget if capabilities(request.algorithm).branching else None,
            acceptance_lengths=tuple(self.acceptance_lengths),
            num_prompt_tokens=len(self.prompt),
            num_output_tokens=len(self.token_ids),
            time_to_first_token_s=0.0 if self.first_token_at is None else self.first_token_at - self.submitted,
            tokens_per_second=len(self.token_ids) / max(seconds, 1e-9),
        )

    def record(self, outcome: str, error: str | None = None) -> RequestRecord:
        stats = self.stats()
        return RequestRecord(
            request_id=self.job.request_id,
            outcome=outcome,
            algorithm=self.job.request.algorithm,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=self.place.length,
            num_output_tokens=stats.num_output_tokens,
            queue_s=self.opened - self.submitted,
            time_to_first_token_s=None if self.first_token_at is None else stats.time_to_first_token_s,
            total_s=time.monotonic() - self.submitted,
            num_rounds=stats.num_rounds,
            mean_acceptance_length=stats.mean_acceptance_length,
            mean_tree_size=self.mean_tree_size,
            has_grammar=self.grammar is not None,
            error=error,
        )


def waiting_record(job: Job, submitted: float, outcome: str, error: str | None = None) -> RequestRecord:
    """The record of a job that ended before it got a slot."""
    waited = time.monotonic() - submitted
    return RequestRecord(
        request_id=job.request_id,
        outcome=outcome,
        algorithm=job.request.algorithm,
        num_prompt_tokens=len(job.request.prompts[0]),
        queue_s=waited,
        total_s=waited,
        has_grammar=job.request.grammars[0] is not None,
        error=error,
    )
