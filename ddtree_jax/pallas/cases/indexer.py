"""The DSA indexer of GLM-5 over long contexts: scores of all keys, and the best 2048 of them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_INDEX
from ddtree_jax.pallas.cases.base import Case, rarely_compiled

LAYERS = 2
SHAPES = ((17, 65536), (17, 204800), (65, 65536), (5, 8192))  # rows of a tree, slots


def _scores_arrays(key: jax.Array, rows: int, slots: int, dtype: Any = jnp.bfloat16) -> tuple[Any, ...]:
    heads, width, _ = GLM5_INDEX
    q, weights, cache, new = jax.random.split(key, 4)
    return (
        jax.random.normal(q, (1, rows, heads, width), dtype),
        jax.random.normal(weights, (1, rows, heads), jnp.float32) * heads**-0.5,
        jax.random.normal(cache, (LAYERS, 1, slots, width), dtype),
        jnp.int32(LAYERS - 1),
        jnp.full((1,), slots - 3, jnp.int32),
        jax.random.normal(new, (1, rows, width), dtype),
        jnp.tril(jnp.ones((rows, rows), jnp.bool_))[None],
    )


def _scores_error(arrays: tuple[Any, ...], result: Any) -> float:
    """Relative error at some of the columns in float64, infinite where the wrong ones are -inf."""
    q, weights, cache, layer, lengths, new, mask = (np.asarray(jax.device_get(x)) for x in arrays)
    prefix, own = (np.asarray(x) for x in result)
    slots = cache.shape[2]
    columns = np.unique(np.concatenate([np.arange(0, slots, 97), np.arange(max(0, slots - 300), slots)]))

    def exact(keys: np.ndarray) -> np.ndarray:
        products = np.einsum("bthd,bmd->bthm", q.astype(np.float64), keys.astype(np.float64)) * q.shape[-1] ** -0.5
        return np.einsum("bth,bthm->btm", weights.astype(np.float64), np.maximum(products, 0.0))

    visible = np.broadcast_to(columns < lengths[:, None, None], prefix[..., columns].shape)
    wrong = total = 0.0
    parts = (prefix[..., columns], exact(cache[layer][:, columns]), visible), (own, exact(new), mask)
    for got, want, seen in parts:
        if not np.array_equal(got != -np.inf, seen):
            return float("inf")
        wrong += np.sum(np.square(got[seen] - want[seen]))
        total += np.sum(np.square(want[seen]))
    return float(np.sqrt(wrong / total))


def _select_arrays(key: jax.Array, rows: int, slots: int) -> tuple[jax.Array, ...]:
    prefix, own = jax.random.split(key)
    scores = jax.random.normal(prefix, (1, rows, slots), jnp.float32)
    scores = jnp.where(jnp.arange(slots)[None, None] < slots - 3, scores, -jnp.inf)
    block = jax.random.normal(own, (1, rows, rows), jnp.float32)
    return scores, jnp.where(jnp.tril(jnp.ones((rows, rows), jnp.bool_))[None], block, -jnp.inf)


def _select_error(arrays: tuple[Any, ...], result: Any, k: int) -> float:
    """Share of rows whose set of columns is not exactly the right one."""
    scores = np.concatenate([np.asarray(x) for x in arrays], axis=-1)
    scores, got = scores.reshape(-1, scores.shape[-1]), np.asarray(result).reshape(-1, k)
    wrong = 0
    for row, columns in zip(scores, got, strict=True):
        best = np.argsort(-row, kind="stable")[:k]
        best = best[row[best] > -np.inf]
        want = np.concatenate([np.sort(best), np.full(k - len(best), -1)])
        listed = np.concatenate([np.sort(columns[: len(best)]), columns[len(best) :]])
        wrong += not np.array_equal(want, listed)
    return wrong / len(got)


def _by_top_k(prefix: jax.Array, own: jax.Array) -> jax.Array:
    return jax.lax.top_k(jnp.concatenate([prefix, own], axis=-1), GLM5_INDEX.top_k)[1]


def _scores_case(rows: int, slots: int) -> Case:
    heads, width, _ = GLM5_INDEX
    columns = slots + rows
    return Case(
        op="indexer_scores",
        name=f"glm5 index scores, {rows} rows, {slots} slots",
        make=functools.partial(_scores_arrays, rows=rows, slots=slots),
        static={},
        traffic=2 * columns * width + 4 * rows * columns + 2 * rows * heads * width,
        flops=2 * rows * heads * width * columns,
        tolerance=1e-5,
        check=_scores_error,
        rotate=(2,),
    )


def _select_case(rows: int, slots: int) -> Case:
    k = GLM5_INDEX.top_k
    return Case(
        op="select_top_k_indices",
        name=f"glm5 index selection, {rows} rows, {slots} slots",
        make=functools.partial(_select_arrays, rows=rows, slots=slots),
        static={"k": k},
        traffic=4 * rows * (slots + rows + k),
        flops=rows * (slots + rows),
        tolerance=0.0,
        check=functools.partial(_select_error, k=k),
        baselines={"lax.top_k": _by_top_k},
    )


CASES = tuple(
    case
    for build in (_scores_case, _select_case)
    for case in (build(*SHAPES[0]), *rarely_compiled(build(*shape) for shape in SHAPES[1:]))
)
