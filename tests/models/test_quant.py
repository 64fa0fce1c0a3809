"""The NVFP4 codec against the definitions of its formats, in numpy and in JAX."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.models import quant
from tests.engine.checkpoint_files import E2M1, E4M3_TABLE, MAGNITUDES

FINITE = np.array([byte for byte in range(256) if byte & 127 != 127], np.uint8)


def every_pair():
    """A row for each finite scale byte; its one group holds the 16 codes in order."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(FINITE), 1))
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return packed, FINITE[:, None].view(quant.E4M3), E2M1[codes] * E4M3_TABLE[FINITE][:, None]


def same_bits(got, expected):
    """Equal, and zeros of one sign."""
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def test_table_of_values():
    same_bits(np.array(quant.E2M1_VALUES), E2M1)


@pytest.mark.parametrize("factor", [1.0, 0.0123, 3.1e-7])
def test_every_code_with_every_scale(factor):
    codes, scales, products = every_pair()
    factor = np.float32(factor)
    expected = products * np.float64(factor)
    same_bits(quant.decode(codes, scales, factor), expected)
    decode = jax.jit(lambda *args: quant.dequantise(*args, axis=1, dtype=jnp.float32))
    same_bits(np.asarray(decode(codes, scales, factor)), expected.astype(np.float32))
    same_bits(np.asarray(decode(codes, scales, factor.reshape(1, 1))), expected.astype(np.float32))
    narrow = quant.dequantise(codes, scales, factor, axis=1, dtype=jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    rounded = expected.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    same_bits(np.asarray(narrow.astype(jnp.float32)), rounded)


@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_any_axis_holds_the_contraction(axis):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (3, 2, 5, 16), np.uint8)
    scales = rng.integers(0, 127, (3, 2, 5, 2), np.uint8).view(quant.E4M3)
    factor = rng.uniform(0.5, 2, (3, 1, 5, 1)).astype(np.float32)
    expected = np.stack([codes & 15, codes >> 4], -1).reshape(3, 2, 5, 2, 16)
    expected = quant.E2M1_VALUES @ (np.arange(16)[:, None] == expected.reshape(1, -1))
    expected = expected.reshape(3, 2, 5, 32) * np.repeat(E4M3_TABLE[scales.view(np.uint8)], 16, -1) * factor
    moved = [np.moveaxis(array, -1, axis) for array in (codes, scales, factor)]
    got = jax.jit(lambda *args: quant.dequantise(*args, axis=axis, dtype=jnp.float32))(*moved)
    np.testing.assert_array_equal(np.moveaxis(np.asarray(got), axis, -1), expected.astype(np.float32))
    unpacked = quant.unpack_codes(moved[0], axis)
    assert unpacked.dtype == jnp.uint8
    low_first = np.moveaxis(np.asarray(unpacked), axis, -1)
    np.testing.assert_array_equal(low_first[..., ::2], codes & 15)
    np.testing.assert_array_equal(low_first[..., 1::2], codes >> 4)


@pytest.mark.parametrize("search", [False, True])
def test_what_can_be_represented_survives(search):
    rng = np.random.default_rng(1)
    signs = np.where(rng.random((64, 8, 16)) < 0.5, -1.0, 1.0)
    values = rng.choice(MAGNITUDES, (64, 8, 16)) * signs
    values[..., 0] = 6.0
    weight = (values * E4M3_TABLE[rng.integers(1, 127, (64, 8, 1))]).reshape(64, 128) * 2.0**-10
    codes, scales, factor = quant.quantise(weight, multiplier=2.0**-10, search=search)
    assert (codes.dtype, scales.dtype, factor.dtype) == (np.uint8, quant.E4M3, np.float32)
    assert codes.shape == (64, 64) and scales.shape == (64, 8)
    np.testing.assert_array_equal(quant.decode(codes, scales, factor), weight)


