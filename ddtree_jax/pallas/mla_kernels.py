"""Kernels of absorbed latent attention (MLA): every head of every block row scores the same cache rows."""

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

# Entries of a selection that are compared with the block's columns at a time.
_FIND = 64
# Exact float32 products run outside of the tensor cores, with whole rows of the operands in registers.
_WIDEST_FLOAT32 = 128
_WIDEST, _WIDEST_ROPE = 512, 64


def mla_tiles(q: Any, rank: int, platform: Platform) -> Tiles:
    """Tile choices for q [B, T, H, C]."""
    rows, small = q.shape[1] * q.shape[2], rank <= 128
    block_keys = 32 if q.shape[1] <= 32 else 64
    if jnp.dtype(q.dtype).itemsize == 4:
        return Tiles(16, 16, 16, num_warps=8, num_stages=1)
    if platform.generation == BLACKWELL_RTX:
        return Tiles(16 if rows <= 16 else 32, 32, 32, num_warps=8, num_stages=2)
    if small:
        return Tiles(16 if rows <= 32 else 64, 64, block_keys, num_warps=4, num_stages=2, per_core=2)
    # 72 KB of queries and two buffers of 72 KB of keys: the accumulator takes half of all registers.
    return Tiles(64, 64, block_keys, num_warps=8, num_stages=2, apart=True)


def _check(q: Any, rank: int) -> None:
    rope = q.shape[-1] - rank
    if not (is_power_of_two(rank) and is_power_of_two(rope) and rank >= 16 and rope >= 16):
        raise NotImplementedError(f"rank {rank} and rope {rope} must be powers of two of at least 16")
    if rank > _WIDEST or rope > _WIDEST_ROPE:  # which only the compiler would say: shared memory overflows
        raise NotImplementedError(f"rank {rank} and rope {rope}; the kernel is made for {_WIDEST} and {_WIDEST_ROPE}")
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"dtype {q.dtype}")
    if q.dtype == jnp.float32 and rank > _WIDEST_FLOAT32:
        raise NotImplementedError(f"float32 rows of rank {rank}: above {_WIDEST_FLOAT32} plain XLA is faster")


