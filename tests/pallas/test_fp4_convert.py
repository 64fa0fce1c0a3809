"""The integer form of the converter against ml_dtypes, and what the instruction sequences would do with it."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas.fp4_convert import _SEQUENCES, convert_pair, convert_pair_bits

ALL_BYTES = np.arange(256, dtype=np.uint8)


def expected(bytes_: np.ndarray, dtype) -> np.ndarray:
    """Bits of (low nibble, high nibble) of each byte, from ml_dtypes' table."""
    pairs = np.stack([bytes_ & 15, bytes_ >> 4], axis=-1).view(ml_dtypes.float4_e2m1fn)
    bits = pairs.astype(dtype).view(np.uint16).astype(np.uint32)
    return (bits[..., 0] | bits[..., 1] << 16).view(np.int32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("byte", range(4))
def test_every_byte(dtype, byte):
    rng = np.random.default_rng(byte)
    noise = rng.integers(0, 256, (256, 4), dtype=np.uint8)  # other bytes must not leak in
    noise[:, byte] = ALL_BYTES
    words = noise.view(np.int32)[:, 0]
    got = jax.jit(lambda w: convert_pair_bits(w, byte, dtype=dtype))(words)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(np.asarray(got), expected(ALL_BYTES, dtype))


def test_the_bfloat16_sequence_of_operations_is_exact():
    """The sequence after the converter, operation by operation, with what the float16 converter gives."""
    for operation in ("shr.u32 m, h, 3", "0x0fff0fff", "0x80008000", "0x77807780", "mul.rn.bf16x2"):
        assert operation in _SEQUENCES[jnp.dtype(jnp.bfloat16)]
    halves = expected(ALL_BYTES, np.float16).view(np.uint32)
    moved = (halves >> 3) & np.uint32(0x0FFF0FFF) | halves & np.uint32(0x80008000)
    lanes = moved.view(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    factor = np.array(0x7780, np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    assert factor == 2.0**112
    product = (lanes * factor).astype(ml_dtypes.bfloat16).view(np.uint32).view(np.int32)
    np.testing.assert_array_equal(product, expected(ALL_BYTES, ml_dtypes.bfloat16))


@pytest.mark.parametrize("function", [convert_pair, convert_pair_bits])
def test_refusals(function):
    words = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="words"):
        function(words.astype(jnp.uint32), 0)
    with pytest.raises(ValueError, match="byte"):
        function(words, 4)
    with pytest.raises(ValueError, match="dtype"):
        function(words, 0, dtype=jnp.float32)
