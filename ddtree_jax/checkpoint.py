"""Writing HF-format folders: tensors into shards, and parameter trees into tensors (`loading` is the way back)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.models.params import TensorSpec
from ddtree_jax.models.sharding import PACKED_LEAVES
from ddtree_jax.safetensors_files import INDEX_NAME, SINGLE_NAME, write_json, write_safetensors

MAX_SHARD_BYTES = 15_000_000


class ShardWriter:
    """Writes named tensors into safetensors shards of at most `max_shard_bytes` (more if one tensor is larger).

    No more than one shard is in memory. The shards get their final names, and the index is written, in `close`: an
    interrupted save leaves no folder that looks whole.
    """

    def __init__(self, folder: Path, max_shard_bytes: int | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("unfinished-*"):  # by an interrupted save
            left.unlink()
        self.folder, self.limit = folder, MAX_SHARD_BYTES if max_shard_bytes is None else max_shard_bytes
        self.shards: list[tuple[Path, list[str], int]] = []  # written so far: file, tensor names, bytes
        self.pending: dict[str, np.ndarray] = {}
        self.used = 0

    def add(self, name: str, tensor: np.ndarray) -> None:
        """Appends one tensor; it must not change until its shard is written."""
        if self.pending and self.used + tensor.nbytes > self.limit:
            self._flush()
        self.pending[name] = tensor
        self.used += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"unfinished-{len(self.shards) + 1:05d}"
        self.shards.append((write_safetensors(path, self.pending), list(self.pending), self.used))
        self.pending, self.used = {}, 0

    def close(self) -> list[Path]:
        """Writes what is left and the index; returns the files."""
        if self.pending or not self.shards:
            self._flush()
        index = self.folder / INDEX_NAME
        index.unlink(missing_ok=True)  # of an earlier save: a reader would follow it
        if len(self.shards) == 1:
            path = self.folder / SINGLE_NAME
            os.replace(self.shards[0][0], path)
            return [path]
        files, weight_map = [], {}
        for i, (written, names, _) in enumerate(self.shards):
            path = self.folder / f"model-{i + 1:05d}-of-{len(self.shards):05d}.safetensors"
            os.replace(written, path)
            files.append(path)
            weight_map |= dict.fromkeys(names, path.name)
        total = sum(used for _, _, used in self.shards)
        return [*files, write_json(index, {"metadata": {"total_size": total}, "weight_map": weight_map})]


def save_leaves(
    folder: Path, specs: Iterable[TensorSpec], leaves: Mapping[tuple, Any], *, dtype: Any = ml_dtypes.bfloat16
) -> list[Path]:
    """Writes parameter leaves in the names of `specs`: packed kernels as ModelOpt NVFP4, the rest in `dtype`.

    Returns the files written.
    """
    writer = ShardWriter(folder)
    for spec in specs:
        for name, tensor in _tensors(spec, leaves, dtype):
            writer.add(name, tensor)
    return writer.close()


def _tensors(spec: TensorSpec, leaves: Mapping[tuple, Any], dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    first = spec.parts[0]
    if (*first.leaf, "words") in leaves:
        reason = "laid out for kernels, which no file holds; load with kernels='reference' to save"
        raise ValueError(f"{spec.name}: {reason}")
    if (*first.leaf, "codes") not in leaves:
        tensor = np.empty(spec.shape, np.float32 if spec.float32 else dtype)
        for part in spec.parts:
            part.view(tensor)[...] = np.asarray(leaves[part.leaf])[part.index]
        yield spec.name, tensor
        return
    codes, scales, factor = (np.asarray(leaves[*first.leaf, name])[first.index] for name in PACKED_LEAVES)
    yield spec.name, np.ascontiguousarray(first.view(codes))
    yield f"{spec.name}_scale", np.ascontiguousarray(first.view(scales))
    yield f"{spec.name}_scale_2", np.asarray(factor).reshape(())
