"""Safetensors files and indices: every dtype maps, and all damage is one `CheckpointError` that names its place."""

import json
import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from ddtree_jax import CheckpointError
from ddtree_jax.safetensors_files import (
    INDEX_NAME,
    MAPPED_DTYPES,
    CheckpointReader,
    map_tensor,
    read_header,
    read_json,
    shown,
    write_json,
    write_safetensors,
)

F4 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def write(path, header, data=b"", length=None):
    """A file with this header (text or object), however wrong."""
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def refused(path, *parts):
    """`CheckpointError` on reading the file, naming it and every part."""
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as raised:
        read_header(path)
    for part in parts:
        assert part in str(raised.value)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize("name", MAPPED_DTYPES)
def test_every_dtype_maps(tmp_path, name):
    dtype = MAPPED_DTYPES[name]
    raw = np.random.default_rng(0).integers(0, 2, 6 * dtype.itemsize, np.uint8)
    tensors = {"odd": np.zeros(1, np.uint8), "x": raw.view(dtype).reshape(2, 3), "none": np.zeros((0, 5), dtype)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    reader = CheckpointReader(tmp_path)
    assert reader.entries["x"].dtype == name and reader.entries["x"].num_bytes == raw.size
    got = map_tensor(reader.entries["x"])
    assert got.dtype == dtype and got.shape == (2, 3) and not got.flags.writeable
    np.testing.assert_array_equal(np.ascontiguousarray(got).reshape(-1).view(np.uint8), raw)
    assert map_tensor(reader.entries["none"]).shape == (0, 5) and not map_tensor(reader.entries["none"]).flags.writeable


def test_float8_bytes_keep_their_meaning(tmp_path):
    raw = np.arange(256, dtype=np.uint8)
    header = {"x": {"dtype": "F8_E4M3", "shape": [256], "data_offsets": [0, 256]}}
    path = write(tmp_path / "model.safetensors", header, raw.tobytes())
    got = map_tensor(read_header(path)["x"])
    assert got.dtype == ml_dtypes.float8_e4m3fn and got[0x7E] == 448 and got[0x38] == 1 and np.isnan(got[0xFF])


def test_dtypes_that_cannot_be_read_are_in_nobodys_way(tmp_path):
    header = {"a": F4, "b": {"dtype": "F4", "shape": [8], "data_offsets": [4, 8]}}
    write(tmp_path / "model.safetensors", header, bytes(8))
    reader = CheckpointReader(tmp_path)
    assert map_tensor(reader.entries["a"]).tolist() == [0]
    with pytest.raises(CheckpointError, match="dtype F4 cannot be read"):
        map_tensor(reader.entries["b"])


def entry(**changes):
    return {"a": F4 | changes}


@pytest.mark.parametrize(
    ("header", "parts"),
    [
        ("", ["not JSON"]),
        ("{", ["not JSON"]),
        (b"\xff\xfe{}", ["not JSON"]),
        ('{"a":1}'.encode("utf-16-le"), ["not JSON"]),
        ("[]", ["expected an object"]),
        ("5", ["expected an object"]),
        ({"a": None}, ["'a'", "not an object"]),
        (entry(dtype="F33"), ["'a'", "unknown dtype 'F33'"]),
        (entry(dtype=None), ["'a'", "unknown dtype"]),
        (entry(dtype="F" * 10**5), ["'a'", "unknown dtype", "100002 characters"]),
        (entry(shape=[1.0]), ["'a'", "integers"]),
        (entry(shape=[True]), ["'a'", "integers"]),
        (entry(shape=[-1]), ["'a'", "integers"]),
        (entry(shape="1"), ["'a'", "integers"]),
        (entry(shape=[10**4000]), ["'a'", "integers"]),
        (entry(shape=[2**61, 2**61, 4]), ["'a'", "absurd shape"]),
        (entry(shape=[0, 2**61, 2**61], data_offsets=[4, 4]), ["'a'", "absurd shape"]),
        (entry(shape=[1] * 40), ["'a'", "absurd shape"]),
        (entry(shape=[2**61 - 1]), ["'a'", "absurd shape"]),
        (entry(shape=[2**40]), ["'a'", "4 bytes, expected"]),
        (entry(shape=[2]), ["'a'", "4 bytes, expected 8"]),
        (entry(data_offsets=[0]), ["'a'", "integers"]),
        (entry(data_offsets=[4, 0]), ["'a'", "-4 bytes, expected 4"]),
        (entry(data_offsets=[-4, 0]), ["'a'", "integers"]),
        (entry(data_offsets=[0, 10**4000]), ["'a'", "integers"]),
        (entry(data_offsets=[8, 12]), ["'a'", "truncated"]),
        ({"a": {"dtype": "F32", "shape": [1]}}, ["'a'", "integers"]),
        (entry() | {"b": F4}, ["'b'", "overlaps tensor 'a'"]),
        ('{"a":%s,"a":%s}' % ((json.dumps(F4),) * 2), ["'a' is given twice"]),
        ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', ["'dtype' is given twice"]),
        ({"a": {"dtype": "F4", "shape": [7], "data_offsets": [0, 3]}}, ["'a'", "expected 3"]),
    ],
)
def test_damaged_headers(tmp_path, header, parts):
    data = bytes(4)
    refused(write(tmp_path / "model.safetensors", header, data), *parts)


@pytest.mark.parametrize("missing", range(1, 8))
def test_a_header_length_that_cuts_only_padding(tmp_path, missing):
    raw = json.dumps(entry()).encode()
    raw += b" " * 7
    path = write(tmp_path / "model.safetensors", raw, bytes(4))
    assert read_header(path)["a"].start == 8 + len(raw)
    refused(write(path, raw, bytes(4), length=len(raw) - missing), "damaged header")


def test_files_that_are_too_short_or_too_long(tmp_path):
    path = write(tmp_path / "model.safetensors", entry(), bytes(4))
    raw = path.read_bytes()
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        refused(path)
    path.write_bytes(raw + b"\0")
    refused(path, "damaged header")
    for length in (2**63, 2**64 - 1, len(raw) - 7, 10**9):
        path.write_bytes(struct.pack("<Q", length) + raw[8:])
        refused(path, "truncated")


def test_a_file_cut_after_its_header_was_read(tmp_path):
    path = write(tmp_path / "model.safetensors", entry(), bytes(4))
    reader = CheckpointReader(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        map_tensor(reader.entries["a"])


@pytest.fixture
def sharded(tmp_path):
    for i, name in enumerate("ab"):
        write_safetensors(tmp_path / f"model-{i}.safetensors", {name: np.full(3, i, np.float32)})
    write_json(tmp_path / INDEX_NAME, {"weight_map": {"a": "model-0.safetensors", "b": "model-1.safetensors"}})
    return tmp_path


def index_refused(folder, *parts):
    with pytest.raises(CheckpointError, match=re.escape(str(folder))) as raised:
        CheckpointReader(folder)
    for part in parts:
        assert part in str(raised.value)


def test_the_index_says_what_belongs(sharded):
    stale = {"a": np.full(3, 9, np.float32), "model.layers.9.eh_proj.weight": np.zeros(2, np.float32)}
    write_safetensors(sharded / "mtp.safetensors", stale)
    (sharded / "broken.safetensors").write_bytes(b"no header at all")
    os.mkfifo(sharded / "pipe.safetensors")
    write_safetensors(sharded / "model-1.safetensors", {"b": np.ones(3, np.float32), "unnamed": np.ones(1, np.int8)})
    write_safetensors(sharded / "model.safetensors", stale)
    reader = CheckpointReader(sharded)
    assert sorted(reader.entries) == ["a", "b"]
    assert [map_tensor(reader.entries[name]).tolist() for name in "ab"] == [[0, 0, 0], [1, 1, 1]]


def test_links_as_in_a_download_cache(sharded, tmp_path):
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(sharded.glob("*.safetensors*"))):
        file.rename(blobs / f"{i:x}")
        file.symlink_to(blobs / f"{i:x}")
    assert map_tensor(CheckpointReader(sharded).entries["b"]).tolist() == [1, 1, 1]
    (blobs / "0").unlink()
    index_refused(sharded, "model-0.safetensors", "missing a shard")


@pytest.mark.parametrize(
    "shard",
    [
        *("../model-1.safetensors", "/etc/model.safetensors", "sub/model-1.safetensors", "./model-1.safetensors", ""),
        *("..", ".", "model-1.bin", None, 5, [], {}, "a\0.safetensors", "\ud800.safetensors"),
        *("model-2.safetensors", "x" * 5000 + ".safetensors"),
    ],
)
def test_an_index_that_points_to_no_shard_here(sharded, shard):
    (sharded / "sub").mkdir()
    write_safetensors(sharded / "sub" / "model-1.safetensors", {"b": np.zeros(3, np.float32)})
    write_json(sharded.parent / "model-1.safetensors", {})
    content = {"weight_map": {"a": "model-0.safetensors", "b": shard}}
    (sharded / INDEX_NAME).write_text(json.dumps(content))
    with pytest.raises(CheckpointError):
        CheckpointReader(sharded)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"weight_map": {"a": "model-0.safetensors", "a": "model-1.safetensors"}}', "'a' is given twice"),
        ('{"weight_map": {"a": "model-0.safetensors"}, "weight_map": {}}', "'weight_map' is given twice"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        ('{"weight_map": ["a"]}', "no 'weight_map'"),
        ("[]", "no 'weight_map'"),
        ("", "JSON"),
        ('{"weight_map": {"a": "model-1.safetensors"}}', "'a' is missing"),
        ('{"weight_map": {"a": "model-0.safetensors", "b": "model-0.safetensors"}}', "'b' is missing"),
        ('{"weight_map": {"c": "model-0.safetensors"}}', "'c' is missing"),
    ],
)
def test_damaged_indices(sharded, text, part):
    (sharded / INDEX_NAME).write_text(text)
    index_refused(sharded, part)


def test_a_tensor_that_lies_in_two_shards(sharded):
    write_safetensors(sharded / "model-1.safetensors", {"b": np.ones(3, np.float32), "a": np.ones(3, np.float32)})
    index_refused(sharded, "model-1.safetensors", "'a'", "which of the two")


@pytest.mark.parametrize("name", ["model-0.safetensors", INDEX_NAME])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "dangling"])
def test_what_is_no_regular_file(sharded, name, kind):
    write_safetensors(sharded / "model.safetensors", {"a": np.zeros(1, np.float32)})  # no way out for a bad index
    path = sharded / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else sharded / "gone")
    index_refused(sharded, name)


def test_only_the_index_must_be_free_of_repeated_names(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    assert read_json(tmp_path / "config.json") == {"a": 2}


def test_shown_is_short():
    assert shown("a") == "'a'"
    assert len(shown("a" * 10**6)) < 250
