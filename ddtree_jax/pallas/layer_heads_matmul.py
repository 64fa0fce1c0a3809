"""Products of each attention head with its own plain weights of one layer, read where they lie in the stack of layers.

Absorbed latent attention takes queries into the latent space and values out of it: one small matrix a head. XLA copies
the layer's weights out of the stack first and then multiplies at a quarter of the memory's speed.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas import layer_matmul
from ddtree_jax.pallas.backend import Platform, dot, require_kernels, triton_call
from ddtree_jax.pallas.layer_matmul import MAX_ROWS, Tiles, check_stack, load_part, store_part, within


def choose_tiles(rows: int, k: int, columns: int, platform: Platform) -> Tiles:
    """The tile table, measured on one H200 (benchmarks/RESULTS.md)."""
    common = layer_matmul.choose_tiles(rows, k, columns, platform)
    return dataclasses.replace(common, columns=min(128, max(16, pl.next_power_of_2(columns))), splits=1)


def layer_heads_matmul_reference(
    x: jax.Array, weights: jax.Array, layer: jax.Array, *, transposed: bool, platform: Platform
) -> jax.Array:
    """One layer's products in plain JAX.

    Args:
      x: bfloat16 or float32 [B, T, H, C], or [B, T, H, N] where transposed.
      weights: of the same dtype [R, C, H, N], of all stacked layers; a head's matrix is [C, N].
      layer: int32 scalar, 0..R-1.
      transposed: multiply with the matrices' transposes.

    Returns:
      [B, T, H, N], or [B, T, H, C] where transposed, in the dtype of x; sums are float32.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    del platform
    _check(x, weights, layer, transposed)
    own = jax.lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    spec = "bthn,chn->bthc" if transposed else "bthc,chn->bthn"
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, own, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)


def layer_heads_matmul_triton(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    transposed: bool,
    platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:
    """As the reference, for bfloat16 and B * T up to MAX_ROWS; `tiles` overrides the table."""
    require_kernels(platform)
    _check(x, weights, layer, transposed)
    *lead, heads, k = x.shape
    rows, columns = math.prod(lead), weights.shape[1 if transposed else 3]
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{x.dtype}: the kernel multiplies bfloat16")
    if not 0 < rows <= MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; the kernel is made for 1 to {MAX_ROWS}")
    if not k or k % 16:
        raise NotImplementedError(f"{k} columns of x: the kernel needs a multiple of 16")
    if not weights.size:
        raise NotImplementedError(f"weights {weights.shape}: the kernel needs some")
    if tiles is None:
        tiles = choose_tiles(rows, k, columns, platform)
    return _run(x.reshape(rows, heads, k), weights, layer.reshape(1), transposed, tiles, platform).reshape(
        *lead, heads, columns
    )


@functools.partial(jax.jit, static_argnames=("transposed", "tiles", "platform"))
def _run(
    x: jax.Array, weights: jax.Array, layer: jax.Array, transposed: bool, tiles: Tiles, platform: Platform
) -> jax.Array:
    (rows, heads, k), columns = x.shape, weights.shape[1 if transposed else 3]
    assert k % tiles.depth == 0 and tiles.splits == 1
    return triton_call(
        functools.partial(_kernel, transposed=transposed, tiles=tiles),
        name=f"layer_heads_matmul_{columns}_{k}_{tiles.label}",
        platform=platform,
        # Tiles of rows come first: those that run together read the same weights.
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(columns, tiles.columns), heads),
        out_shape=jax.ShapeDtypeStruct((rows, heads, columns), x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, x, weights)


def _kernel(layer_ref, x_ref, weights_ref, out_ref, *, transposed, tiles):
    """One tile of rows and columns of a head."""
    layer, head = layer_ref[0], pl.program_id(2)
    first_row, first = pl.program_id(0) * tiles.rows, pl.program_id(1) * tiles.columns
    rows_at, columns_at = pl.ds(first_row, tiles.rows), pl.ds(first, tiles.columns)
    num_rows, _, k = x_ref.shape
    rows, columns = within(first_row, tiles.rows, num_rows), within(first, tiles.columns, out_ref.shape[2])

    def body(step: jax.Array, total: jax.Array) -> jax.Array:
        at = pl.ds(step * tiles.depth, tiles.depth)
        x = load_part(x_ref.at[rows_at, head, at], rows, (tiles.rows, tiles.depth))
        if transposed:
            own = load_part(weights_ref.at[layer, columns_at, head, at], columns, (tiles.columns, tiles.depth))
        else:
            own = load_part(weights_ref.at[layer, at, head, columns_at], columns, (tiles.depth, tiles.columns), axis=1)
        return total + dot(x, own, trans_b=transposed)

    total = jax.lax.fori_loop(0, k // tiles.depth, body, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    store_part(out_ref.at[rows_at, head, columns_at], total.astype(out_ref.dtype), rows, columns)


def _check(x: jax.Array, weights: jax.Array, layer: jax.Array, transposed: bool) -> None:
    if x.ndim != 4 or weights.ndim != 4 or x.shape[2:] != (weights.shape[2], weights.shape[3 if transposed else 1]):
        own = "[B, T, H, N]" if transposed else "[B, T, H, C]"
        raise ValueError(f"got x {x.shape}, weights {weights.shape}; they must be {own} and [R, C, H, N]")
    check_stack(x, weights, layer)
