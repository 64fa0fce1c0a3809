"""Parameter trees in and out of HF-format folders.

What lies in a folder is read by `safetensors_files`; this module fills parameter leaves from it and writes them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.params import TensorSpec
from ddtree_jax.safetensors_files import (
    INDEX_NAME,
    SINGLE_NAME,
    CheckpointReader,
    TensorEntry,
    is_folder,
    read_header,
    read_json,
    write_json,
    write_safetensors,
)

__all__ = [
    "CheckpointReader",
    "TensorEntry",
    "is_folder",
    "load_leaves",
    "read_header",
    "read_json",
    "save_leaves",
    "write_json",
]

MAX_SHARD_BYTES = 15_000_000


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
        written = write_safetensors(folder / SINGLE_NAME, shards[0])
        (folder / INDEX_NAME).unlink(missing_ok=True)  # of an earlier, larger save: a reader would follow it
        return [written]
    files, weight_map, total = [], {}, 0
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        files.append(write_safetensors(folder / name, shard))
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return [*files, write_json(folder / INDEX_NAME, index)]
