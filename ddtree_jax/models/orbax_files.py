"""Converted folders on disk: parameter leaves as one Orbax checkpoint, described by a manifest that is written last.

    config.json, generation_config.json, tokenizer files   as in an HF folder
    orbax/             the Orbax checkpoint: a flat dict, leaf name -> array, in the layout of the parameter tree
    ddtree_jax.json    the manifest: a folder without it is no checkpoint

Orbax writes. Reading goes to the arrays of the checkpoint through tensorstore, which Orbax stores them with: Orbax
restores a shard whole, and one leaf of stacked layers can be larger than host memory. Here a leaf comes in tiles of
whole chunks, several of them under way at once, and each goes to the devices that hold a part of it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.errors import CheckpointError, one_line
from ddtree_jax.loading import Box, Meter, common_box, put_piece, regions_of, within
from ddtree_jax.models.glm5 import PackedKernels
from ddtree_jax.models.pair import DTYPES
from ddtree_jax.safetensors_files import INDEX_NAME, SINGLE_NAME, read_json, shown

MANIFEST_NAME = "ddtree_jax.json"
ORBAX_NAME = "orbax"
VERSION = 1
KINDS = ("target", "drafter")
LEAF_DTYPES = ("float32", "bfloat16", "uint8", "float8_e4m3fn")

CHUNK_BYTES = 16 * 2**20  # of a stored chunk: the unit that is read, by one thread
TILE_BYTES = 128 * 2**20  # read as one array and sent to the devices
WINDOW_BYTES = 256 * 2**20  # tiles being read at a time
CACHED_INDEX_BYTES = 64 * 2**20  # of the checkpoint's own index, while it is being read

_PARTIAL = re.compile(r".+\.partial-[0-9a-f]{8}")
_HF_WEIGHTS = (SINGLE_NAME, INDEX_NAME)


def partial_name(folder: Path, token: str) -> Path:
    """The sibling under which `folder` is written; `token`: 8 hexadecimal digits."""
    return folder.with_name(f"{folder.name}.partial-{token}")


def leaf_name(path: tuple) -> str:
    """The name of a parameter leaf in manifest and checkpoint: ("stacks", 0, "norm") is "stacks.0.norm"."""
    return ".".join(map(str, path))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a converted folder says about itself.

    kind: "target" or "drafter".
    dtype: of whatever is neither packed nor always float32.
    scan: whether layers of one kind are stacked (`glm5.layer_plan`).
    packed: the kernels that are packed NVFP4; None: none.
    leaves: leaf name -> shape and dtype name.
    files: file below `orbax/` -> bytes.
    """

    kind: str
    dtype: str
    scan: bool
    packed: PackedKernels | None
    leaves: Mapping[str, tuple[tuple[int, ...], str]]
    files: Mapping[str, int]

    @property
    def bytes_on_disk(self) -> int:
        return sum(self.files.values())

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        packed = self.packed
        return {
            "format": "ddtree_jax converted checkpoint",
            "version": VERSION,
            "kind": self.kind,
            "dtype": self.dtype,
            "scan": self.scan,
            "packed": None if packed is None else {"layers": [list(n) for n in packed.layers], "head": packed.head},
            "leaves": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in self.leaves.items()},
            "files": dict(self.files),
        }

    def check_kind(self, folder: Path, kind: str) -> None:
        """Raises `CheckpointError` if the folder holds the other half of a pair."""
        if self.kind != kind:
            raise CheckpointError(f"{folder}: holds a converted {self.kind}, expected a {kind}")

    def check_dtype(self, folder: Path, dtype: Any) -> jnp.dtype:
        """The dtype that the folder holds; ValueError if another one is asked for by name."""
        if not (isinstance(dtype, str) and dtype == "auto") and jnp.dtype(dtype).name != self.dtype:
            raise ValueError(
                f"dtype: got {jnp.dtype(dtype).name!r}, but {folder} was converted to {self.dtype!r}; allowed are "
                "'auto' and that; for another dtype load or convert the original folder"
            )
        return jnp.dtype(DTYPES[self.dtype])

    def check_leaves(self, folder: Path, leaves: Mapping[tuple, Any]) -> None:
        """Raises `CheckpointError` unless the manifest names exactly these leaves.

        leaves: path -> anything with shape and dtype, as config, dtype, packing and scan make them.
        """
        where = f"{folder / MANIFEST_NAME}: leaf"
        expected = {leaf_name(path): (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves.items()}
        for name, (shape, dtype) in expected.items():
            if name not in self.leaves:
                raise CheckpointError(f"{where} {name!r} is missing, expected {dtype} {list(shape)}")
            if self.leaves[name] != (shape, dtype):
                found_shape, found = self.leaves[name]
                raise CheckpointError(f"{where} {name!r}: {found} {list(found_shape)}, expected {dtype} {list(shape)}")
        extra = next((name for name in self.leaves if name not in expected), None)
        if extra is not None:
            raise CheckpointError(f"{where} {shown(extra)} has no place in the network that config.json describes")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a converted folder; None for any other folder.

    Raises `CheckpointError` for an unfinished conversion, a damaged manifest, and files that are not as it says.
    """
    path = folder / MANIFEST_NAME
    _refuse_unfinished(folder)
    if not os.path.lexists(path):
        return None
    manifest = _parsed(path, read_json(path, unique=True))
    for name, size in manifest.files.items():
        file = folder / ORBAX_NAME / name
        try:
            found = file.stat().st_size
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CheckpointError(f"{file}: cannot be read: {reason}; {MANIFEST_NAME} names it") from None
        if found != size:
            raise CheckpointError(f"{file}: {found} bytes, expected {size} (truncated or changed since conversion)")
    return manifest


def _refuse_unfinished(folder: Path) -> None:
    try:
        names = (folder.absolute().name, folder.absolute().parent.name)
        unfinished = any(_PARTIAL.fullmatch(name) for name in names)
        if not unfinished and not os.path.lexists(folder / MANIFEST_NAME):
            hf = any(os.path.lexists(folder / name) for name in _HF_WEIGHTS)
            unfinished = not hf and any(child.name.startswith(ORBAX_NAME) for child in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror}") from None
    if unfinished:
        raise CheckpointError(
            f"{folder}: unfinished conversion: it was interrupted before its weights were whole; remove it and convert "
            "again"
        )


def _parsed(path: Path, content: Any) -> Manifest:
    def require(ok: bool, key: str, found: Any, expected: str) -> None:
        if not ok:
            raise CheckpointError(f"{path}: {key}: found {shown(found)}, expected {expected}")

    def size(value: Any) -> bool:
        return type(value) is int and 0 <= value < 2**62

    require(isinstance(content, dict), "content", type(content).__name__, "an object")
    version = content.get("version")
    require(
        version == VERSION and type(version) is int, "version", version, f"{VERSION}; convert again for this version"
    )
    kind, dtype, scan = content.get("kind"), content.get("dtype"), content.get("scan")
    require(kind in KINDS, "kind", kind, " or ".join(KINDS))
    require(isinstance(dtype, str) and dtype in DTYPES, "dtype", dtype, " or ".join(DTYPES))
    require(isinstance(scan, bool), "scan", scan, "true or false")
    packed = content.get("packed")
    if packed is not None:
        names = packed.get("layers") if isinstance(packed, dict) else None
        ok = isinstance(names, list) and type(packed.get("head")) is bool
        ok = ok and all(isinstance(layer, list) and all(isinstance(n, str) for n in layer) for layer in names)
        require(ok, "packed", packed, "null, or the names of packed kernels by layer, and head")
        packed = PackedKernels(tuple(tuple(layer) for layer in names), packed["head"])
    table, files = content.get("leaves"), content.get("files")
    require(isinstance(table, dict) and bool(table), "leaves", table, "an object of leaves")
    leaves = {}
    for name, leaf in table.items():
        shape, stored = (leaf.get("shape"), leaf.get("dtype")) if isinstance(leaf, dict) else (None, None)
        ok = isinstance(shape, list) and all(size(n) for n in shape) and isinstance(stored, str)
        require(
            ok and stored in LEAF_DTYPES, f"leaf {shown(name)}", leaf, f"a shape and one of {', '.join(LEAF_DTYPES)}"
        )
        leaves[name] = (tuple(shape), stored)
    ok = isinstance(files, dict) and bool(files) and all(size(value) for value in files.values())
    ok = ok and all(name and not Path(name).is_absolute() and ".." not in Path(name).parts for name in files)
    require(ok, "files", files, "an object of files in orbax/ and their sizes")
    return Manifest(kind, dtype, scan, packed, leaves, files)


# ---- writing


def write_leaves(folder: Path, leaves: Mapping[tuple, jax.Array]) -> dict[str, int]:
    """Writes the Orbax checkpoint of a converted folder; returns its files and their sizes.

    Host memory holds about one leaf at a time: Orbax fetches the next ones when those before are on disk.
    """
    import orbax.checkpoint as ocp

    tree = {leaf_name(path): leaf for path, leaf in leaves.items()}
    largest = max(leaf.nbytes for leaf in tree.values())
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=False,
        use_compression=False,  # weights hardly shrink, and decompressing costs more than reading
        save_device_host_concurrent_gb=largest // 10**9 + 1,
        is_prioritized_key_fn=_no_key,
    )
    chunks = {
        name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=_cut_axes(leaf.shape, leaf.dtype.itemsize))
        for name, leaf in tree.items()
    }
    try:
        with _quiet(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(folder.absolute() / ORBAX_NAME, args=ocp.args.PyTreeSave(tree, save_args=chunks))
    except Exception as error:  # of Orbax, tensorstore or the file system, by whatever failed
        raise CheckpointError(f"{folder}: cannot be written: {one_line(error)}") from error
    root = folder / ORBAX_NAME
    files = sorted(file for file in root.rglob("*") if file.is_file())
    for file in files:  # to the disk, before a manifest says that they are whole
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    return {file.relative_to(root).as_posix(): file.stat().st_size for file in files}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest through to the disk; until then the folder is no checkpoint."""
    path = folder / MANIFEST_NAME
    temporary = path.with_suffix(".unfinished")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(manifest.to_dict(), file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _cut_axes(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    """Leading axes along which a leaf is cut all the way, so that a chunk is one run of memory.

    Left to itself, Orbax cuts the longest axis first, and reading such chunks copies runs of a few hundred bytes.
    """
    axes = []
    for axis in range(len(shape) - 1):
        below = math.prod(shape[axis + 1 :]) * item
        if shape[axis] * below <= CHUNK_BYTES or below < CHUNK_BYTES // 16:
            break
        axes.append(axis)
    return tuple(axes)


def _no_key(path: Any) -> bool:
    """Orbax copies "prioritised" leaves to the host at once, without its limit."""
    return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns on stderr about choices that were made on purpose here."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


# ---- reading


@dataclasses.dataclass(frozen=True, eq=False)
class _Tile:
    """A box of a leaf that is read at once."""

    path: tuple
    box: Box
    num_bytes: int
    store: Any


def read_leaves(folder: Path, leaves: Mapping[tuple, Any], meter: Meter) -> dict[tuple, jax.Array]:
    """Reads the leaves of a converted folder, bit for bit, onto their devices.

    Args:
      folder: whose manifest has been checked against `leaves`.
      leaves: path -> shape, dtype and sharding (None: the default device) of every leaf.
      meter: hears what has been read.

    Returns:
      path -> array. Raises `CheckpointError` naming the leaf that cannot be read.
    """
    stores = _open_stores(folder, leaves)
    tiles = (tile for path, leaf in leaves.items() for tile in _tiles_here(path, leaf, stores[path], meter))
    placed: dict[tuple, _Placed] = {}
    pending: list[jax.Array] = []
    for tile, values in _read_ahead(folder, tiles):
        if tile.path not in placed:
            placed[tile.path] = _Placed(leaves[tile.path])
        jax.block_until_ready(pending)  # one tile in flight: its host copy is still alive
        pending = placed[tile.path].add(tile.box, values)
        meter.add([(Path(leaf_name(tile.path)), tile.num_bytes)])
    return {path: placed[path].array() for path in leaves}


def _open_stores(folder: Path, leaves: Mapping[tuple, Any]) -> dict[tuple, Any]:
    import tensorstore as ts

    root = folder.absolute() / ORBAX_NAME
    context = ts.Context({"cache_pool": {"total_bytes_limit": CACHED_INDEX_BYTES}})
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}, "cache_pool": "cache_pool"}
    try:
        keys = ts.KvStore.open(base, context=context).result().list().result()
    except Exception as error:  # tensorstore raises by its own kinds, of which none is promised
        raise CheckpointError(f"{root}: damaged Orbax checkpoint: {one_line(error)}") from None
    names = {key.decode("utf-8", "replace").rpartition("/")[0] for key in keys}
    extra = names - {leaf_name(path) for path in leaves}
    if extra:
        raise CheckpointError(
            f"{root}: leaf {shown(min(extra))} is not one of this network; {MANIFEST_NAME} has it not"
        )
    opening = {}
    for path in leaves:
        spec = {
            "driver": "zarr",
            "kvstore": {**base, "path": f"{leaf_name(path)}/"},
            "cache_pool": {"total_bytes_limit": 0},  # chunks are read once
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            "fill_missing_data_reads": False,  # else a lost chunk would read as zeros
        }
        opening[path] = ts.open(spec, context=context, open=True, read=True)
    stores = {}
    for path, leaf in leaves.items():
        where = f"{root}: leaf {leaf_name(path)!r}"
        try:
            store = opening[path].result()
        except Exception as error:
            raise CheckpointError(f"{where} cannot be read: {one_line(error)}") from None
        found = (tuple(store.shape), np.dtype(store.dtype.numpy_dtype))
        if found != (tuple(leaf.shape), np.dtype(leaf.dtype)):
            raise CheckpointError(f"{where}: {found[1]} {list(found[0])}, expected {leaf.dtype} {list(leaf.shape)}")
        stores[path] = store
    return stores


def _tiles_here(path: tuple, leaf: Any, store: Any, meter: Meter) -> Iterator[_Tile]:
    """The tiles that a device of this process needs; the others are another host's, and count as read."""
    regions = regions_of(leaf.shape, leaf.sharding)
    for tile in _tiles(path, leaf, store):
        if any(common_box(tile.box, region) is not None for region in regions):
            yield tile
        else:
            meter.add([(Path(leaf_name(path)), tile.num_bytes)])


def _tiles(path: tuple, leaf: Any, store: Any) -> Iterator[_Tile]:
    """Boxes of whole chunks, at most TILE_BYTES each where a chunk allows that; whole trailing axes if possible."""
    item = np.dtype(leaf.dtype).itemsize
    steps = [min(chunk, size) for chunk, size in zip(store.chunk_layout.read_chunk.shape, leaf.shape, strict=True)]
    for axis in reversed(range(len(steps))):
        fit = TILE_BYTES // max(1, math.prod(steps) * item)
        if fit <= 1:
            break
        chunks = -(-leaf.shape[axis] // steps[axis])
        tiles = -(-chunks // fit)
        steps[axis] = min(leaf.shape[axis], steps[axis] * -(-chunks // tiles))  # of about the same size each
    corners = itertools.product(*(range(0, size, step) for size, step in zip(leaf.shape, steps, strict=True)))
    for corner in corners:
        ends = [min(at + step, size) for at, step, size in zip(corner, steps, leaf.shape, strict=True)]
        box = tuple(slice(at, end) for at, end in zip(corner, ends, strict=True))
        yield _Tile(path, box, math.prod(s.stop - s.start for s in box) * item, store)


def _read_ahead(folder: Path, tiles: Iterator[_Tile]) -> Iterator[tuple[_Tile, np.ndarray]]:
    """The values of tiles in order, with up to WINDOW_BYTES of them being read at a time."""
    window: collections.deque[tuple[_Tile, Any]] = collections.deque()
    in_flight = 0
    for tile in itertools.chain(tiles, [None]):
        while window and (tile is None or in_flight + tile.num_bytes > WINDOW_BYTES):
            first, future = window.popleft()
            in_flight -= first.num_bytes
            try:
                values = future.result()
            except Exception as error:  # a lost or damaged chunk
                where = f"{folder / ORBAX_NAME}: leaf {leaf_name(first.path)!r}"
                raise CheckpointError(f"{where} cannot be read: {one_line(error)}") from None
            yield first, values
        if tile is not None:
            window.append((tile, tile.store[tile.box].read() if tile.box else tile.store.read()))
            in_flight += tile.num_bytes


class _Placed:
    """One leaf that is being put together on its devices."""

    def __init__(self, leaf: Any):
        self.leaf, self.regions = leaf, regions_of(leaf.shape, leaf.sharding)
        self.buffers: dict[Any, jax.Array] = {}

    def add(self, box: Box, values: np.ndarray) -> list[jax.Array]:
        """Sends a tile to every device that holds a part of it; returns what must be awaited."""
        sent = []
        for region, devices in self.regions.items():
            common = common_box(box, region)
            if common is None:
                continue
            piece = values[within(common, box)]
            for device in devices:
                sent.append(put_piece(self.buffers, device, region, common, piece))
        return sent

    def array(self) -> jax.Array:
        if self.leaf.sharding is None:
            return self.buffers[None]
        shards = list(self.buffers.values())
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, shards)
