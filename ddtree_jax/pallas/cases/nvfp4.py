"""NVFP4 products of GLM-5: every linear shape at one row count, and the large ones at all."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import GLM5_LINEARS, Linear
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, HOPPER
from ddtree_jax.pallas.cases.base import Baseline, Case, SomeParts, rarely_compiled
from ddtree_jax.pallas.cases.registry import Expected
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, GROUPS, ROWS, SHIFTED, STEP, GridWeight, decode_grid

SWEPT = ("dense_gate_up", "dense_down", "shared_gate_up")
SWEPT_ROWS = (16, 64, 1, 2, 9, 32, 128, 256)
CHECKED_COLUMNS = 2 * ROWS
# What a case's name says of how its weights are laid out: the first for wgmma, as a Hopper GPU is served.
LABELS = {FRAGMENTS: "", SHIFTED: ", shifted codes", BYTES: ", converted by hardware"}
GENERATIONS = {FRAGMENTS: (HOPPER,), BYTES: (BLACKWELL, BLACKWELL_RTX)}
HARDWARE_CODE = dict.fromkeys(("b200", "rtx_pro_6000"), ("cvt.rn.f16x2.e2m1x2",))


def random_weight(
    key: jax.Array, lead: tuple[int, ...], k: int, parts: int, width: int, arrangement: str = SHIFTED
) -> GridWeight:
    """Random codes and scales 2^-6..2^-2, a factor of 1: outputs of about the size of the inputs."""
    blocks, steps = parts * -(-width // ROWS), -(-k // STEP)
    codes, scales = jax.random.split(key)
    bits = jax.random.bits(codes, (*lead, blocks, steps, 2, ROWS, GROUPS), jnp.uint32)
    return GridWeight(
        words=jax.lax.bitcast_convert_type(bits, jnp.int32),
        scales=jax.random.randint(scales, (*lead, blocks, steps, ROWS, GROUPS), 32, 64, jnp.uint8),
        factors=jnp.full((*lead, blocks), 4 * k**-0.5, jnp.float32),
        k=k,
        parts=parts,
        width=width,
        arrangement=arrangement,
    )


def _arrays(key: jax.Array, rows: int, linear: Linear, dtype: Any, arrangement: str) -> tuple[Any, ...]:
    x, w = jax.random.split(key)
    weight = random_weight(w, (), linear.k, 1, linear.n, arrangement)
    return jax.random.normal(x, (rows, linear.k), dtype), weight


def _exact_columns(x: jax.Array, weight: GridWeight) -> list[tuple[Any, np.ndarray]]:
    """The first and the last columns."""
    found = []
    for first in dict.fromkeys((0, weight.num_blocks - 2)):
        # Products of codes, scales and factors are exact in float32 up to one rounding.
        plain = np.asarray(_decoded(weight, jnp.int32(first)), np.float64)
        at = slice(first * ROWS, min(first * ROWS + CHECKED_COLUMNS, weight.width))
        want = np.asarray(x).astype(np.float64) @ plain
        found.append(((slice(None), 0, at), want[:, : at.stop - at.start]))
    return found


@jax.jit
def _decoded(weight: GridWeight, first: jax.Array) -> jax.Array:
    """float32 [K, CHECKED_COLUMNS] of two grid blocks."""
    own = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, CHECKED_COLUMNS // ROWS), weight)
    return decode_grid(dataclasses.replace(own, width=CHECKED_COLUMNS), jnp.float32)[:, 0]


def _bfloat16_arrays(key: jax.Array, rows: int, linear: Linear) -> tuple[jax.Array, jax.Array]:
    x, w = jax.random.split(key)
    return (
        jax.random.normal(x, (rows, linear.k), jnp.bfloat16),
        jax.random.normal(w, (linear.k, linear.n), jnp.bfloat16),
    )


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)


def _case(name: str, rows: int, dtype: Any = jnp.bfloat16, arrangement: str = FRAGMENTS) -> Case:
    linear = GLM5_LINEARS[name]
    size = jnp.dtype(dtype).itemsize
    activations = size * rows * (linear.n + linear.k)
    bfloat16 = Baseline(
        _product,
        functools.partial(_bfloat16_arrays, rows=rows, linear=linear),
        2 * linear.n * linear.k + activations,
        rotate=(1,),
    )
    return Case(
        op="nvfp4_matmul",
        name=f"glm5 {name}, {rows} rows"
        + ("" if dtype == jnp.bfloat16 else f", {jnp.dtype(dtype).name}")
        + LABELS[arrangement],
        make=functools.partial(_arrays, rows=rows, linear=linear, dtype=dtype, arrangement=arrangement),
        static={"out_dtype": dtype},
        traffic=linear.n * linear.k * 9 // 16 + activations,
        flops=2 * rows * linear.n * linear.k,
        tolerance=1e-2 if dtype == jnp.bfloat16 else 1e-5,
        check=SomeParts(_exact_columns),
        baselines={"bfloat16 weights": bfloat16} if dtype == jnp.bfloat16 else {},
        rotate=(1,),
        code=HARDWARE_CODE if arrangement == BYTES else {},
        generations=GENERATIONS.get(arrangement),
    )


def _cases() -> tuple[Case, ...]:
    # Of each arrangement's sweep, the first rows stand for a shape where the compiler is asked.
    out = [_case(name, rows) for name in SWEPT for rows in SWEPT_ROWS[:2]]
    out += [_case(name, 17) for name in GLM5_LINEARS if name not in SWEPT]
    out += rarely_compiled(_case(name, rows) for name in SWEPT for rows in SWEPT_ROWS[2:])
    out.append(_case("shared_gate_up", 17, jnp.float32))
    for arrangement in (BYTES, SHIFTED):
        # Triton's tiles of rows: 16, 64, which are multiplied the other way round, and a single one.
        out += [_case(SWEPT[0], rows, arrangement=arrangement) for rows in SWEPT_ROWS[:3]]
        out += rarely_compiled(_case(SWEPT[0], rows, arrangement=arrangement) for rows in SWEPT_ROWS[3:])
        out += [_case(name, 16, arrangement=arrangement) for name in SWEPT[1:]]
        out.append(_case("shared_gate_up", 17, jnp.float32, arrangement))
    return tuple(out)


CASES = _cases()

EXPECTED = {"mosaic": Expected(code={"h200": ("wgmma.mma_async",)})}
