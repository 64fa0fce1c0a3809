"""generate and stream under grammars, on a small random pair: exact, beside free requests, and what can go wrong."""

import dataclasses

import chex
import jax
import pytest

import ddtree_jax
from ddtree_jax import Grammar, decoding
from ddtree_jax.grammar_walk import SequenceGrammar
from tests.engine import grammar_oracle

PROMPTS = [[7, 3, 11, 2, 40, 41, 8, 1, 17], [50, 3, 3, 21, 8, 9, 30], list(range(3, 23))]
GRAMMARS = [
    Grammar.regex("[ab]{2}c[d-f]{1,9}"),
    Grammar.json_schema(
        {
            "type": "object",
            "properties": {"tru": {"type": "boolean"}, "n": {"type": "integer"}},
            "required": ["tru", "n"],
            "additionalProperties": False,
        },
        compact=True,
    ),
    None,
]
STOPS = [0]
NEW = 20


def run(engine, algorithm, budget=0, implementation="host", prompts=PROMPTS, grammars=GRAMMARS, **options):
    options = {"stop_token_ids": STOPS} | options
    return ddtree_jax.generate(
        engine, prompts, NEW, algorithm, budget, grammar=grammars, grammar_implementation=implementation, **options
    )


@pytest.fixture(scope="module")
def plain(text_engine):
    return grammar_oracle.greedy(text_engine, PROMPTS, GRAMMARS, NEW, STOPS)


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [
        ("ddtree", 15),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("none", 0), ("dflash", 0), ("ddtree", 4))),
    ],
)
def test_greedy_equals_plain_constrained_decoding(text_engine, plain, algorithm, budget):
    results = run(text_engine, algorithm, budget)
    assert [r.token_ids for r in results] == plain
    assert len({tuple(ids) for ids in plain}) == 3
    if budget == 15:  # a tree that never accepts anything would pass the rest of this test
        assert max(r.stats.mean_acceptance_length for r in results[:2]) > 1.2


@pytest.mark.parametrize(
    ("algorithm", "implementation"),
    [
        ("ddtree", "auto"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("none", "table"), ("dflash", "table"), ("dflash", "unfiltered"), ("ddtree", "unfiltered"))
        ),
    ],
)
def test_where_the_rows_come_from_changes_nothing(text_engine, plain, algorithm, implementation):
    grammars = [GRAMMARS[0], Grammar.choices(["abc", "abd, true", "x"]), None]
    expected = [plain[0], grammar_oracle.greedy(text_engine, PROMPTS[1:2], grammars[1:2], NEW, STOPS)[0], plain[2]]
    results = run(text_engine, algorithm, 15, implementation, grammars=grammars)
    assert [r.token_ids for r in results] == expected
    assert [r.finish_reason for r in results] == ["stop" if ids[-1] == 0 else "length" for ids in expected]


@pytest.mark.slow
def test_sampled_output_is_the_same_for_every_algorithm_and_implementation(text_engine):
    grammars = [GRAMMARS[0], Grammar.regex("[a-z0-9 ]{3,12}"), None]
    options = {"temperature": 2.0, "top_p": 0.95, "seed": [3, 4, 5], "grammars": grammars}
    expected = [r.token_ids for r in run(text_engine, "none", **options)]
    for algorithm, implementation in (("dflash", "host"), ("ddtree", "host"), ("ddtree", "table")):
        results = run(text_engine, algorithm, 4, implementation, **options)
        assert [r.token_ids for r in results] == expected
    other = run(text_engine, "ddtree", 4, **{**options, "seed": [6, 7, 5]})
    assert [a.token_ids == b for a, b in zip(other, expected, strict=True)] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "implementation"), [("dflash", "host"), ("ddtree", "host"), ("ddtree", "table")])
def test_pair_scores_draft_under_grammars_too(text_dflash2_engine, plain, algorithm, implementation):
    grammars, expected = GRAMMARS, plain
    if implementation == "table":
        grammars = [GRAMMARS[0], Grammar.regex("[a-f]{4,12}"), None]
        expected = grammar_oracle.greedy(text_dflash2_engine, PROMPTS, grammars, NEW, STOPS)
    results = run(text_dflash2_engine, algorithm, 15, implementation, grammars=grammars)
    assert [r.token_ids for r in results] == expected


@pytest.mark.slow
def test_more_prompts_than_a_batch(text_engine, plain, monkeypatch):
    """The last group is filled with rows of no request."""
    from ddtree_jax import generation

    monkeypatch.setattr(generation, "MAX_BATCH", 2)
    for implementation in ("host", "unfiltered"):
        results = run(text_engine, "ddtree", 15, implementation)
        assert [r.token_ids for r in results] == plain


@pytest.mark.slow
def test_a_free_request_is_unaffected_by_its_neighbours(text_engine):
    alone = ddtree_jax.generate(text_engine, PROMPTS[2], NEW, "ddtree", 15, stop_token_ids=STOPS)
    beside = run(text_engine, "ddtree", 15)[2]
    assert beside.token_ids == alone.token_ids
    assert beside.stats.acceptance_lengths == alone.stats.acceptance_lengths


