"""The activation quantiser against a numpy oracle written from the format, and against the weight quantiser."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.models import quant
from ddtree_jax.pallas.fp4_activations import quantise_activations

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Index of the nearest of an ascending table, float64; ties to the even index. Saturates."""
    distance = np.abs(values[..., None] - table)
    best = distance.min(axis=-1, keepdims=True)
    tied = distance == best
    even = tied & (np.arange(len(table)) % 2 == 0)
    return np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))


E4M3_TABLE = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0..448


def oracle(x: np.ndarray, input_scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [M, K], scale bytes [M, K/16], and the relative room of each block scale to its rounding boundary."""
    blocks = x.astype(np.float64).reshape(x.shape[0], -1, 16)
    wanted = np.minimum(np.abs(blocks).max(-1) / 6 / input_scale, 448)
    byte = nearest(wanted, E4M3_TABLE)
    middles = (E4M3_TABLE[1:] + E4M3_TABLE[:-1]) / 2
    room = np.abs(wanted[..., None] / middles - 1).min(-1)
    step = E4M3_TABLE[byte][..., None] * input_scale
    ratio = np.divide(np.abs(blocks), step, out=np.zeros_like(blocks), where=step > 0)
    codes = nearest(ratio, E2M1) + 8 * np.signbit(blocks)
    return codes.reshape(x.shape), byte.astype(np.uint8), room


def run(x, input_scale):
    codes, scales = jax.jit(quantise_activations)(x, np.float32(input_scale))
    assert codes.dtype == jnp.uint8 and scales.dtype == jnp.float8_e4m3fn
    assert codes.shape == (x.shape[0], x.shape[1] // 2) and scales.shape == (x.shape[0], x.shape[1] // 16)
    codes = np.asarray(codes)
    return np.stack([codes & 15, codes >> 4], -1).reshape(x.shape), np.asarray(scales).view(np.uint8)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16])
@pytest.mark.parametrize("input_scale", [2.0**-9, 0.00123, 0.7])
def test_random_blocks(dtype, input_scale):
    rng = np.random.default_rng()
    magnitude = np.exp2(rng.uniform(-12, 9, (17, 20, 1))) * 6 * input_scale
    x = (rng.standard_normal((17, 20, 16)) * magnitude).astype(dtype).reshape(17, 320)
    input_scale = float(np.float32(input_scale))
    codes, scales = run(x, input_scale)
    expected_codes, expected_scales, room = oracle(x, input_scale)
    clear = room > 1e-6  # elsewhere float32 may round the quotient to the other side
    assert clear.mean() > 0.85  # bfloat16 over a power of two meets ties often
    np.testing.assert_array_equal(scales[clear], expected_scales[clear])
    # A code may differ where float32 rounds a threshold times the step across the value; the value is then on it.
    differs = (codes != expected_codes).reshape(17, 20, 16) & clear[..., None]
    step = (E4M3_TABLE[scales] * input_scale)[..., None]
    ratio = np.abs(x.astype(np.float64).reshape(17, 20, 16)) / np.maximum(step, 1e-300)
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    assert np.all(np.abs(ratio[..., None] / middles - 1).min(-1)[differs] < 1e-6)
    assert differs.mean() < 0.01


def test_every_tie_and_every_code():
    """input_scale 1/4 and block scales of powers of two: every threshold is exact, so every tie is one."""
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    values = np.concatenate([E2M1, middles, np.nextafter(middles, 0), np.nextafter(middles, 9)])
    values = values.astype(np.float32)
    values = np.concatenate([values, -values])
    blocks = np.concatenate([np.full((58, 1), 6.0), values[:, None], np.zeros((58, 14))], 1).astype(np.float32)
    x = np.concatenate([blocks * np.float32(2.0**e / 4) for e in (-6, -1, 0, 5, 8)], axis=1)
    codes, scales = run(x, 0.25)
    expected_codes, expected_scales, _ = oracle(x, 0.25)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected_codes)
    assert set(codes.ravel()) == set(range(16))


def test_scale_ties_go_to_even():
    middles = (E4M3_TABLE[1:] + E4M3_TABLE[:-1]) / 2
    x = np.zeros((len(middles), 16), np.float32)
    x[:, 3] = -middles * 6 * 0.5
    _, scales = run(x, 0.5)
    np.testing.assert_array_equal(scales[:, 0], [low + low % 2 for low in range(len(middles))])


def test_zeros_overflow_and_underflow():
    input_scale = 2.0**-4
    x = np.zeros((6, 16), np.float32)
    x[1] = -0.0
    x[2, 5], x[2, 6] = 448 * 6 * input_scale * 8, -1 * 448 * input_scale  # eight times too large
    x[3, 0] = -6 * 2.0**-10 * input_scale  # scale: a tie between 0 and the smallest, to 0
    x[4, 0] = -6 * 2.0**-10 * input_scale * 1.001
    x[5, 15] = np.float32(3.3e38)
    codes, scales = run(x, input_scale)
    assert scales[0, 0] == 0 and not codes[0].any()
    assert scales[1, 0] == 0 and (codes[1] == 8).all()
    assert scales[2, 0] == 0x7E and codes[2, 5] == 7 and codes[2, 6] == 10
    assert scales[3, 0] == 0 and codes[3, 0] == 8
    assert scales[4, 0] == 1 and codes[4, 0] == 8 + 5  # 3.003 steps
    assert scales[5, 0] == 0x7E and codes[5, 15] == 7


@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_value_breaks_its_block_and_no_other(broken):
    rng = np.random.default_rng()
    x = rng.standard_normal((4, 64)).astype(np.float32)
    whole_codes, whole_scales = run(x, 0.01)
    x[2, 19] = broken
    codes, scales = run(x, 0.01)
    assert scales[2, 1] & 0x7F == 0x7F and not (codes[2, 16:32] & 7).any()
    others = np.ones((4, 4), bool)
    others[2, 1] = False
    np.testing.assert_array_equal(scales[others], whole_scales[others])
    kept = np.repeat(others, 16, axis=1)
    np.testing.assert_array_equal(codes[kept], whole_codes[kept])


def test_same_codes_as_the_weight_quantiser():
    """On a grid where nothing is rounded before the codes, the two quantisers are one function."""
    rng = np.random.default_rng()
    x = (rng.integers(-96, 97, (40, 128)) * np.exp2(rng.integers(-3, 4, (40, 8)).repeat(16, 1))).astype(np.float32)
    x[:, ::16] = 96 * np.exp2(rng.integers(0, 4, (40, 8)))  # no block of zeros: its scale is 1 there and 0 here
    multiplier = 2.0**-3
    codes, scales, factor = quant.quantise(x, multiplier=multiplier)
    got_codes, got_scales = jax.jit(quantise_activations)(x, factor)
    np.testing.assert_array_equal(np.asarray(got_scales).view(np.uint8), scales.view(np.uint8))
    np.testing.assert_array_equal(np.asarray(got_codes), codes)


def test_error_of_gaussian_activations():
    """Calibrated as a checkpoint is, the relative error is that of the format: about 0.1."""
    rng = np.random.default_rng()
    x = rng.standard_normal((64, 512)).astype(np.float32)
    factor = np.float32(np.abs(x).max() / (6 * 448))
    codes, scales = jax.jit(quantise_activations)(x, factor)
    decoded = quant.decode(np.asarray(codes), np.asarray(scales), factor)
    error = np.linalg.norm(decoded - x) / np.linalg.norm(x)
    assert 0.08 < error < 0.11


def test_refusals():
    x = jnp.zeros((2, 32))
    with pytest.raises(ValueError, match="multiple of 16"):
        quantise_activations(x[:, :24], jnp.float32(1))
    with pytest.raises(ValueError, match="floating"):
        quantise_activations(x.astype(jnp.int32), jnp.float32(1))
    with pytest.raises(ValueError, match="input_scale"):
        quantise_activations(x, jnp.bfloat16(1))
    with pytest.raises(ValueError, match="input_scale"):
        quantise_activations(x, jnp.ones(2))
