"""A small target with recurrent layers, for tests: gated delta nets with short convolutions between attention layers.

Two networks over the same parameters. `SlotOrderNet` runs its recurrences in slot order: right for a chunk and for a
chain, wrong for a tree with branches. `TreeStateNet` gives every node the state of its parent, and its convolutions the
inputs of its own ancestors. They share the projections and no line of the recurrences: each is the other's reference on
chains.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models import Cache, DFlashConfig, Drafter, Target
from ddtree_jax.models.dflash import DFlash, DraftAttention
from ddtree_jax.models.glm5 import BlockOutput
from ddtree_jax.models.layers import RMSNorm, einsum, rope_angles, truncated_init
from ddtree_jax.models.linear import Linear, SwiGLU

RECURRENT, ATTENTION = "gated_delta_net", "attention"


@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Sizes; the attention fields have the names that `DraftAttention` reads."""

    layer_types: tuple[str, ...] = (RECURRENT, ATTENTION, RECURRENT)
    vocab_size: int = 23
    hidden_size: int = 32
    intermediate_size: int = 48
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 16
    state_heads: int = 2
    key_dim: int = 8
    value_dim: int = 12
    conv_window: int = 4
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 192
    eos_token_ids: tuple[int, ...] = (5,)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == RECURRENT)


