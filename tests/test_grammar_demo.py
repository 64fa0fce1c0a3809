"""Grammars of every kind on the shipped pair: valid for an independent validator, equal to plain constrained decoding
for every algorithm and budget, and no worse accepted with filtered drafts than without.
"""

import dataclasses

import pytest

import ddtree_jax
from ddtree_jax.engine import Engine
from ddtree_jax.grammar import Grammar
from tests.engine import grammar_oracle
from tests.grammar.conftest import allowed
from tests.grammar.grammars import CASES

NAMES = sorted(CASES)
GROUP = 15  # prompts decoded together; equal groups, so that one program serves all
NEW = 48
PROMPT = "import json\n\nVALUE = json.loads('''"
RUNS = [("none", 0), ("dflash", 0), ("ddtree", 4), ("ddtree", 32)]
CLOSERS = '"}])<c0123456789ae'  # tokens that end what the grammars leave open, the best first
FEW = ("json nested", "regex alternatives", "choices awkward")


def without_white_space(grammar: Grammar) -> Grammar:
    """This model goes on with white space for ever where JSON allows it, and the outputs would never be complete."""
    return dataclasses.replace(grammar, compact=grammar.kind == "json_schema")


def decode(engine: Engine, names, algorithm, budget, implementation="host", **options) -> dict[str, ddtree_jax.Result]:
    grammars = [without_white_space(CASES[name][0]) for name in names]
    found = {}
    for at in range(0, len(names), GROUP):
        group = list(range(at, min(at + GROUP, len(names))))
        results = ddtree_jax.generate(
            engine,
            [PROMPT] * len(group),
            NEW,
            algorithm,
            budget,
            grammar=[grammars[i] for i in group],
            grammar_implementation=implementation,
            **options | ({"seed": [1000 + i for i in group]} if options else {}),
        )
        found |= {names[i]: result for i, result in zip(group, results, strict=True)}
    return found


def assert_valid(engine: Engine, results: dict[str, ddtree_jax.Result]) -> int:
    """Every output passes its own validator, one that was cut with some ending; returns how many are complete."""
    complete = 0
    for name, result in results.items():
        assert result.finish_reason in ("stop", "length"), (name, result.error)
        complete += result.finish_reason == "stop"
        text = result.text if result.finish_reason == "stop" else ended(engine, name, result.token_ids)
        assert text.startswith(result.text) and CASES[name][1](text), (name, text)
    return complete


def ended(engine: Engine, name: str, token_ids: list[int]) -> str:
    """The text of a cut output, brought to an end by tokens that close what is open."""
    state = grammar_oracle.compiled_for(engine, without_white_space(CASES[name][0]), engine.stop_token_ids).start()
    state.advance(token_ids)
    spelling, token_ids = state.compiled.vocabulary.token_bytes, list(token_ids)
    while not state.is_complete:
        assert len(token_ids) < 400, (name, token_ids)
        options = allowed(state.compiled, state.root_row())
        ranks = {i: CLOSERS.find(spelling[i].decode("latin-1")) for i in options}
        token_ids.append(min(options, key=lambda i: ranks[i] if ranks[i] >= 0 else len(CLOSERS)))
        state.advance(token_ids[-1:])
    return engine.tokenizer.decode(token_ids)


@pytest.fixture(scope="module")
def plain(demo_engine):
    return decode(demo_engine, NAMES, "none", 0)


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [("ddtree", 8), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("none", 0), ("dflash", 0)))],
)
def test_a_few_grammars(demo_engine, algorithm, budget):
    prompt = demo_engine.tokenizer.encode(PROMPT)
    grammars = [without_white_space(CASES[name][0]) for name in FEW]
    expected = grammar_oracle.greedy(demo_engine, [prompt] * 3, grammars, NEW, demo_engine.stop_token_ids)
    results = decode(demo_engine, FEW, algorithm, budget)
    assert [results[name].token_ids for name in FEW] == expected
    assert assert_valid(demo_engine, results) == 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_plain_constrained_decoding_is_the_masked_argmax(demo_engine, plain):
    assert len(NAMES) >= 40
    prompt = demo_engine.tokenizer.encode(PROMPT)
    for at in range(0, len(NAMES), GROUP):
        names = NAMES[at : at + GROUP]
        grammars = [without_white_space(CASES[name][0]) for name in names]
        expected = grammar_oracle.greedy(demo_engine, [prompt] * len(names), grammars, NEW, demo_engine.stop_token_ids)
        for name, token_ids in zip(names, expected, strict=True):
            assert plain[name].token_ids == token_ids, name
    assert assert_valid(demo_engine, plain) >= 0.7 * len(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_algorithm_gives_the_same_and_filtered_drafts_are_accepted_no_less(demo_engine, plain):
    for algorithm, budget in RUNS[1:]:
        filtered = decode(demo_engine, NAMES, algorithm, budget)
        unfiltered = decode(demo_engine, NAMES, algorithm, budget, "unfiltered")
        # The same tokens in no more rounds. (The mean of the lengths also counts what the last round is cut by.)
        worse, rounds = [], [0, 0]
        for name in NAMES:
            assert filtered[name].token_ids == plain[name].token_ids, (algorithm, budget, name)
            assert unfiltered[name].token_ids == plain[name].token_ids, (algorithm, budget, name)
            ours, theirs = (r[name].stats.num_rounds for r in (filtered, unfiltered))
            rounds = [rounds[0] + ours, rounds[1] + theirs]
            if ours > theirs:
                worse.append((name, theirs, ours))
        assert not worse, (algorithm, budget, worse)
        assert rounds[0] < 0.75 * rounds[1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tables_on_the_device_give_the_same(demo_engine, plain):
    vocabulary = {n: grammar_oracle.compiled_for(demo_engine, CASES[n][0], demo_engine.stop_token_ids) for n in NAMES}
    names = [name for name in NAMES if vocabulary[name].automaton is not None]
    assert len(names) >= 8
    for algorithm, budget in RUNS:
        results = decode(demo_engine, names, algorithm, budget, "table")
        assert {name: r.token_ids for name, r in results.items()} == {name: plain[name].token_ids for name in names}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sampled_outputs_are_valid_and_equal(demo_engine):
    expected = decode(demo_engine, NAMES, "none", 0, temperature=1.0, top_p=0.98)
    assert assert_valid(demo_engine, expected) >= 0.7 * len(NAMES)
    for algorithm, budget in RUNS[1:]:
        results = decode(demo_engine, NAMES, algorithm, budget, temperature=1.0, top_p=0.98)
        for name in NAMES:
            assert results[name].token_ids == expected[name].token_ids, (algorithm, budget, name)
