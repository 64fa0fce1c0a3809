"""How one weight lies in a checkpoint: plain, NVFP4 or FP8, told from the dtypes on disk.

Published quantised checkpoints mix encodings, and the ignore lists in their configs drift from their tensors, so each
tensor is judged by its own dtype and by its neighbours' (`M.weight`, `M.weight_scale`, ...), never by a config.
`find` reads headers only; the methods of `Stored` read and check the values.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.quant import E2M1_MAX, E2M1_VALUES, E4M3, E4M3_MAX, E4M3_MAX_BYTE, GROUP, row_panels
from ddtree_jax.safetensors_files import FLOAT_DTYPES, TensorEntry, map_tensor

BLOCK = 128  # rows and columns that share a scale in block FP8
SUPPORTED = (
    "supported are float weights, NVFP4 of ModelOpt (uint8 weight, weight_scale, weight_scale_2) and of"
    " compressed-tensors (weight_packed, weight_scale, weight_global_scale), and FP8 E4M3 with weight_scale_inv"
    " or weight_scale"
)
SCALE_DTYPES = ("F32", "BF16")  # of FP8 weights
# Whatever lies beside a weight under one of these names changes what the weight means.
NEIGHBOURS = (
    *("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale"),
    *("weight_shape", "weight_zero_point", "weight_g_idx", "weight_offset", "pre_quant_scale"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LARGEST = float(ml_dtypes.finfo(BFLOAT16).max)  # a decoded weight must fit any dtype it may be asked in
_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
_PAIR_VALUES = np.array([[E2M1_VALUES[b & 15], E2M1_VALUES[b >> 4]] for b in range(256)], np.float32)


class Encoding(enum.Enum):
    """The encodings that are read."""

    PLAIN = "plain"
    NVFP4 = "NVFP4 (ModelOpt)"
    NVFP4_PACKED = "NVFP4 (compressed-tensors)"
    FP8_BLOCK = "FP8 in blocks of 128 x 128"
    FP8_SCALED = "FP8 with one scale for a tensor or for a row"


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where the parts of one weight lie, and what they mean.

    Attributes:
      name: of the weight in a plain checkpoint, `M.weight` whatever the encoding.
      shape: of the weight: [out, in], or any shape where PLAIN.
      weight, scale, global_scale: the tensors on disk; the scales are None where the encoding has none.
      names: the names of those tensors.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    weight: TensorEntry
    scale: TensorEntry | None = None
    global_scale: TensorEntry | None = None
    names: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, scales included."""
        return sum(entry.num_bytes for entry in (self.weight, self.scale, self.global_scale) if entry is not None)

    @property
    def is_nvfp4(self) -> bool:
        return self.encoding in (Encoding.NVFP4, Encoding.NVFP4_PACKED)

    def codes(self) -> np.ndarray:
        """NVFP4: the packed codes, uint8 [out, in/2], a read-only memory map."""
        self._require_nvfp4()
        return map_tensor(self.weight)

    def scales(self) -> np.ndarray:
        """NVFP4: the block scales, float8_e4m3fn [out, in/16], a read-only memory map whose values are checked.

        Raises `CheckpointError` for a scale that is NaN or negative, or zero over codes that are not.
        """
        self._require_nvfp4()
        scales = map_tensor(self.scale)
        raw, codes = scales.view(np.uint8), self.codes()
        for rows in row_panels(self.shape):
            panel = raw[rows]
            if panel.size and panel.max() > E4M3_MAX_BYTE:
                self._refuse("a block scale is NaN or negative")
            if not panel.all():
                groups = codes[rows].reshape(*panel.shape, GROUP // 2)
                if (groups[panel == 0] & 0x77).any():  # bits 3 and 7 are signs: code 8 is -0
                    self._refuse("a block scale is zero where the weights are not")
        return scales

    def multiplier(self) -> np.float32:
        """NVFP4: what code * block scale is multiplied with: `weight_scale_2`, or 1 / `weight_global_scale`.

        Raises `CheckpointError` unless it is a normal float32 > 0 that no weight can overflow with.
        """
        self._require_nvfp4()
        found = map_tensor(self.global_scale).reshape(())[()]
        value = found
        if self.encoding is Encoding.NVFP4_PACKED:
            with np.errstate(all="ignore"):
                value = np.float32(1) / found
        # Subnormal numbers are zero to some devices; found itself is checked too, as 1 / inf = 0 hides what it was.
        good = np.isfinite(found) and found > 0 and np.isfinite(value) and value >= np.finfo(np.float32).tiny
        if not good or E2M1_MAX * E4M3_MAX * float(value) > LARGEST:
            self._refuse(f"global scale {found}, expected a finite number > 0 of usual size")
        return np.float32(value)

    def decoded(self, dtype: Any) -> np.ndarray:
        """The weight in float32 or bfloat16, computed in float32 and rounded once; every value is checked.

        Temporaries are row panels, so the result is all that is allocated; a PLAIN weight that is in `dtype` already
        is returned as the read-only memory map. Raises `CheckpointError` for a value that is not finite, or a scale
        that no weight can have.
        """
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, BFLOAT16):
            raise ValueError(f"dtype: got {dtype}, allowed are float32 and bfloat16")
        weight = map_tensor(self.weight)
        if self.encoding is Encoding.PLAIN:
            return self._plain(weight, dtype)
        out = np.empty(self.shape, dtype)
        if self.is_nvfp4:
            scales, factor = self.scales(), self.multiplier()
            for rows in row_panels(self.shape):
                panel = _PAIR_VALUES[weight[rows]].reshape(*scales[rows].shape, GROUP)
                panel = panel * _E4M3_VALUES[scales[rows].view(np.uint8)][..., None]
                out[rows] = (panel * factor).reshape(panel.shape[0], -1) if panel.size else 0
            return out
        raw, scale, block = weight.view(np.uint8), self._fp8_scale(), self.encoding is Encoding.FP8_BLOCK
        for rows in row_panels(self.shape):
            panel = raw[rows]
            if panel.size and (panel & 0x7F).max() > E4M3_MAX_BYTE:
                self._refuse("NaN values")
            own = scale
            if block:
                own = scale[np.arange(rows.start, rows.stop) // BLOCK]
                own = np.repeat(own, BLOCK, axis=1)[:, : self.shape[1]]
            elif len(scale) > 1:
                own = scale[rows]
            values = _E4M3_VALUES[panel]
            if not own.all() and (values * (own == 0)).any():
                self._refuse("a scale is zero where the weights are not")
            out[rows] = values * own
        return out

    def _plain(self, weight: np.ndarray, dtype: np.dtype) -> np.ndarray:
        same = weight.dtype == dtype
        out = weight if same else np.empty(self.shape, dtype)
        # A scalar has no rows.
        source, target = (weight, out) if weight.ndim else (weight.reshape(1), out.reshape(1))
        for rows in row_panels(source.shape):
            if not all_finite(source[rows]):
                self._refuse("NaN or infinite values")
            if not same:
                with np.errstate(over="ignore"):
                    target[rows] = source[rows]
                if not all_finite(target[rows]):
                    self._refuse(f"values beyond the range of {dtype}")
        return out

    def _fp8_scale(self) -> np.ndarray:
        """The scales in float32: [1, 1], [out, 1], or one for each block; finite, none negative."""
        with np.errstate(invalid="ignore"):  # a signalling NaN in bfloat16 warns, and is refused below
            scale = map_tensor(self.scale).astype(np.float32)
        if self.encoding is Encoding.FP8_SCALED:
            scale = scale.reshape(-1, 1)
        if not np.isfinite(scale).all() or (scale < 0).any() or float(scale.max(initial=0)) * E4M3_MAX > LARGEST:
            self._refuse("a scale is negative, NaN, infinite, or too large for any weight")
        return scale

    def _require_nvfp4(self) -> None:
        if not self.is_nvfp4:
            raise ValueError(f"{self.name}: is {self.encoding.value}, it has no NVFP4 codes or scales")

    def _refuse(self, what: str) -> None:
        raise CheckpointError(f"{self.weight.file}: tensor {self.name!r} ({self.encoding.value}): {what}")


def all_finite(array: np.ndarray) -> bool:
    """Whether no value is NaN or infinite, without a copy in another dtype: such values have all exponent bits set."""
    if array.dtype == BFLOAT16:
        bits, magnitude, infinity = array.view(np.uint16), 0x7FFF, 0x7F80
    elif array.dtype == np.float16:
        bits, magnitude, infinity = array.view(np.uint16), 0x7FFF, 0x7C00
    elif array.dtype == np.float32:
        bits, magnitude, infinity = array.view(np.uint32), 0x7FFFFFFF, 0x7F800000
    else:
        return bool(np.isfinite(array).all())
    return not array.size or bool((bits & bits.dtype.type(magnitude)).max() < infinity)


def find(entries: Mapping[str, TensorEntry], folder: Path, name: str, shape: Iterable[int]) -> Stored:
    """How the weight `name` lies in a checkpoint, from headers alone.

    Only a matrix named `M.weight` can be encoded; everything else must be a float tensor of that name.

    Args:
      entries: every tensor of the checkpoint.
      folder: for messages.
      name: in a plain checkpoint.
      shape: of the weight, whatever it is packed in.

    Raises:
      CheckpointError: a tensor is missing or has another dtype or shape, or the encoding is not supported.
    """
    shape = tuple(shape)
    base = name.removesuffix("weight")
    if len(shape) != 2 or not name.endswith(".weight"):
        return _Finder(entries, folder, name, shape, "", {}).plain()
    beside = {part: entries[base + part] for part in NEIGHBOURS if base + part in entries}
    return _Finder(entries, folder, name, shape, base, beside).matrix()


@dataclasses.dataclass(frozen=True)
class _Finder:
    entries: Mapping[str, TensorEntry]
    folder: Path
    name: str
    shape: tuple[int, ...]
    base: str
    beside: Mapping[str, TensorEntry]

    def plain(self) -> Stored:
        entry = self.entries.get(self.name)
        if entry is None:
            raise CheckpointError(f"{self.folder}: tensor {self.name!r} is missing, expected shape {self.shape}")
        self.check(self.name, entry, tuple(FLOAT_DTYPES), (self.shape,))
        return Stored(self.name, self.shape, Encoding.PLAIN, entry, names=(self.name,))

    def matrix(self) -> Stored:
        weight, packed = self.beside.get("weight"), self.beside.get("weight_packed")
        rows, columns = self.shape
        half, groups = ((rows, columns // 2),), ((rows, columns // GROUP),)
        one = ((), (1,))
        if packed is not None:
            self.only("weight_packed", "weight_scale", "weight_global_scale")
            self.whole_groups()
            self.check(f"{self.base}weight_packed", packed, ("U8",), half)
            scale = self.part("weight_scale", ("F8_E4M3",), groups)
            return self.stored(
                Encoding.NVFP4_PACKED,
                ("weight_packed", packed),
                ("weight_scale", scale),
                ("weight_global_scale", self.part("weight_global_scale", ("F32",), one)),
            )
        if weight is None:
            self.only(
                *(part for part in NEIGHBOURS if part.startswith("weight_scale") or part == "weight_global_scale")
            )
            return self.plain()  # says that it is missing
        if weight.dtype == "U8":
            self.only("weight", "weight_scale", "weight_scale_2")
            self.whole_groups()
            self.check(self.name, weight, ("U8",), half)
            scale = self.part("weight_scale", ("F8_E4M3",), groups)
            return self.stored(
                Encoding.NVFP4,
                ("weight", weight),
                ("weight_scale", scale),
                ("weight_scale_2", self.part("weight_scale_2", ("F32",), one)),
            )
        if weight.dtype == "F8_E4M3":
            return self.fp8(weight, rows, columns)
        self.only("weight")
        return self.plain()

    def fp8(self, weight: TensorEntry, rows: int, columns: int) -> Stored:
        self.check(self.name, weight, ("F8_E4M3",), (self.shape,))
        blocks = (math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
        if "weight_scale_inv" in self.beside:
            self.only("weight", "weight_scale_inv")
            scale = self.part("weight_scale_inv", SCALE_DTYPES, (blocks,))
            return self.stored(Encoding.FP8_BLOCK, ("weight", weight), ("weight_scale_inv", scale))
        self.only("weight", "weight_scale")
        # compressed-tensors writes block scales under this name; of one row or column of blocks both readings agree.
        scale = self.part("weight_scale", SCALE_DTYPES, ((), (1,), (1, 1), (rows,), (rows, 1), blocks))
        scaled = scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
        encoding = Encoding.FP8_SCALED if scaled else Encoding.FP8_BLOCK
        return self.stored(encoding, ("weight", weight), ("weight_scale", scale))

    def stored(self, encoding: Encoding, *parts: tuple[str, TensorEntry]) -> Stored:
        names = tuple(self.base + part for part, _ in parts)
        return Stored(self.name, self.shape, encoding, *(entry for _, entry in parts), names=names)

    def part(self, part: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> TensorEntry:
        entry = self.beside.get(part)
        if entry is None:
            lying = ", ".join(repr(self.base + found) for found in self.beside)
            raise CheckpointError(
                f"{self.folder}: tensor {self.base + part!r} is missing beside {lying}, expected"
                f" {' or '.join(dtypes)} of shape {shapes[-1]}; {SUPPORTED}"
            )
        self.check(self.base + part, entry, dtypes, shapes)
        return entry

    def only(self, *allowed: str) -> None:
        """Refuses neighbours that the encoding does not know: they would change what the weight means."""
        for part, entry in self.beside.items():
            if part not in allowed:
                others = ", ".join(f"{self.base + found!r} ({self.beside[found].dtype})" for found in self.beside)
                raise CheckpointError(
                    f"{entry.file}: tensor {self.base + part!r} makes {self.name!r} an encoding that is not supported"
                    f" (found {others}); {SUPPORTED}"
                )

    def whole_groups(self) -> None:
        if self.shape[1] % GROUP:
            raise CheckpointError(
                f"{self.folder}: tensor {self.name!r}: NVFP4 of {self.shape[1]} columns, expected a multiple of {GROUP}"
            )

    def check(
        self, name: str, entry: TensorEntry, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        where = f"{entry.file}: tensor {name!r}"
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{where}: dtype {entry.dtype}, expected {' or '.join(dtypes)}; {SUPPORTED}")
        if entry.shape not in shapes:
            expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
            raise CheckpointError(f"{where}: shape {entry.shape}, expected {expected} for a weight {self.shape}")


_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def layer_number(name: str) -> int | None:
    """The layer that a tensor's name speaks of, None if it speaks of none."""
    found = _LAYER.search(name)
    return None if found is None else int(found[1])


def left_out(entries: Iterable[str], used_names: Collection[str], num_layers: int) -> dict[str, int]:
    """What a checkpoint holds beside the weights that were used: category -> number of tensors, none of them zero.

    Args:
      entries: the names of every tensor.
      used_names: those that were used (`Stored.names`); a set, for speed.
      num_layers: the model's decoder layers; the MTP layer is the one after the last.

    Returns:
      Counts of "MTP layer", "activation scales", "k/v scales", "indexer of shared layers" and "unknown". A tensor of
      the MTP layer counts there, whatever it is.
    """
    counts: collections.Counter[str] = collections.Counter()
    for name in entries:
        if name in used_names:
            continue
        layer = layer_number(name)
        if layer is not None and layer >= num_layers:
            counts["MTP layer"] += 1
        elif name.endswith((".input_scale", ".input_global_scale")):
            counts["activation scales"] += 1
        elif name.endswith(_KV_SCALES):
            counts["k/v scales"] += 1
        elif ".indexer." in name:
            counts["indexer of shared layers"] += 1
        else:
            counts["unknown"] += 1
    return dict(counts)
