"""Training of the target: next tokens, dense causal attention, balanced experts, against the clock."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.glm5 import Glm5

from . import modules, schedule
from .schedule import Clock, Log
from .sizes import DemoSizes

WEIGHT_DECAY = 0.1
BALANCE_RATE = 1e-3
FLAT_SHARE = 0.35


def _is_decayed(name: str, leaf: jax.Array) -> bool:
    """Matrices only; the indexers get no gradient here and must not shrink."""
    del leaf
    last = name.split("/")[-1]
    return last in ("kernel", "k_b", "v_b", "gate_up", "down", "router") and "indexer" not in name


def optimiser() -> optax.GradientTransformation:
    """AdamW of the target."""
    return schedule.adamw(_is_decayed, weight_decay=WEIGHT_DECAY)


def run_target(graphdef: nnx.GraphDef, params: Any, inputs: jax.Array, *, sparse: bool) -> tuple[Glm5, Any]:
    """One causal pass over int32[B, T] with parameters in the compute dtype: (model, BlockOutput)."""
    model = nnx.merge(graphdef, params)
    batch, length = inputs.shape
    positions, mask = modules.causal_inputs(batch, length)
    implementation = None if sparse else modules.causal_implementation()
    output = model(
        inputs,
        positions,
        mask,
        sparse=sparse,
        keep_rows=False,
        with_router_load=True,
        causal_implementation=implementation,
    )
    return model, output


def next_token_losses(
    graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, *, sparse: bool
) -> tuple[jax.Array, jax.Array]:
    """Losses float32[B * T] of tokens int32[B, T + 1] and the router loads float32[MoE layers, E]."""
    model, output = run_target(graphdef, params, tokens[:, :-1], sparse=sparse)
    hidden = model.norm(output.hidden)
    labels = tokens[:, 1:].reshape(-1)
    losses = modules.token_losses(hidden.reshape(len(labels), -1), model.head.kernel[...], labels)
    return losses, output.router_load


def balance(config: Glm5Config, graphdef: nnx.GraphDef, params: Any, load: jax.Array, rate: jax.Array) -> Any:
    """Moves every selection bias by `rate` towards equal loads.

    Args:
      config: of the target.
      graphdef: its graph, for the places of the layers.
      params: parameters.
      load: float32[MoE layers, E], the share of tokens that chose each expert.
      rate: float32[].

    Returns:
      The parameters with new selection biases.
    """
    plan = nnx.merge(graphdef, params).plan
    sparse_layers = [i for i, kind in enumerate(config.mlp_layer_types) if kind == "sparse"]
    step = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)

    def move(name: str, leaf: jax.Array) -> jax.Array:
        parts = name.split("/")
        if parts[-1] != "router_bias":
            return leaf
        segment, place = plan[int(parts[1])], int(parts[3])
        rows = [sparse_layers.index(segment.layer_index(place, r)) for r in range(segment.repeats)]
        return leaf + step[jnp.asarray(rows)]

    return schedule.map_named(move, params)


def make_chunk(config: Glm5Config, graphdef: nnx.GraphDef, *, sparse: bool = False) -> Any:
    """The jitted function of several training steps.

    Its arguments are (params, state, tokens [K, B, T + 1], rates float32[K], balance_rate float32[]); it
    donates the first two and returns (params, state, metrics).
    """
    chain = optimiser()
    dtype = modules.compute_dtype()

    def loss(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        compute = modules.cast(params, dtype, keep=("embed",))
        losses, load = next_token_losses(graphdef, compute, tokens, sparse=sparse)
        return jnp.mean(losses), load

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def chunk(params: Any, state: Any, tokens: jax.Array, rates: jax.Array, balance_rate: jax.Array) -> Any:
        def step(carry: Any, inputs: Any) -> Any:
            params, state = carry
            batch, rate = inputs
            (value, load), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch.astype(jnp.int32))
            norm = optax.global_norm(gradients)
            params, state = schedule.apply(chain, params, state, gradients, rate)
            params = balance(config, graphdef, params, load, balance_rate)
            return (params, state), (value, norm, jnp.min(load), jnp.max(load))

        (params, state), (losses, norms, low, high) = jax.lax.scan(step, (params, state), (tokens, rates))
        metrics = {
            "loss": jnp.mean(losses),
            "gradient_norm": jnp.mean(norms),
            "min_load": jnp.min(low),
            "max_load": jnp.max(high),
        }
        return params, state, metrics

    return chunk


def compile_chunk(sizes: DemoSizes, config: Glm5Config, *, sparse: bool = False) -> Any:
    """The compiled chunk of `make_chunk`, from shapes alone."""
    graphdef, params = modules.abstract_target(config)
    state = jax.eval_shape(optimiser().init, params)
    steps = sizes.chunk_steps
    batch = sizes.sparse_batch if sparse else sizes.target_batch
    tokens = jax.ShapeDtypeStruct((steps, batch, sizes.target_context + 1), np.uint16)
    rates, rate = jax.ShapeDtypeStruct((steps,), np.float32), jax.ShapeDtypeStruct((), np.float32)
    return make_chunk(config, graphdef, sparse=sparse).lower(params, state, tokens, rates, rate).compile()


def make_evaluate(graphdef: nnx.GraphDef, *, sparse: bool) -> Any:
    """A jitted function (params in the compute dtype, tokens int32[B, T + 1]) -> mean loss float32[]."""

    @jax.jit
    def evaluate(params: Any, tokens: jax.Array) -> jax.Array:
        return jnp.mean(next_token_losses(graphdef, params, tokens, sparse=sparse)[0])

    return evaluate


def compile_evaluate(sizes: DemoSizes, config: Glm5Config) -> Any:
    """`make_evaluate` of the dense target, compiled from shapes."""
    graphdef, params = modules.abstract_target(config, compute=True)
    tokens = jax.ShapeDtypeStruct((sizes.indexer_batch, sizes.target_context + 1), np.int32)
    return make_evaluate(graphdef, sparse=False).lower(params, tokens).compile()


def heldout_loss(
    evaluate: Any, params: Any, tokens: np.ndarray, *, length: int, batch: int, max_batches: int = 16
) -> float:
    """Mean next-token loss in nats on consecutive windows of `length`.

    Args:
      evaluate: of `make_evaluate`.
      params: in the compute dtype.
      tokens: held-out tokens.
      length: of a window.
      batch: windows at a time.
      max_batches: limit.
    """
    count = min(max_batches * batch, (len(tokens) - 1) // length)
    if count == 0:
        raise ValueError(f"held-out text of {len(tokens)} tokens is shorter than one window of {length}")
    pieces = np.stack([tokens[i * length : i * length + length + 1] for i in range(count)]).astype(np.int32)
    pieces = np.resize(pieces, (-(-count // batch) * batch, length + 1))
    values = [evaluate(params, pieces[i : i + batch]) for i in range(0, len(pieces), batch)]
    return float(np.mean(jax.device_get(values)))


def train(
    sizes: DemoSizes,
    config: Glm5Config,
    graphdef: nnx.GraphDef,
    params: Any,
    batches: Iterator[np.ndarray],
    clock: Clock,
    log: Log,
    *,
    sparse: bool = False,
    peak: float | None = None,
    checkpoint: Path | None = None,
    stage: str = "target",
    chunk: Any = None,
) -> Any:
    """Trains until the clock is done. The clock starts after the first chunk, which compiles.

    Args:
      sizes: batch sizes and rates.
      config: of the target.
      graphdef: its graph.
      params: float32 parameters; donated.
      batches: token windows [B, T + 1].
      clock: of the stage.
      log: gets a line every few seconds.
      sparse: whether attention is restricted to the indexers' choice (a fine-tune).
      peak: learning rate; the sizes' own by default.
      checkpoint: .npz that is written now and then.
      stage: name in the log.
      chunk: of `compile_chunk`, or None.

    Returns:
      The trained float32 parameters.
    """
    if chunk is None:
        chunk = make_chunk(config, graphdef, sparse=sparse)
    state = jax.jit(optimiser().init)(params)
    peak = sizes.target_learning_rate if peak is None else peak
    steps, last_log, last_save, previous = 0, 0.0, 0.0, None
    tokens_per_step = 0
    while not clock.done:
        group = np.stack([next(batches) for _ in range(sizes.chunk_steps)])
        tokens_per_step = group.shape[1] * (group.shape[2] - 1)
        rates = [
            schedule.learning_rate(
                clock.fraction, steps + i, peak=peak, warmup_steps=sizes.target_warmup_steps, flat=FLAT_SHARE
            )
            for i in range(sizes.chunk_steps)
        ]
        balance_rate = np.float32(BALANCE_RATE * (1.0 - clock.fraction))
        params, state, metrics = chunk(params, state, group, np.asarray(rates, np.float32), balance_rate)
        steps += sizes.chunk_steps
        # One chunk stays in flight: the host prepares the next while the device works, yet cannot run ahead.
        if previous is not None or clock.started is None:
            jax.block_until_ready(metrics if previous is None else previous)
        if clock.started is None:
            log(stage, compiled=True, parameters=sum(x.size for x in jax.tree.leaves(params)))
            clock.start()
            first = steps
        previous = metrics
        if clock.elapsed - last_log >= min(10.0, clock.seconds / 4):
            last_log = clock.elapsed
            values = {k: float(v) for k, v in jax.device_get(metrics).items()}
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(f"{stage}: the loss is {values['loss']} after {steps} steps")
            speed = (steps - first) * tokens_per_step / clock.elapsed
            log(stage, steps=steps, seconds=last_log, tokens_per_second=speed, rate=rates[-1], **values)
        if checkpoint is not None and clock.elapsed - last_save >= 90:
            last_save = clock.elapsed
            schedule.save_tree(checkpoint, params)
    jax.block_until_ready(params)
    log(stage, steps=steps, tokens=steps * tokens_per_step, seconds=clock.elapsed)
    return params
