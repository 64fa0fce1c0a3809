"""Checkpoint tensors to parameter arrays on their devices, slice by slice.

Host memory holds the tensor that is being read, the chunk of a leaf that it fills, and FLIGHT_BYTES of chunks that the
devices have not taken yet: a checkpoint of any size loads within twice its largest tensor and 1 GiB, whatever the mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ddtree_jax.encodings import Stored
from ddtree_jax.models.params import Part, TensorSpec, View, as_stored

Progress = Callable[[str], None]
Box = tuple[slice, ...]

CHUNK_BYTES = 256 * 2**20
FLIGHT_BYTES = 512 * 2**20  # of host copies that devices have not taken yet
BLOCK = 128  # elements: the side of a block that is transposed at a time
THREADS = min(16, os.cpu_count() or 1)
PROGRESS_SECONDS = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What fills `leaf[box]`: a lazy array of that box's shape.

    files: (file, bytes) of what it reads.
    by_rows: the leaf's first axes are the rows of the file; otherwise its last axis is.
    """

    box: Box
    fetch: Callable[[], np.ndarray]
    files: tuple[tuple[Path, int], ...]
    by_rows: bool


def sources(
    specs: Iterable[TensorSpec], stored: Mapping[str, Stored], leaves: Mapping[tuple, Any]
) -> dict[tuple, list[Source]]:
    """Every leaf's sources: the name map (`specs`) joined with what lies on disk (`stored`, by tensor name)."""
    out: dict[tuple, list[Source]] = defaultdict(list)
    for spec in specs:
        for part in spec.parts:
            for path, member in _members(stored[spec.name], part, leaves):
                box = _box(part.index, leaves[path].shape)
                fetch = _fetch(member, part.view, tuple(s.stop - s.start for s in box))
                out[path].append(Source(box, fetch, member.files, part.view is as_stored))
    return out


@dataclasses.dataclass(frozen=True)
class _Member:
    values: Callable[[], np.ndarray]
    files: tuple[tuple[Path, int], ...]


def _members(tensor: Stored, part: Part, leaves: Mapping[tuple, Any]) -> Iterator[tuple[tuple, _Member]]:
    entries = [e for e in (tensor.weight, tensor.scale, tensor.global_scale) if e is not None]
    if (*part.leaf, "codes") not in leaves:
        dtype = leaves[part.leaf].dtype
        yield part.leaf, _Member(lambda: tensor.decoded(dtype), tuple((e.file, e.num_bytes) for e in entries))
        return
    values = {"codes": tensor.codes, "scales": tensor.scales, "global_scale": lambda: np.asarray(tensor.multiplier())}
    for (name, get), entry in zip(values.items(), entries, strict=True):
        yield (*part.leaf, name), _Member(get, ((entry.file, entry.num_bytes),))


def _fetch(member: _Member, view: View, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
    def fetch() -> np.ndarray:
        found = member.values()
        return np.broadcast_to(found, shape) if found.ndim == 0 else view(found).reshape(shape)

    return fetch


def _box(index: Sequence[int | slice], shape: Sequence[int]) -> Box:
    """The index of a part as one slice an axis of the leaf."""
    given = (
        slice(at, at + 1) if isinstance(at, int) else slice(*at.indices(size)[:2])
        for at, size in zip(index, shape, strict=False)
    )
    return (*given, *(slice(0, size) for size in shape[len(index) :]))


def common_box(a: Box, b: Box) -> Box | None:
    """Where two boxes overlap, None if nowhere."""
    out = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return None if any(s.start >= s.stop for s in out) else out


def within(box: Box, outer: Box) -> Box:
    """`box`, counted from the corner of `outer`."""
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(box, outer, strict=True))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in box)


def load_leaves(
    specs: Iterable[TensorSpec],
    stored: Mapping[str, Stored],
    leaves: Mapping[tuple, jax.ShapeDtypeStruct],
    meter: Meter | None = None,
) -> dict[tuple, jax.Array]:
    """Reads a checkpoint into device arrays.

    Args:
      specs: the name map of the model.
      stored: tensor name -> where and how it lies on disk, for every spec.
      leaves: path -> shape, dtype and sharding (None: the default device) of every parameter leaf of the model.
      meter: hears what has been read.

    Returns:
      path -> array. Raises `CheckpointError` when values are not what the format allows.
    """
    by_leaf = sources(specs, stored, leaves)
    for path, leaf in leaves.items():
        filled = sum(math.prod(_shape(source.box)) for source in by_leaf[path])
        assert filled == math.prod(leaf.shape), f"the name map leaves {path} partly unset"
    with ThreadPoolExecutor(THREADS) as pool:
        loader = _Loader(meter or Meter([]), pool)
        return {path: loader.leaf(leaf, by_leaf[path]) for path, leaf in leaves.items()}


