"""Passes over the vocabulary of GLM-5: top-k with logsumexp of the drafter's rows, argmax of the target's."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_VOCAB
from ddtree_jax.pallas.cases.base import Case, rarely_compiled
from ddtree_jax.pallas.cases.registry import Expected


def _logits(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> tuple[jax.Array]:
    return (jax.random.normal(key, shape, dtype) * 4,)


def _top_k_error(arrays: tuple[Any, ...], result: Any, k: int) -> float:
    """1 where ids or values are not exactly right, else the logsumexp's relative error."""
    logits = np.asarray(arrays[0]).astype(np.float32)
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    values = np.take_along_axis(logits, ids, axis=-1)
    if not (np.array_equal(result.token_ids, ids) and np.array_equal(result.values, values)):
        return 1.0
    peak = logits.max(axis=-1, keepdims=True).astype(np.float64)
    want = np.log(np.exp(logits - peak).sum(axis=-1)) + peak[..., 0]
    return float(np.linalg.norm(np.asarray(result.logsumexp) - want) / np.linalg.norm(want))


def _argmax_error(arrays: tuple[Any, ...], result: Any) -> float:
    return float(np.mean(np.asarray(result) != np.argmax(np.asarray(arrays[0]).astype(np.float32), axis=-1)))


def _top_k_case(rows: int, k: int, dtype: Any) -> Case:
    size = jnp.dtype(dtype).itemsize
    return Case(
        op="vocab_topk",
        name=f"glm5 drafter, {rows} rows, k {k}, {jnp.dtype(dtype)}",
        make=functools.partial(_logits, shape=(rows, GLM5_VOCAB), dtype=dtype),
        static={"k": k},
        traffic=rows * (GLM5_VOCAB * size + k * 8),
        flops=2 * rows * GLM5_VOCAB,
        tolerance=1e-5,
        check=functools.partial(_top_k_error, k=k),
    )


def _argmax_case(rows: int, dtype: Any) -> Case:
    return Case(
        op="vocab_argmax",
        name=f"glm5 target, {rows} rows, {jnp.dtype(dtype)}",
        make=functools.partial(_logits, shape=(1, rows, GLM5_VOCAB), dtype=dtype),
        static={},
        traffic=rows * GLM5_VOCAB * jnp.dtype(dtype).itemsize,
        flops=rows * GLM5_VOCAB,
        tolerance=0.0,
        check=_argmax_error,
    )


EXPECTED = {"block_descent": Expected(kernel=False)}  # plain XLA

CASES = (
    _top_k_case(15, 64, jnp.float32),
    *rarely_compiled(
        (
            *(_top_k_case(15, k, jnp.float32) for k in (16, 32, 128)),
            _top_k_case(15, 32, jnp.bfloat16),
            *(_top_k_case(65, k, jnp.float32) for k in (16, 32, 64)),
        )
    ),
    *(_argmax_case(rows, dtype) for rows in (17, 65) for dtype in (jnp.float32, jnp.bfloat16)),
)
