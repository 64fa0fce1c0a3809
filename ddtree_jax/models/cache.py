"""Caches as explicit pytrees: what the target and the drafter remember of committed tokens.

A forward pass reads a cache and returns new rows; it never writes. Only `write_rows` changes a cache, after the tree
walk has decided which rows are kept, so a rejected sibling can never be seen by a later round.
"""

from __future__ import annotations

from typing import Any

import chex
import jax


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Cache:
    """Rows of committed tokens, `lengths[b]` of them valid in sequence b; whatever lies beyond is never attended to.

    `rows` is a pytree; every leaf is [R, B, S, width]: R stacked layers of one kind, S the capacity in tokens. The
    row of absolute position p lies at slot p.
    """

    rows: Any
    lengths: jax.Array  # int32[B]

    @property
    def capacity(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]


def write_rows(cache: Cache, new_rows: Any, counts: jax.Array) -> Cache:
    """Appends the first `counts[b]` of the new rows of each sequence and advances its length.

    Args:
      cache: leaves [R, B, S, width].
      new_rows: the same structure, leaves [R, B, T, width], in the order of their positions.
      counts: int32[B], 0 <= counts[b] <= T. Rows beyond it may be written too (slots beyond the new length are dead
        until a later write), never a slot below the old length.

    The capacity must leave room for T rows beyond the longest sequence: `dynamic_update_slice` clamps its start, and
    a clamped start would overwrite committed rows.
    """
    chex.assert_rank(counts, 1)
    lengths = cache.lengths

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        chex.assert_equal_shape_prefix((old, new), 2)
        if new.shape[1] == 1:
            return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, 0, lengths[0], 0))
        put = jax.vmap(lambda o, n, at: jax.lax.dynamic_update_slice(o, n, (0, at, 0)), in_axes=(1, 1, 0), out_axes=1)
        return put(old, new.astype(old.dtype), lengths)

    return Cache(rows=jax.tree.map(write, cache.rows, new_rows), lengths=lengths + counts)
