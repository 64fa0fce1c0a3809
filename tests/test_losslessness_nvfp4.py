"""Targets whose experts stay packed are lossless too, token for token in float32; and as good as the plain ones."""

import json

import numpy as np
import pytest

import ddtree_jax
from benchmarks.quantised import held_out_rows, measure
from ddtree_jax.engine import demo_folder
from ddtree_jax.models.pair import flat_leaves
from tests.engine.mesh_worker import write_pair
from tests.test_losslessness import Decoder, mean_acceptance


def packed_kernels(engine):
    return {path[-2] for path in flat_leaves(engine.target.params) if path[-1] == "codes"}


@pytest.fixture(scope="module")
def engine():
    engine = ddtree_jax.load("demo-nvfp4")
    assert str(engine.target.dtype) == "float32" and packed_kernels(engine) == {"gate_up", "down"}
    return engine  # what it computes is another function: tests/models/test_quantise.py


@pytest.fixture(scope="module")
def prompts():
    return [item["prompt_ids"] for item in json.loads((demo_folder() / "heldout.json").read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_three_prompts_of_the_shipped_pair(engine, prompts):
    few = Decoder(engine, prompts[:3], 24)
    results = few("ddtree", 15, batch=3)
    few.assert_same(results, few("none", batch=3), "ddtree budget 15")
    assert mean_acceptance(results) > 1.2  # the drafter was trained for the plain target and serves both


@pytest.fixture(scope="module")
def many(engine, prompts):
    return Decoder(engine, prompts[:24], 48)


@pytest.fixture(scope="module")
def many_plain(many):
    return many("none", batch=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("algorithm", "budget"), [("none", 0), ("dflash", 0), ("ddtree", 4), ("ddtree", 32), ("ddtree", 64)]
)
def test_24_prompts_of_the_shipped_pair(many, many_plain, algorithm, budget, batch):
    results = many(algorithm, budget, batch=batch)
    many.assert_same(results, many_plain, f"{algorithm} budget {budget}, batch {batch}")
    assert algorithm == "none" or mean_acceptance(results) > 1.2
    assert sum(len(result.token_ids) for result in results) > 24 * 24


@pytest.mark.slow
def test_perplexity_is_that_of_the_plain_target_within_three_per_cent():
    ids, lengths = held_out_rows()
    (plain, choices, num_bytes), (packed, packed_choices, packed_bytes) = (
        measure(demo_folder() / name, ids, lengths) for name in ("target", "target-nvfp4")
    )
    assert len(choices) == (lengths - 1).sum() > 10_000
    assert abs(np.exp(packed - plain) - 1) < 0.03
    assert np.mean(choices == packed_choices) > 0.9
    assert packed_bytes < 0.7 * num_bytes


@pytest.fixture(scope="module")
def random_engine(tmp_path_factory):
    """Forty experts: packed ones run as a loop over those that a row has chosen."""
    root = tmp_path_factory.mktemp("pair")
    write_pair(root, "many packed")
    engine = ddtree_jax.load(root / "target", root / "drafter", dtype="float32")
    assert engine.target.config.n_routed_experts > 32 and packed_kernels(engine) == {"gate_up", "down"}
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_a_random_pair_with_many_experts(random_engine, temperature):
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 61, length).tolist() for length in (4, 11, 23)]
    options = {"temperature": temperature, "top_p": 0.95, "seed": [3, 4, 5]} if temperature else {}
    few = Decoder(random_engine, prompts, 24, options)
    plain = few("none", batch=3)
    assert all(len(result.token_ids) == 24 for result in plain)
    for algorithm, budget in (("dflash", 0), ("ddtree", 12)):
        results = few(algorithm, budget, batch=3)
        few.assert_same(results, plain, f"{algorithm} budget {budget}, temperature {temperature}")
    assert mean_acceptance(results) > 1.0  # the drafter is random: trees of 12 nodes hit the target now and then


@pytest.mark.slow
@pytest.mark.parametrize("name", ["many packed", "all packed", "odd packed", "few packed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_random_pairs_at_every_budget(tmp_path, name, temperature):
    write_pair(tmp_path, name)
    engine = ddtree_jax.load(tmp_path / "target", tmp_path / "drafter", dtype="float32")
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 61, length).tolist() for length in (4, 11, 23, 40, 7, 1)]
    options = {"temperature": temperature, "seed": list(range(6))} if temperature else {}
    decoder = Decoder(engine, prompts, 32, options)
    plain = decoder("none", batch=3)
    decoder.assert_same(decoder("dflash", batch=3), plain, "dflash")
    for budget in (0, 1, 4, 32):
        decoder.assert_same(decoder("ddtree", budget, batch=3), plain, f"ddtree {budget}")
    decoder.assert_same(decoder("ddtree", 32, batch=1), plain, "ddtree 32, batch 1")
