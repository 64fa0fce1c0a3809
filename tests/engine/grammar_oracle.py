"""Constrained decoding the slow way: the full forward of the target, and a fresh matcher for every row."""

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from ddtree_jax.engine import Engine
from ddtree_jax.grammar import CompiledGrammar, Grammar, unpack, vocabulary_of
from ddtree_jax.models import target_logits


def compiled_for(engine: Engine, grammar: Grammar, stops: Sequence[int]) -> CompiledGrammar:
    return vocabulary_of(engine.tokenizer, engine.target.config.vocab_size).compile(grammar, stops)


def allowed_after(grammar: CompiledGrammar, token_ids: Sequence[int]) -> np.ndarray:
    """bool[V]: what may follow these tokens, by a state that has seen nothing else."""
    state = grammar.start()
    state.advance(token_ids)
    return unpack(state.root_row(), grammar.vocabulary.vocab_size)


def next_logits(engine: Engine, prompts: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """float32[B, V] after each prompt; padded to one width, which a causal forward does not see."""
    padded = np.zeros((len(prompts), width), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    logits = np.asarray(target_logits(engine.target, padded))
    return logits[np.arange(len(prompts)), [len(ids) - 1 for ids in prompts]]


def greedy(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    grammars: Sequence[Grammar | None],
    max_new_tokens: int,
    stops: Sequence[int],
) -> list[list[int]]:
    """Plain constrained decoding, all sequences side by side."""
    compiled = [None if one is None else compiled_for(engine, one, stops) for one in grammars]
    width = max(map(len, prompts)) + max_new_tokens
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits = next_logits(engine, [[*p, *o] for p, o in zip(prompts, outputs, strict=True)], width)
        for one, output, row in zip(compiled, outputs, logits, strict=True):
            if output and output[-1] in stops:
                continue
            if one is not None:
                row = np.where(allowed_after(one, output), row, -np.inf)
            output.append(int(row.argmax()))
    return outputs


def law(
    engine: Engine, prompt: Sequence[int], grammar: Grammar, stops: Sequence[int], temperature: float, width: int
) -> dict[tuple[int, ...], float]:
    """Every output of a finite grammar with its probability under constrained sampling, in float64."""
    compiled = compiled_for(engine, grammar, stops)

    @functools.cache
    def follow(path: tuple[int, ...]) -> np.ndarray:
        logits = next_logits(engine, [[*prompt, *path]], width)[0].astype(np.float64) / temperature
        weights = np.where(allowed_after(compiled, path), np.exp(logits - logits.max()), 0.0)
        return weights / weights.sum()

    def outcomes(path: tuple[int, ...], probability: float) -> Iterator[tuple[tuple[int, ...], float]]:
        for token in np.flatnonzero(follow(path)):
            below, mass = (*path, int(token)), probability * float(follow(path)[token])
            if token in stops:
                yield below, mass
            else:
                yield from outcomes(below, mass)

    return dict(outcomes((), 1.0))
