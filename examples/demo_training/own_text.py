"""Text that the target writes itself: what the drafter is trained on, and the held-out continuations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models.cache import write_rows
from ddtree_jax.models.config import Glm5Config

from . import modules, tokens
from .schedule import Clock, Log
from .sizes import DemoSizes


def make_writer(graphdef: nnx.GraphDef, total_length: int) -> Callable[..., jax.Array]:
    """A jitted function that continues prompts to `total_length` tokens.

    Its arguments are (params in the compute dtype, prompts int32[B, P], temperatures float32[B], key); it
    returns int32[B, total_length], the prompts included. Rows of temperature 0 are greedy. It compiles once a
    prompt length.
    """

    @jax.jit
    def write(params: Any, prompts: jax.Array, temperatures: jax.Array, key: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        batch, start = prompts.shape
        positions, mask = modules.causal_inputs(batch, start)

        def choose(hidden: jax.Array, index: jax.Array) -> jax.Array:
            logits = model.logits(hidden)
            noise = jax.random.gumbel(jax.random.fold_in(key, index), logits.shape)
            return jnp.argmax(logits + temperatures[:, None] * noise, axis=-1).astype(jnp.int32)

        # Without a cache first: an empty cache's columns would be scored by the indexers for nothing.
        output = model(prompts, positions, mask)
        cache = model.empty_cache(batch, total_length)
        cache = write_rows(cache, output.rows, jnp.full((batch,), start, jnp.int32))
        text = jnp.zeros((batch, total_length), jnp.int32)
        text = jax.lax.dynamic_update_slice(text, prompts, (0, 0))
        text = text.at[:, start].set(choose(output.hidden[:, -1], jnp.int32(start)))

        def step(index: jax.Array, carry: Any) -> Any:
            cache, text = carry
            current = jax.lax.dynamic_slice_in_dim(text, index, 1, axis=1)
            here = jnp.full((batch, 1), index, jnp.int32)
            output = model(current, here, jnp.ones((batch, 1, 1), bool), cache, absorbed=True)
            cache = write_rows(cache, output.rows, jnp.ones((batch,), jnp.int32))
            following = choose(output.hidden[:, 0], index + 1)
            return cache, jax.lax.dynamic_update_slice_in_dim(text, following[:, None], index + 1, axis=1)

        return jax.lax.fori_loop(start, total_length - 1, step, (cache, text))[1]

    return write


def compile_writer(sizes: DemoSizes, config: Glm5Config, prompt_length: int) -> Any:
    """`make_writer` for prompts of one length, compiled from shapes."""
    graphdef, params = modules.abstract_target(config, compute=True)
    prompts = jax.ShapeDtypeStruct((sizes.own_batch, prompt_length), np.int32)
    temperatures = jax.ShapeDtypeStruct((sizes.own_batch,), np.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return make_writer(graphdef, sizes.own_length).lower(params, prompts, temperatures, key).compile()


def draw_prompts(
    train: np.ndarray, starts: np.ndarray, length: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Prompts int32[count, length] from the training text: half at line starts (column 0), half anywhere."""
    last = len(train) - length
    usable = starts[: np.searchsorted(starts, last, side="right")]
    at_lines = rng.choice(usable, count // 2) if len(usable) else rng.integers(0, last + 1, count // 2)
    anywhere = rng.integers(0, last + 1, count - count // 2)
    chosen = rng.permutation(np.concatenate([at_lines, anywhere]))
    return train[chosen[:, None] + np.arange(length)[None]].astype(np.int32)


def write_texts(
    sizes: DemoSizes,
    graphdef: nnx.GraphDef,
    params: Any,
    train: np.ndarray,
    ends_line: np.ndarray,
    heldout_prompts: np.ndarray,
    clock: Clock,
    log: Log,
    *,
    compiled: Callable[[int], Any] = lambda length: None,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Writes batches of text until the clock is done or there is enough.

    Args:
      sizes: batch, lengths, share of greedy text.
      graphdef: of the target.
      params: its float32 parameters, already rounded to bfloat16 values.
      train: training tokens.
      ends_line: bool[V], tokens that end a line (`tokens.newline_ids`).
      heldout_prompts: int32[P, prompt length]; continued greedily with the same compiled function.
      clock: of the stage; it starts after the compilation for every prompt length.
      log: gets a line a batch.
      compiled: prompt length -> result of `compile_writer`, or None.

    Returns:
      `{"tokens": [n, length], "prompt_lengths": int32[n], "greedy": bool[n]}` and the greedy continuations of
      the held-out prompts, [P, length] with the prompts.
    """
    rng = np.random.default_rng(sizes.seed + 3)
    starts = tokens.line_starts(train, ends_line)
    compute = modules.to_compute(params)
    general = make_writer(graphdef, sizes.own_length)
    lengths_used = {heldout_prompts.shape[1], *sizes.own_prompt_lengths}
    writers = {length: compiled(length) or general for length in lengths_used}
    key = jax.random.key(sizes.seed + 4)
    batch = sizes.own_batch
    zeros = np.zeros(batch, np.float32)

    # Held-out prompts first, tiled to the common batch size, so that nothing else is compiled for them.
    count = len(heldout_prompts)
    tiled = np.resize(heldout_prompts, (batch, heldout_prompts.shape[1])).astype(np.int32)
    heldout = np.asarray(writers[tiled.shape[1]](compute, tiled, zeros, key))[:count]
    for length in sorted(lengths_used - {tiled.shape[1]}):
        jax.block_until_ready(writers[length](compute, draw_prompts(train, starts, length, batch, rng), zeros, key))
    log("own_text", compiled=True)
    clock.start()

    num_greedy = round(batch * sizes.own_greedy_share)
    temperatures = np.concatenate([np.zeros(num_greedy), np.ones(batch - num_greedy)]).astype(np.float32)
    parts, lengths, new_tokens, index = [], [], 0, 0
    pending = None
    while not clock.done and new_tokens < sizes.own_max_tokens:
        length = sizes.own_prompt_lengths[index % len(sizes.own_prompt_lengths)]
        prompts = draw_prompts(train, starts, length, batch, rng)
        index += 1
        result = writers[length](compute, prompts, temperatures, jax.random.fold_in(key, index))
        if pending is not None:
            parts.append(np.asarray(pending).astype(train.dtype))
        pending = result
        lengths.append(length)
        new_tokens += batch * (sizes.own_length - length)
        log("own_text", batches=index, new_tokens=new_tokens, seconds=clock.elapsed)
    if pending is not None:
        parts.append(np.asarray(pending).astype(train.dtype))
    log("own_text", new_tokens=new_tokens, seconds=clock.elapsed, tokens_per_second=new_tokens / clock.elapsed)
    texts = {
        "tokens": np.concatenate(parts),
        "prompt_lengths": np.repeat(np.asarray(lengths, np.int32), batch),
        "greedy": np.tile(temperatures == 0, len(parts)),
    }
    return texts, heldout.astype(train.dtype)
