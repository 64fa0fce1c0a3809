"""Where the arguments of kernel operations lie over a mesh: `pallas.choice.Specs` of each, by the table in `sharding`.

Weights are split as they were loaded, caches as `sharding.cache_sharding` places them. What has no place of its own is
whole on every device. Without a mesh every function here gives None, and nothing is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ddtree_jax.models.sharding import axis_size, cache_sharding, heads_split, partition
from ddtree_jax.pallas.choice import Specs

AnyMesh = Mesh | AbstractMesh | None
P = PartitionSpec


def product_specs(weight: Any, contracted: str | None, outputs: Sequence[str | None]) -> Specs:
    """Of rows [M, K] times a weight [K, *out]: the operands (rows, weight, layer).

    weight: its own specs; contracted, outputs: the mesh axes of K and of each output axis. A split K leaves each device
    with a part of every sum.
    """
    sums = () if contracted is None else (contracted,)
    return Specs((P(None, contracted), weight, P()), P(None, *outputs), sums)


def moe_specs(gate_up: Any, down: Any, axes: Sequence[str | None]) -> Specs:
    """Of the operation `moe` with `local_expert_ids`. axes: the mesh axes of experts and of their width."""
    expert, width = axes
    sums = tuple(axis for axis in (expert, width) if axis is not None)
    return Specs((P(), P(expert), P(), gate_up, down, P()), P(), sums)


def local_expert_ids(expert_ids: jax.Array, num_experts: int, axis: str | None, mesh: AnyMesh) -> jax.Array:
    """int32[M, k] -> [W M, k] to be split W ways along `axis`: each device's copy counts from its own first expert.

    Ids of other devices' experts fall outside of 0..E / W - 1, where `moe` serves none.
    """
    ways = 1 if axis is None else axis_size(mesh, axis)
    if ways == 1:
        return expert_ids
    first = jnp.arange(ways, dtype=jnp.int32) * (num_experts // ways)
    return (expert_ids[None] - first[:, None, None]).reshape(-1, expert_ids.shape[-1])


def mla_specs(q: jax.Array, mesh: AnyMesh) -> Specs | None:
    """Of `mla_attention` and `mla_attention_selected`: heads over TENSOR, sequences as the cache's."""
    if mesh is None:
        return None
    heads = partition(((None, None, heads_split(q.shape[2]), None),), q.shape, mesh)[2]
    batch = _batch_axis(q.shape[0], mesh)
    return Specs((P(batch, None, heads), P(None, batch), P(), *[P(batch)] * 3), P(batch, None, heads))


def heads_specs(batch: int, heads: str | None, mesh: AnyMesh) -> Specs | None:
    """Of `layer_heads_matmul`. heads: the mesh axis of the weights' heads."""
    if mesh is None:
        return None
    rows = P(_batch_axis(batch, mesh), None, heads)
    return Specs((rows, P(None, None, heads), P()), rows)


def gqa_specs(batch: int, mesh: AnyMesh) -> Specs | None:
    """Of `gqa_attention`: all heads on every device, as their cache is; a slice of it for each call would be a copy."""
    if mesh is None:
        return None
    axis = _batch_axis(batch, mesh)
    return Specs((P(axis), P(None, axis), P(None, axis), P(), *[P(axis)] * 4), P(axis))


def indexer_specs(batch: int, mesh: AnyMesh) -> Specs | None:
    """Of `indexer_scores`."""
    if mesh is None:
        return None
    axis = _batch_axis(batch, mesh)
    return Specs((P(axis), P(axis), P(None, axis), P(), *[P(axis)] * 3), P(axis))


def selection_specs(batch: int, mesh: AnyMesh) -> Specs | None:
    """Of `select_top_k_indices`."""
    if mesh is None:
        return None
    axis = _batch_axis(batch, mesh)
    return Specs((P(axis), P(axis)), P(axis))


def commit_specs(batch: int, mesh: AnyMesh) -> Specs | None:
    """Of `commit_rows`."""
    if mesh is None:
        return None
    axis = _batch_axis(batch, mesh)
    return Specs((P(None, axis), P(None, axis), P(axis), P(axis)), P(None, axis))


def _batch_axis(batch: int, mesh: Mesh | AbstractMesh) -> str | None:
    return (*cache_sharding(batch, mesh).spec, None, None)[1]
