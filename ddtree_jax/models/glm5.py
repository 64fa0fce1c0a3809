"""GLM-5 target (GlmMoeDsa): multi-head latent attention, DSA lightning indexer, dense and MoE layers, in Flax NNX.

One forward pass serves prefill, plain decoding and tree verification. It takes a block of T tokens with their
positions and a bool mask of which block tokens see which, over a cache of committed tokens that all block tokens see:
a causal mask is a prefill chunk, T = 1 is a decoding step, an ancestor mask is a tree. It returns the block's own
cache rows and writes nothing.

Formulas: transformers 5.24 `glm_moe_dsa`; DeepSeek-V2 (arXiv 2405.04434) for MLA and its absorbed form,
DeepSeek-V3.2 for the indexer. Layers of one kind are stacked and scanned (`layer_plan`), so that compile time does
not grow with depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ddtree_jax.models.cache import Cache, StackedRows
from ddtree_jax.models.config import DENSE, FULL, Glm5Config
from ddtree_jax.models.kernel_specs import indexer_specs, mla_specs, selection_specs
from ddtree_jax.models.layers import (
    LayerNorm,
    RMSNorm,
    einsum,
    masked_softmax,
    rope_angles,
    rope_interleaved,
    select_top_k,
    truncated_init,
)
from ddtree_jax.models.linear import LayerHeads, Linear, SwiGLU, WholeParam, below, merge_layer, split_stack
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.sharding import partition, replicate, target_dims
from ddtree_jax.pallas.choice import KernelChoice


class LayerKind(NamedTuple):
    """What a layer is built of: indexer type, MLP type, and the names of the kernels that are packed (NVFP4).

    A name is the kernel's path inside `DecoderLayer`, for example "mlp.gate_up" or "attention.mla.o".
    """

    indexer: str
    mlp: str
    packed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PackedKernels:
    """Which kernels of a target stay packed: sorted names by layer (see `LayerKind`), and the head."""

    layers: tuple[tuple[str, ...], ...]
    head: bool = False


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` copies of a short run of layers; `pattern` holds one kind a layer of the run."""

    pattern: tuple[LayerKind, ...]
    repeats: int
    first_layer: int

    def layer_index(self, place: int, repeat: int) -> int:
        return self.first_layer + repeat * len(self.pattern) + place


def layer_plan(config: Glm5Config, *, scan: bool = True, packed: PackedKernels | None = None) -> tuple[Segment, ...]:
    """Splits the layers into segments with as few distinct layer bodies as possible.

    GLM-5.2 gives (dense full) x 3, (MoE shared) x 3, (MoE full, MoE shared x 3) x 18. With `scan=False` each layer is
    its own segment, which is the unrolled model.
    """
    n = config.num_hidden_layers
    names = packed.layers if packed is not None else ((),) * n
    kinds = tuple(LayerKind(*kind, own) for kind, own in zip(config.layer_kinds, names, strict=True))
    if not scan:
        return tuple(Segment((kind,), 1, i) for i, kind in enumerate(kinds))
    best: list[tuple[int, int, tuple[Segment, ...]]] = [(0, 0, ())] * (n + 1)  # by start: bodies, segments, plan
    for start in range(n - 1, -1, -1):
        options = []
        for length in range(1, min(8, n - start) + 1):
            pattern, repeats = kinds[start : start + length], 1
            while True:
                end = start + length * repeats
                bodies, segments, rest = best[end]
                options.append((bodies + length, segments + 1, (Segment(pattern, repeats, start), *rest)))
                if kinds[end : end + length] != pattern:
                    break
                repeats += 1
        best[start] = min(options, key=lambda option: option[:2])
    return best[0][2]


@chex.dataclass(frozen=True, mappable_dataclass=False)
class BlockOutput:
    """What one forward pass yields.

    hidden: [B, T, D], the residual stream after the last layer, before the final norm.
    features: [B, T, len(layer_ids) * D], the residual stream after each layer of `layer_ids`, in that order.
    rows: the block's cache rows (structure of `Cache.rows`, T tokens), None unless `keep_rows`.
    router_load: float32[MoE layers, E], the share of the block's tokens that chose each expert, None unless asked.
    states: what recurrent layers keep after each node (structure of `Cache.states`, leaves [R, B, T, ...]), for
      `cache.write_states`; None of a target without such layers.
    """

    hidden: jax.Array
    features: jax.Array
    rows: Any
    router_load: Any
    states: Any = None