def test_ties_go_to_the_even_code_and_beyond_six_saturates():
    ratios = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0, 0.2501, 0.7499, 2.51, 3.49, 5.01, 0.0]
    codes, scales, _ = quant.quantise(np.array([ratios]), multiplier=1.0)
    assert scales.astype(float).tolist() == [[1.0]]
    low_high = np.stack([codes & 15, codes >> 4], -1).reshape(-1).tolist()
    assert low_high == [0, 2, 2, 4, 4, 6, 6, 7, 8, 14, 1, 1, 5, 5, 7, 0]
    codes, scales, _ = quant.quantise(np.full((1, 16), 1e6), multiplier=1.0)
    assert scales.astype(float).tolist() == [[448.0]] and (codes == 0x77).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_the_error_of_gaussian_weights(dtype):
    weight = np.random.default_rng(2).standard_normal((512, 1024)).astype(dtype)

    def relative_error(**options):
        decoded = quant.decode(*quant.quantise(weight, **options))
        exact = weight.astype(np.float64)
        return np.linalg.norm(decoded - exact) / np.linalg.norm(exact)

    plain = relative_error()
    assert 0.090 < plain < 0.098
    assert relative_error(search=True) < 0.9 * plain


def test_search_never_makes_a_block_worse():
    weight = np.random.default_rng(3).standard_t(3, (64, 256))
    codes, scales, factor = quant.quantise(weight)
    plain = np.square(quant.decode(codes, scales, factor) - weight).reshape(64, 16, 16).sum(-1)
    found = quant.quantise(weight, multiplier=factor, search=True)
    better = np.square(quant.decode(*found) - weight).reshape(64, 16, 16).sum(-1)
    assert (better <= plain * (1 + 1e-12)).all() and (better < plain).any()
    assert (found[1].view(np.uint8) >= 1).all() and (found[1].view(np.uint8) <= 126).all()


@pytest.mark.parametrize("search", [False, True])
def test_zeros(search):
    weight = np.zeros((4, 32))
    codes, scales, factor = quant.quantise(weight, search=search)
    assert not codes.any() and (scales.astype(float) == 1).all() and factor == 1
    weight[0, 0] = 1e-45  # smaller than any multiplier that devices keep
    codes, scales, factor = quant.quantise(weight, search=search)
    assert factor >= np.finfo(np.float32).tiny and np.abs(quant.decode(codes, scales, factor) - weight).max() <= 1e-45
    assert (scales.astype(float)[1:] == 1).all()
    assert quant.quantise(np.zeros((0, 16)))[0].shape == (0, 8)


def test_panels_do_not_change_the_result(monkeypatch):
    weight = np.random.default_rng(4).standard_normal((37, 48))
    whole = quant.quantise(weight, search=True)
    monkeypatch.setattr(quant.row_panels, "__defaults__", (100,))
    assert len(list(quant.row_panels(weight.shape))) == 19
    for one, other in zip(whole, quant.quantise(weight, search=True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (np.zeros((2, 24)), {}, "multiple of 16"),
        (np.zeros(16), {}, "expected \\[out, in\\]"),
        (np.array([[1.0] * 15 + [np.nan]]), {}, "NaN or infinite"),
        (np.array([[np.nan] + [1.0] * 15, [1.0] * 16]), {}, "NaN or infinite"),
        (np.array([[np.inf] * 16]), {"multiplier": 1.0}, "NaN or infinite"),
        (np.zeros((1, 16)), {"multiplier": 0.0}, "multiplier"),
        (np.zeros((1, 16)), {"multiplier": 1e-40}, "multiplier"),
        (np.zeros((1, 16)), {"multiplier": 1e300}, "multiplier"),
        (np.zeros((1, 16)), {"multiplier": float("nan")}, "multiplier"),
    ],
)
def test_what_quantise_refuses(weight, options, message):
    with pytest.raises(ValueError, match=message):
        quant.quantise(weight, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codes": np.zeros((4, 12), np.uint8)}, "multiple of 16"),
        ({"codes": np.zeros((4, 16), np.int8)}, "codes: got int8"),
        ({"scales": np.zeros((4, 1), quant.E4M3)}, "scales: got shape"),
        ({"scales": np.zeros((4, 2), np.float32)}, "scales: got float32"),
        ({"global_scale": np.ones((4, 3), np.float32)}, "global_scale: got shape"),
        ({"global_scale": np.ones(4, np.float32)}, "global_scale: got shape"),
        ({"global_scale": np.ones((), np.float16)}, "global_scale: got float16"),
        ({"axis": 2}, "axis: got 2"),
    ],
)
def test_what_dequantise_refuses(changes, message):
    good = {
        "codes": np.zeros((4, 16), np.uint8),
        "scales": np.zeros((4, 2), quant.E4M3),
        "global_scale": np.float32(1),
        "axis": 1,
    }
    quant.dequantise(**good, dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        quant.dequantise(**(good | changes), dtype=jnp.float32)
