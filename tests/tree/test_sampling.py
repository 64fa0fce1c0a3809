"""Filters against a plain numpy oracle, and the choice of tokens: reproducible, and never outside the
vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddtree_jax.sampling import MODES, SamplingParams, choose_tokens, filter_logits, key_from_seed

VOCAB, ROWS = 9, 6
jitted_filter = jax.jit(filter_logits)


def filter_oracle(logits, temperature, top_k, top_p, min_p):
    """(kept ids, log-probabilities relative to the best) of one row, in float64 with explicit sorting."""
    logits = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    if temperature == 0 or not np.isfinite(logits.max()):
        return {int(np.argmax(logits))}, None
    scaled = (logits - logits.max()) / temperature
    kept = scaled > -np.inf
    if 0 < top_k < len(logits):
        kept &= scaled >= np.sort(scaled)[::-1][top_k - 1]
    if top_p < 1:
        mass = np.where(kept, np.exp(scaled), 0)
        mass /= mass.sum()
        order = np.argsort(-np.where(kept, scaled, -np.inf), kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        kept[order] &= (before < top_p) | (np.arange(len(order)) == 0)
    kept &= np.exp(scaled) >= min_p
    return set(np.flatnonzero(kept).tolist()), scaled


rows_of_eighths = st.lists(st.integers(-24, 24), min_size=VOCAB, max_size=VOCAB)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows_of_eighths, min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=ROWS, max_size=ROWS),
    st.lists(st.integers(0, VOCAB + 2), min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from([0.0, 0.137, 0.511, 0.87, 1.0]), min_size=ROWS, max_size=ROWS),
    st.lists(st.sampled_from([0.0, 0.011, 0.23, 1.0]), min_size=ROWS, max_size=ROWS),
)
@example([[0] * VOCAB] * ROWS, [1.0] * ROWS, [0, 1, 3, VOCAB, 0, 4], [0.511] * ROWS, [0.0] * ROWS)
@example([[0] * VOCAB] * ROWS, [1.0] * ROWS, [2] * ROWS, [1.0] * ROWS, [1.0] * ROWS)
def test_filters_equal_the_plain_ones(eighths, temperature, top_k, top_p, min_p):
    """Multiples of 1/8 have plenty of exact ties; the thresholds lie off every reachable cumulative mass."""
    logits = np.asarray(eighths, np.float32) / 8
    got = np.asarray(jitted_filter(logits, *(jnp.asarray(p) for p in (temperature, top_k, top_p, min_p))))
    for row in range(ROWS):
        kept, scaled = filter_oracle(logits[row], temperature[row], top_k[row], top_p[row], min_p[row])
        assert set(np.flatnonzero(got[row] > -np.inf).tolist()) == kept
        if scaled is not None:
            ids = sorted(kept)
            np.testing.assert_allclose(got[row, ids], scaled[ids], rtol=1e-5, atol=1e-6)


def kept_ids(row, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    arrays = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))
    return np.flatnonzero(np.asarray(filter_logits(jnp.asarray(row, jnp.float32), *arrays)) > -np.inf).tolist()


def test_degenerate_filters():
    row = [0.5, 2.0, 2.0, -1.0, 1.0]
    everything = [0, 1, 2, 3, 4]
    assert kept_ids(row) == everything
    assert kept_ids(row, top_k=5) == kept_ids(row, top_k=99) == everything
    assert kept_ids(row, top_k=1) == [1, 2]  # equal to the k-th: both stay
    assert kept_ids(row, top_p=1e-9) == [1]  # the best token, the smaller id among equals
    assert kept_ids(row, top_p=0.0) == [1]
    assert kept_ids(row, min_p=1.0) == [1, 2]
    assert kept_ids(row, temperature=0.0) == [1]
    assert kept_ids([0.0] * 4, top_p=0.5) == [0, 1]
    assert kept_ids([0.0] * 4, top_k=2, top_p=0.5) == [0, 1]
    assert kept_ids([-np.inf, 1.0, -np.inf]) == [1]
    assert kept_ids([-np.inf] * 3) == kept_ids([np.nan] * 3) == [0]
    assert kept_ids([np.nan, 1.0, 0.5], top_k=1) == [1]
    assert kept_ids([np.inf, 1.0, np.inf], top_k=1) == kept_ids([np.inf, 1.0, np.inf], min_p=0.1) == [0, 2]
    assert kept_ids([3e38, -3e38, 0.0], temperature=1e-3) == [0]


def test_a_tail_lighter_than_float32_epsilon_survives_top_p_one():
    row = [0.0] + [-30.0] * 7
    assert len(kept_ids(row, top_p=1.0)) == 8


def test_large_vocabulary_filters_equal_the_plain_ones():
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(3, 2, 5000)) * 3).astype(np.float32)
    params = [np.asarray(p) for p in ([0.7, 1.0, 1.3], [0, 40, 1000], [0.9, 0.95, 1.0], [0.0, 0.01, 0.001])]
    got = np.asarray(
        jitted_filter(logits, *(jnp.asarray(p, jnp.int32 if p.dtype == int else jnp.float32) for p in params))
    )
    for b in range(3):
        for n in range(2):
            kept, _ = filter_oracle(logits[b, n], *(float(p[b]) if p.dtype != int else int(p[b]) for p in params))
            different = kept ^ set(np.flatnonzero(got[b, n] > -np.inf).tolist())
            assert len(different) <= 1  # a token whose cumulative mass is top_p to float32 rounding


def test_filtered_logits_make_no_nan():
    logits = np.asarray([[-np.inf] * 4, [0.0, -np.inf, 1.0, -np.inf]], np.float32)
    with jax.debug_nans(True):
        filter_logits(logits, jnp.float32(0.5), jnp.int32(2), jnp.float32(0.5), jnp.float32(0.1))


def choose(logits, depths, emitted, params, mode, **kwargs):
    return np.asarray(choose_tokens(logits, depths, emitted, params, mode=mode, **kwargs))


@pytest.fixture(scope="module")
def setting():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 5, 11)).astype(np.float32)
    depths = np.asarray([[0, 1, 1, 2, 0], [0, 1, 2, 3, 4], [0, 1, 1, 1, 2]], np.int32)
    return logits, depths, np.asarray([1, 4, 9], np.int32)


def test_choice_is_the_argmax_with_the_noise_of_its_output_index(setting):
    logits, depths, emitted = setting
    params = SamplingParams.create(3, temperature=0.8, seed=[3, 5, 9])
    got = choose(logits, depths, emitted, params, "sample")
    for b, seed in enumerate((3, 5, 9)):
        for n in range(5):
            key = jax.random.fold_in(jax.random.key(seed), int(emitted[b] + depths[b, n]))
            noise = jax.random.gumbel(key, (11,))
            assert got[b, n] == int(np.argmax(logits[b, n] / np.float32(0.8) + np.asarray(noise)))


def test_filters_that_are_off_change_no_choice(setting):
    logits, depths, emitted = setting
    params = SamplingParams.create(3, temperature=0.8, seed=[3, 5, 9])
    np.testing.assert_array_equal(
        choose(logits, depths, emitted, params, "sample"), choose(logits, depths, emitted, params, "filtered")
    )
    np.testing.assert_array_equal(
        choose(logits, depths, emitted, params, "sample"),
        choose(logits, depths, emitted, params, "sample", max_depth=4),
    )


@pytest.mark.parametrize("mode", MODES)
def test_greedy_limits(setting, mode):
    logits, depths, emitted = setting
    greedy = logits.argmax(-1)
    np.testing.assert_array_equal(choose(logits, depths, emitted, SamplingParams.create(3), mode), greedy)
    if mode != "greedy":
        for temperature in (1e-6, 1e-38):
            cold = SamplingParams.create(3, temperature=temperature)
            np.testing.assert_array_equal(choose(logits, depths, emitted, cold, mode), greedy)
    if mode == "filtered":
        for strict in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            params = SamplingParams.create(3, temperature=1.0, **strict)
            np.testing.assert_array_equal(choose(logits, depths, emitted, params, mode), greedy)


@pytest.mark.parametrize("mode", MODES)
def test_temperature_is_per_sequence(setting, mode):
    logits, depths, emitted = setting
    hot = SamplingParams.create(3, temperature=3.0, seed=1)
    mixed = SamplingParams(hot.temperature.at[1].set(0.0), hot.top_k, hot.top_p, hot.min_p, hot.keys)
    got = choose(logits, depths, emitted, mixed, mode)
    np.testing.assert_array_equal(got[1], logits[1].argmax(-1))
    np.testing.assert_array_equal(got[[0, 2]], choose(logits, depths, emitted, hot, mode)[[0, 2]])


@pytest.mark.parametrize("mode", MODES)
def test_choices_stay_in_the_vocabulary_whatever_the_logits(mode):
    rows = [
        [np.nan] * 4,
        [-np.inf] * 4,
        [np.inf] * 4,
        [np.nan, -np.inf, -np.inf, np.nan],
        [np.inf, -np.inf, np.nan, 0.0],
    ]
    logits = np.asarray([rows], np.float32)
    params = SamplingParams.create(1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.5)
    got = choose(logits, np.zeros((1, 5), np.int32), np.zeros(1, np.int32), params, mode)
    assert ((got >= 0) & (got < 4)).all()
    assert got[0, 1] == got[0, 0] == 0 or mode == "sample"


def test_seeds_of_any_size():
    data = {seed: tuple(jax.random.key_data(key_from_seed(seed)).tolist()) for seed in (0, 1, -1, 2**32, 2**40, 2**63)}
    assert len(set(data.values())) == len(data)
    np.testing.assert_array_equal(jax.random.key_data(key_from_seed(7)), jax.random.key_data(jax.random.key(7)))
    params = SamplingParams.create(2, seed=np.int64(5))
    np.testing.assert_array_equal(params.top_p, [1.0, 1.0])
    assert SamplingParams.create(0).keys.shape == (0,)
    with pytest.raises(ValueError, match="seed"):
        SamplingParams.create(3, seed=[1, 2])


def test_wrong_arguments_are_named(setting):
    logits, depths, emitted = setting
    params = SamplingParams.create(3)
    trace = functools.partial(jax.eval_shape, lambda *a, **k: choose_tokens(*a, params, mode="greedy"))
    with pytest.raises(ValueError, match="mode"):
        choose(logits, depths, emitted, params, "hot")
    with pytest.raises(ValueError, match="max_depth"):
        choose(logits, depths, emitted, params, "greedy", max_depth=-1)
    with pytest.raises(AssertionError, match="logits"):
        trace(logits[0], depths, emitted)
    with pytest.raises(AssertionError, match="depths"):
        trace(logits, depths[:, :2], emitted)
    with pytest.raises(AssertionError, match="emitted"):
        trace(logits, depths, emitted.astype(np.float32))
    with pytest.raises(AssertionError, match="top_p"):
        filter_logits(logits, jnp.ones(3), jnp.zeros(3, jnp.int32), jnp.ones(2), jnp.zeros(3))
