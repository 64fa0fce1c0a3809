"""From drafter logits to the tree of the most probable prefixes (DDTree, best-first construction)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.vocab_topk import vocab_topk
from ddtree_jax.tree import checks, formulations
from ddtree_jax.tree.base import NO_PARENT, DraftTree

if TYPE_CHECKING:
    from ddtree_jax.pallas.choice import KernelChoice

FORMULATIONS = ("sequential_frontier", "level_merge", "static_universe")

# Microseconds per tree at L = 15 (benchmarks/tree_build.py):
#                          budget:      16     64    128    256    512    1024
#   2 CPU cores  sequential_frontier    22     39     98    420   1458    6115
#                level_merge           158    906   2098   5351  13859   32565
#                static_universe        34    325   2207      -      -       -
#   H200, within sequential_frontier   244    888   1752   3626      -       -
#   a program    level_merge           243    289    294    356    462    1415
#                static_universe        24     31    102      -      -       -
# A loop step is nearly free on a CPU and costs launches on a GPU, where only the number of steps counts.
_MAX_STATIC_BUDGET = 128
# A pass for 32 candidates a row takes an H200 some 31 us; for 128 and more it leaves the range in which pairs are
# counted. Below that a wrong guess costs more than a right one saves.
CANDIDATE_CAP, _MIN_CAPPED = 32, 128


def default_formulation(budget: int, depth: int, k: int, *, backend: str) -> str:
    """The fastest formulation as measured: the sequential one on a CPU; elsewhere the static universe while
    it is small, then the level merge.
    """
    if backend == "cpu":
        return "sequential_frontier"
    fits = budget <= _MAX_STATIC_BUDGET and formulations.universe_size(budget, depth, k) <= formulations.MAX_UNIVERSE
    return "static_universe" if fits else "level_merge"


def default_candidate_cap(k: int, *, backend: str) -> int | None:
    """Candidates a row that `build_tree` tries before all `k`, None for no such try: on a CPU it saves nothing."""
    return CANDIDATE_CAP if backend == "gpu" and k >= _MIN_CAPPED else None


@functools.partial(
    jax.jit,
    static_argnames=("budget", "top_k", "force_spine", "formulation", "topk_implementation", "candidate_cap"),
)
def build_tree(
    draft_logits: jax.Array,
    root_token_ids: jax.Array,
    *,
    budget: int,
    top_k: int | None = None,
    force_spine: bool = False,
    formulation: str = "auto",
    topk_implementation: str | KernelChoice = "auto",
    candidate_cap: int | str | None = "auto",
) -> DraftTree:
    """Builds the tree of the `budget` most probable prefixes under the product of per-depth softmaxes.

    Nodes come best first: higher cumulative log-probability, ties by the lexicographically smaller tuple of
    ranks. A row's candidates rank by logit, equal logits by the smaller token id. A score is the float32 sum,
    from the root outward, of `logit - logsumexp(row)`. The set is prefix-closed and maximizes the expected
    accepted length under the drafter's own distribution; the target never has to agree for the decoding to be
    exact.

    Args:
      draft_logits: float[B, L, V], any floating dtype, L >= 0; row l predicts the token at depth l + 1. An
        entry that is -inf, NaN or +inf is no candidate; a row without candidates ends the tree at that depth.
      root_token_ids: int32[B], the current tokens.
      budget: static number of nodes besides the root, >= 0 (0: root only).
      top_k: static number of candidates per depth, >= 1; None means min(budget, V), which loses nothing. A
        smaller value gives the best tree over prefixes whose ranks are all below it.
      force_spine: static. True guarantees the whole top-1 chain (rank 0 at every depth, min(L, budget) deep or
        up to the first row without candidates); the rest of the budget goes to the most probable other
        prefixes, and the slot order is the same. With budget L and candidates in every row this is
        `chain_tree`. A target that follows the chain is then followed to its end however flat the drafter is;
        the price is the drafter's expected accepted length, which the tree without it maximizes.
      formulation: one of `FORMULATIONS`, all exactly equal, or "auto".
      topk_implementation: as `vocab_topk`'s `implementation`.
      candidate_cap: static. The tree is first built from this many candidates a row, fewer than it may need, and kept
        where `needs_no_more_candidates` proves it the same tree; else all are found. The result never depends on it.
        None: all at once. "auto": `default_candidate_cap`.

    Returns:
      A `DraftTree` with N = budget + 1 slots; `num_nodes` is smaller than N where fewer than `budget`
      prefixes are reachable with a finite score.

    Raises:
      ValueError: a wrong static argument, or a formulation that can not do this size.
    """
    budget = checks.static_int(budget, "budget", minimum=0)
    top_k = None if top_k is None else checks.static_int(top_k, "top_k", minimum=1)
    force_spine = checks.static_bool(force_spine, "force_spine")
    if formulation != "auto" and formulation not in FORMULATIONS:
        raise ValueError(f"formulation: got {formulation!r}; allowed: auto, {', '.join(FORMULATIONS)}.")
    # The logits go on as they came: of narrow ones that pass through a branch below, XLA would write a wide copy.
    draft_logits = jnp.asarray(draft_logits)
    batch, draft_depth, vocab = checks.as_float32(draft_logits, "draft_logits", (None, None, None), "B, L, V").shape
    root_token_ids = checks.as_int32(root_token_ids, "root_token_ids", (batch,), "B")

    depth = min(draft_depth, budget)  # a node at depth d needs d - 1 nodes above it
    k = min(budget if top_k is None else top_k, budget, vocab)
    if depth == 0 or k == 0:
        return with_padding(root_tree(root_token_ids), budget)
    if budget * (k + 1) >= 2**31:
        raise ValueError(f"budget: got {budget} with top_k {k}; their product must stay below 2**31.")

    if candidate_cap == "auto":
        candidate_cap = default_candidate_cap(k, backend=jax.default_backend())
    elif candidate_cap is not None:
        candidate_cap = checks.static_int(candidate_cap, "candidate_cap", minimum=1)

    def build_from(candidates: int) -> tuple[DraftTree, jax.Array]:
        log_probs, token_ids = draft_candidates(draft_logits[:, :depth], candidates, implementation=topk_implementation)
        tree, last_scores = _tree_and_last_score(log_probs, token_ids, root_token_ids, budget, force_spine, formulation)
        return tree, needs_no_more_candidates(log_probs, last_scores)

    with jax.named_scope("build_tree"):
        if candidate_cap is None or candidate_cap >= k:
            return build_from(k)[0]
        tree, is_exact = build_from(candidate_cap)
        return jax.lax.cond(jnp.all(is_exact), lambda: tree, lambda: build_from(k)[0])


def needs_no_more_candidates(log_probs: jax.Array, last_scores: jax.Array) -> jax.Array:
    """bool[B]: whether candidates beyond the K given could not have changed the best prefixes found among these.

    A prefix with a rank of K or more at depth d scores at most as the top-1 chain to depth d - 1 and candidate K - 1 of
    depth d together: in a float32 sum from the root outward too, because rounding is monotone. Where that is below the
    last chosen score at every depth, no such prefix is chosen; an equal score would have to be compared by ranks.

    Args:
      log_probs: float32[B, L, K], as for `build_tree_from_candidates`.
      last_scores: float32[B], the lowest score chosen (before a spine is forced); -inf where the budget was not filled.
    """
    above = jnp.zeros_like(last_scores)
    proven = jnp.ones(last_scores.shape, jnp.bool_)
    for d in range(log_probs.shape[1]):
        next_best = above + log_probs[:, d, -1]
        proven &= (next_best < last_scores) | (next_best == -jnp.inf)
        above = above + log_probs[:, d, 0]
    return proven


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def draft_candidates(
    draft_logits: jax.Array, k: int, *, implementation: str | KernelChoice = "auto"
) -> tuple[jax.Array, jax.Array]:
    """The K = min(k, V) best candidates of each row under the row's softmax.

    Args:
      draft_logits: float[B, L, V], V >= 1.
      k: static, >= 1.
      implementation: as for `vocab_topk`.

    Returns:
      (log_probs float32[B, L, K], `logit - logsumexp(row)`, best first and -inf where there is no candidate;
      token_ids int32[B, L, K], equal logits by the smaller id).
    """
    draft_logits = checks.as_float32(draft_logits, "draft_logits", (None, None, None), "B, L, V")
    best = vocab_topk(draft_logits, k, implementation=implementation)
    is_candidate = (best.values > -jnp.inf) & (best.logsumexp > -jnp.inf)[:, :, None]
    # Guarded before the subtraction: -inf - -inf would be a NaN.
    normalizers = jnp.where(best.logsumexp > -jnp.inf, best.logsumexp, 0.0)
    return jnp.where(is_candidate, best.values - normalizers[:, :, None], -jnp.inf), best.token_ids


@functools.partial(jax.jit, static_argnames=("budget", "force_spine", "formulation"))
def build_tree_from_candidates(
    log_probs: jax.Array,
    token_ids: jax.Array,
    root_token_ids: jax.Array,
    *,
    budget: int,
    force_spine: bool = False,
    formulation: str = "auto",
) -> DraftTree:
    """`build_tree` after the vocabulary pass.

    Args:
      log_probs: float32[B, L, K], L, K >= 1, each row non-increasing and <= 0, -inf where there is no
        candidate.
      token_ids: int32[B, L, K], distinct in a row.
      root_token_ids: int32[B].
      budget: static, >= 1.
      force_spine, formulation: as for `build_tree`.

    Returns:
      A `DraftTree` with N = budget + 1 slots.
    """
    budget = checks.static_int(budget, "budget", minimum=1)
    force_spine = checks.static_bool(force_spine, "force_spine")
    log_probs = checks.as_float32(log_probs, "log_probs", (None, None, None), "B, L, K")
    batch, depth, k = log_probs.shape
    token_ids = checks.as_int32(token_ids, "token_ids", (batch, depth, k), "B, L, K")
    root_token_ids = checks.as_int32(root_token_ids, "root_token_ids", (batch,), "B")
    if min(depth, k) < 1:
        raise ValueError(f"log_probs: got shape {log_probs.shape}; L and K must be >= 1.")

    return _tree_and_last_score(log_probs, token_ids, root_token_ids, budget, force_spine, formulation)[0]


def _tree_and_last_score(
    log_probs: jax.Array,
    token_ids: jax.Array,
    root_token_ids: jax.Array,
    budget: int,
    force_spine: bool,
    formulation: str,
) -> tuple[DraftTree, jax.Array]:
    """The tree, and float32[B] the lowest score that was chosen by itself (not for the spine's sake)."""
    _, depth, k = log_probs.shape
    nodes = jax.vmap(_pick(formulation, budget, depth, k))(log_probs)
    last_scores = nodes.scores[:, -1]
    if force_spine and k > 1:  # one candidate a row: the spine is all there is
        nodes = jax.vmap(formulations.with_spine)(nodes, log_probs)
    return assemble(nodes, token_ids, root_token_ids), last_scores


@jax.jit
def chain_tree(draft_logits: jax.Array, root_token_ids: jax.Array) -> DraftTree:
    """The drafter's greedy chain (DFlash) as a tree with N = L + 1 slots.

    Args:
      draft_logits: float[B, L, V]; a row without candidates ends the chain.
      root_token_ids: int32[B].

    Returns:
      A `DraftTree` in which node l + 1 is the argmax of row l (the smaller token id among equal logits) below
      node l.
    """
    draft_logits = checks.as_float32(draft_logits, "draft_logits", (None, None, None), "B, L, V")
    return build_tree(draft_logits, root_token_ids, budget=draft_logits.shape[1], top_k=1)


def root_tree(root_token_ids: jax.Array) -> DraftTree:
    """The tree of the root alone (plain autoregressive decoding), N = 1. `root_token_ids`: int32[B]."""
    root_token_ids = checks.as_int32(root_token_ids, "root_token_ids", (None,), "B")
    zeros = jnp.zeros_like(root_token_ids)[:, None]
    return DraftTree(
        token_ids=root_token_ids[:, None],
        parents=zeros + NO_PARENT,
        depths=zeros,
        log_probs=jnp.zeros_like(zeros, jnp.float32),
        num_nodes=jnp.ones_like(root_token_ids),
    )


def assemble(nodes: formulations.Nodes, token_ids: jax.Array, root_token_ids: jax.Array) -> DraftTree:
    """The tree of a batch of `Nodes` [B, M], N = M + 1: node m carries `token_ids[b, depth - 1, rank]`.

    token_ids: int32[B, L, K]; root_token_ids: int32[B].
    """
    batch, depth, k = token_ids.shape
    flat = jnp.where(nodes.scores > -jnp.inf, (nodes.depths - 1) * k + nodes.ranks, 0)
    tokens = jnp.take_along_axis(token_ids.reshape((batch, depth * k)), flat, axis=1)
    return assemble_tokens(nodes.scores, nodes.parents, nodes.depths, tokens, root_token_ids)


def assemble_tokens(
    scores: jax.Array, parents: jax.Array, depths: jax.Array, tokens: jax.Array, root_token_ids: jax.Array
) -> DraftTree:
    """As `assemble`, from the fields of `Nodes` [B, M] and the token of each node, int32[B, M]."""
    batch = tokens.shape[0]
    is_node = scores > -jnp.inf

    def with_root(root_value, values):
        return jnp.concatenate([jnp.broadcast_to(root_value, (batch, 1)).astype(values.dtype), values], axis=1)

    return DraftTree(
        token_ids=with_root(root_token_ids[:, None], jnp.where(is_node, tokens, 0)),
        parents=with_root(jnp.int32(NO_PARENT), jnp.where(is_node, parents, NO_PARENT)),
        depths=with_root(jnp.int32(0), jnp.where(is_node, depths, 0)),
        log_probs=with_root(jnp.float32(0.0), jnp.where(is_node, scores, -jnp.inf)),
        num_nodes=1 + jnp.sum(is_node, axis=1, dtype=jnp.int32),
    )


def _pick(formulation: str, budget: int, depth: int, k: int) -> Callable[[jax.Array], formulations.Nodes]:
    backend = jax.default_backend()
    if formulation == "auto":
        formulation = default_formulation(budget, depth, k, backend=backend)
    if formulation not in FORMULATIONS:
        raise ValueError(f"formulation: got {formulation!r}; allowed: auto, {', '.join(FORMULATIONS)}.")
    if formulation == "static_universe" and formulations.universe_size(budget, depth, k) > formulations.MAX_UNIVERSE:
        raise ValueError(
            f"formulation: 'static_universe' has over {formulations.MAX_UNIVERSE} prefixes for "
            f"budget {budget}, depth {depth} and {k} candidates; use 'sequential_frontier' or 'level_merge'."
        )
    if k == 1:
        return functools.partial(formulations.chain, budget=budget)
    if formulation == "level_merge":
        return functools.partial(formulations.level_merge, budget=budget, by_counting=backend == "gpu")
    return functools.partial(getattr(formulations, formulation), budget=budget)


def with_padding(tree: DraftTree, extra: int) -> DraftTree:
    """The tree with `extra` padding slots appended."""

    def pad(values, fill):
        return jnp.pad(values, ((0, 0), (0, extra)), constant_values=fill)

    return DraftTree(
        token_ids=pad(tree.token_ids, 0),
        parents=pad(tree.parents, NO_PARENT),
        depths=pad(tree.depths, 0),
        log_probs=pad(tree.log_probs, -jnp.inf),
        num_nodes=tree.num_nodes,
    )
