"""Products of GLM-5's heads into and out of the latent space, of one layer of a stack."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_HEADS, GLM5_MLA
from ddtree_jax.pallas.cases.base import Baseline, Case, rarely_compiled

LAYERS = 2


def _arrays(key: jax.Array, rows: int, width: int, transposed: bool, layers: int) -> tuple[jax.Array, ...]:
    x, w = jax.random.split(key)
    weights = jax.random.normal(w, (layers, GLM5_MLA.rank, GLM5_MLA.heads, width), jnp.bfloat16) * width**-0.5
    inputs = jax.random.normal(x, (1, rows, GLM5_MLA.heads, width if transposed else GLM5_MLA.rank), jnp.bfloat16)
    return inputs, weights.astype(jnp.bfloat16), jnp.int32(layers - 1)


def _exact(x: Any, weights: Any, layer: Any, *, transposed: bool) -> np.ndarray:
    own = np.asarray(weights[int(layer)], np.float64).swapaxes(0, 1)  # [H, C, N]
    own = own.swapaxes(1, 2) if transposed else own
    return (np.asarray(x, np.float64).swapaxes(1, 2) @ own[None]).swapaxes(1, 2)


def _alone(x: jax.Array, w: jax.Array, _: jax.Array, *, transposed: bool) -> jax.Array:
    spec = "bthn,chn->bthc" if transposed else "bthc,chn->bthn"
    return jnp.einsum(spec, x, w[0], preferred_element_type=jnp.float32).astype(x.dtype)


def _case(name: str, rows: int) -> Case:
    width, transposed = GLM5_HEADS[name]
    size = GLM5_MLA.heads * GLM5_MLA.rank * width
    traffic = 2 * (size + rows * GLM5_MLA.heads * (GLM5_MLA.rank + width))
    make = functools.partial(_arrays, rows=rows, width=width, transposed=transposed)
    one = Baseline(functools.partial(_alone, transposed=transposed), functools.partial(make, layers=1), traffic, (1,))
    return Case(
        op="layer_heads_matmul",
        name=f"glm5 {name} of 64 heads, {rows} rows, bfloat16",
        make=functools.partial(make, layers=LAYERS),
        static={"transposed": transposed},
        traffic=traffic,
        flops=2 * rows * size,
        exact=functools.partial(_exact, transposed=transposed),
        # A stack of one layer: nothing has to be cut out of it.
        baselines={"one layer": one},
        rotate=(1,),
    )


CASES = (
    *(_case(name, 17) for name in GLM5_HEADS),
    *rarely_compiled(_case(name, rows) for name in GLM5_HEADS for rows in (1, 65)),
)
