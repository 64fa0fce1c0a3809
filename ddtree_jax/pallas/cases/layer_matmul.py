"""Products of GLM-5 with plain bfloat16 weights of stacked layers: every linear shape, the large ones at more rows."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_EXPERTS, GLM5_LINEARS, Linear
from ddtree_jax.pallas.cases.base import Baseline, Case, rarely_compiled

LAYERS, LAYER = 2, 1
_CHECKED = 64  # columns, the first and the last ones


def _arrays(key: jax.Array, rows: int, linear: Linear, layers: int) -> tuple[jax.Array, ...]:
    x, w = jax.random.split(key)
    weights = jax.random.normal(w, (layers, linear.k, linear.n), jnp.bfloat16) * linear.k**-0.5
    return jax.random.normal(x, (rows, linear.k), jnp.bfloat16), weights.astype(jnp.bfloat16), jnp.int32(layers - 1)


def _check(arrays: tuple[Any, ...], result: Any) -> float:
    x, weights, layer = arrays
    if not bool(jnp.all(jnp.isfinite(result))):
        return float("inf")
    columns = np.r_[0:_CHECKED, result.shape[1] - _CHECKED : result.shape[1]]
    exact = np.asarray(x, np.float64) @ np.asarray(weights[int(layer)][:, columns], np.float64)
    found = np.asarray(result[:, columns], np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _alone(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
    return jnp.dot(x, w[0], preferred_element_type=jnp.float32).astype(x.dtype)


def _case(name: str, rows: int, linear: Linear | None = None) -> Case:
    linear = linear or GLM5_LINEARS[name]
    traffic = 2 * (linear.n * linear.k + rows * (linear.n + linear.k))
    return Case(
        op="layer_matmul",
        name=f"glm5 {name}, {rows} rows, bfloat16",
        make=functools.partial(_arrays, rows=rows, linear=linear, layers=LAYERS),
        static={"out_dtype": jnp.bfloat16},
        traffic=traffic,
        flops=2 * rows * linear.n * linear.k,
        check=_check,
        # A stack of one layer: nothing has to be cut out of it.
        baselines={
            "one layer": Baseline(
                _alone, functools.partial(_arrays, rows=rows, linear=linear, layers=1), traffic, rotate=(1,)
            )
        },
        rotate=(1,),
    )


def _router_case(rows: int) -> Case:
    """The router: three bfloat16 terms of each float32 weight side by side, as `models.moe` has them."""
    terms = Linear(3 * GLM5_EXPERTS.e, GLM5_EXPERTS.d)
    own = {"baselines": {}, "static": {"out_dtype": jnp.float32}, "tolerance": 1e-5}
    return dataclasses.replace(_case("router", rows, terms), **own)


_SWEPT = ("o", "dense_gate_up", "q_a")
CASES = (
    _case("o", 17),
    *rarely_compiled(
        (
            *(_case(name, 17) for name in GLM5_LINEARS if name not in ("o", "kv_b")),
            *(_case(name, rows) for name in _SWEPT for rows in (1, 65, 128)),
            _router_case(17),
        )
    ),
)