@dataclasses.dataclass(frozen=True)
class _Block:
    """What every layer of one pass shares; plain closure data, not a pytree."""

    cos: jax.Array  # float32[B, T, rope / 2]
    sin: jax.Array
    visible: jax.Array  # bool[B, T, S + T]: prefix columns, then block columns
    mask: jax.Array  # bool[B, T, T], the block columns alone
    lengths: jax.Array | None  # int32[B], the prefix; None without a cache
    use_indexer: bool
    keep_rows: bool
    absorbed: bool
    causal_implementation: str | None  # fused causal attention for cache-free dense passes
    kernels: bool  # attention as operations of `pallas.api` over whole caches; selections are indices, not masks


class Indexer(nnx.Module):
    """DSA lightning indexer: scores every visible key for every query; the best `index_topk` are attended to."""

    def __init__(self, config: Glm5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, packed: Sequence[str] = ()):
        c = config

        def linear(name: str, d_in: int, d_out: int) -> Linear:
            return Linear(d_in, d_out, dtype=dtype, rngs=rngs, packed=name in packed)

        self.wq_b = linear("wq_b", c.q_lora_rank, c.index_n_heads * c.index_head_dim)
        self.wk = linear("wk", c.hidden_size, c.index_head_dim)
        self.k_norm = LayerNorm(c.index_head_dim, eps=1e-6, dtype=dtype)
        self.weights_proj = linear("weights_proj", c.hidden_size, c.index_n_heads)
        self.heads, self.head_dim, self.rope_dim = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim

    def keys(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x: [B, T, D], the normed layer input. Returns [B, T, head_dim], rotated: what the cache holds."""
        k = self.k_norm(self.wk(x))
        rotated = rope_interleaved(k[..., : self.rope_dim], cos, sin)  # RoPE on the FIRST dims, unlike the main heads
        return jnp.concatenate([rotated, k[..., self.rope_dim :]], axis=-1)

    def queries(self, qr: jax.Array, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
        """qr: [B, T, q_lora_rank] after q_a_layernorm. Returns ([B, T, heads, head_dim], float32[B, T, heads])."""
        q = self.wq_b(qr).reshape(*qr.shape[:-1], self.heads, self.head_dim)
        rotated = rope_interleaved(q[..., : self.rope_dim], cos[:, :, None], sin[:, :, None])
        q = jnp.concatenate([rotated, q[..., self.rope_dim :]], axis=-1)
        weights = self.weights_proj(x, out_dtype=jnp.float32) * self.heads**-0.5
        return q, weights

    def scores(self, q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """float32[B, T, M] for keys [B, M, head_dim]: sum over heads of w * relu(q . k / sqrt(head_dim))."""
        q32, k32 = q.astype(jnp.float32), keys.astype(jnp.float32)
        heads = jax.nn.relu(einsum("bthd,bmd->bthm", q32, k32) * self.head_dim**-0.5)
        return einsum("bth,bthm->btm", weights, heads)


class MLA(nnx.Module):
    """Multi-head latent attention. Cache row: [kv_lora_rank after its norm | rotated shared rope key]."""

    def __init__(
        self, config: Glm5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs, out_std: float, packed: Sequence[str] = ()
    ):
        c, heads = config, config.num_attention_heads

        def linear(name: str, d_in: int, d_out: int, std: float | None = None) -> Linear:
            return Linear(d_in, d_out, dtype=dtype, rngs=rngs, std=std, packed=name in packed)

        self.q_a = linear("q_a", c.hidden_size, c.q_lora_rank)
        self.q_a_norm = RMSNorm(c.q_lora_rank, eps=c.lora_norm_eps, dtype=dtype)
        self.q_b = linear("q_b", c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a = linear("kv_a", c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_norm = RMSNorm(c.kv_lora_rank, eps=c.lora_norm_eps, dtype=dtype)
        std = c.kv_lora_rank**-0.5
        self.k_b = truncated_init(rngs, (c.kv_lora_rank, heads, c.qk_nope_head_dim), dtype, std)
        self.v_b = truncated_init(rngs, (c.kv_lora_rank, heads, c.v_head_dim), dtype, std)
        self.o = linear("o", heads * c.v_head_dim, c.hidden_size, out_std)
        self.heads, self.nope, self.rank = heads, c.qk_nope_head_dim, c.kv_lora_rank
        self.scale = c.qk_head_dim**-0.5

    def project(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(qr [B, T, q_lora_rank], q_nope [B, T, H, nope], q_rope [B, T, H, rope], latent [B, T, rank + rope])."""
        qr = self.q_a_norm(self.q_a(x))
        q = self.q_b(qr).reshape(*x.shape[:-1], self.heads, -1)
        q_rope = rope_interleaved(q[..., self.nope :], cos[:, :, None], sin[:, :, None])
        kv = self.kv_a(x)
        k_rope = rope_interleaved(kv[..., self.rank :], cos, sin)
        latent = jnp.concatenate([self.kv_a_norm(kv[..., : self.rank]), k_rope], axis=-1)
        return qr, q[..., : self.nope], q_rope, latent

    def attend_absorbed(
        self, q_nope: jax.Array, q_rope: jax.Array, context: jax.Array | None, latent: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Scores against the latents themselves; few queries. mask: bool[B, T, S + T]. Returns [B, T, H * v]."""
        b, t = q_nope.shape[:2]
        # Heads and rows are one axis against the latents, in this order: XLA's CPU products then need no transposed
        # copy of the cache.
        q = jnp.concatenate([einsum("bthn,chn->bhtc", q_nope, self.k_b[...]), q_rope.swapaxes(1, 2)], axis=-1)
        q = q.reshape(b, self.heads * t, -1)
        parts = [latent] if context is None else [context, latent]
        scores = [einsum("bqc,bmc->bqm", q, part, out_dtype=jnp.float32) for part in parts]
        every_head = jnp.broadcast_to(mask[:, None], (b, self.heads, *mask.shape[1:])).reshape(b, self.heads * t, -1)
        p = masked_softmax(jnp.concatenate(scores, axis=-1) * self.scale, every_head).astype(latent.dtype)
        split = jnp.split(p, [parts[0].shape[1]], axis=-1) if len(parts) == 2 else [p]
        # The rope tail of the latents is summed along and dropped: slicing it off first would copy the cache.
        pairs = zip(split, parts, strict=True)
        mixed = [einsum("bqm,bmc->bqc", pi, part, out_dtype=jnp.float32) for pi, part in pairs]
        total = sum(mixed[1:], mixed[0]).astype(latent.dtype)[..., : self.rank]
        out = einsum("bhtc,chv->bthv", total.reshape(b, self.heads, t, self.rank), self.v_b[...])
        return out.reshape(b, t, -1)

    def into_latents(self, q_nope: jax.Array) -> jax.Array:
        """[B, T, H, nope] -> [B, T, H, rank]: queries for the latents themselves."""
        if isinstance(self.k_b, LayerHeads):
            return self.k_b.multiply(q_nope, transposed=True)
        return einsum("bthn,chn->bthc", q_nope, self.k_b[...])

    def out_of_latents(self, mixed: jax.Array) -> jax.Array:
        """[B, T, H, rank], weighted sums of latents -> [B, T, H * v]."""
        if isinstance(self.v_b, LayerHeads):
            out = self.v_b.multiply(mixed, transposed=False)
        else:
            out = einsum("bthc,chv->bthv", mixed, self.v_b[...])
        return out.reshape(*out.shape[:2], -1)

    def attend_expanded(
        self, q_nope: jax.Array, q_rope: jax.Array, context: jax.Array | None, latent: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Rebuilds keys and values of every token; many queries. Same function as `attend_absorbed`."""
        rows = latent if context is None else jnp.concatenate([context, latent], axis=1)
        k, v, k_rope = self.expand(rows)
        scores = einsum("bthn,bmhn->bhtm", q_nope, k, out_dtype=jnp.float32)
        scores += einsum("bthr,bmr->bhtm", q_rope, k_rope, out_dtype=jnp.float32)
        p = masked_softmax(scores * self.scale, mask[:, None]).astype(latent.dtype)
        out = einsum("bhtm,bmhv->bthv", p, v)
        return out.reshape(*out.shape[:2], -1)

    def expand(self, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """[B, M, rank + rope] -> keys without rope [B, M, H, nope], values [B, M, H, v], rope keys [B, M, rope]."""
        c = rows[..., : self.rank]
        k, v = einsum("bmc,chn->bmhn", c, self.k_b[...]), einsum("bmc,chv->bmhv", c, self.v_b[...])
        return k, v, rows[..., self.rank :]

    def attend_causal(self, q_nope: jax.Array, q_rope: jax.Array, latent: jax.Array, implementation: str) -> jax.Array:
        """Fused causal attention without a cache (training). Needs v_head_dim == qk_head_dim for cuDNN."""
        k, v, k_rope = self.expand(latent)
        k_rope = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
        q, k = jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([k, k_rope], axis=-1)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=self.scale, implementation=implementation)
        return out.reshape(*out.shape[:2], -1)


class Attention(nnx.Module):
    """MLA with, on full layers, its indexer."""

    def __init__(
        self,
        config: Glm5Config,
        *,
        full: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        out_std: float,
        packed: Sequence[str] = (),
    ):
        self.mla = MLA(config, dtype=dtype, rngs=rngs, out_std=out_std, packed=below(packed, "mla"))
        own = below(packed, "indexer")
        self.indexer = Indexer(config, dtype=dtype, rngs=rngs, packed=own) if full else None
        self.index_topk = config.index_topk
        self.kernels = KernelChoice()

    def __call__(
        self, x: jax.Array, selection: jax.Array, context: dict[str, Any] | None, block: _Block
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        qr, q_nope, q_rope, latent = self.mla.project(x, block.cos, block.sin)
        rows = {"latent": latent}
        if self.indexer is not None and (block.keep_rows or block.use_indexer):
            rows["index_key"] = self.indexer.keys(x, block.cos, block.sin)
            if block.use_indexer:
                selection = self._select(qr, x, context, rows["index_key"], block)
        past = None if context is None else context["latent"]
        if block.causal_implementation is not None:
            out = self.mla.attend_causal(q_nope, q_rope, latent, block.causal_implementation)
        elif block.kernels:
            out = self._attend_with_kernels(q_nope, q_rope, past, latent, selection, block)
        elif block.absorbed:
            out = self.mla.attend_absorbed(q_nope, q_rope, past, latent, selection)
        else:
            out = self.mla.attend_expanded(q_nope, q_rope, past, latent, selection)
        return self.mla.o(out), selection, rows

    def _attend_with_kernels(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        past: StackedRows,
        latent: jax.Array,
        selection: jax.Array,
        block: _Block,
    ) -> jax.Array:
        mla = self.mla
        q = jnp.concatenate([mla.into_latents(q_nope), q_rope], axis=-1)
        args, sizes = (q, past.rows, past.layer, block.lengths, latent), {"rank": mla.rank, "scale": mla.scale}
        sizes["specs"] = mla_specs(q, self.kernels.mesh)
        if block.use_indexer:
            mixed = self.kernels.run("mla_attention_selected", *args, selection, **sizes)
        else:
            mixed = self.kernels.run("mla_attention", *args, block.mask, **sizes)
        return mla.out_of_latents(mixed)

    def _select(
        self, qr: jax.Array, x: jax.Array, context: dict[str, Any] | None, keys: jax.Array, block: _Block
    ) -> jax.Array:
        q, weights = self.indexer.queries(qr, x, block.cos, block.sin)
        if block.kernels:
            past = context["index_key"]
            args = (q, weights, past.rows, past.layer, block.lengths, keys, block.mask)
            batch, mesh = q.shape[0], self.kernels.mesh
            scores = self.kernels.run("indexer_scores", *args, specs=indexer_specs(batch, mesh))
            specs = selection_specs(batch, mesh)
            return self.kernels.run("select_top_k_indices", *scores, k=self.index_topk, specs=specs)
        parts = [keys] if context is None else [context["index_key"], keys]
        scores = jnp.concatenate([self.indexer.scores(q, weights, part) for part in parts], axis=-1)
        return select_top_k(scores, block.visible, self.index_topk)


class DecoderLayer(nnx.Module):
    """h += attention(norm h); h += mlp(norm h)."""

    def __init__(
        self, config: Glm5Config, kind: LayerKind, *, dtype: jnp.dtype, rngs: nnx.Rngs, mesh: Mesh | None = None
    ):
        indexer, mlp, packed = kind
        depth = (2 * config.num_hidden_layers) ** -0.5
        attention_std = depth * (config.num_attention_heads * config.v_head_dim) ** -0.5
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        own = below(packed, "attention")
        self.attention = Attention(
            config, full=indexer == FULL, dtype=dtype, rngs=rngs, out_std=attention_std, packed=own
        )
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        own = below(packed, "mlp")
        if mlp == DENSE:
            width = config.intermediate_size
            std = depth * width**-0.5
            self.mlp = SwiGLU(config.hidden_size, width, dtype=dtype, rngs=rngs, out_std=std, packed=own)
        else:
            std = depth * config.moe_intermediate_size**-0.5
            self.mlp = MoE(config, dtype=dtype, rngs=rngs, out_std=std, packed=own, mesh=mesh)

    def __call__(
        self,
        h: jax.Array,
        selection: jax.Array,
        context: dict[str, Any] | None,
        block: _Block,
        repeat: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], jax.Array | None]:
        with jax.named_scope("attention"):
            out, selection, rows = self.attention(self.input_norm(h), selection, context, block)
            h = h + out
        with jax.named_scope("mlp"):
            x = self.mlp_norm(h)
            out, load = self.mlp(x, repeat) if isinstance(self.mlp, MoE) else (self.mlp(x), None)
        return h + out, selection, rows, load


class LayerStack(nnx.Module):
    """One segment of the plan: a module a pattern place, every parameter stacked [repeats, ...]."""

    def __init__(
        self, config: Glm5Config, segment: Segment, *, dtype: jnp.dtype, rngs: nnx.Rngs, mesh: Mesh | None = None
    ):
        def stacked(kind: LayerKind) -> DecoderLayer:
            @nnx.split_rngs(splits=segment.repeats)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def create(rngs: nnx.Rngs) -> DecoderLayer:
                return DecoderLayer(config, kind, dtype=dtype, rngs=rngs, mesh=mesh)

            return create(rngs)

        self.layers = nnx.List([stacked(kind) for kind in segment.pattern])


class Glm5(nnx.Module):
    """The whole target. Parameters of layers are stacked by segment; `layer_plan` says which layer lies where."""

    def __init__(
        self,
        config: Glm5Config,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        scan: bool = True,
        packed: PackedKernels | None = None,
        mesh: Mesh | None = None,
    ):
        self.config = config
        self.mesh, self.packed = mesh, packed
        self.kernels = KernelChoice()
        self.plan = layer_plan(config, scan=scan, packed=packed)
        self.embed = truncated_init(rngs, (config.vocab_size, config.hidden_size), dtype, 0.5)
        stacks = [LayerStack(config, segment, dtype=dtype, rngs=rngs, mesh=mesh) for segment in self.plan]
        self.stacks = nnx.List(stacks)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        head = packed is not None and packed.head
        self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs, std=0.02, packed=head)

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """int32[...] -> [..., D], no scale. Training keeps the table in float32: its gradient sums many tokens."""
        return jnp.take(self.embed[...], token_ids, axis=0).astype(self.norm.weight.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] before the final norm -> float32[..., V]."""
        with jax.named_scope("lm_head"):
            return self.head_logits(self.norm(hidden))

    def head_logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] already normed (a drafter's output) -> float32[..., V]."""
        logits = self.head(hidden, out_dtype=jnp.float32)
        if self.mesh is not None:
            # First as the product falls out of the split head: asked for whole at once, XLA gathers the head instead.
            vocab = partition(target_dims(self.config)["head.kernel"], (hidden.shape[-1], logits.shape[-1]), self.mesh)[
                1
            ]
            split = NamedSharding(self.mesh, PartitionSpec(*[None] * (logits.ndim - 1), vocab))
            logits = jax.lax.with_sharding_constraint(logits, split)
        return replicate(logits, self.mesh)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A cache of zeros with room for `capacity` tokens of each of `batch` sequences."""
        c, dtype = self.config, self.norm.weight.dtype
        widths = {"latent": c.kv_lora_rank + c.qk_rope_head_dim}

        def rows(segment: Segment, indexer: str) -> dict[str, jax.Array]:
            named = widths | ({"index_key": c.index_head_dim} if indexer == FULL else {})
            return {k: jnp.zeros((segment.repeats, batch, capacity, w), dtype) for k, w in named.items()}

        tree = tuple(tuple(rows(segment, kind.indexer) for kind in segment.pattern) for segment in self.plan)
        return Cache(rows=tree, lengths=jnp.zeros((batch,), jnp.int32))

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        block_mask: jax.Array,
        cache: Cache | None = None,
        *,
        layer_ids: tuple[int, ...] = (),
        absorbed: bool = False,
        sparse: bool = True,
        keep_rows: bool = True,
        with_router_load: bool = False,
        causal_implementation: str | None = None,
    ) -> BlockOutput:
        """Runs a block of tokens over the committed prefix.

        Args:
          token_ids: int32[B, T].
          positions: int32[B, T], absolute; siblings of a tree share one.
          block_mask: bool[B, T, T], True = row t may attend to column u. Each row must see itself, padding too.
          cache: committed tokens; row t sees all `cache.lengths[b]` of them. None: no prefix.
          layer_ids: static, 0-based layers whose output is returned in `features`.
          absorbed: static, MLA against the latents (few rows) or with rebuilt keys and values (many rows).
          sparse: static, False attends densely whatever `index_topk` says (training before the indexer is).
          keep_rows: static, whether cache rows are returned.
          with_router_load: static.
          causal_implementation: static, "cudnn" or "xla": fused dense causal attention; needs `sparse=False`, no
            cache, and ignores `block_mask`.

        Returns:
          BlockOutput.
        """
        chex.assert_rank([token_ids, positions, block_mask], [2, 2, 3])
        b, t = token_ids.shape
        chex.assert_shape(positions, (b, t))
        chex.assert_shape(block_mask, (b, t, t))
        chex.assert_type([token_ids, positions, block_mask], [jnp.int32, jnp.int32, jnp.bool_])
        if causal_implementation is not None and (sparse or cache is not None):
            raise ValueError("causal_implementation needs sparse=False and cache=None")
        s = 0 if cache is None else cache.capacity
        visible = block_mask
        if cache is not None:
            chex.assert_shape(cache.lengths, (b,))
            prefix = jnp.arange(s, dtype=jnp.int32)[None, :] < cache.lengths[:, None]
            visible = jnp.concatenate([jnp.broadcast_to(prefix[:, None], (b, t, s)), block_mask], axis=-1)
        cos, sin = rope_angles(positions, self.config.qk_rope_head_dim, self.config.rope_theta)
        use_indexer = sparse and s + t > self.config.index_topk
        kernels = self.kernels.any and absorbed and cache is not None
        block = _Block(
            cos=cos,
            sin=sin,
            visible=visible,
            mask=block_mask,
            lengths=None if cache is None else cache.lengths,
            use_indexer=use_indexer,
            keep_rows=keep_rows,
            absorbed=absorbed,
            causal_implementation=causal_implementation,
            kernels=kernels,
        )
        # The selection before the first layer. Plain JAX carries a mask. Kernels carry a list of columns: empty without
        # an indexer, when they attend to all that is visible, and else filled by the first layer, which has one.
        listed = jnp.full((b, t, self.config.index_topk if use_indexer else 0), -1, jnp.int32)
        slots = jnp.full((self.config.num_hidden_layers,), len(layer_ids), jnp.int32)
        if layer_ids:
            ids = jnp.asarray(layer_ids, jnp.int32)
            slots = slots.at[ids].set(jnp.arange(len(layer_ids), dtype=jnp.int32))
        carry = (
            self.embed_tokens(token_ids),
            listed if kernels else visible,
            jnp.zeros((len(layer_ids), b, t, self.config.hidden_size), self.norm.weight.dtype),
        )
        rows, loads = [], []
        for i, segment in enumerate(self.plan):
            context = None if cache is None else cache.rows[i]
            carry, (new_rows, load) = self._run_stack(i, segment, carry, context, slots, block, layer_ids)
            rows.append(new_rows)
            loads.append(load)
        hidden, _, taps = carry
        return BlockOutput(
            hidden=hidden,
            features=jnp.moveaxis(taps, 0, 2).reshape(b, t, len(layer_ids) * self.config.hidden_size),
            rows=tuple(rows) if keep_rows else None,
            router_load=self._in_layer_order(loads) if with_router_load else None,
        )

    def _run_stack(
        self,
        index: int,
        segment: Segment,
        carry: Any,
        context: Any,
        slots: jax.Array,
        block: _Block,
        layer_ids: tuple[int, ...],
    ) -> tuple[Any, tuple[Any, Any]]:
        # What `MoE.indexes_stack` speaks of stays whole beside the loop; the rest is sliced layer by layer.
        places = [isinstance(layer.mlp, MoE) and layer.mlp.indexes_stack for layer in self.stacks[index].layers]

        def is_whole(path: tuple, value: Any) -> bool:
            _, place, *names = path
            return places[place] and tuple(names[:2]) in (("mlp", "gate_up"), ("mlp", "down"))

        graphdef, whole, indices, params = split_stack(self.stacks[index], nnx.Any(WholeParam, is_whole))
        span = len(segment.pattern)
        first = segment.first_layer
        stack_slots = slots[first : first + span * segment.repeats].reshape(segment.repeats, span)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            h, selection, taps = carry
            params, context, slot, repeat = xs
            stack = merge_layer(graphdef, whole, indices, params, repeat)
            new_rows, loads = [], []
            for place, layer in enumerate(stack.layers):
                past = None if context is None else context[place]
                if block.kernels:
                    past = {name: StackedRows(rows, repeat) for name, rows in whole_context[place].items()}
                h, selection, rows, load = layer(h, selection, past, block, repeat if places[place] else None)
                new_rows.append(rows if block.keep_rows else None)
                loads.append(load)
                if any(segment.layer_index(place, r) in layer_ids for r in range(segment.repeats)):
                    taps = taps.at[slot[place]].set(h, mode="drop")  # untapped layers of the stack point past the end
            return (h, selection, taps), (tuple(new_rows), tuple(loads))

        whole_context, context = (context, None) if block.kernels else (None, context)
        xs = (params, context, stack_slots, jnp.arange(segment.repeats, dtype=jnp.int32))
        if segment.repeats == 1:
            carry, out = body(carry, jax.tree.map(lambda x: x[0], xs))
            return carry, jax.tree.map(lambda x: x[None], out)
        return jax.lax.scan(body, carry, xs)

    def _in_layer_order(self, loads: list[tuple[jax.Array | None, ...]]) -> jax.Array:
        by_layer = {}
        for segment, places in zip(self.plan, loads, strict=True):
            for place, load in enumerate(places):
                if load is not None:
                    by_layer |= {segment.layer_index(place, r): load[r] for r in range(segment.repeats)}
        return jnp.stack([by_layer[layer] for layer in sorted(by_layer)])


def causal_mask(batch: int, length: int) -> jax.Array:
    """bool[B, T, T], True at and below the diagonal."""
    return jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool))[None], (batch, length, length))
