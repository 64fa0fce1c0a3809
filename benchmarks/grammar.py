"""What a grammar costs a round, at the vocabulary of GLM-5: the host's work, and the device's.

    python benchmarks/grammar.py [--vocab 154880] [--budget 32] [--rounds 60] [--json FILE]

The tokenizer is trained on the running Python's own library and packages (half a minute), so that tokens are as long
as real ones. A sequence is led along texts of each grammar; before each step the drafter is imitated: K candidates a
depth, the text's own next token among them at a random rank.

Columns, milliseconds: `tree`, the filtered tree, which the verify pass waits for; `rows`, the rest of its rows, and
`walk`, the rows of an unfiltered tree: both run beside the verify pass; `advance`, the emitted tokens. On the device, a
call each: `mask`, the upload of the rows and the masked logits; `table`, tree, rows and mask where the grammar is a
table; `build`, the unfiltered tree, for comparison.
"""

import argparse
import json
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from ddtree_jax.grammar import Grammar, GrammarVocabulary
from ddtree_jax.grammar_tree import filtered_tree
from ddtree_jax.tokenizer import Tokenizer
from ddtree_jax.tree import (
    build_constrained_tree,
    build_tree_from_candidates,
    mask_logits,
    node_states,
    stack_tables,
    state_rows,
)

DEPTH, CANDIDATES = 15, 64
STOP = 0
CASES = {
    "json person": (
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "tags": {"type": "array", "items": {"enum": ["admin", "editor", "reader"]}},
                    "address": {
                        "type": "object",
                        "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
                        "required": ["street", "city"],
                        "additionalProperties": False,
                    },
                },
                "required": ["name", "age", "tags", "address"],
                "additionalProperties": False,
            }
        ),
        '{"name": "Ada Lovelace", "age": 36, "tags": ["admin", "reader"], '
        '"address": {"street": "12 St James\'s Square", "city": "London"}}',
    ),
    "json anything": (Grammar.json_schema({}), '[1, 2.5, {"key": ["some text", null, true]}, "more text"]'),
    "regex date": (Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}( [0-9]{2}:[0-9]{2})?"), "2026-11-30 12:34"),
    "choices": (
        Grammar.choices(["positive", "negative", "neutral", "not enough information"]),
        "not enough information",
    ),
}


def trained_tokenizer(vocab_size: int, megabytes: float) -> Tokenizer:
    """A byte-level BPE of the sources of the standard library and of the packages beside it."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    texts, size = [], 0
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        text = file.read_text(encoding="utf-8", errors="ignore")
        texts.append(text)
        size += len(text)
        if size > megabytes * 1e6:
            break
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<stop>"],
        initial_alphabet=alphabet,
        min_frequency=1,
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def proposal(rng: np.random.Generator, ahead: list[int], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(log_probs float32[L, K], token_ids int32[L, K]): the text's own tokens at random early ranks."""
    token_ids = np.stack([rng.choice(vocab, CANDIDATES, replace=False) for _ in range(DEPTH)]).astype(np.int32)
    for row, token in enumerate(ahead[:DEPTH]):
        if token not in token_ids[row]:
            token_ids[row, rng.integers(0, 4)] = token
    log_probs = -np.sort(rng.exponential(2.0, (DEPTH, CANDIDATES)), axis=1).astype(np.float32)
    return log_probs - np.float32(0.05), token_ids


