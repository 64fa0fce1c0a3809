"""The command line over a fake engine: arguments in, text out, and one line for bad input."""

import dataclasses
import io
import json
import subprocess
import sys
import types

import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, Grammar, InvariantError, UnsupportedRequestError, bench, cli


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def one_line(err: str) -> str:
    """Returns the only line of stderr."""
    assert err.endswith("\n") and err.count("\n") == 1, err
    assert "usage:" not in err and "Traceback" not in err
    return err


def test_generate_streams_the_text_and_ends_with_the_statistics(library, capsys):
    status, out, err = run(capsys, "generate", "a prompt")
    assert (status, err) == (0, "")
    assert out == f"one two ☃\n{library.chunks[-1].stats.summary_line()}\n"
    ((where, options),) = library.loads
    assert where == ("demo", None) and callable(options.pop("check"))
    assert options.pop("kernels") == "auto"
    assert options == {"dtype": "auto", "mesh": None, "allow_hybrid_unsafe": False, "progress": None}
    assert library.streams == [
        (
            "a prompt",
            {
                "max_new_tokens": 128,
                "algorithm": "ddtree",
                "budget": 32,
                "temperature": 0.0,
                "top_k": None,
                "top_p": None,
                "min_p": None,
                "seed": 0,
                "stop_token_ids": None,
                "grammar": None,
                "with_tree": False,
                "progress": None,
            },
        )
    ]


def test_each_piece_is_written_when_it_comes(library, monkeypatch, capsys):
    seen = []

    def stream(engine, prompt, **kwargs):
        for chunk in library.chunks:
            yield chunk
            seen.append(capsys.readouterr().out)

    monkeypatch.setitem(vars(ddtree_jax), "stream", stream)
    assert cli.main(["generate", "x"]) == 0
    assert seen == ["one ", "two ☃"]


def test_every_option_reaches_the_library(library, capsys):
    status, _, _ = run(
        capsys,
        *("generate", "p", "--target", "T", "--drafter", "D", "--dtype", "bfloat16"),
        *("--max-new-tokens", "5", "--algorithm", "DDTree", "--budget", "9", "--temperature", "0.5"),
        *("--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--seed", "-7", "--stop-token-ids", "4, 5"),
        *(HYBRID_FLAG, "--kernels", "reference"),
    )
    assert status == 0
    ((where, options),) = library.loads
    assert where == ("T", "D") and callable(options.pop("check"))
    assert options.pop("kernels") == "reference"
    assert options == {"dtype": "bfloat16", "mesh": None, "allow_hybrid_unsafe": True, "progress": None}
    ((prompt, options),) = library.streams
    assert prompt == "p"
    assert options == {
        "max_new_tokens": 5,
        "algorithm": "DDTree",
        "budget": 9,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": -7,
        "stop_token_ids": [4, 5],
        "grammar": None,
        "with_tree": False,
        "progress": None,
    }


def test_an_empty_stop_list_is_a_list_and_not_the_default(library, capsys):
    assert run(capsys, "generate", "p", "--stop-token-ids", "")[0] == 0
    assert library.streams[0][1]["stop_token_ids"] == []


def test_a_target_without_a_drafter(library, capsys):
    assert run(capsys, "generate", "p", "--target", "T", "--algorithm", "none")[0] == 0
    assert library.loads[0][0] == ("T", None)


def test_another_drafter_for_the_shipped_target(library, capsys):
    assert run(capsys, "generate", "p", "--drafter", "D")[0] == 0
    assert library.loads[0][0] == ("demo", "D")


