"""Training of the DFlash drafter on text that the frozen target wrote.

A training row is one anchor of a sequence: the token at the anchor is the root, the context is what lies
strictly before it, and the block's rows 1.. predict the sequence's own next tokens (no shift: row r predicts
the token at anchor + r). All anchors of a sequence go through the network at once; blocks do not see each
other. The candidate selector of a DFlash2 drafter learns from the same rows, below the text's own tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.pallas.vocab_topk import vocab_topk

from . import modules, schedule
from .schedule import Clock, Log
from .sizes import DemoSizes

WEIGHT_DECAY = 0.05
FLAT_SHARE = 0.3


def _is_decayed(name: str, leaf: jax.Array) -> bool:
    del leaf
    return name.split("/")[-1] == "kernel"


def optimiser() -> optax.GradientTransformation:
    """AdamW of the drafter."""
    return schedule.adamw(_is_decayed, weight_decay=WEIGHT_DECAY)


def draw_anchors(key: jax.Array, prompt_lengths: jax.Array, length: int, count: int, depth: int) -> jax.Array:
    """Anchors int32[B, count]: one in each of `count` equal parts of the text that the target wrote.

    An anchor is at least the prompt's length (its label is then the target's own choice) and leaves `depth`
    tokens after it.

    Args:
      key: random key.
      prompt_lengths: int32[B].
      length: of the sequences.
      count: anchors a sequence.
      depth: drafted positions.
    """
    places = (length - depth - prompt_lengths).astype(jnp.float32)
    parts = jnp.arange(count, dtype=jnp.float32)[None] + jax.random.uniform(key, (len(prompt_lengths), count))
    offsets = jnp.floor(parts / count * places[:, None]).astype(jnp.int32)
    return prompt_lengths[:, None] + jnp.minimum(offsets, (length - depth - 1 - prompt_lengths)[:, None])


def block_hidden(
    drafter: DFlash,
    embed: Callable[[jax.Array], jax.Array],
    features: jax.Array,
    tokens: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Drafts a block at every anchor of every sequence.

    Args:
      drafter: the drafter.
      embed: the target's embedding, int32[...] -> [..., D].
      features: [B, T, taps * D] of the target.
      tokens: int32[B, T].
      anchors: int32[B, A].

    Returns:
      [B, A, L, D] after the drafter's final norm: rows 1.. of each block, ready for the target's head.
    """
    config = drafter.config
    batch, length = tokens.shape
    count, block = anchors.shape[1], config.block_size
    context_positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    context = drafter.context_rows(features, context_positions)
    roots = jnp.take_along_axis(tokens, anchors, axis=1)
    masks = jnp.full((batch, count, block - 1), config.mask_token_id, jnp.int32)
    ids = jnp.concatenate([roots[:, :, None], masks], axis=-1)
    positions = anchors[:, :, None] + jnp.arange(block, dtype=jnp.int32)[None, None]
    starts = jnp.repeat(anchors, block, axis=1)
    context_mask = context_positions[:, None, :] < starts[:, :, None]
    owner = jnp.repeat(jnp.arange(count), block)
    same_block = jnp.broadcast_to((owner[:, None] == owner[None, :])[None], (batch, count * block, count * block))
    flat = (batch, count * block)
    hidden = drafter.block_hidden(
        embed(ids.reshape(flat)),
        positions.reshape(flat),
        context,
        context_positions,
        context_mask,
        same_block,
    )
    return hidden.reshape(batch, count, block, -1)[:, :, 1:]


def target_pass(graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, taps: tuple[int, ...]) -> tuple[Any, Any]:
    """The frozen target as it decodes (sparse attention) over int32[B, T]. Returns (model, BlockOutput)."""
    model = nnx.merge(graphdef, params)
    positions, mask = modules.causal_inputs(*tokens.shape)
    return model, model(tokens, positions, mask, layer_ids=taps, keep_rows=False)


