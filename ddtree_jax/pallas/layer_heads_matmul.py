"""Products of each attention head with its own plain weights of one layer, read where they lie in the stack of layers.

Absorbed latent attention takes queries into the latent space and values out of it: one small matrix a head. XLA copies
the layer's weights out of the stack first and then multiplies at a quarter of the memory's speed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, dot, load, require_kernels, store, triton_call

MAX_ROWS = 128  # in a kernel call; with more, copying the weights is little beside the products


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a call is cut up.

    rows: activation rows of a program; columns x depth: of a head's weights, a step; all powers of two.
    num_warps, num_stages: of Triton.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int = 4
    num_stages: int = 4

    @property
    def label(self) -> str:
        return f"r{self.rows}_c{self.columns}_d{self.depth}_w{self.num_warps}_p{self.num_stages}"


def choose_tiles(rows: int, k: int, columns: int, platform: Platform) -> Tiles:
    """The tile table, measured on one H200 (benchmarks/RESULTS.md)."""
    tile_rows = next(size for size in (16, 32, 64, 128) if rows <= size)
    small = platform.shared_memory < 200_000
    return Tiles(
        tile_rows,
        min(128, max(16, pl.next_power_of_2(columns))),
        math.gcd(k, 32 if small and tile_rows > 64 else 64),
        num_warps=8 if tile_rows == 128 else 4,
        num_stages=2 if small else 4,
    )


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
    assert k % tiles.depth == 0
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
    rows_at = pl.ds(pl.program_id(0) * tiles.rows, tiles.rows)
    columns_at = pl.ds(pl.program_id(1) * tiles.columns, tiles.columns)
    num_rows, _, k = x_ref.shape
    num_columns = out_ref.shape[2]
    row_mask = column_mask = None
    if num_rows % tiles.rows:
        row_mask = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows) < num_rows
    if num_columns % tiles.columns:
        column_mask = pl.program_id(1) * tiles.columns + jnp.arange(tiles.columns) < num_columns

    def masked(at: Any, mask: jax.Array | None, shape: tuple[int, int], axis: int) -> jax.Array:
        if mask is None:
            return load(at)
        return load(at, mask=jnp.broadcast_to(jnp.expand_dims(mask, 1 - axis), shape), other=0.0)

    def body(step: jax.Array, total: jax.Array) -> jax.Array:
        at = pl.ds(step * tiles.depth, tiles.depth)
        x = masked(x_ref.at[rows_at, head, at], row_mask, (tiles.rows, tiles.depth), 0)
        if transposed:
            own = masked(weights_ref.at[layer, columns_at, head, at], column_mask, (tiles.columns, tiles.depth), 0)
        else:
            own = masked(weights_ref.at[layer, at, head, columns_at], column_mask, (tiles.depth, tiles.columns), 1)
        return total + dot(x, own, trans_b=transposed)

    total = jax.lax.fori_loop(0, k // tiles.depth, body, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    mask = None
    if row_mask is not None or column_mask is not None:
        mask = jnp.ones(total.shape, jnp.bool_)
        mask = mask if row_mask is None else mask & row_mask[:, None]
        mask = mask if column_mask is None else mask & column_mask[None, :]
    store(out_ref.at[rows_at, head, columns_at], total.astype(out_ref.dtype), mask=mask)


def _check(x: jax.Array, weights: jax.Array, layer: jax.Array, transposed: bool) -> None:
    if x.ndim != 4 or weights.ndim != 4 or x.shape[2:] != (weights.shape[2], weights.shape[3 if transposed else 1]):
        own = "[B, T, H, N]" if transposed else "[B, T, H, C]"
        raise ValueError(f"got x {x.shape}, weights {weights.shape}; they must be {own} and [R, C, H, N]")
    if x.dtype not in (jnp.bfloat16, jnp.float32) or weights.dtype != x.dtype:
        raise ValueError(f"got x in {x.dtype}, weights in {weights.dtype}; both must be bfloat16, or float32")
    if not weights.shape[0]:
        raise ValueError(f"weights: got {weights.shape}; there must be a layer")
    if layer.shape != () or layer.dtype != jnp.int32:
        raise ValueError(f"layer: got {layer.dtype}{list(layer.shape)}; it must be an int32 scalar")
