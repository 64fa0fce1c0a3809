"""`doctor --target`: what a folder holds and needs, without reading its weights; bad folders are one line."""

import json
import shutil

import pytest

from ddtree_jax import cli
from ddtree_jax.engine import demo_folder


@pytest.fixture(autouse=True)
def no_weights_are_read(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr("ddtree_jax.models.folders.load_leaves", refuse)


def output(capsys, *options):
    assert cli.main(["doctor", *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys, *options):
    assert cli.main(["doctor", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ddtree-jax: error: ")
    (line,) = captured.err.splitlines()
    return line


def test_text(capsys):
    out = output(capsys, "--target", "demo-nvfp4")
    lines = out.splitlines()
    assert lines[0].split() == ["target", str(demo_folder() / "target-nvfp4")]
    assert "0.014 billion parameters" in lines[1] and "GB on disk" in lines[1]
    assert "336 NVFP4 (ModelOpt)" in lines[2] and "plain" in lines[2]
    assert lines[3].split() == ["drafter", str(demo_folder() / "drafter")]
    assert "1 x 4096 tokens" in out and out.rstrip().endswith("fits") and "host memory" in out


def test_a_target_alone(capsys):
    out = output(capsys, "--target", str(demo_folder() / "target"))
    assert "drafter" not in out and "target cache" in out and "NVFP4" not in out


@pytest.mark.parametrize("mesh", ["8", "2x4", "64x8", "1021x1019"])
def test_json_over_meshes_larger_than_the_machine(capsys, mesh):
    whole = json.loads(output(capsys, "--target", "demo", "--json"))
    options = ("--mesh", mesh, "--context", "100000", "--batch", "64", "--json")
    found = json.loads(output(capsys, "--target", "demo", *options))
    assert [line[0] for line in found["folders"]] == [line[0] for line in whole["folders"]] and len(
        found["folders"]
    ) == 2
    capacity = found["capacity"]
    assert capacity["available"] is None and capacity["fits"] is True
    names = [need["what"] for need in capacity["needs"]]
    assert names[2:] == ["target cache, 64 x 100000 tokens", "drafter cache, 64 x 100000 tokens"]
    weights = capacity["needs"][0]
    assert weights["total"] == whole["capacity"]["needs"][0]["total"]
    assert (weights["per_device"] < weights["total"]) == (mesh != "1021x1019")  # prime: divides nothing


def test_context_batch_and_dtype_count(capsys):
    def needs(*options):
        return json.loads(output(capsys, "--target", "demo", "--json", *options))["capacity"]["needs"]

    one, other = needs("--context", "1000"), needs("--context", "2000", "--batch", "3", "--dtype", "bfloat16")
    assert other[0]["total"] < 0.6 * one[0]["total"]
    assert other[2]["total"] == pytest.approx(3 * one[2]["total"], rel=1e-3)


def test_what_does_not_fit_is_said_and_is_no_error(capsys, monkeypatch):
    monkeypatch.setattr("ddtree_jax.capacity.host_memory_free", lambda: 10**7)
    assert output(capsys, "--target", "demo").rstrip().endswith("does not fit")
    capacity = json.loads(output(capsys, "--target", "demo", "--json"))["capacity"]
    assert (capacity["fits"], capacity["available"]) == (False, 10**7)


def test_bad_folders(capsys, tmp_path):
    target, drafter = demo_folder() / "target", demo_folder() / "drafter"
    shutil.copytree(target, tmp_path / "cut")
    with open(tmp_path / "cut" / "model-00002-of-00002.safetensors", "r+b") as file:
        file.truncate(10**6)
    shutil.copytree(drafter, tmp_path / "foreign")
    config = json.loads((drafter / "config.json").read_text())
    (tmp_path / "foreign" / "config.json").write_text(json.dumps(config | {"num_target_layers": 78}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd\nname").mkdir()
    bad = {
        "no such folder": ("--target", str(tmp_path / "nowhere")),
        "config.json": ("--target", str(tmp_path / "empty")),
        "odd name": ("--target", str(tmp_path / "odd\nname")),
        "truncated": ("--target", str(tmp_path / "cut")),
        "num_target_layers": ("--target", str(target), "--drafter", str(tmp_path / "foreign")),
        "architectures": ("--target", str(target), "--drafter", str(target)),
        "model_type": ("--target", str(drafter)),
        "empty string": ("--target", ""),
        "such folder": ("--target", "\0"),
    }
    for message, options in bad.items():
        for more in ((), ("--json",), ("--mesh", "2x4")):
            assert message in refused(capsys, *options, *more)


@pytest.mark.parametrize(
    "options",
    [
        *(
            ("--mesh", bad)
            for bad in ("0x1", "1x0", "2x", "x2", "-1", "2x4x8", "two", "", "1e3", "9999999", "2 x 4", "999983x999983")
        ),
        *(("--context", bad) for bad in ("0", "-1", "2147483648", "1.5", "many", "9" * 5000)),
        *(("--batch", bad) for bad in ("0", "-1", "2147483648", "1.5")),
        *(("--dtype", bad) for bad in ("int8", "float64", "")),
    ],
    ids=lambda options: " ".join(options)[:30],
)
def test_bad_options(capsys, options):
    assert options[0].strip("-") in refused(capsys, "--target", "demo", *options)


@pytest.mark.parametrize("options", [("--drafter", "demo"), ("--mesh", "2x4")])
def test_options_that_need_a_target(capsys, options):
    assert "--target" in refused(capsys, *options)
