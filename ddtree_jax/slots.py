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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.decoding import (
    Plan,
    Weights,
    commit_chunk,
    empty_caches,
    filter_candidates,
    first_roots,
    round_functions,
)
from ddtree_jax.models.cache import Cache, take_slots
from ddtree_jax.models.sharding import settle
from ddtree_jax.sampling import SamplingParams, key_from_seed
from ddtree_jax.tree import (
    DraftTree,
    RoundState,
    Verified,
    draft_proposal,
    draft_tree,
    finish_round,
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


@dataclasses.dataclass(frozen=True)
class SlotRow:
    """One sequence of a round, as the host knows it. The defaults are those of a row that only fills the batch: its
    slot keeps its length, and what lies behind the length may be overwritten.

    Attributes:
      slot: its place in the pool.
      root_token_id: newest token: emitted, in no cache yet.
      emitted: new tokens so far.
      remaining: new tokens still allowed.
      finished: True for a row that only fills the batch.
      temperature, top_k, top_p, min_p: as in `sampling.SamplingParams`: 0, 0, 1, 0 are greedy, off, off, off.
      key: from `key_words`.
    """

    slot: int
    root_token_id: int = 0
    emitted: int = 0
    remaining: int = 0
    finished: bool = True
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: tuple[int, int] = (0, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotBatch:
    """The B sequences of a round, in two arrays: each small array that goes to a GPU costs as much as a kernel.

    Attributes:
      integers: int32[B, 8]: slot, root token, emitted, remaining, finished, top-k, the two words of the key.
      reals: float32[B, 3]: temperature, top-p, min-p.
      in_order: static; B is the number of slots, and row i is slot i.
    """

    integers: jax.Array
    reals: jax.Array
    in_order: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def pack(cls, rows: Sequence[SlotRow], num_slots: int) -> SlotBatch:
        """The rows on the device. Raises ValueError for slots that are not distinct, and, where there is a row for
        each of the `num_slots` slots, not in order.
        """
        slots = [row.slot for row in rows]
        in_order = len(rows) == num_slots
        if len(set(slots)) != len(slots) or (in_order and slots != list(range(num_slots))):
            raise ValueError(f"rows: got slots {slots}, allowed are distinct ones, and all {num_slots} in order")
        integers = np.array(
            [[r.slot, r.root_token_id, r.emitted, r.remaining, r.finished, r.top_k, *r.key] for r in rows], np.uint32
        )
        reals = np.array([[r.temperature, r.top_p, r.min_p] for r in rows], np.float32)
        return cls(*jax.device_put((integers.view(np.int32), reals)), in_order)

    @property
    def slots(self) -> jax.Array | None:
        """int32[B], None for all in order."""
        return None if self.in_order else self.integers[:, 0]

    @property
    def root_token_ids(self) -> jax.Array:
        return self.integers[:, 1]

    @property
    def emitted(self) -> jax.Array:
        return self.integers[:, 2]

    @property
    def remaining(self) -> jax.Array:
        return self.integers[:, 3]

    @property
    def finished(self) -> jax.Array:
        return self.integers[:, 4] != 0

    def sampling(self) -> SamplingParams:
        words = jax.lax.bitcast_convert_type(self.integers[:, 6:8], jnp.uint32)
        keys = jax.random.wrap_key_data(words, impl="threefry2x32")
        temperature, top_p, min_p = (self.reals[:, i] for i in range(3))
        return SamplingParams(temperature, self.integers[:, 5], top_p, min_p, keys)


@dataclasses.dataclass(frozen=True)
class SlotOutput:
    """What a round emitted, on the host: fields as in `tree.RoundOutput`; num_nodes int32[B] of the trees, the roots
    included.
    """

    token_ids: np.ndarray  # [B, D + 1]
    counts: np.ndarray  # [B]
    acceptance_lengths: np.ndarray  # [B]
    num_nodes: np.ndarray  # [B]

    @classmethod
    def fetch(cls, packed: jax.Array) -> SlotOutput:
        """From what `finish_slots` gives; waits for it."""
        values = np.asarray(packed)
        return cls(values[:, 3:], values[:, 0], values[:, 1], values[:, 2])


def key_words(seed: int) -> tuple[int, int]:
    """The two words of the key that `generate` gives a sequence with this seed."""
    first, second = np.asarray(jax.random.key_data(key_from_seed(seed)), np.uint32).tolist()
    return first, second


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
    return settle(Pool(*empty_caches(plan, weights, num_slots, capacity)), plan.target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "extent"), donate_argnames="pool")
def open_slot(
    plan: Plan, weights: Weights, pool: Pool, slot: jax.Array, length: jax.Array, source: jax.Array, extent: int
) -> Pool:
    """Starts a sequence whose first `length` tokens are a prefix of what slot `source` holds.

    slot, length, source: int32[]. extent: static, >= length, positions to copy; 0 copies nothing: for a source that is
    the slot itself, or for length 0. Needs a target without recurrent layers if length > 0: a state is that of one
    place only.
    """

    def opened(cache: Cache | None) -> Cache | None:
        if cache is None:
            return None

        def copy(leaf: jax.Array) -> jax.Array:
            prefix = jax.lax.dynamic_slice_in_dim(leaf[:, :, :extent], source, 1, axis=1)
            return jax.lax.dynamic_update_slice(leaf, prefix, (0, slot, 0, 0))

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
    """Commits the next chunk of B prompts.

    token_ids: int32[B, C], of which `counts[b]` int32 are real (1..C). extent: static, >= the lengths before; 0 where
    these are the first chunks.

    Returns:
      The pool, and the residual stream [B, width] at each chunk's last token, for `first_tokens`.
    """
    view = take_slots(pool.cache, slots, extent)
    cache, draft_cache, hidden = commit_chunk(
        plan, weights, pool.cache, pool.draft_cache, token_ids, counts, view=view, slots=slots
    )
    return settle((Pool(cache, draft_cache), hidden), plan.target.mesh)


@functools.partial(jax.jit, static_argnames="plan")
def first_tokens(
    plan: Plan, weights: Weights, hidden: jax.Array, batch: SlotBatch, rows: jax.Array | None
) -> jax.Array:
    """`decoding.first_roots` of the sequences of a batch."""
    return first_roots(plan, weights, hidden, batch.sampling(), rows)


@functools.partial(jax.jit, static_argnames=("plan", "extent", "constrained"))
def draft_slots(
    plan: Plan,
    weights: Weights,
    pool: Pool,
    batch: SlotBatch,
    *,
    extent: int,
    constrained: bool,
) -> tuple[DraftTree, tuple[jax.Array, jax.Array] | None]:
    """The drafter's pass: the trees; and of a constrained batch what a grammar may filter others from, None where
    nothing was drafted.

    extent: static, >= the lengths of the batch's sequences.
    constrained: static, whether a sequence of the batch follows a grammar. InvariantError if the plan takes no rows.
    """
    view = _viewed(pool, batch, extent)
    state = _state(view, batch, view.cache.lengths, constrained)
    functions = round_functions(plan, weights, None)
    proposal = draft_proposal(state, functions)
    candidates = filter_candidates(plan, weights, proposal) if constrained and plan.drafter is not None else None
    return settle((draft_tree(state, proposal, functions), candidates), plan.target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "extent"))
