"""`ddtree-jax bench`: what each algorithm gains over plain decoding, and the proof that it changes nothing.

Every row decodes the same held-out prompts in the same process. A row's first pass over all prompts compiles
its programs and gives its outputs and acceptance lengths. The timed passes come after that, the rows
interleaved so that a slow moment of the machine does not fall on one row alone; their median is shown.
"""

import dataclasses
import importlib.resources
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ddtree_jax
from ddtree_jax.algorithm import SpeculativeAlgorithm, capabilities, require_drafter
from ddtree_jax.errors import CheckpointError
from ddtree_jax.grammar import Grammar
from ddtree_jax.requests import MAX_BATCH, check_arguments, check_hybrid, check_request

if TYPE_CHECKING:
    from ddtree_jax.engine import Engine

# the stages of profiling.round_breakdown that are model passes; its "outside" is the sum of the others
_MODEL_STAGES = ("draft", "context", "verify")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What to run; a wrong value raises ValueError naming it.

    Attributes:
      prompts: how many of the held-out prompts, from the first on.
      max_new_tokens: per prompt.
      budgets: one ddtree row each.
      batch: prompts decoded together.
      temperature: 0 is greedy.
      repeats: timed passes of each row.
      prompt_file: JSON list of objects with `prompt`, as heldout.json of the shipped pair, which None stands for.
      grammar: what every output must match; None: free.
    """

    prompts: int = 8
    max_new_tokens: int = 96
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64)
    batch: int = 1
    temperature: float = 0.0
    repeats: int = 3
    prompt_file: str | None = None
    grammar: Grammar | None = None

    def __post_init__(self):
        for name in ("prompts", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}; at least 1")
        if self.batch > MAX_BATCH:
            raise ValueError(f"batch: got {self.batch}; at most {MAX_BATCH} prompts are decoded together")
        if not self.budgets:
            raise ValueError("budgets: got none; give at least one")
        # Every other rule is that of the requests these settings become.
        for budget in self.budgets:
            check_arguments(
                self.max_new_tokens, "ddtree", budget, self.temperature, None, None, None, 0, None, self.grammar
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchRow:
    """The figures of one algorithm at one budget.

    Attributes:
      algorithm, budget: budget is None where the algorithm builds no tree.
      acceptance_mean: mean over prompts of each prompt's mean acceptance length.
      acceptance_by_token: all tokens of all rounds over all rounds.
      acceptance_median: median over prompts.
      tokens_per_second: output tokens of all prompts over the wall time of a pass, prefill included; the
        median of the timed passes.
      speedup: tokens_per_second over that of `none`.
      round_ms: milliseconds of a round by stage, from `profiling.round_breakdown`. Under a grammar "round" alone: the
        wall time of the timed passes after the first token, over their rounds; in a batch each sequence's time counts.
      num_identical: prompts whose tokens are those of `none`.
      num_complete: outputs that ended by a stop token; under a grammar these are whole texts of it.
    """

    algorithm: str
    budget: int | None
    acceptance_mean: float
    acceptance_by_token: float
    acceptance_median: float
    tokens_per_second: float
    speedup: float
    round_ms: dict[str, float]
    num_identical: int
    num_complete: int

    @property
    def outside_models_ms(self) -> float | None:
        """Milliseconds of a round outside the two models: build, mask, accept, commit. None where not measured."""
        return self.round_ms.get("outside")

    @property
    def outside_models_share(self) -> float | None:
        """The same as a part of all stages (which add up to more than the round as one program)."""
        if self.outside_models_ms is None:
            return None
        stages = self.outside_models_ms + sum(self.round_ms[stage] for stage in _MODEL_STAGES)
        return self.outside_models_ms / stages if stages > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchReport:
    """All rows, and where and how they were measured."""

    settings: BenchSettings
    rows: tuple[BenchRow, ...]
    device: str
    dtype: str
    num_identical: int  # prompts that are identical to `none` in every row

    @property
    def all_identical(self) -> bool:
        return self.num_identical == self.settings.prompts

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values that `json.dumps` takes."""
        values = dataclasses.asdict(self)
        for row, source in zip(values["rows"], self.rows, strict=True):
            row["outside_models_ms"] = source.outside_models_ms
            row["outside_models_share"] = source.outside_models_share
        return values

    def table(self) -> str:
        """Returns the report as text: a head line, one line a row, and `identical n/N` at the end."""
        settings = self.settings
        sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
        columns = (
            "algorithm",
            "budget",
            "mean",
            "by token",
            "median",
            "tokens/s",
            "speed-up",
            "round ms",
            "outside ms",
            "same",
            "complete",
        )
        lines = [columns]
        for row in self.rows:
            outside = row.outside_models_ms
            lines.append(
                (
                    row.algorithm,
                    "-" if row.budget is None else str(row.budget),
                    f"{row.acceptance_mean:.2f}",
                    f"{row.acceptance_by_token:.2f}",
                    f"{row.acceptance_median:.2f}",
                    f"{row.tokens_per_second:.1f}",
                    f"{row.speedup:.2f}x",
                    f"{row.round_ms['round']:.2f}",
                    "-" if outside is None else f"{outside:.2f} ({row.outside_models_share:.0%})",
                    f"{row.num_identical}/{settings.prompts}",
                    f"{row.num_complete}/{settings.prompts}",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
        body = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        head = (
            f"{self.device}, {self.dtype}: {settings.prompts} held-out prompts, "
            f"{settings.max_new_tokens} new tokens, "
            f"batch {settings.batch}, {sampling}, median of {settings.repeats}"
            + ("" if settings.grammar is None else f", under a grammar ({settings.grammar.kind})")
        )
        legend = (
            "mean, by token, median: acceptance length (tokens a target pass); "
            "outside ms: build, mask, accept and commit, and their part of all stages; "
            "complete: ended by a stop token"
        )
        return "\n".join([head, legend, *body, f"identical {self.num_identical}/{settings.prompts}"])


def held_out_prompts(path: str | None = None) -> list[str]:
    """Returns the prompts of a JSON file; by default those that ship, on which no shipped model was trained.

    Raises:
      ValueError: a file of the caller's that is missing or not a list of objects with a `prompt`.
      CheckpointError: the shipped file is missing.
    """
    shipped = importlib.resources.files("ddtree_jax") / "demo" / "heldout.json"
    file = shipped if path is None else pathlib.Path(path)
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [str(entry["prompt"]) for entry in entries]
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{file}: expected a JSON list of objects with 'prompt', found: {error}"
        raise (CheckpointError if path is None else ValueError)(message) from None


def check(engine: "Engine", settings: BenchSettings) -> list[str]:
    """The prompts to run; raises what `run_bench` raises, also on an engine without its weights."""
    for algorithm, budget in _configurations(settings):
        require_drafter(algorithm, engine.drafter is not None)
        check_hybrid(engine, algorithm, budget or 0)
    prompts = held_out_prompts(settings.prompt_file)
    if settings.prompts > len(prompts):
        raise ValueError(f"prompts: got {settings.prompts}; at most {len(prompts)} are there")
    prompts = prompts[: settings.prompts]
    if settings.grammar is not None:
        check_request(
            engine, prompts, settings.max_new_tokens, "none", 0, 0.0, None, None, None, 0, None, settings.grammar
        )
    return prompts


def run_bench(
    engine: "Engine", settings: BenchSettings, *, progress: Callable[[str], None] | None = None
) -> BenchReport:
    """Measures all rows on one engine.

    Args:
      engine: a pair with tokenizer and drafter.
      settings: what to run.
      progress: is told what is being measured.

    Raises:
      UnsupportedRequestError: the engine has no drafter, or recurrent layers that a tree would spoil.
      ValueError: more prompts asked for than ship with the package.
    """
    from ddtree_jax import profiling

    say = progress or (lambda message: None)
    prompts = check(engine, settings)

    configurations = _configurations(settings)

    def decode(algorithm: SpeculativeAlgorithm, budget: int | None) -> list[ddtree_jax.Result]:
        results: list[ddtree_jax.Result] = []
        for start in range(0, len(prompts), settings.batch):
            results += ddtree_jax.generate(
                engine,
                prompts[start : start + settings.batch],
                max_new_tokens=settings.max_new_tokens,
                algorithm=algorithm,
                budget=budget or 0,
                temperature=settings.temperature,
                grammar=settings.grammar,
            )
        return results

    outputs = []
    for algorithm, budget in configurations:
        say(f"bench: {_name(algorithm, budget)}: compiling, first pass")
        outputs.append(decode(algorithm, budget))
    speeds: list[list[float]] = [[] for _ in configurations]
    round_ms: list[list[float]] = [[] for _ in configurations]
    for repeat in range(settings.repeats):
        say(f"bench: timed pass {repeat + 1} of {settings.repeats}")
        for number, (algorithm, budget) in enumerate(configurations):
            start = time.perf_counter()
            results = decode(algorithm, budget)
            seconds = time.perf_counter() - start
            speeds[number].append(sum(len(result.token_ids) for result in results) / seconds)
            round_ms[number].append(_mean_round_ms(results))

    plain = configurations.index((SpeculativeAlgorithm.NONE, None))
    plain_speed = statistics.median(speeds[plain])
    same = [
        [result.token_ids == reference.token_ids for result, reference in zip(results, outputs[plain], strict=True)]
        for results in outputs
    ]
    rows = []
    for number, (algorithm, budget) in enumerate(configurations):
        say(f"bench: {_name(algorithm, budget)}: time by stage")
        stats = [result.stats for result in outputs[number]]
        lengths = [length for entry in stats for length in entry.acceptance_lengths]
        # A prompt whose first token ends it has no round and says nothing about acceptance.
        means = [entry.mean_acceptance_length for entry in stats if entry.num_rounds] or [0.0]
        speed = statistics.median(speeds[number])
        if settings.grammar is None:
            breakdown = dict(profiling.round_breakdown(engine, algorithm, budget or 0, settings.batch))
        else:
            breakdown = {"round": statistics.median(round_ms[number])}
        rows.append(
            BenchRow(
                algorithm=algorithm.value,
                budget=budget,
                acceptance_mean=statistics.fmean(means),
                acceptance_by_token=statistics.fmean(lengths) if lengths else 0.0,
                acceptance_median=statistics.median(means),
                tokens_per_second=speed,
                speedup=speed / plain_speed,
                round_ms=breakdown,
                num_identical=sum(same[number]),
                num_complete=sum(result.finish_reason == "stop" for result in outputs[number]),
            )
        )
    return BenchReport(
        settings=settings,
        rows=tuple(rows),
        device=_device(),
        dtype=str(engine.target.dtype),
        num_identical=sum(all(row[prompt] for row in same) for prompt in range(len(prompts))),
    )


def _mean_round_ms(results: list["ddtree_jax.Result"]) -> float:
    """Milliseconds a round, prefill left out; 0 where there was no round."""
    rounds = sum(result.stats.num_rounds for result in results)
    seconds = sum(
        result.stats.num_output_tokens / result.stats.tokens_per_second - result.stats.time_to_first_token_s
        for result in results
        if result.stats.num_rounds
    )
    return seconds / rounds * 1e3 if rounds else 0.0


def _configurations(settings: BenchSettings) -> list[tuple[SpeculativeAlgorithm, int | None]]:
    """(algorithm, budget) of every row; budget None where the algorithm builds no tree."""
    configurations: list[tuple[SpeculativeAlgorithm, int | None]] = []
    for algorithm in SpeculativeAlgorithm:
        budgets = settings.budgets if capabilities(algorithm).branching else (None,)
        configurations.extend((algorithm, budget) for budget in budgets)
    return configurations


def _name(algorithm: SpeculativeAlgorithm, budget: int | None) -> str:
    return algorithm.value if budget is None else f"{algorithm.value} {budget}"


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind
