"""Converted folders: the same bits back on any mesh, never half of one, and every damage named."""

import collections
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, converted
from ddtree_jax.converted import convert, save_converted
from ddtree_jax.models import (
    load_drafter,
    load_target,
    make_drafter,
    make_target,
    orbax_files,
    save_drafter,
    save_target,
)
from ddtree_jax.models.folders import open_target
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import target_tensors
from tests.engine import checkpoint_files
from tests.engine.conftest import DRAFTER, TARGET

ROOT = Path(__file__).parents[2]
WIDE = dataclasses.replace(
    TARGET, hidden_size=64, q_lora_rank=48, kv_lora_rank=32, v_head_dim=16, moe_intermediate_size=32
)


def bits(leaf):
    """The bytes of an array, so that NaN and -0.0 compare as what they are."""
    return np.ascontiguousarray(np.asarray(leaf)).reshape(-1).view(np.uint8)


def assert_same(found, expected):
    found, expected = flat_leaves(found.params), flat_leaves(expected.params)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        assert (found[path].dtype, found[path].shape) == (leaf.dtype, leaf.shape), path
        np.testing.assert_array_equal(bits(found[path]), bits(leaf), err_msg=str(path))


def no_leftovers(folder):
    return not [child for child in folder.iterdir() if ".partial-" in child.name]


@pytest.fixture(scope="module")
def pair():
    target = make_target(TARGET, dtype="float32", seed=3)
    return target, make_drafter(DRAFTER, target, seed=4)