def verify_slots(
    plan: Plan, weights: Weights, pool: Pool, batch: SlotBatch, tree: DraftTree, *, extent: int
) -> Verified:
    """The target's pass over the trees. extent: as for `draft_slots`."""
    view = _viewed(pool, batch, extent)
    state = _state(view, batch, view.cache.lengths, constrained=False)  # no token is chosen here
    verified = verify_tree(state, tree, round_functions(plan, weights, None), max_depth=plan.max_depth)
    return settle(verified, plan.target.mesh)


@functools.partial(jax.jit, static_argnames=("plan", "constrained"), donate_argnames="pool")
def finish_slots(
    plan: Plan,
    weights: Weights,
    pool: Pool,
    batch: SlotBatch,
    tree: DraftTree,
    verified: Verified,
    rows: jax.Array | None = None,
    *,
    constrained: bool,
) -> tuple[Pool, jax.Array]:
    """The rest of a round: choose, accept, commit. Stop tokens are for the host to find in what was emitted.

    rows: int32[B, N, W] for a plan with grammar "rows". Padding rows of the batch take any.
    constrained: as for `draft_slots`.

    Returns:
      The pool, and int32[B, 3 + D + 1] for `SlotOutput.fetch`.
    """
    functions = round_functions(plan, weights, batch.sampling(), rows=rows, slots=batch.slots)
    stop_token_ids = jnp.zeros((0,), jnp.int32)
    lengths = pool.cache.lengths if batch.slots is None else jnp.take(pool.cache.lengths, batch.slots)
    state = _state(pool, batch, lengths, constrained)
    state, out = finish_round(state, tree, verified, functions, stop_token_ids, max_depth=plan.max_depth)
    counters = jnp.stack([out.counts, out.acceptance_lengths, jnp.asarray(tree.num_nodes)], axis=1)
    packed = jnp.concatenate([counters, out.token_ids], axis=1)
    return settle((Pool(state.cache, state.draft_cache), packed), plan.target.mesh)


def _viewed(pool: Pool, batch: SlotBatch, extent: int) -> Pool:
    caches = (None if one is None else take_slots(one, batch.slots, extent) for one in (pool.cache, pool.draft_cache))
    return Pool(*caches)


def _state(pool: Pool, batch: SlotBatch, lengths: jax.Array, constrained: bool) -> RoundState:
    return RoundState(
        cache=pool.cache,
        draft_cache=pool.draft_cache,
        root_token_ids=batch.root_token_ids,
        lengths=lengths,
        emitted=batch.emitted,
        remaining=batch.remaining,
        finished=batch.finished,
        constrained=constrained,
    )
