"""Training of the DSA indexers of a frozen target: their scores learn the target's own attention.

Each full layer's indexer is trained on KL(P || softmax(I)), where I are its summed scores and P is the
attention distribution averaged over heads and over the layers that will use its choice: the full layer itself
and the shared layers that follow it (DeepSeek-V3.2's dense warm-up, with the shared layers of GLM-5.2 taken
in).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.glm5 import Attention, DecoderLayer, Glm5
from ddtree_jax.models.layers import NEGATIVE, einsum, masked_softmax, rope_angles

from . import modules, schedule
from .schedule import Clock, Log
from .sizes import DemoSizes

FLAT_SHARE = 0.3


def layers_in_order(model: Glm5) -> list[DecoderLayer]:
    """Every decoder layer with its own slice of the stacked parameters."""
    layers = []
    for segment, stack in zip(model.plan, model.stacks, strict=True):
        for repeat in range(segment.repeats):
            for layer in stack.layers:
                graphdef, params = nnx.split(layer)
                layers.append(nnx.merge(graphdef, jax.tree.map(lambda x, r=repeat: x[r], params)))
    return layers


def attention_probabilities(attention: Attention, x: jax.Array, angles: Any, mask: jax.Array) -> jax.Array:
    """Dense causal attention of a layer averaged over its heads, float32[B, T, T].

    Args:
      attention: of the layer.
      x: [B, T, D], the normed input of the layer.
      angles: cos and sin of the positions.
      mask: bool[B, T, T], True = may attend.
    """
    mla = attention.mla
    _, q_nope, q_rope, latent = mla.project(x, *angles)
    keys, _, rope_keys = mla.expand(latent)
    scores = einsum("bthn,bmhn->bhtm", q_nope, keys, out_dtype=jnp.float32)
    scores += einsum("bthr,bmr->bhtm", q_rope, rope_keys, out_dtype=jnp.float32)
    return jnp.mean(masked_softmax(scores * mla.scale, mask[:, None]), axis=1)


def _is_indexer(name: str) -> bool:
    return "/indexer/" in f"/{name}/"


def split_indexers(params: Any) -> dict[str, jax.Array]:
    """The indexers' leaves by path name."""
    return {name: leaf for name, leaf in schedule.named_leaves(params).items() if _is_indexer(name)}


def merge_indexers(params: Any, indexers: dict[str, jax.Array]) -> Any:
    """`params` with the indexers' leaves replaced."""
    return schedule.map_named(lambda name, leaf: indexers.get(name, leaf), params)


def indexer_losses(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array) -> jax.Array:
    """KL(attention || indexer) of each full layer in nats a query, float32[full layers].

    Gradients reach the indexers only. tokens: int32[B, T].
    """
    model = nnx.merge(graphdef, params)
    config = model.config
    positions, mask = modules.causal_inputs(*tokens.shape)
    angles = rope_angles(positions, config.qk_rope_head_dim, config.rope_theta)
    h = model.embed_tokens(tokens)
    groups: list[dict[str, Any]] = []
    for layer in layers_in_order(model):
        x = jax.lax.stop_gradient(layer.input_norm(h))
        probabilities = attention_probabilities(layer.attention, x, angles, mask)
        if layer.attention.indexer is not None:
            groups.append({"indexer": layer.attention.indexer, "x": x, "mla": layer.attention.mla, "sum": 0.0, "n": 0})
        groups[-1]["sum"] += probabilities
        groups[-1]["n"] += 1
        h = jax.lax.stop_gradient(dense_layer(layer, h, angles))
    losses = []
    for group in groups:
        indexer, x = group["indexer"], group["x"]
        wanted = jax.lax.stop_gradient(group["sum"] / group["n"])
        qr = jax.lax.stop_gradient(group["mla"].project(x, *angles)[0])
        queries, weights = indexer.queries(qr, x, *angles)
        scores = indexer.scores(queries, weights, indexer.keys(x, *angles))
        log_q = jax.nn.log_softmax(jnp.where(mask, scores, NEGATIVE), axis=-1)
        log_p = jnp.log(jnp.maximum(wanted, 1e-20))
        terms = jnp.where(mask, wanted * (log_p - log_q), 0.0)
        losses.append(jnp.mean(jnp.sum(terms, axis=-1)))
    return jnp.stack(losses)


