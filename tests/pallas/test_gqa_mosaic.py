"""The Mosaic kernel of grouped-query attention against float64, in Mosaic's interpreter; compiled under `-m gpu`.

The interpreter has the copies, barriers and products of shared memory and finds races among them; products that add to
sums in registers are replaced there. How the hardware lays out and overlaps them is for the GPU tests.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000, current_platform
from ddtree_jax.pallas.gqa_mosaic import cut, gqa_mosaic
from ddtree_jax.pallas.gqa_mosaic_compute import Schedule, Sizes
from tests.pallas import mosaic_inputs
from tests.pallas.mosaic_inputs import LAYER, LAYERS, SCALE, draw, draw_cache, draw_trees

WIDTH = 128
SCHEDULES = {
    "8 splits": Schedule(splits=8),
    "5 splits": Schedule(splits=5),
    "one split": Schedule(splits=1),
    "two slots": Schedule(splits=4, slots=2),
}


def make(lengths, t, slots, *, heads=4, kv_heads=1):
    rng, b = np.random.default_rng(), len(lengths)
    caches = [draw_cache(rng, lengths, slots, kv_heads * WIDTH) for _ in range(2)]
    news = [draw(rng, b, t, kv_heads * WIDTH) for _ in range(2)]
    mask = draw_trees(rng, b, t)
    return draw(rng, b, t, heads, WIDTH), *caches, np.asarray(lengths, np.int32), *news, mask


def exact(q, k_cache, v_cache, lengths, new_k, new_v, mask):
    """float64 [B, T, Hq, 128]."""
    q, k_cache, v_cache, new_k, new_v = (x.astype(np.float64) for x in (q, k_cache, v_cache, new_k, new_v))
    out = np.zeros(q.shape)
    b, t, heads, _ = q.shape
    group = heads // (k_cache.shape[3] // WIDTH)
    for i, row, head in np.ndindex(b, t, heads):
        own = slice(head // group * WIDTH, (head // group + 1) * WIDTH)
        n, seen = lengths[i], mask[i, row]
        keys = np.concatenate([k_cache[LAYER, i, :n, own], new_k[i, seen, own]])
        values = np.concatenate([v_cache[LAYER, i, :n, own], new_v[i, seen, own]])
        if len(keys):
            scores = keys @ q[i, row, head] * SCALE
            weights = np.exp(scores - scores.max())
            out[i, row, head] = weights / weights.sum() @ values
    return out


def call(arrays, schedule, platform, **kwargs):
    q, k_cache, v_cache, lengths, *rest = map(jnp.asarray, arrays)
    run = functools.partial(gqa_mosaic, scale=SCALE, schedule=schedule, platform=platform, **kwargs)
    out = jax.jit(run)(q, k_cache, v_cache, jnp.int32(LAYER), lengths, *rest)
    assert out.shape == q.shape and out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64)


def run(arrays, schedule=None, *, races=True, cores=4):
    platform = dataclasses.replace(INTERPRETED, cores=cores)
    return call(arrays, schedule, platform, interpret=plgpu.InterpretGPUParams(detect_races=races))


assert_close = functools.partial(mosaic_inputs.assert_close, tolerance=6e-3)


@pytest.mark.parametrize(("t", "splits"), [(9, 2), (17, 1)])
def test_against_float64(t, splits):
    """Both warpgroups with the same rows, and with two row tiles of which the second has a single row; a last tile of
    the cache that overlaps the one before it."""
    arrays = make((330,), t, 340)
    assert_close(run(arrays, Schedule(splits=splits, slots=2)), exact(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("t", [3, 17])
@pytest.mark.parametrize("schedule", [Schedule(splits=2), Schedule(splits=1), Schedule(splits=3)])
def test_lengths(schedule, t):
    arrays = make((0, 1, 63, 64, 65, 128, 190), t, 190)
    assert_close(run(arrays, schedule), exact(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "t"), [(2, 2, 65), (4, 2, 40), (8, 2, 1), (8, 1, 16), (16, 2, 17)])
def test_groups(heads, kv_heads, t):
    arrays = make((70, 5), t, 128, heads=heads, kv_heads=kv_heads)
    assert_close(run(arrays, Schedule(splits=2)), exact(*arrays))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("splits", [1, 2, None])
def test_a_block_of_two_tiles(splits):
    """Five row tiles, of which the last one is alone."""
    arrays = make((70,), 65, 128)
    assert_close(run(arrays, Schedule(splits=splits), races=splits == 2), exact(*arrays))


@pytest.mark.parametrize("t", [4, 17])
def test_rows_that_are_not_finite(t):
    """NaN and infinity reach the rows that see them; a row that sees nothing is zero."""
    q, k_cache, v_cache, lengths, new_k, new_v, mask = make((0,), t, 64)
    new_k[0, 1, 5], new_v[0, 2, 3], new_v[0, 3, 7] = np.nan, np.inf, np.nan
    mask[0, :, 1:4] = False
    mask[0, 1], mask[0, 2], mask[0, 3] = False, False, False
    mask[0, 1, :2] = mask[0, 2, [0, 2]] = True
    out = run((q, k_cache, v_cache, lengths, new_k, new_v, mask), Schedule(splits=1), races=False)
    assert np.isnan(out[0, 1:3]).all()
    assert (out[0, 3] == 0).all()
    np.testing.assert_allclose(out[0, 0], np.broadcast_to(new_v[0, 0].astype(np.float64), out[0, 0].shape))
    assert np.isfinite(out[0, [0, *range(3, t)]]).all()


def test_a_value_of_the_last_tile_that_is_not_finite():
    arrays = make((70,), 2, 128)
    arrays[2][LAYER, 0, 66, 9] = np.inf
    assert np.isnan(run(arrays, Schedule(splits=1), races=False)).all()


def test_what_is_refused():
    def ask(*, dtype=jnp.bfloat16, heads=4, hd=WIDTH, slots=64, platform=H200, batch=1, scale=SCALE):
        spec = jax.ShapeDtypeStruct
        cache = spec((LAYERS, batch, slots, hd), dtype)
        arrays = (
            spec((1, 2, heads, hd), dtype), cache, cache, spec((), jnp.int32), spec((1,), jnp.int32),
            spec((1, 2, hd), dtype), spec((1, 2, hd), dtype), spec((1, 2, 2), jnp.bool_),
        )  # fmt: skip
        # Not traced: what it refuses, it refuses before it looks at a value.
        OPS["gqa_attention"](*arrays, scale=scale, implementation="mosaic", platform=platform)

    for platform in (B200, RTX_PRO_6000, HOST):
        with pytest.raises(NotImplementedError, match="wgmma"):
            ask(platform=platform)
    for dtype in (jnp.float16, jnp.float32):
        with pytest.raises(NotImplementedError, match="dtype"):
            ask(dtype=dtype)
    with pytest.raises(NotImplementedError, match="head dim"):
        ask(hd=64)
    for heads in (3, 16):
        with pytest.raises(NotImplementedError, match="query heads"):
            ask(heads=heads)
    with pytest.raises(NotImplementedError, match="slots"):
        ask(slots=63)
    with pytest.raises(NotImplementedError, match="scale"):
        ask(scale=-1.0)
    with pytest.raises(ValueError, match="must agree"):
        ask(batch=2)


def test_other_gpus_do_not_try_it():
    op = OPS["gqa_attention"]
    assert op.names(H200) == ("mosaic", "triton", "reference")
    assert all("mosaic" not in op.names(platform) for platform in (B200, RTX_PRO_6000, HOST))


def test_splits_of_an_h200():
    """One wave of blocks, with a key tile each where those are few."""
    shapes = itertools.product((17, 65), (1024, 8192, 65536))
    splits = {(t, n): cut(Sizes(1, t, 32, 8, n, 1), Schedule(), H200)[0].splits for t, n in shapes}
    assert splits == {(17, 1024): 16, (17, 8192): 16, (17, 65536): 16, (65, 1024): 6, (65, 8192): 6, (65, 65536): 6}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("schedule", "t"), [*((one, 17) for one in SCHEDULES.values()), *((None, t) for t in (1, 9, 16, 17, 67))]
)
def test_lengths_on_the_gpu(schedule, t):
    """Poisoned caches, every kind of tail, more splits than tiles, batches, and a block of two tiles."""
    arrays = make((0, 1, 63, 64, 65, 128, 449, 1000), t, 1000, heads=16, kv_heads=4)
    assert_close(call(arrays, schedule, current_platform()), exact(*arrays))


@pytest.mark.gpu
def test_rows_that_are_not_finite_on_the_gpu():
    q, k_cache, v_cache, lengths, new_k, new_v, mask = make((100,), 17, 128)
    new_k[0, 1, 5], new_v[0, 2, 3] = np.nan, np.inf
    mask[0, :, 1:3], mask[0, 1, 1], mask[0, 2, 2] = False, True, True
    out = call((q, k_cache, v_cache, lengths, new_k, new_v, mask), None, current_platform())
    assert np.isnan(out[0, 1:3]).all()
    rows = [0, *range(3, 17)]
    new_k[0, 1, 5], new_v[0, 2, 3] = 0, 0  # weight 0 times these would be NaN in numpy, too
    want = exact(q, k_cache, v_cache, lengths, new_k, new_v, mask)
    assert_close(out[0, rows], want[0, rows])
