"""y = x w^T with NVFP4 weights and NVFP4 activations (W4A4): what Blackwell's block-scaled tensor cores multiply.

Opt-in, and not what a checkpoint gives with 16-bit activations: x is rounded to four bits by the checkpoint's
`input_scale` first. Implementations: `reference` here, `triton_native` in `triton_fp4`, `mosaic_native` in
`mosaic_fp4`. The native ones compile for their GPUs and have never run on one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ddtree_jax.models.quant import E4M3, GROUP, dequantise
from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.fp4_activations import quantise_activations

SCALE_ROWS, SCALE_COLUMNS = 128, 4  # of one 512-byte tile of scales in the order of the tensor cores


class Sizes(NamedTuple):
    """x [m, k], weights [n, k]; whether the scales are in the order of the tensor cores."""

    m: int
    n: int
    k: int
    swizzled: bool


def nvfp4_w4a4_matmul_reference(
    x: Any,
    codes: Any,
    scales: Any,
    global_scale: Any,
    input_scale: Any,
    *,
    out_dtype: Any = jnp.bfloat16,
    platform: Platform,
) -> jax.Array:
    """The product in plain JAX: activations quantised, both sides decoded, multiplied in float32.

    Args:
      x: floating [M, K].
      codes: uint8 [N, K/2], low nibble = even k.
      scales: float8_e4m3fn [N, K/16], or [N/128, K/64, 32, 16] from `prepare_weights`.
      global_scale: float32 scalar, the tensor's `weight_scale_2`.
      input_scale: float32 scalar, finite and > 0.
      out_dtype: of the result.
      platform: unused here.

    Returns:
      [M, N] in `out_dtype`: the sum over k of (code * scale) of x times (code * scale) of w in float32, times
      `input_scale * global_scale`, rounded once. A row of x with a NaN or an infinity is NaN. Raises `ValueError`.
    """
    del platform
    sizes = check_arguments(x, codes, scales, global_scale, input_scale)
    one = jnp.float32(1)
    x_codes, x_scales = quantise_activations(x, input_scale)
    plain = unswizzle_scales(scales, sizes.n, sizes.k // GROUP) if sizes.swizzled else scales
    decoded_x = dequantise(x_codes, x_scales, one, axis=1, dtype=jnp.float32)
    decoded_w = dequantise(codes, plain, one, axis=1, dtype=jnp.float32)
    product = jnp.einsum(
        "mk,nk->mn", decoded_x, decoded_w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return (product * whole_scale(global_scale, input_scale)).astype(out_dtype)


def check_arguments(x: Any, codes: Any, scales: Any, global_scale: Any, input_scale: Any) -> Sizes:
    """The sizes of a call; ValueError for what no implementation takes. Looks at shapes and dtypes only."""
    _require(x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.floating), f"x: got {_show(x)}, expected floating [M, K]")
    m, k = x.shape
    _require(k % GROUP == 0, f"x: {k} columns, expected a multiple of {GROUP}")
    fits = codes.ndim == 2 and codes.shape[1] == k // 2
    _require(codes.dtype == jnp.uint8 and fits, f"codes: got {_show(codes)}, expected uint8[N, {k // 2}]")
    n = codes.shape[0]
    plain, swizzled = (n, k // GROUP), swizzled_shape(n, k // GROUP)
    _require(
        scales.dtype == E4M3 and tuple(scales.shape) in (plain, swizzled),
        f"scales: got {_show(scales)}, expected {E4M3}{list(plain)} or, prepared, {list(swizzled)}",
    )
    for name, scalar in (("global_scale", global_scale), ("input_scale", input_scale)):
        fits = scalar.dtype == jnp.float32 and scalar.shape in ((), (1,))
        _require(fits, f"{name}: got {_show(scalar)}, expected a float32 scalar")
    return Sizes(m, n, k, scales.ndim == 4)


def split_steps(steps: int, programs: int, wanted: int) -> int:
    """Parts of K, a power of two that divides its `steps`, so that `programs` times as many are about `wanted`.

    Weights are read once whatever the split, but each part needs some steps to overlap loads and products.
    """
    split = 1
    while programs * split < wanted and steps % (2 * split) == 0 and steps // (2 * split) >= 4:
        split *= 2
    return split


def whole_scale(global_scale: Any, input_scale: Any) -> jax.Array:
    """What the sum of codes and block scales is multiplied by, float32 []."""
    return jnp.reshape(input_scale, ()) * jnp.reshape(global_scale, ())


def swizzled_shape(rows: int, columns: int) -> tuple[int, int, int, int]:
    """Shape of [rows, columns] scales in the order of the tensor cores, padded to whole tiles."""
    return -(-rows // SCALE_ROWS), -(-columns // SCALE_COLUMNS), 32, 16


def swizzle_scales(scales: jax.Array) -> jax.Array:
    """[rows, K/16] -> [rows/128, K/64, 32, 16], padded with zeros: the order in which tcgen05 reads block scales.

    The scale of row 128 i + 32 j + l and column 4 q + t lies at [i, q, l, 4 j + t].
    """
    tiles, steps, lanes, _ = swizzled_shape(*scales.shape)
    rows, columns = tiles * SCALE_ROWS, steps * SCALE_COLUMNS
    padded = jnp.pad(scales, ((0, rows - scales.shape[0]), (0, columns - scales.shape[1])))
    parts = padded.reshape(tiles, 4, lanes, steps, SCALE_COLUMNS)
    return parts.transpose(0, 3, 2, 1, 4).reshape(tiles, steps, lanes, 4 * SCALE_COLUMNS)


def unswizzle_scales(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
    """The inverse of `swizzle_scales`, without the padding."""
    tiles, steps, lanes, _ = swizzled.shape
    parts = swizzled.reshape(tiles, steps, lanes, 4, SCALE_COLUMNS).transpose(0, 3, 2, 1, 4)
    return parts.reshape(tiles * SCALE_ROWS, steps * SCALE_COLUMNS)[:rows, :columns]


def prepare_weights(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights in the form that `mosaic_native` takes without work: the codes as they are, the scales re-ordered.

    To be called once, at load. Every implementation takes either form; the other one costs a pass over the scales in
    each call.
    """
    return codes, swizzle_scales(scales)


def _show(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
