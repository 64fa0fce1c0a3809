"""Bad input: a clear error of the right class, naming the argument, before any device work."""

import math

import numpy as np
import pytest

import ddtree_jax
from ddtree_jax import decoding
from ddtree_jax.requests import check_arguments, check_request


@pytest.fixture(autouse=True)
def no_device_work(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("device work before the arguments were checked")

    for name in ("start_prefill", "prefill_chunk", "first_token", "decode_loop", "round_step"):
        monkeypatch.setattr(decoding, name, refuse)


BAD_ARGUMENTS = [
    ("prompt", dict(prompt=[])),
    ("prompt", dict(prompt=[[]])),
    ("prompt", dict(prompt=[[1], []])),
    ("prompt", dict(prompt=[1, 61])),
    ("prompt", dict(prompt=[-1])),
    ("prompt", dict(prompt=[True])),
    ("prompt", dict(prompt=[1.5])),
    ("prompt", dict(prompt=[None])),
    ("prompt", dict(prompt=None)),
    ("prompt", dict(prompt=7)),
    ("prompt", dict(prompt=b"abc")),
    ("prompt", dict(prompt="text without a tokenizer")),
    ("prompt", dict(prompt=[[1], 2])),
    ("prompt", dict(prompt=list(range(60)) * 4)),
    ("max_new_tokens", dict(max_new_tokens=190)),
    ("max_new_tokens", dict(max_new_tokens=10**12)),
    ("max_new_tokens", dict(max_new_tokens=0)),
    ("max_new_tokens", dict(max_new_tokens=-1)),
    ("max_new_tokens", dict(max_new_tokens=2.0)),
    ("max_new_tokens", dict(max_new_tokens=True)),
    ("max_new_tokens", dict(max_new_tokens=None)),
    ("algorithm", dict(algorithm="eagle")),
    ("algorithm", dict(algorithm=None)),
    ("budget", dict(budget=-1)),
    ("budget", dict(budget=1025)),
    ("budget", dict(budget=1.5)),
    ("budget", dict(budget="many")),
    ("temperature", dict(temperature=-0.1)),
    ("temperature", dict(temperature=math.nan)),
    ("temperature", dict(temperature=math.inf)),
    ("temperature", dict(temperature="hot")),
    ("temperature", dict(temperature=None)),
    ("top_k", dict(top_k=0)),
    ("top_k", dict(top_k=-3)),
    ("top_k", dict(top_k=1.0)),
    ("top_p", dict(top_p=0.0)),
    ("top_p", dict(top_p=1.01)),
    ("top_p", dict(top_p=math.nan)),
    ("min_p", dict(min_p=-0.1)),
    ("min_p", dict(min_p=1.1)),
    ("seed", dict(seed="zero")),
    ("seed", dict(seed=[1, 2])),
    ("seed", dict(seed=None)),
    ("stop_token_ids", dict(stop_token_ids=[61])),
    ("stop_token_ids", dict(stop_token_ids=[-1])),
    ("stop_token_ids", dict(stop_token_ids=5)),
]


@pytest.mark.parametrize(("name", "changed"), BAD_ARGUMENTS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("call", [ddtree_jax.generate, ddtree_jax.stream])
def test_bad_argument_is_named(small_engine, name, changed, call):
    arguments = {"prompt": [1, 2, 3], "max_new_tokens": 4} | changed
    with pytest.raises(ValueError, match=name) as raised:
        call(small_engine, **arguments)
    assert "allowed" in str(raised.value)


# What only an engine can refuse: prompts, and values that depend on a model's size or the number of prompts.
NEEDS_ENGINE = (dict(max_new_tokens=190), dict(max_new_tokens=10**12), dict(seed=[1, 2]), dict(stop_token_ids=[61]))
DEFAULTS = dict(
    max_new_tokens=4,
    algorithm="ddtree",
    budget=32,
    temperature=0.0,
    top_k=None,
    top_p=None,
    min_p=None,
    seed=0,
    stop_token_ids=None,
    grammar=None,
)


@pytest.mark.parametrize(
    ("name", "changed"), [case for case in BAD_ARGUMENTS if case[0] != "prompt"], ids=lambda v: str(v)[:40]
)
def test_all_that_needs_no_engine_is_refused_without_one(name, changed):
    if changed in NEEDS_ENGINE:
        check_arguments(**DEFAULTS | changed)
        return
    with pytest.raises(ValueError, match=f"^{name}: got"):
        check_arguments(**DEFAULTS | changed)


def test_what_no_engine_can_do_is_refused_without_one():
    with pytest.raises(ddtree_jax.UnsupportedRequestError, match="DDTREE"):
        check_arguments(**DEFAULTS | dict(budget="auto"))


@pytest.mark.parametrize("algorithm", ["dflash", "DDTREE"])
def test_drafting_without_a_drafter_is_refused(lone_engine, algorithm):
    with pytest.raises(ddtree_jax.UnsupportedRequestError, match=algorithm.upper()):
        ddtree_jax.generate(lone_engine, [1, 2], 4, algorithm)


def test_automatic_budget_is_refused(small_engine):
    with pytest.raises(ddtree_jax.UnsupportedRequestError, match="budget"):
        ddtree_jax.generate(small_engine, [1, 2], 4, budget="auto")


def test_numpy_prompts_are_taken(small_engine):
    def prompts(value):
        request = check_request(small_engine, value, 4, "none", 0, 0.0, None, None, None, 0, None, None)
        return request.prompts, request.batched

    assert prompts(np.array([1, 2])) == ([[1, 2]], False)
    assert prompts(np.array([[1, 2], [3, 4]])) == ([[1, 2], [3, 4]], True)
    assert prompts(([1], (2, 3))) == ([[1], [2, 3]], True)
    assert prompts([7]) == ([[7]], False)


@pytest.mark.parametrize(
    "changed",
    [
        dict(max_new_tokens=-(10**5000)),
        dict(temperature=10**5000),
        dict(budget=10**5000),
        dict(seed=[10**5000, "x"]),
        dict(stop_token_ids=[10**5000, -1]),
        dict(grammar_implementation=np.array(["auto", "host"])),
    ],
)
def test_values_that_cannot_be_written_out_are_named(changed):
    (name,) = changed
    with pytest.raises(ValueError, match=f"^{name}: got "):
        check_arguments(**DEFAULTS | changed)


def test_a_prompt_with_an_endless_number(small_engine):
    with pytest.raises(ValueError, match="^prompt: got token id"):
        ddtree_jax.generate(small_engine, [1, 10**5000], 4)
