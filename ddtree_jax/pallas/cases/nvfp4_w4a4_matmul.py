"""Products of NVFP4 weights with NVFP4 activations at GLM-5's shapes, and what their programs must hold."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.models.quant import E4M3, E4M3_MAX, GROUP, decode
from ddtree_jax.pallas.arg_specs import GLM5_LINEARS
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import Expected
from ddtree_jax.pallas.fp4_activations import quantise_activations
from ddtree_jax.pallas.nvfp4_w4a4_matmul import prepare_weights

_CHECKED_COLUMNS = 512  # of the result, in float64 on the host

# implementation -> GPU -> strings of which each is in its PTX or its HLO.
CODE = {
    "triton_native": {
        "b200": ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16", "triton_kernel_call"),
        "rtx_pro_6000": (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
            "triton_kernel_call",
        ),
    },
    "mosaic_native": {
        "b200": (
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X",
            "tcgen05.cp.cta_group::1.32x128b.warpx4",
            "cp.async.bulk.tensor",
            "mosaic_gpu",
        ),
    },
}


def make(key: jax.Array, *, m: int, n: int, k: int, prepared: bool) -> tuple[jax.Array, ...]:
    """x bfloat16 [m, k], codes, scales, global scale and input scale; random and like a calibrated checkpoint's."""
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    codes = jax.random.bits(keys[1], (n, k // 2), jnp.uint8)
    scales = jax.random.uniform(keys[2], (n, k // GROUP), jnp.float32, 1, E4M3_MAX).astype(E4M3)
    if prepared:
        codes, scales = prepare_weights(codes, scales)
    return x, codes, scales, jnp.float32(k**-0.5 / E4M3_MAX), jnp.float32(5 / (6 * E4M3_MAX))


def check(arrays: tuple[Any, ...], result: Any, *, prepared: bool) -> float:
    """Relative error of some columns against float64 sums of the same codes."""
    x, codes, scales, global_scale, input_scale = arrays
    x_codes, x_scales = (np.asarray(part) for part in jax.jit(quantise_activations)(x, input_scale))
    step = max(1, codes.shape[0] // _CHECKED_COLUMNS)
    rows = np.arange(0, codes.shape[0], step)
    scales = np.asarray(scales)
    if prepared:  # the definition of the order, and not the function that made it
        column = np.arange(x.shape[1] // GROUP)
        scales = scales[
            rows[:, None] // 128,
            column[None, :] // 4,
            rows[:, None] % 32,
            4 * (rows[:, None] % 128 // 32) + column[None, :] % 4,
        ]
    else:
        scales = scales[rows]
    w = decode(np.asarray(codes)[rows], scales, float(global_scale))
    exact = decode(x_codes, x_scales, float(input_scale)) @ w.T
    found = np.asarray(result)[:, rows].astype(np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def _case(name: str, m: int, prepared: bool) -> Case:
    n, k = GLM5_LINEARS[name]
    weights = n * k // 2 + n * k // GROUP
    return Case(
        op="nvfp4_w4a4_matmul",
        name=f"glm5 {name}, {m} rows" + (", prepared" if prepared else ""),
        make=functools.partial(make, m=m, n=n, k=k, prepared=prepared),
        static={"out_dtype": jnp.bfloat16},
        traffic=weights + 2 * m * k + 2 * m * n,
        flops=2 * m * n * k,
        tolerance=4e-3,  # of rounding the result to bfloat16
        check=functools.partial(check, prepared=prepared),
        rotate=(1, 2),
    )


CASES = (
    *(_case("dense_gate_up", m, True) for m in (16, 1, 64, 128, 256)),
    *(_case("dense_down", m, True) for m in (16, 64)),
    *(_case("shared_gate_up", m, True) for m in (16, 64)),
    *(_case("shared_down", m, True) for m in (16, 128)),
    _case("kv_b", 33, True),
    _case("dense_gate_up", 16, False),
    _case("kv_a", 16, False),
)

EXPECTED = {implementation: Expected(code=code) for implementation, code in CODE.items()}
