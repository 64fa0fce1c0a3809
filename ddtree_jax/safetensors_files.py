"""Safetensors files and their index: headers, checked; tensors, memory-mapped; files, written.

The headers are parsed here: safetensors' own loader has no float8 without torch, and a damaged file must give one clear
`CheckpointError` naming file and tensor, before anything is mapped or allocated.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_JSON_BYTES = 200_000_000
MAX_RANK = 32
MAX_BYTES = 2**62  # of a tensor, an offset or a dimension: beyond it numpy's own arithmetic overflows

FLOAT_DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAPPED_DTYPES: Mapping[str, np.dtype] = {
    **FLOAT_DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BOOL": np.dtype(np.bool_),
    **{"I8": np.dtype(np.int8), "I16": np.dtype(np.int16), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)},
    **{"U8": np.dtype(np.uint8), "U16": np.dtype(np.uint16), "U32": np.dtype(np.uint32), "U64": np.dtype(np.uint64)},
}
# Known to the format, of no use here: a file may hold such a tensor as long as nobody asks for it.
OTHER_BITS: Mapping[str, int] = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "C64": 64}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as its file's header describes it; `start` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def shown(value: Any) -> str:
    """`repr`, cut: a damaged file can hold a value of megabytes."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:180]}... ({len(text)} characters)"


def read_json(path: Path, *, unique: bool = False) -> Any:
    """A JSON file, or `CheckpointError` naming it; `unique` refuses an object that gives a name twice."""
    try:
        _check_regular(path, MAX_JSON_BYTES)
        text = path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file not found; expected an HF-format checkpoint folder") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, or an absurd number
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None


def _check_regular(path: Path, limit: int | None = None) -> int:
    """The file's size; a pipe or a device in its place could block or never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    if limit is not None and found.st_size > limit:
        raise CheckpointError(f"{path}: {found.st_size} bytes, expected at most {limit}")
    return found.st_size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name given twice is a fault, where `json` would silently keep the last."""
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = next(name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{shown(twice)} is given twice")
    return out


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file, each checked to lie inside the file and apart from the others."""
    try:
        size = _check_regular(path)
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
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, info, 8 + length, size) for name, info in header.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].num_bytes))
    for (before, first), (name, second) in itertools.pairwise(ordered):
        if second.start < first.start + first.num_bytes:
            raise CheckpointError(f"{path}: tensor {shown(name)}: overlaps tensor {shown(before)}")
    # Headers are padded with spaces, so a damaged length can leave whole JSON and shift every tensor by some bytes.
    # The end of the last tensor gives it away.
    end = max((entry.start + entry.num_bytes for entry in entries.values()), default=8 + length)
    if end != size:
        raise CheckpointError(
            f"{path}: {size} bytes, but the header of {length} bytes describes {end} (damaged header, or not one file)"
        )
    return entries


def _entry(path: Path, name: str, info: Any, data_start: int, size: int) -> TensorEntry:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(info, dict):
        raise CheckpointError(f"{where}: entry is not an object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    bits = None
    if isinstance(dtype, str):
        bits = 8 * MAPPED_DTYPES[dtype].itemsize if dtype in MAPPED_DTYPES else OTHER_BITS.get(dtype)
    if bits is None:
        raise CheckpointError(f"{where}: unknown dtype {shown(dtype)}")

    def integers(value: Any) -> bool:
        return isinstance(value, list) and all(type(v) is int and 0 <= v < MAX_BYTES for v in value)

    if not integers(shape) or not integers(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{where}: shape {shown(shape)} or data_offsets {shown(offsets)} are not lists of integers >= 0"
        )
    # An empty tensor has no bytes whatever its other dimensions are, so they are bounded without the zeros.
    if len(shape) > MAX_RANK or math.prod(v or 1 for v in shape) * bits >= 8 * MAX_BYTES:
        raise CheckpointError(f"{where}: absurd shape {shown(shape)}")
    start, end = offsets
    expected, odd_bits = divmod(math.prod(shape) * bits, 8)
    if odd_bits or end - start != expected:
        raise CheckpointError(f"{where}: {end - start} bytes, expected {expected} for {dtype} {shape}")
    if data_start + end > size:
        raise CheckpointError(f"{where}: ends at byte {data_start + end} of a file of {size} bytes (truncated?)")
    return TensorEntry(path, dtype, tuple(shape), data_start + start, expected)


def map_tensor(entry: TensorEntry) -> np.ndarray:
    """A read-only memory map of one tensor in its own dtype; little-endian as the format is."""
    dtype = MAPPED_DTYPES.get(entry.dtype)
    if dtype is None:
        allowed = ", ".join(MAPPED_DTYPES)
        raise CheckpointError(f"{entry.file}: dtype {entry.dtype} cannot be read, allowed are {allowed}")
    if entry.num_bytes == 0:
        out = np.zeros(entry.shape, dtype)
        out.flags.writeable = False
        return out
    try:
        # Not np.memmap, which resolves the path at every call: a checkpoint can have a quarter of a million tensors.
        skipped = entry.start % mmap.ALLOCATIONGRANULARITY
        with open(entry.file, "rb", buffering=0) as file:
            mapped = mmap.mmap(
                file.fileno(), skipped + entry.num_bytes, access=mmap.ACCESS_READ, offset=entry.start - skipped
            )
    except (OSError, ValueError) as error:  # the file was changed after its header was read
        raise CheckpointError(f"{entry.file}: cannot be mapped: {error}") from None
    # Bytes first, then a view: the offsets need not be multiples of the item's size.
    return np.frombuffer(mapped, np.uint8, entry.num_bytes, skipped).view(dtype).reshape(entry.shape)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder; False too for a name that no folder can have."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


class CheckpointReader:
    """The tensors of a folder, by name. Opening it reads every header and no data.

    With an index, its `weight_map` alone says what belongs to the checkpoint: other files of the folder (stale shards,
    a separate MTP file) are left alone, and so are tensors of a named shard that the index does not name.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not is_folder(folder):
            raise CheckpointError(f"{folder}: no such folder; expected an HF-format checkpoint folder")
        index = folder / INDEX_NAME
        # A dangling link is a broken download, not the absence of an index.
        self.entries = self._indexed(index) if os.path.lexists(index) else read_header(folder / SINGLE_NAME)

    def _indexed(self, index: Path) -> dict[str, TensorEntry]:
        content = read_json(index, unique=True)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no 'weight_map' object")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index}: tensor {shown(name)} points to {shown(shard)}, expected a file in this folder"
                )
        entries: dict[str, TensorEntry] = {}
        for shard in dict.fromkeys(weight_map.values()):
            for name, entry in read_header(self.folder / shard).items():
                named = weight_map.get(name)
                if named == shard:
                    entries[name] = entry
                elif named is not None:
                    raise CheckpointError(
                        f"{entry.file}: tensor {shown(name)} lies here, but {index.name} says it is in {named!r};"
                        " which of the two is meant cannot be known"
                    )
        for name, shard in weight_map.items():
            if name not in entries:
                raise CheckpointError(
                    f"{self.folder / shard}: tensor {shown(name)} is missing; {index.name} says it is here"
                )
        return entries


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes one file under a temporary name and renames it."""
    names = {dtype: name for name, dtype in MAPPED_DTYPES.items()}
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
