"""Where the time of a round goes: each stage as a program of its own, on a real state of the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.models.cache import Cache, write_rows, write_states
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import AcceptedPath, accept, ancestor_mask, gather_rows, positions, root_tree

OUTSIDE_MODELS = ("build", "mask", "accept", "commit")


def _median_ms(function: Callable[..., Any], *args: Any, repeats: int) -> float:
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def round_breakdown(
    engine: Engine,
    algorithm: SpeculativeAlgorithm | str,
    budget: int,
    batch: int = 1,
    *,
    prompt_tokens: int = 128,
    max_new_tokens: int = 96,
    repeats: int = 20,
) -> dict[str, float]:
    """Milliseconds of each stage of a greedy round, medians of `repeats` calls, each stage compiled by itself.

    Keys: draft (drafter and head), context (drafter keys and values of the committed tokens), build, mask (ancestor
    mask and positions), verify (target), accept (argmax and walk), commit (gather and write to the cache), outside
    (build + mask + accept + commit: what a round costs besides the two models), round (the whole as one program, as
    `stream` runs it). Stages an algorithm lacks are 0.0. Programs of their own pay a launch each, so the stages add up
    to more than the round.
    """
    member = SpeculativeAlgorithm.parse(algorithm)
    plan, weights = decoding.make_plan(engine, member, budget, "greedy")
    state, sampling = random_state(engine, plan, weights, batch, prompt_tokens, max_new_tokens)
    empty = jnp.zeros((0,), jnp.int32)

    def functions(weights: decoding.Weights) -> Any:
        return decoding.round_functions(plan, weights, sampling)

    times = dict.fromkeys(("draft", "context", "build", "mask", "verify", "accept", "commit"), 0.0)
    if plan.drafter is not None:
        draft = jax.jit(lambda w, s: functions(w).draft(s.draft_cache, s.root_token_ids, s.lengths))
        times["draft"] = _median_ms(draft, weights, state, repeats=repeats)
        logits = draft(weights, state)
        build = jax.jit(lambda w, x, s: functions(w).build(x, s.root_token_ids))
        times["build"] = _median_ms(build, weights, logits, state, repeats=repeats)
        tree = build(weights, logits, state)
    else:
        tree = root_tree(state.root_token_ids)
    depth = min(plan.max_depth, tree.num_slots - 1)
    mask_of = jax.jit(lambda t, s: (ancestor_mask(t, max_depth=depth), positions(t, s.lengths)))
    times["mask"] = _median_ms(mask_of, tree, state, repeats=repeats)
    mask, at = mask_of(tree, state)
    verify = jax.jit(lambda w, s, t, p, m: functions(w).verify(s.cache, t.token_ids, p, m))
    times["verify"] = _median_ms(verify, weights, state, tree, at, mask, repeats=repeats)
    verified = verify(weights, state, tree, at, mask)

    def walk(w: decoding.Weights, v: Any, t: Any, s: Any) -> Any:
        return accept(t, functions(w).choose(v.logits, t.depths, s.emitted), max_depth=plan.max_depth)

    walk = jax.jit(walk)
    times["accept"] = _median_ms(walk, weights, verified, tree, state, repeats=repeats)
    path = walk(weights, verified, tree, state)
    # A real round donates the caches: each call writes into a copy that was made off the clock.
    copy = jax.jit(lambda c: jax.tree.map(jnp.copy, c))
    write = jax.jit(_commit, donate_argnums=0)
    times["commit"] = _donated_ms(write, copy, state.cache, verified.rows, verified.states, path, repeats=repeats)
    if plan.drafter is not None:
        context = jax.jit(_context(plan))
        times["context"] = _median_ms(context, weights, verified.features, path, state.lengths, repeats=repeats)
    times["outside"] = sum(times[name] for name in OUTSIDE_MODELS)

    def one_round(own: Any) -> Any:
        return decoding.round_step(plan, weights, own, sampling, empty)

    times["round"] = _donated_ms(one_round, copy, state, repeats=repeats)
    return times


def _commit(cache: Cache, rows: Any, states: Any, path: AcceptedPath) -> Cache:
    written = write_rows(cache, gather_rows(rows, path.node_ids, node_axis=2, batch_axis=1), path.length)
    return write_states(written, states, path.length, path.node_ids)


def _context(plan: decoding.Plan) -> Callable[..., Any]:
    def context(weights: decoding.Weights, features: Any, path: Any, lengths: jax.Array) -> Any:
        rows = gather_rows(features, path.node_ids, node_axis=1, batch_axis=0)
        at = lengths[:, None] + jnp.arange(path.node_ids.shape[1], dtype=jnp.int32)[None]
        return plan.drafter.merge(weights.drafter).context_rows(rows, at)

    return context


def random_state(
    engine: Engine, plan: decoding.Plan, weights: decoding.Weights, batch: int, prompt_tokens: int, new: int
) -> tuple[Any, SamplingParams]:
    """A state after prefill of random prompts."""
    ids = np.random.default_rng(0).integers(0, engine.target.config.vocab_size, (batch, prompt_tokens), np.int32)
    capacity = decoding.cache_capacity(prompt_tokens, new, plan.draft_depth)
    state = decoding.prefill(plan, weights, ids.tolist(), capacity)
    sampling = SamplingParams.create(batch)
    stop = jnp.zeros((0,), jnp.int32)
    limits = jnp.full((batch,), new, jnp.int32)
    prompt = (state.cache, state.draft_cache, state.hidden)
    return decoding.first_token(plan.for_prefill(), weights, *prompt, sampling, stop, limits), sampling


def _donated_ms(
    function: Callable[..., Any], copy: Callable[[Any], Any], donated: Any, *args: Any, repeats: int
) -> float:
    """As `_median_ms` for a function that donates its first argument: each call gets a copy, made off the clock."""
    times = []
    for i in range(repeats + 1):
        own = jax.block_until_ready(copy(donated))
        start = time.perf_counter()
        jax.block_until_ready(function(own, *args))
        if i > 0:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3
