"""One round of speculative decoding: draft, build, verify, accept, commit. Model functions are passed in.

`speculative_round` is the whole. Its steps are functions of their own, for a caller whose grammar rows come from
the host: it draws the tree up, launches the target, works the rows out meanwhile, and ends the round with them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ddtree_jax.algorithm import SpeculativeAlgorithm, require_grammar_rows
from ddtree_jax.tree import checks, invariants
from ddtree_jax.tree.accept import accept
from ddtree_jax.tree.base import AcceptedPath, DraftTree
from ddtree_jax.tree.build import root_tree
from ddtree_jax.tree.grammar_rows import mask_logits
from ddtree_jax.tree.mask import ancestor_mask, positions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Verified:
    """What the target computed for every tree slot.

    Attributes:
      logits: float32[B, N, V], the target's logits after each slot.
      rows: pytree, the slots' cache rows (keys, values, latents), in whatever layout `commit` understands.
      features: pytree or None, the slots' features for the drafter.
      states: pytree or None, what the target's recurrent layers keep after each slot.
    """

    logits: jax.Array  # [B, N, V]
    rows: Any
    features: Any
    states: Any = None


# draft(draft_cache, root_token_ids[B], lengths[B]) -> proposal: a pytree that `build` understands, such as logits
# float32[B, L, V]. Must not see the draws of this round.
DraftFn = Callable[[Any, jax.Array, jax.Array], Any]
# build(proposal, root_token_ids[B]) -> DraftTree; checks the proposal.
BuildFn = Callable[[Any, jax.Array], DraftTree]
# verify(cache, token_ids[B, N], positions[B, N], mask bool[B, N, N]) -> Verified. The committed prefix is in
# the cache and visible to every slot; the mask speaks of the tree alone.
VerifyFn = Callable[[Any, jax.Array, jax.Array, jax.Array], Verified]
# choose(logits[B, N, V], depths[B, N], emitted[B]) -> int32[B, N], the target's token after each slot, >= 0.
ChooseFn = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# commit(cache, draft_cache, verified, node_ids[B, D + 1], counts[B]) -> (cache, draft_cache): appends the
# rows of the first `counts` path nodes to each sequence and takes the states after the last of them; a count
# of 0 leaves a sequence unchanged.
CommitFn = Callable[[Any, Any, Verified, jax.Array, jax.Array], tuple[Any, Any]]
# grammar_rows(tree) -> int32[B, N, W], the tokens allowed after each slot (see `grammar_rows.mask_logits`).
GrammarRowsFn = Callable[[DraftTree], jax.Array]
# advance(grammar, token_ids[B, D + 1], counts[B]) -> (grammar, stuck bool[B]): the grammar state after the emitted
# tokens, and True where it allows no token at all.
AdvanceFn = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class RoundFunctions:
    """The functions of a round; hashable, so a static argument of a jitted function.

    `draft` and `build` are None for plain autoregressive decoding. `grammar_rows` is what a constrained batch needs;
    `advance` is None where the host keeps the state of the grammars. `algorithm` is named by the grammar guard.
    """

    verify: VerifyFn
    choose: ChooseFn
    commit: CommitFn
    draft: DraftFn | None = None
    build: BuildFn | None = None
    grammar_rows: GrammarRowsFn | None = None
    advance: AdvanceFn | None = None
    algorithm: SpeculativeAlgorithm | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RoundState:
    """All that one round hands to the next.

    Attributes:
      cache: pytree, the target's cache of the committed tokens.
      draft_cache: pytree or None, the drafter's.
      root_token_ids: int32[B], the newest token of each sequence: emitted, in no cache yet.
      lengths: int32[B], committed tokens, which is the absolute position of the root.
      emitted: int32[B], new tokens so far, the one that prefill chose included.
      remaining: int32[B], new tokens still allowed.
      finished: bool[B].
      grammar: pytree or None, the state of the batch's grammars where it lives on the device.
      constrained: static; some sequence of the batch must follow a grammar. A round that was built without grammar
        rows refuses such a batch while it is traced.
    """

    cache: Any
    draft_cache: Any
    root_token_ids: jax.Array  # [B]
    lengths: jax.Array  # [B]
    emitted: jax.Array  # [B]
    remaining: jax.Array  # [B]
    finished: jax.Array  # [B]
    grammar: Any = None
    constrained: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RoundOutput:
    """What one round emitted.

    Attributes:
      token_ids: int32[B, D + 1], emitted tokens in order; entries at and beyond `counts` are meaningless.
      counts: int32[B], tokens emitted after cutting at the first stop token (which is kept) and at
        `remaining`; 0 for sequences that had finished before.
      acceptance_lengths: int32[B], tokens of the round before cutting, the bonus included; 0 for finished
        sequences. One less where a grammar allows nothing after the last node: the sequence is then finished.
      stopped: bool[B], the last emitted token is a stop token.
      tree: the round's tree.
      path: the round's accepted path, before cutting.
    """

    token_ids: jax.Array  # [B, D + 1]
    counts: jax.Array  # [B]
    acceptance_lengths: jax.Array  # [B]
    stopped: jax.Array  # [B]
    tree: DraftTree
    path: AcceptedPath


def speculative_round(
    state: RoundState,
    fns: RoundFunctions,
    stop_token_ids: jax.Array,
    *,
    max_depth: int,
    debug: bool = False,
) -> tuple[RoundState, RoundOutput]:
    """Runs one round for a batch of sequences.

    Args:
      state: the sequences; finished ones are carried through unchanged.
      fns: the model functions (static).
      stop_token_ids: int32[M], M >= 0.
      max_depth: static, D: the deepest node that may be accepted; L for a drafter with L rows, 0 without a
        drafter. A deeper match waits for a later round; the emitted tokens are the same.
      debug: static; checks the rules of `invariants` on the values of this round. The caller must then wrap
        its outermost function in `chex.chexify`.

    Returns:
      The state after the round, and what it emitted. Of a path of `length` nodes the first `counts` are
      committed, so that the newest emitted token, and only that one, is in no cache.

    Raises:
      ValueError: max_depth < 0, or one of `draft` and `build` without the other.
      InvariantError: a constrained batch in a round without grammar rows.
    """
    tree = draft_tree(state, draft_proposal(state, fns), fns)
    verified = verify_tree(state, tree, fns, max_depth=max_depth)
    return finish_round(state, tree, verified, fns, stop_token_ids, max_depth=max_depth, debug=debug)


def draft_proposal(state: RoundState, fns: RoundFunctions) -> Any:
    """What the drafter proposes, None without one. Arguments and errors as for `speculative_round`."""
    # Before any draft work: a constrained batch must not run without its rows.
    require_grammar_rows(fns.algorithm, constrained=state.constrained, has_rows=fns.grammar_rows is not None)
    if (fns.draft is None) != (fns.build is None):
        raise ValueError("fns: `draft` and `build` must be given together, or neither.")
    _check_state(state)
    if fns.draft is None:
        return None
    with jax.named_scope("draft"):
        return fns.draft(state.draft_cache, state.root_token_ids, state.lengths)


def draft_tree(state: RoundState, proposal: Any, fns: RoundFunctions) -> DraftTree:
    """The tree of what `draft_proposal` gave."""
    return root_tree(state.root_token_ids) if fns.build is None else fns.build(proposal, state.root_token_ids)


def verify_tree(state: RoundState, tree: DraftTree, fns: RoundFunctions, *, max_depth: int) -> Verified:
    """The target's pass over a tree. Arguments as for `speculative_round`."""
    max_depth = checks.static_int(max_depth, "max_depth", minimum=0)
    batch, slots = checks.check_tree_shapes(tree, "the result of fns.build")
    with jax.named_scope("verify"):
        # Nodes deeper than max_depth can not be accepted, so their rows need not be complete.
        mask = ancestor_mask(tree, max_depth=min(max_depth, slots - 1))
        verified = fns.verify(state.cache, tree.token_ids, positions(tree, state.lengths), mask)
    checks.as_float32(verified.logits, "fns.verify's logits", (batch, slots, None), "B, N, V")
    return verified