@pytest.fixture(scope="module")
def source(pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    target, drafter = pair
    save_target(target, root / "target", dtype="float32")
    save_drafter(drafter, target, root / "drafter", dtype="float32")
    return root


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """A converted pair, not to be changed."""
    output = tmp_path_factory.mktemp("whole") / "pair"
    convert(source / "target", source / "drafter", output)
    return output


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "pair")
    return tmp_path / "pair"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A target of which all that can be is packed NVFP4."""
    folder = tmp_path_factory.mktemp("packed") / "hf"
    rng = np.random.default_rng(0)
    weights = {s.name: rng.standard_normal(s.shape) for s in target_tensors(WIDE)}

    def kind(name):
        linear = name.endswith("proj.weight") or any(part in name for part in (".kv_a_proj", ".wk.", ".wq_b."))
        return "nvfp4" if linear or name == "lm_head.weight" else "float32"

    checkpoint_files.write_checkpoint(folder, weights, kind)
    (folder / "config.json").write_text(json.dumps(WIDE.to_hf()))
    return load_target(folder, dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scan", [True, False])
def test_leaves_come_back_bit_for_bit(source, tmp_path, dtype, scan):
    target = load_target(source / "target", dtype=dtype, scan=scan)
    save_converted(target, tmp_path / "target")
    again = load_target(tmp_path / "target")
    assert again.config == target.config and again.graphdef == target.graphdef and again.dtype == dtype
    assert_same(again, target)
    drafter = load_drafter(source / "drafter", target)
    save_converted(drafter, tmp_path / "drafter")
    again = load_drafter(tmp_path / "drafter", target)
    assert again.config == drafter.config and again.graphdef == drafter.graphdef
    assert_same(again, drafter)


def test_packed_kernels_come_back_packed_and_bit_for_bit(packed, tmp_path):
    save_converted(packed, tmp_path / "target")
    again = load_target(tmp_path / "target")
    assert again.graphdef == packed.graphdef
    assert_same(again, packed)
    dtypes = {np.dtype(leaf.dtype).name for leaf in flat_leaves(again.params).values()}
    assert dtypes == {"float32", "bfloat16", "uint8", "float8_e4m3fn"}


def test_every_float8_byte_survives(tmp_path):
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(8, 32)
    leaves = {("scales",): jax.numpy.asarray(scales)}
    orbax_files.write_leaves(tmp_path, leaves)
    shapes = {("scales",): jax.ShapeDtypeStruct((8, 32), scales.dtype)}
    meter = orbax_files.Meter([])
    np.testing.assert_array_equal(bits(orbax_files.read_leaves(tmp_path, shapes, meter)["scales",]), bits(scales))


def test_it_is_an_orbax_checkpoint(pair, whole):
    """Orbax itself restores the same arrays under the names of the manifest."""
    leaves = {orbax_files.leaf_name(path): leaf for path, leaf in flat_leaves(pair[0].params).items()}
    args = jax.tree.map(lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding), leaves)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(whole / "target" / "orbax", args=ocp.args.PyTreeRestore(restore_args=args))
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(bits(found[name]), bits(leaf))


@pytest.fixture
def small_pieces(monkeypatch):
    """Chunks, tiles and window so small that every large leaf is cut in all three."""
    monkeypatch.setattr(orbax_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(orbax_files, "TILE_BYTES", 4000)
    monkeypatch.setattr(orbax_files, "WINDOW_BYTES", 10_000)


def test_leaves_larger_than_a_tile_come_back_whole(pair, tmp_path, small_pieces, monkeypatch):
    tiles = []
    real = orbax_files._tiles
    monkeypatch.setattr(orbax_files, "_tiles", lambda *args: (tiles.append(t) or t for t in real(*args)))
    save_converted(pair[0], tmp_path / "target")
    assert_same(load_target(tmp_path / "target"), pair[0])
    assert max(tile.num_bytes for tile in tiles) <= 4000
    pieces = collections.Counter(tile.path for tile in tiles)
    assert pieces["head", "kernel"] > 1 and sum(count > 2 for count in pieces.values()) >= 5, pieces


def test_chunks_are_runs_of_memory(tmp_path, monkeypatch):
    """All axes before the one that is cut have one element in a chunk, all axes after it are whole."""
    monkeypatch.setattr(orbax_files, "CHUNK_BYTES", 4096)
    shapes = {("stacked",): (3, 4, 32, 2, 16), ("deep",): (5, 64, 512), ("small",): (3, 5), ("flat",): (100_000,)}
    orbax_files.write_leaves(tmp_path, {path: jax.numpy.zeros(shape) for path, shape in shapes.items()})
    leaves = {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in shapes.items()}
    for path, store in orbax_files._open_stores(tmp_path, leaves).items():
        chunk, shape = store.chunk_layout.read_chunk.shape, shapes[path]
        cut = next((axis for axis in range(len(shape)) if chunk[axis] > 1), len(shape))
        assert chunk[cut + 1 :] == shape[cut + 1 :], (path, chunk)
        assert np.prod(chunk) * 4 <= 4096


def test_no_more_than_the_window_is_read_ahead(pair, tmp_path, small_pieces, monkeypatch):
    save_converted(pair[0], tmp_path / "target")
    started, most = [0], [0]

    class Counted:
        def __init__(self, store):
            self.store, self.chunk_layout = store, store.chunk_layout

        def __getitem__(self, box):
            started[0] += 1
            return self.store[box]

    real, read_ahead = orbax_files._open_stores, orbax_files._read_ahead
    monkeypatch.setattr(orbax_files, "_open_stores", lambda *a: {p: Counted(s) for p, s in real(*a).items()})

    def watched(folder, tiles):
        for taken, item in enumerate(read_ahead(folder, tiles)):
            most[0] = max(most[0], started[0] - taken)
            yield item

    monkeypatch.setattr(orbax_files, "_read_ahead", watched)
    load_target(tmp_path / "target")
    count = started[0]
    monkeypatch.setattr(orbax_files, "WINDOW_BYTES", 0)  # one at a time
    few, started[0], most[0] = most[0], 0, 0
    load_target(tmp_path / "target")
    assert started[0] == count and most[0] <= 2 < few < count


@pytest.mark.slow
def test_another_mesh_gets_the_same_leaves(pair, tmp_path):
    """In a process of its own: four devices. Saved from one device and from one mesh, loaded on others."""
    code = """
