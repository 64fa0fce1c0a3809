"""DFlash block-diffusion drafter (arXiv 2602.06036): one pass proposes L next-token distributions.

A block is [root, mask, ..., mask]. Its rows attend to the committed context, whose keys and values come from target
features alone, and to each other without a causal order. The drafter borrows the target's embedding table and head.

A DFlash2 drafter adds the two parts of `dflash2`: convolutions around the sublayers, and a candidate selector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.models.cache import Cache, StackedRows
from ddtree_jax.models.config import DFlashConfig
from ddtree_jax.models.dflash2 import BlockConv, CandidateSelector
from ddtree_jax.models.kernel_specs import gqa_specs
from ddtree_jax.models.layers import RMSNorm, einsum, masked_softmax, rope_angles, rope_half_split
from ddtree_jax.models.linear import Linear, SwiGLU, merge_layer, split_stack
from ddtree_jax.pallas.choice import KernelChoice


class DraftAttention(nnx.Module):
    """Grouped-query attention of block rows over context and block; per-head q and k norms before RoPE."""

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, out_std: float):
        c = config
        self.q = Linear(c.hidden_size, c.num_attention_heads * c.head_dim, dtype=dtype, rngs=rngs)
        self.kv = Linear(c.hidden_size, 2 * c.num_key_value_heads * c.head_dim, dtype=dtype, rngs=rngs)
        self.o = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, dtype=dtype, rngs=rngs, std=out_std)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.kv_heads, self.head_dim = c.num_key_value_heads, c.head_dim
        self.kernels = KernelChoice()

    def keys_values(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> dict[str, jax.Array]:
        """x: [B, M, D], projected features or normed block rows. Leaves [B, M, Hkv * hd], k rotated."""
        k, v = jnp.split(self.kv(x), 2, axis=-1)
        k = self.k_norm(k.reshape(*x.shape[:2], self.kv_heads, self.head_dim))
        k = rope_half_split(k, cos[:, :, None], sin[:, :, None])
        return {"k": k.reshape(*x.shape[:2], self.kv_heads * self.head_dim), "v": v}

    def __call__(self, x: jax.Array, context: dict[str, Any], mask: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x: [B, T, D] normed block rows; context leaves [B, M, Hkv * hd]; mask: bool[B, T, M + T].

        With kernels the context leaves are `StackedRows`, and the mask is a pair: int32[B] valid rows of the context,
        of which all are visible, and bool[B, T, T].
        """
        b, t, _ = x.shape
        q = self.q_norm(self.q(x).reshape(b, t, -1, self.head_dim))
        q = rope_half_split(q, cos[:, :, None], sin[:, :, None])
        if isinstance(context["k"], StackedRows):
            (lengths, inner), own, past = mask, self.keys_values(x, cos, sin), context["k"]
            args = (q, past.rows, context["v"].rows, past.layer, lengths, own["k"], own["v"], inner)
            specs = gqa_specs(b, self.kernels.mesh)
            out = self.kernels.run("gqa_attention", *args, scale=self.head_dim**-0.5, specs=specs)
            return self.o(out.reshape(b, t, -1))
        q = q.reshape(b, t, self.kv_heads, -1, self.head_dim)
        parts = [context, self.keys_values(x, cos, sin)]
        split = lambda a: a.reshape(b, a.shape[1], self.kv_heads, self.head_dim)  # noqa: E731
        scores = [einsum("btgqd,bmgd->bgqtm", q, split(part["k"]), out_dtype=jnp.float32) for part in parts]
        p = masked_softmax(jnp.concatenate(scores, axis=-1) * self.head_dim**-0.5, mask[:, None, None])
        p = p.astype(x.dtype)
        m = context["k"].shape[1]
        out = [
            einsum("bgqtm,bmgd->btgqd", pi, split(part["v"]), out_dtype=jnp.float32)
            for pi, part in zip((p[..., :m], p[..., m:]), parts, strict=True)
        ]
        return self.o((out[0] + out[1]).astype(x.dtype).reshape(b, t, -1))