def test_stream_joins_to_the_result(text_engine, plain):
    chunks = list(
        ddtree_jax.stream(
            text_engine, PROMPTS, NEW, "ddtree", 15, grammar=GRAMMARS, stop_token_ids=STOPS, with_tree=True
        )
    )
    for i, expected in enumerate(plain):
        own = [c for c in chunks if c.index == i]
        assert sum((c.token_ids for c in own), []) == expected
        assert [c.finish_reason for c in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == ("stop" if expected[-1] in STOPS else "length") and own[-1].error is None


@pytest.mark.slow
def test_the_cut_at_the_length_is_told(text_engine, plain):
    for new in (1, 3):
        result = ddtree_jax.generate(
            text_engine, PROMPTS[0], new, "ddtree", 4, grammar=GRAMMARS[0], stop_token_ids=STOPS
        )
        assert result.token_ids == plain[0][:new] and result.finish_reason == "length" and result.error is None


@pytest.mark.parametrize(
    ("algorithm", "implementation"),
    [
        ("ddtree", "host"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("ddtree", "table"), ("none", "table"), ("none", "host"))
        ),
    ],
)
def test_a_dead_end_ends_its_sequence_and_no_other(text_engine, algorithm, implementation):
    """Upper case is not among the tokens: behind `q` the grammar demands what can not be written."""
    trap = Grammar.regex("(a|q[A-Z])" if implementation == "host" else "(aa|qQ)")
    compiled = grammar_oracle.compiled_for(text_engine, trap, STOPS)
    q = text_engine.tokenizer.encode("q")[0]
    prompt = next(
        [t, *rest]
        for t in range(3, 60)
        for rest in ([5, 8], [9, 2], [30, 31])
        if _first(text_engine, [t, *rest], compiled) == q
    )
    prompts, grammars = [prompt, *PROMPTS[:2]], [trap, GRAMMARS[0], None]
    dead, alive, free = run(text_engine, algorithm, 15, implementation, prompts, grammars)
    assert dead.token_ids == [q] and dead.text == "q"
    assert dead.finish_reason == "dead_end" and "dead end" in dead.error
    for other in (alive, free):
        assert other.finish_reason in ("stop", "length") and other.error is None and len(other.token_ids) > 3


def _first(engine, prompt, compiled, emitted=()):
    logits = grammar_oracle.next_logits(engine, [[*prompt, *emitted]], 8)[0]
    allowed = grammar_oracle.allowed_after(compiled, emitted)
    return max((float(logits[i]), int(i)) for i in range(len(allowed)) if allowed[i])[1]


@pytest.mark.parametrize(
    ("algorithm", "implementation"),
    [
        ("ddtree", "host"),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("ddtree", "table"),
                ("none", "table"),
                ("none", "host"),
                ("dflash", "host"),
                ("dflash", "table"),
                ("ddtree", "unfiltered"),
            )
        ),
    ],
)
def test_a_dead_end_below_a_drafted_node_gives_no_bonus(text_engine, algorithm, implementation):
    """The dead end is met inside a round: the path ends on its node, and the row below that allows no bonus."""
    trap = Grammar.regex("aa|aqQ" if implementation == "table" else "aa|aq[A-Z]")
    compiled = grammar_oracle.compiled_for(text_engine, trap, STOPS)
    a, q = (text_engine.tokenizer.encode(one)[0] for one in "aq")
    prompt = next(
        [t, *rest]
        for t in range(3, 60)
        for rest in ([5, 8], [9, 2], [30, 31])
        if _first(text_engine, [t, *rest], compiled, [a]) == q
    )
    prompts, grammars = [prompt, *PROMPTS[:2]], [trap, GRAMMARS[0], None]
    if implementation == "table":
        grammars[1] = Grammar.choices(["abcab"])
    dead, alive, free = run(text_engine, algorithm, 15, implementation, prompts, grammars)
    assert dead.token_ids == [a, q] and (dead.finish_reason, dead.text) == ("dead_end", "aq")
    assert sum(dead.stats.acceptance_lengths) == 1
    for other in (alive, free):
        assert other.finish_reason in ("stop", "length") and other.error is None and len(other.token_ids) > 2
    chunks = ddtree_jax.stream(
        text_engine, prompts, NEW, algorithm, 15, grammar=grammars, grammar_implementation=implementation,
        stop_token_ids=STOPS,
    )  # fmt: skip
    last = [chunk for chunk in chunks if chunk.index == 0][-1]
    assert (last.finish_reason, last.error) == ("dead_end", dead.error)
    cut = ddtree_jax.generate(
        text_engine, prompts, 2, algorithm, 15, grammar=grammars, grammar_implementation=implementation,
        stop_token_ids=STOPS,
    )  # fmt: skip
    assert (cut[0].token_ids, cut[0].finish_reason, cut[0].error) == ([a, q], "length", None)


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ("ddtree", "_fill"),
        ("ddtree", "_advance"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("none", "_fill"), ("dflash", "_fill"))),
    ],
)
def test_a_limit_of_the_library_ends_its_sequence_and_no_other(text_engine, plain, monkeypatch, algorithm, where):
    original, threshold = getattr(SequenceGrammar, where), 3 if where == "_fill" else 1

    def limited(self, *args):
        if self.compiled.grammar == GRAMMARS[0] and len(self._emitted) >= threshold:
            raise ValueError("grammar: too complex at this place of the text: too many items")
        return original(self, *args)

    monkeypatch.setattr(SequenceGrammar, where, limited)
    cut, schema, free = run(text_engine, algorithm, 15)
    assert cut.finish_reason == "error" and "too complex" in cut.error
    assert threshold <= len(cut.token_ids) and cut.token_ids == plain[0][: len(cut.token_ids)]
    assert [schema.token_ids, free.token_ids] == plain[1:]


