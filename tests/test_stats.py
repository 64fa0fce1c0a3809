"""Counters: derived values against plain Python, and that nothing is lost on the way to JSON."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_jax import Chunk, Result, Stats


def make_stats(**changes) -> Stats:
    values = {
        "algorithm": "ddtree",
        "budget": 32,
        "acceptance_lengths": (5, 1, 6),
        "num_prompt_tokens": 7,
        "num_output_tokens": 13,
        "time_to_first_token_s": 0.25,
        "tokens_per_second": 52.0,
    }
    return Stats(**(values | changes))


@given(st.lists(st.integers(1, 40), max_size=30))
def test_derived_values_match_the_list(lengths):
    stats = make_stats(acceptance_lengths=tuple(lengths))
    assert stats.num_rounds == len(lengths)
    assert stats.mean_acceptance_length == pytest.approx(sum(lengths) / len(lengths) if lengths else 0.0)
    assert list(stats.acceptance_histogram.items()) == [(n, lengths.count(n)) for n in sorted(set(lengths))]


def test_to_dict_holds_every_name_of_the_contract_and_survives_json():
    values = json.loads(json.dumps(make_stats().to_dict()))
    assert values == {
        "algorithm": "ddtree",
        "budget": 32,
        "num_rounds": 3,
        "acceptance_lengths": [5, 1, 6],
        "mean_acceptance_length": 4.0,
        "num_prompt_tokens": 7,
        "num_output_tokens": 13,
        "time_to_first_token_s": 0.25,
        "tokens_per_second": 52.0,
    }


def test_no_round_is_no_division_by_zero():
    stats = make_stats(acceptance_lengths=(), num_output_tokens=1)
    assert (stats.num_rounds, stats.mean_acceptance_length) == (0, 0.0)
    json.dumps(stats.to_dict(), allow_nan=False)


def test_summary_is_one_line_with_the_figures():
    line = make_stats().summary_line()
    assert "\n" not in line
    for part in ("[ddtree budget 32]", "13 tokens in 3 rounds", "acceptance length 4.00", "52.0 tokens/s"):
        assert part in line
    assert make_stats(algorithm="none", budget=None).summary_line().startswith("[none] ")


def test_all_are_frozen():
    stats = make_stats()
    result = Result(text="a", token_ids=[1], finish_reason="stop", stats=stats)
    chunk = Chunk(text=None, token_ids=[1])
    assert (chunk.index, chunk.finish_reason, chunk.stats, chunk.tree) == (0, None, None, None)
    for value, name in ((stats, "budget"), (result, "text"), (chunk, "text")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
