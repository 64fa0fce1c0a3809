"""Checkpoints in any published encoding, made from plain weights, with what they decode to by definition.

Nothing here uses the package's codecs: the encoders and the decoder are the tests' own, in float64.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.models.params import target_tensors
from ddtree_jax.safetensors_files import write_json, write_safetensors

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
PLAIN_KINDS = ("float32", "bfloat16", "float16")
NVFP4_KINDS = ("nvfp4", "nvfp4_packed")
FP8_KINDS = ("fp8_block", "fp8_tensor", "fp8_tensor_1", "fp8_channel", "fp8_channel_flat", "fp8_packed_block")
KINDS = (*PLAIN_KINDS, *NVFP4_KINDS, *FP8_KINDS)
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
DTYPES = {
    **{"F32": np.float32, "F16": np.float16, "BF16": BF16, "F8_E4M3": E4M3, "U8": np.uint8},
    **{"I8": np.int8, "I32": np.int32, "F64": np.float64},
}


def random_weights(config: Any, seed: int) -> dict[str, np.ndarray]:
    """name -> float64 weight of a target, of the scale that trained ones have."""
    rng = np.random.default_rng(seed)
    out = {}
    for spec in target_tensors(config):
        draw = rng.standard_normal(spec.shape)
        if len(spec.shape) == 1:
            out[spec.name] = 1 + 0.2 * draw if spec.name.endswith("norm.weight") else 0.2 * draw
        else:
            out[spec.name] = draw * (1 if "embed" in spec.name else spec.shape[1] ** -0.5)
    return out


def e2m1_value(code: int) -> float:
    """A 4-bit code by the definition of E2M1: sign, two bits of exponent (bias 1), one bit of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(magnitude, -1.0 if code & 8 else 1.0)


