"""DSA lightning indexer: the scores of every key for every query row.

The score of a key is a sum over index heads, w_h * relu(q_h . k / sqrt(d)). In plain XLA the products of all heads go
through memory (35 times the bytes of the keys); the kernel keeps them in registers and reads each key once.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import BLACKWELL_RTX, Platform, dot, load, require_kernels, store, triton_call


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the scores kernel.

    Attributes:
      keys: keys a program scores; the M side of its products, so that it sums over heads inside a row.
      tokens: query rows whose heads are the N side of one product.
      depth: dims of one product, 0 for all: float32 products lie in registers.
    """

    keys: int = 128
    tokens: int = 2
    depth: int = 0
    num_warps: int = 4
    num_stages: int = 3


def indexer_tiles(heads: int, dtype: jnp.dtype, platform: Platform) -> Tiles:
    if jnp.dtype(dtype) == jnp.float32:
        return Tiles(keys=64, tokens=max(1, 16 // heads), depth=16, num_warps=4, num_stages=1)
    tokens = max(1, 64 // heads)
    return Tiles(keys=128, tokens=tokens, num_warps=4, num_stages=2 if platform.generation == BLACKWELL_RTX else 3)


def indexer_scores_reference(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    new: jax.Array,
    mask: jax.Array,
    *,
    platform: Platform | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The scores of all committed keys and of the block's own.

    Args:
      q: [B, T, Hi, d], rotated index queries.
      weights: float32[B, T, Hi], signed head weights.
      cache: [R, B, S, d], index keys of committed tokens, all stacked layers.
      layer: int32[], which of the R.
      lengths: int32[B], valid slots of each sequence, 0..S. What lies beyond is never read into a score, NaN included.
      new: [B, T, d], index keys of the block.
      mask: bool[B, T, T], True = row t may see column u.

    Returns:
      (float32[B, T, S], float32[B, T, T]): products and sums in float32 (those of bfloat16 operands are exact); -inf
      at slots at or beyond `lengths[b]` and at masked columns.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    del platform
    _check(q, weights, cache, layer, lengths, new, mask)
    keys = jax.lax.dynamic_index_in_dim(cache, layer, 0, keepdims=False)
    valid = jnp.arange(cache.shape[2], dtype=jnp.int32)[None, :] < lengths[:, None]

    def scores(keys: jax.Array, visible: jax.Array) -> jax.Array:
        if q.dtype == keys.dtype == jnp.bfloat16:
            products = jnp.einsum("bthd,bmd->bthm", q, keys, preferred_element_type=jnp.float32)
        else:
            operands = q.astype(jnp.float32), keys.astype(jnp.float32)
            products = jnp.einsum("bthd,bmd->bthm", *operands, precision=jax.lax.Precision.HIGHEST)
        heads = jax.nn.relu(products * q.shape[-1] ** -0.5)
        total = jnp.einsum("bth,bthm->btm", weights, heads, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(visible, total, -jnp.inf)

    return scores(keys, valid[:, None, :]), scores(new, mask)


def indexer_scores_triton(
    q: jax.Array,
    weights: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    lengths: jax.Array,
    new: jax.Array,
    mask: jax.Array,
    *,
    platform: Platform,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`indexer_scores_reference` in one launch, for d and Hi powers of two and operands of one dtype.

    The whole stack of keys is an operand and the layer is read in the kernel: XLA copies no slice.
    """
    _check(q, weights, cache, layer, lengths, new, mask)
    require_kernels(platform)
    batch, rows, heads, width = q.shape
    if not q.dtype == cache.dtype == new.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"needs bfloat16 or float32 operands of one dtype; got {q.dtype}, {cache.dtype}")
    if width < 16 or width & (width - 1) or heads & (heads - 1):
        raise NotImplementedError(f"needs powers of two for heads and head_dim >= 16; got {heads}, {width}")
    tiles = indexer_tiles(heads, q.dtype, platform) if tiles is None else tiles
    slots = cache.shape[2]
    prefix_blocks, own_blocks = pl.cdiv(slots, tiles.keys), pl.cdiv(rows, tiles.keys)
    kernel = functools.partial(_scores_kernel, tiles=tiles, rows=rows, heads=heads, prefix_blocks=prefix_blocks)
    call = triton_call(
        kernel,
        name="indexer_scores",
        platform=platform,
        grid=(prefix_blocks + own_blocks, batch),
        out_shape=(
            jax.ShapeDtypeStruct((batch, rows, slots), jnp.float32),
            jax.ShapeDtypeStruct((batch, rows, rows), jnp.float32),
        ),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    flat_q, flat_weights = q.reshape(batch, rows * heads, width), weights.reshape(batch, rows * heads)
    return call(jnp.asarray(layer, jnp.int32).reshape(1), lengths, flat_q, flat_weights, cache, new, mask)


def _scores_kernel(
    layer_ref,  # int32[1]
    lengths_ref,  # int32[B]
    q_ref,  # [B, T * Hi, d]
    weights_ref,  # float32[B, T * Hi]
    cache_ref,  # [R, B, S, d]
    new_ref,  # [B, T, d]
    mask_ref,  # bool[B, T, T]
    prefix_ref,  # float32[B, T, S]
    own_ref,  # float32[B, T, T]
    *,
    tiles: Tiles,
    rows: int,
    heads: int,
    prefix_blocks: int,
):
    block, b = pl.program_id(0), pl.program_id(1)
    slots, width = cache_ref.shape[2:]
    layer, length = layer_ref[0], jnp.minimum(lengths_ref[b], slots)
    depth = min(tiles.depth or width, width)
    lane = jnp.arange(tiles.keys, dtype=jnp.int32)
    pieces = [start + jnp.arange(depth, dtype=jnp.int32) for start in range(0, width, depth)]
    side = jnp.arange(tiles.tokens * heads, dtype=jnp.int32)
    steps = pl.cdiv(rows, tiles.tokens)

    def sums(step: jax.Array, keys: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(float32[keys, tokens], the token ids [tokens]) of one step over the query rows."""
        at = step * (tiles.tokens * heads) + side
        live = at < rows * heads
        products = jnp.zeros((tiles.keys, tiles.tokens * heads), jnp.float32)
        for piece, dims in zip(keys, pieces, strict=True):
            queries = load(q_ref.at[b, at[:, None], dims[None, :]], mask=live[:, None], other=0.0)
            products += dot(piece, queries, trans_b=True)
        # relu(x * c) * w == relu(x) * (w * c) for c > 0: one multiplication less an element.
        scale = load(weights_ref.at[b, at], mask=live, other=0.0) * width**-0.5
        weighted = jnp.maximum(products, 0.0) * scale[None, :]
        total = jnp.sum(weighted.reshape(tiles.keys, tiles.tokens, heads), axis=2)
        return total, step * tiles.tokens + jnp.arange(tiles.tokens, dtype=jnp.int32)

    columns = block * tiles.keys + lane
    inside = columns < slots

    @pl.when((block < prefix_blocks) & (block * tiles.keys < length))
    def _():
        visible = columns < length
        seen = visible[:, None]
        keys = [load(cache_ref.at[layer, b, columns[:, None], at[None, :]], mask=seen, other=0.0) for at in pieces]

        def score(step, carry):
            total, tokens = sums(step, keys)
            place = prefix_ref.at[b, tokens[None, :], columns[:, None]]
            fits = (tokens < rows)[None, :] & inside[:, None]
            store(place, jnp.where(seen, total, -jnp.inf), mask=fits)
            return carry

        jax.lax.fori_loop(0, steps, score, 0)

    @pl.when((block < prefix_blocks) & (block * tiles.keys >= length))
    def _():
        def fill(row, carry):
            store(prefix_ref.at[b, row, columns], jnp.full((tiles.keys,), -jnp.inf, jnp.float32), mask=inside)
            return carry

        jax.lax.fori_loop(0, rows, fill, 0)

    @pl.when(block >= prefix_blocks)
    def _():
        own = (block - prefix_blocks) * tiles.keys + lane
        real = own < rows
        keys = [load(new_ref.at[b, own[:, None], at[None, :]], mask=real[:, None], other=0.0) for at in pieces]

        def score(step, carry):
            total, tokens = sums(step, keys)
            fits = (tokens < rows)[None, :] & real[:, None]
            seen = load(mask_ref.at[b, tokens[None, :], own[:, None]], mask=fits, other=False)
            store(own_ref.at[b, tokens[None, :], own[:, None]], jnp.where(seen, total, -jnp.inf), mask=fits)
            return carry

        jax.lax.fori_loop(0, steps, score, 0)


def _check(q, weights, cache, layer, lengths, new, mask) -> None:
    batch, rows, heads, width = q.shape
    expected = {
        "weights": (weights, (batch, rows, heads), jnp.float32),
        "lengths": (lengths, (batch,), jnp.int32),
        "mask": (mask, (batch, rows, rows), jnp.bool_),
        "layer": (layer, (), jnp.int32),
    }
    for name, (array, shape, dtype) in expected.items():
        if jnp.shape(array) != shape or jnp.result_type(array) != dtype:
            raise ValueError(
                f"{name}: got {jnp.result_type(array)}{list(jnp.shape(array))}; "
                f"with q {list(q.shape)} it must be {jnp.dtype(dtype)}{list(shape)}"
            )
    if cache.ndim != 4 or cache.shape[1] != batch or cache.shape[3] != width:
        raise ValueError(f"cache: got shape {cache.shape}; it must be [R, {batch}, S, {width}]")
    if new.shape != (batch, rows, width):
        raise ValueError(f"new: got shape {new.shape}; it must be {(batch, rows, width)}")
    if math.prod(q.shape) == 0 or math.prod(cache.shape) == 0:
        raise ValueError(f"q: got shape {q.shape}, cache {cache.shape}; no axis may be empty")
