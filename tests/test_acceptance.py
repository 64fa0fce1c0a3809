"""The shipped pair drafts well: acceptance lengths over its held-out prompts, as benchmarks/acceptance.py has them."""

import statistics

import pytest

import ddtree_jax
from ddtree_jax.bench import held_out_prompts
from ddtree_jax.engine import Engine


def mean_acceptance(engine: Engine, prompts: list[str], algorithm: str, budget: int = 0) -> float:
    """Mean over prompts of each prompt's mean acceptance length: 96 new tokens, greedy."""
    results = ddtree_jax.generate(engine, prompts, 96, algorithm, budget)
    return statistics.fmean(result.stats.mean_acceptance_length for result in results if result.stats.num_rounds)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_shipped_pair_keeps_its_acceptance(demo_engine: Engine) -> None:
    """All 76 shipped prompts, whose means are 5.19 and 6.46 (1.24 times) as the pair shipped; the first 8 alone have
    a ratio of 1.22, too near the bound to be a test.
    """
    prompts = held_out_prompts()
    assert len(prompts) == 76
    chain = mean_acceptance(demo_engine, prompts, "dflash")
    tree = mean_acceptance(demo_engine, prompts, "ddtree", 32)
    assert chain >= 4.2, chain
    assert tree >= 5.2, tree
    assert tree >= 1.22 * chain, (tree, chain, tree / chain)