import pathlib, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
import numpy as np
from ddtree_jax.converted import save_converted
from ddtree_jax.models import load_drafter, load_target, make_mesh, orbax_files
from ddtree_jax.models.pair import flat_leaves
root = pathlib.Path(sys.argv[1])
orbax_files.CHUNK_BYTES, orbax_files.TILE_BYTES, orbax_files.WINDOW_BYTES = 1000, 4000, 9000
plain = load_target(root / "hf", dtype="float32")
drafter = load_drafter(root / "hf-drafter", plain)
save_converted(plain, root / "from-one")
save_converted(drafter, root / "drafter-from-one")
save_converted(load_target(root / "hf", dtype="float32", mesh=make_mesh(2, 2)), root / "from-mesh")
for name in ("from-one", "from-mesh"):
    for mesh in (None, make_mesh(1, 2), make_mesh(4, 1), make_mesh(2, 2)):
        loaded = load_target(root / name, mesh=mesh)
        expected = load_target(root / "hf", dtype="float32", mesh=mesh)
        assert loaded.graphdef == expected.graphdef
        split = 0
        for path, leaf in flat_leaves(expected.params).items():
            found = flat_leaves(loaded.params)[path]
            assert found.sharding == leaf.sharding, (path, found.sharding, leaf.sharding)
            split += not leaf.sharding.is_fully_replicated
            for a, b in zip(found.addressable_shards, leaf.addressable_shards, strict=True):
                assert a.index == b.index and a.device == b.device
                np.testing.assert_array_equal(np.asarray(a.data), np.asarray(b.data), err_msg=str(path))
        assert mesh is None or split > (0 if mesh.size == 4 and mesh.shape['tensor'] == 1 else 5), (mesh, split)
sharded = load_target(root / "from-one", mesh=make_mesh(1, 2))
again = load_drafter(root / "drafter-from-one", sharded)
for path, leaf in flat_leaves(drafter.params).items():
    np.testing.assert_array_equal(np.asarray(flat_leaves(again.params)[path]), np.asarray(leaf))
