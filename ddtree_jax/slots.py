"""Device programs over slots: fixed places in the caches, which sequences take and leave between rounds.

A server keeps one `Pool` for all its requests. Which sequence lies in which slot, and everything else about it (newest
token, counts, sampling, grammar), the host keeps, and tells each program: the pool holds cache rows and lengths and
nothing else, so a slot that is opened anew shows nothing of the sequence before.

A round is three programs, launched one behind the other: `draft_slots`, `verify_slots`, `finish_slots`. Between the
first two the host may filter drafts by grammars, and while the target runs it works grammar rows out. The first two
read `extent` positions of the sequences in the round and no more, so short sequences do not pay for the capacity.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.decoding import Plan, Weights, filter_candidates, round_functions
from ddtree_jax.models.cache import Cache, take_slots, write_rows, write_states
from ddtree_jax.models.glm5 import causal_mask
from ddtree_jax.models.sharding import settle
from ddtree_jax.sampling import SamplingParams, choose_tokens, key_from_seed
from ddtree_jax.tree import (
    DraftTree,
    RoundState,
    Verified,
    draft_proposal,
    draft_tree,
    finish_round,
    mask_logits,
    verify_tree,
)

FIRST_EXTENT, EXTENT_FACTOR = 256, 4
SAMPLING_MODE = "mixed"  # one program for greedy and sampled sequences; see `sampling.choose_tokens`


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """The caches of all slots; `draft_cache`, None where the algorithm drafts nothing, has the lengths of the other."""

    cache: Cache
    draft_cache: Cache | None

    @property
    def num_slots(self) -> int:
        return self.cache.lengths.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotSampling:
    """`SamplingParams` as host arrays; key_data is uint32[W, 2], from `key_words`."""

    temperature: Any  # float32[W]
    top_k: Any  # int32[W], 0 = off
    top_p: Any  # float32[W], 1 = off
    min_p: Any  # float32[W], 0 = off
    key_data: Any  # uint32[W, 2]

    def params(self) -> SamplingParams:
        keys = jax.random.wrap_key_data(self.key_data, impl="threefry2x32")
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, keys)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotBatch:
    """The W sequences of a round.

    Attributes:
      slots: int32[W], distinct; None: W is the number of slots, and row i is slot i.
      root_token_ids: int32[W], newest tokens: emitted, in no cache yet.
      emitted: int32[W], new tokens so far.
      remaining: int32[W], new tokens still allowed.
      finished: bool[W], True for a row that only fills the batch. Its slot keeps its length; rows behind the length
        may be overwritten.
    """

    slots: Any
    root_token_ids: Any
    emitted: Any
    remaining: Any
    finished: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotOutput:
    """What a round emitted: fields as in `tree.RoundOutput`; num_nodes int32[W] of the trees, the roots included."""

    token_ids: jax.Array  # [W, D + 1]
    counts: jax.Array  # [W]
    acceptance_lengths: jax.Array  # [W]
    finished: jax.Array  # [W]
    num_nodes: jax.Array  # [W]


def key_words(seed: int) -> np.ndarray:
    """uint32[2]: the key that `generate` gives a sequence with this seed."""
    return np.asarray(jax.random.key_data(key_from_seed(seed)), np.uint32)


def pool_capacity(context_length: int, chunk_tokens: int, max_depth: int) -> int:
    """Cache slots S for sequences of up to `context_length` tokens: what the widest write may spill lies beyond."""
    return -(-(context_length + max(chunk_tokens, max_depth + 1)) // 64) * 64


def extents(capacity: int) -> tuple[int, ...]:
    """The extents that programs are compiled for, ascending; the last is the capacity."""
    out = [FIRST_EXTENT]
    while out[-1] < capacity:
        out.append(out[-1] * EXTENT_FACTOR)
    return (*out[:-1], capacity)


def extent_of(length: int, capacity: int) -> int:
    """The smallest extent that shows a sequence of `length` tokens."""
    return next(extent for extent in extents(capacity) if extent >= length)


@functools.partial(jax.jit, static_argnames=("plan", "num_slots", "capacity"))
def make_pool(plan: Plan, weights: Weights, num_slots: int, capacity: int) -> Pool:
    """Empty caches."""
    target = plan.target.merge(weights.target)
    drafter = None if plan.drafter is None else plan.drafter.merge(weights.drafter)
    draft_cache = None if drafter is None else drafter.empty_cache(num_slots, capacity)
    return settle(Pool(target.empty_cache(num_slots, capacity), draft_cache), target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "extent"), donate_argnames="pool")
def open_slot(
    plan: Plan, weights: Weights, pool: Pool, slot: jax.Array, length: jax.Array, source: jax.Array, extent: int
) -> Pool:
    """Starts a sequence whose first `length` tokens lie at the front of slot `source`.

    slot, length, source: int32[]. extent: static, >= length, positions to copy; 0 copies nothing: for a source that is
    the slot itself, or for length 0. Needs a target without recurrent layers if length > 0: a state is that of one
    place only.
    """

    def opened(cache: Cache | None) -> Cache | None:
        if cache is None:
            return None

        def copy(leaf: jax.Array) -> jax.Array:
            front = jax.lax.dynamic_slice_in_dim(leaf[:, :, :extent], source, 1, axis=1)
            return jax.lax.dynamic_update_slice(leaf, front, (0, slot, 0, 0))

        rows = jax.tree.map(copy, cache.rows) if extent else cache.rows
        return dataclasses.replace(cache, rows=rows, lengths=cache.lengths.at[slot].set(length))

    cache, draft_cache = opened(pool.cache), opened(pool.draft_cache)
    if cache.states is not None:
        fresh = plan.target.merge(weights.target).empty_cache(1, 1).states
        states = jax.tree.map(lambda old, new: old.at[:, slot].set(new[:, 0]), cache.states, fresh)
        cache = dataclasses.replace(cache, states=states)
    return settle(Pool(cache, draft_cache), plan.target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "extent"), donate_argnames="pool")
def prefill_slots(
    plan: Plan, weights: Weights, pool: Pool, slots: jax.Array, token_ids: jax.Array, counts: jax.Array, extent: int
) -> tuple[Pool, jax.Array]:
    """Commits the next chunk of W prompts.

    token_ids: int32[W, C], of which `counts[w]` int32 are real (1..C). extent: static, >= the lengths before.

    Returns:
      The pool, and the residual stream [W, D] at each chunk's last token, for `first_tokens`.
    """
    target = plan.target.merge(weights.target)
    w, c = token_ids.shape
    view = take_slots(pool.cache, slots, extent)
    positions = view.lengths[:, None] + jnp.arange(c, dtype=jnp.int32)[None]
    out = target(token_ids, positions, causal_mask(w, c), view, layer_ids=plan.taps)
    draft_cache = pool.draft_cache
    if plan.drafter is not None:
        context = plan.drafter.merge(weights.drafter).context_rows(out.features, positions)
        draft_cache = write_rows(draft_cache, context, counts, slots)
    cache = write_states(write_rows(pool.cache, out.rows, counts, slots), out.states, counts, slots=slots)
    hidden = jnp.take_along_axis(out.hidden, (counts - 1)[:, None, None], axis=1)[:, 0]
    return settle((Pool(cache, draft_cache), hidden), target.mesh)


@functools.partial(jax.jit, static_argnames="plan")
def first_tokens(
    plan: Plan, weights: Weights, hidden: jax.Array, sampling: SlotSampling, rows: jax.Array | None
) -> jax.Array:
    """int32[W]: the first new tokens. hidden: [W, D]; rows: int32[W, words] that grammars allow, None without one."""
    logits = plan.target.merge(weights.target).logits(hidden)[:, None]
    if rows is not None:
        logits = mask_logits(logits, rows[:, None])
    zeros = jnp.zeros((logits.shape[0],), jnp.int32)
    return choose_tokens(logits, zeros[:, None], zeros, sampling.params(), mode=plan.mode)[:, 0]


@functools.partial(jax.jit, static_argnames=("plan", "extent", "with_candidates"))
def draft_slots(
    plan: Plan, weights: Weights, pool: Pool, batch: SlotBatch, *, extent: int, with_candidates: bool
) -> tuple[DraftTree, tuple[jax.Array, jax.Array] | None]:
    """The drafter's pass: the trees, and with `with_candidates` what a grammar may filter others from.

    extent: static, >= the lengths of the batch's sequences.
    """
    view = _viewed(pool, batch, extent)
    state = _state(plan, view, batch, view.cache.lengths)
    functions = round_functions(plan, weights, None)
    proposal = draft_proposal(state, functions)
    candidates = filter_candidates(plan, proposal) if with_candidates else None
    return settle((draft_tree(state, proposal, functions), candidates), plan.target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "extent"))
def verify_slots(
    plan: Plan, weights: Weights, pool: Pool, batch: SlotBatch, tree: DraftTree, *, extent: int
) -> Verified:
    """The target's pass over the trees. extent: as for `draft_slots`."""
    view = _viewed(pool, batch, extent)
    state = _state(plan, view, batch, view.cache.lengths)
    verified = verify_tree(state, tree, round_functions(plan, weights, None), max_depth=plan.max_depth)
    return settle(verified, plan.target.mesh)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="pool")