def e4m3_value(byte: int) -> float:
    """A byte by the definition of E4M3 (finite): sign, four bits of exponent (bias 7), three bits of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return math.copysign(magnitude, -1.0 if byte & 128 else 1.0)


E2M1 = np.array([e2m1_value(code) for code in range(16)])
E4M3_TABLE = np.array([e4m3_value(byte) for byte in range(256)])


def encode(name: str, weight: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """The tensors on disk of one weight. `name` ends in ".weight" unless the kind is plain."""
    weight = np.asarray(weight, np.float64)
    if kind in PLAIN_KINDS:
        return {name: weight.astype(BF16 if kind == "bfloat16" else kind)}
    assert name.endswith(".weight") and weight.ndim == 2, name
    base = name.removesuffix("weight")
    if kind in NVFP4_KINDS:
        codes, scales, factor = _nvfp4(weight)
        if kind == "nvfp4":
            return {name: codes, f"{base}weight_scale": scales, f"{base}weight_scale_2": np.float32(factor).reshape(())}
        reciprocal = np.array([1 / np.float64(factor)], np.float32)
        return {f"{base}weight_packed": codes, f"{base}weight_scale": scales, f"{base}weight_global_scale": reciprocal}
    rows, columns = weight.shape
    peaks = np.abs(weight)
    if kind in ("fp8_block", "fp8_packed_block"):
        grid = (-(-rows // 128), -(-columns // 128))
        scale = np.zeros(grid)
        for r, c in np.ndindex(grid):
            scale[r, c] = peaks[r * 128 : (r + 1) * 128, c * 128 : (c + 1) * 128].max() / 448
        suffix = "weight_scale_inv" if kind == "fp8_block" else "weight_scale"
        stored = scale.astype(np.float32 if kind == "fp8_block" else BF16)
        whole = np.repeat(np.repeat(stored.astype(np.float64), 128, 0), 128, 1)[:rows, :columns]
    else:
        per_tensor = kind.startswith("fp8_tensor")
        scale = np.maximum(peaks.max() if per_tensor else peaks.max(axis=1), 1e-9) / 448
        shapes = {"fp8_tensor": (), "fp8_tensor_1": (1,), "fp8_channel": (rows, 1), "fp8_channel_flat": (rows,)}
        suffix = "weight_scale"
        stored = np.asarray(scale).reshape(shapes[kind]).astype(BF16 if kind == "fp8_channel" else np.float32)
        whole = stored.astype(np.float64).reshape((1, 1) if per_tensor else (rows, 1))
    codes = np.clip(np.divide(weight, whole, where=whole > 0, out=np.zeros_like(weight)), -448, 448)
    return {name: codes.astype(np.float32).astype(E4M3), f"{base}{suffix}": stored}


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    rows, columns = weight.shape
    factor = float(np.float32(max(np.abs(weight).max(), 1e-9) / (6 * 448)))
    blocks = weight.reshape(rows, columns // 16, 16) / factor
    scales = np.clip(np.abs(blocks).max(axis=-1) / 6, 2.0**-9, 448).astype(np.float32).astype(E4M3)
    distance = np.abs(np.abs(blocks / scales.astype(np.float64)[..., None])[..., None] - np.array(MAGNITUDES))
    codes = (distance.argmin(axis=-1) + 8 * (blocks < 0)).reshape(rows, columns)
    return (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8), scales, factor


def decode(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray | None:
    """The weight `name` in float64 from the tensors on disk, which are taken to be of the right shapes and dtypes.

    None if a value breaks a rule: weights finite, scales finite and above zero; the scale of a block or a row may be
    zero where all its weights are.
    """
    base = name.removesuffix("weight")
    packed = tensors.get(f"{base}weight_packed")
    weight = packed if packed is not None else tensors[name]
    scale = tensors.get(f"{base}weight_scale", tensors.get(f"{base}weight_scale_inv"))
    if scale is None:
        out = weight.astype(np.float64)
        return out if np.isfinite(out).all() else None
    if weight.dtype == np.uint8:
        raw = scale.view(np.uint8)
        nibbles = np.stack([weight % 16, weight // 16], axis=-1).reshape(*scale.shape, 16)
        values, blocks = E2M1[nibbles], E4M3_TABLE[raw][..., None]
        found = float(tensors[f"{base}weight_scale_2" if packed is None else f"{base}weight_global_scale"].reshape(()))
        usual = math.isfinite(found) and 1e-37 < found < 1e34
        if not usual or (raw >= 127).any() or ((blocks == 0) & (values != 0)).any():
            return None
        return (values * blocks * (found if packed is None else 1 / found)).reshape(len(weight), -1)
    values, scale = E4M3_TABLE[weight.view(np.uint8)], scale.astype(np.float64)
    if scale.ndim == 2 and scale.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)):
        scale = np.kron(scale, np.ones((128, 128)))[: weight.shape[0], : weight.shape[1]]
    else:
        scale = scale.reshape(-1, 1)
    good = np.isfinite(values).all() and np.isfinite(scale).all() and not (scale < 0).any() and scale.max() < 1e35
    if not good or ((scale == 0) & (values != 0)).any():
        return None
    return values * scale


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, np.ndarray],
    kind: str | Mapping[str, str] | Callable[[str], str] = "bfloat16",
    *,
    shards: int = 1,
    extra: Mapping[str, np.ndarray] | None = None,
    activation_scales: bool = True,
) -> dict[str, np.ndarray]:
    """Writes logical weights; vectors and names without ".weight" stay float32 if their kind is encoded.

    Args:
      weights: name in a plain checkpoint -> weight.
      kind: one of KINDS, for all weights, by name (names left out are bfloat16), or by a function of the name.
      shards: files, filled in turn; more than one gives an index.
      extra: further tensors (an MTP layer, k/v scales).
      activation_scales: add the `input_scale` or `input_global_scale` that producers write beside NVFP4 weights.

    Returns:
      name -> the weight that was stored, float64.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        chosen = kind(name) if callable(kind) else kind if isinstance(kind, str) else kind.get(name, "bfloat16")
        if chosen not in PLAIN_KINDS and (np.ndim(weight) != 2 or not name.endswith(".weight")):
            chosen = "float32"
        tensors |= encode(name, weight, chosen)
        if activation_scales and chosen in NVFP4_KINDS:
            suffix = "input_scale" if chosen == "nvfp4" else "input_global_scale"
            tensors[name.removesuffix("weight") + suffix] = np.array([0.01], np.float32)
    stored = {name: decode(tensors, name) for name in weights}
    tensors |= extra or {}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return stored
    weight_map = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::shards]}
        write_safetensors(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return stored


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of an undamaged file, writeable, by the shortest way there is."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    out = {}
    for name, info in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = info["data_offsets"]
            data = np.frombuffer(bytearray(raw[8 + length + start : 8 + length + end]), DTYPES[info["dtype"]])
            out[name] = data.reshape(info["shape"])
    return out