class GatedDeltaNet(nnx.Module):
    """Gated delta rule: M = a M, then M += b k (v - k M), read by q; q, k and v pass a causal convolution first.

    State: `memory` [B, H, key, value], and `window` [B, W - 1, C], the newest inputs of the convolution, oldest first.
    """

    def __init__(self, config: HybridConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, heads = config, config.state_heads
        self.sizes = (heads * c.key_dim, heads * c.key_dim, heads * c.value_dim)
        self.qkv = Linear(c.hidden_size, sum(self.sizes), dtype=dtype, rngs=rngs)
        self.gates = Linear(c.hidden_size, (2, heads), dtype=dtype, rngs=rngs)
        self.z = Linear(c.hidden_size, heads * c.value_dim, dtype=dtype, rngs=rngs)
        self.taps = truncated_init(rngs, (c.conv_window, sum(self.sizes)), dtype, 0.6)
        self.norm = RMSNorm(c.value_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.o = Linear(heads * c.value_dim, c.hidden_size, dtype=dtype, rngs=rngs)
        self.heads = heads

    def __call__(
        self, x: jax.Array, state: dict[str, jax.Array], parents: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x: [B, T, D]; state: before the block; parents: int32[B, T], None for slot order.

        Returns [B, T, D], and the states after every node, leaves [B, T, ...].
        """
        b, t, _ = x.shape
        window = self.taps.shape[0]
        inputs = jnp.concatenate([state["window"], self.qkv(x)], axis=1)
        if parents is None:
            columns = jnp.arange(t)[:, None] + jnp.arange(window)[None, :]
            seen = inputs[:, columns]
        else:
            seen = jax.vmap(lambda rows, index: rows[index])(inputs, lineage(parents, window) + window - 1)
        mixed = jax.nn.silu(jnp.sum(seen * self.taps[...][None, None], axis=2))
        q, k, v = jnp.split(mixed, (self.sizes[0], 2 * self.sizes[0]), axis=-1)
        q, k, v = (part.reshape(b, t, self.heads, -1) for part in (q, k, v))
        q, k = (part * jax.lax.rsqrt(jnp.sum(part * part, axis=-1, keepdims=True) + 1e-6) for part in (q, k))
        keep, write = jnp.moveaxis(jax.nn.sigmoid(self.gates(x)), 2, 0)
        keep = 0.7 + 0.3 * keep  # mostly kept, so that the state reaches far back
        steps = (k, v, keep, write)
        if parents is None:
            memory = self._in_slot_order(state["memory"], steps)
        else:
            memory = self._from_parents(state["memory"], steps, parents)
        read = self.norm(einsum("bthk,bthkv->bthv", q, memory)).reshape(b, t, -1)
        return self.o(read * jax.nn.silu(self.z(x))), {"memory": memory, "window": seen[:, :, 1:]}

    @staticmethod
    def _step(memory: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array, write: jax.Array) -> jax.Array:
        memory = memory * keep[:, :, None, None]
        error = v - einsum("bhk,bhkv->bhv", k, memory)
        return memory + einsum("bhk,bhv->bhkv", k * write[:, :, None], error)

    def _in_slot_order(self, memory: jax.Array, steps: tuple[jax.Array, ...]) -> jax.Array:
        def body(memory: jax.Array, step: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            memory = self._step(memory, *step)
            return memory, memory

        by_slot = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), steps)
        return jnp.moveaxis(jax.lax.scan(body, memory, by_slot)[1], 0, 1)

    def _from_parents(self, memory: jax.Array, steps: tuple[jax.Array, ...], parents: jax.Array) -> jax.Array:
        b, t = parents.shape
        known = jnp.zeros((b, t + 1, *memory.shape[1:]), memory.dtype).at[:, 0].set(memory)  # entry n + 1 is node n
        pick = jax.vmap(lambda rows, at: rows[at])

        def body(n: jax.Array, known: jax.Array) -> jax.Array:
            own = jax.tree.map(lambda leaf: leaf[:, n], steps)
            return known.at[:, n + 1].set(self._step(pick(known, parents[:, n] + 1), *own))

        return jax.lax.fori_loop(0, t, body, known)[:, 1:]


def parents_of(block_mask: jax.Array) -> jax.Array:
    """int32[B, T] from a mask bool[B, T, T]: the visible column next below a node's own, -1 where there is none.

    Parents come before their children, so of a node's ancestors the one in the highest slot is its parent. Padding
    sees itself alone, and starts from the committed state as the root does.
    """
    own = jnp.arange(block_mask.shape[1], dtype=jnp.int32)
    below = block_mask & (own[None, None, :] < own[None, :, None])
    return jnp.max(jnp.where(below, own[None, None, :], -1), axis=-1)


def lineage(parents: jax.Array, count: int) -> jax.Array:
    """int32[B, T, count]: each node's newest `count` ancestors, itself last; -1, -2, ... are committed tokens."""
    at = jnp.broadcast_to(jnp.arange(parents.shape[1], dtype=jnp.int32)[None], parents.shape)
    found = [at]
    for _ in range(count - 1):
        at = jnp.where(at < 0, at - 1, jnp.take_along_axis(parents, jnp.maximum(at, 0), axis=1))
        found.insert(0, at)
    return jnp.stack(found, axis=-1)


class HybridLayer(nnx.Module):
    """h += mixer(norm h); h += mlp(norm h)."""

    def __init__(self, config: HybridConfig, kind: str, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.input_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        if kind == RECURRENT:
            self.mixer = GatedDeltaNet(c, dtype=dtype, rngs=rngs)
        else:
            self.mixer = DraftAttention(c, dtype=dtype, rngs=rngs, out_std=0.25)
        self.mlp_norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)


class SlotOrderNet(nnx.Module):
    """The target with the interface of `Glm5` that decoding uses."""

    tree_states = False

    def __init__(self, config: HybridConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config, self.mesh = config, None
        self.embed = truncated_init(rngs, (config.vocab_size, config.hidden_size), dtype, 0.5)
        self.layers = nnx.List([HybridLayer(config, kind, dtype=dtype, rngs=rngs) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs, std=0.3)

    def parents(self, block_mask: jax.Array) -> jax.Array | None:
        """What the recurrences follow; None is slot order."""
        return None

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        return jnp.take(self.embed[...], token_ids, axis=0)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head_logits(self.norm(hidden))

    def head_logits(self, hidden: jax.Array) -> jax.Array:
        return self.head(hidden, out_dtype=jnp.float32)

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """Rows [attention layers, B, S, width], states [recurrent layers, B, ...], all zero."""
        c, dtype = self.config, self.norm.weight.dtype
        recurrent = len(c.recurrent_layers)
        shape = (c.num_hidden_layers - recurrent, batch, capacity, c.num_key_value_heads * c.head_dim)
        channels = c.state_heads * (2 * c.key_dim + c.value_dim)
        states = {
            "memory": jnp.zeros((recurrent, batch, c.state_heads, c.key_dim, c.value_dim), dtype),
            "window": jnp.zeros((recurrent, batch, c.conv_window - 1, channels), dtype),
        }
        rows = {name: jnp.zeros(shape, dtype) for name in ("k", "v")}
        return Cache(rows=rows, lengths=jnp.zeros((batch,), jnp.int32), states=states)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        block_mask: jax.Array,
        cache: Cache | None = None,
        *,
        layer_ids: tuple[int, ...] = (),
        absorbed: bool = False,
        keep_rows: bool = True,
    ) -> BlockOutput:
        del absorbed  # one form of attention
        b, t = token_ids.shape
        cache = self.empty_cache(b, 0) if cache is None else cache
        prefix = jnp.arange(cache.capacity, dtype=jnp.int32)[None, :] < cache.lengths[:, None]
        seen = jnp.broadcast_to(prefix[:, None], (b, t, cache.capacity))
        visible = jnp.concatenate([seen, block_mask], axis=-1)
        cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        parents = self.parents(block_mask)
        h, rows, states, taps = self.embed_tokens(token_ids), [], [], {}
        for i, layer in enumerate(self.layers):
            x = layer.input_norm(h)
            if isinstance(layer.mixer, GatedDeltaNet):
                out, after = layer.mixer(x, _layer(cache.states, len(states)), parents)
                states.append(after)
            else:
                out = layer.mixer(x, _layer(cache.rows, len(rows)), visible, cos, sin)
                rows.append(layer.mixer.keys_values(x, cos, sin))
            h = h + out
            h = h + layer.mlp(layer.mlp_norm(h))
            taps[i] = h
        features = jnp.concatenate([taps[i] for i in layer_ids], axis=-1) if layer_ids else h[..., :0]
        rows, states = (_stacked(rows), _stacked(states)) if keep_rows else (None, None)
        return BlockOutput(hidden=h, features=features, rows=rows, router_load=None, states=states)


def _layer(stacked: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


class TreeStateNet(SlotOrderNet):
    """The same network, exact on trees: state[node] = f(token, state[parent])."""

    tree_states = True

    def parents(self, block_mask: jax.Array) -> jax.Array | None:
        return parents_of(block_mask)


@functools.cache
def make_hybrid(module: type[SlotOrderNet], config: HybridConfig, *, seed: int = 0) -> Target:
    """A target with random float32 weights; the same seed gives both networks the same ones."""
    return Target(config, *nnx.split(module(config, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(seed))))


class ToldDrafter(DFlash):
    """A drafter that has been told the continuation of each sequence, and believes it only so much.

    The head's column of the told token is added to what the network makes of a row, so that this token is mostly among
    its best few and not always its best: chains and branches are both accepted.
    """

    def __init__(self, config: DFlashConfig, *, target: Target, told: jax.Array, rngs: nnx.Rngs):
        super().__init__(config, dtype=target.dtype, rngs=rngs, target_hidden_size=target.config.hidden_size)
        self.told = nnx.Param(told)  # int32[B, P], the token at each absolute position
        self.columns = nnx.Param(target.module().head.kernel[...].T)

    def draft(self, cache: Cache, block_embeddings: jax.Array) -> jax.Array:
        hidden = super().draft(cache, block_embeddings)
        ahead = cache.lengths[:, None] + 1 + jnp.arange(hidden.shape[1], dtype=jnp.int32)[None]
        tokens = jnp.take_along_axis(self.told[...], ahead, axis=1)
        return hidden + 1.5 * self.columns[...][tokens]


def make_told_drafter(config: DFlashConfig, target: Target, sequences: list[list[int]], *, seed: int = 0) -> Drafter:
    """sequences: prompt and continuation of every row of the batch."""
    told = np.zeros((len(sequences), target.config.max_position_embeddings + config.block_size), np.int32)
    for row, sequence in zip(told, sequences, strict=True):
        row[: len(sequence)] = sequence
    module = ToldDrafter(config, target=target, told=jnp.asarray(told), rngs=nnx.Rngs(seed))
    return Drafter(config, *nnx.split(module))