class _Loader:
    """Fills leaves one after the other; what is on its way to a device, in host memory, stays below FLIGHT_BYTES."""

    def __init__(self, meter: Meter, pool: ThreadPoolExecutor):
        self.meter, self.pool = meter, pool
        self.flight: deque[tuple[int, list[jax.Array]]] = deque()
        self.fetched: tuple[Source, np.ndarray] | None = None  # several chunks may need the same tensor in a row

    def leaf(self, leaf: jax.ShapeDtypeStruct, found: list[Source]) -> jax.Array:
        sharding = leaf.sharding
        whole = tuple(slice(0, size) for size in leaf.shape)
        regions = regions_of(leaf.shape, sharding)
        buffers: dict[Any, jax.Array] = {}
        dtype = np.dtype(leaf.dtype)
        for chunk, own in _chunks(whole, found, dtype.itemsize, _split_order(whole, found)):
            parts = {region: common for region in regions if (common := common_box(chunk, region)) is not None}
            own = self._here(own, parts)
            if not own:
                continue
            num_bytes = sum(math.prod(_shape(common)) for common in parts.values()) * dtype.itemsize
            self._wait(num_bytes)
            host = {region: np.empty(_shape(common), dtype) for region, common in parts.items()}
            self._fill(host, parts, own)
            pieces = [
                put_piece(buffers, device, region, common, host[region])
                for region, common in parts.items()
                for device in regions[region]
            ]
            self.flight.append((num_bytes, pieces))
        self.fetched = None
        if sharding is None:
            return buffers[None]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, list(buffers.values()))

    def _here(self, own: list[Source], parts: dict[Box, Box]) -> list[Source]:
        """The sources that a device of this process needs; the others are another host's, and count as read."""
        needed = []
        for source in own:
            if any(common_box(source.box, common) is not None for common in parts.values()):
                needed.append(source)
            else:
                self.meter.add(source.files)
        return needed

    def _wait(self, num_bytes: int) -> None:
        """Until so many more bytes may be on their way."""
        while self.flight and sum(waiting for waiting, _ in self.flight) + num_bytes > FLIGHT_BYTES:
            jax.block_until_ready(self.flight.popleft()[1])

    def _fill(self, host: dict[Box, np.ndarray], parts: dict[Box, Box], own: list[Source]) -> None:
        """Copies, by several threads: transposing is what takes the time."""
        if len(own) > 1:
            self.fetched = None
            list(self.pool.map(lambda source: self._copy(host, parts, source, source.fetch(), source.box), own))
        else:
            (source,) = own
            if self.fetched is None or self.fetched[0] is not source:
                self.fetched = None  # first: two tensors at a time would break the bound on host memory
                self.fetched = (source, source.fetch())
            values = self.fetched[1]
            list(self.pool.map(lambda box: self._copy(host, parts, source, values, box), _panels(source)))
        for source in own:
            self.meter.add(source.files)

    def _copy(
        self, host: dict[Box, np.ndarray], parts: dict[Box, Box], source: Source, values: np.ndarray, box: Box
    ) -> None:
        for region, common in parts.items():
            overlap = common_box(box, common)
            if overlap is None:
                continue
            target, data = host[region][within(overlap, common)], values[within(overlap, source.box)]
            if target.dtype == data.dtype:  # as integers: numpy copies those without the interpreter's lock
                bits = np.dtype(f"u{target.dtype.itemsize}")
                target, data = target.view(bits), data.view(bits)
            _copy_transposed(target, data)


def _copy_transposed(target: np.ndarray, data: np.ndarray) -> None:
    """`target[...] = data`, in blocks that fit the processor's cache where the two run along different axes."""
    runs = [stride if size > 1 else math.inf for stride, size in zip(data.strides, data.shape, strict=True)]
    axis, last = int(np.argmin(runs)) if runs else 0, data.ndim - 1
    if data.ndim < 2 or axis == last or 0 in data.strides:
        target[...] = data
        return
    index = [slice(None)] * data.ndim
    for at in range(0, data.shape[axis], BLOCK):
        index[axis] = slice(at, at + BLOCK)
        for start in range(0, data.shape[last], BLOCK):
            index[last] = slice(start, start + BLOCK)
            target[tuple(index)] = data[tuple(index)]


