"""Admission: every argument of a generation checked, named and normalised before any device work."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from typing import Any

import numpy as np

from ddtree_jax.algorithm import MAX_BUDGET, SpeculativeAlgorithm, require, require_drafter, require_recurrent
from ddtree_jax.engine import Engine
from ddtree_jax.errors import HybridStateWarning, UnsupportedRequestError, shown
from ddtree_jax.grammar import CompiledGrammar, Grammar, vocabulary_of

MAX_BATCH = 16  # sequences decoded together; a longer list of prompts runs in groups of this
MAX_TOP_K = 2**31 - 1
# Where a constrained request's grammar rows come from. All give the same tokens: "table", small grammars as a table on
# the device; "host", any grammar; "unfiltered", as host, but drafts are not kept from what the grammar forbids.
GRAMMAR_IMPLEMENTATIONS = ("auto", "table", "host", "unfiltered")
MAX_TEMPERATURE = 1e30  # well inside float32, and already uniform over any logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a request asks for besides its prompts, in range as far as that can be told without an engine.

    `seed` is one integer for all prompts, or a list, and so is `grammar`, None for a free output; `stop_token_ids` is
    None for the model's own.
    """

    max_new_tokens: int
    algorithm: SpeculativeAlgorithm
    budget: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | list[int]
    stop_token_ids: tuple[int, ...] | None
    grammar: Grammar | list[Grammar | None] | None
    grammar_implementation: str


@dataclasses.dataclass(frozen=True)
class Request:
    """A generation with all its arguments in range. `batched` tells a list of prompts from a single one.

    grammars: one a prompt, None where the output is free.
    """

    prompts: list[list[int]]
    batched: bool
    max_new_tokens: int
    algorithm: SpeculativeAlgorithm
    budget: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seeds: list[int]
    stop_token_ids: tuple[int, ...]
    grammars: list[CompiledGrammar | None]
    grammar_implementation: str = "auto"
    started: float = dataclasses.field(default_factory=time.perf_counter)  # seconds; statistics count from here

    @property
    def mode(self) -> str:
        """Static sampling mode: unused filters cost nothing."""
        if self.temperature == 0.0:
            return "greedy"
        return "sample" if self.top_k is None and self.top_p is None and self.min_p is None else "filtered"


def check_arguments(
    max_new_tokens: Any,
    algorithm: Any,
    budget: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    stop_token_ids: Any,
    grammar: Any,
    grammar_implementation: Any = "auto",
) -> Arguments:
    """The half of `check_request` that needs no engine, so that a caller can refuse before any weights load.

    Raises:
      ValueError: a bad argument, named.
      UnsupportedRequestError: no engine of this version can do it.
    """
    member = SpeculativeAlgorithm.parse(algorithm)
    grammar = _grammar(grammar)
    if grammar is not None:
        require(member, "grammar")
    temperature = _number("temperature", temperature, 0.0, MAX_TEMPERATURE)
    if temperature > 0:
        require(member, "sampling")
    if isinstance(budget, str) and budget == "auto":
        raise UnsupportedRequestError(
            f"algorithm {member.name} has no automatic budget in this version; give an integer in [0, {MAX_BUDGET}]"
        )
    return Arguments(
        max_new_tokens=_integer("max_new_tokens", max_new_tokens, 1, None),
        algorithm=member,
        budget=_integer("budget", budget, 0, MAX_BUDGET),
        temperature=temperature,
        top_k=None if top_k is None else _integer("top_k", top_k, 1, MAX_TOP_K),
        top_p=None if top_p is None else _number("top_p", top_p, 0.0, 1.0, open_below=True),
        min_p=None if min_p is None else _number("min_p", min_p, 0.0, 1.0),
        seed=_seed(seed),
        stop_token_ids=_stop_token_ids(stop_token_ids),
        grammar=grammar,
        grammar_implementation=_grammar_implementation(grammar_implementation, grammar),
    )


