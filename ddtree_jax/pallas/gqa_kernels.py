"""Kernel of grouped-query attention: the query heads of a group, over all block rows, share the keys of one head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import BLACKWELL_RTX, Platform, load, store, triton_call
from ddtree_jax.pallas.split_attention import (
    Tiles,
    attend,
    cdiv,
    empty_state,
    finish,
    finite_rows,
    is_power_of_two,
    merge,
    num_splits,
    parts_shape,
    plain_loop,
    split_range,
)


def gqa_tiles(q: Any, kv_heads: int, platform: Platform) -> Tiles:
    """Tile choices for q [B, T, Hq, hd]."""
    rows, head_dim = q.shape[1] * (q.shape[2] // kv_heads), q.shape[3]
    if jnp.dtype(q.dtype).itemsize == 4:
        return Tiles(16, 32, 16, num_warps=8, num_stages=1, merge_rows=8)
    if platform.generation == BLACKWELL_RTX:
        return Tiles(16 if rows <= 16 else 64, 64, 32, num_warps=4, num_stages=2, per_core=1, merge_rows=8)
    if rows <= 32 or head_dim > 128:
        return Tiles(16 if rows <= 16 else 32, 64, 32, num_warps=4, num_stages=3, per_core=2, merge_rows=8)
    # One tile of 128 reads the keys once where two of 64 would read them twice.
    if rows <= 64:
        return Tiles(64, 64, 32, num_warps=4, num_stages=3, per_core=2, merge_rows=8)
    return Tiles(128, 64, 32 if q.shape[1] <= 32 else 64, num_warps=8, num_stages=3, per_core=1, merge_rows=8)


def _kernel(
    layer_ref, lengths_ref, q_ref, k_ref, v_ref, new_k_ref, new_v_ref, mask_ref, *out_refs,
    scale: float, kv_heads: int, tiles: Tiles, splits: int,
) -> None:  # fmt: skip
    tile, split, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, length = layer_ref[0], lengths_ref[batch]
    block, head_dim = q_ref.shape[1], q_ref.shape[3]
    group = q_ref.shape[2] // kv_heads
    per_head = -(-block * group // tiles.rows)
    kv_head, first = tile // per_head, tile % per_head * tiles.rows
    span = split_range(length, split, tiles, splits, cdiv(block, tiles.block_keys))
    columns = pl.ds(kv_head * head_dim, head_dim)

    @pl.when(span.some)
    def _() -> None:
        rows = first + jnp.arange(tiles.rows)
        live = rows < block * group
        block_rows = rows // group
        heads = kv_head * group + rows % group
        # Index arrays for every axis: interpret mode takes them for all or none.
        place = (batch, block_rows[:, None], heads[:, None], jnp.arange(head_dim)[None, :])
        queries = (load(q_ref.at[*place], mask=live[:, None], other=0.0),)

        def prefix(i, state):
            start = i * tiles.keys
            valid = start + jnp.arange(tiles.keys) < length
            at = (layer, batch, pl.ds(start, tiles.keys), columns)
            keys = load(k_ref.at[*at], mask=valid[:, None], other=0.0)
            values = load(v_ref.at[*at], mask=valid[:, None], other=0.0)
            busy = start < length if tiles.apart else None
            return attend(state, queries, (keys,), values, valid[None, :], scale, busy=busy)

        def own(i, state):
            start = i * tiles.block_keys
            inside = start + jnp.arange(tiles.block_keys)
            valid = inside < block
            at = (batch, pl.ds(start, tiles.block_keys), columns)
            keys = load(new_k_ref.at[*at], mask=valid[:, None], other=0.0)
            values = load(new_v_ref.at[*at], mask=valid[:, None], other=0.0)
            column = jnp.minimum(inside, block - 1)
            visible = (
                load(mask_ref.at[batch, jnp.minimum(block_rows, block - 1)[:, None], column[None, :]]) & valid[None, :]
            )
            (keys, values), broken = finite_rows((keys, values))
            return attend(state, queries, (keys,), values, visible, scale, broken=broken)

        state = jax.lax.fori_loop(*span.prefix, prefix, empty_state(tiles.rows, head_dim))
        values, weights = finish(plain_loop(*span.block, own, state))
        if splits == 1:
            (out_ref,) = out_refs
            store(out_ref.at[*place], values.astype(out_ref.dtype), mask=live[:, None])
        else:
            values_ref, weights_ref = out_refs
            flat = block_rows * q_ref.shape[2] + heads
            store(values_ref.at[split, batch, flat[:, None], jnp.arange(head_dim)[None, :]], values, mask=live[:, None])
            store(weights_ref.at[split, batch, flat], weights, mask=live)


def gqa_triton(
    q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, *, scale: float, platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:  # fmt: skip
    """`tree_attention.gqa_attention` on Triton; `tiles` overrides the choice."""
    b, t, heads, head_dim = q.shape
    kv_heads = k_cache.shape[3] // head_dim
    if not is_power_of_two(head_dim) or head_dim < 16:
        raise NotImplementedError(f"head dim {head_dim} must be a power of two of at least 16")
    # Wider heads overflow the shared memory, which only the compiler would say.
    widest = 128 if platform.generation == BLACKWELL_RTX else 256
    if head_dim > widest:
        raise NotImplementedError(f"head dim {head_dim}; on this GPU the kernel is made for up to {widest}")
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"dtype {q.dtype}")
    tiles = gqa_tiles(q, kv_heads, platform) if tiles is None else tiles
    query_tiles = kv_heads * -(-t * (heads // kv_heads) // tiles.rows)
    block_tiles = cdiv(t, tiles.block_keys)
    splits = num_splits(
        tiles,
        query_tiles=query_tiles * b,
        key_tiles=cdiv(k_cache.shape[2], tiles.keys) + block_tiles,
        platform=platform,
    )

    def kernel(*refs: Any) -> None:
        _kernel(*refs, scale=scale, kv_heads=kv_heads, tiles=tiles, splits=splits)

    if splits == 1:
        out_shape: Any = (jax.ShapeDtypeStruct(q.shape, q.dtype),)
    else:
        out_shape = tuple(parts_shape(splits, b, t * heads, head_dim))
    out = triton_call(
        kernel,
        name="gqa_attention",
        platform=platform,
        grid=(query_tiles, splits, b),
        out_shape=out_shape,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer.reshape(1), lengths, q, k_cache, v_cache, new_k, new_v, mask)
    if splits == 1:
        return out[0]
    merged = merge(lengths, out, q.dtype, name="gqa_merge", tiles=tiles, platform=platform, block_tiles=block_tiles)
    return merged.reshape(q.shape)
