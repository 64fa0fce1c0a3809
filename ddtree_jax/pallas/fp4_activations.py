"""Activations in NVFP4 by a checkpoint's `input_scale`, in plain JAX: what products of codes with codes (W4A4) take.

    x[m, k] ~ E2M1[code[m, k]] * scale[m, k // 16] * input_scale
    scale = e4m3(largest magnitude of the block / 6 / input_scale)

`input_scale` is static, measured at calibration (amax / (6 * 448) there); the block scales are those of the call. This
is a second rounding that products with 16-bit activations (W4A16) do not have.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.models.quant import E2M1_MAX, E4M3, E4M3_MAX, GROUP

# Between neighbouring magnitudes, and whether a tie goes up: it goes to the even code.
_THRESHOLDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def quantise_activations(x: Any, input_scale: Any) -> tuple[jax.Array, jax.Array]:
    """Codes and block scales of activations; XLA fuses it to two kernels over x.

    Args:
      x: floating [M, K], K a multiple of 16.
      input_scale: float32 scalar (or [1], as some files have it), finite and > 0; not checked.

    Returns:
      codes: uint8 [M, K/2], low nibble = even k. To nearest, ties to the even code; the sign of zeros and of what
        rounds to zero is kept.
      scales: float8_e4m3fn [M, K/16]. To nearest even, at most 448: a block above 6 * 448 * input_scale saturates at
        that value. A block of zeros, and one whose scale rounds to zero (below 6 * 2**-10 * input_scale), has scale 0
        and codes of signed zeros. A block with a NaN or an infinity has scale NaN and codes of signed zeros, so that
        its whole row of the product is NaN and a broken activation cannot pass as a saturated one.

      Raises `ValueError` for a shape or dtype that is none of these.
    """
    x, factor = jnp.asarray(x), jnp.asarray(input_scale)
    if x.ndim != 2 or x.shape[1] % GROUP:
        raise ValueError(f"x: got shape {x.shape}, expected [M, K] with K a multiple of {GROUP}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x: got {x.dtype}, expected a floating dtype")
    if factor.dtype != jnp.float32 or factor.shape not in ((), (1,)):
        raise ValueError(f"input_scale: got {factor.dtype}{list(factor.shape)}, expected a float32 scalar")
    with jax.named_scope("quantise_activations"):
        factor = factor.reshape(())
        blocks = x.astype(jnp.float32).reshape(x.shape[0], -1, GROUP)
        peak = jnp.max(jnp.abs(blocks), axis=-1)
        finite = jnp.all(jnp.isfinite(blocks), axis=-1)  # a maximum need not keep a NaN on every device
        wanted = jnp.minimum(peak / (E2M1_MAX * factor), E4M3_MAX)
        scales = jnp.where(finite, wanted, jnp.nan).astype(E4M3)
        # XLA may drop the rounding to E4M3 in what is worked out from the scales: seen on an H200, 7 % of the codes.
        scales = jax.lax.optimization_barrier(scales)
        step = (scales.astype(jnp.float32) * factor)[..., None]
        # Thresholds times the step, not blocks over the step: a multiply is rounded alike everywhere, a GPU's
        # division need not be, and the codes of a CPU and a GPU agree for the same scales.
        magnitude = jnp.abs(blocks)
        codes = jnp.zeros(blocks.shape, jnp.uint8)
        for threshold, up in _THRESHOLDS:
            limit = jnp.float32(threshold) * step
            codes += (magnitude >= limit if up else magnitude > limit).astype(jnp.uint8)
        codes = jnp.where(step > 0, codes, jnp.uint8(0)) | (jnp.signbit(blocks).astype(jnp.uint8) << 3)
        pairs = codes.reshape(x.shape[0], -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4), scales
