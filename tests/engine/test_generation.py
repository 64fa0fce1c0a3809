"""generate and stream on a small random pair: losslessness, cutting, batches, chunks, no recompilation."""

import dataclasses

import chex
import jax
import pytest

import ddtree_jax
from ddtree_jax import decoding

PROMPTS = [[7, 3, 11, 2, 40, 41, 8, 1, 17], [50, 3, 3, 21, 8, 9, 30], list(range(1, 45))]
NEW = 24


@pytest.fixture(scope="module")
def greedy(small_engine):
    results = ddtree_jax.generate(small_engine, PROMPTS, NEW, "none", stop_token_ids=[])
    return [r.token_ids for r in results]


@pytest.mark.parametrize(
    ("algorithm", "budget"),
    [
        ("dflash", 0),
        ("ddtree", 0),
        *(pytest.param("ddtree", budget, marks=pytest.mark.slow) for budget in (1, 4)),
        ("ddtree", 15),
    ],
)
def test_greedy_equals_autoregressive(small_engine, greedy, algorithm, budget):
    results = ddtree_jax.generate(small_engine, PROMPTS, NEW, algorithm, budget, stop_token_ids=[])
    assert [r.token_ids for r in results] == greedy
    for result in results:
        assert sum(result.stats.acceptance_lengths) >= NEW - 1
        assert result.finish_reason == "length"
    if budget == 15:  # a tree that never accepts anything would pass the rest of this test
        assert max(r.stats.mean_acceptance_length for r in results) > 1.0


def test_greedy_equals_the_full_forward(small_engine, greedy):
    """Independent of caches and rounds: argmax of the plain causal forward at every step."""
    from ddtree_jax.models import target_logits

    sequence = PROMPTS[0] + greedy[0]
    logits = target_logits(small_engine.target, [sequence[:-1]])[0]
    chosen = jax.device_get(logits.argmax(-1))[len(PROMPTS[0]) - 1 :]
    assert chosen.tolist() == greedy[0]


@pytest.mark.parametrize(
    "settings",
    [pytest.param(dict(), marks=pytest.mark.slow), dict(top_k=12, top_p=0.9, min_p=0.01)],
    ids=["plain", "filtered"],
)
def test_sampled_output_is_the_same_for_every_algorithm_and_batch(small_engine, settings):
    """The noise belongs to the output position, so lossless sampling is equality, not only equality in law."""

    def run(prompts, algorithm, seeds, budget=15):
        results = ddtree_jax.generate(
            small_engine, prompts, NEW, algorithm, budget, 1.3, seed=seeds, stop_token_ids=[], **settings
        )
        return [r.token_ids for r in results]

    plain = run(PROMPTS, "none", [3, 4, 5])
    assert run(PROMPTS, "ddtree", [3, 4, 5]) == plain
    assert run(PROMPTS, "dflash", [3, 4, 5]) == plain
    assert run(PROMPTS[1:2], "ddtree", [4]) == plain[1:2]
    other = run(PROMPTS, "none", [6, 4, 5])
    assert [one == two for one, two in zip(other, plain, strict=True)] == [False, True, True]


@pytest.mark.parametrize(
    "algorithm", ["ddtree", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "dflash"))]
)
def test_stop_token_inside_a_path_ends_the_output(small_engine, greedy, algorithm):
    for position in (1, 4, 9):
        stop = greedy[0][position]
        first = greedy[0].index(stop)
        result = ddtree_jax.generate(small_engine, PROMPTS[0], NEW, algorithm, 15, stop_token_ids=[stop, 0])
        assert result.token_ids == greedy[0][: first + 1]
        assert result.finish_reason == "stop"


def test_max_new_tokens_is_exact(small_engine, greedy):
    for new in (1, 2, 3, 5):
        result = ddtree_jax.generate(small_engine, PROMPTS[0], new, "ddtree", 15, stop_token_ids=[])
        assert result.token_ids == greedy[0][:new]
        assert result.finish_reason == "length"
        assert result.stats.num_output_tokens == new


def test_the_models_own_stop_tokens_are_the_default(small_engine):
    own = ddtree_jax.generate(small_engine, PROMPTS, NEW, "ddtree", 15)
    given = ddtree_jax.generate(small_engine, PROMPTS, NEW, "ddtree", 15, stop_token_ids=[5, 9])
    assert [r.token_ids for r in own] == [r.token_ids for r in given]


def test_stream_joins_to_the_result(small_engine, greedy):
    chunks = list(ddtree_jax.stream(small_engine, PROMPTS, NEW, "ddtree", 15, stop_token_ids=[], with_tree=True))
    results = ddtree_jax.generate(small_engine, PROMPTS, NEW, "ddtree", 15, stop_token_ids=[])
    for i, result in enumerate(results):
        own = [c for c in chunks if c.index == i]
        assert sum((c.token_ids for c in own), []) == result.token_ids == greedy[i]
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
        assert own[-1].stats.acceptance_lengths == result.stats.acceptance_lengths
        assert own[0].tree is None and all(c.tree is not None for c in own[1:])
        for before, chunk in zip(own, own[1:], strict=False):
            row = chunk.tree.batch_index
            assert chunk.tree.tree.token_ids[row, 0] == before.token_ids[-1]


def test_debug_mode_checks_and_changes_nothing(small_engine, greedy):
    result = ddtree_jax.generate(small_engine, PROMPTS[0], NEW, "ddtree", 15, stop_token_ids=[], debug=True)
    assert result.token_ids == greedy[0]


def test_debug_mode_stops_at_a_broken_rule(small_engine, monkeypatch):
    original = decoding.build_tree

    def one_node_too_many(*args, **kwargs):
        tree = original(*args, **kwargs)
        return dataclasses.replace(tree, num_nodes=tree.num_nodes + 1)

    monkeypatch.setattr(decoding, "build_tree", one_node_too_many)
    with pytest.raises(ddtree_jax.InvariantError, match="num_nodes_in_range"):
        ddtree_jax.generate(small_engine, PROMPTS[0], NEW, "ddtree", 4, stop_token_ids=[], debug=True)


@pytest.mark.slow
def test_more_prompts_than_a_batch(small_engine, greedy, monkeypatch):
    from ddtree_jax import generation

    monkeypatch.setattr(generation, "MAX_BATCH", 2)
    results = ddtree_jax.generate(small_engine, PROMPTS, NEW, "ddtree", 15, stop_token_ids=[])
    assert [r.token_ids for r in results] == greedy


def test_similar_prompts_do_not_recompile(small_engine):
    ddtree_jax.generate(small_engine, [1, 2, 3], 10, "ddtree", 15)
    traced = []
    original = decoding.run_round

    def counting(*args, **kwargs):
        traced.append(1)
        return original(*args, **kwargs)

    try:
        decoding.run_round = counting
        ddtree_jax.generate(small_engine, [4, 5, 6, 7, 8], 14, "ddtree", 15, seed=3, stop_token_ids=[1, 2])
    finally:
        decoding.run_round = original
    assert not traced


def test_one_trace_for_a_whole_generation(small_engine, monkeypatch):
    limited = jax.jit(chex.assert_max_traces(decoding.run_round, n=1), static_argnums=0, donate_argnums=2)
    monkeypatch.setattr(decoding, "round_step", limited)
    chunks = list(ddtree_jax.stream(small_engine, PROMPTS[0], 40, "ddtree", 15, stop_token_ids=[]))
    assert sum(len(c.token_ids) for c in chunks) == 40
