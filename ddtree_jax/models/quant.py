"""The NVFP4 codec: 4-bit E2M1 codes, one float8 scale for 16 columns, one float32 multiplier for a tensor.

    w[o, i] = E2M1[code[o, i]] * scale[o, i // 16] * multiplier

Two codes share a byte along the contraction axis: byte j holds column 2j in its low nibble and 2j + 1 in its high one.
The product of a code and a scale is exact in float32 (2 and 4 significant bits), so a decoded weight is the true
product rounded once to float32 and, for a narrower dtype, once more. Keep that order: `scale * multiplier` first
rounds before the code comes in, and the CPU, the GPU and the host would then differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

GROUP = 16  # columns that share a block scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # by code
E2M1_MAX = 6.0
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_MAX = 448.0
E4M3_MAX_BYTE = 0x7E  # 448; 0x7F is NaN, 0x80 and above are negative
PANEL_ELEMENTS = 1 << 18  # of a row panel on the host: its temporaries stay in the cache

_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes
_UP_ON_TIE = (False, True, False, True, False, True, False)  # a tie goes to the even code


def row_panels(shape: tuple[int, ...], elements: int = PANEL_ELEMENTS) -> Iterator[slice]:
    """Slices of the first axis, of about `elements` elements each and at least one row."""
    rows = shape[0] if shape else 1
    row = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, elements // max(1, row))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def unpack_codes(codes: Any, axis: int) -> jax.Array:
    """Codes 0..15 from packed bytes: uint8 [..., in/2, ...] -> uint8 [..., in, ...], `in` on `axis`."""
    codes = jnp.asarray(codes)
    _require(codes.dtype == jnp.uint8, f"codes: got {codes.dtype}, expected uint8")
    axis = _axis(axis, codes.ndim)
    pairs = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis + 1)
    return pairs.reshape(*codes.shape[:axis], 2 * codes.shape[axis], *codes.shape[axis + 1 :])


def dequantise(codes: Any, scales: Any, global_scale: Any, *, axis: int, dtype: Any) -> jax.Array:
    """E2M1[code] * scale of its group * global scale.

    Args:
      codes: uint8, packed; in/2 on `axis`.
      scales: float8_e4m3fn of the same shape but in/16 on `axis`.
      global_scale: float32, a scalar or of the rank of `scales` and broadcastable against it.
      axis: the contraction axis.
      dtype: of the result; the product is computed in float32 and rounded once.

    Returns:
      [..., in, ...] in `dtype`. Raises `ValueError` for shapes or dtypes that do not belong together.
    """
    codes, scales, factor = jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(global_scale)
    axis = _axis(axis, codes.ndim)
    half, rest = codes.shape[axis], (codes.shape[:axis], codes.shape[axis + 1 :])
    expected = (*rest[0], 2 * half // GROUP, *rest[1])
    _require(2 * half % GROUP == 0, f"codes: {2 * half} columns on axis {axis}, expected a multiple of {GROUP}")
    _require(scales.shape == expected, f"scales: got shape {scales.shape}, expected {expected} for codes {codes.shape}")
    _require(scales.dtype == E4M3, f"scales: got {scales.dtype}, expected {E4M3}")
    _require(factor.dtype == jnp.float32, f"global_scale: got {factor.dtype}, expected float32")
    fits = factor.ndim == scales.ndim and all(a in (1, b) for a, b in zip(factor.shape, scales.shape, strict=True))
    _require(
        factor.ndim == 0 or fits, f"global_scale: got shape {factor.shape}, expected one for scales {scales.shape}"
    )
    grouped = (*rest[0], expected[axis], GROUP, *rest[1])
    product = _e2m1(unpack_codes(codes, axis)).reshape(grouped)
    product = product * jnp.expand_dims(scales.astype(jnp.float32), axis + 1)
    product = product * (jnp.expand_dims(factor, axis + 1) if factor.ndim else factor)
    return product.astype(dtype).reshape(*rest[0], 2 * half, *rest[1])


def _e2m1(codes: jax.Array) -> jax.Array:
    """Values of codes 0..15 in float32, by arithmetic on twice the magnitude: 0, 1, 2, 3, 4, 6, 8, 12."""
    codes = codes.astype(jnp.int32)
    k = codes & 7
    doubled = jnp.where(k < 4, k, jnp.where(k < 6, 2 * k - 4, 4 * k - 16))
    return doubled.astype(jnp.float32) * jnp.where(codes < 8, jnp.float32(0.5), jnp.float32(-0.5))


def _axis(axis: int, rank: int) -> int:
    _require(-rank <= axis < rank, f"axis: got {axis}, expected one of {rank} axes")
    return axis % rank


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def quantise(
    w: np.ndarray, *, multiplier: float | None = None, search: bool = False
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """NVFP4 of one weight, on the host, in the layout of a ModelOpt file.

    Args:
      w: float [out, in], finite, `in` a multiple of 16.
      multiplier: the tensor's `weight_scale_2`; by default amax / (6 * 448), with `search` amax / (6 * 256) so that
        the block of the largest weight has room for a scale of amax / 4.
      search: take for each block the scale of least squared error among those near amax / 6 and amax / 4 of the block.

    Returns:
      codes uint8 [out, in/2], scales float8_e4m3fn [out, in/16], multiplier float32. Raises `ValueError`.
    """
    w = np.asarray(w)
    _require(w.ndim == 2, f"w: got shape {w.shape}, expected [out, in]")
    _require(w.shape[1] % GROUP == 0, f"w: {w.shape[1]} columns, expected a multiple of {GROUP}")
    panels = list(row_panels(w.shape))
    with np.errstate(invalid="ignore"):  # a signalling NaN warns, and is refused below
        peaks = [float(np.abs(w[rows].astype(np.float64)).max(initial=0)) for rows in panels]
    _require(bool(np.isfinite(peaks).all()), "w: NaN or infinite values")  # max keeps a NaN
    peak = max(peaks, default=0.0)
    tiny = float(np.finfo(np.float32).tiny)
    if multiplier is None:
        multiplier = max(peak / (E2M1_MAX * (256 if search else E4M3_MAX)), tiny) if peak else 1.0
    with np.errstate(over="ignore"):
        factor = np.float32(multiplier)
    _require(np.isfinite(factor) and factor >= tiny, f"multiplier: got {multiplier}, expected a normal float32 > 0")
    codes = np.empty((w.shape[0], w.shape[1] // 2), np.uint8)
    scales = np.empty((w.shape[0], w.shape[1] // GROUP), E4M3)
    for rows in panels:
        blocks = w[rows].astype(np.float64).reshape(-1, w.shape[1] // GROUP, GROUP) / float(factor)
        own, scale = _nearest_blocks(blocks, search)
        own = own.reshape(own.shape[0], -1, 2)
        codes[rows] = own[..., 0] | own[..., 1] << 4
        scales[rows] = scale
    return codes, scales, factor


def _nearest_blocks(blocks: np.ndarray, search: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, groups, 16] and scales [rows, groups] of blocks [rows, groups, 16] in units of the multiplier."""
    peak = np.abs(blocks).max(axis=-1, initial=0)
    first = _block_scale(peak / E2M1_MAX)
    best = np.where(peak == 0, np.array(1.0, E4M3), first)
    codes = _nearest_codes(blocks, best)
    if not search:
        return codes, best
    least = _squared_error(blocks, codes, best)
    for base in (first, _block_scale(peak / 4)):
        for step in (0, -1, 1):
            byte = np.clip(base.view(np.uint8).astype(np.int32) + step, 1, E4M3_MAX_BYTE).astype(np.uint8)
            trial = byte.view(E4M3)
            trial_codes = _nearest_codes(blocks, trial)
            error = _squared_error(blocks, trial_codes, trial)
            better = (error < least) & (peak > 0)
            best = np.where(better, trial, best)
            codes = np.where(better[..., None], trial_codes, codes)
            least = np.where(better, error, least)
    return codes, best


def _block_scale(wanted: np.ndarray) -> np.ndarray:
    return np.clip(wanted, 2.0**-9, E4M3_MAX).astype(np.float32).astype(E4M3)  # 2**-9 is the smallest above zero


def _nearest_codes(blocks: np.ndarray, scale: np.ndarray) -> np.ndarray:
    ratio = np.abs(blocks) / scale.astype(np.float64)[..., None]
    codes = np.where(np.signbit(blocks), np.uint8(8), np.uint8(0))
    for threshold, up in zip(_THRESHOLDS, _UP_ON_TIE, strict=True):
        codes += (ratio >= threshold) if up else (ratio > threshold)
    return codes


def _squared_error(blocks: np.ndarray, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    values = np.asarray(E2M1_VALUES)[codes] * scale.astype(np.float64)[..., None]
    return np.square(blocks - values).sum(axis=-1)


def decode(codes: np.ndarray, scales: np.ndarray, multiplier: float) -> np.ndarray:
    """The weight [out, in] in float64, on the host, from codes [out, in/2] and scales [out, in/16]."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*scales.shape, GROUP)
    values = np.asarray(E2M1_VALUES)[pairs] * scales.astype(np.float64)[..., None] * float(multiplier)
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
