"""Mixture of experts: sigmoid router with group limit and selection bias, routed experts, one shared expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.kernel_specs import local_expert_ids, moe_specs
from ddtree_jax.models.layers import einsum, truncated_init
from ddtree_jax.models.linear import (
    GridKernel,
    LayerKernel,
    SwiGLU,
    below,
    kernel_arrays,
    make_kernel,
    multiply,
    multiply_arrays,
)
from ddtree_jax.models.sharding import partition, target_dims
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.moe import MAX_ROWS
from ddtree_jax.pallas.moe_plain import PlainExperts
from ddtree_jax.pallas.nvfp4_grid import split_float32

DENSE_EXPERTS_LIMIT = 32  # up to here all experts as one wide SwiGLU beat every routed form on CPU, as measured


class MoE(nnx.Module):
    """Routed experts and the ungated shared expert (formulas: transformers 5.24 `glm_moe_dsa`).

    Expert kernels come in one of two layouts. Up to DENSE_EXPERTS_LIMIT experts: gate_up [D, 2, E, I], every expert
    computed as one wide SwiGLU whose activations are scaled by the mostly zero routing weights. Above: gate_up
    [E, D, 2, I]. The gate comes before the up half; down is [E, I, D] in both.

    Plain kernels above the limit run as one ragged product over rows sorted by expert. Packed ones, and kernels split
    over a mesh, run as a loop over the experts that some row has chosen, so that only one at a time is unpacked.
    On GPU kernels (`kernels.with_kernels`) the operation `moe` runs instead: packed ones laid out for it, by expert
    whatever their number, and plain ones above the limit as they are; the router of a bfloat16 model then comes as its
    `bfloat16_terms`.
    """

    def __init__(
        self,
        config: Glm5Config,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        out_std: float,
        packed: Sequence[str] = (),
        mesh: Mesh | None = None,
    ):
        c = config
        d, e, i = c.hidden_size, c.n_routed_experts, c.moe_intermediate_size
        self.router = truncated_init(rngs, (d, e), jnp.float32, d**-0.5)
        self.router_bias = nnx.Param(jnp.zeros((e,), jnp.float32))
        self.dense = e <= DENSE_EXPERTS_LIMIT
        shape, axis, separate = ((d, 2, e, i), 0, (1, 2)) if self.dense else ((e, d, 2, i), 1, (0, 2))
        self.gate_up = make_kernel(
            shape, dtype=dtype, rngs=rngs, std=d**-0.5, packed="gate_up" in packed, axis=axis, separate=separate
        )
        self.down = make_kernel(
            (e, i, d), dtype=dtype, rngs=rngs, std=out_std, packed="down" in packed, axis=1, separate=(0,)
        )
        own = below(packed, "shared")
        self.shared = SwiGLU(d, i * c.n_shared_experts, dtype=dtype, rngs=rngs, out_std=out_std, packed=own)
        self.config, self.mesh = c, mesh
        self.kernels = KernelChoice()
        self.any_packed = "gate_up" in packed or "down" in packed

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x: [M, D]. Returns (bool[M, E] chosen, float32[M, E] scores without the bias)."""
        c = self.config
        scores = jax.nn.sigmoid(self._logits(x))
        choice = scores + self.router_bias[...][None]
        if c.n_group > 1:
            groups = choice.reshape(-1, c.n_group, c.n_routed_experts // c.n_group)
            group_score = jnp.sum(jax.lax.top_k(groups, 2)[0], axis=-1)
            kept = _best(group_score, c.topk_group)
            choice = jnp.where(kept[:, :, None], groups, -jnp.inf).reshape(choice.shape)
        return _best(choice, c.num_experts_per_tok), scores

    def _logits(self, x: jax.Array) -> jax.Array:
        """float32[M, E]."""
        if isinstance(self.router, LayerKernel):  # bfloat16 rows, and `bfloat16_terms` side by side
            return jnp.sum(self.router.multiply(x, jnp.float32), axis=1)
        return einsum("md,de->me", x.astype(jnp.float32), self.router[...])

    @property
    def indexes_stack(self) -> bool:
        """Whether expert kernels may come stacked, [R, E, ...], with `repeat` saying which of the R is this layer's.

        A loop over layers that handed each one its slice would copy every expert to use a few.
        """
        if isinstance(self.gate_up, GridKernel):
            return False  # says so by itself, and has its own index
        return not self.dense and (self.any_packed or self.mesh is not None or self.kernels.any)

    @property
    def _plain_on_kernels(self) -> bool:
        return not self.dense and not self.any_packed and self.kernels.any

    def __call__(self, x: jax.Array, repeat: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The routed and the shared experts.

        Args:
          x: [B, T, D].
          repeat: int32[], where expert kernels are stacked (`indexes_stack`); None: they are this layer's alone.

        Returns:
          (same shape as x, float32[E] share of tokens that chose each expert).
        """
        flat = x.reshape(-1, x.shape[-1])
        if isinstance(self.gate_up, GridKernel) or (self._plain_on_kernels and flat.shape[0] <= MAX_ROWS):
            routed, load = self._grouped(flat, repeat)
            return routed.reshape(x.shape) + self.shared(x), load
        chosen, scores = self.route(flat)
        weights = self._normalised(jnp.where(chosen, scores, 0.0))
        if self.dense:
            routed = self._dense(flat, weights)
        elif self._plain_on_kernels and self.mesh is None:
            routed = self._ragged(flat, chosen, weights, repeat)
        elif self.indexes_stack:
            routed = self._hit_experts(flat, chosen, weights, repeat)
        else:
            routed = self._ragged(flat, chosen, weights)
        load = jnp.mean(chosen.astype(jnp.float32), axis=0)
        return routed.reshape(x.shape) + self.shared(x), load

    def _normalised(self, scores: jax.Array) -> jax.Array:
        """float32[M, E or k] routing weights of scores that are zero where an expert is not chosen."""
        if self.config.norm_topk_prob:
            scores = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        return scores * self.config.routed_scaling_factor

    def _grouped(self, x: jax.Array, repeat: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        chosen, scores = self.route(x)
        k = self.config.num_experts_per_tok
        # The places of the chosen ones, in order: by counting, which is one small fusion where a sort is many.
        place = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32) - 1
        one_hot = chosen[:, None, :] & (place[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None])
        experts = jnp.arange(chosen.shape[-1], dtype=jnp.int32)
        expert_ids = jnp.sum(jnp.where(one_hot, experts[None, None, :], 0), axis=-1, dtype=jnp.int32)
        weights = self._normalised(jnp.sum(jnp.where(one_hot, scores[:, None, :], 0.0), axis=-1))
        if isinstance(self.gate_up, GridKernel):
            kernels, layer = (self.gate_up.weight, self.down.weight), self.gate_up.index()
            places, axes = (self.gate_up.specs, self.down.specs), self.down.axes[:2]
        else:
            kernels, layer = (PlainExperts(self.gate_up[...]), PlainExperts(self.down[...][..., None, :])), repeat
            gate_up, down = self._expert_specs((self.gate_up[...],), (self.down[...],))
            *lead, expert, width, _ = down[0]
            places = PlainExperts(gate_up[0]), PlainExperts(PartitionSpec(*lead, expert, width))
            axes = (expert, width)
        expert_ids = local_expert_ids(expert_ids, chosen.shape[-1], axes[0], self.mesh)
        routed = self.kernels.run("moe", x, expert_ids, weights, *kernels, layer, specs=moe_specs(*places, axes))
        return routed.astype(x.dtype), jnp.mean(chosen.astype(jnp.float32), axis=0)

    def _dense(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        gate_up = multiply("md,dcei->mcei", x, self.gate_up)
        h = jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1] * weights.astype(x.dtype)[:, :, None]
        return multiply("mei,eid->md", h, self.down)

    def _ragged(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, repeat: jax.Array | None = None
    ) -> jax.Array:
        k = self.config.num_experts_per_tok
        top, experts = jax.lax.top_k(jnp.where(chosen, weights, -1.0), k)
        flat = experts.reshape(-1)
        order = jnp.argsort(flat)
        sizes = jnp.bincount(flat, length=weights.shape[-1]).astype(jnp.int32)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        gate_up, down = self.gate_up[...], self.down[...]
        if repeat is not None:
            gate_up, down = (jax.lax.dynamic_index_in_dim(a, repeat, keepdims=False) for a in (gate_up, down))
        gate_up = gate_up.reshape(*gate_up.shape[:2], -1)
        gate, up = jnp.split(jax.lax.ragged_dot(x[order // k], gate_up, sizes, precision=precision), 2, axis=-1)
        y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes, precision=precision)
        back = jnp.argsort(order)
        y = y[back].reshape(x.shape[0], k, -1)
        return jnp.sum(y * top.astype(y.dtype)[:, :, None], axis=1)

    def _hit_experts(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, repeat: jax.Array | None) -> jax.Array:
        gate_up, down = kernel_arrays(self.gate_up), kernel_arrays(self.down)
        if repeat is None:
            repeat = jnp.int32(0)
            gate_up, down = (tuple(array[None] for array in arrays) for arrays in (gate_up, down))
        if self.mesh is None:
            return _loop_over_hit_experts(x, chosen, weights, repeat, gate_up, down).astype(x.dtype)
        gate_up_specs, down_specs = self._expert_specs(gate_up, down)
        split = [axis for axis in (down_specs[0][1], down_specs[0][2]) if axis is not None]
        by_expert = PartitionSpec(None, down_specs[0][1])

        @functools.partial(
            jax.shard_map,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), by_expert, by_expert, PartitionSpec(), gate_up_specs, down_specs),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        def run(*operands: Any) -> jax.Array:
            part = _loop_over_hit_experts(*operands)
            return jax.lax.psum(part, split) if split else part

        return run(x, chosen, weights, repeat, gate_up, down).astype(x.dtype)

    def _expert_specs(
        self, gate_up: tuple[jax.Array, ...], down: tuple[jax.Array, ...]
    ) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
        """The places of `kernel_arrays` [(R,) E, ...], an entry an axis."""
        table = target_dims(self.config)

        def specs(arrays: tuple[jax.Array, ...], name: str) -> tuple[PartitionSpec, ...]:
            ways = table[f"mlp.experts.{name}"]
            rank = len(ways[0])
            found = ((a.ndim - rank, partition(ways, a.shape[a.ndim - rank :], self.mesh)) for a in arrays)
            return tuple(PartitionSpec(*(None,) * lead, *(tuple(own) or (None,) * rank)) for lead, own in found)

        return specs(gate_up, "gate_up"), specs(down, "down")


def bfloat16_terms(weights: jax.Array) -> jax.Array:
    """float32[R, D, E] -> bfloat16[R, D, 3, E], whose sum over the third axis they are (`split_float32`).

    With bfloat16 rows the product of each term is exact, so tensor cores do what float32 units take four times as long
    for.
    """
    return jnp.stack(split_float32(weights), axis=2)


def _loop_over_hit_experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    repeat: jax.Array,
    gate_up: tuple[jax.Array, ...],
    down: tuple[jax.Array, ...],
) -> jax.Array:
    """float32[M, D]: sum over experts of weight * expert(x), one expert at a time, only those that a row has chosen.

    x: [M, D]; chosen: bool[M, E]; weights: float32[M, E]; repeat: int32[]; gate_up, down: `kernel_arrays` of a stack of
    layers, [R, E, ...], of which layer `repeat` is used. Every row goes through every hit expert: with the rows of a
    tree that costs nothing beside reading the weights.
    """
    hit = jnp.any(chosen, axis=0)
    order = jnp.argsort(~hit)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        e = order[i]
        own_gate_up, own_down = (tuple(_of_expert(a, repeat, e) for a in arrays) for arrays in (gate_up, down))
        gu = multiply_arrays("md,dci->mci", x, own_gate_up, axis=0)
        h = jax.nn.silu(gu[:, 0]) * gu[:, 1]
        y = multiply_arrays("mi,id->md", h, own_down, axis=0, out_dtype=jnp.float32)
        return total + y * jax.lax.dynamic_index_in_dim(weights, e, axis=1)

    return jax.lax.fori_loop(0, jnp.sum(hit), body, jnp.zeros(x.shape, jnp.float32))


def _of_expert(stacked: jax.Array, repeat: jax.Array, e: jax.Array) -> jax.Array:
    """[R, E, ...] -> [...], in one slice: an index at a time would copy all experts of the layer first."""
    zeros = (jnp.int32(0),) * (stacked.ndim - 2)
    one = jax.lax.dynamic_slice(stacked, (repeat, e.astype(jnp.int32), *zeros), (1, 1, *stacked.shape[2:]))
    return one.reshape(stacked.shape[2:])


def _best(values: jax.Array, k: int) -> jax.Array:
    """bool[M, E]: the k largest of each row, equal values by lower index; by counting ranks, no sort."""
    later = jnp.arange(values.shape[-1])
    a, b = values[:, :, None], values[:, None, :]
    beats = (b > a) | ((b == a) & (later[None, None, :] < later[None, :, None]))
    return jnp.sum(beats, axis=-1) < k
