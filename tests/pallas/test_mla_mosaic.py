"""The Mosaic kernel of latent attention against float64, in Mosaic's interpreter; compiled under `-m gpu`.

The interpreter has the copies, barriers and products of shared memory and finds races among them; products that add to
sums in registers are replaced there. How the hardware lays out and overlaps them is for the GPU tests.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000, current_platform
from ddtree_jax.pallas.cases import tree_attention as cases
from ddtree_jax.pallas.mla_mosaic import _block_rows, mla_mosaic
from ddtree_jax.pallas.mla_mosaic_compute import RANK, ROPE, Schedule
from tests.pallas.mosaic_inputs import LAYER, LAYERS, SCALE, assert_close, attended, draw, draw_cache, draw_trees

HEADS = 64
SPLITS = pytest.mark.parametrize("splits", [1, 2])


def make(lengths, t, slots):
    rng, b = np.random.default_rng(), len(lengths)
    cache, mask = draw_cache(rng, lengths, slots, RANK + ROPE), draw_trees(rng, b, t)
    return draw(rng, b, t, HEADS, RANK + ROPE), cache, np.asarray(lengths, np.int32), draw(rng, b, t, RANK + ROPE), mask


def exact(q, cache, lengths, new, mask):
    """float64 [B, T, H, rank]; NaN in a row of the block counts for those that see it."""
    q, cache, new = (x.astype(np.float64) for x in (q, cache, new))
    out = np.zeros((*q.shape[:3], RANK))
    for i, n in enumerate(lengths):
        for row in range(q.shape[1]):
            rows = np.concatenate([cache[LAYER, i, :n], new[i, mask[i, row]]])
            out[i, row] = attended(q[i, row], rows, RANK)
    return out


def run(arrays, schedule, *, races=True, cores=4):
    q, cache, lengths, new, mask = map(jnp.asarray, arrays)
    call = functools.partial(
        mla_mosaic, rank=RANK, scale=SCALE, schedule=schedule, platform=dataclasses.replace(INTERPRETED, cores=cores),
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )  # fmt: skip
    out = jax.jit(call)(q, cache, jnp.int32(LAYER), lengths, new, mask)
    assert out.shape == (*q.shape[:3], RANK) and out.dtype == jnp.bfloat16
    return np.asarray(out, np.float64)


def test_against_float64():
    """Three tiles and more in a split, odd and even numbers of them, and a tail."""
    arrays = make((330,), 1, 352)
    assert_close(run(arrays, Schedule(splits=2)), exact(*arrays))


@pytest.mark.slow
@SPLITS
def test_lengths(splits):
    arrays = make((0, 1, 63, 64, 65, 128, 449), 3, 456)
    assert_close(run(arrays, Schedule(splits=splits)), exact(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3, 64, None])
def test_splits(splits):
    arrays = make((700, 5), 1, 704)
    assert_close(run(arrays, Schedule(splits=splits), cores=8), exact(*arrays))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_block_of_two_tiles():
    arrays = make((70,), 65, 128)
    assert_close(run(arrays, Schedule(splits=2), races=False), exact(*arrays))


def test_rows_that_are_not_finite():
    """NaN and infinity reach the rows that see them, and no others; a row that sees nothing is zero.

    The tiles of the first sequence, of its prefix and of its block, reach into the second one.
    """
    q, cache, lengths, new, mask = make((3, 0), 4, 8)
    new[0, 1, 5], new[0, 2, RANK + 3], new[1, :3] = np.nan, np.inf, np.nan
    mask[0] = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], bool)
    mask[1] = np.array([[1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]], bool)
    arrays = q, cache, lengths, new, mask
    out = run(arrays, Schedule(splits=1))
    for broken in (out[0, 1:3], out[1, 0], out[1, 3]):
        assert np.isnan(broken).all()
    assert (out[1, 2] == 0).all()
    np.testing.assert_allclose(out[1, 1], np.broadcast_to(new[1, 3, :RANK].astype(np.float64), out[1, 1].shape))
    new[0, 1:3] = 0  # of no account for the rows that are left
    want = exact(*arrays)
    assert_close(out[0, [0, 3]], want[0, [0, 3]])


@pytest.mark.slow
@pytest.mark.timeout(1200)
@SPLITS
def test_blocks_of_a_real_size(splits):
    """17 rows of three sequences: each block starts in the middle of a tile of the one before."""
    arrays = make((64, 65, 1), 17, 72)
    assert_close(run(arrays, Schedule(splits=splits), races=False), exact(*arrays))


@pytest.mark.parametrize("t", [1, 17, 65])
def test_block_rows(t):
    rng = np.random.default_rng()
    new, mask = draw(rng, 2, t, RANK + ROPE), rng.integers(0, 2, (2, t, t)).astype(bool)
    tiles = -(-t // 64)
    rows = np.asarray(_block_rows(jnp.asarray(new), jnp.asarray(mask), tiles), np.float32)
    assert rows.shape == (2, -(-t // 8) * 8, RANK + ROPE + 64 * tiles)
    np.testing.assert_array_equal(rows[:, :t, : RANK + ROPE], new.astype(np.float32))
    np.testing.assert_array_equal(rows[:, :t, RANK + ROPE :][..., :t], mask)
    assert not rows[:, t:].any() and not rows[..., RANK + ROPE + t :].any()


def test_what_is_refused():
    def call(
        *, dtype=jnp.bfloat16, heads=HEADS, rank=RANK, width=RANK + ROPE, slots=64, platform=H200, batch=1, scale=SCALE
    ):
        spec = jax.ShapeDtypeStruct
        arrays = (
            spec((1, 2, heads, width), dtype), spec((LAYERS, batch, slots, width), dtype), spec((), jnp.int32),
            spec((1,), jnp.int32), spec((1, 2, width), dtype), spec((1, 2, 2), jnp.bool_),
        )  # fmt: skip
        # Not traced: what it refuses, it refuses before it looks at a value.
        OPS["mla_attention"](*arrays, rank=rank, scale=scale, implementation="mosaic", platform=platform)

    for platform in (B200, RTX_PRO_6000, HOST):
        with pytest.raises(NotImplementedError, match="wgmma"):
            call(platform=platform)
    for dtype in (jnp.float16, jnp.float32):
        with pytest.raises(NotImplementedError, match="dtype"):
            call(dtype=dtype)
    for sizes in ({"rank": 256}, {"width": RANK + 32}, {"rank": RANK - 64}):
        with pytest.raises(NotImplementedError, match="rank"):
            call(**sizes)
    with pytest.raises(NotImplementedError, match="heads"):
        call(heads=16)
    with pytest.raises(NotImplementedError, match="slots"):
        call(slots=60)
    with pytest.raises(NotImplementedError, match="scale"):
        call(scale=-1.0)
    with pytest.raises(ValueError, match="must agree"):
        call(batch=2)


@pytest.mark.parametrize("registers", [(240, 32), (248, 24), (236, 24), (240, 16), (264, 24)])
def test_registers_that_a_block_cannot_have_are_refused(registers):
    """A warpgroup that asks for more than the others gave back waits for ever: so hung a kernel on an H200."""
    with pytest.raises(ValueError, match="registers: got"):
        Schedule(registers=registers)
    Schedule(registers=(232, 40))


def test_other_gpus_do_not_try_it():
    op = OPS["mla_attention"]
    assert "mosaic" in op.implementations
    assert all("mosaic" not in op.names(platform) for platform in (B200, RTX_PRO_6000, HOST))


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 2])
@pytest.mark.parametrize("case", [c for c in cases.CASES if c.op == "mla_attention" and "64k" not in c.name])
def test_cases_on_the_gpu(case, splits):
    arrays = jax.jit(case.make)(jax.random.key(1))
    run = functools.partial(mla_mosaic, schedule=Schedule(splits=splits), platform=current_platform(), **case.static)
    assert case.check(arrays, jax.jit(run)(*arrays)) <= case.tolerance


@pytest.mark.gpu
@SPLITS
def test_lengths_on_the_gpu(splits):
    """Poisoned caches, every kind of tail, and a block of two tiles."""
    arrays = make((0, 1, 63, 64, 65, 128, 449, 1000), 67, 1000)
    q, cache, lengths, new, mask = map(jnp.asarray, arrays)
    call = functools.partial(
        mla_mosaic, rank=RANK, scale=SCALE, schedule=Schedule(splits=splits), platform=current_platform()
    )
    out = jax.jit(call)(q, cache, jnp.int32(LAYER), lengths, new, mask)
    assert_close(np.asarray(out, np.float64), exact(*arrays))
