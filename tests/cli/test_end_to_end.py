"""The command with the shipped pair, as a user runs it; in a process of its own where only that shows it."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import pytest

import ddtree_jax
from ddtree_jax import bench, cli
from ddtree_jax.engine import demo_folder
from tests.conftest import compilation_as_here

PROMPT = "def add(a, b):\n"
SHORT = ("--max-new-tokens", "24")


@pytest.fixture
def demo(demo_engine, monkeypatch):
    """Lets the command line reuse the engine of the session instead of loading and compiling again."""
    monkeypatch.setitem(vars(ddtree_jax), "load", lambda *args, **kwargs: demo_engine)
    return demo_engine


def output(capsys, *argv: str) -> str:
    assert cli.main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_text_is_the_one_of_the_library_and_statistics_come_last(demo, capsys):
    result = ddtree_jax.generate(demo, PROMPT, max_new_tokens=24)
    out = output(capsys, "generate", PROMPT, *SHORT)
    text, _, line = out.removesuffix("\n").rpartition("\n")
    assert text in (result.text, result.text.removesuffix("\n"))
    assert line.startswith("[ddtree budget 32] ") and f"{len(result.token_ids)} tokens in" in line
    assert f"in {result.stats.num_rounds} rounds" in line


@pytest.mark.parametrize(
    "options", [["--algorithm", "dflash"], pytest.param(["--budget", "7"], marks=pytest.mark.slow), ["--budget", "32"]]
)
def test_all_algorithms_and_budgets_print_the_same_text(demo, capsys, options):
    def tokens(*options: str) -> list[int]:
        return json.loads(output(capsys, "generate", PROMPT, *SHORT, "--json", *options))["token_ids"]

    plain = tokens("--algorithm", "none")
    assert len(plain) > 1
    assert tokens(*options) == plain


def test_json_holds_the_statistics_of_the_contract(demo, capsys):
    document = json.loads(output(capsys, "generate", PROMPT, *SHORT, "--json", "--show-tree"))
    stats = document["stats"]
    assert stats["num_output_tokens"] == len(document["token_ids"])
    assert stats["num_rounds"] == len(stats["acceptance_lengths"])
    assert sum(stats["acceptance_lengths"]) + 1 >= stats["num_output_tokens"]
    assert "(root)" in document["tree"] and "accepted" in document["tree"]


def test_the_tree_that_is_drawn_is_the_one_of_the_last_round(demo, capsys):
    document = json.loads(output(capsys, "generate", PROMPT, *SHORT, "--json", "--show-tree"))
    lines = document["tree"].splitlines()
    accepted = document["stats"]["acceptance_lengths"][-1]
    assert sum(line.startswith("*") for line in lines) == accepted
    assert lines[-1].startswith(f"accepted {accepted - 1} of ")


def test_a_stop_token_ends_the_text_and_an_empty_list_stops_nothing(demo, capsys):
    plain = json.loads(output(capsys, "generate", PROMPT, *SHORT, "--json", "--stop-token-ids", ""))
    assert len(plain["token_ids"]) == 24 and plain["finish_reason"] == "length"
    stop = plain["token_ids"][5]
    cut = json.loads(output(capsys, "generate", PROMPT, *SHORT, "--json", "--stop-token-ids", str(stop)))
    assert cut["token_ids"] == plain["token_ids"][: plain["token_ids"].index(stop) + 1]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--temperature", "nan"), "temperature"),
        (("--temperature", "inf"), "temperature"),
        (("--temperature", "-1"), "temperature"),
        (("--top-p", "1.5"), "top_p"),
        (("--top-k", "-1"), "top_k"),
        (("--min-p", "nan"), "min_p"),
        (("--budget", "-1"), "budget"),
        (("--max-new-tokens", "0"), "max_new_tokens"),
        (("--stop-token-ids", "-5"), "stop_token_ids"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(demo, capsys, options, named):
    assert cli.main(["generate", PROMPT, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert named in captured.err


def test_an_empty_prompt_is_refused(demo, capsys):
    assert cli.main(["generate", ""]) == 2
    assert "prompt" in capsys.readouterr().err


@pytest.mark.slow
def test_the_python_examples_of_the_readme_run(demo, capsys):
    readme = pathlib.Path(__file__).parents[2] / "README.md"
    first, grammars = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {}
    exec(compile(first, "README.md", "exec"), names)
    assert names["result"].text in capsys.readouterr().out
    assert len(names["results"]) == 2
    exec(compile(grammars, "README.md", "exec"), names)
    assert names["result"].finish_reason == "stop" and json.loads(names["result"].text).keys() == {"name", "age"}


def test_every_shipped_prompt_is_there(demo):
    prompts = bench.held_out_prompts()
    assert len(prompts) >= 8 and all(isinstance(prompt, str) and prompt for prompt in prompts)


@pytest.mark.slow
def test_bench_finds_every_output_identical(demo, capsys):
    options = "--prompts 3 --max-new-tokens 16 --budgets 4,16 --batch 2 --repeats 1 --json"
    report = json.loads(output(capsys, "bench", *options.split()))
    assert report["num_identical"] == 3
    assert [row["num_identical"] for row in report["rows"]] == [3, 3, 3, 3]
    assert all(row["tokens_per_second"] > 0 and row["outside_models_ms"] > 0 for row in report["rows"])


def command(*argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "ddtree_jax", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir or "",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            **compilation_as_here(),
        },
    )


def test_a_process_of_its_own_reads_stdin_and_keeps_stderr_empty():
    with command("generate", "-", "--max-new-tokens", "8") as process:
        out, err = process.communicate(PROMPT, timeout=240)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].startswith("[ddtree budget 32] ")


def test_a_folder_that_does_not_exist_is_one_line(tmp_path):
    with command("generate", "x", "--target", str(tmp_path / "nowhere")) as process:
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "nowhere" in err


@pytest.mark.slow
def test_control_c_during_the_work_is_quiet():
    with command("generate", PROMPT, "--max-new-tokens", "400", "--stop-token-ids", "") as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
    assert first and (process.returncode, err) == (130, "")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_quiet():
    with command("generate", PROMPT, "--max-new-tokens", "400", "--stop-token-ids", "") as process:
        process.stdout.read(1)
        process.stdout.close()
        assert process.wait(timeout=240) == 141
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_doctor_is_content_with_this_installation():
    with command("doctor", "--json") as process:
        out, err = process.communicate(timeout=240)
    report = json.loads(out)
    assert report["healthy"], err
    assert {finding["name"]: finding["status"] for finding in report["findings"]}["demo pair"] == "ok"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("generate", PROMPT, "--target", "TARGET"), "needs a drafter"),
        (("generate", PROMPT, "--stop-token-ids", "2048"), "stop_token_ids"),
        (("generate", "", *SHORT), "prompt"),
        (("generate", PROMPT, "--max-new-tokens", "99999"), "the model's positions"),
        (("bench", "--prompts", "10000"), "prompts: got 10000"),
        (("bench", "--target", "TARGET"), "needs a drafter"),
    ],
)
def test_what_the_weights_cannot_change_is_told_before_they_load(monkeypatch, capsys, argv, message):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read first")

    monkeypatch.setattr("ddtree_jax.models.folders.load_leaves", refuse)
    argv = [str(demo_folder() / "target") if word == "TARGET" else word for word in argv]
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
