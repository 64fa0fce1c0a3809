"""Index scores against float64, and the selection against a stable sort: the same set of columns, whatever the ties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.models.layers import select_top_k
from ddtree_jax.pallas import index_select, indexer
from ddtree_jax.pallas.backend import HOST, INTERPRETED

SCORES = {"reference": indexer.indexer_scores_reference, "triton": indexer.indexer_scores_triton}
SELECTIONS = {
    "reference": index_select.select_top_k_indices_reference,
    # Small enough that rows have many chunks, and that ties do not fit the class one program holds.
    "digits": functools.partial(
        index_select.select_top_k_indices_digits,
        tiles=index_select.Tiles(digits=(4, 4), lanes=32, steps=2, class_size=32),
    ),
}


def score_arrays(rng, dtype, *, rows=5, heads=8, width=32, slots=150, lengths=(0, 1, 137)):
    batch = len(lengths)
    cache = rng.normal(size=(2, batch, slots, width))
    for b, length in enumerate(lengths):
        cache[:, b, length:] = np.nan  # invisible: must spread nowhere
    cache[0] = np.nan  # the other layer
    return (
        jnp.asarray(rng.normal(size=(batch, rows, heads, width)), dtype),
        jnp.asarray(rng.normal(size=(batch, rows, heads)), jnp.float32),
        jnp.asarray(cache, dtype),
        jnp.int32(1),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(rng.normal(size=(batch, rows, width)), dtype),
        jnp.asarray(rng.random((batch, rows, rows)) < 0.6),
    )


def score_oracle(q, weights, cache, layer, lengths, new, mask):
    q, weights, cache, new = (np.asarray(x).astype(np.float64) for x in (q, weights, cache, new))

    def scores(keys):
        products = np.einsum("bthd,bmd->bthm", q, keys) / np.sqrt(q.shape[-1])
        return np.einsum("bth,bthm->btm", weights, np.maximum(products, 0))

    visible = np.arange(cache.shape[2]) < np.asarray(lengths)[:, None, None]
    prefix = np.where(visible, scores(np.nan_to_num(cache[int(layer)])), -np.inf)
    return prefix, np.where(np.asarray(mask), scores(new), -np.inf)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_float64(name, dtype):
    arrays = score_arrays(np.random.default_rng(), dtype)
    got = jax.jit(functools.partial(SCORES[name], platform=INTERPRETED))(*arrays)
    for have, want in zip(got, score_oracle(*arrays), strict=True):
        assert have.dtype == jnp.float32
        np.testing.assert_array_equal(np.isneginf(have), np.isneginf(want))
        seen = np.isfinite(want)
        np.testing.assert_allclose(np.asarray(have)[seen], want[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rows, heads, slots", [(1, 32, 64), (3, 1, 129), (130, 2, 257)])
def test_scores_of_odd_shapes(rows, heads, slots):
    lengths = (slots, slots - 1)
    arrays = score_arrays(np.random.default_rng(), jnp.float32, rows=rows, heads=heads, slots=slots, lengths=lengths)
    tiles = indexer.Tiles(keys=64, tokens=max(1, 16 // heads))
    got = jax.jit(functools.partial(indexer.indexer_scores_triton, platform=INTERPRETED, tiles=tiles))(*arrays)
    for have, want in zip(got, score_oracle(*arrays), strict=True):
        np.testing.assert_array_equal(np.isneginf(have), np.isneginf(want))
        seen = np.isfinite(want)
        np.testing.assert_allclose(np.asarray(have)[seen], want[seen], rtol=1e-5, atol=2e-5)


def test_scores_name_wrong_arguments():
    arrays = list(score_arrays(np.random.default_rng(0), jnp.float32))
    for at, wrong, name in ((1, arrays[1][:, :2], "weights"), (2, arrays[2][0], "cache"), (5, arrays[5][:2], "new")):
        with pytest.raises(ValueError, match=name):
            indexer.indexer_scores_triton(*arrays[:at], wrong, *arrays[at + 1 :], platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="powers of two"):
        odd = score_arrays(np.random.default_rng(0), jnp.float32, heads=3)
        indexer.indexer_scores_triton(*odd, platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="GPU"):
        indexer.indexer_scores_triton(*arrays, platform=HOST)


def selection_rows(rng, slots, own):
    """Rows of every kind: prefix [3, kinds, slots] and block [3, kinds, own] scores."""
    prefix, block = (rng.normal(size=(3, 8, n)).astype(np.float32) for n in (slots, own))
    for scores in (prefix, block):
        scores[:, 1] = np.round(scores[:, 1] * 2) / 2
        scores[:, 1] = np.where((scores[:, 1] == 0) & (rng.random(scores[:, 1].shape) < 0.5), -0.0, scores[:, 1])
        scores[:, 2] = 1.0
        scores[:, 3] = np.where(rng.random(scores[:, 3].shape) < 0.9, -np.inf, scores[:, 3])
        scores[:, 4] = -np.inf
        scores[:, 5] = 1.0 + rng.integers(0, 3, scores[:, 5].shape) * np.float32(2**-23)  # differ in the last bits
        with np.errstate(over="ignore", under="ignore"):  # every exponent, subnormals and infinities too
            scores[:, 6] = np.exp(scores[:, 6] * 40) * np.sign(scores[:, 6])
        scores[:, 7] = np.where(rng.random(scores[:, 7].shape) < 0.5, -1.0, 0.0)
    block[:, 4, 0] = -7.0
    return prefix, block


def assert_selected(got, prefix, block, k):
    scores = np.concatenate([prefix, block], axis=-1)
    got = np.asarray(got)
    assert got.shape == (*scores.shape[:2], k) and got.dtype == np.int32
    for row, columns in zip(scores.reshape(-1, scores.shape[-1]), got.reshape(-1, k), strict=True):
        best = np.argsort(-row, kind="stable")[:k]
        best = best[row[best] > -np.inf]
        np.testing.assert_array_equal(np.sort(columns[: len(best)]), np.sort(best))
        np.testing.assert_array_equal(columns[len(best) :], -1)
    mask = np.asarray(select_top_k(scores, scores > -np.inf, k))
    for kept, columns in zip(mask.reshape(-1, mask.shape[-1]), got.reshape(-1, k), strict=True):
        np.testing.assert_array_equal(np.flatnonzero(kept), np.sort(columns[columns >= 0]))


@pytest.mark.parametrize("name", SELECTIONS)
def test_selection_is_that_of_a_stable_sort(name):
    rng = np.random.default_rng()
    prefix, block = selection_rows(rng, 203, 9)
    select = jax.jit(functools.partial(SELECTIONS[name], k=37, platform=INTERPRETED))
    assert_selected(select(prefix, block), prefix, block, 37)
    prefix, block = selection_rows(rng, 203, 9)
    assert_selected(select(prefix, block), prefix, block, 37)


@pytest.mark.slow
@pytest.mark.parametrize("digits", [(4, 4, 4, 4), (5, 5, 5), (6, 6), (3,)])
@pytest.mark.parametrize("slots, own, k", [(64, 64, 128), (1, 1, 1), (65, 3, 200), (300, 40, 64)])
def test_selection_with_any_digits(slots, own, k, digits):
    prefix, block = selection_rows(np.random.default_rng(), slots, own)
    tiles = index_select.Tiles(digits=digits, lanes=64, steps=1, class_size=64)
    select = functools.partial(index_select.select_top_k_indices_digits, k=k, platform=INTERPRETED, tiles=tiles)
    assert_selected(jax.jit(select)(prefix, block), prefix, block, k)


def test_selection_names_wrong_arguments():
    good = jnp.zeros((1, 2, 8)), jnp.zeros((1, 2, 2))
    for prefix, block, k, name in (
        (good[0][0], good[1], 2, "prefix_scores"),
        (good[0], good[1].astype(jnp.bfloat16), 2, "block_scores"),
        (good[0], good[1][:, :1], 2, "block_scores"),
        (*good, 0, "k:"),
    ):
        with pytest.raises(ValueError, match=name):
            index_select.select_top_k_indices_digits(prefix, block, k, platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="GPU"):
        index_select.select_top_k_indices_digits(*good, 2, platform=HOST)