@pytest.mark.parametrize("text", ["from stdin ☃\nsecond line", ""])
def test_a_dash_reads_stdin(library, capsys, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(capsys, "generate", "-")[0] == 0
    assert library.streams[0][0] == text


def test_stdin_that_is_no_text(library, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    status, out, err = run(capsys, "generate", "-")
    assert (status, out) == (2, "")
    assert "UTF-8" in one_line(err)
    assert not library.loads


def test_token_ids_as_a_prompt(library, capsys):
    assert run(capsys, "generate", "1, 2 3", "--token-ids")[0] == 0
    assert library.streams[0][0] == [1, 2, 3]
    status, _, err = run(capsys, "generate", "1 b", "--token-ids")
    assert status == 2 and "1 b" in one_line(err)


def test_a_shipped_prompt(library, capsys, monkeypatch):
    monkeypatch.setattr(bench, "held_out_prompts", lambda: ["first", "second"])
    assert run(capsys, "generate", "--demo-prompt", "1")[0] == 0
    assert library.streams[0][0] == "second"
    for number in ("2", "-1"):
        status, _, err = run(capsys, "generate", "--demo-prompt", number)
        assert status == 2 and "0 to 1" in one_line(err)


def test_the_tree_comes_before_the_statistics(library, capsys):
    status, out, _ = run(capsys, "generate", "p", "--show-tree")
    lines = out.splitlines()
    assert status == 0 and library.streams[0][1]["with_tree"] is True
    assert lines[0] == "one two ☃" and lines[-1] == library.chunks[-1].stats.summary_line()
    assert "* 't1' (root)" in lines and "accepted 1 of 2 drafted" in out


def test_a_last_piece_without_a_round_does_not_hide_the_tree(library, capsys):
    first, last = library.chunks
    library.chunks = (
        first,
        dataclasses.replace(last, stats=None),
        ddtree_jax.Chunk("", [], stats=last.stats),
    )
    status, out, _ = run(capsys, "generate", "p", "--show-tree")
    assert status == 0 and "* 't1' (root)" in out


def test_no_round_no_tree(library, capsys):
    last = library.chunks[-1]
    library.chunks = (ddtree_jax.Chunk("x", [1], finish_reason="stop", stats=last.stats),)
    status, out, _ = run(capsys, "generate", "p", "--show-tree")
    assert status == 0 and "no tree" in out and out.splitlines()[-1] == last.stats.summary_line()


def test_without_a_tokenizer_the_ids_are_the_output(library, capsys):
    library.engine.tokenizer = None
    library.chunks = tuple(
        ddtree_jax.Chunk(None, chunk.token_ids, stats=chunk.stats, tree=chunk.tree) for chunk in library.chunks
    )
    status, out, _ = run(capsys, "generate", "1 2", "--token-ids", "--show-tree")
    assert status == 0 and out.splitlines()[0].split() == ["1", "2", "3", "4"]
    assert "<1> (root)" in out


def test_json_is_one_object_and_holds_what_the_stream_held(library, capsys):
    status, out, err = run(capsys, "generate", "p", "--json", "--show-tree")
    assert (status, err) == (0, "")
    document = json.loads(out)
    assert document["text"] == "one two ☃" and document["token_ids"] == [1, 2, 3, 4]
    assert document["finish_reason"] == "length"
    assert document["stats"] == library.chunks[-1].stats.to_dict()
    assert "(root)" in document["tree"]


def test_progress_goes_to_stderr_where_it_is_wanted(library, capsys, monkeypatch):
    status, _, err = run(capsys, "generate", "p", "--progress")
    assert status == 0 and "loading the weights" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = run(capsys, "generate", "p")
    assert status == 0 and "loading the weights" in err and "loading" not in out


HYBRID_FLAG = "--speculative-ddtree-allow-hybrid-unsafe"
BAD_USAGE = [
    ((), "COMMAND"),
    (("served",), "served"),
    (("serve", "x"), "x"),
    (("client",), "PROMPT"),
    (("client", "p", "--unknown"), "--unknown"),
    (("client", "p", "--timeout", "0"), "--timeout: got 0.0"),
    (("client", "p", "--regex", "(a"), "grammar regex"),
    (("client", "p", "--ssl-keyfile", "x"), "--ssl-certfile, --ssl-keyfile"),
    (("client", "p", "--ssl-keyfile", "x", "--ssl-certfile", "y"), "--tls"),
    (("client", "p", "--ssl-ca-certs", "/no/such/file"), "/no/such/file cannot be read"),
    (("client", "p", "--top-k", "0"), "top_k: got 0"),
    (("client", "p", "--seed", "5000000000"), "seed: got 5000000000"),
    (("convert", "x"), "convert"),
    (("generate",), "PROMPT"),
    (("generate", "p", "--demo-prompt", "0"), "PROMPT"),
    (("generate", "p", "q"), "q"),
    (("generate", "p", "--unknown"), "--unknown"),
    (("generate", "p", "--max-new", "5"), "--max-new"),
    (("generate", "p", "--max-new-tokens", "1.5"), "1.5"),
    (("generate", "p", "--max-new-tokens"), "--max-new-tokens"),
    (("generate", "p", "--budget", "many"), "many"),
    (("generate", "p", "--algorithm", "medusa"), "medusa"),
    (("generate", "p", "--temperature", "warm"), "warm"),
    (("generate", "p", "--top-k", "x"), "--top-k"),
    (("generate", "p", "--seed", "x"), "--seed"),
    (("generate", "p", "--stop-token-ids", "1,x"), "1,x"),
    (("generate", "p", "--temperature", "-1"), "temperature: got -1.0"),
    (("generate", "p", "--temperature", "nan"), "temperature: got nan"),
    (("generate", "p", "--top-k", "0"), "top_k: got 0"),
    (("generate", "p", "--top-p", "2"), "top_p: got 2.0"),
    (("generate", "p", "--min-p", "-0.1"), "min_p: got -0.1"),
    (("generate", "p", "--max-new-tokens", "0"), "max_new_tokens: got 0"),
    (("generate", "p", "--budget", "-1"), "budget: got -1"),
    (("generate", "p", "--budget", "1025"), "budget: got 1025"),
    (("generate", "p", "--budget", "auto"), "automatic budget"),
    (("generate", "p", "--stop-token-ids", "-1"), "stop_token_ids: got [-1]"),
    (("generate", "p", "--algorithm", "dflash", HYBRID_FLAG), f"{HYBRID_FLAG}: algorithm DFLASH"),
    (("generate", "p", "--budget", "1", HYBRID_FLAG), f"{HYBRID_FLAG}: algorithm DDTREE with budget 1 "),
    (("doctor", HYBRID_FLAG), HYBRID_FLAG),
    (("bench", "--prompts", "0"), "prompts"),
    (("bench", "--batch", "-1"), "batch"),
    (("bench", "--repeats", "0"), "repeats"),
    (("bench", "--max-new-tokens", "0"), "max_new_tokens"),
    (("bench", "--budgets", ""), "--budgets"),
    (("bench", "--budgets", "4,-1"), "budget: got -1"),
    (("bench", "--temperature", "nan"), "temperature"),
    (("bench", "--temperature", "-0.1"), "temperature"),
    (("bench", "--temperature", "1e31"), "temperature"),
    (("doctor", "--drafter", "x"), "--target"),
    (("doctor", "--dtype", "int3"), "--target"),
    (("doctor", "--context", "0"), "--target"),
    (("doctor", "--batch", "-4"), "--target"),
    (("generate", "p", "--regex", "(a"), "grammar regex"),
    (("generate", "p", "--regex", "a", "--json-schema", "x"), "--json-schema"),
    (("generate", "p", "--json-compact"), "--json-compact"),
    (("generate", "p", "--json-schema", "/no/such/file"), "/no/such/file cannot be read"),
    (("bench", "--lark", "/no/such/file"), "/no/such/file cannot be read"),
    (("bench", "--choices"), "--choices"),
]


@pytest.mark.parametrize(("argv", "named"), BAD_USAGE)
def test_bad_usage_is_one_line_that_names_it(library, capsys, argv, named):
    status, out, err = run(capsys, *argv)
    assert (status, out) == (2, "")
    assert named in one_line(err)
    assert not library.loads


@pytest.mark.parametrize("command", ["generate", "serve", "client", "bench", "doctor", "convert"])
def test_regression_g79_no_option_is_dropped_or_run_into_its_neighbour(library, capsys, command):
    """Two flags run together into one word, or a flag that no parser knows, must never be a silent no-op."""
    given = ("p",) if command in ("generate", "client") else ()
    needed = ("--output", "x") if command == "convert" else ()
    for wrong in ("--algorithm=ddtree--budget=4", "--speculative-ddtree-budgets", "--budgetalgorithm"):
        status, out, err = run(capsys, command, *given, *needed, wrong)
        assert (status, out) == (2, "") and one_line(err)
    assert not library.loads


GRAMMARS = [
    (("--regex", "[0-9]+"), Grammar.regex("[0-9]+")),
    (("--choices", "yes", "no way"), Grammar.choices(["yes", "no way"])),
    (("--json-schema", "SCHEMA"), Grammar.json_schema({"type": "integer"})),
    (("--json-schema", "SCHEMA", "--json-compact"), Grammar.json_schema({"type": "integer"}, compact=True)),
    (("--lark", "LARK"), Grammar.lark('start: "a"')),
]


@pytest.mark.parametrize(("options", "grammar"), GRAMMARS)
def test_a_grammar_reaches_the_library(library, capsys, tmp_path, monkeypatch, options, grammar):
    files = {"SCHEMA": '{"type": "integer"}', "LARK": 'start: "a"'}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = [str(tmp_path / one) if one in files else one for one in options]
    assert run(capsys, "generate", "p", *options)[0] == 0
    assert library.streams[0][1]["grammar"] == grammar
    calls = []
    report = types.SimpleNamespace(table=lambda: "", to_dict=dict, dtype="float32", all_identical=True)
    monkeypatch.setattr(bench, "run_bench", lambda engine, settings, *, progress: calls.append(settings) or report)
    assert run(capsys, "bench", *options)[0] == 0
    assert calls[0].grammar == grammar


@pytest.mark.parametrize("content", [b"\xff", b"{", b'"text"', b"x" * 200_000, b'{"type": "wrong"}'])
def test_a_schema_file_that_is_no_schema_is_told_before_loading(library, capsys, tmp_path, content):
    file = tmp_path / "schema"
    file.write_bytes(content)
    status, out, err = run(capsys, "generate", "p", "--json-schema", str(file))
    assert (status, out) == (2, "") and one_line(err) and not library.loads


def test_what_a_terminal_would_obey_is_written_out(library, capsys):
    library.chunks = (CheckpointError("shard \x1b[31mred\x07: no such file é"),)
    status, _, err = run(capsys, "generate", "p")
    assert status == 2 and "\\x1b[31mred\\x07: no such file é" in one_line(err)


def test_an_output_that_could_not_go_on_is_status_2_after_its_text(library, capsys):
    library.chunks = (
        dataclasses.replace(library.chunks[0]),
        dataclasses.replace(library.chunks[1], finish_reason="dead_end", error="grammar: dead end: no token"),
    )
    status, out, err = run(capsys, "generate", "p")
    assert status == 2 and "dead end" in one_line(err) and out.startswith("one two")
    status, out, err = run(capsys, "generate", "p", "--json")
    assert status == 2 and json.loads(out)["error"] == "grammar: dead end: no token"


def test_a_bad_argument_is_told_before_a_missing_folder(tmp_path, capsys):
    """The real `load`: had it been called first, the folder would be the error."""
    options = ("generate", "p", "--target", str(tmp_path / "absent"))
    status, out, err = run(capsys, *options, "--temperature", "-1")
    assert (status, out) == (2, "")
    assert "temperature: got -1.0" in one_line(err) and "absent" not in err
    status, _, err = run(capsys, *options)
    assert status == 2 and "absent: no such folder" in one_line(err)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("temperature: got nan;\nallowed: a finite number >= 0"),
        CheckpointError("config.json: no such file"),
        UnsupportedRequestError("algorithm DDTREE does not support grammar"),
    ],
)
def test_what_the_library_refuses_is_one_line_and_status_2(library, capsys, error):
    library.chunks = (error,)
    status, out, err = run(capsys, "generate", "p")
    assert (status, out) == (2, "")
    assert " ".join(str(error).split()) in one_line(err)


