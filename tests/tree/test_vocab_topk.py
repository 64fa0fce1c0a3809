"""Exact vocabulary top-k: both implementations against a stable numpy sort, ids and values bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas.vocab_topk import IMPLEMENTATIONS, exact_topk, vocab_topk

FILLS = (
    "continuous",
    "integer",
    "equal",
    "half_masked",
    "nearly_all_masked",
    "all_masked",
    "nan",
    "infinite",
)


def filled(rng, fill, shape):
    values = (rng.normal(size=shape) * 3).astype(np.float32)
    return {
        "continuous": lambda: values,
        "integer": lambda: np.round(values),
        "equal": lambda: np.zeros_like(values),
        "half_masked": lambda: np.where(rng.random(shape) < 0.5, -np.inf, np.round(values)),
        "nearly_all_masked": lambda: np.where(rng.random(shape) < 0.99, -np.inf, values),
        "all_masked": lambda: np.full_like(values, -np.inf),
        "nan": lambda: np.where(rng.random(shape) < 0.5, np.nan, values),
        "infinite": lambda: np.where(rng.random(shape) < 0.1, np.inf, values),
    }[fill]()


def oracle(logits, k):
    clean = np.where(np.isfinite(logits), logits, -np.inf)
    ids = np.argsort(-clean, axis=-1, kind="stable")[..., :k]
    peak = clean.max(-1, keepdims=True)
    shifted = np.where(np.isfinite(peak), clean.astype(np.float64) - np.where(np.isfinite(peak), peak, 0), -np.inf)
    with np.errstate(divide="ignore"):
        normalizer = np.log(np.exp(shifted).sum(-1)) + np.where(np.isfinite(peak), peak, 0)[..., 0]
    return np.take_along_axis(clean, ids, axis=-1), ids, normalizer


def assert_exact(logits, k, implementation):
    got = vocab_topk(logits, k, implementation=implementation)
    values, ids, normalizer = oracle(logits, k)
    np.testing.assert_array_equal(got.token_ids, ids)
    np.testing.assert_array_equal(got.values, values)
    np.testing.assert_allclose(got.logsumexp, normalizer, rtol=2e-6, atol=2e-6)
    assert got.token_ids.dtype == jnp.int32 and got.values.dtype == jnp.float32


# V: one token, under a block, a block, under and over a block of blocks, V < K, larger than one level of
# counting.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab, k", [(1, 1), (5, 8), (16, 3), (255, 16), (257, 16), (1000, 300), (3001, 70)])
def test_equals_stable_sort(vocab, k, implementation):
    rng = np.random.default_rng(vocab)
    logits = np.stack([filled(rng, fill, (3, vocab)) for fill in FILLS])
    assert_exact(logits, k, implementation)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(40, 7), (300, 20)]), st.integers(1, 4))
def test_implementations_agree_on_heavy_ties(seed, size, levels):
    vocab, k = size
    logits = np.random.default_rng(seed).integers(0, levels, size=(4, vocab)).astype(np.float32)
    logits[logits == 0] = -np.inf
    for implementation in IMPLEMENTATIONS:
        assert_exact(logits, k, implementation)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_rank_as_their_float32_values(dtype):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 500)) * 20, dtype)
    for implementation in IMPLEMENTATIONS:
        got = vocab_topk(logits, 20, implementation=implementation)
        np.testing.assert_array_equal(got.token_ids, oracle(np.asarray(logits, np.float32), 20)[1])


def test_any_number_of_leading_axes():
    logits = np.random.default_rng(0).normal(size=(2, 3, 4, 40)).astype(np.float32)
    whole = vocab_topk(logits, 5, implementation="block_descent")
    assert whole.values.shape == (2, 3, 4, 5) and whole.logsumexp.shape == (2, 3, 4)
    row = vocab_topk(logits[1, 2, 3], 5, implementation="block_descent")
    np.testing.assert_array_equal(whole.token_ids[1, 2, 3], row.token_ids)


def test_no_nan_is_made_of_masked_rows():
    logits = np.full((2, 40), -np.inf, np.float32)
    with jax.debug_nans(True):
        for implementation in IMPLEMENTATIONS:
            got = vocab_topk(logits, 4, implementation=implementation)
            np.testing.assert_array_equal(got.logsumexp, [-np.inf] * 2)


@pytest.mark.parametrize("k", [0, -3, 2.0, True])
def test_wrong_k_is_named(k):
    with pytest.raises(ValueError, match="k:"):
        vocab_topk(np.zeros((2, 4), np.float32), k)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="implementation"):
        exact_topk(jnp.zeros((2, 4)), 1, implementation="sort")
    for logits in (np.zeros((2, 0), np.float32), np.zeros((2, 4), np.int32)):
        with pytest.raises(ValueError, match="logits"):
            vocab_topk(logits, 1)
