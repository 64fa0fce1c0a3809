"""Pairs without weights: shapes, dtypes and placements of everything a program takes, from two configs.

For what can be told before there is a checkpoint or the devices to hold it: bytes on a device, and whether the
programs of `decoding` compile for a mesh. Nothing here allocates an array.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm, capabilities
from ddtree_jax.models.cache import Cache
from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.folders import Opened, drafter_sharding, target_sharding, with_arrays
from ddtree_jax.models.glm5 import Glm5, PackedKernels
from ddtree_jax.models.pair import Drafter, StaticModel, Target, check_pair
from ddtree_jax.models.params import drafter_tensors, packed_kernels, target_tensors
from ddtree_jax.models.sharding import cache_sharding, check_mesh
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import RoundState


@dataclasses.dataclass(frozen=True)
class Described(Opened):
    """A model that is only described: all that `Opened` tells from a config, and no folder to read from."""

    def read(self, progress: Any = None) -> Any:
        raise ValueError(f"{self.folder}: described by its config alone, there are no weights to read; open a folder")


def packed_experts(config: Glm5Config) -> PackedKernels | None:
    """The layout of NVIDIA's NVFP4 exports: the routed experts of every MoE layer packed, all else plain."""
    return packed_kernels(config, lambda name: ".mlp.experts." in name)


def describe_target(
    config: Glm5Config,
    *,
    dtype: Any = jnp.bfloat16,
    mesh: Mesh | None = None,
    packed: PackedKernels | None = None,
    name: str = "target",
) -> Described:
    """A target by its config; `dtype` is that of whatever is not packed or float32 by nature."""
    mesh = check_mesh(mesh)
    return Described(
        config=config,
        folder=Path(name),
        kind=Target,
        stored={},
        specs=functools.partial(target_tensors, config, packed=packed),
        build=functools.partial(Glm5, config, dtype=jnp.dtype(dtype), packed=packed, mesh=mesh),
        mesh=mesh,
        shard=None if mesh is None else target_sharding(config, mesh),
        dtype=jnp.dtype(dtype),
    )


def describe_drafter(config: DFlashConfig, target: Described, *, name: str = "drafter") -> Described:
    """A drafter by its config, in the dtype and on the mesh of `target`; `CheckpointError` if the two do not fit."""
    check_pair(config, target.config, name)
    width, dtype, mesh = target.config.hidden_size, target.leaves["embed",].dtype, target.mesh
    return Described(
        config=config,
        folder=Path(name),
        kind=Drafter,
        stored={},
        specs=functools.partial(drafter_tensors, config, width),
        build=functools.partial(DFlash, config, dtype=dtype, target_hidden_size=width),
        mesh=mesh,
        shard=None if mesh is None else drafter_sharding(config, mesh),
        dtype=jnp.dtype(dtype),
    )


def abstract_plan(
    target: Opened, drafter: Opened | None, algorithm: SpeculativeAlgorithm, budget: int, mode: str = "greedy"
) -> tuple[decoding.Plan, decoding.Weights]:
    """`decoding.make_plan` without weights: the leaves of `Weights` are shapes, dtypes and shardings."""
    row = capabilities(algorithm)
    if row.needs_drafter and drafter is None:
        raise ValueError(f"algorithm: got {algorithm}, which needs a drafter; here is none")
    drafter = drafter if row.needs_drafter else None
    plan = decoding.Plan(
        algorithm=algorithm,
        budget=budget if row.branching else 0,
        draft_depth=0 if drafter is None else drafter.config.draft_depth,
        taps=() if drafter is None else drafter.config.target_layer_ids,
        mode=mode,
        target=StaticModel(*target.abstract, target.mesh),
        drafter=None if drafter is None else StaticModel(*drafter.abstract, drafter.mesh),
    )
    return plan, decoding.Weights(_arrays(target), None if drafter is None else _arrays(drafter))


def _arrays(opened: Opened) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(with_arrays(opened.abstract[1], opened.leaves))


def placed(tree: Any, mesh: Mesh | None) -> Any:
    """Shapes and dtypes with the placements that `sharding.settle` gives the arrays between two programs."""
    if mesh is None:
        return tree

    def put(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    whole = NamedSharding(mesh, PartitionSpec())

    def place(node: Any) -> Any:
        if not isinstance(node, Cache):
            return put(node, whole)
        own = cache_sharding(node.lengths.shape[0], mesh)
        return Cache(rows=jax.tree.map(lambda leaf: put(leaf, own), node.rows), lengths=put(node.lengths, whole))

    return jax.tree.map(place, tree, is_leaf=lambda node: isinstance(node, Cache))


def abstract_prefill(
    plan: decoding.Plan, weights: decoding.Weights, batch: int, capacity: int
) -> tuple[decoding.PrefillState, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What `prefill_chunk` takes besides plan and weights: state, token ids, counts. capacity: cache slots."""
    start = functools.partial(decoding.start_prefill, plan, batch=batch, capacity=capacity)
    state = placed(jax.eval_shape(start, weights), plan.target.mesh)
    # Token ids and counts come from the host, uncommitted.
    chunk = min(decoding.CHUNK_TOKENS, decoding.chunk_tokens(capacity))
    return state, jax.ShapeDtypeStruct((batch, chunk), jnp.int32), jax.ShapeDtypeStruct((batch,), jnp.int32)


def abstract_round(
    plan: decoding.Plan, state: decoding.PrefillState
) -> tuple[RoundState, SamplingParams, jax.ShapeDtypeStruct]:
    """What `round_step` takes besides plan and weights: state, sampling parameters, three stop tokens."""
    batch = state.hidden.shape[0]

    def whole(dtype: Any) -> jax.ShapeDtypeStruct:
        return placed(jax.ShapeDtypeStruct((batch,), dtype), plan.target.mesh)

    counts = {name: whole(jnp.int32) for name in ("root_token_ids", "lengths", "emitted", "remaining")}
    sampling = jax.eval_shape(lambda: SamplingParams.create(batch))
    return (
        RoundState(cache=state.cache, draft_cache=state.draft_cache, finished=whole(jnp.bool_), **counts),
        sampling,
        jax.ShapeDtypeStruct((3,), jnp.int32),
    )
