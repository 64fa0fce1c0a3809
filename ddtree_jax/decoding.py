"""Device programs: prefill, one round, and the loop of rounds, as jitted pure functions of (plan, weights, state)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.algorithm import SpeculativeAlgorithm, capabilities
from ddtree_jax.engine import Engine
from ddtree_jax.models.cache import Cache, write_rows, write_states
from ddtree_jax.models.dflash2 import PairProposal
from ddtree_jax.models.glm5 import causal_mask
from ddtree_jax.models.kernel_specs import commit_specs
from ddtree_jax.models.pair import StaticModel, propose, propose_pairs
from ddtree_jax.models.sharding import settle
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.sampling import SamplingParams, choose_tokens
from ddtree_jax.tree import (
    NO_NODE,
    DraftTree,
    RoundFunctions,
    RoundOutput,
    RoundState,
    TokenTable,
    Verified,
    advance_states,
    build_constrained_tree,
    build_tree,
    build_tree_from_pairs,
    chain_from_pairs,
    chain_tree,
    constrained_chain,
    draft_candidates,
    draft_proposal,
    draft_tree,
    finish_round,
    gather_rows,
    mask_logits,
    node_states,
    root_tree,
    speculative_round,
    state_rows,
    verify_tree,
)
from ddtree_jax.tree.build import with_padding

CHUNK_TOKENS = 256  # longest prefill chunk; a prompt of any length runs as a number of these
MIN_CHUNK_TOKENS = 32
# Where grammar rows come from: no grammar in the batch; the host, between the steps of a round; tables on the device.
GRAMMAR_KINDS = ("none", "rows", "table")
GRAMMAR_CANDIDATES = 64  # candidates a depth that filtering looks at: the grammar may forbid the drafter's favourites


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a generation; two equal plans share their compiled programs.

    algorithm: what builds the draft.
    budget: tree nodes besides the root; 0 for algorithms without a tree.
    draft_depth: L of the drafter, 0 without one.
    taps: target layers whose outputs feed the drafter.
    target, drafter: the static halves of the models; drafter None where the algorithm drafts nothing.
    mode: the static sampling mode of `sampling.choose_tokens`.
    debug: run the value rules of `tree.invariants` in every round.
    grammar: one of `GRAMMAR_KINDS`, where the grammar rows of a round come from.
    """

    algorithm: SpeculativeAlgorithm
    budget: int
    draft_depth: int
    taps: tuple[int, ...]
    mode: str
    target: StaticModel
    drafter: StaticModel | None
    debug: bool = False
    grammar: str = "none"

    def for_prefill(self, *, keep_mode: bool = False) -> Plan:
        """The plan of the prompt's programs, which all algorithms and budgets of one pair share."""
        shared = SpeculativeAlgorithm.NONE
        mode = self.mode if keep_mode else "greedy"
        return dataclasses.replace(self, algorithm=shared, budget=0, mode=mode, debug=False, grammar="none")

    @property
    def max_depth(self) -> int:
        """Deepest node that a round can accept: the drafter's rows, but no deeper than the tree has nodes."""
        return min(self.draft_depth, self.budget) if capabilities(self.algorithm).branching else self.draft_depth

    @property
    def num_slots(self) -> int:
        """N of a round's tree, the root included."""
        return 1 + (self.budget if capabilities(self.algorithm).branching else self.draft_depth)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """The parameter arrays of a pair; `drafter` is None where the algorithm drafts nothing."""

    target: list[jax.Array]
    drafter: list[jax.Array] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillState:
    """Caches while the prompt runs in, and the residual stream at each sequence's newest token."""

    cache: Cache
    draft_cache: Cache | None
    hidden: jax.Array  # [B, D]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Collected:
    """What a loop of rounds wrote: token_ids int32[B, C], counts int32[B], acceptance lengths int32[B, C] by round."""

    token_ids: jax.Array
    counts: jax.Array
    acceptance_lengths: jax.Array
    num_rounds: jax.Array  # int32[]


def make_plan(
    engine: Engine,
    algorithm: SpeculativeAlgorithm,
    budget: int,
    mode: str,
    *,
    debug: bool = False,
    grammar: str = "none",
) -> tuple[Plan, Weights]:
    """The static plan and the weights of one algorithm on one engine."""
    target, drafter = (
        None if model is None else (model.config, model.static, model.arrays)
        for model in (engine.target, engine.drafter)
    )
    return plan_of(target, drafter, algorithm, budget, mode, debug=debug, grammar=grammar)


