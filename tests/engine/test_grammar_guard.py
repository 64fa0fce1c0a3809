"""The grammar guard: admission refuses, and where it is bypassed the round itself stops, before any draft work."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest

import ddtree_jax
from ddtree_jax import Grammar, InvariantError, SpeculativeAlgorithm, UnsupportedRequestError, algorithm, decoding
from ddtree_jax import requests as admission
from ddtree_jax.tree import round as tree_round

DIGITS = Grammar.regex("[0-9]{3}")
MEMBERS = tuple(SpeculativeAlgorithm)


@contextlib.contextmanager
def table_without_grammar(monkeypatch, member):
    """The capability table as it would be for an algorithm whose round takes no grammar rows."""
    row = dataclasses.replace(algorithm.CAPABILITIES[member], grammar=False)
    with monkeypatch.context() as patch:
        patch.setitem(algorithm.CAPABILITIES, member, row)
        yield patch


@pytest.mark.parametrize("member", MEMBERS)
def test_admission_refuses_what_the_table_does_not_promise(text_engine, monkeypatch, member):
    with table_without_grammar(monkeypatch, member):
        with pytest.raises(UnsupportedRequestError, match=f"{member.name}.*grammar"):
            ddtree_jax.generate(text_engine, "ab", 8, member, grammar=DIGITS, stop_token_ids=[0])
        with pytest.raises(UnsupportedRequestError, match=f"{member.name}.*grammar"):
            ddtree_jax.stream(text_engine, "ab", 8, member, grammar=[DIGITS], stop_token_ids=[0])


@pytest.mark.parametrize("member", MEMBERS)
def test_regression_g72_the_round_stops_what_admission_let_pass(text_engine, monkeypatch, member):
    """One guard removed must leave the other: malformed output is never an answer."""
    with table_without_grammar(monkeypatch, member) as patch:
        patch.setattr(admission, "require", lambda *_: None)
        for run in (ddtree_jax.generate, lambda *a, **k: list(ddtree_jax.stream(*a, **k))):
            with pytest.raises(InvariantError, match=f"^{member.name} is running a batch that has grammar") as caught:
                run(text_engine, "ab", 8, member, 4, grammar=DIGITS, stop_token_ids=[0])
            assert "admission should have refused" in str(caught.value)


@pytest.mark.parametrize("member", [SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.DDTREE])
def test_the_round_checks_before_any_draft_work(text_engine, member):
    """The round's functions are traced in order: with the guard first, not even the drafter is."""
    plan, weights = decoding.make_plan(text_engine, member, 4, "greedy")
    state = _state(text_engine, plan, weights)
    functions = decoding.round_functions(plan, weights, _sampling())
    drafted = []

    def draft(*args):
        drafted.append(1)
        return functions.draft(*args)

    watched = dataclasses.replace(functions, draft=draft)
    stops = jnp.zeros((0,), jnp.int32)
    jax.eval_shape(lambda state: tree_round.speculative_round(state, watched, stops, max_depth=plan.max_depth), state)
    assert drafted == [1]
    bound = dataclasses.replace(state, constrained=True)
    for step in (
        lambda: tree_round.speculative_round(bound, watched, stops, max_depth=plan.max_depth),
        lambda: tree_round.draft_proposal(bound, watched),
        lambda: decoding.round_step(plan, weights, bound, _sampling(), stops),
        lambda: decoding.draft_step(plan, weights, bound, with_candidates=True, with_tree=True),
    ):
        with pytest.raises(InvariantError, match=member.name):
            step()
    assert drafted == [1]


def test_the_guard_costs_nothing_in_the_compiled_round(text_engine, monkeypatch):
    plan, weights = decoding.make_plan(text_engine, SpeculativeAlgorithm.DDTREE, 4, "greedy", grammar="rows")
    state = dataclasses.replace(_state(text_engine, plan, weights), constrained=True)
    rows = jnp.full((1, 5, -(-text_engine.target.config.vocab_size // 32)), -1, jnp.int32)

    def text() -> str:
        def whole_round(weights, state, rows):
            functions = decoding.round_functions(plan, weights, _sampling(), rows=rows)
            stops = jnp.zeros((0,), jnp.int32)
            return tree_round.speculative_round(state, functions, stops, max_depth=plan.max_depth)

        return jax.jit(whole_round).lower(weights, state, rows).as_text()

    guarded = text()
    calls = []
    monkeypatch.setattr(tree_round, "require_grammar_rows", lambda *_, **__: calls.append(1))
    assert text() == guarded and calls


FILTERED = {"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01}


@pytest.mark.parametrize(
    ("member", "implementation", "options"),
    [
        ("none", "host", FILTERED),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("dflash", "host", FILTERED),
                ("ddtree", "table", {}),
                ("ddtree", "table", FILTERED),
                ("ddtree", "unfiltered", {"temperature": 1.5}),
            )
        ),
    ],
)
def test_regression_g76_every_path_of_acceptance_is_masked(text_engine, member, implementation, options):
    """Greedy, sampled and filtered choices, the first token and the bonus included: no fast path without the rows."""
    result = ddtree_jax.generate(
        text_engine,
        "abc",
        16,
        member,
        4,
        grammar=Grammar.regex("[ab]{2}c[de]"),
        grammar_implementation=implementation,
        stop_token_ids=[0],
        **options,
    )
    assert result.finish_reason == "stop"
    assert len(result.text) == 4 and result.text[2] == "c"
    assert set(result.text[:2]) <= set("ab") and result.text[3] in "de"


def _sampling():
    return decoding.SamplingParams.create(1)


def _state(engine, plan, weights):
    capacity = decoding.cache_capacity(4, 8, plan.draft_depth)
    state = decoding.prefill(plan, weights, [[1, 2, 3, 4]], capacity)
    prompt = (state.cache, state.draft_cache, state.hidden)
    stops, limits = jnp.zeros((0,), jnp.int32), jnp.full((1,), 8, jnp.int32)
    return decoding.first_token(plan.for_prefill(), weights, *prompt, _sampling(), stops, limits)
