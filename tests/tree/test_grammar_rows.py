"""Rows applied to logits: bit for bit what unpacking on the host says, for every size of vocabulary."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.grammar import pack
from ddtree_jax.tree import mask_logits
from ddtree_jax.tree.grammar_rows import num_words


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100, 2079])
def test_what_a_row_forbids_is_minus_infinity(vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits = jnp.asarray(rng.normal(size=(2, 3, vocab)), dtype)
    allowed = rng.random((2, 3, vocab)) < 0.5
    allowed[0, 0], allowed[1, 2] = True, False
    masked = mask_logits(logits, pack(allowed))
    assert masked.dtype == jnp.float32
    np.testing.assert_array_equal(masked, np.where(allowed, np.asarray(logits, np.float32), -np.inf))


def test_bits_beyond_the_vocabulary_are_not_read():
    logits = np.zeros((1, 1, 40), np.float32)
    rows = pack(np.arange(40).reshape(1, 1, 40) % 3 == 0)
    beyond = rows | np.array([0, -(1 << 8)], np.int32).reshape(1, 1, 2)
    np.testing.assert_array_equal(mask_logits(logits, rows), mask_logits(logits, beyond))


def test_allowed_logits_stay_whatever_they_are():
    values = np.array([[[np.nan, np.inf, -np.inf, 1.0, np.nan, np.inf]]], np.float32)
    allowed = np.array([[[True, True, True, True, False, False]]])
    np.testing.assert_array_equal(mask_logits(values, pack(allowed))[0, 0, :4], values[0, 0, :4])
    assert (np.asarray(mask_logits(values, pack(allowed)))[0, 0, 4:] == -np.inf).all()


def test_each_bit_is_its_token():
    """One allowed token a row, the sign bit of a word among them."""
    rows = np.zeros((1, 70, num_words(70)), np.int32)
    for token in range(70):
        rows[0, token, token // 32] = np.uint32(1 << token % 32).view(np.int32)
    masked = np.asarray(mask_logits(np.ones((1, 70, 70), np.float32), rows))
    np.testing.assert_array_equal(masked[0] == 1.0, np.eye(70, dtype=bool))


@pytest.mark.parametrize(
    "logits, rows, name",
    [
        (np.zeros((1, 2, 40), np.float32), np.zeros((1, 2, 1), np.int32), "rows"),
        (np.zeros((1, 2, 40), np.float32), np.zeros((1, 2, 3), np.int32), "rows"),
        (np.zeros((1, 2, 40), np.float32), np.zeros((1, 3, 2), np.int32), "rows"),
        (np.zeros((1, 2, 40), np.float32), np.zeros((1, 2, 2), np.float32), "rows"),
        (np.zeros((1, 2, 40), np.int32), np.zeros((1, 2, 2), np.int32), "logits"),
        (np.zeros((2, 40), np.float32), np.zeros((2, 2), np.int32), "logits"),
    ],
)
def test_wrong_array_is_named_at_trace_time(logits, rows, name):
    with pytest.raises(AssertionError, match=f"{name} must be"):
        jax.eval_shape(mask_logits, logits, rows)


def test_one_trace_per_shape():
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(lambda logits, rows: mask_logits(logits, rows), n=1))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        traced(rng.normal(size=(1, 2, 40)).astype(np.float32), rng.integers(-9, 9, (1, 2, 2), dtype=np.int32))