def selector_losses(
    drafter: DFlash, logits: jax.Array, hidden: jax.Array, roots: jax.Array, labels: jax.Array
) -> jax.Array:
    """Cross-entropy of the candidate selector over each row's candidates, given the text's token above.

    The candidates and their logits are as the drafter gives them: the block's own loss trains those.

    Args:
      drafter: of DFlash2.
      logits: float32[B, A, L, V], scaled.
      hidden: [B, A, L, D] of `block_hidden`.
      roots: int32[B, A].
      labels: int32[B, A, L].

    Returns:
      float32[B, A, L]; 0 where the label is no candidate.
    """
    batch, count, depth = labels.shape
    flat = (batch * count, depth)
    labels = labels.reshape(flat)
    best = vocab_topk(jax.lax.stop_gradient(logits).reshape(*flat, -1), drafter.selector.top_k)
    parents = jnp.concatenate([roots.reshape(-1, 1), labels[:, :-1]], axis=1)[:, :, None]
    hidden = hidden.reshape(*flat, -1)
    scores = drafter.selector.scores(hidden, best.values, best.token_ids, parents)[:, :, 0]
    is_label = best.token_ids == labels[:, :, None]
    losses = -jnp.sum(jnp.where(is_label, jax.nn.log_softmax(scores, axis=-1), 0.0), axis=-1)
    return losses.reshape(batch, count, depth)


