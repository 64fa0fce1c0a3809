"""Random NVFP4 weights as checkpoints hold them, and what they mean in float64, worked out by table."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.pallas.nvfp4_grid import SHIFTED, make_grid

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = ml_dtypes.float8_e4m3fn


def pack(codes):
    """uint8[..., K, P, width] codes -> [..., K / 2, P, width], the even k in the low nibble."""
    pairs = codes.reshape(*codes.shape[:-3], -1, 2, *codes.shape[-2:])
    return pairs[..., 0, :, :] | pairs[..., 1, :, :] << 4


def values(codes, scales):
    """float64[..., K, P, width], exact, without the global scale."""
    return E2M1[codes] * np.repeat(scales.astype(np.float64), 16, axis=-3)


def random_grid(rng, lead, k, parts, width, arrangement=SHIFTED):
    """(GridWeight, its float64 [*lead, K, P, width]); entries are about K^-1/2, each part has its own factor."""
    codes = rng.integers(0, 16, (*lead, k, parts, width), dtype=np.uint8)
    sign = rng.choice([-1, 1], (*lead, k // 16, parts, width))
    scales = (sign * np.exp2(rng.uniform(-3, 1, sign.shape))).astype(E4M3)
    factors = (rng.uniform(0.3, 1.2, (*lead, parts)) * k**-0.5).astype(np.float32)
    grid = make_grid(pack(codes), scales, factors, arrangement=arrangement)
    return grid, values(codes, scales) * factors.astype(np.float64)[..., None, :, None]


def rounded(x, dtype):
    """The rows as they are given to an operation, and the same in float64."""
    given = jnp.asarray(x, dtype)
    return given, np.asarray(given).astype(np.float64)


def relative(got, want):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape and np.isfinite(got).all()
    return np.linalg.norm(got - want) / np.linalg.norm(want)


TOLERANCE = {jnp.bfloat16: 1e-2, jnp.float32: 1e-5}
