"""Rows times the plain weights of one layer, read where they lie in the stack of all layers.

XLA copies a layer's weights out of the stack before it multiplies with them: they cross the memory three times. This
kernel takes the layer's index.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, dot, largest_divisor, load, require_kernels, store, triton_call

MAX_ROWS = 128  # in a kernel call; with more, copying the weights is little beside the products


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a call is cut up.

    rows: activation rows of a program; columns x depth: of the weight, a step; all powers of two.
    splits: programs that share the steps of one tile; their partial sums are added by XLA.
    num_warps, num_stages: of Triton.
    """

    rows: int
    columns: int
    depth: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4

    @property
    def label(self) -> str:
        return f"r{self.rows}_c{self.columns}_d{self.depth}_s{self.splits}_w{self.num_warps}_p{self.num_stages}"


def choose_tiles(rows: int, k: int, columns: int, platform: Platform) -> Tiles:
    """The tile table, measured on one H200 (benchmarks/RESULTS.md)."""
    tile_rows = next(size for size in (16, 32, 64, 128) if rows <= size)
    wide = 128 if columns >= 4096 else 64
    small = platform.shared_memory < 200_000
    depth = math.gcd(k, 32 if small and tile_rows > 64 else 64)
    most = max(1, 3 * max(platform.cores, 1) // (2 * pl.cdiv(columns, wide)))
    return Tiles(
        tile_rows,
        wide,
        depth,
        splits=largest_divisor(k // depth, min(most, max(1, k // depth // 4))),
        num_warps=8 if tile_rows == 128 else 4,
        num_stages=2 if small else 4,
    )


def layer_matmul_reference(
    x: jax.Array, weights: jax.Array, layer: jax.Array, *, out_dtype: Any, platform: Platform
) -> jax.Array:
    """One layer's product in plain JAX.

    Args:
      x: bfloat16 or float32 [M, K].
      weights: of the same dtype [R, K, *out], of all stacked layers.
      layer: int32 scalar, 0..R-1.
      out_dtype: of the result; sums are float32.

    Returns:
      [M, *out].

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    del platform
    _check(x, weights, layer)
    own = jax.lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, own, dims, precision=precision, preferred_element_type=jnp.float32).astype(out_dtype)


def layer_matmul_triton(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    *,
    out_dtype: Any,
    platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:
    """As the reference, for bfloat16 and up to MAX_ROWS rows; `tiles` overrides the table."""
    require_kernels(platform)
    _check(x, weights, layer)
    rows, k = x.shape
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"{x.dtype}: the kernel multiplies bfloat16")
    if not 0 < rows <= MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; the kernel is made for 1 to {MAX_ROWS}")
    if not k or k % 16:
        raise NotImplementedError(f"K {k}: the kernel needs a multiple of 16")
    if not weights.size:
        raise NotImplementedError(f"weights {weights.shape}: the kernel needs some")
    columns = math.prod(weights.shape[2:])
    if tiles is None:
        tiles = choose_tiles(rows, k, columns, platform)
    flat = weights.reshape(*weights.shape[:2], columns)
    out = _run(x, flat, layer.reshape(1), jnp.dtype(out_dtype), tiles, platform)
    return out.reshape(rows, *weights.shape[2:])


@functools.partial(jax.jit, static_argnames=("out_dtype", "tiles", "platform"))
def _run(
    x: jax.Array, weights: jax.Array, layer: jax.Array, out_dtype: Any, tiles: Tiles, platform: Platform
) -> jax.Array:
    rows, k, columns = x.shape[0], x.shape[1], weights.shape[2]
    assert k % (tiles.depth * tiles.splits) == 0
    out = triton_call(
        functools.partial(_kernel, tiles=tiles),
        name=f"layer_matmul_{columns}_{k}_{tiles.label}",
        platform=platform,
        # Tiles of rows come first: those that run together read the same weights.
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(columns, tiles.columns), tiles.splits),
        out_shape=jax.ShapeDtypeStruct((tiles.splits, rows, columns), out_dtype if tiles.splits == 1 else jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, x, weights)
    return jnp.sum(out, axis=0).astype(out_dtype) if tiles.splits > 1 else out[0]


def _kernel(layer_ref, x_ref, weights_ref, out_ref, *, tiles):
    """One tile of rows and columns, one share of the steps."""
    layer = layer_ref[0]
    first_row, first, split = pl.program_id(0) * tiles.rows, pl.program_id(1) * tiles.columns, pl.program_id(2)
    (num_rows, k), num_columns = x_ref.shape, weights_ref.shape[2]
    share = k // tiles.depth // tiles.splits
    rows, columns = within(first_row, tiles.rows, num_rows), within(first, tiles.columns, num_columns)

    def body(step: jax.Array, total: jax.Array) -> jax.Array:
        at = pl.ds((split * share + step) * tiles.depth, tiles.depth)
        x = load_part(x_ref.at[pl.ds(first_row, tiles.rows), at], rows, (tiles.rows, tiles.depth))
        w_at = weights_ref.at[layer, at, pl.ds(first, tiles.columns)]
        return total + dot(x, load_part(w_at, columns, (tiles.depth, tiles.columns), axis=1))

    total = jax.lax.fori_loop(0, share, body, jnp.zeros((tiles.rows, tiles.columns), jnp.float32))
    out_at = out_ref.at[split, pl.ds(first_row, tiles.rows), pl.ds(first, tiles.columns)]
    store_part(out_at, total.astype(out_ref.dtype), rows, columns)


def within(first: jax.Array, size: int, count: int) -> jax.Array | None:
    """bool[size], which of the rows or columns from `first` on there are; None: all, in whole tiles."""
    return first + jnp.arange(size) < count if count % size else None


def load_part(at: Any, there: jax.Array | None, shape: tuple[int, int], axis: int = 0) -> jax.Array:
    """A tile of `shape`, with zeros for what is not there along `axis`, as `within` says."""
    if there is None:
        return load(at)
    return load(at, mask=jnp.broadcast_to(jnp.expand_dims(there, 1 - axis), shape), other=0.0)


def store_part(at: Any, tile: jax.Array, rows: jax.Array | None, columns: jax.Array | None) -> None:
    """Writes what is there of a tile."""
    mask = None
    if rows is not None or columns is not None:
        mask = jnp.ones(tile.shape, jnp.bool_)
        mask = mask if rows is None else mask & rows[:, None]
        mask = mask if columns is None else mask & columns[None, :]
    store(at, tile, mask=mask)


def _check(x: jax.Array, weights: jax.Array, layer: jax.Array) -> None:
    if x.ndim != 2 or weights.ndim < 3 or weights.shape[1] != x.shape[1]:
        raise ValueError(f"got x {x.shape}, weights {weights.shape}; they must be [M, K] and [R, K, *out]")
    check_stack(x, weights, layer)


def check_stack(x: jax.Array, weights: jax.Array, layer: jax.Array) -> None:
    """ValueError for what is wrong beside the shape of a matrix."""
    if x.dtype not in (jnp.bfloat16, jnp.float32) or weights.dtype != x.dtype:
        raise ValueError(f"got x in {x.dtype}, weights in {weights.dtype}; both must be bfloat16, or float32")
    if not weights.shape[0]:
        raise ValueError(f"weights: got {weights.shape}; there must be a layer")
    if layer.shape != () or layer.dtype != jnp.int32:
        raise ValueError(f"layer: got {layer.dtype}{list(layer.shape)}; it must be an int32 scalar")
