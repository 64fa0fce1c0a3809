"""`ddtree-jax convert` as a user runs it: what it prints, what it refuses, and that the folder it makes is one."""

import pytest

import ddtree_jax
from ddtree_jax import cli
from ddtree_jax.engine import demo_folder
from ddtree_jax.models.pair import flat_leaves


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = cli.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.slow
def test_the_shipped_pair_converts_and_generates_the_same(demo_engine, capsys, tmp_path):
    status, out, err = run(capsys, "convert", "--output", str(tmp_path / "pair"))
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(tmp_path / "pair" / n) for n in ("target", "drafter")]
    assert all("MB in float32" in line and "loaded in" in line and "written in" in line for line in lines)
    engine = ddtree_jax.load(tmp_path / "pair" / "target", tmp_path / "pair" / "drafter")
    assert engine.tokenizer.vocab_size == demo_engine.tokenizer.vocab_size
    assert engine.stop_token_ids == demo_engine.stop_token_ids
    for found, expected in ((engine.target, demo_engine.target), (engine.drafter, demo_engine.drafter)):
        assert found.graphdef == expected.graphdef
        for path, leaf in flat_leaves(expected.params).items():
            assert bool((flat_leaves(found.params)[path] == leaf).all()), path
    options = {"max_new_tokens": 24, "budget": 8}
    results = [ddtree_jax.generate(e, "def add(a, b):\n", **options) for e in (engine, demo_engine)]
    assert results[0].token_ids == results[1].token_ids and results[0].text == results[1].text


def test_a_target_alone_becomes_the_output_itself(capsys, tmp_path):
    arguments = ("--target", str(demo_folder() / "target"), "--output", str(tmp_path / "new" / "out"))
    status, out, err = run(capsys, "convert", *arguments, "--dtype", "bfloat16")
    assert (status, err, out.count("\n")) == (0, "", 1) and "MB in bfloat16" in out
    assert ddtree_jax.load(tmp_path / "new" / "out").target.dtype == "bfloat16"
    status, out, err = run(capsys, "convert", *arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and "not an empty folder" in err
    status, out, err = run(capsys, "generate", "x", "--target", str(tmp_path / "new" / "out"), "--dtype", "float32")
    assert status == 2 and out == "" and err.count("\n") == 1 and "'float32'" in err and "'bfloat16'" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--output"),
        (["--output", ""], "output"),
        (["--output", "out", "--target", "./no/such/folder"], "no such folder"),
        (["--output", "out", "--drafter", "./no/such/folder"], "no such folder"),
        (["--output", "out", "--dtype", "int8"], "dtype"),
        (["--output", "out", "--out", "more"], "--out"),
        (["--output", "a file"], "not an empty folder"),
        (["--output", "a file/below"], "cannot be made"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys, tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_text("")
    status, out, err = run(capsys, "convert", *arguments)
    assert (status, out) == (2, "") and err.count("\n") == 1 and expected in err, err
    assert [child.name for child in tmp_path.iterdir()] == ["a file"]


def test_an_interruption_is_its_own_status_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree_jax.converted.write_manifest", interrupt)
    status, out, _ = run(capsys, "convert", "--output", str(tmp_path / "out"))
    assert (status, out) == (130, "") and not list(tmp_path.iterdir())