@pytest.mark.parametrize("error", [InvariantError("impossible state"), KeyError("x"), RuntimeError("boom")])
def test_a_fault_of_the_program_is_status_1_with_its_traceback(library, capsys, error):
    library.chunks = (error,)
    status, _, err = run(capsys, "generate", "p")
    assert status == 1
    assert "Traceback" in err and type(error).__name__ in err


def test_a_stream_without_statistics_is_a_fault(library, capsys):
    library.chunks = ()
    assert run(capsys, "generate", "p")[0] == 1


def test_an_interrupt_is_quiet(library, capsys):
    library.chunks = (library.chunks[0], KeyboardInterrupt())
    assert run(capsys, "generate", "p") == (130, "one ", "")


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("generate", "--help"),
        ("serve", "--help"),
        ("client", "--help"),
        ("bench", "--help"),
        ("doctor", "--help"),
    ],
)
def test_help(library, capsys, argv):
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "") and out.startswith("usage: ddtree-jax")


def test_the_help_of_generate_names_every_option_of_the_contract(capsys):
    out = run(capsys, "generate", "--help")[1]
    names = "--max-new-tokens --algorithm --budget --temperature --top-k --top-p --min-p --seed --stop-token-ids"
    for name in [*names.split(), "--show-tree", "--target", "--drafter", HYBRID_FLAG, "PROMPT"]:
        assert name in out


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"ddtree-jax {ddtree_jax.__version__}\n", "")


