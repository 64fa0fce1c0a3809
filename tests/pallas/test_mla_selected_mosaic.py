"""The Mosaic kernel of latent attention over selected keys against float64, in Mosaic's interpreter and on a GPU.

The interpreter cannot gather: there rows are gathered beforehand. Of what gathers, the addresses are checked here, the
rest by the GPU tests.
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
from ddtree_jax.pallas.mla_gather import ATOM, FOURS, LINE, lines_of, row_of, source_of, target_of
from ddtree_jax.pallas.mla_mosaic_compute import PIECES, RANK, ROPE
from ddtree_jax.pallas.mla_selected_mosaic import SCHEDULE, mla_selected_mosaic
from ddtree_jax.pallas.tree_attention import mla_attention_selected_mosaic
from tests.pallas.mosaic_inputs import LAYER, LAYERS, SCALE, assert_close, attended, draw, draw_cache

HEADS = 64


def make(lengths, t, slots, count, heads=HEADS):
    """Selections in no order, of the prefix, of the block and of nothing; the rest of them are slots beyond lengths."""
    rng, b = np.random.default_rng(), len(lengths)
    cache = draw_cache(rng, lengths, slots, RANK + ROPE)
    selected = np.full((b, t, count), -1, np.int32)
    for i, row in np.ndindex(b, t):
        columns = rng.permutation(slots + t)[:count]
        columns[rng.random(len(columns)) < 0.1] = rng.choice([-1, -7, slots + t, 1 << 30])  # all of them nothing
        selected[i, row, : len(columns)] = columns
    arrays = draw(rng, b, t, heads, RANK + ROPE), cache, np.asarray(lengths, np.int32)
    return *arrays, draw(rng, b, t, RANK + ROPE), selected


def exact(q, cache, lengths, new, selected):
    """float64 [B, T, H, rank]."""
    q, cache, new = (x.astype(np.float64) for x in (q, cache, new))
    slots, out = cache.shape[2], np.zeros((*q.shape[:3], RANK))
    for i, row in np.ndindex(q.shape[:2]):
        chosen = selected[i, row]
        of_prefix = chosen[(chosen >= 0) & (chosen < lengths[i])]
        of_block = chosen[(chosen >= slots) & (chosen < slots + q.shape[1])] - slots
        rows = np.concatenate([cache[LAYER, i, of_prefix], new[i, of_block]])
        out[i, row] = attended(q[i, row], rows, RANK)
    return out


def run(arrays, *, splits=None, platform=None, races=True):
    if platform is None:
        platform = dataclasses.replace(INTERPRETED, cores=4)
    options = {"schedule": dataclasses.replace(SCHEDULE, splits=splits)}
    if platform.interpret:
        options["interpret"] = plgpu.InterpretGPUParams(detect_races=races)
    call = functools.partial(mla_selected_mosaic, rank=RANK, scale=SCALE, platform=platform, **options)
    q, cache, lengths, new, selected = map(jnp.asarray, arrays)
    out = jax.jit(call)(q, cache, jnp.int32(LAYER), lengths, new, selected)
    assert out.shape == (*q.shape[:3], RANK) and out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64)


@pytest.mark.parametrize("name", PIECES)
def test_where_rows_are_gathered_to(name):
    """Every 16 bytes of a piece once, where TMA puts them: tiles of 8 rows and 128 bytes, swizzled by the row."""
    start, width = PIECES[name]
    found = {}
    for thread, four, line in itertools.product(range(128), range(FOURS), range(lines_of(name))):
        into = target_of(thread, four, name) + line * ATOM
        assert into not in found
        found[into] = row_of(thread, four), source_of(thread, name) + line * LINE
    lines = width // 64
    for row, chunk in itertools.product(range(64), range(width // 8)):
        line, inside = chunk // 8, chunk % 8
        into = (row // 8 * lines + line) * 1024 + row % 8 * 128 + (inside ^ row % 8) * 16
        assert found.pop(into) == (row, 2 * start + 16 * chunk)
    assert not found


@pytest.mark.parametrize("splits", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_against_float64(splits):
    """Odd numbers of tiles, and a last one that is not full."""
    arrays = make((200,), 1, 208, 190)
    assert_close(run(arrays, splits=splits), exact(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "splits"), [(1, 1), (64, None), (65, 1), (300, 3), (448, None)])
def test_selections_of_any_size(count, splits):
    arrays = make((0, 1, 400), 2, 512, count)
    assert_close(run(arrays, splits=splits), exact(*arrays))


@pytest.mark.slow
def test_two_tiles_of_heads():
    arrays = make((100, 3), 2, 104, 70, heads=2 * HEADS)
    assert_close(run(arrays, splits=1), exact(*arrays))


def rows_that_are_not_finite(run):
    """NaN and infinity reach the rows that have chosen them, and no others; a row that has chosen nothing is zero."""
    q, cache, lengths, new, selected = make((3,), 4, 8, 5)
    new[0, 0, 5], new[0, 1, RANK + 3] = np.nan, np.inf
    selected[0] = [[0, 8, -1, 2, 5], [9, -1, 1, -1, -1], [2, 10, 0, -1, 6], [-1, 4, -1, 7, -1]]
    out = run((q, cache, lengths, new, selected))
    assert np.isnan(out[0, :2]).all() and (out[0, 3] == 0).all()
    new[0, :2] = 0  # of no account for the row that is left
    assert_close(out[0, 2:3], exact(q, cache, lengths, new, selected)[0, 2:3])


def test_rows_that_are_not_finite():
    rows_that_are_not_finite(run)


def test_what_is_refused():
    spec = jax.ShapeDtypeStruct

    def call(dtype=jnp.bfloat16, heads=HEADS, count=64, platform=H200):
        mla_attention_selected_mosaic(
            spec((1, 2, heads, RANK + ROPE), dtype), spec((LAYERS, 1, 64, RANK + ROPE), dtype), spec((), jnp.int32),
            spec((1,), jnp.int32), spec((1, 2, RANK + ROPE), dtype), spec((1, 2, count), jnp.int32), rank=RANK,
            scale=SCALE, platform=platform,
        )  # fmt: skip

    refused = (
        ({"dtype": jnp.float32}, "bfloat16 only"),
        ({"heads": 32}, "32 heads"),
        ({"count": 0}, "selection of nothing"),
        ({"platform": B200}, "wgmma"),
        ({"platform": HOST}, "wgmma"),
    )
    for options, reason in refused:
        with pytest.raises(NotImplementedError, match=reason):
            call(**options)


def test_hopper_prefers_it_and_other_gpus_do_not_try_it():
    op = OPS["mla_attention_selected"]
    assert op.names(H200) == OPS["mla_attention"].names(H200) == ("mosaic", "triton", "reference")
    assert all("mosaic" not in op.names(platform) for platform in (B200, RTX_PRO_6000, HOST))


@pytest.mark.gpu
@pytest.mark.parametrize("t", [1, 17])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 130, 500, 2048])
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_selections_on_the_gpu(t, count, splits):
    arrays = make((0, 1, 2000), t, 2048, count)
    assert_close(run(arrays, splits=splits, platform=current_platform()), exact(*arrays))


@pytest.mark.gpu
def test_two_tiles_of_heads_on_the_gpu():
    arrays = make((100, 3), 2, 104, 70, heads=2 * HEADS)
    assert_close(run(arrays, platform=current_platform()), exact(*arrays))


@pytest.mark.gpu
def test_rows_that_are_not_finite_on_the_gpu():
    rows_that_are_not_finite(functools.partial(run, platform=current_platform()))
