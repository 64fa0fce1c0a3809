"""The routed experts of one GLM-5 layer, even random routing, at the row counts of trees."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_EXPERTS
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.nvfp4 import random_weight
from ddtree_jax.pallas.nvfp4_grid import GridWeight, decode_grid

ROWS = (17, 1, 5, 9, 33, 65, 129)
CHECKED_ROWS = 2


def _arrays(key: jax.Array, rows: int, dtype: Any) -> tuple[Any, ...]:
    e, d, i, top_k = GLM5_EXPERTS
    x, ids, weights, gate_up, down = jax.random.split(key, 5)
    chosen = jax.lax.top_k(jax.random.uniform(ids, (rows, e)), top_k)[1].astype(jnp.int32)
    return (
        jax.random.normal(x, (rows, d), dtype),
        chosen,
        jax.random.uniform(weights, (rows, top_k), jnp.float32),
        random_weight(gate_up, (e,), d, 2, i),
        random_weight(down, (e,), i, 1, d),
    )


def distinct_experts(rows: int) -> float:
    """Expected number of experts that `rows` rows hit under even routing."""
    e, _, _, top_k = GLM5_EXPERTS
    return e * (1 - (1 - top_k / e) ** rows)


def _error(arrays: tuple[Any, ...], result: Any) -> float:
    """Relative error of some rows in float64."""
    x, ids, weights, gate_up, down = arrays

    def plain(weight: GridWeight, e: int) -> np.ndarray:
        one = dataclasses.replace(weight, words=weight.words[e], scales=weight.scales[e], factors=weight.factors[e])
        return np.asarray(decode_grid(one, jnp.float32), np.float64)

    out, wrong, total = np.asarray(result, np.float64), 0.0, 0.0
    for row in np.unique(np.linspace(0, len(out) - 1, CHECKED_ROWS).astype(int)):
        one, want = np.asarray(x[row], np.float64), 0.0
        for expert, weight in zip(np.asarray(ids[row]), np.asarray(weights[row], np.float64), strict=True):
            both = plain(gate_up, int(expert))
            gate, up = one @ both[:, 0], one @ both[:, 1]
            want = want + weight * ((gate / (1 + np.exp(-gate)) * up) @ plain(down, int(expert))[:, 0])
        wrong, total = wrong + np.sum(np.square(out[row] - want)), total + np.sum(np.square(want))
    return float(np.sqrt(wrong / total)) if np.all(np.isfinite(out)) else float("inf")


def _case(rows: int, dtype: Any = jnp.bfloat16) -> Case:
    _, d, i, top_k = GLM5_EXPERTS
    size = jnp.dtype(dtype).itemsize
    return Case(
        op="moe",
        name=f"glm5 experts, {rows} rows" + ("" if dtype == jnp.bfloat16 else f", {jnp.dtype(dtype).name}"),
        make=functools.partial(_arrays, rows=rows, dtype=dtype),
        static={},
        traffic=int(distinct_experts(rows) * 3 * d * i * 9 / 16) + rows * d * (size + 4),
        flops=6 * rows * top_k * d * i,
        tolerance=1e-2 if dtype == jnp.bfloat16 else 1e-5,
        check=_error,
        rotate=(3, 4),
    )


CASES = (*(_case(rows) for rows in ROWS), _case(17, jnp.float32))