def test_bench_prints_the_table_or_json(library, capsys, monkeypatch):
    calls = []

    def run_bench(engine, settings, *, progress):
        calls.append(settings)
        return report

    report = types.SimpleNamespace(
        table=lambda: "the table", to_dict=lambda: {"a": 1}, dtype="float32", all_identical=True
    )
    monkeypatch.setattr(bench, "run_bench", run_bench)
    assert run(capsys, "bench") == (0, "the table\n", "")
    assert calls[-1] == bench.BenchSettings()
    options = "--prompts 2 --max-new-tokens 3 --budgets 5,6,5 --batch 2 --temperature 0.5 --repeats 1 --json"
    assert run(capsys, "bench", *options.split()) == (0, '{"a": 1}\n', "")
    assert calls[-1] == bench.BenchSettings(
        prompts=2, max_new_tokens=3, budgets=(5, 6), batch=2, temperature=0.5, repeats=1
    )
    report.all_identical = False
    assert run(capsys, "bench")[0] == 1
    report.dtype = "bfloat16"
    assert run(capsys, "bench")[0] == 0


def test_a_closed_stdin_is_bad_input(library, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = run(capsys, "generate", "-")
    assert status == 2 and "stdin" in one_line(err)


@pytest.mark.parametrize(("target", "message"), [("/dev/full", "No space left"), (None, "stdout is closed")])
def test_a_stdout_that_cannot_be_written_is_one_line(target, message):
    # `--version` would do without a model, but argparse hides what goes wrong there
    code = (
        "import sys; from ddtree_jax import cli; cli._run_doctor = lambda a: print('x' * 9) or 0; sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", code, "doctor"]
    if target is None:
        done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, text=True)
    else:
        with open(target, "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and message in one_line(done.stderr)