def plan_of(
    target: tuple[Any, StaticModel, list[Any]],
    drafter: tuple[Any, StaticModel, list[Any]] | None,
    algorithm: SpeculativeAlgorithm,
    budget: int,
    mode: str,
    *,
    debug: bool = False,
    grammar: str = "none",
) -> tuple[Plan, Weights]:
    """As `make_plan`, from (config, static model, parameter leaves) of each model; the leaves may be shapes alone."""
    row = capabilities(algorithm)
    config, static, arrays = drafter if drafter is not None and row.needs_drafter else (None, None, None)
    plan = Plan(
        algorithm=algorithm,
        budget=budget if row.branching else 0,
        draft_depth=0 if config is None else config.draft_depth,
        taps=() if config is None else config.target_layer_ids,
        mode=mode,
        target=target[1],
        drafter=static,
        debug=debug,
        grammar=grammar,
    )
    return plan, Weights(target[2], arrays)


def chunk_tokens(longest_prompt: int) -> int:
    """Prefill chunk for a batch: a power of two, so that prompts of similar length share one program."""
    size = MIN_CHUNK_TOKENS
    while size < min(longest_prompt, CHUNK_TOKENS):
        size *= 2
    return size


def cache_capacity(longest_prompt: int, max_new_tokens: int, draft_depth: int) -> int:
    """Cache slots S: the sequence, what the last write may spill beyond it, rounded up to a bucket.

    A write covers a fixed number of rows from the sequence's length on, so S keeps one prefill chunk above the longest
    prompt and one accepted path above the longest sequence; a clamped write would overwrite committed rows.
    """
    need = max(longest_prompt + max_new_tokens + draft_depth + 1, longest_prompt + chunk_tokens(longest_prompt))
    step = 64
    while step * 8 < need:
        step *= 2
    return -(-need // step) * step


@functools.partial(jax.jit, static_argnames=("plan", "batch", "capacity"))
def start_prefill(plan: Plan, weights: Weights, batch: int, capacity: int) -> PrefillState:
    """Empty caches for `batch` sequences of up to `capacity` tokens."""
    target = plan.target.merge(weights.target)
    hidden = jnp.zeros((batch, target.config.hidden_size), target.embed.dtype)
    return settle(PrefillState(*empty_caches(plan, weights, batch, capacity), hidden), target.mesh)


def empty_caches(plan: Plan, weights: Weights, batch: int, capacity: int) -> tuple[Cache, Cache | None]:
    """The target's cache and the drafter's, for `batch` sequences of up to `capacity` tokens."""
    cache = plan.target.merge(weights.target).empty_cache(batch, capacity)
    if plan.drafter is None:
        return cache, None
    return cache, plan.drafter.merge(weights.drafter).empty_cache(batch, capacity)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill_chunk(
    plan: Plan, weights: Weights, state: PrefillState, token_ids: jax.Array, counts: jax.Array
) -> PrefillState:
    """Commits the next chunk of each prompt: token_ids int32[B, C], of which `counts[b]` int32 are real (0..C)."""
    cache, draft_cache, last = commit_chunk(
        plan, weights, state.cache, state.draft_cache, token_ids, counts, view=state.cache, slots=None
    )
    hidden = jnp.where(counts[:, None] > 0, last, state.hidden)
    return settle(PrefillState(cache, draft_cache, hidden), plan.target.mesh)


def commit_chunk(
    plan: Plan,
    weights: Weights,
    cache: Cache,
    draft_cache: Cache | None,
    token_ids: jax.Array,
    counts: jax.Array,
    *,
    view: Cache,
    slots: jax.Array | None,
) -> tuple[Cache, Cache | None, jax.Array]:
    """Runs a chunk of each prompt and commits it.

    token_ids: int32[B, C], of which `counts[b]` int32 are real (0..C).
    view: what the sequences have in the cache, as a cache of B sequences. slots: as for `round_functions`.

    Returns:
      The caches, and the residual stream [B, width] at each chunk's last real token; of a chunk without one, any.
    """
    b, c = token_ids.shape
    positions = view.lengths[:, None] + jnp.arange(c, dtype=jnp.int32)[None]
    target = plan.target.merge(weights.target)
    out = target(token_ids, positions, causal_mask(b, c), view, layer_ids=plan.taps)
    places = in_order(plan, b) if slots is None else slots
    if plan.drafter is not None:
        context = plan.drafter.merge(weights.drafter).context_rows(out.features, positions)
        draft_cache = write_rows(draft_cache, context, counts, places)
    cache = write_states(write_rows(cache, out.rows, counts, places), out.states, counts, slots=slots)
    last = jnp.take_along_axis(out.hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return cache, draft_cache, last


def prefill(plan: Plan, weights: Weights, prompts: Sequence[Sequence[int]], capacity: int) -> PrefillState:
    """Commits whole prompts of any lengths, chunk by chunk; the launches are asynchronous.

    plan: any plan of the pair; its algorithm and budget play no part.
    prompts: token ids, at least one each.
    capacity: from `cache_capacity` of the longest prompt.
    """
    plan = plan.for_prefill()
    lengths = np.array([len(ids) for ids in prompts])
    chunk = chunk_tokens(int(lengths.max()))
    padded = np.zeros((len(prompts), -(-int(lengths.max()) // chunk) * chunk), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    state = start_prefill(plan, weights, len(prompts), capacity)
    for at in range(0, padded.shape[1], chunk):
        counts = np.clip(lengths - at, 0, chunk).astype(np.int32)
        state = prefill_chunk(plan, weights, state, padded[:, at : at + chunk], counts)
    return state


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("cache", "draft_cache"))
def first_token(
    plan: Plan,
    weights: Weights,
    cache: Cache,
    draft_cache: Cache | None,
    hidden: jax.Array,
    sampling: SamplingParams,
    stop_token_ids: jax.Array,
    max_new_tokens: jax.Array,
    rows: jax.Array | None = None,
) -> RoundState:
    """Chooses each sequence's first new token, the root of its first round.

    hidden: [B, D] of `PrefillState`; max_new_tokens: int32[B], 0 for an inert row that only fills the batch; rows:
    int32[B, W], the tokens that grammars allow first, None where no sequence has a grammar.
    """
    root = first_roots(plan, weights, hidden, sampling, rows)
    stopped = jnp.any(root[:, None] == stop_token_ids[None], axis=-1)
    state = RoundState(
        cache=cache,
        draft_cache=draft_cache,
        root_token_ids=root,
        lengths=jnp.copy(cache.lengths),  # the state is donated, and a donated buffer may appear only once in it
        emitted=jnp.minimum(max_new_tokens, 1),
        remaining=jnp.maximum(max_new_tokens - 1, 0),
        finished=stopped | (max_new_tokens <= 1),
        constrained=rows is not None,
    )
    return settle(state, plan.target.mesh)


def first_roots(
    plan: Plan, weights: Weights, hidden: jax.Array, sampling: SamplingParams, rows: jax.Array | None
) -> jax.Array:
    """int32[B]: the first new tokens. hidden: [B, width]; rows: int32[B, W] that grammars allow, None without one."""
    logits = plan.target.merge(weights.target).logits(hidden)[:, None]
    if rows is not None:
        logits = mask_logits(logits, rows[:, None])
    zeros = jnp.zeros((logits.shape[0],), jnp.int32)
    return choose_tokens(logits, zeros[:, None], zeros, sampling, mode=plan.mode)[:, 0]


def round_functions(
    plan: Plan,
    weights: Weights,
    sampling: SamplingParams | None,
    *,
    rows: jax.Array | None = None,
    table: TokenTable | None = None,
    grammar: jax.Array | None = None,
    slots: jax.Array | None = None,
) -> RoundFunctions:
    """The model functions of a round, closed over one pair's weights; called while tracing.

    sampling: how tokens are chosen; like `rows`, only the last step of a round needs it.
    rows: int32[B, N, W] from the host, for a plan with grammar "rows".
    table, grammar: the grammars of the batch and int32[B] their states, for a plan with grammar "table".
    slots: int32[B], where in larger caches the batch's sequences lie: what is committed goes there. None: the caches
      are the batch's own.
    """
    target = plan.target.merge(weights.target)
    drafter = None if plan.drafter is None else plan.drafter.merge(weights.drafter)

    with_pairs = drafter is not None and drafter.config.selector is not None
    branching = capabilities(plan.algorithm).branching
    kernels = _kernels(target)

    def draft(draft_cache: Cache, root_token_ids: jax.Array, lengths: jax.Array) -> Any:
        del lengths  # the draft cache holds the same count
        proposal = propose_pairs if with_pairs else propose
        return proposal(drafter, target, draft_cache, root_token_ids)

    def build(proposal: Any, root_token_ids: jax.Array) -> DraftTree:
        if table is not None:
            candidates = filter_candidates(plan, weights, proposal)
            if branching:
                return build_constrained_tree(*candidates, root_token_ids, table, grammar, budget=plan.budget)
            return constrained_chain(*candidates, root_token_ids, table, grammar)
        if with_pairs and branching:
            return build_tree_from_pairs(*proposal, root_token_ids, budget=plan.budget)
        if with_pairs:
            return chain_from_pairs(*proposal, root_token_ids)
        if branching:
            return build_tree(proposal, root_token_ids, budget=plan.budget, topk_implementation=kernels)
        return chain_tree(proposal, root_token_ids)

    def verify(cache: Cache, token_ids: jax.Array, positions: jax.Array, mask: jax.Array) -> Verified:
        out = target(token_ids, positions, mask, cache, layer_ids=plan.taps, absorbed=True)
        return Verified(logits=target.logits(out.hidden), rows=out.rows, features=out.features, states=out.states)

    def choose(logits: jax.Array, depths: jax.Array, emitted: jax.Array) -> jax.Array:
        return choose_tokens(logits, depths, emitted, sampling, mode=plan.mode, max_depth=plan.max_depth)

    def commit(
        cache: Cache, draft_cache: Cache | None, verified: Verified, node_ids: jax.Array, counts: jax.Array
    ) -> tuple[Cache, Cache | None]:
        places = in_order(plan, counts.shape[0]) if slots is None else slots
        in_place = kernels.any and slots is None
        if drafter is not None:
            features = gather_rows(verified.features, node_ids, node_axis=1, batch_axis=0)
            lengths = cache.lengths if slots is None else jnp.take(cache.lengths, slots)
            positions = lengths[:, None] + jnp.arange(node_ids.shape[1], dtype=jnp.int32)[None]
            with jax.named_scope("draft_context"):
                context = drafter.context_rows(features, positions)
            if in_place:
                path = jnp.broadcast_to(jnp.arange(node_ids.shape[1], dtype=jnp.int32)[None], node_ids.shape)
                draft_cache = commit_in_place(kernels, draft_cache, context, path, counts)
            else:
                draft_cache = write_rows(draft_cache, context, counts, places)
        if in_place:
            written = commit_in_place(kernels, cache, verified.rows, node_ids, counts)
        else:
            rows = gather_rows(verified.rows, node_ids, node_axis=2, batch_axis=1)
            written = write_rows(cache, rows, counts, places)
        return write_states(written, verified.states, counts, node_ids, slots), draft_cache

    def grammar_rows(tree: DraftTree) -> jax.Array:
        if table is None:
            return rows
        return state_rows(table, node_states(tree, table, grammar, max_depth=plan.max_depth))

    def advance(grammar: jax.Array, token_ids: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        grammar = advance_states(table, grammar, token_ids, counts)
        return grammar, ~jnp.any(state_rows(table, grammar[:, None])[:, 0] != 0, axis=-1)

    drafting = drafter is not None
    return RoundFunctions(
        verify=verify,
        choose=choose,
        commit=commit,
        draft=draft if drafting else None,
        build=build if drafting else None,
        grammar_rows=None if plan.grammar == "none" else grammar_rows,
        advance=advance if plan.grammar == "table" else None,
        algorithm=plan.algorithm,
    )


def commit_in_place(kernels: KernelChoice, cache: Cache, rows: Any, node_ids: jax.Array, counts: jax.Array) -> Cache:
    """Appends the first `counts[b]` rows that `node_ids` int32[B, D + 1] names; rows: leaves [R, B, N, width]."""
    kept = jnp.arange(node_ids.shape[1], dtype=jnp.int32)[None] < counts[:, None]
    committed = jnp.where(kept, node_ids, NO_NODE)
    specs = commit_specs(counts.shape[0], kernels.mesh)
    written = kernels.run("commit_rows", cache.rows, rows, committed, cache.lengths, specs=specs)
    return dataclasses.replace(cache, rows=written, lengths=cache.lengths + counts)


def in_order(plan: Plan, batch: int) -> jax.Array | None:
    """`slots` for `write_rows` where row i of the batch is sequence i of the cache.

    Named one by one, XLA writes into a donated cache in place; written by None it copies all of it on a CPU. Over a
    mesh the batch may be split, and then only None keeps each part where it is.
    """
    return jnp.arange(batch, dtype=jnp.int32) if plan.target.mesh is None and batch > 1 else None


def _kernels(target: Any) -> KernelChoice:
    """Those that a merged target runs on."""
    return getattr(target, "kernels", KernelChoice())  # a target without any has no such attribute


def filter_candidates(plan: Plan, weights: Weights, proposal: Any) -> tuple[jax.Array, jax.Array]:
    """(log_probs float32[B, L, K] or [B, L, K, K], token_ids int32[B, L, K]): what a filtered draft chooses from."""
    if isinstance(proposal, PairProposal):
        return proposal.log_probs, proposal.token_ids
    kernels = _kernels(plan.target.merge(weights.target))
    return draft_candidates(proposal, max(GRAMMAR_CANDIDATES, plan.budget), implementation=kernels)


def run_round(
    plan: Plan,
    weights: Weights,
    state: RoundState,
    sampling: SamplingParams,
    stop_token_ids: jax.Array,
    table: TokenTable | None = None,
) -> tuple[RoundState, RoundOutput]:
    """One round as a traceable function; `round_step` is the same, jitted. table: for a plan with grammar "table"."""
    functions = round_functions(plan, weights, sampling, table=table, grammar=state.grammar)
    done = speculative_round(state, functions, stop_token_ids, max_depth=plan.max_depth, debug=plan.debug)
    return settle(done, plan.target.mesh)


round_step = jax.jit(run_round, static_argnames="plan", donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("plan", "with_candidates", "with_tree"))
def draft_step(
    plan: Plan, weights: Weights, state: RoundState, *, with_candidates: bool, with_tree: bool
) -> tuple[DraftTree, tuple[jax.Array, jax.Array] | None]:
    """The drafter's pass of a round whose rows come from the host.

    Returns:
      The unfiltered tree, or without `with_tree` one of the same size that holds the roots alone; and with
      `with_candidates` what to filter.
    """
    functions = round_functions(plan, weights, None)
    proposal = draft_proposal(state, functions)
    candidates = filter_candidates(plan, weights, proposal) if with_candidates else None
    if with_tree:
        tree = draft_tree(state, proposal, functions)
    else:
        tree = with_padding(root_tree(state.root_token_ids), plan.num_slots - 1)
    return settle((tree, candidates), plan.target.mesh)


@functools.partial(jax.jit, static_argnames="plan")
def verify_step(plan: Plan, weights: Weights, state: RoundState, tree: DraftTree) -> Verified:
    """The target's pass over a round's tree."""
    functions = round_functions(plan, weights, None)
    return settle(verify_tree(state, tree, functions, max_depth=plan.max_depth), plan.target.mesh)


def run_finish(
    plan: Plan,
    weights: Weights,
    state: RoundState,
    tree: DraftTree,
    verified: Verified,
    rows: jax.Array,
    sampling: SamplingParams,
    stop_token_ids: jax.Array,
) -> tuple[RoundState, RoundOutput]:
    """The rest of a round, given the grammar rows int32[B, N, W] of its tree; `finish_step` is the same, jitted."""
    functions = round_functions(plan, weights, sampling, rows=rows)
    done = finish_round(state, tree, verified, functions, stop_token_ids, max_depth=plan.max_depth, debug=plan.debug)
    return settle(done, plan.target.mesh)


finish_step = jax.jit(run_finish, static_argnames="plan", donate_argnames="state")


@functools.partial(jax.jit, static_argnames=("plan", "capacity"), donate_argnames="state")
def decode_loop(
    plan: Plan,
    weights: Weights,
    state: RoundState,
    sampling: SamplingParams,
    stop_token_ids: jax.Array,
    capacity: int,
    table: TokenTable | None = None,
) -> tuple[RoundState, Collected]:
    """Runs rounds on the device until every sequence has finished; no host round trip inside.

    capacity: static, at least the largest `remaining`: room for the tokens and, at one token a round at worst, for the
    rounds. The final state is returned so that the donated caches are updated in place.
    """
    batch = state.root_token_ids.shape[0]
    width = plan.max_depth + 1

    def running(carry: tuple[RoundState, Collected]) -> jax.Array:
        return jnp.any(~carry[0].finished)

    def body(carry: tuple[RoundState, Collected]) -> tuple[RoundState, Collected]:
        # At both ends of the body: else the partitioner splits a cache between rounds and gathers it in each.
        state, out = settle(carry, plan.target.mesh)
        state, emitted = run_round(plan, weights, state, sampling, stop_token_ids, table)
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        lengths = jax.lax.dynamic_update_slice(
            out.acceptance_lengths, emitted.acceptance_lengths[:, None], (0, out.num_rounds)
        )
        return state, Collected(
            token_ids=put(out.token_ids, emitted.token_ids, out.counts),
            counts=out.counts + emitted.counts,
            acceptance_lengths=lengths,
            num_rounds=out.num_rounds + 1,
        )

    empty = Collected(
        token_ids=jnp.zeros((batch, capacity + width), jnp.int32),
        counts=jnp.zeros((batch,), jnp.int32),
        acceptance_lengths=jnp.zeros((batch, capacity), jnp.int32),
        num_rounds=jnp.zeros((), jnp.int32),
    )
    return settle(jax.lax.while_loop(running, body, (state, empty)), plan.target.mesh)