def _panels(source: Source) -> Iterator[Box]:
    """A source in THREADS boxes of whole rows of its file."""
    axis = 0 if source.by_rows else len(source.box) - 1
    start, stop = source.box[axis].start, source.box[axis].stop
    step = max(1, -(-(stop - start) // THREADS))
    for at in range(start, stop, step):
        yield (*source.box[:axis], slice(at, min(at + step, stop)), *source.box[axis + 1 :])


def regions_of(shape: Sequence[int], sharding: NamedSharding | None) -> dict[Box, list[Any]]:
    """What a device holds of an array -> the devices that hold it; `[None]` is the default device."""
    if sharding is None:
        return {tuple(slice(0, size) for size in shape): [None]}
    regions: dict[Box, list[Any]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        regions[tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))].append(device)
    return regions


def put_piece(buffers: dict[Any, jax.Array], device: Any, region: Box, box: Box, values: np.ndarray) -> jax.Array:
    """Sends `values`, the part `box` of an array, to a device that holds its part `region`.

    buffers: device -> what it has so far; made and replaced here. Returns the piece: once that is ready, `values` are
    no longer needed.
    """
    piece = jax.device_put(values, device)
    if box == region:
        buffers[device] = piece
        return piece
    if device not in buffers:
        buffers[device] = jnp.zeros(_shape(region), values.dtype, device=device)
    corner = [np.int32(s.start) for s in within(box, region)]
    buffers[device] = _put(buffers[device], piece, *corner)
    return piece


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, piece: jax.Array, *corner: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, piece, corner)


def _split_order(whole: Box, found: list[Source]) -> list[int]:
    """Axes in the order in which a leaf is cut: first those along which tensors lie side by side, then along a file."""
    first = found[0]
    beside = [axis for axis, s in enumerate(first.box) if s != whole[axis]]
    rest = [axis for axis in range(len(whole)) if axis not in beside]
    return beside + (rest if first.by_rows else rest[::-1])


def _chunks(box: Box, found: list[Source], item: int, order: list[int]) -> Iterator[tuple[Box, list[Source]]]:
    """Cuts a box into boxes of at most CHUNK_BYTES, each with the sources that reach into it."""
    pieces = -(-math.prod(_shape(box)) * item // CHUNK_BYTES)
    axis = next((axis for axis in order if box[axis].stop - box[axis].start > 1), None)
    if pieces <= 1 or axis is None:
        yield box, found
        return
    start, stop = box[axis].start, box[axis].stop
    step = -(-(stop - start) // min(pieces, stop - start))
    for at in range(start, stop, step):
        cut = slice(at, min(at + step, stop))
        own = [s for s in found if s.box[axis].start < cut.stop and cut.start < s.box[axis].stop]
        yield from _chunks((*box[:axis], cut, *box[axis + 1 :]), own, item, order)


class Meter:
    """Counts bytes read, and says now and then how far loading is, how fast, and how long it will take."""

    def __init__(self, tensors: Iterable[Stored], name: str = "", progress: Progress | None = None):
        self.left: dict[Path, int] = defaultdict(int)
        for tensor in tensors:
            for entry in (tensor.weight, tensor.scale, tensor.global_scale):
                if entry is not None:
                    self.left[entry.file] += entry.num_bytes
        self.name, self.progress, self.unit = name, progress, "shards"
        self.total, self.shards = sum(self.left.values()), len(self.left)
        self.done = 0
        self.started = self.said = time.perf_counter()

    @classmethod
    def of_parts(cls, parts: Mapping[Path, int], unit: str, name: str, progress: Progress | None) -> Meter:
        """A meter of any named parts and their bytes; `unit`: what to call them."""
        meter = cls([], name, progress)
        meter.left.update(parts)
        meter.total, meter.shards, meter.unit = sum(parts.values()), len(parts), unit
        return meter

    def add(self, files: Iterable[tuple[Path, int]]) -> None:
        """Notes that these bytes of these files have been read."""
        for file, num_bytes in files:
            num_bytes = min(num_bytes, self.left.get(file, 0))  # tensors that feed two leaves are read twice
            self.left[file] -= num_bytes
            self.done += num_bytes
        now = time.perf_counter()
        if self.progress is not None and now - self.said >= PROGRESS_SECONDS:
            self.said = now
            self.progress(self.line())

    def line(self) -> str:
        """One line: share and bar, rate, time left, whole shards."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        share, rate = self.done / max(self.total, 1), self.done / seconds
        left = (self.total - self.done) / max(rate, 1.0)
        whole = sum(not remaining for remaining in self.left.values())
        bar = "#" * round(20 * share)
        return (
            f"loading {self.name} [{bar:20}] {100 * share:3.0f} % of {self.total / 1e9:.2f} GB, {rate / 1e9:.2f} GB/s, "
            f"{int(left // 60)}:{int(left % 60):02} left, {self.unit} {whole}/{self.shards}"
        )