def timed(times: dict[str, list[float]], name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    start = time.perf_counter()
    result = call(*args, **options)
    times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
    return result


def host_times(vocabulary: GrammarVocabulary, tokenizer: Tokenizer, name: str, budget: int, rounds: int):
    """Times of one grammar's host work over rounds of 1..6 emitted tokens."""
    grammar, text = CASES[name]
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {}
    compiled = timed(times, "compile", vocabulary.compile, grammar, [STOP])
    while len(times.get("tree", ())) < rounds:
        sequence, ahead = compiled.start(), [*tokenizer.encode(text), STOP]
        sequence.advance(ahead[:1])
        root, ahead = ahead[0], ahead[1:]
        while ahead:
            scores, tokens = proposal(rng, ahead, vocabulary.vocab_size)
            tree = timed(times, "tree", filtered_tree, sequence, root, scores, tokens, budget, forced="text")
            timed(times, "rows", tree.rows)
            free = build_tree_from_candidates(scores[None], tokens[None], jnp.array([root]), budget=budget)
            parents, drafted = np.asarray(free.parents[0]), np.asarray(free.token_ids[0])
            timed(times, "walk", sequence.walk, drafted, parents, int(free.num_nodes[0]))
            emitted = ahead[: int(rng.integers(1, 7))]
            timed(times, "advance", sequence.advance, emitted)
            root, ahead = emitted[-1], ahead[len(emitted) :]
    return times


def device_times(vocabulary: GrammarVocabulary, budget: int, repeats: int) -> dict[str, list[float]]:
    """Times of the device's part, each call with its dispatch."""
    times: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    vocab = vocabulary.vocab_size
    logits = jax.random.normal(jax.random.key(0), (1, budget + 1, vocab))
    rows = np.full((1, budget + 1, vocabulary.num_words), -1, np.int32)
    automaton = vocabulary.compile(CASES["choices"][0], [STOP]).automaton
    table = stack_tables([automaton], vocab)
    scores, tokens = proposal(rng, [], vocab)
    scores, tokens, root = jnp.asarray(scores[None]), jnp.asarray(tokens[None]), jnp.zeros((1,), jnp.int32)

    @jax.jit
    def with_table(logits, scores, tokens, root):
        tree = build_constrained_tree(scores, tokens, root, table, root, budget=budget)
        return mask_logits(logits, state_rows(table, node_states(tree, table, root, max_depth=DEPTH)))

    calls = {
        "mask": lambda: mask_logits(logits, rows),
        "table": lambda: with_table(logits, scores, tokens, root),
        "build": lambda: build_tree_from_candidates(scores, tokens, root, budget=budget),
    }
    for name, call in calls.items():
        jax.block_until_ready(call())
        for _ in range(repeats):
            timed(times, name, _wait, call)
    return times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=154880)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60, help="rounds timed a grammar, at least")
    parser.add_argument("--megabytes", type=float, default=120.0, help="text that the tokenizer is trained on, at most")
    parser.add_argument("--json", help="also write the numbers here")
    options = parser.parse_args()
    tokenizer = trained_tokenizer(options.vocab, options.megabytes)
    start = time.perf_counter()
    vocabulary = GrammarVocabulary(tokenizer, options.vocab)
    seconds = time.perf_counter() - start
    print(
        f"{tokenizer.vocab_size} tokens of {options.vocab} rows (vocabulary made in {seconds:.1f} s), budget "
        f"{options.budget}, L {DEPTH}, K {CANDIDATES}; {jax.devices()[0].device_kind}; medians (95th percentiles), ms"
    )
    report = {}
    columns = ("tree", "rows", "walk", "advance")
    for name in CASES:
        times = host_times(vocabulary, tokenizer, name, options.budget, options.rounds)
        report[name] = {column: _summary(times[column]) for column in columns} | {"compile": times["compile"][0]}
        cells = "  ".join(f"{column} {_cell(times[column])}" for column in columns)
        print(f"{name:14s} compile {times['compile'][0]:6.1f}  {cells}", flush=True)
    times = device_times(vocabulary, options.budget, options.rounds)
    report["device"] = {name: _summary(values) for name, values in times.items()}
    print("device         " + "  ".join(f"{name} {_cell(values)}" for name, values in times.items()))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))


def _wait(call: Callable[[], Any]) -> None:
    jax.block_until_ready(call())


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p95": float(np.percentile(values, 95))}


def _cell(values: list[float]) -> str:
    summary = _summary(values)
    return f"{summary['median']:.2f} ({summary['p95']:.2f})"


if __name__ == "__main__":
    main()