def test_another_grammar_does_not_recompile(text_engine):
    run(text_engine, "ddtree", 15)
    traced = []
    original = decoding.round_functions

    def counting(*args, **kwargs):
        traced.append(1)
        return original(*args, **kwargs)

    decoding.round_functions = counting
    try:
        others = [Grammar.regex("x{3,9}"), Grammar.lark('start: "a" start | "b"'), None]
        run(text_engine, "ddtree", 15, grammars=others)
    finally:
        decoding.round_functions = original
    assert not traced


@pytest.mark.slow
def test_debug_checks_sees_a_row_that_was_not_obeyed(text_engine, monkeypatch):
    with ddtree_jax.debug_checks():
        fine = run(text_engine, "ddtree", 4)
    assert [r.token_ids for r in fine] == [r.token_ids for r in run(text_engine, "ddtree", 4)]
    from ddtree_jax.tree import round as tree_round

    monkeypatch.setattr(tree_round, "mask_logits", lambda logits, rows: logits)
    with ddtree_jax.debug_checks(), pytest.raises(ddtree_jax.InvariantError, match="emitted_tokens_allowed"):
        run(text_engine, "ddtree", 4)


@pytest.mark.slow
def test_what_breaks_a_grammar_is_an_invariant_error_without_debug_too(text_engine, monkeypatch):
    from ddtree_jax.tree import round as tree_round

    jax.clear_caches()
    monkeypatch.setattr(tree_round, "mask_logits", lambda logits, rows: logits)
    with pytest.raises(ddtree_jax.InvariantError, match="the grammar does not allow it"):
        run(text_engine, "none")
    monkeypatch.undo()
    jax.clear_caches()


def test_each_step_is_traced_once_a_generation(text_engine, monkeypatch):
    limited = jax.jit(chex.assert_max_traces(decoding.run_finish, n=1), static_argnums=0, donate_argnums=2)
    monkeypatch.setattr(decoding, "finish_step", limited)
    results = run(text_engine, "ddtree", 15, stop_token_ids=[0, 1])
    assert sum(r.stats.num_rounds for r in results) > 6


@pytest.mark.parametrize(
    ("grammar", "options", "named"),
    [
        ("[0-9]", {}, "grammar: got str"),
        ([GRAMMARS[0]], {}, "grammar: got 1 for 3 prompts"),
        ([GRAMMARS[0], 3, None], {}, "grammar: got list"),
        (GRAMMARS[0], {"stop_token_ids": []}, "stop_token_ids"),
        (GRAMMARS[0], {"grammar_implementation": "fast"}, "grammar_implementation: got 'fast'"),
        (None, {"grammar_implementation": "host"}, "without a grammar"),
        (GRAMMARS[1], {"grammar_implementation": "table"}, "json_schema.* has no small table"),
        (Grammar.regex("[A-Z]{3}"), {}, "admits no text"),
    ],
)
def test_bad_arguments_are_named_before_any_device_work(text_engine, monkeypatch, grammar, options, named):
    monkeypatch.setattr(decoding, "start_prefill", lambda *_: pytest.fail("device work"))
    options = {"stop_token_ids": STOPS} | options
    for call in (ddtree_jax.generate, ddtree_jax.stream):
        with pytest.raises(ValueError, match=named):
            call(text_engine, PROMPTS, NEW, grammar=grammar, **options)


def test_a_target_without_a_tokenizer_takes_no_grammar(small_engine):
    with pytest.raises(ValueError, match="grammar: .*no tokenizer"):
        ddtree_jax.generate(small_engine, PROMPTS[0], NEW, grammar=GRAMMARS[0])


@pytest.mark.slow
def test_a_list_of_none_is_a_free_batch(text_engine):
    free = ddtree_jax.generate(text_engine, PROMPTS, NEW, "ddtree", 4, grammar=[None] * 3, stop_token_ids=STOPS)
    assert [r.token_ids for r in free] == [
        r.token_ids for r in ddtree_jax.generate(text_engine, PROMPTS, NEW, "ddtree", 4, stop_token_ids=STOPS)
    ]


def test_no_grammar_survives_in_the_next_request(text_engine):
    """The state of a request is its own: the same call twice is the same answer."""
    first, again = (run(text_engine, "ddtree", 15) for _ in range(2))
    assert [dataclasses.astuple(r)[:3] for r in first] == [dataclasses.astuple(r)[:3] for r in again]
