"""Programs without weights: shapes, dtypes and placements of all that they take, for `folders.describe_target` pairs.

For what can be told before there is a checkpoint or the devices to hold it: bytes on a device, and whether the
programs of `decoding` compile for a mesh. Nothing here allocates an array.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm, capabilities
from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.folders import Opened, with_arrays
from ddtree_jax.models.glm5 import PackedKernels
from ddtree_jax.models.pair import StaticModel
from ddtree_jax.models.params import packed_kernels
from ddtree_jax.models.sharding import placements
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import RoundState


def packed_experts(config: Glm5Config) -> PackedKernels | None:
    """The layout of NVIDIA's NVFP4 exports: the routed experts of every MoE layer packed, all else plain."""
    return packed_kernels(config, lambda name: ".mlp.experts." in name)


def abstract_plan(
    target: Opened, drafter: Opened | None, algorithm: SpeculativeAlgorithm, budget: int, mode: str = "greedy"
) -> tuple[decoding.Plan, decoding.Weights]:
    """`decoding.make_plan` without weights: the leaves of `Weights` are shapes, dtypes and shardings."""
    if capabilities(algorithm).needs_drafter and drafter is None:
        raise ValueError(f"algorithm: got {algorithm}, which needs a drafter; here is none")
    models = [
        None if o is None else (o.config, StaticModel(*o.abstract, o.mesh), _arrays(o)) for o in (target, drafter)
    ]
    return decoding.plan_of(*models, algorithm, budget, mode)


def _arrays(opened: Opened) -> list[jax.ShapeDtypeStruct]:
    return jax.tree.leaves(with_arrays(opened.abstract[1], opened.leaves))


def placed(tree: Any, mesh: Mesh | None) -> Any:
    """Shapes and dtypes with the placements that `sharding.settle` gives the arrays between two programs."""
    if mesh is None:
        return tree

    def put(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(put, tree, placements(tree, mesh))


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