def dense_layer(layer: DecoderLayer, h: jax.Array, angles: Any) -> jax.Array:
    """The layer's output [B, T, D] under dense causal attention."""
    x = layer.input_norm(h)
    mla = layer.attention.mla
    _, q_nope, q_rope, latent = mla.project(x, *angles)
    out = mla.attend_causal(q_nope, q_rope, latent, modules.causal_implementation())
    h = h + mla.o(out)
    y = layer.mlp(layer.mlp_norm(h))
    return h + (y[0] if isinstance(y, tuple) else y)


def optimiser() -> optax.GradientTransformation:
    """Adam of the indexers, no weight decay."""
    return schedule.adamw(lambda name, leaf: False, weight_decay=0.0)


def make_step(graphdef: nnx.GraphDef) -> Any:
    """The jitted training step.

    Its arguments are (indexers, state, params in the compute dtype, tokens int32[B, T], rate float32[]); it
    donates the first two and returns (indexers, state, KL float32[full layers]).
    """
    chain, dtype = optimiser(), modules.compute_dtype()

    def loss(indexers: dict[str, jax.Array], params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        compute = merge_indexers(params, {name: leaf.astype(dtype) for name, leaf in indexers.items()})
        values = indexer_losses(graphdef, compute, tokens)
        return jnp.sum(values), values

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(indexers: Any, state: Any, params: Any, tokens: jax.Array, rate: jax.Array) -> Any:
        (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(indexers, params, tokens)
        indexers, state = schedule.apply(chain, indexers, state, gradients, rate)
        return indexers, state, values

    return step


def compile_step(sizes: DemoSizes, config: Glm5Config) -> Any:
    """`make_step`, compiled from shapes."""
    graphdef, masters = modules.abstract_target(config)
    _, params = modules.abstract_target(config, compute=True)
    indexers = split_indexers(masters)
    state = jax.eval_shape(optimiser().init, indexers)
    tokens = jax.ShapeDtypeStruct((sizes.indexer_batch, sizes.target_context), np.int32)
    rate = jax.ShapeDtypeStruct((), np.float32)
    return make_step(graphdef).lower(indexers, state, params, tokens, rate).compile()


def train(
    sizes: DemoSizes,
    graphdef: nnx.GraphDef,
    params: Any,
    batches: Iterator[np.ndarray],
    clock: Clock,
    log: Log,
    *,
    step: Any = None,
) -> Any:
    """Trains the indexers until the clock is done and returns the float32 parameters, the rest unchanged.

    Args:
      sizes: batch size and rate.
      graphdef: of the target.
      params: float32 parameters.
      batches: token windows [B, T].
      clock: of the stage; it starts after the first step.
      log: gets a line every few seconds.
      step: of `compile_step`, or None.
    """
    if step is None:
        step = make_step(graphdef)
    frozen = modules.to_compute(params)
    indexers = jax.tree.map(jnp.copy, split_indexers(params))
    state = jax.jit(optimiser().init)(indexers)
    steps, last_log, previous = 0, -1e9, None
    while not clock.done:
        rate = schedule.learning_rate(
            clock.fraction, steps, peak=sizes.indexer_learning_rate, warmup_steps=20, flat=FLAT_SHARE
        )
        tokens = next(batches).astype(np.int32)
        indexers, state, values = step(indexers, state, frozen, tokens, np.float32(rate))
        steps += 1
        jax.block_until_ready(values if previous is None else previous)
        previous = values
        clock.start()
        if clock.elapsed - last_log >= min(10.0, clock.seconds / 2):
            last_log = clock.elapsed
            log(
                "indexer",
                steps=steps,
                seconds=last_log,
                kl=[round(float(v), 4) for v in jax.device_get(values)],
            )
    log(
        "indexer",
        steps=steps,
        seconds=clock.elapsed,
        kl=[round(float(v), 4) for v in jax.device_get(previous)],
    )
    return merge_indexers(params, indexers)