class DraftLayer(nnx.Module):
    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, depth = config, (2 * config.num_hidden_layers) ** -0.5
        std = depth * (c.num_attention_heads * c.head_dim) ** -0.5
        self.input_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.attention = DraftAttention(c, dtype=dtype, rngs=rngs, out_std=std)
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        std = depth * c.intermediate_size**-0.5
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs, out_std=std)
        self.attention_conv = None if c.conv is None else BlockConv(c, dtype=dtype, rngs=rngs)
        self.mlp_conv = None if c.conv is None else BlockConv(c, dtype=dtype, rngs=rngs)

    def __call__(self, h: jax.Array, context: dict[str, Any], mask: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
        def attention(x: jax.Array) -> jax.Array:
            return self.attention(x, context, mask, cos, sin)

        h = h + _convolved(self.attention_conv, self.input_norm(h), attention)
        return h + _convolved(self.mlp_conv, self.mlp_norm(h), self.mlp)


def _convolved(conv: BlockConv | None, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return sublayer(x) if conv is None else conv(x, sublayer)


class DFlash(nnx.Module):
    """The drafter. All layers are of one kind but for their window, so they are stacked [layers, ...] and scanned."""

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs, target_hidden_size: int):
        c = config
        self.config = c
        self.fc = Linear(len(c.target_layer_ids) * target_hidden_size, c.hidden_size, dtype=dtype, rngs=rngs)
        self.hidden_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)

        @nnx.split_rngs(splits=c.num_hidden_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> DraftLayer:
            return DraftLayer(c, dtype=dtype, rngs=rngs)

        self.layers = create(rngs)
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.selector = None if c.selector is None else CandidateSelector(c, dtype=dtype, rngs=rngs)
        self.kernels = KernelChoice()

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Zeros for context keys and values of `capacity` committed tokens."""
        c, dtype = self.config, self.fc.kernel.dtype
        shape = (c.num_hidden_layers, batch, capacity, c.num_key_value_heads * c.head_dim)
        rows = {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}
        return Cache(rows=rows, lengths=jnp.zeros((batch,), jnp.int32))

    def project_features(self, features: jax.Array) -> jax.Array:
        """[B, M, taps * target width] -> [B, M, D]: computed once, the same rows feed every layer."""
        return self.hidden_norm(self.fc(features.astype(self.fc.kernel.dtype)))

    def context_rows(self, features: jax.Array, positions: jax.Array) -> dict[str, jax.Array]:
        """Keys and values of committed tokens for all layers, from target features.

        features: [B, M, taps * target width]; positions: int32[B, M]. Returns leaves [layers, B, M, Hkv * hd], the
        rows that `cache.write_rows` appends.
        """
        c = self.project_features(features)
        cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        *stack, params = split_stack(self.layers)

        def body(carry: None, xs: Any) -> tuple[None, dict[str, jax.Array]]:
            return carry, merge_layer(*stack, *xs).attention.keys_values(c, cos, sin)

        layers = jnp.arange(self.config.num_hidden_layers, dtype=jnp.int32)
        return jax.lax.scan(body, None, (params, layers))[1]

    def block_hidden(
        self,
        embeddings: jax.Array,
        positions: jax.Array,
        context: dict[str, jax.Array],
        context_positions: jax.Array,
        context_mask: jax.Array,
        block_mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
    ) -> jax.Array:
        """Runs block rows through the layers.

        Args:
          embeddings: [B, T, D] raw target embeddings of the block tokens; cast to the dtype of the drafter. Several
            blocks lie one after another, `block_size` rows each.
          positions: int32[B, T] absolute positions of the block tokens.
          context: leaves [layers, B, M, Hkv * hd].
          context_positions: int32[B, M].
          context_mask: bool[B, 1 or T, M], True = context column visible to the row.
          block_mask: bool[B, T, T], which rows may see which at all; None: one block, all see all. A causal layer
            and a sliding window narrow it further.
          lengths: int32[B], where context_mask shows each row the first so many columns: kernels can then be used.

        Returns:
          [B, T, D] after the final norm, ready for the target's head.
        """
        c = self.config
        b, t, _ = embeddings.shape
        m = context_positions.shape[1]
        chex.assert_shape(positions, (b, t))
        columns = jnp.concatenate([context_positions, positions], axis=1)
        seen = jnp.broadcast_to(context_mask, (b, t, m))
        inner = jnp.ones((b, t, t), bool) if block_mask is None else block_mask
        visible = jnp.concatenate([seen, inner], axis=-1)
        distance = positions[:, :, None] - columns[:, None, :]
        window = jnp.asarray([w or 2**30 for w in c.windows], jnp.int32)
        causal = jnp.asarray(c.causal, bool)
        cos, sin = rope_angles(positions, c.head_dim, c.rope_theta)
        *stack, params = split_stack(self.layers)
        plain = not any(c.causal) and not any(c.windows)
        kernels = self.kernels.any and plain and lengths is not None
        whole, context = (context, None) if kernels else (None, context)

        def body(h: jax.Array, xs: Any) -> tuple[jax.Array, None]:
            params, context, window, causal, layer = xs
            mask = visible
            if kernels:
                context, mask = {name: StackedRows(rows, layer) for name, rows in whole.items()}, (lengths, inner)
            elif not plain:
                mask &= (jnp.abs(distance) < window) & ((distance >= 0) | ~causal)
            return merge_layer(*stack, params, layer)(h, context, mask, cos, sin), None

        h = (embeddings * c.input_embedding_scale).astype(self.fc.kernel.dtype)
        layers = jnp.arange(c.num_hidden_layers, dtype=jnp.int32)
        h, _ = jax.lax.scan(body, h, (params, context, window, causal, layers))
        return self.norm(h)

    def draft(self, cache: Cache, block_embeddings: jax.Array) -> jax.Array:
        """One block per sequence over its committed context.

        cache: committed context; block_embeddings: [B, block, D] of [root, mask, ...] at positions
        `cache.lengths[b]` onwards. Returns [B, L, D], rows 1.. of the block: row r predicts the token AT its position.
        """
        b, t, _ = block_embeddings.shape
        slots = jnp.arange(cache.capacity, dtype=jnp.int32)[None]
        positions = cache.lengths[:, None] + jnp.arange(t, dtype=jnp.int32)[None]
        context_mask = (slots < cache.lengths[:, None])[:, None]
        context_positions = jnp.broadcast_to(slots, (b, cache.capacity))
        hidden = self.block_hidden(
            block_embeddings, positions, cache.rows, context_positions, context_mask, lengths=cache.lengths
        )
        return hidden[:, 1:]

    def scale_logits(self, logits: jax.Array) -> jax.Array:
        """The drafter's output multiplier and soft cap on the borrowed head's logits; identity by default."""
        logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)
