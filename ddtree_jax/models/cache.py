"""Caches as explicit pytrees: what the target and the drafter remember of committed tokens.

A forward pass reads a cache and returns new rows and states; it never writes. Only `write_rows` and `write_states`
change a cache, after the tree walk has decided which nodes are kept, so a rejected sibling can never be seen by a later
round.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp


@chex.dataclass(frozen=True, mappable_dataclass=False)
class Cache:
    """Rows of committed tokens, `lengths[b]` of them valid in sequence b; whatever lies beyond is never attended to.

    `rows` is a pytree; every leaf is [R, B, S, width]: R stacked layers of one kind, S the capacity in tokens. The
    row of absolute position p lies at slot p.

    `states` is None, or of a target with recurrent layers a pytree with leaves [R, B, ...]: what those layers keep
    after the last committed token. A state has no slots: each commit replaces it.
    """

    rows: Any
    lengths: jax.Array  # int32[B]
    states: Any = None

    @property
    def capacity(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StackedRows:
    """Rows of one layer, as a whole leaf of `Cache.rows` [R, B, S, width] and the layer's place int32[] in it.

    A slice handed to a kernel would be a copy of the layer's cache.
    """

    rows: jax.Array
    layer: jax.Array


def take_slots(cache: Cache, slots: jax.Array | None, extent: int) -> Cache:
    """A copy of the first `extent` positions of some sequences: a cache of P sequences, in the order of `slots`.

    slots: int32[P], distinct places in the batch of `cache`; None: all, in order. extent: static, at most the
    capacity; reading it must be enough, so `lengths[slots] <= extent`.
    """

    def take(leaf: jax.Array) -> jax.Array:
        leaf = leaf[:, :, :extent]
        return leaf if slots is None else jnp.take(leaf, slots, axis=1)

    picked = (lambda x, axis: x) if slots is None else (lambda x, axis: jnp.take(x, slots, axis=axis))
    return Cache(
        rows=jax.tree.map(take, cache.rows),
        lengths=picked(cache.lengths, 0),
        states=jax.tree.map(lambda x: picked(x, 1), cache.states),
    )


def write_rows(cache: Cache, new_rows: Any, counts: jax.Array, slots: jax.Array | None = None) -> Cache:
    """Appends the first `counts[b]` of the new rows of each sequence and advances its length.

    Args:
      cache: leaves [R, B, S, width].
      new_rows: the same structure, leaves [R, B, T, width], in the order of their positions.
      counts: int32[B], 0 <= counts[b] <= T. Rows beyond it may be written too (slots beyond the new length are dead
        until a later write), never a slot below the old length.
      slots: int32[P], distinct places in the cache's batch: new_rows and counts are of these P sequences, and the
        others stay as they are. None: of all, in order.

    The capacity must leave room for T rows beyond the longest sequence: `dynamic_update_slice` clamps its start, and
    a clamped start would overwrite committed rows.
    """
    chex.assert_rank(counts, 1)
    if slots is not None:
        return _write_some(cache, new_rows, counts, slots)
    lengths = cache.lengths

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        chex.assert_equal_shape_prefix((old, new), 2)
        if new.shape[1] == 1:
            return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, 0, lengths[0], 0))
        put = jax.vmap(lambda o, n, at: jax.lax.dynamic_update_slice(o, n, (0, at, 0)), in_axes=(1, 1, 0), out_axes=1)
        return put(old, new.astype(old.dtype), lengths)

    rows = jax.tree.map(write, cache.rows, new_rows)
    return dataclasses.replace(cache, rows=rows, lengths=lengths + counts)


def _write_some(cache: Cache, new_rows: Any, counts: jax.Array, slots: jax.Array) -> Cache:
    chex.assert_equal_shape((counts, slots))
    at = jnp.stack([slots, jnp.take(cache.lengths, slots)], axis=1)
    # One window [R, T, width] a sequence, written at (slot, length).
    dims = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(1,), scatter_dims_to_operand_dims=(1, 2)
    )

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        windows = jnp.moveaxis(new.astype(old.dtype), 1, 0)
        return jax.lax.scatter(
            old, at, windows, dims, unique_indices=True, mode=jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
        )

    rows = jax.tree.map(write, cache.rows, new_rows)
    return dataclasses.replace(cache, rows=rows, lengths=cache.lengths.at[slots].add(counts))


def write_states(
    cache: Cache,
    new_states: Any,
    counts: jax.Array,
    node_ids: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> Cache:
    """Replaces the states of each sequence by those after its last committed node.

    Args:
      cache: `states` with leaves [R, B, ...]. A cache without states is returned as it is.
      new_states: the same structure, leaves [R, B, T, ...]: the states after every node of the block.
      counts: int32[B], nodes that are committed, 0 <= counts[b] <= T; 0 leaves the states of a sequence as they are.
      node_ids: int32[B, D + 1], the nodes in the order in which they are committed: the last is
        `node_ids[b, counts[b] - 1]`. None: the block is a chunk, committed from its row 0 on.
      slots: as for `write_rows`.

    The number of accepted nodes says nothing about the last one: of a path [0, 2, 5] that is node 5, not node 2.

    Raises ValueError where one of cache and block has other states than the other, or none.
    """
    have, given = jax.tree.structure(cache.states), jax.tree.structure(new_states)
    if have != given:
        raise ValueError(f"new_states: got {given}, allowed is what the cache has, {have}")
    if have.num_leaves == 0:
        return cache
    chex.assert_rank(counts, 1)
    last = jnp.maximum(counts - 1, 0)
    if node_ids is not None:
        last = jnp.take_along_axis(node_ids, last[:, None], axis=1)[:, 0]
    pick = jax.vmap(lambda states, at: jax.lax.dynamic_index_in_dim(states, at, 1, keepdims=False), (1, 0), 1)

    def replace(old: jax.Array, new: jax.Array) -> jax.Array:
        chex.assert_equal_shape_prefix((old, new), 1)
        chex.assert_axis_dimension(new, 1, counts.shape[0])
        committed = counts.reshape(1, -1, *[1] * (old.ndim - 2)) > 0
        own = old if slots is None else jnp.take(old, slots, axis=1)
        states = jnp.where(committed, pick(new, last).astype(old.dtype), own)
        return states if slots is None else old.at[:, slots].set(states)

    return dataclasses.replace(cache, states=jax.tree.map(replace, cache.states, new_states))