def _load_row_parts(ref: Any, where: tuple[Any, ...], rank: int, rope: int, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Rows of rank + rope as two blocks: their width together is no power of two."""
    return (
        load(ref.at[*where, pl.ds(0, rank)], mask=mask[:, None], other=0.0),
        load(ref.at[*where, pl.ds(rank, rope)], mask=mask[:, None], other=0.0),
    )


def _gather_row_parts(
    ref: Any, where: tuple[Any, ...], rows: jax.Array, rank: int, rope: int, mask: jax.Array
) -> tuple[jax.Array, ...]:
    """As `_load_row_parts` for rows anywhere. Interpret mode takes index arrays only for every axis or for none."""
    columns = jnp.arange(rank), rank + jnp.arange(rope)
    return tuple(load(ref.at[*where, rows[:, None], c[None, :]], mask=mask[:, None], other=0.0) for c in columns)


def _kernel(
    layer_ref, lengths_ref, q_ref, cache_ref, new_ref, mask_ref, *out_refs,
    rank: int, scale: float, heads: int, tiles: Tiles, splits: int,
) -> None:  # fmt: skip
    tile, split, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, length = layer_ref[0], lengths_ref[batch]
    rope = q_ref.shape[-1] - rank
    block = new_ref.shape[1]
    span = split_range(length, split, tiles, splits, cdiv(block, tiles.block_keys))

    @pl.when(span.some)
    def _() -> None:
        rows = tile * tiles.rows + jnp.arange(tiles.rows)
        live = rows < q_ref.shape[1]
        at = pl.ds(tile * tiles.rows, tiles.rows)
        queries = _load_row_parts(q_ref, (batch, at), rank, rope, live)
        block_rows = jnp.minimum(rows // heads, block - 1)

        def prefix(i, state):
            start = i * tiles.keys
            valid = start + jnp.arange(tiles.keys) < length
            keys = _load_row_parts(cache_ref, (layer, batch, pl.ds(start, tiles.keys)), rank, rope, valid)
            return attend(
                state, queries, keys, keys[0], valid[None, :], scale, busy=start < length if tiles.apart else None
            )

        def own(i, state):
            columns = i * tiles.block_keys + jnp.arange(tiles.block_keys)
            valid = columns < block
            keys = _load_row_parts(new_ref, (batch, pl.ds(i * tiles.block_keys, tiles.block_keys)), rank, rope, valid)
            inside = jnp.minimum(columns, block - 1)
            visible = load(mask_ref.at[batch, block_rows[:, None], inside[None, :]]) & valid[None, :]
            keys, broken = finite_rows(keys)
            busy = i * tiles.block_keys < block if tiles.apart else None
            return attend(state, queries, keys, keys[0], visible, scale, busy=busy, broken=broken)

        state = empty_state(tiles.rows, rank)
        state = jax.lax.fori_loop(*span.prefix, prefix, state)
        values, weights = finish(plain_loop(*span.block, own, state))
        if splits == 1:
            (out_ref,) = out_refs
            store(out_ref.at[batch, at, pl.ds(0, rank)], values.astype(out_ref.dtype), mask=live[:, None])
        else:
            values_ref, weights_ref = out_refs
            store(values_ref.at[split, batch, at, pl.ds(0, rank)], values, mask=live[:, None])
            store(weights_ref.at[split, batch, at], weights, mask=live)


def mla_triton(
    q, cache, layer, lengths, new, mask, *, rank: int, scale: float, platform: Platform, tiles: Tiles | None = None
) -> jax.Array:
    """`tree_attention.mla_attention` on Triton; `tiles` overrides the choice."""
    _check(q, rank)
    tiles = mla_tiles(q, rank, platform) if tiles is None else tiles
    b, t, heads, c = q.shape
    rows = t * heads
    block_tiles, query_tiles = cdiv(t, tiles.block_keys), cdiv(rows, tiles.rows)
    splits = num_splits(
        tiles, query_tiles=query_tiles * b, key_tiles=cdiv(cache.shape[2], tiles.keys) + block_tiles, platform=platform
    )

    def kernel(*refs: Any) -> None:
        _kernel(*refs, rank=rank, scale=scale, heads=heads, tiles=tiles, splits=splits)

    out_shape = jax.ShapeDtypeStruct((b, rows, rank), q.dtype)
    out = triton_call(
        kernel,
        name="mla_attention",
        platform=platform,
        grid=(query_tiles, splits, b),
        out_shape=(out_shape,) if splits == 1 else tuple(parts_shape(splits, b, rows, rank)),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer.reshape(1), lengths, q.reshape(b, rows, c), cache, new, mask)
    if splits > 1:
        out = [merge(lengths, out, q.dtype, name="mla_merge", tiles=tiles, platform=platform, block_tiles=block_tiles)]
    return out[0].reshape(b, t, heads, rank)


def mla_selected_tiles(q: Any, rank: int, platform: Platform) -> Tiles:
    """Tile choices for q [B, T, H, C]; the heads of one row are a tile."""
    heads, small = q.shape[2], rank <= 128
    if jnp.dtype(q.dtype).itemsize == 4:
        return Tiles(16, 16, 16, num_warps=8, num_stages=1)
    if platform.generation == BLACKWELL_RTX:
        return Tiles(16 if heads <= 16 else 32, 32, 32, num_warps=8, num_stages=2)
    rows = 16 if heads <= 16 else 64
    if small or rows == 16:
        return Tiles(rows, 32, 32, num_warps=4, num_stages=2)
    return Tiles(rows, 64, 32, num_warps=8, num_stages=2, apart=True)


def _selected_kernel(
    layer_ref, q_ref, cache_ref, new_ref, lengths_ref, selected_ref, *out_refs,
    rank: int, scale: float, tiles: Tiles, splits: int,
) -> None:  # fmt: skip
    split, batch = pl.program_id(1), pl.program_id(2)
    block, heads = q_ref.shape[1], q_ref.shape[2]
    per_row = -(-heads // tiles.rows)
    row, first = pl.program_id(0) // per_row, pl.program_id(0) % per_row * tiles.rows
    layer, length = layer_ref[0], lengths_ref[batch]
    rope = q_ref.shape[3] - rank
    slots, count = cache_ref.shape[2], selected_ref.shape[2]
    span = split_range(jnp.int32(count), split, tiles, splits, cdiv(block, tiles.block_keys))

    @pl.when(span.some)
    def _() -> None:
        at = first + jnp.arange(tiles.rows)
        live = at < heads
        queries = _load_row_parts(q_ref, (batch, row, pl.ds(first, tiles.rows)), rank, rope, live)

        def columns(start, size):
            inside = start + jnp.arange(size) < count
            return load(selected_ref.at[batch, row, pl.ds(start, size)], mask=inside, other=-1)

        def prefix(i, state):
            chosen = columns(i * tiles.keys, tiles.keys)
            valid = (chosen >= 0) & (chosen < length)
            # Masked rows read nothing, but their index must lie in the array.
            where = jnp.where(valid, chosen, 0)
            keys = _gather_row_parts(cache_ref, (layer, batch), where, rank, rope, valid)
            busy = i * tiles.keys < count if tiles.apart else None
            return attend(state, queries, keys, keys[0], valid[None, :], scale, busy=busy)

        def own(i, state):
            start = i * tiles.block_keys
            inside = start + jnp.arange(tiles.block_keys)
            valid = inside < block
            keys = _load_row_parts(new_ref, (batch, pl.ds(start, tiles.block_keys)), rank, rope, valid)

            def find(j, found):
                chosen = columns(j * _FIND, _FIND) - slots
                return found + jnp.sum((chosen[:, None] == inside[None, :]).astype(jnp.int32), axis=0)

            found = jax.lax.fori_loop(0, -(-count // _FIND), find, jnp.zeros((tiles.block_keys,), jnp.int32))
            visible = (found > 0) & valid
            keys, broken = finite_rows(keys)
            busy = start < block if tiles.apart else None
            return attend(state, queries, keys, keys[0], visible[None, :], scale, busy=busy, broken=broken)

        state = jax.lax.fori_loop(*span.prefix, prefix, empty_state(tiles.rows, rank))
        values, weights = finish(plain_loop(*span.block, own, state))
        if splits == 1:
            (out_ref,) = out_refs
            where = (batch, row, pl.ds(first, tiles.rows), pl.ds(0, rank))
            store(out_ref.at[*where], values.astype(out_ref.dtype), mask=live[:, None])
        else:
            values_ref, weights_ref = out_refs
            where = pl.ds(row * heads + first, tiles.rows)
            store(values_ref.at[split, batch, where, pl.ds(0, rank)], values, mask=live[:, None])
            store(weights_ref.at[split, batch, where], weights, mask=live)


def mla_selected_triton(
    q, cache, layer, lengths, new, selected, *, rank: int, scale: float, platform: Platform, tiles: Tiles | None = None
) -> jax.Array:
    """`tree_attention.mla_attention_selected` on Triton; `tiles` overrides the choice."""
    _check(q, rank)
    tiles = mla_selected_tiles(q, rank, platform) if tiles is None else tiles
    b, t, heads, _ = q.shape
    count = selected.shape[2]
    block_tiles, query_tiles = cdiv(t, tiles.block_keys), t * cdiv(heads, tiles.rows)
    splits = num_splits(
        tiles, query_tiles=query_tiles * b, key_tiles=cdiv(count, tiles.keys) + block_tiles, platform=platform
    )

    def kernel(*refs: Any) -> None:
        _selected_kernel(*refs, rank=rank, scale=scale, tiles=tiles, splits=splits)

    if splits == 1:
        out_shape: Any = (jax.ShapeDtypeStruct((b, t, heads, rank), q.dtype),)
    else:
        out_shape = tuple(parts_shape(splits, b, t * heads, rank))
    out = triton_call(
        kernel,
        name="mla_attention_selected",
        platform=platform,
        grid=(query_tiles, splits, b),
        out_shape=out_shape,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer.reshape(1), q, cache, new, lengths, selected)
    if splits == 1:
        return out[0]
    counts = jnp.full((b,), count, jnp.int32)
    merged = merge(counts, out, q.dtype, name="mla_merge", tiles=tiles, platform=platform, block_tiles=block_tiles)
    return merged.reshape(b, t, heads, rank)