print("done")
"""
    save_target(pair[0], tmp_path / "hf", dtype="float32")
    save_drafter(pair[1], pair[0], tmp_path / "hf-drafter", dtype="float32")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-3000:]


def test_the_same_tokens(source, whole):
    options = {"max_new_tokens": 12, "budget": 6, "stop_token_ids": []}
    for algorithm in ("none", "ddtree"):
        found = ddtree_jax.generate(ddtree_jax.load(whole / "target", whole / "drafter"), [1, 2, 3], **options)
        expected = ddtree_jax.generate(ddtree_jax.load(source / "target", source / "drafter"), [1, 2, 3], **options)
        assert found.token_ids == expected.token_ids and len(found.token_ids) == 12, algorithm


def test_halves_may_be_of_different_kinds(source, whole):
    assert ddtree_jax.load(whole / "target", source / "drafter").drafter is not None
    assert ddtree_jax.load(source / "target", whole / "drafter").drafter is not None


def test_a_converted_folder_converts_again(pair, whole, tmp_path):
    convert(whole / "target", None, tmp_path / "again")
    assert_same(load_target(tmp_path / "again"), pair[0])


def test_what_is_beside_the_weights_comes_along(source, tmp_path):
    folder = shutil.copytree(source / "target", tmp_path / "hf")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (folder / "tokenizer.json").write_text("any text: copied as it is")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "notes.txt").write_text("stays")
    (one,) = convert(folder, None, tmp_path / "out")
    out = tmp_path / "out"
    assert one.folder == out and one.dtype == "float32" and one.num_bytes > 100_000
    assert (out / "tokenizer.json").read_text() == "any text: copied as it is"
    assert (out / "chat_template.jinja").read_text() == "{{ x }}" and not (out / "notes.txt").exists()
    assert load_target(out).config.eos_token_ids == (7, 8)
    assert load_target(out).folder == out


def test_bytes_on_disk_are_about_those_of_the_weights(pair, whole):
    opened = open_target(whole / "target")
    weights = sum(leaf.nbytes for leaf in flat_leaves(pair[0].params).values())
    assert weights <= opened.bytes_on_disk <= 1.3 * weights + 100_000
    assert opened.bytes_per_device() == weights


def test_progress_counts_arrays(whole):
    lines = []
    load_target(whole / "target", progress=lines.append)
    assert "arrays of a converted checkpoint" in lines[0] and lines[-1].startswith("loaded target")


# ---- dtypes


def test_a_converted_folder_has_one_dtype(source, whole, tmp_path):
    with pytest.raises(ValueError, match="'bfloat16'.*'float32'"):
        ddtree_jax.load(whole / "target", whole / "drafter", dtype="bfloat16")
    assert load_target(whole / "target", dtype="float32").dtype == "float32"
    convert(source / "target", source / "drafter", tmp_path / "half", dtype="bfloat16")
    half = ddtree_jax.load(tmp_path / "half" / "target", tmp_path / "half" / "drafter")
    assert half.target.dtype == "bfloat16" and half.drafter.module().fc.kernel.dtype == "bfloat16"
    beside = ddtree_jax.load(tmp_path / "half" / "target", source / "drafter")
    assert beside.drafter.module().fc.kernel.dtype == "bfloat16", "auto follows the target"
    with pytest.raises(ValueError, match="'float32'.*drafter.*'bfloat16'"):
        load_drafter(tmp_path / "half" / "drafter", load_target(whole / "target"), dtype="float32")
    mixed = load_drafter(tmp_path / "half" / "drafter", load_target(whole / "target"))
    assert mixed.module().fc.kernel.dtype == "bfloat16", "auto takes what is stored"


# ---- outputs and interruptions


def test_an_output_in_use_is_refused_and_left_alone(source, pair, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "file").write_text("mine")
    (tmp_path / "a file").write_text("mine too")
    for output in (used, tmp_path / "a file", source / "target"):
        with pytest.raises(ValueError, match="not an empty folder"):
            convert(source / "target", None, output)
        with pytest.raises(ValueError, match="not an empty folder"):
            save_converted(pair[0], output)
    assert [child.name for child in used.iterdir()] == ["file"] and no_leftovers(tmp_path)
    (tmp_path / "empty").mkdir()
    convert(source / "target", None, tmp_path / "empty")
    assert_same(load_target(tmp_path / "empty"), pair[0])
    assert no_leftovers(tmp_path)


@pytest.mark.parametrize("output", ["", "/", "x\0y", 3, None, "a file/below"])
def test_an_output_that_cannot_be_made_is_an_argument_error(source, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").write_text("")
    with pytest.raises(ValueError, match="output"):
        convert(source / "target", None, output)
    assert no_leftovers(tmp_path)


def test_no_room_is_told_before_anything_is_loaded(source, tmp_path, monkeypatch):
    monkeypatch.setattr(converted.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    monkeypatch.setattr("ddtree_jax.models.folders.load_leaves", None)
    with pytest.raises(CheckpointError, match="GB of disk"):
        convert(source / "target", None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [OSError("no space"), KeyboardInterrupt(), RuntimeError("a fault")])
@pytest.mark.parametrize("at", ["write_leaves", "write_manifest", "first of two"])
def test_an_exception_in_the_middle_leaves_nothing(source, tmp_path, monkeypatch, at, error):
    name = "write_leaves" if at == "first of two" else at
    real, calls = getattr(converted, name), []

    def fail(*args):
        calls.append(args)
        if at == "first of two" and len(calls) == 1:
            return real(*args)
        if name == "write_manifest":
            real(*args)
        raise error

    monkeypatch.setattr(converted, name, fail)
    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
        convert(source / "target", source / "drafter", tmp_path / "out")
    assert calls and not list(tmp_path.iterdir())


def test_a_failure_of_orbax_is_one_checkpoint_error(pair, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: No space left\non device")

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(CheckpointError, match="cannot be written: RESOURCE_EXHAUSTED: No space left on device"):
        save_converted(pair[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


KILLED = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
from ddtree_jax import converted
def stop(*args):
    print("now", flush=True)
    time.sleep(600)
setattr(converted, sys.argv[3], stop)
converted.convert(sys.argv[1], None, sys.argv[2])
"""


