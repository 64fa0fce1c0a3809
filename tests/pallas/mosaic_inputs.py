"""Random arguments of the attention kernels in Mosaic GPU."""

import jax.numpy as jnp
import numpy as np

LAYERS, LAYER, SCALE = 2, 1, 0.07


def draw(rng, *shape):
    return np.array(jnp.asarray(rng.normal(size=shape), jnp.bfloat16))


def draw_cache(rng, lengths, slots, width):
    """[LAYERS, B, slots, width] with NaN wherever a call for LAYER must not read."""
    cache = draw(rng, LAYERS, len(lengths), slots, width)
    cache[np.arange(LAYERS) != LAYER] = np.nan
    for i, n in enumerate(lengths):
        cache[LAYER, i, n:] = np.nan
    return cache


def draw_trees(rng, batch, t):
    """bool[B, T, T]: trees whose last row sees only itself."""
    mask = np.zeros((batch, t, t), bool)
    for tree in mask:
        for row in range(t):
            if 0 < row < max(t - 1, 2):
                tree[row] = tree[rng.integers(0, row)]
            tree[row, row] = True
    return mask


def attended(q, rows, rank):
    """float64 [H, rank]: latent attention of queries [H, C] over rows [M, C]; zeros where there are none."""
    if not len(rows):
        return np.zeros((len(q), rank))
    scores = q @ rows.T * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ rows[:, :rank]


def assert_close(out, want, tolerance=5e-3):
    for a, e in zip(out, want, strict=True):
        assert np.linalg.norm(a - e) <= tolerance * np.linalg.norm(e)
