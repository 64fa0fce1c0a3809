"""Which rows go through which expert, as tiles of a few rows of one expert: index arithmetic in XLA, no sort."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertTiles:
    """Pairs (row, choice) grouped by expert, in tiles of `R` slots of one expert each.

    Attributes:
      experts: int32[T], the expert of each tile, or E for a tile that is not used; used ones come first, by expert.
      rows: int32[T * R], the row of each slot, or -1 for an empty one.
      slots: int32[M, k], the slot of each pair, or -1 for a pair without an expert.
    """

    experts: jax.Array
    rows: jax.Array
    slots: jax.Array


def max_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """The most tiles that `pairs` pairs can need, however they are routed."""
    return min(pairs, num_experts + (pairs - min(pairs, num_experts)) // rows)


def make_tiles(expert_ids: jax.Array, num_experts: int, rows: int) -> ExpertTiles:
    """Groups pairs by expert.

    Args:
      expert_ids: int32[M, k]; ids outside 0..E-1 are pairs that no expert serves (padding rows, experts of other
        devices).
      num_experts: static, E.
      rows: static, slots of a tile.
    """
    m, k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    pairs = m * k
    served = (flat >= 0) & (flat < num_experts)
    index = jnp.arange(pairs, dtype=jnp.int32)
    same = (flat[:, None] == flat[None, :]) & (index[None, :] < index[:, None])
    place = jnp.sum(same, axis=1, dtype=jnp.int32)  # among the pairs of the same expert
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(flat[:, None] == experts[None, :], axis=0, dtype=jnp.int32)
    tiles = (counts + rows - 1) // rows
    earlier = experts[None, :] < experts[:, None]
    first = jnp.sum(jnp.where(earlier, tiles[None, :], 0), axis=1, dtype=jnp.int32)
    first_of_pair = jnp.take(first, jnp.clip(flat, 0, num_experts - 1))
    slots = jnp.where(served, first_of_pair * rows + place, -1)
    count = max_tiles(pairs, num_experts, rows)
    tile = jnp.arange(count, dtype=jnp.int32)
    of_tile = jnp.sum(tile[:, None] >= (first + tiles)[None, :], axis=1, dtype=jnp.int32)
    at = jnp.where(served, slots, count * rows)
    row_of_slot = jnp.full((count * rows,), -1, jnp.int32).at[at].set(index // k, mode="drop", unique_indices=True)
    return ExpertTiles(experts=of_tile, rows=row_of_slot, slots=slots.reshape(m, k))


def combine(outputs: jax.Array, slots: jax.Array, weights: jax.Array) -> jax.Array:
    """float32[M, D]: sum over a row's pairs of weight * output. outputs: [T * R, D]; weights: float32[M, k]."""
    picked = jnp.take(outputs, jnp.maximum(slots, 0), axis=0).astype(jnp.float32)  # [M, k, D]
    served = slots >= 0
    # A slot that no tile wrote holds anything, NaN too: chosen away, not multiplied away.
    return jnp.sum(jnp.where(served[:, :, None], picked * weights[:, :, None], 0.0), axis=1)
