"""HF-format folders on disk: safetensors headers, memory-mapped reading, parameter trees in and out.

The reader parses safetensors headers itself: numpy has no bfloat16 or float8, and a damaged file must give one clear
`CheckpointError` naming file and tensor, before anything is allocated.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.params import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 200_000_000
MAX_SHARD_BYTES = 15_000_000

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
OTHER_SIZES: Mapping[str, int] = {
    **{name: 1 for name in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0")},
    **{"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8},
}


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A tensor as its file's header describes it; `start` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_json(path: Path) -> Any:
    """A JSON file, or `CheckpointError` naming it."""
    try:
        _check_regular(path, MAX_JSON_BYTES)
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found; expected an HF-format checkpoint folder") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or an absurd number
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None


def _check_regular(path: Path, limit: int | None = None) -> None:
    """A pipe or a device in a file's place could block or never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if limit is not None and found.st_size > limit:
        raise CheckpointError(f"{path}: {found.st_size} bytes, expected at most {limit}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name given twice is a fault, where `json` would silently keep the last."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} is given twice")
    return out


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, each checked to lie inside the file."""
    try:
        _check_regular(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file (truncated?)")
            (length,) = struct.unpack("<Q", prefix)
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(f"{path}: header of {length} bytes in a file of {size} bytes (truncated?)")
            raw = file.read(length)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found; the checkpoint is missing a shard") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"{str(path)!r}: cannot be read: {error}") from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for (before, first), (name, second) in itertools.pairwise(ordered):
        if second.start < first.start + first.num_bytes:
            raise CheckpointError(f"{path}: tensor {name!r}: overlaps tensor {before!r}")
    return entries


def _entry(path: Path, name: str, info: Any, data_start: int, size: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(info, dict):
        raise CheckpointError(f"{where}: entry is not an object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")
    item = FLOAT_DTYPES[dtype].itemsize if dtype in FLOAT_DTYPES else OTHER_SIZES.get(dtype)
    if item is None:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r}")

    def integers(value: Any) -> bool:
        return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)

    if not integers(shape) or not integers(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: shape {shape!r} or data_offsets {offsets!r} are not lists of integers >= 0")
    start, end = offsets
    expected = math.prod(shape) * item
    if end - start != expected:
        raise CheckpointError(f"{where}: {end - start} bytes, expected {expected} for {dtype} {shape}")
    if data_start + end > size:
        raise CheckpointError(f"{where}: ends at byte {data_start + end} of a file of {size} bytes (truncated?)")
    return TensorEntry(path, dtype, tuple(shape), data_start + start, expected)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder; False too for a name that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


class CheckpointReader:
    """The tensors of a folder, by name. Opening it reads every header and no data."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not is_folder(folder):
            raise CheckpointError(f"{folder}: no such folder; expected an HF-format checkpoint folder")
        index = folder / INDEX_NAME
        self.entries = self._indexed(index) if index.exists() else read_header(folder / SINGLE_NAME)

    def _indexed(self, index: Path) -> dict[str, TensorEntry]:
        content = read_json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no 'weight_map' object")
        headers: dict[str, dict[str, TensorEntry]] = {}
        entries = {}
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(f"{index}: tensor {name!r} points to {shard!r}, expected a file in this folder")
            if shard not in headers:
                headers[shard] = read_header(self.folder / shard)
            if name not in headers[shard]:
                raise CheckpointError(
                    f"{self.folder / shard}: tensor {name!r} is missing; {index.name} says it is here"
                )
            entries[name] = headers[shard][name]
        return entries

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises `CheckpointError` unless every tensor is there with its shape and a float dtype."""
        for spec in specs:
            entry = self.entries.get(spec.name)
            if entry is None:
                raise CheckpointError(f"{self.folder}: tensor {spec.name!r} is missing, expected shape {spec.shape}")
            where = f"{entry.file}: tensor {spec.name!r}"
            if entry.dtype not in FLOAT_DTYPES:
                allowed = ", ".join(FLOAT_DTYPES)
                raise CheckpointError(f"{where}: dtype {entry.dtype}, this version reads {allowed}")
            if entry.shape != spec.shape:
                raise CheckpointError(f"{where}: shape {entry.shape}, expected {spec.shape}")

    def array(self, name: str) -> np.ndarray:
        """A read-only memory map of one tensor."""
        entry = self.entries[name]
        dtype = FLOAT_DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return np.zeros(entry.shape, dtype)
        return np.memmap(entry.file, dtype, "r", entry.start, entry.shape)


def load_leaves(
    reader: CheckpointReader,
    specs: Iterable[TensorSpec],
    leaves: Mapping[tuple, Any],
    progress: Callable[[str], None] | None = None,
) -> dict[tuple, np.ndarray]:
    """Reads a checkpoint into host arrays.

    Args:
      specs: the name map of the model.
      leaves: path -> anything with shape and dtype, every parameter leaf of the model.

    Returns:
      path -> numpy array of that leaf's shape and dtype. Raises `CheckpointError` before reading any data if a tensor
      is missing or has the wrong shape or dtype, and when a weight is not finite.
    """
    specs = list(specs)
    reader.check(specs)
    out = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in leaves.items()}
    filled = dict.fromkeys(leaves, 0)
    for i, spec in enumerate(specs):
        tensor = reader.array(spec.name)
        if not np.isfinite(tensor.astype(np.float32, copy=False)).all():
            raise CheckpointError(f"{reader.entries[spec.name].file}: tensor {spec.name!r}: NaN or infinite values")
        for part in spec.parts:
            view = part.view(tensor)
            out[part.leaf][part.index] = view
            filled[part.leaf] += view.size
        if progress is not None and (i + 1) % 64 == 0:
            progress(f"loading weights: {i + 1} of {len(specs)} tensors")
    incomplete = [path for path, leaf in leaves.items() if filled[path] != math.prod(leaf.shape)]
    assert not incomplete, f"the name map leaves parameters unset: {incomplete}"
    return out


def save_leaves(
    folder: Path, specs: Iterable[TensorSpec], leaves: Mapping[tuple, Any], *, dtype: Any = ml_dtypes.bfloat16
) -> list[Path]:
    """Writes parameter leaves as safetensors shards of at most 15 MB (more if one tensor is larger), with an index.

    Each file is written under a temporary name and renamed; the index comes last, so an interrupted save leaves no
    folder that looks whole. Returns the files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, np.ndarray]] = [{}]
    used = 0
    for spec in specs:
        tensor = np.empty(spec.shape, np.float32 if spec.float32 else dtype)
        for part in spec.parts:
            part.view(tensor)[...] = np.asarray(leaves[part.leaf])[part.index]
        if shards[-1] and used + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][spec.name] = tensor
        used += tensor.nbytes
    if len(shards) == 1:
        written = _write_safetensors(folder / SINGLE_NAME, shards[0])
        (folder / INDEX_NAME).unlink(missing_ok=True)  # of an earlier, larger save: a reader would follow it
        return [written]
    files, weight_map, total = [], {}, 0
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        files.append(_write_safetensors(folder / name, shard))
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return [*files, write_json(folder / INDEX_NAME, index)]


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    names = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_suffix(path.suffix + ".partial")
    with temporary.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
    os.replace(temporary, path)
    return path


def write_json(path: Path, content: Any) -> Path:
    """Writes JSON under a temporary name and renames it."""
    temporary = path.with_suffix(path.suffix + ".partial")
    temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path
