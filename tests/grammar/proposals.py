"""Random drafter proposals for a grammar, and filtered trees and chains by enumeration."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ddtree_jax.grammar import CompiledGrammar
from ddtree_jax.grammar_walk import SequenceGrammar

from .conftest import allowed

KINDS = ("continuous", "few values", "uniform", "sparse", "extreme")


def random_proposals(made: CompiledGrammar, rng, depth: int, k: int, *, kind: str, paired: bool, useful: int = 4):
    """(log_probs float32[L, K] or [L, K, K], token_ids int32[L, K]): some of each row may follow a random live path."""
    state, rows = made.start(), []
    for _ in range(depth):
        options = allowed(made, state.root_row())
        if not options:
            state = made.start()
            options = allowed(made, state.root_row())
        some = rng.choice(options, min(len(options), useful), replace=False)
        others = rng.permutation(made.vocabulary.vocab_size)
        row = list(dict.fromkeys([*some.tolist(), *made.stop_token_ids, *others.tolist()]))[:k]
        rows.append(rng.permutation(row))
        state.advance([int(some[0])])
    shape = (depth, k, k) if paired else (depth, k)
    scores = -np.abs(rng.normal(size=shape)) * 3
    if kind == "few values":
        scores = rng.choice([-0.1, -0.2, -0.5, -1.0], size=shape)
    elif kind == "uniform":
        scores = np.full(shape, -0.7)
    elif kind == "sparse":
        scores = np.where(rng.random(shape) < 0.5, -np.inf, np.round(scores))
        scores = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, 0.5, np.inf], size=shape), scores)
    elif kind == "extreme":
        scores = np.where(rng.random(shape) < 0.4, -3e38, np.where(rng.random(shape) < 0.3, -0.0, scores * 40))
    return scores.astype(np.float32), np.array(rows, np.int32)


class Prefix(NamedTuple):
    """A live prefix: what it adds to the one above it, and the row after it."""

    score: np.float32
    ranks: tuple[int, ...]
    token: int
    row: np.ndarray


class _Option(NamedTuple):
    rank: int
    token: int
    column: int
    log_prob: float


def _options(state: SequenceGrammar, scores, tokens, row, above, *, renormalise, forced) -> list[_Option]:
    """The children of a prefix by rank, from the definition; `above` None: below a forced token."""
    k = tokens.shape[1]
    values = [-math.inf] * k
    for column in range(k):
        if scores.ndim == 2:
            below = scores[row, column]
        else:
            below = scores[row, :, column] if above is None else scores[row, above, column]
        usable = [float(v) for v in np.atleast_1d(below) if v <= 0]
        values[column] = max(usable, default=-math.inf)
    ranked = sorted((c for c in range(k) if values[c] > -math.inf), key=lambda c: (-values[c], tokens[row, c]))
    may_follow = set(allowed(state.compiled, state.root_row()))
    live = [(rank, c) for rank, c in enumerate(ranked) if int(tokens[row, c]) in may_follow]
    if live:
        best = values[live[0][1]]
        log_mass = math.log1p(math.fsum(math.exp(values[c] - best) for _, c in live[1:]))
        rest = 0.0
        if scores.ndim == 2:
            rest = 1.0 - math.fsum(math.exp(v) for v in values)
        others = rest * max(len(may_follow) - len(live), 0) / state.compiled.vocabulary.vocab_size
        if others > 0:
            log_mass = float(np.logaddexp(log_mass, math.log(others) - best))
        # Not values[c] - (best + log(mass)): far below 0 that sum would lose the logarithm.
        return [
            _Option(rank, int(tokens[row, c]), c, values[c] - best - log_mass if renormalise else values[c])
            for rank, c in live
        ]
    only = sorted(may_follow) if len(may_follow) == 1 and not state.is_complete else []
    if not only and forced == "text":
        only = state.suggested_tokens(1)
    return [_Option(k, only[0], -1, 0.0)] if only and forced != "off" else []


def _after(state: SequenceGrammar, token: int) -> SequenceGrammar:
    below = state.copy()
    below.advance([token])
    return below


def best_live_prefixes(state, scores, tokens, budget, *, renormalise, forced) -> list[Prefix]:
    """All live prefixes, sorted: the `budget` best."""
    found: list[Prefix] = []

    def visit(state: SequenceGrammar, score: np.float32, ranks: tuple[int, ...], above: int | None) -> None:
        if len(ranks) == tokens.shape[0] or state.is_finished:
            return
        options = _options(state, scores, tokens, len(ranks), above, renormalise=renormalise, forced=forced)
        for option in options:
            with np.errstate(over="ignore"):
                total = np.float32(score + np.float32(option.log_prob))
            if total > -np.inf:
                below = _after(state, option.token)
                found.append(Prefix(total, (*ranks, option.rank), option.token, below.root_row()))
                visit(below, total, found[-1].ranks, None if option.column < 0 else option.column)

    visit(state, np.float32(0.0), (), 0)
    return sorted(found, key=lambda prefix: (-prefix.score, prefix.ranks))[:budget]


def best_live_chain(state, scores, tokens, *, renormalise, forced) -> list[Prefix]:
    found: list[Prefix] = []
    score, ranks, above = np.float32(0.0), (), 0
    while len(ranks) < tokens.shape[0] and not state.is_finished:
        options = _options(state, scores, tokens, len(ranks), above, renormalise=renormalise, forced=forced)
        if not options:
            break
        with np.errstate(over="ignore"):
            score = np.float32(score + np.float32(options[0].log_prob))
        if score == -np.inf:
            break
        state, ranks = _after(state, options[0].token), (*ranks, options[0].rank)
        above = None if options[0].column < 0 else options[0].column
        found.append(Prefix(score, ranks, options[0].token, state.root_row()))
    return found


def assert_tree_holds(tree, expected: list[Prefix], root_token_id: int, root_row: np.ndarray) -> None:
    """Every field of a filtered tree, padding included."""
    slots, count = len(tree.token_ids), 1 + len(expected)
    slot_of = {(): 0, **{prefix.ranks: slot for slot, prefix in enumerate(expected, 1)}}
    padding = slots - count
    assert tree.num_nodes == count
    assert tree.token_ids.tolist() == [root_token_id, *(p.token for p in expected), *[0] * padding]
    assert tree.parents.tolist() == [-1, *(slot_of[p.ranks[:-1]] for p in expected), *[-1] * padding]
    assert tree.depths.tolist() == [0, *(len(p.ranks) for p in expected), *[0] * padding]
    scores = np.array([0.0, *(p.score for p in expected), *[-np.inf] * padding], np.float32)
    np.testing.assert_allclose(tree.log_probs, scores, rtol=1e-6)
    rows = np.stack([root_row, *(p.row for p in expected), *[np.zeros_like(root_row)] * padding])
    np.testing.assert_array_equal(tree.rows(), rows)
