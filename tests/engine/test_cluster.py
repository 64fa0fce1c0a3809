"""Several processes as one, through the command line; and what is refused before anything waits for another process."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ddtree_jax
from ddtree_jax import cli, cluster
from tests.engine.mesh_worker import write_pair

ROOT = Path(__file__).parents[2]
PROMPT = [3, 14, 15, 9, 26, 5]
SECONDS = 240


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    write_pair(root, "few packed")
    return root


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def run_together(*arguments, count=2):
    """(status, stdout, stderr) of each of `count` processes with two virtual devices; all are ended in time."""
    flags = ("--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count), "--process-id")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "ddtree_jax", *arguments, *flags, str(i)],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        outputs = [process.communicate(timeout=max(1, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def model(folders):
    return ("--target", str(folders / "target"), "--drafter", str(folders / "drafter"), "--mesh", "2x2")


def generate(folders, *options):
    ids = ",".join(map(str, PROMPT))
    return ("generate", ids, "--token-ids", "--max-new-tokens", "12", "--budget", "6", *model(folders), *options)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(folders):
    (status, out, err), other = run_together(*generate(folders, "--json"))
    assert (status, err) == (0, "") and other == (0, "", "")
    document = json.loads(out)  # and nothing else: collectives say nothing on stdout
    engine = ddtree_jax.load(folders / "target", folders / "drafter")
    alone = ddtree_jax.generate(engine, PROMPT, 12, "ddtree", 6)
    assert document["token_ids"] == alone.token_ids and len(alone.token_ids) == 12
    assert tuple(document["stats"]["acceptance_lengths"]) == alone.stats.acceptance_lengths


@pytest.mark.slow
def test_text_and_trees_of_the_shipped_pair(demo_engine):
    prompt = "def add(a, b):\n"
    options = ("--max-new-tokens", "24", "--show-tree", "--mesh", "2x2")
    (status, out, err), other = run_together("generate", prompt, *options)
    assert (status, err) == (0, "") and other == (0, "", "")
    text = ddtree_jax.generate(demo_engine, prompt, 24).text
    assert out.startswith(text) and "(root)" in out and out.splitlines()[-1].startswith("[ddtree budget 32] ")


def one_line(outcome):
    status, out, err = outcome
    assert (status, out) == (2, ""), outcome
    (line,) = err.splitlines()
    assert line.startswith("ddtree-jax: error: ")
    return line


def test_what_is_found_after_joining_is_one_line_in_each_process(folders, tmp_path):
    arguments = list(generate(folders))
    arguments[arguments.index("2x2")] = "4x2"
    for outcome in run_together(*arguments):
        assert "needs 8 devices" in one_line(outcome)


@pytest.mark.slow
def test_a_mesh_without_a_device_of_some_process(folders):
    arguments = list(generate(folders))
    arguments[arguments.index("2x2")] = "1x2"
    assert "no device of process 1" in one_line(run_together(*arguments)[1])


FLAGS = {"--coordinator": "127.0.0.1:4567", "--num-processes": "2", "--process-id": "0"}
BAD = [
    *({"--coordinator": bad} for bad in (None, "", "here", "here:", ":4567", "here:0", "here:65536", "a b:1", "h:1:2")),
    *({"--coordinator": bad} for bad in ("http://here:1", "[::1]", "here:99999999", "::1:4567")),
    *({"--num-processes": bad} for bad in (None, "0", "-1", "two", "1.5")),
    *({"--process-id": bad} for bad in (None, "-1", "2", "one")),
    {"--num-processes": None, "--process-id": None},
    {"--coordinator": None, "--process-id": None},
    {"--mesh": "2x"},
    {"--mesh": "0"},
    {"--coordinator": "no.such.host.invalid:4567"},
    {"--coordinator": "x" * 80 + ":4567"},
]


@pytest.fixture
def never_joins(monkeypatch):
    """Joining would turn this process into one of several, for good."""

    def refuse(*args, **kwargs):
        raise AssertionError("joined")

    monkeypatch.setattr("jax.distributed.initialize", refuse)
    monkeypatch.setattr(cluster, "_own_stdout", refuse)


@pytest.mark.parametrize("changes", BAD, ids=lambda changes: " ".join(f"{k} {v}" for k, v in changes.items())[:50])
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_bad_flags(capsys, never_joins, command, changes):
    flags = {name: value for name, value in (FLAGS | changes).items() if value is not None}
    arguments = [part for name, value in flags.items() for part in (name, value)]
    assert cli.main([command, *(["x"] if command == "generate" else []), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("ddtree-jax: error: ")
    words = {name.strip("-").replace("-", "_") for name in (*FLAGS, "--mesh")}
    assert any(word in line.replace("-", "_") for word in words)


def test_a_port_that_is_taken(capsys, never_joins):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"^coordinator: .*port {port} of this host cannot be used"):
            cluster.join_cluster(f"localhost:{port}", 2, 0)


def test_a_coordinator_that_does_not_answer(never_joins, monkeypatch):
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 0.3)
    with pytest.raises(ValueError, match=r"^coordinator: .*no process 0 answered within 0.3 s"):
        cluster.join_cluster(f"127.0.0.1:{free_port()}", 2, 1)


def test_alone_nothing_is_joined(never_joins):
    assert cluster.join_cluster(None, None, None) is False


def test_the_mesh_reaches_load(monkeypatch):
    loads = []

    def load(*args, **kwargs):
        loads.append((args, kwargs))
        raise ddtree_jax.CheckpointError("enough")

    monkeypatch.setitem(vars(ddtree_jax), "load", load)
    for mesh in ("1x1", "1"):
        assert cli.main(["generate", "x", "--mesh", mesh]) == 2
    expected = {"dtype": "auto", "mesh": ddtree_jax.make_mesh(), "kernels": "auto"}
    expected |= {"allow_hybrid_unsafe": False, "progress": None}
    for where, options in loads:
        options.pop("check")
        assert (where, options) == (("demo", None), expected)
    assert len(loads) == 2


@pytest.mark.parametrize(("text", "sizes"), [("2x4", (2, 4)), ("8", (1, 8)), ("1x1", (1, 1)), ("16x1", (16, 1))])
def test_meshes_as_text(text, sizes):
    assert cluster.parse_mesh(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "x", "2x", "x2", "0", "0x2", "2x0", "-1x2", "2X4", "2x4x1", "2 x 4", "1.0", "٣", "1" * 7]
)
def test_other_texts_are_no_meshes(text):
    with pytest.raises(ValueError, match="^mesh: got .*allowed is EXPERTxTENSOR"):
        cluster.parse_mesh(text)
