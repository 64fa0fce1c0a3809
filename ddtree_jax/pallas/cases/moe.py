"""The routed experts of one GLM-5 layer, even random routing, at the row counts of trees.

Plain weights have PLAIN_EXPERTS of the 256: all of them would be 19 GB in bfloat16, and a baseline that lays them out
anew as much again.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_EXPERTS
from ddtree_jax.pallas.cases.base import Case, SomeParts, rarely_compiled
from ddtree_jax.pallas.cases.nvfp4 import GENERATIONS, HARDWARE_CODE, LABELS, random_weight
from ddtree_jax.pallas.cases.registry import Expected
from ddtree_jax.pallas.moe_plain import PlainExperts
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, SHIFTED, GridWeight, decode_grid

ROWS = (17, 1, 5, 9, 33, 65, 129)
PLAIN_EXPERTS = 64
CHECKED_ROWS = 2


def _arrays(key: jax.Array, rows: int, dtype: Any, arrangement: str) -> tuple[Any, ...]:
    e, d, i, top_k = GLM5_EXPERTS
    x, ids, weights, gate_up, down = jax.random.split(key, 5)
    chosen = jax.lax.top_k(jax.random.uniform(ids, (rows, e)), top_k)[1].astype(jnp.int32)
    return (
        jax.random.normal(x, (rows, d), dtype),
        chosen,
        jax.random.uniform(weights, (rows, top_k), jnp.float32),
        random_weight(gate_up, (e,), d, 2, i, arrangement),
        random_weight(down, (e,), i, 1, d, arrangement),
    )


def _plain_arrays(key: jax.Array, rows: int, dtype: Any, values: Any) -> tuple[Any, ...]:
    _, d, i, top_k = GLM5_EXPERTS
    e = PLAIN_EXPERTS
    x, ids, weights, gate_up, down = jax.random.split(key, 5)
    chosen = jax.lax.top_k(jax.random.uniform(ids, (rows, e)), top_k)[1].astype(jnp.int32)
    return (
        jax.random.normal(x, (rows, d), dtype),
        chosen,
        jax.random.uniform(weights, (rows, top_k), jnp.float32),
        _random_plain(gate_up, (e, d, 2, i), values),
        _random_plain(down, (e, i, 1, d), values),
    )


def _random_plain(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> PlainExperts:
    """Values of deviation K^-1/2, one expert at a time; float8 ones are held 64 times as large."""
    scaled = dtype == jnp.float8_e4m3fn
    size = shape[1] ** -0.5 * (64 if scaled else 1)

    def one(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape[1:], jnp.float32) * size).astype(dtype)

    values = jax.lax.map(one, jax.random.split(key, shape[0]))
    return PlainExperts(values, jnp.full((shape[0], shape[2]), 1 / 64, jnp.float32) if scaled else None)


def _ragged(x: jax.Array, ids: jax.Array, weights: jax.Array, gate_up: PlainExperts, down: PlainExperts) -> jax.Array:
    """The same in plain XLA, rows sorted by expert; it reads every expert."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=PLAIN_EXPERTS).astype(jnp.int32)
    merged = gate_up.values.reshape(*gate_up.values.shape[:2], -1)
    gate, up = jnp.split(jax.lax.ragged_dot(x[order // ids.shape[1]], merged, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down.values[:, :, 0], sizes)
    y = y[jnp.argsort(order)].reshape(*ids.shape, -1)
    return jnp.sum(y.astype(jnp.float32) * weights[:, :, None], axis=1)


def distinct_experts(rows: int, num_experts: int = GLM5_EXPERTS.e) -> float:
    """Expected number of experts that `rows` rows hit under even routing."""
    return num_experts * (1 - (1 - GLM5_EXPERTS.top_k / num_experts) ** rows)


def _exact_rows(x, ids, weights, gate_up, down) -> list[tuple[int, np.ndarray]]:
    def plain(weight: GridWeight | PlainExperts, e: int) -> list[np.ndarray]:
        """float64 [K, width] of each part."""
        if isinstance(weight, PlainExperts):
            scales = np.ones(weight.values.shape[2]) if weight.scales is None else np.asarray(weight.scales[e])
            parts = np.moveaxis(np.asarray(weight.values[e].astype(jnp.float32), np.float64), 1, 0)
            return [part * scale for part, scale in zip(parts, scales, strict=True)]
        return list(np.asarray(_decoded(weight, e), np.float64))

    found = []
    for row in np.unique(np.linspace(0, len(x) - 1, CHECKED_ROWS).astype(int)):
        one, want = np.asarray(x[row], np.float64), 0.0
        for expert, weight in zip(np.asarray(ids[row]), np.asarray(weights[row], np.float64), strict=True):
            gate, up = (one @ part for part in plain(gate_up, int(expert)))
            want = want + weight * ((gate / (1 + np.exp(-gate)) * up) @ plain(down, int(expert))[0])
        found.append((int(row), want))
    return found


@jax.jit
def _decoded(weight: GridWeight, e: jax.Array) -> jax.Array:
    """float32 [P, K, width] of one expert."""
    own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, e, keepdims=False), weight)
    return jnp.moveaxis(decode_grid(own, jnp.float32), 1, 0)


def _case(rows: int, dtype: Any = jnp.bfloat16, arrangement: str = FRAGMENTS) -> Case:
    _, d, i, top_k = GLM5_EXPERTS
    size = jnp.dtype(dtype).itemsize
    return Case(
        op="moe",
        name=f"glm5 experts, {rows} rows"
        + ("" if dtype == jnp.bfloat16 else f", {jnp.dtype(dtype).name}")
        + LABELS[arrangement],
        make=functools.partial(_arrays, rows=rows, dtype=dtype, arrangement=arrangement),
        static={},
        traffic=int(distinct_experts(rows) * 3 * d * i * 9 / 16) + rows * d * (size + 4),
        flops=6 * rows * top_k * d * i,
        tolerance=1e-2 if dtype == jnp.bfloat16 else 1e-5,
        check=SomeParts(_exact_rows),
        rotate=(3, 4),
        code=HARDWARE_CODE if arrangement == BYTES else {},
        generations=GENERATIONS.get(arrangement),
    )


def _plain_case(rows: int, values: Any = jnp.bfloat16) -> Case:
    _, d, i, top_k = GLM5_EXPERTS
    size, x_dtype = jnp.dtype(values).itemsize, jnp.float32 if values == jnp.float32 else jnp.bfloat16
    return Case(
        op="moe",
        name=f"glm5 {PLAIN_EXPERTS} experts in {jnp.dtype(values).name}, {rows} rows",
        make=functools.partial(_plain_arrays, rows=rows, dtype=x_dtype, values=values),
        static={},
        traffic=int(distinct_experts(rows, PLAIN_EXPERTS) * 3 * d * i * size)
        + rows * d * (jnp.dtype(x_dtype).itemsize + 4),
        flops=6 * rows * top_k * d * i,
        tolerance=1e-5 if x_dtype == jnp.float32 else 1e-2,
        check=SomeParts(_exact_rows),
        baselines={"lax.ragged_dot": _ragged} if values == jnp.bfloat16 else {},
        rotate=(3, 4),
    )


CASES = (
    *(_case(rows) for rows in ROWS[:2]),
    *rarely_compiled(_case(rows) for rows in ROWS[2:]),
    *(_case(17, arrangement=arrangement) for arrangement in (BYTES, SHIFTED)),
    _plain_case(17),
    _plain_case(17, jnp.float8_e4m3fn),
    *rarely_compiled((*(_plain_case(rows) for rows in (1, 129, 256)), _plain_case(17, jnp.float32))),
    *rarely_compiled(_case(17, jnp.float32, arrangement) for arrangement in (FRAGMENTS, SHIFTED)),
)

EXPECTED = {"mosaic": Expected(code={"h200": ("wgmma.mma_async",)})}