@pytest.mark.parametrize(
    "at", [pytest.param("write_leaves", marks=pytest.mark.slow), "write_manifest", "check_room", "_sync"]
)
def test_a_killed_conversion_leaves_no_checkpoint_that_looks_whole(source, pair, tmp_path, at):
    output = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source / "target"), str(output), at], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert child.stdout.readline() == b"now\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    left = list(tmp_path.iterdir())
    if at == "check_room":
        assert not left
    elif at == "_sync":
        assert left == [output]  # it had its name already
        assert_same(load_target(output), pair[0])
    else:
        assert len(left) == 1 and left[0].name.startswith("out.partial-")
        with pytest.raises(CheckpointError, match="unfinished conversion"):
            load_target(left[0])
        left[0].rename(tmp_path / "renamed")
        with pytest.raises(CheckpointError, match="unfinished conversion|model.safetensors"):
            load_target(tmp_path / "renamed")
        convert(source / "target", None, output)  # the way is free
        assert_same(load_target(output), pair[0])


@pytest.mark.parametrize("delays", [(0.02,), pytest.param((0, 0.02, 0.1), marks=pytest.mark.slow)])
def test_a_conversion_killed_at_any_time_leaves_a_whole_folder_or_none(source, pair, tmp_path, delays):
    """Without a hook: SIGKILL as soon as the first file of the checkpoint is there, and a little later."""
    for run, delay in enumerate(delays):
        output = tmp_path / f"out{run}"
        child = subprocess.Popen([sys.executable, "-m", "ddtree_jax", "convert", "--target", str(source / "target"),
                                  "--output", str(output)], stdout=subprocess.DEVNULL, cwd=ROOT,
                                 env={**os.environ, "JAX_PLATFORMS": "cpu"})  # fmt: skip
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(f"out{run}*/orbax*")) and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(delay)
        child.kill()
        child.wait()
        if output.exists():
            assert_same(load_target(output), pair[0])
        for left in tmp_path.glob(f"out{run}.partial-*"):
            with pytest.raises(CheckpointError, match="unfinished conversion"):
                load_target(left)


# ---- damage


def _manifest(**changes):
    def damage(folder):
        path = folder / "ddtree_jax.json"
        content = json.loads(path.read_text())
        for key, value in changes.items():
            content[key] = value(content[key]) if callable(value) else value
        path.write_text(json.dumps(content))

    return damage


def _without(name):
    return lambda table: {key: value for key, value in table.items() if key != name}


def _files(folder):
    return sorted((file for file in (folder / "orbax").rglob("*") if file.is_file()), key=lambda f: -f.stat().st_size)


def _overwrite(choose):
    """Bytes replaced, sizes kept: only reading can tell."""

    def damage(folder):
        file = choose(folder)
        file.write_bytes(b"\x5a" * file.stat().st_size)

    return damage


def _swap_orbax(change):
    """Another Orbax checkpoint in its place, with a manifest that vouches for its files."""

    def damage(folder):
        leaves = {
            tuple(int(p) if p.isdigit() else p for p in name.split(".")): jax.numpy.zeros(leaf["shape"], leaf["dtype"])
            for name, leaf in json.loads((folder / "ddtree_jax.json").read_text())["leaves"].items()
        }
        change(leaves)
        shutil.rmtree(folder / "orbax")
        _manifest(files=orbax_files.write_leaves(folder, leaves))(folder)

    return damage


