"""What a generation returns: its result, the chunks of a stream, and the counters behind both."""

import collections
import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_jax.tree import AcceptedPath, DraftTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Counters of one sequence.

    Attributes:
      algorithm: name of the algorithm, lower case.
      budget: tree nodes besides the root; None for an algorithm that builds no tree.
      acceptance_lengths: one entry a round: tokens that the round emitted, its bonus token included, before
        cutting at a stop token or the length limit. All 1 for `none`. The first token comes from prefill and
        belongs to no round.
      num_prompt_tokens: tokens of the prompt.
      num_output_tokens: new tokens returned, the one from prefill and a final stop token included.
      time_to_first_token_s: seconds from the call to the first new token on the host.
      tokens_per_second: output tokens of this sequence over the seconds from the call to its last token.
    """

    algorithm: str
    budget: int | None
    acceptance_lengths: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    tokens_per_second: float

    @property
    def num_rounds(self) -> int:
        """Target passes after prefill."""
        return len(self.acceptance_lengths)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round on average; 0.0 if there was no round (one token of output or none)."""
        return statistics.fmean(self.acceptance_lengths) if self.acceptance_lengths else 0.0

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Acceptance length -> rounds that had it, ascending."""
        return dict(sorted(collections.Counter(self.acceptance_lengths).items()))

    def to_dict(self) -> dict[str, Any]:
        """Returns every counter, the derived ones too, as values that `json.dumps` takes."""
        values = dataclasses.asdict(self)
        values["acceptance_lengths"] = list(self.acceptance_lengths)
        values["num_rounds"] = self.num_rounds
        values["mean_acceptance_length"] = self.mean_acceptance_length
        return values

    def summary_line(self) -> str:
        """Returns the statistics in one line, as the command line prints them."""
        name = self.algorithm if self.budget is None else f"{self.algorithm} budget {self.budget}"
        return (
            f"[{name}] {self.num_output_tokens} tokens in {self.num_rounds} rounds"
            f" | acceptance length {self.mean_acceptance_length:.2f}"
            f" | {self.tokens_per_second:.1f} tokens/s"
            f" | first token {self.time_to_first_token_s:.2f} s"
            f" | prompt {self.num_prompt_tokens} tokens"
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished sequence.

    Attributes:
      text: the new text; None without a tokenizer.
      token_ids: new tokens only; a stop token that ended the sequence is included.
      finish_reason: "stop" (a stop token; under a grammar: the text is complete), "length" (max_new_tokens), and under
        a grammar also "dead_end" (the model's tokens can not go on with the text as the grammar demands) or "error"
        (the grammar grew too complex for the library); the tokens are then those before that place.
      stats: counters of this sequence.
      error: what happened, for the last two finish reasons.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class RoundTree:
    """The draft tree of one round and the path the target took, as NumPy arrays (see `ddtree_jax.viz`).

    Attributes:
      tree: fields of shape [B, N], `num_nodes` [B].
      path: `node_ids` [B, D + 1], `length` [B], `bonus_token_ids` [B].
      batch_index: the row of the chunk that carries this.
    """

    tree: "DraftTree"
    path: "AcceptedPath"
    batch_index: int = 0


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The new part of one sequence after prefill or a round; the chunks of a sequence join to its `Result`.

    Attributes:
      text: new text, never part of a character; None without a tokenizer.
      token_ids: new tokens.
      index: which prompt of the batch this continues.
      finish_reason: None until the last chunk of the sequence.
      stats: None until the last chunk of the sequence.
      tree: the round's tree where it was asked for; None for the chunk from prefill.
      error: as in `Result`, in the last chunk of the sequence. That chunk may then be without a token.
    """

    text: str | None
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    stats: Stats | None = None
    tree: RoundTree | None = None
    error: str | None = None