def check_request(
    engine: Engine,
    prompt: Any,
    max_new_tokens: Any,
    algorithm: Any,
    budget: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    stop_token_ids: Any,
    grammar: Any,
    grammar_implementation: Any = "auto",
) -> Request:
    """Returns the request, or raises ValueError (a bad argument) or UnsupportedRequestError (nobody here can do it)."""
    if not isinstance(engine, Engine):
        raise ValueError(f"engine: got {type(engine).__name__}, allowed is what ddtree_jax.load returns")
    asked = check_arguments(
        max_new_tokens,
        algorithm,
        budget,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        stop_token_ids,
        grammar,
        grammar_implementation,
    )
    require_drafter(asked.algorithm, engine.drafter is not None)
    check_hybrid(engine, asked.algorithm, asked.budget)
    prompts, batched = _prompts(engine, prompt)
    limit, longest, new = engine.max_positions, max(len(p) for p in prompts), asked.max_new_tokens
    if longest + new > limit:
        raise ValueError(
            f"prompt and max_new_tokens: got {longest} + {new} = {longest + new} tokens, allowed are {limit} "
            "(the model's positions); shorten one of them"
        )
    if len({len(p) for p in prompts}) > 1:
        require(asked.algorithm, "ragged_batch")
    stops = _in_vocabulary(engine, asked.stop_token_ids)
    return Request(
        prompts=prompts,
        batched=batched,
        max_new_tokens=new,
        algorithm=asked.algorithm,
        budget=asked.budget,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        seeds=_one_seed_a_prompt(asked.seed, len(prompts)),
        stop_token_ids=stops,
        grammars=_compiled(engine, asked, len(prompts), stops),
        grammar_implementation=asked.grammar_implementation,
    )


