"""The benchmark over a fake engine whose acceptance is known: figures, identity check, what gets run."""

import json
import pathlib
import statistics
import sys
import types

import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, Grammar, SpeculativeAlgorithm, UnsupportedRequestError, bench
from ddtree_jax.bench import BenchSettings, run_bench

# acceptance lengths 2, 3 and 6 over 3, 2 and 1 rounds (see FakeLibrary.generate)
PROMPTS = ["p1", "p2", "p5", "p0"]
STAGES = {
    **{"draft": 1.0, "context": 1.0, "verify": 3.0},
    **{"build": 0.25, "mask": 0.25, "accept": 0.25, "commit": 0.25},
    **{"outside": 1.0, "round": 5.5},
}


@pytest.fixture
def asked(library, monkeypatch) -> list[tuple]:
    """Puts the prompts and the stage times in place; returns the arguments of each `round_breakdown`."""
    calls = []

    def round_breakdown(engine, algorithm, budget, batch):
        calls.append((algorithm, budget, batch))
        return STAGES

    profiling = types.SimpleNamespace(round_breakdown=round_breakdown)
    monkeypatch.setitem(sys.modules, "ddtree_jax.profiling", profiling)
    monkeypatch.setitem(vars(ddtree_jax), "profiling", profiling)
    monkeypatch.setattr(bench, "held_out_prompts", lambda path=None: PROMPTS)
    return calls


def test_the_figures(library, asked):
    report = run_bench(library.engine, BenchSettings(prompts=3, budgets=(8, 16), repeats=2))
    assert [(row.algorithm, row.budget) for row in report.rows] == [
        ("none", None),
        ("dflash", None),
        ("ddtree", 8),
        ("ddtree", 16),
    ]
    plain, *drafted = report.rows
    assert plain.speedup == 1.0
    assert (plain.acceptance_mean, plain.acceptance_by_token, plain.acceptance_median) == (1.0, 1.0, 1.0)
    for row in drafted:
        assert row.acceptance_mean == pytest.approx((2 + 3 + 6) / 3)
        assert row.acceptance_by_token == pytest.approx(18 / 6)
        assert row.acceptance_median == 3
        assert row.speedup == pytest.approx(row.tokens_per_second / plain.tokens_per_second)
        assert row.outside_models_ms == 1.0
        assert row.num_identical == 3
    assert report.num_identical == 3 and report.all_identical
    assert asked == [
        (SpeculativeAlgorithm.NONE, 0, 1),
        (SpeculativeAlgorithm.DFLASH, 0, 1),
        (SpeculativeAlgorithm.DDTREE, 8, 1),
        (SpeculativeAlgorithm.DDTREE, 16, 1),
    ]


def test_every_row_is_warmed_up_and_the_timed_passes_are_interleaved(library, asked):
    run_bench(library.engine, BenchSettings(prompts=3, batch=2, budgets=(8,), repeats=2, temperature=0.5))
    order = [(options["algorithm"].value, prompts) for prompts, options in library.generated]
    one_pass = [(name, part) for name in ("none", "dflash", "ddtree") for part in (["p1", "p2"], ["p5"])]
    assert order == one_pass * 3
    assert {options["temperature"] for _, options in library.generated} == {0.5}
    assert {options["max_new_tokens"] for _, options in library.generated} == {96}


def test_speed_is_the_median_of_the_timed_passes_without_the_first(library, asked, monkeypatch):
    # the clock is read before and after each timed pass only: none takes 3, 1, 2 seconds and the others 1
    durations = iter([3, 1, 1, 1, 1, 1, 2, 1, 1])
    clock = iter([reading for seconds in durations for reading in (0.0, float(seconds))])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    report = run_bench(library.engine, BenchSettings(prompts=2, budgets=(8,), repeats=3))
    tokens = 2 * 7
    assert report.rows[0].tokens_per_second == statistics.median([tokens / 3, tokens / 1, tokens / 2])
    assert [row.speedup for row in report.rows] == [1.0, 2.0, 2.0]


def test_a_difference_is_counted_where_it_is(library, asked):
    def outputs(algorithm, budget, prompt):
        return [9] if (algorithm, budget, prompt) == ("ddtree", 16, "p2") else [1, 2]

    library.outputs = outputs
    report = run_bench(library.engine, BenchSettings(prompts=3, budgets=(8, 16), repeats=1))
    assert [row.num_identical for row in report.rows] == [3, 3, 3, 2]
    assert report.num_identical == 2 and not report.all_identical
    assert report.table().splitlines()[-1] == "identical 2/3"


