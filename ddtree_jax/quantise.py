"""Quantising a target folder: routed experts to NVFP4 in the ModelOpt layout, the rest copied, as NVIDIA ships GLM-5.2.

Tensor by tensor, so a checkpoint of any size needs little memory. Experts whose width is no multiple of 16 are widened
with hidden units whose weights are all zero, which changes no output.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import ddtree_jax
from ddtree_jax.checkpoint import ShardWriter
from ddtree_jax.converted import COPIED, appears_whole, check_output, check_room, output_path
from ddtree_jax.encodings import Encoding, Stored
from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.folders import open_target
from ddtree_jax.models.quant import E2M1_MAX, E4M3_MAX, GROUP, decode, quantise
from ddtree_jax.safetensors_files import map_tensor, read_json, write_json

SHARD_BYTES = 4 * 10**9
SEARCH_MAX = 256  # largest block scale with `search`: leaves room for a block to be scaled to 4 instead of 6
_EXPERT = re.compile(r"model\.layers\.\d+\.mlp\.(experts\.\d+|shared_experts)\.(gate|up|down)_proj\.weight")


@dataclasses.dataclass(frozen=True)
class QuantiseReport:
    """What `quantise_target` did. Errors are relative: root of squared error over squared weights, all experts."""

    num_quantised: int
    num_copied: int
    bytes_before: int
    bytes_after: int
    relative_error: float
    widened_from: int | None  # moe_intermediate_size before, None if it was a multiple of 16

    def summary(self) -> str:
        """One line."""
        wider = "" if self.widened_from is None else f"; experts widened from {self.widened_from} with zero units"
        before, after = self.bytes_before / 1e6, self.bytes_after / 1e6
        return (
            f"{self.num_quantised} expert weights to NVFP4 (relative error {self.relative_error:.4f}), "
            f"{self.num_copied} tensors copied, {before:.1f} MB to {after:.1f} MB{wider}"
        )


def quantise_target(
    source: str | Path,
    output: str | Path,
    *,
    search: bool = True,
    progress: Callable[[str], None] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> QuantiseReport:
    """Writes the target folder `source` again with its routed experts as NVFP4.

    Gate and up of an expert share one global scale, as engines with a fused kernel need. The multi-token-prediction
    layer is left out. `output` appears whole or not at all.

    Args:
      source: a GLM-5 folder in any encoding; experts that are NVFP4 already are copied.
      output: a folder that does not exist or is empty.
      search: choose each block's scale by least squared error (slower, about a tenth less error).
      progress: called with a line of text now and then.
      max_shard_bytes: of a file.

    Raises:
      CheckpointError: the source is damaged or no GLM-5 target.
      ValueError: the output exists.
    """
    output = output_path(output)
    check_output(output)
    opened = open_target(source, dtype="float32")
    if opened.converted is not None:
        raise CheckpointError(f"{opened.folder}: a converted folder; expected the HF-format folder it was made from")
    check_room(output, opened.bytes_on_disk)
    config = opened.config
    width = -(-config.moe_intermediate_size // GROUP) * GROUP
    wider = dataclasses.replace(config, moe_intermediate_size=width)
    error, energy, quantised, copied, after = 0.0, 0.0, 0, 0, 0
    with appears_whole(output) as temporary:
        writer = ShardWriter(temporary, max_shard_bytes)
        for number, stored in enumerate(opened.stored.values()):
            tensors, losses = 0, []
            for name, tensor, loss in _tensors(stored, opened.stored, config, wider, search):
                writer.add(name, tensor)
                tensors, after = tensors + 1, after + tensor.nbytes
                losses += [] if loss is None else [loss]
            quantised, copied = quantised + len(losses), copied + (0 if losses else tensors)
            error, energy = error + sum(loss[0] for loss in losses), energy + sum(loss[1] for loss in losses)
            if progress is not None and number % 256 == 255:
                progress(f"quantising {opened.folder.name}: {number + 1} of {len(opened.stored)} tensors")
        writer.close()
        _write_configs(opened.folder, temporary, wider)
    return QuantiseReport(
        num_quantised=quantised,
        num_copied=copied,
        bytes_before=opened.bytes_on_disk,
        bytes_after=after,
        relative_error=float(np.sqrt(error / energy)) if energy else 0.0,
        widened_from=None if wider == config else config.moe_intermediate_size,
    )


Loss = tuple[float, float] | None


def _tensors(
    stored: Stored, everything: dict[str, Stored], config: Glm5Config, wider: Glm5Config, search: bool
) -> Iterator[tuple[str, np.ndarray, Loss]]:
    """(name, array, (squared error, squared weights) once for each weight that is quantised) for one weight."""
    found = _EXPERT.fullmatch(stored.name)
    grows = found is not None and wider != config
    if found is None or found[1] == "shared_experts" or (stored.is_nvfp4 and not grows):
        if not grows:
            entries = (e for e in (stored.weight, stored.scale, stored.global_scale) if e is not None)
            for name, entry in zip(stored.names, entries, strict=True):
                yield name, map_tensor(entry), None
            return
        tensor = _widened(_plain(stored), found[2], wider.moe_intermediate_size * config.n_shared_experts)
        yield stored.name, tensor, None
        return
    weight = _widened(stored.decoded(np.float32), found[2], wider.moe_intermediate_size)
    multiplier = _shared_multiplier(stored, weight, everything, search) if found[2] in ("gate", "up") else None
    codes, scales, factor = quantise(weight, multiplier=multiplier, search=search)
    yield stored.name, codes, _loss(weight, codes, scales, factor)
    yield f"{stored.name}_scale", scales, None
    yield f"{stored.name}_scale_2", np.asarray(factor, np.float32).reshape(()), None


def _plain(stored: Stored) -> np.ndarray:
    return map_tensor(stored.weight) if stored.encoding is Encoding.PLAIN else stored.decoded(np.float32)


def _widened(weight: np.ndarray, projection: str, width: int) -> np.ndarray:
    """Zero rows for gate and up, zero columns for down, up to `width`."""
    shape = (weight.shape[0], width) if projection == "down" else (width, weight.shape[1])
    if weight.shape == shape:
        return weight
    out = np.zeros(shape, weight.dtype)
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out


def _shared_multiplier(stored: Stored, weight: np.ndarray, everything: dict[str, Stored], search: bool) -> float | None:
    """Of gate and up together; weight: `stored`, decoded."""
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    half = stored.name.split(".")[-2]
    pair = everything[stored.name.replace(half, other[half])].decoded(np.float32)
    peak = max(float(np.abs(values).max()) for values in (weight, pair))
    if not peak:
        return None
    tiny = float(np.finfo(np.float32).tiny)  # a smaller multiplier would be zero to some devices
    return max(peak / (E2M1_MAX * (SEARCH_MAX if search else E4M3_MAX)), tiny)


def _loss(weight: np.ndarray, codes: np.ndarray, scales: np.ndarray, factor: np.float32) -> Loss:
    exact = weight.astype(np.float64)
    return float(np.square(decode(codes, scales, factor) - exact).sum()), float(np.square(exact).sum())


def _write_configs(source: Path, folder: Path, config: Glm5Config) -> None:
    """Configs of the quantised folder; `ignore` tells other engines what stayed as it was, this package needs none."""
    ignore = ["lm_head", "*self_attn*", "*shared_experts*", "*mlp.gate", *_dense_globs(config)]
    group = {"num_bits": 4, "type": "float", "group_size": GROUP, "dynamic": False}
    description = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "producer": {"name": "ddtree_jax", "version": ddtree_jax.__version__},
        "config_groups": {"group_0": {"weights": group, "targets": ["Linear"]}},
        "ignore": ignore,
    }
    original = read_json(source / "config.json")
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": GROUP, "exclude_modules": ignore}
    write_json(folder / "hf_quant_config.json", {"producer": description["producer"], "quantization": quantization})
    for name in (*COPIED, "generation_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    changed = {"moe_intermediate_size": config.moe_intermediate_size, "quantization_config": description}
    write_json(folder / "config.json", original | changed)  # last: without it the folder is no model


def _dense_globs(config: Glm5Config) -> list[str]:
    return [f"model.layers.{i}.mlp*" for i, kind in enumerate(config.mlp_layer_types) if kind == "dense"]