def check_hybrid(engine: Engine, algorithm: SpeculativeAlgorithm, budget: int) -> None:
    """The hybrid gate (`algorithm.require_recurrent`) of an engine; the first request that needs its flag warns."""
    layers = engine.slot_order_layers
    unsafe = require_recurrent(algorithm, budget, layers, allow_unsafe=engine.allow_hybrid_unsafe, name=engine.name)
    if unsafe and HybridStateWarning not in engine.warned:
        engine.warned.add(HybridStateWarning)
        warnings.warn(
            f"{engine.name}: a branching tree on recurrent layers {', '.join(map(str, layers))}, which run in slot "
            "order (allow_hybrid_unsafe): the output may differ from plain decoding",
            HybridStateWarning,
            stacklevel=4,  # the caller of `generate`
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def _integer(name: str, value: Any, low: int, high: int | None) -> int:
    if not _is_integer(value) or value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: got {shown(value)}, allowed is an integer {allowed}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float, *, open_below: bool = False) -> float:
    ok = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if ok:
        try:
            number = float(value)
        except OverflowError:  # an integer beyond any float
            number = math.inf
        ok = math.isfinite(number) and low <= number <= high and not (open_below and number == low)
    if not ok:
        upper = "infinity)" if high == math.inf else f"{high:g}]"
        raise ValueError(
            f"{name}: got {shown(value)}, allowed is a number in {'(' if open_below else '['}{low:g}, {upper}"
        )
    return float(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _prompts(engine: Engine, prompt: Any) -> tuple[list[list[int]], bool]:
    """Token ids a prompt, and whether the caller gave a list of prompts."""
    if isinstance(prompt, str):
        return [_one_prompt(engine, prompt, "prompt")], False
    if not _is_list(prompt):
        raise ValueError(f"prompt: got {type(prompt).__name__}, allowed are str, token ids, or a list of either")
    if len(prompt) == 0:
        raise ValueError("prompt: got an empty list, allowed is at least one token or one prompt")
    if all(isinstance(item, str) or _is_list(item) for item in prompt):
        return [_one_prompt(engine, item, f"prompt {i}") for i, item in enumerate(prompt)], True
    return [_one_prompt(engine, prompt, "prompt")], False


def _one_prompt(engine: Engine, prompt: Any, name: str) -> list[int]:
    size = engine.target.config.vocab_size
    if isinstance(prompt, str):
        if engine.tokenizer is None:
            raise ValueError(f"{name}: got text, but {engine.name} has no tokenizer; allowed are token ids")
        prompt = engine.tokenizer.encode(prompt)
    if len(prompt) == 0:
        raise ValueError(f"{name}: got no tokens, allowed is at least one")
    for token in prompt:
        if not _is_integer(token) or not 0 <= token < size:
            raise ValueError(f"{name}: got token id {shown(token)}, allowed are integers in [0, {size - 1}]")
    return [int(token) for token in prompt]


def _seed(seed: Any) -> int | list[int]:
    if _is_integer(seed):
        return int(seed)
    if not _is_list(seed) or not all(_is_integer(s) for s in seed):
        raise ValueError(f"seed: got {shown(seed)}, allowed is an integer, or a list of them (one a prompt)")
    return [int(s) for s in seed]


def _one_seed_a_prompt(seed: int | list[int], count: int) -> list[int]:
    if isinstance(seed, int):
        return [seed] * count
    if len(seed) != count:
        raise ValueError(f"seed: got {len(seed)} seeds for {count} prompts, allowed is one integer or one a prompt")
    return seed


def _stop_token_ids(stop_token_ids: Any) -> tuple[int, ...] | None:
    if stop_token_ids is None:
        return None
    if not _is_list(stop_token_ids) or not all(_is_integer(i) and i >= 0 for i in stop_token_ids):
        raise ValueError(f"stop_token_ids: got {shown(stop_token_ids)}, allowed is a list of token ids (integers >= 0)")
    return tuple(dict.fromkeys(int(i) for i in stop_token_ids))


def _in_vocabulary(engine: Engine, stop_token_ids: tuple[int, ...] | None) -> tuple[int, ...]:
    if stop_token_ids is None:
        return engine.stop_token_ids
    size = engine.target.config.vocab_size
    if stop_token_ids and max(stop_token_ids) >= size:
        raise ValueError(f"stop_token_ids: got {shown(list(stop_token_ids))}, allowed are token ids in [0, {size - 1}]")
    return stop_token_ids


def _grammar(grammar: Any) -> Grammar | list[Grammar | None] | None:
    """None also for a list without any grammar."""
    if grammar is None or isinstance(grammar, Grammar):
        return grammar
    if not isinstance(grammar, (list, tuple)) or not all(one is None or isinstance(one, Grammar) for one in grammar):
        raise ValueError(
            f"grammar: got {type(grammar).__name__}, allowed is a ddtree_jax.Grammar, or a list of one or None a prompt"
        )
    return list(grammar) if any(grammar) else None


def _grammar_implementation(name: Any, grammar: Any) -> str:
    if not isinstance(name, str) or name not in GRAMMAR_IMPLEMENTATIONS:
        raise ValueError(
            f"grammar_implementation: got {shown(name)}, allowed are {', '.join(map(repr, GRAMMAR_IMPLEMENTATIONS))}"
        )
    if name != "auto" and grammar is None:
        raise ValueError(f"grammar_implementation: got {shown(name)} without a grammar, allowed is then 'auto'")
    return name


def _compiled(
    engine: Engine, asked: Arguments, count: int, stop_token_ids: tuple[int, ...]
) -> list[CompiledGrammar | None]:
    """The grammar of each prompt, for this engine's tokens."""
    grammars = asked.grammar if isinstance(asked.grammar, list) else [asked.grammar] * count
    if len(grammars) != count:
        raise ValueError(f"grammar: got {len(grammars)} for {count} prompts, allowed is one grammar or one a prompt")
    if not any(grammars):
        return [None] * count
    if engine.tokenizer is None:
        raise ValueError(f"grammar: got one, but {engine.name} has no tokenizer, and a grammar speaks of text")
    vocabulary = vocabulary_of(engine.tokenizer, engine.target.config.vocab_size)
    compiled = {one: vocabulary.compile(one, stop_token_ids) for one in dict.fromkeys(grammars) if one is not None}
    if asked.grammar_implementation == "table":
        for grammar, one in compiled.items():
            if one.automaton is None:
                raise ValueError(
                    f"grammar_implementation: got 'table', and this grammar ({grammar.kind}) has no small table; "
                    "allowed are 'auto', 'host' and 'unfiltered'"
                )
    return [None if one is None else compiled[one] for one in grammars]
