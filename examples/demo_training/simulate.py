"""Acceptance without decoding: every round of greedy decoding is scored from one pass over a known text.

When the target is greedy, its text is known beforehand. So the drafter can draft at every position at once; a
chain or tree drafted at position p is accepted as far as the text itself follows it, and decoding hops from
there. The numbers equal those of real generation with the same weights and dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax import tree
from ddtree_jax.models.config import DFlashConfig, Glm5Config

from . import drafter as drafting
from . import modules


def chain_lengths(drafted: jax.Array, labels: jax.Array) -> jax.Array:
    """Tokens that a round emits for a chain, the bonus included. Two int32[..., L] -> int32[...]."""
    return 1 + jnp.sum(jnp.cumprod((drafted == labels).astype(jnp.int32), axis=-1), axis=-1)


def tree_lengths(logits: jax.Array, roots: jax.Array, labels: jax.Array, budget: int) -> jax.Array:
    """Tokens that a round emits for the tree of `budget` nodes.

    Args:
      logits: float32[M, L, V] of the drafter.
      roots: int32[M].
      labels: int32[M, L], the text after each root.
      budget: nodes besides the root.

    Returns:
      int32[M].
    """
    return followed(tree.build_tree(logits, roots, budget=budget, topk_implementation="top_k"), labels)


def followed(drafted: tree.DraftTree, labels: jax.Array) -> jax.Array:
    """Tokens that a round emits for these trees on texts labels int32[M, L]: int32[M]."""
    depth = labels.shape[1]
    # Off the text's own path the walk never asks, so the label of a node's depth stands for the target's
    # choice.
    choices = jnp.take_along_axis(labels, jnp.minimum(drafted.depths, depth - 1), axis=1)
    # Beyond the last label nothing can match: a node at depth L is a leaf.
    return tree.accept(drafted, choices).length


def make_scorer(
    target_graphdef: nnx.GraphDef,
    drafter_graphdef: nnx.GraphDef,
    *,
    prompt_length: int,
    new_tokens: int,
    budgets: Sequence[int],
) -> Callable[[Any, Any, jax.Array], dict[str, jax.Array]]:
    """A jitted function (target params, drafter params, tokens int32[B, T]) -> {name: int32[B, anchors]}.

    Parameters are in the compute dtype. Anchor i is position `prompt_length + i`; the names are "dflash" and
    "ddtree8" and so on. The texts must hold prompt_length + new_tokens + L tokens.
    """

    @jax.jit
    def score(target_params: Any, drafter_params: Any, tokens: jax.Array) -> dict[str, jax.Array]:
        drafter = nnx.merge(drafter_graphdef, drafter_params)
        depth = drafter.config.draft_depth
        taps = drafter.config.target_layer_ids
        target, output = drafting.target_pass(target_graphdef, target_params, tokens, taps)
        anchors = jnp.arange(prompt_length, prompt_length + new_tokens - 1, dtype=jnp.int32)
        anchors = jnp.broadcast_to(anchors[None], (tokens.shape[0], len(anchors)))
        hidden = drafting.block_hidden(drafter, target.embed_tokens, output.features, tokens, anchors)
        logits = drafter.scale_logits(target.head_logits(hidden))
        places = anchors[:, :, None] + jnp.arange(1, depth + 1, dtype=jnp.int32)[None, None]
        labels = jnp.take_along_axis(tokens, places.reshape(tokens.shape[0], -1), axis=1).reshape(places.shape)
        flat = anchors.size
        roots = jnp.take_along_axis(tokens, anchors, axis=1).reshape(flat)
        rows, labels = logits.reshape(flat, depth, -1), labels.reshape(flat, depth)
        if drafter.selector is None:
            lengths = {"dflash": chain_lengths(jnp.argmax(rows, axis=-1), labels)}
            trees = {budget: tree_lengths(rows, roots, labels, budget) for budget in budgets}
        else:
            pairs = drafter.selector(hidden.reshape(flat, depth, -1), rows, roots)
            lengths = {"dflash": followed(tree.chain_from_pairs(*pairs, roots), labels)}
            build = functools.partial(tree.build_tree_from_pairs, *pairs, roots)
            trees = {budget: followed(build(budget=budget), labels) for budget in budgets}
        lengths |= {f"ddtree{budget}": values for budget, values in trees.items()}
        return {name: values.reshape(anchors.shape) for name, values in lengths.items()}

    return score


def compile_scorer(
    target_config: Glm5Config,
    config: DFlashConfig,
    *,
    batch: int,
    length: int,
    prompt_length: int,
    new_tokens: int,
    budgets: Sequence[int],
) -> Any:
    """`make_scorer`, compiled from shapes for texts int32[batch, length]."""
    target_graphdef, target_params = modules.abstract_target(target_config, compute=True)
    graphdef, params = modules.abstract_drafter(config, target_config.hidden_size, compute=True)
    scorer = make_scorer(target_graphdef, graphdef, prompt_length=prompt_length, new_tokens=new_tokens, budgets=budgets)
    return scorer.lower(target_params, params, jax.ShapeDtypeStruct((batch, length), np.int32)).compile()


def hop(lengths: np.ndarray, text: np.ndarray, new_tokens: int, end_ids: Sequence[int]) -> list[int]:
    """Acceptance lengths of the rounds of one sequence.

    Args:
      lengths: int[new_tokens - 1], what a round would emit from each anchor.
      text: new tokens, the first of them from prefill (it belongs to no round).
      new_tokens: wanted.
      end_ids: tokens that end the text.
    """
    rounds: list[int] = []
    emitted = 1
    if text[0] in end_ids:
        return rounds
    while emitted < new_tokens:
        length = int(lengths[emitted - 1])
        rounds.append(length)
        if np.isin(text[emitted : emitted + length], end_ids).any():
            break
        emitted += length
    return rounds


def summary(rounds: Sequence[Sequence[int]]) -> dict[str, float]:
    """Mean acceptance length over prompts, over rounds (token-weighted), and of the median prompt."""
    means = [float(np.mean(r)) for r in rounds if len(r)]
    total = [x for r in rounds for x in r]
    if not total:
        return {"mean": 0.0, "token_weighted": 0.0, "median": 0.0}
    return {
        "mean": float(np.mean(means)),
        "token_weighted": float(np.mean(total)),
        "median": float(np.median(means)),
    }


def simulate(
    scorer: Callable[..., dict[str, jax.Array]],
    target_params: Any,
    drafter_params: Any,
    texts: np.ndarray,
    *,
    prompt_length: int,
    new_tokens: int,
    end_ids: Sequence[int],
    batch: int,
) -> dict[str, list[list[int]]]:
    """Rounds of every algorithm on every text. Parameters as `make_scorer` takes them; texts int[P, T]."""
    rounds: dict[str, list[list[int]]] = {}
    for start in range(0, len(texts), batch):
        group = texts[start : start + batch]
        full = np.resize(group, (batch, texts.shape[1])).astype(np.int32)
        lengths = jax.device_get(scorer(target_params, drafter_params, full))
        for name, values in lengths.items():
            for row, text in zip(values[: len(group)], group[:, prompt_length:], strict=True):
                rounds.setdefault(name, []).append(hop(row, text, new_tokens, end_ids))
    return rounds


def make_check(
    scorer: Callable[..., dict[str, jax.Array]],
    target_params: Any,
    texts: np.ndarray,
    *,
    prompt_length: int,
    new_tokens: int,
    end_ids: Sequence[int],
    batch: int,
) -> Callable[[Any], dict]:
    """A function of the drafter's float32 parameters: the chain's mean acceptance on held-out texts.

    Arguments as for `simulate`, but float32 target parameters.
    """
    frozen = modules.to_compute(target_params)

    def check(params: Any) -> dict:
        rounds = simulate(
            scorer,
            frozen,
            modules.to_compute(params),
            texts,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            end_ids=end_ids,
            batch=batch,
        )
        values = summary(rounds["dflash"])
        return {"heldout_tau": values["mean"], "heldout_tau_token_weighted": values["token_weighted"]}

    return check
