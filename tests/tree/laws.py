"""Exact laws of token sequences, and the goodness-of-fit test that judges samples of them."""

import itertools
import math

import numpy as np


def autoregressive_law(conditional, vocab: int, length: int) -> dict[tuple[int, ...], float]:
    """P(sequence) of plain sampling: the product of `conditional(prefix)` ([vocab] probabilities)."""
    law = {}
    for sequence in itertools.product(range(vocab), repeat=length):
        probability = 1.0
        for i, token in enumerate(sequence):
            probability *= conditional(sequence[:i])[token]
            if probability == 0.0:
                break
        law[sequence] = probability
    return law


def chi_square_p_value(counts: dict, law: dict) -> float:
    """Pearson's test of observed counts against probabilities; cells expecting fewer than 5 are pooled.

    An outcome outside the law's support gives 0.
    """
    total = sum(counts.values())
    assert math.isclose(sum(law.values()), 1.0, rel_tol=1e-6)
    if any(law.get(cell, 0.0) == 0.0 for cell in counts):
        return 0.0
    statistic, cells, pooled_seen, pooled_expected = 0.0, 0, 0.0, 0.0
    for cell, probability in law.items():
        expected, seen = probability * total, counts.get(cell, 0)
        if expected < 5:
            pooled_seen, pooled_expected = pooled_seen + seen, pooled_expected + expected
        else:
            statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if pooled_expected >= 5:
        statistic, cells = statistic + (pooled_seen - pooled_expected) ** 2 / pooled_expected, cells + 1
    return chi_square_tail(statistic, cells - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` degrees >= statistic), by the regularized incomplete gamma function."""
    from jax.scipy.special import gammaincc

    return float(gammaincc(np.float32(degrees / 2), np.float32(statistic / 2)))


def histogram(rows: np.ndarray) -> dict[tuple[int, ...], int]:
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    return {tuple(int(v) for v in row): int(n) for row, n in zip(unique, counts, strict=True)}