def anchor_loss(
    sizes: DemoSizes,
    target_graphdef: nnx.GraphDef,
    target_params: Any,
    drafter: DFlash,
    tokens: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Weighted cross-entropy of all drafted rows, float32[]; a candidate selector adds its own.

    Args:
      sizes: gamma of the row weights and the weight of the soft labels.
      target_graphdef: of the target.
      target_params: in the compute dtype; no gradient reaches them.
      drafter: the drafter being trained.
      tokens: int32[B, T].
      anchors: int32[B, A].
    """
    depth = drafter.config.draft_depth
    target, output = target_pass(target_graphdef, target_params, tokens, drafter.config.target_layer_ids)
    features = jax.lax.stop_gradient(output.features)
    hidden = block_hidden(drafter, target.embed_tokens, features, tokens, anchors)
    rows = jnp.arange(1, depth + 1, dtype=jnp.int32)
    places = anchors[:, :, None] + rows[None, None]
    labels = jnp.take_along_axis(tokens, places.reshape(tokens.shape[0], -1), axis=1).reshape(-1)
    kernel = jax.lax.stop_gradient(target.head.kernel[...])
    losses = modules.token_losses(hidden.reshape(len(labels), -1), kernel, labels).reshape(places.shape)
    if sizes.soft_label_weight > 0:
        logits = jax.lax.stop_gradient(target.logits(output.hidden))
        before = (places - 1).reshape(tokens.shape[0], -1)
        wanted = jax.nn.softmax(jnp.take_along_axis(logits, before[:, :, None], axis=1), axis=-1)
        drafted = jax.nn.log_softmax(target.head_logits(hidden), axis=-1)
        soft = -jnp.sum(wanted.reshape(drafted.shape) * drafted, axis=-1)
        losses = (1 - sizes.soft_label_weight) * losses + sizes.soft_label_weight * soft
    if drafter.selector is not None:
        # In the drafter's own scale, as decoding sees them.
        logits = drafter.scale_logits(target.head_logits(jax.lax.stop_gradient(hidden)))
        roots = jnp.take_along_axis(tokens, anchors, axis=1)
        losses += selector_losses(drafter, logits, hidden, roots, labels.reshape(places.shape))
    weights = jnp.exp(-(rows - 1).astype(jnp.float32) / sizes.draft_gamma)
    weights = weights / jnp.sum(weights)
    return jnp.mean(jnp.sum(losses * weights[None, None], axis=-1))


def make_chunk(sizes: DemoSizes, target_graphdef: nnx.GraphDef, drafter_graphdef: nnx.GraphDef) -> Callable[..., Any]:
    """The jitted function of several steps.

    Its arguments are (params, state, target_params, tokens [K, B, T], prompt_lengths int32[K, B], rates
    float32[K], key); it donates the first two and returns (params, state, metrics).
    """
    chain = optimiser()
    dtype = modules.compute_dtype()
    depth = sizes.block_size - 1

    def loss(params: Any, target_params: Any, tokens: jax.Array, anchors: jax.Array) -> jax.Array:
        drafter = nnx.merge(drafter_graphdef, modules.cast(params, dtype))
        return anchor_loss(sizes, target_graphdef, target_params, drafter, tokens, anchors)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def chunk(
        params: Any,
        state: Any,
        target_params: Any,
        tokens: jax.Array,
        lengths: jax.Array,
        rates: jax.Array,
        key: jax.Array,
    ) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, state = carry
            batch, prompt_lengths, rate, key = inputs
            anchors = draw_anchors(key, prompt_lengths, batch.shape[1], sizes.anchors, depth)
            value, gradients = jax.value_and_grad(loss)(params, target_params, batch.astype(jnp.int32), anchors)
            norm = optax.global_norm(gradients)
            params, state = schedule.apply(chain, params, state, gradients, rate)
            return (params, state), (value, norm)

        keys = jax.random.split(key, len(rates))
        (params, state), (losses, norms) = jax.lax.scan(step, (params, state), (tokens, lengths, rates, keys))
        return params, state, {"loss": jnp.mean(losses), "gradient_norm": jnp.mean(norms)}

    return chunk


def compile_chunk(sizes: DemoSizes, target_config: Glm5Config, config: DFlashConfig, token_dtype: Any) -> Any:
    """`make_chunk`, compiled from shapes."""
    target_graphdef, target_params = modules.abstract_target(target_config, compute=True)
    graphdef, params = modules.abstract_drafter(config, target_config.hidden_size)
    state = jax.eval_shape(optimiser().init, params)
    shape = (sizes.chunk_steps, sizes.draft_batch)
    return (
        make_chunk(sizes, target_graphdef, graphdef)
        .lower(
            params,
            state,
            target_params,
            jax.ShapeDtypeStruct((*shape, sizes.own_length), token_dtype),
            jax.ShapeDtypeStruct(shape, np.int32),
            jax.ShapeDtypeStruct(shape[:1], np.float32),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        .compile()
    )


def train(
    sizes: DemoSizes,
    target_graphdef: nnx.GraphDef,
    target_params: Any,
    drafter_graphdef: nnx.GraphDef,
    params: Any,
    texts: dict[str, np.ndarray],
    clock: Clock,
    log: Log,
    *,
    check: Callable[[Any], dict] | None = None,
    check_every: float = 60.0,
    checkpoint: Path | None = None,
    chunk: Any = None,
) -> Any:
    """Trains until the clock is done and returns the float32 parameters.

    Args:
      sizes: batch sizes and rates.
      target_graphdef: of the target.
      target_params: float32 parameters, rounded to bfloat16 values.
      drafter_graphdef: of the drafter.
      params: its float32 parameters; donated.
      texts: of `own_text.write_texts`.
      clock: of the stage; it starts after the first chunk.
      log: gets a line every few seconds.
      check: measures held-out acceptance of parameters; its values go to the log.
      check_every: seconds between two checks.
      checkpoint: .npz that is written at every check.
      chunk: of `compile_chunk`, or None.
    """
    if chunk is None:
        chunk = make_chunk(sizes, target_graphdef, drafter_graphdef)
    frozen = modules.to_compute(target_params)
    state = jax.jit(optimiser().init)(params)
    rng = np.random.default_rng(sizes.seed + 5)
    key = jax.random.key(sizes.seed + 6)
    count = len(texts["tokens"])
    order = np.zeros(0, np.int64)
    need = sizes.chunk_steps * sizes.draft_batch
    steps, first, last_log, last_check, previous = 0, 0, 0.0, 0.0, None
    while not clock.done:
        while len(order) < need:
            order = np.concatenate([order, rng.permutation(count)])
        chosen, order = order[:need].reshape(sizes.chunk_steps, sizes.draft_batch), order[need:]
        rates = [
            schedule.learning_rate(
                clock.fraction,
                steps + i,
                peak=sizes.draft_learning_rate,
                warmup_steps=sizes.draft_warmup_steps,
                flat=FLAT_SHARE,
            )
            for i in range(sizes.chunk_steps)
        ]
        params, state, metrics = chunk(
            params,
            state,
            frozen,
            texts["tokens"][chosen],
            texts["prompt_lengths"][chosen],
            np.asarray(rates, np.float32),
            jax.random.fold_in(key, steps),
        )
        steps += sizes.chunk_steps
        jax.block_until_ready(metrics if previous is None else previous)
        if clock.started is None:
            log("drafter", compiled=True, parameters=sum(x.size for x in jax.tree.leaves(params)))
            if check is not None:
                check(params)
            clock.start()
            first = steps
        previous = metrics
        if clock.elapsed - last_log >= min(10.0, clock.seconds / 4):
            last_log = clock.elapsed
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"drafter: the loss is {values['loss']} after {steps} steps")
            speed = (steps - first) / clock.elapsed
            log("drafter", steps=steps, seconds=last_log, steps_per_second=speed, rate=rates[-1], **values)
        if clock.elapsed - last_check >= check_every:
            last_check = clock.elapsed
            if checkpoint is not None:
                schedule.save_tree(checkpoint, params)
            if check is not None:
                log("drafter", steps=steps, seconds=last_check, **check(params))
    jax.block_until_ready(params)
    log("drafter", steps=steps, sequences=steps * sizes.draft_batch, seconds=clock.elapsed)
    return params