def test_the_table_and_json_agree(library, asked):
    report = run_bench(library.engine, BenchSettings(prompts=3, budgets=(8,), repeats=1))
    lines = report.table().splitlines()
    assert "float32" in lines[0] and "3 held-out prompts" in lines[0] and "greedy" in lines[0]
    assert lines[-1] == "identical 3/3"
    row = next(line for line in lines if line.startswith("ddtree")).split()
    assert row[:5] == ["ddtree", "8", "3.67", "3.00", "3.00"]
    assert row[-5:] == ["5.50", "1.00", "(17%)", "3/3", "0/3"]
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["rows"][2]["acceptance_mean"] == report.rows[2].acceptance_mean
    assert values["rows"][2]["outside_models_ms"] == 1.0
    assert values["settings"]["budgets"] == [8]


def test_under_a_grammar_the_round_is_timed_whole(library, asked, monkeypatch):
    monkeypatch.setattr(bench, "check_request", lambda *args: None)
    grammar = Grammar.choices(["yes", "no"])
    report = run_bench(library.engine, BenchSettings(prompts=3, budgets=(8,), repeats=1, grammar=grammar))
    assert not asked and all(options["grammar"] == grammar for _, options in library.generated)
    # STATS: 4 tokens at 8 a second, half of them spent on the first: nothing is left for the rounds
    assert [row.round_ms for row in report.rows] == [{"round": 0.0}] * 3
    table = report.table()
    assert "under a grammar (choices)" in table
    assert next(line for line in table.splitlines() if line.startswith("ddtree")).split()[-3:] == ["-", "3/3", "0/3"]
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["settings"]["grammar"]["kind"] == "choices" and values["rows"][0]["outside_models_ms"] is None


def test_a_prompt_without_a_round_does_not_count(library, asked, monkeypatch):
    # p0 accepts 1 token a round; here its output ended with the first token, so it had no round at all
    whole = library.generate

    def generate(engine, prompts, **kwargs):
        results = whole(engine, prompts, **kwargs)
        empty = ddtree_jax.Stats(**{**vars(results[0].stats), "acceptance_lengths": (), "num_output_tokens": 1})
        return [
            ddtree_jax.Result("", [1], "stop", empty) if prompt == "p0" else result
            for prompt, result in zip(prompts, results, strict=True)
        ]

    monkeypatch.setitem(vars(ddtree_jax), "generate", generate)
    report = run_bench(library.engine, BenchSettings(prompts=4, budgets=(8,), repeats=1))
    assert report.rows[2].acceptance_mean == pytest.approx((2 + 3 + 6) / 3)


def test_what_cannot_be_run_is_refused_before_any_work(library, asked):
    with pytest.raises(ValueError, match="at most 4"):
        run_bench(library.engine, BenchSettings(prompts=5))
    library.engine.drafter = None
    with pytest.raises(UnsupportedRequestError, match="drafter"):
        run_bench(library.engine, BenchSettings(prompts=1))
    assert not library.generated


def test_prompts_that_are_missing_are_a_checkpoint_error(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(CheckpointError, match="heldout.json"):
        bench.held_out_prompts()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "heldout.json").write_text('[{"id": "a", "prompt": "x = "}]')
    assert bench.held_out_prompts() == ["x = "]


@pytest.mark.parametrize("content", [None, "{", "[1]", '[{"id": 1}]', "7"])
def test_a_bad_prompt_file_is_named(tmp_path: pathlib.Path, content: str | None):
    file = tmp_path / "prompts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match="prompts.json"):
        bench.held_out_prompts(str(file))


def test_a_prompt_file_is_read(tmp_path: pathlib.Path):
    (tmp_path / "prompts.json").write_text('[{"prompt": "a = "}, {"prompt": "b"}]')
    assert bench.held_out_prompts(str(tmp_path / "prompts.json")) == ["a = ", "b"]


def test_a_batch_beyond_what_is_decoded_together_is_refused():
    with pytest.raises(ValueError, match="batch"):
        bench.BenchSettings(batch=17)