def _unpacked_layers(folder):
    _manifest(packed={"layers": [["mlp.no_such_kernel"], [], []], "head": False})(folder)


DAMAGES = {
    "manifest is not JSON": (lambda f: (f / "ddtree_jax.json").write_text("{"), "ddtree_jax.json"),
    "manifest is empty": (lambda f: (f / "ddtree_jax.json").write_text(""), "ddtree_jax.json"),
    "manifest is a list": (lambda f: (f / "ddtree_jax.json").write_text("[]"), "object"),
    "manifest is a dangling link": (
        lambda f: ((f / "ddtree_jax.json").unlink(), (f / "ddtree_jax.json").symlink_to("nowhere")),
        "ddtree_jax.json",
    ),
    "manifest is gone": (lambda f: (f / "ddtree_jax.json").unlink(), "unfinished conversion"),
    "another version": (_manifest(version=2), "version"),
    "version is true": (_manifest(version=True), "version"),
    "no kind": (_manifest(kind=None), "kind"),
    "the other kind": (_manifest(kind="drafter"), "expected a target"),
    "dtype of no model": (_manifest(dtype="float16"), "dtype"),
    "dtype is a list": (_manifest(dtype=["float32"]), "dtype"),
    "dtype of another model": (_manifest(dtype="bfloat16"), "leaf"),
    "scan is a number": (_manifest(scan=1), "scan"),
    "scan of another layout": (_manifest(scan=False), "leaf"),
    "packed is a list": (_manifest(packed=[]), "packed"),
    "packed by few layers": (_manifest(packed={"layers": [], "head": False}), "0 layers"),
    "packed by names that are none": (_manifest(packed={"layers": [[3], [], []], "head": False}), "packed"),
    "packed by unknown names": (_unpacked_layers, "no_such_kernel"),
    "leaf missing": (_manifest(leaves=_without("norm.weight")), "'norm.weight' is missing"),
    "leaf too many": (_manifest(leaves=lambda t: {**t, "more": t["norm.weight"]}), "'more'"),
    "leaf of another shape": (
        _manifest(leaves=lambda t: {**t, "norm.weight": {"shape": [31], "dtype": "float32"}}),
        "norm.weight",
    ),
    "leaf of another dtype": (
        _manifest(leaves=lambda t: {**t, "norm.weight": {"shape": [32], "dtype": "bfloat16"}}),
        "norm.weight",
    ),
    "leaf is a number": (_manifest(leaves=lambda t: {**t, "norm.weight": 5}), "norm.weight"),
    "leaf of a negative shape": (
        _manifest(leaves=lambda t: {**t, "norm.weight": {"shape": [-1], "dtype": "float32"}}),
        "norm.weight",
    ),
    "leaves are a list": (_manifest(leaves=[]), "leaves"),
    "files are none": (_manifest(files={}), "files"),
    "files outside": (_manifest(files={"../config.json": 3}), "files"),
    "files of nonsense size": (_manifest(files=lambda t: dict.fromkeys(t, "x")), "files"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config of another width": (
        lambda f: (f / "config.json").write_text(
            json.dumps({**json.loads((f / "config.json").read_text()), "vocab_size": 62})
        ),
        "embed",
    ),
    "no orbax folder": (lambda f: shutil.rmtree(f / "orbax"), "orbax"),
    "orbax is a file": (lambda f: (shutil.rmtree(f / "orbax"), (f / "orbax").write_text("")), "orbax"),
    "largest file gone": (lambda f: _files(f)[0].unlink(), "orbax"),
    "smallest file gone": (lambda f: _files(f)[-1].unlink(), "orbax"),
    "largest file truncated": (lambda f: os.truncate(_files(f)[0], 1000), "truncated"),
    "index overwritten": (_overwrite(lambda f: f / "orbax" / "manifest.ocdbt"), "orbax"),
    "leaf missing in Orbax": (_swap_orbax(lambda leaves: leaves.pop(("norm", "weight"))), "norm.weight"),
    "leaf too many in Orbax": (_swap_orbax(lambda leaves: leaves.update({("more",): jax.numpy.ones(3)})), "'more'"),
    "wrong shape in Orbax": (
        _swap_orbax(lambda leaves: leaves.update({("norm", "weight"): jax.numpy.ones(31)})),
        "norm.weight.*31.*32",
    ),
    "wrong dtype in Orbax": (
        _swap_orbax(lambda leaves: leaves.update({("norm", "weight"): jax.numpy.ones(32, "bfloat16")})),
        "norm.weight.*bfloat16.*float32",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(copy, name):
    damage, expected = DAMAGES[name]
    damage(copy / "target")
    with pytest.raises(CheckpointError, match=expected) as raised:
        load_target(copy / "target")
    assert str(copy) in str(raised.value) and "\n" not in str(raised.value)


def test_each_file_of_the_checkpoint_is_missed_and_each_truncation_seen(copy):
    names = [file.relative_to(copy) for file in _files(copy / "target")]
    assert len(names) > 5
    for name in names:
        raw = (copy / name).read_bytes()
        for damaged in (None, raw[:-1], raw + b"x"):
            (copy / name).unlink()
            if damaged is not None:
                (copy / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name.name):
                load_target(copy / "target")
            (copy / name).write_bytes(raw)
    load_target(copy / "target")


def test_a_lost_chunk_is_an_error_and_not_zeros(copy, monkeypatch):
    """The index no longer knows one chunk, although all files are there."""
    import tensorstore as ts

    folder = copy / "target"
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / 'orbax'}/"}}
    store = ts.KvStore.open(base).result()
    key = next(key for key in store.list().result() if key.startswith(b"norm.weight/") and b".z" not in key)
    store.delete_range(ts.KvStore.KeyRange(key, key + b"\0")).result()
    files = {f.relative_to(folder / "orbax").as_posix(): f.stat().st_size for f in _files(folder)}
    _manifest(files=files)(folder)
    with pytest.raises(CheckpointError, match="norm.weight.*cannot be read"):
        load_target(folder)


def test_random_damage_is_refused_or_harmless(copy, pair):
    """Bytes of the index and metadata files flipped at random: the right weights, or one CheckpointError."""
    rng = np.random.default_rng(0)
    weights = copy / "target" / "orbax" / "ocdbt.process_0" / "d"  # raw, without a checksum, as in safetensors
    files = [f for f in _files(copy / "target") if f.parent != weights] + [copy / "target" / "ddtree_jax.json"]
    assert weights.is_dir() and len(files) >= 6
    refused = 0
    for i in range(60):
        file = files[i % len(files)]
        raw = file.read_bytes()
        damaged = bytearray(raw)
        for at in rng.integers(0, len(raw), 3):
            damaged[at] ^= int(rng.integers(1, 256))
        file.write_bytes(bytes(damaged))
        with contextlib.suppress(CheckpointError):
            refused += 1
            loaded = load_target(copy / "target", scan=True)
            refused -= 1
            assert_same(loaded, pair[0])
        file.write_bytes(raw)
    assert refused >= 15


def test_a_drafter_in_the_targets_place(whole):
    with pytest.raises(CheckpointError, match="config.json"):
        load_target(whole / "drafter")
    with pytest.raises(CheckpointError, match="made for another target|architectures"):
        load_drafter(whole / "target", load_target(whole / "target"))


def test_a_drafter_of_another_target_is_refused(whole, pair):
    other = make_target(dataclasses.replace(TARGET, num_hidden_layers=3, vocab_size=64), dtype="float32")
    with pytest.raises(CheckpointError, match="vocab_size"):
        load_drafter(whole / "drafter", other)


def test_an_hf_folder_with_a_subfolder_of_that_name_is_no_conversion(source, tmp_path):
    folder = shutil.copytree(source / "target", tmp_path / "hf")
    (folder / "orbax").mkdir()
    assert load_target(folder).config == TARGET
