"""The accepted nodes' rows, out of what the verification pass computed, behind the committed rows of the caches.

Joins `tree.commit.gather_rows` and `models.cache.write_rows`: no gathered copy of the rows, and one launch for all
layers of all leaves, in place.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, load, require_kernels, store, triton_call


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Of the kernel.

    Attributes:
      piece: columns a program copies at a time, a power of two.
      nodes: path nodes a program copies at a time, a power of two.
    """

    piece: int = 512
    nodes: int = 16
    num_warps: int = 4


def commit_rows_reference(
    caches: Any, new_rows: Any, node_ids: jax.Array, lengths: jax.Array, *, platform: Platform | None = None
) -> Any:
    """Writes row `node_ids[b, j]` of each sequence's new rows to slot `lengths[b] + j` of its cache, for every j.

    Args:
      caches: pytree, leaves [R, B, S, W]: R stacked layers, S slots.
      new_rows: the same structure, leaves [R, B, N, W] in the order of the tree's slots, any dtype; written in the
        cache's.
      node_ids: int32[B, D + 1], the accepted path from the root on; NO_NODE (-1) beyond it.
      lengths: int32[B], committed tokens: 0 <= lengths[b] <= S - (D + 1).

    Returns:
      The caches, written in place where their buffers are donated. What lies in slots `lengths[b] + j` with node_ids
      NO_NODE is undefined and finite where the caches and new rows are; no other slot changes.

    Raises:
      ValueError: structures or shapes that do not belong together, or S < D + 1.
    """
    del platform
    _check(caches, new_rows, node_ids, lengths)
    take = jax.vmap(lambda rows, ids: jnp.take(rows, ids, axis=1, mode="clip"), in_axes=(1, 0))
    at = jnp.stack([jnp.arange(node_ids.shape[0], dtype=jnp.int32), lengths], axis=1)
    # A scatter of one window [R, D + 1, W] a sequence: XLA does a batched dynamic_update_slice as a copy on a CPU.
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1, 2)
    )

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        picked = take(new, jnp.maximum(node_ids, 0)).astype(old.dtype)
        if picked.shape[0] == 1:
            return jax.lax.dynamic_update_slice(old, jnp.moveaxis(picked, 0, 1), (0, 0, lengths[0], 0))
        mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return jax.lax.scatter(old, at, picked, dims, unique_indices=True, mode=mode)

    return jax.tree.map(write, caches, new_rows)


def commit_rows_triton(
    caches: Any,
    new_rows: Any,
    node_ids: jax.Array,
    lengths: jax.Array,
    *,
    platform: Platform,
    tiles: Tiles | None = None,
) -> Any:
    """`commit_rows_reference` in one launch. Slots of NO_NODE, and slots beyond the capacity, stay as they are."""
    _check(caches, new_rows, node_ids, lengths)
    require_kernels(platform)
    olds, structure = jax.tree.flatten(caches)
    news = jax.tree.leaves(new_rows)
    tiles = Tiles() if tiles is None else tiles
    first, starts = 0, []
    for old in olds:
        starts.append(first)
        first += old.shape[0]
    call = triton_call(
        functools.partial(_commit_kernel, starts=tuple(starts), leaves=len(olds), tiles=tiles),
        name="commit_rows",
        platform=platform,
        grid=(first, node_ids.shape[0], pl.cdiv(node_ids.shape[1], tiles.nodes)),
        out_shape=tuple(jax.ShapeDtypeStruct(old.shape, old.dtype) for old in olds),
        num_warps=tiles.num_warps,
        num_stages=1,
        aliases={2 + len(news) + i: i for i in range(len(olds))},
    )
    return jax.tree.unflatten(structure, call(node_ids, lengths, *news, *olds))


def _commit_kernel(node_ids_ref, lengths_ref, *refs, starts: tuple[int, ...], leaves: int, tiles: Tiles):
    news, outs = refs[:leaves], refs[2 * leaves :]
    layer, b, group = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    path = node_ids_ref.shape[1]
    place = group * tiles.nodes + jnp.arange(tiles.nodes, dtype=jnp.int32)
    ids = load(node_ids_ref.at[b, place], mask=place < path, other=-1)
    slots = lengths_ref[b] + place
    for start, new, out in zip(starts, news, outs, strict=True):

        @pl.when((layer >= start) & (layer < start + out.shape[0]))
        def _(start=start, new=new, out=out):
            kept = (ids >= 0) & (slots < out.shape[2])
            rows = jnp.clip(ids, 0, new.shape[2] - 1)
            targets = jnp.where(kept, slots, out.shape[2])
            for at, size, full in _pieces(out.shape[3], tiles.piece):
                columns = at + jnp.arange(size, dtype=jnp.int32)
                mask = kept[:, None] if full else kept[:, None] & (columns < out.shape[3])[None, :]
                read = new.at[layer - start, b, rows[:, None], columns[None, :]]
                values = load(read, mask=mask, other=0).astype(out.dtype)
                store(out.at[layer - start, b, targets[:, None], columns[None, :]], values, mask=mask)


def _pieces(width: int, largest: int) -> list[tuple[int, int, bool]]:
    """(first column, power of two of columns, whether all of them exist) that cover a row."""
    pieces, at = [], 0
    while at < width:
        left = width - at
        size = min(largest, 1 << (left.bit_length() - 1))
        if size < 32:
            size = pl.next_power_of_2(left)
        pieces.append((at, size, at + size <= width))
        at += size
    return pieces


def _check(caches: Any, new_rows: Any, node_ids: jax.Array, lengths: jax.Array) -> None:
    if jax.tree.structure(caches) != jax.tree.structure(new_rows):
        raise ValueError(
            f"new_rows: got {jax.tree.structure(new_rows)}; it must be as caches, {jax.tree.structure(caches)}"
        )
    if node_ids.ndim != 2 or node_ids.dtype != jnp.int32:
        raise ValueError(f"node_ids: got {node_ids.dtype}{list(node_ids.shape)}; it must be int32[B, D + 1]")
    batch, path = node_ids.shape
    if lengths.shape != (batch,) or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths: got {lengths.dtype}{list(lengths.shape)}; it must be int32[{batch}]")
    leaves = jax.tree.leaves(caches)
    if not leaves:
        raise ValueError("caches: got no leaf; there is nothing to write")
    for old, new in zip(leaves, jax.tree.leaves(new_rows), strict=True):
        if old.ndim != 4 or new.ndim != 4 or (*old.shape[:2], old.shape[3]) != (*new.shape[:2], new.shape[3]):
            raise ValueError(
                f"new_rows: got a leaf {new.shape} for a cache {old.shape}; [R, B, N, W] belong to [R, B, S, W]"
            )
        if old.shape[1] != batch:
            raise ValueError(f"node_ids: got {batch} sequences; a cache has {old.shape[1]}")
        if old.shape[2] < path:
            raise ValueError(f"caches: got {old.shape[2]} slots; a path of {path} nodes needs as many")