def finish_slots(
    plan: Plan,
    weights: Weights,
    pool: Pool,
    batch: SlotBatch,
    tree: DraftTree,
    verified: Verified,
    sampling: SlotSampling,
    rows: jax.Array | None = None,
) -> tuple[Pool, SlotOutput]:
    """The rest of a round: choose, accept, commit. Stop tokens are for the host to find in what was emitted.

    rows: int32[W, N, words] for a plan with grammar "rows". Padding rows of the batch take any.
    """
    functions = round_functions(plan, weights, sampling.params(), rows=rows, slots=batch.slots)
    stop_token_ids = jnp.zeros((0,), jnp.int32)
    lengths = pool.cache.lengths if batch.slots is None else jnp.take(pool.cache.lengths, batch.slots)
    state = _state(plan, pool, batch, lengths)
    state, out = finish_round(state, tree, verified, functions, stop_token_ids, max_depth=plan.max_depth)
    output = SlotOutput(out.token_ids, out.counts, out.acceptance_lengths, state.finished, tree.num_nodes)
    return settle((Pool(state.cache, state.draft_cache), output), plan.target.mesh)


def _viewed(pool: Pool, batch: SlotBatch, extent: int) -> Pool:
    caches = (None if one is None else take_slots(one, batch.slots, extent) for one in (pool.cache, pool.draft_cache))
    return Pool(*caches)


def _state(plan: Plan, pool: Pool, batch: SlotBatch, lengths: jax.Array) -> RoundState:
    return RoundState(
        cache=pool.cache,
        draft_cache=pool.draft_cache,
        root_token_ids=batch.root_token_ids,
        lengths=lengths,
        emitted=batch.emitted,
        remaining=batch.remaining,
        finished=batch.finished,
        constrained=plan.grammar != "none",
    )