def finish_round(
    state: RoundState,
    tree: DraftTree,
    verified: Verified,
    fns: RoundFunctions,
    stop_token_ids: jax.Array,
    *,
    max_depth: int,
    debug: bool = False,
) -> tuple[RoundState, RoundOutput]:
    """The last step: choose, accept, cut and commit. Arguments, results and errors as for `speculative_round`."""
    require_grammar_rows(fns.algorithm, constrained=state.constrained, has_rows=fns.grammar_rows is not None)
    max_depth = checks.static_int(max_depth, "max_depth", minimum=0)
    _check_state(state)
    batch, slots = checks.check_tree_shapes(tree, "the result of fns.build")
    stop_token_ids = checks.as_int32(stop_token_ids, "stop_token_ids", (None,), "M")
    logits = checks.as_float32(verified.logits, "fns.verify's logits", (batch, slots, None), "B, N, V")
    rows = None
    if fns.grammar_rows is not None:
        with jax.named_scope("grammar"):
            rows = fns.grammar_rows(tree)
            logits = mask_logits(logits, rows)
    with jax.named_scope("choose"):
        target_token_ids = fns.choose(logits, tree.depths, state.emitted)
    target_token_ids = checks.as_int32(target_token_ids, "the result of fns.choose", (batch, slots), "B, N")
    path = accept(tree, target_token_ids, max_depth=max_depth)

    token_ids = _emitted_token_ids(tree, path)
    active = ~state.finished & (state.remaining > 0)
    # Where the last node's row allows nothing there is no bonus: the sequence ends on the node.
    is_dead_end = jnp.zeros_like(active) if rows is None else active & _ends_in_nothing(path, rows)
    length = path.length - is_dead_end
    counts, stopped = _cut(token_ids, length, stop_token_ids, jnp.where(active, state.remaining, 0))
    with jax.named_scope("commit"):
        cache, draft_cache = fns.commit(state.cache, state.draft_cache, verified, path.node_ids, counts)

    newest = jnp.take_along_axis(token_ids, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    remaining = state.remaining - counts
    finished = state.finished | stopped | (remaining <= 0) | is_dead_end
    grammar = state.grammar
    if fns.advance is not None:
        grammar, stuck = fns.advance(grammar, token_ids, counts)
        finished = finished | checks.as_bool(stuck, "stuck of fns.advance", (batch,), "B")
    new_state = RoundState(
        cache=cache,
        draft_cache=draft_cache,
        root_token_ids=jnp.where(active, newest, state.root_token_ids),
        lengths=state.lengths + counts,
        emitted=state.emitted + counts,
        remaining=remaining,
        finished=finished,
        grammar=grammar,
        constrained=state.constrained,
    )
    output = RoundOutput(
        token_ids=token_ids,
        counts=counts,
        acceptance_lengths=jnp.where(active, length, 0),
        stopped=stopped,
        tree=tree,
        path=path,
    )
    if debug:
        invariants.check_tree(tree)
        invariants.check_path(tree, path, target_token_ids)
        invariants.check_round(state, new_state, output)
        if rows is not None:
            invariants.check_grammar(path, token_ids, rows, active)
    return new_state, output


def _ends_in_nothing(path: AcceptedPath, rows: jax.Array) -> jax.Array:
    """bool[B]: the grammar row int32[B, N, W] of the path's last node allows no token."""
    last = jnp.take_along_axis(path.node_ids, path.length[:, None] - 1, axis=1)
    words = jnp.take_along_axis(rows, jnp.maximum(last, 0)[:, :, None], axis=1)[:, 0]
    return ~jnp.any(words != 0, axis=-1)


def _check_state(state: RoundState) -> None:
    (batch,) = checks.as_int32(state.root_token_ids, "state.root_token_ids", (None,), "B").shape
    for field in ("lengths", "emitted", "remaining"):
        checks.as_int32(getattr(state, field), f"state.{field}", (batch,), "B")
    checks.as_bool(state.finished, "state.finished", (batch,), "B")


def _emitted_token_ids(tree: DraftTree, path: AcceptedPath) -> jax.Array:
    """int32[B, D + 1]: the matched nodes' tokens, then the bonus."""
    matched = jnp.pad(path.node_ids[:, 1:], ((0, 0), (0, 1)))
    token_ids = jnp.take_along_axis(tree.token_ids, jnp.maximum(matched, 0), axis=1)
    index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(index == path.length[:, None] - 1, path.bonus_token_ids[:, None], token_ids)


def _cut(
    token_ids: jax.Array, length: jax.Array, stop_token_ids: jax.Array, remaining: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(counts int32[B], stopped bool[B]): up to `remaining` of the first `length` tokens, through the first
    stop token.
    """
    limit = jnp.minimum(length, remaining)[:, None]
    index = jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None, :]
    is_stop = jnp.any(token_ids[:, :, None] == stop_token_ids[None, None, :], axis=-1) & (index < limit)
    stopped = jnp.any(is_stop, axis=-1)
    first = jnp.argmax(is_stop, axis=-1).astype(jnp.int32)
    return jnp.where(stopped, first + 1, limit[:, 0]), stopped
