"""Sampling under a grammar: the law of plain constrained decoding, by chi-square through the real programs."""

import collections

import numpy as np
import pytest
from scipy import stats

import ddtree_jax
from ddtree_jax import Grammar
from tests.engine import grammar_oracle

PROMPT = [7, 3, 11, 2, 40]
STOPS = [0, 1]
TEMPERATURE = 6.0
GRAMMAR = Grammar.regex("[a-d]{1,2}|abcab")
SAMPLES = 2048


def p_value(expected: dict[tuple[int, ...], float], drawn: list[tuple[int, ...]]) -> float:
    """Pearson's test; outcomes expected less than five times are one cell."""
    counts = collections.Counter(drawn)
    assert set(counts) <= set(expected)
    common = [key for key, p in expected.items() if p * len(drawn) >= 5]
    wanted = [expected[key] * len(drawn) for key in common]
    seen = [counts[key] for key in common]
    rest = len(drawn) - sum(wanted)
    if rest >= 5:
        wanted.append(rest)
        seen.append(len(drawn) - sum(seen))
    return float(stats.chisquare(seen, np.array(wanted) * (sum(seen) / sum(wanted))).pvalue)


def draw(engine, algorithm: str, implementation: str) -> list[tuple[int, ...]]:
    results = ddtree_jax.generate(
        engine,
        [PROMPT] * SAMPLES,
        8,
        algorithm,
        4,
        TEMPERATURE,
        seed=list(range(SAMPLES)),
        stop_token_ids=STOPS,
        grammar=GRAMMAR,
        grammar_implementation=implementation,
    )
    return [tuple(r.token_ids) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "implementation"), [("none", "host"), ("dflash", "host"), ("ddtree", "host"), ("ddtree", "table")]
)
def test_sampled_outputs_have_the_constrained_law(text_engine, algorithm, implementation):
    expected = grammar_oracle.law(text_engine, PROMPT, GRAMMAR, STOPS, TEMPERATURE, 16)
    assert abs(sum(expected.values()) - 1.0) < 1e-9 and len(expected) > 20
    drawn = draw(text_engine, algorithm, implementation)
    assert p_value(expected, drawn) > 1e-3
    # Negative control: free sampling with every illegal output thrown away is another law.
    thrown = _rejection_law(text_engine, expected)
    assert p_value(thrown, drawn) < 1e-6


def _rejection_law(engine, outcomes) -> dict[tuple[int, ...], float]:
    """The probability of each outcome without masks, renormalised over the outcomes."""
    found = {}
    for path in outcomes:
        probability = 1.0
        for at, token in enumerate(path):
            logits = grammar_oracle.next_logits(engine, [[*PROMPT, *path[:at]]], 16)[0].astype(np.float64) / TEMPERATURE
            weights = np.exp(logits - logits.max())
            probability *= weights[token] / weights.sum()
        found[path] = probability
    total = sum(found.values())
    return {path: p / total for path, p in found.items()}
