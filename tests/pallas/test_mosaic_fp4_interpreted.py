"""The Mosaic kernel's copies, slots, barriers and results in Mosaic's interpreter, with stand-ins for block scaling.

The interpreter has no block-scaled products. Two stand-ins take their place: products without scales, which keep the
interpreter's own account of asynchronous work, so that it can look for races; and products with scales, decoded from
where the kernel put them in the order that PTX documents. What the hardware does with tensor memory is not shown.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import mosaic_fp4
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200
from ddtree_jax.pallas.cases import nvfp4_w4a4_matmul as cases
from ddtree_jax.pallas.mosaic_fp4 import Tiles
from ddtree_jax.pallas.nvfp4_w4a4_matmul import swizzle_scales

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture
def without_scales(monkeypatch):
    product = plgpu.tcgen05_mma
    monkeypatch.setattr(plgpu, "tcgen05_mma", lambda *a, a_scale, b_scale, **k: product(*a, **k))
    monkeypatch.setattr(plgpu, "async_copy_scales_to_tmem", lambda shared, tensor: None)


@pytest.fixture
def with_scales(monkeypatch):
    """Returns the places of scales in tensor memory, as they are found while the kernel is traced."""
    copied, places = {}, {}

    def copy(shared, tensor):
        copied[id(tensor)] = (shared, tensor)  # the second keeps the identity taken
        places[id(tensor.ref)] = tensor.ref

    def decoded(codes, scale, rows):
        lanes = copied[id(scale)][0][...].astype(jnp.float32)  # [1, K/64, 32, 16]
        steps = lanes.shape[1]
        scales = lanes.reshape(steps, 32, 4, 4).transpose(2, 1, 0, 3).reshape(128, 4 * steps)[:rows]
        return codes[...].astype(jnp.float32) * jnp.repeat(scales, 16, axis=1)

    def product(acc, a, b, barrier=None, *, a_scale, b_scale, accumulate):
        assert barrier is None
        w, x = decoded(a, a_scale, 128), decoded(b.transpose((1, 0)), b_scale, b.shape[1])
        new = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), precision="highest")
        old = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        plgpu.async_store_tmem(acc, jnp.where(accumulate, old + new, new))
        plgpu.commit_tmem()

    monkeypatch.setattr(plgpu, "tcgen05_mma", product)
    monkeypatch.setattr(plgpu, "async_copy_scales_to_tmem", copy)
    return places


def side(rows, k, rng):
    codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
    scales = np.exp2(rng.uniform(-3, 3, (rows, k // 16))).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales, E2M1[codes]


def run(n, k, tiles, races):
    """The kernel's sums, float64 [n, tokens], and its operands in float64."""
    rng = np.random.default_rng()
    (w_codes, w_scales, w), (x_codes, x_scales, x) = side(n, k, rng), side(tiles.tokens, k, rng)
    operands = (
        w_codes.view(ml_dtypes.float4_e2m1fn),
        swizzle_scales(jnp.asarray(w_scales)),
        x_codes.view(ml_dtypes.float4_e2m1fn),
        swizzle_scales(jnp.asarray(x_scales)),
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        parts = np.asarray(jax.jit(mosaic_fp4._kernel(n, k, tiles))(*operands))
    assert parts.shape == (tiles.split_k, n, tiles.tokens)
    scaled = [v * np.repeat(s.astype(np.float64), 16, axis=1) for v, s in ((w, w_scales), (x, x_scales))]
    return parts.astype(np.float64).sum(0), (w, x), scaled


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(tokens=16, block_k=256, stages=2, split_k=1),  # five steps: the last round of slots is not whole
        Tiles(tokens=32, block_k=128, stages=3, split_k=2),
        Tiles(tokens=256, block_k=128, stages=2, split_k=1),  # two tiles of tokens
        Tiles(tokens=128, block_k=256, stages=8, split_k=1),  # more slots than steps
    ],
    ids=str,
)
def test_no_races_and_every_step_once(without_scales, tiles):
    n = 256 if tiles.split_k == 2 else 128
    k = tiles.split_k * tiles.block_k * (3 if tiles.stages == 8 else 5)
    sums, (w, x), _ = run(n, k, tiles, races=True)
    np.testing.assert_array_equal(sums, w @ x.T)  # sums of small multiples of 1/4


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(tokens=16, block_k=256, stages=2, split_k=1),
        Tiles(tokens=256, block_k=128, stages=2, split_k=2),
    ],
    ids=str,
)
def test_scales_go_with_their_codes(with_scales, tiles):
    sums, _, (w, x) = run(256, 768 * tiles.split_k, tiles, races=False)
    exact = w @ x.T
    assert np.abs(sums - exact).max() <= 1e-6 * np.abs(exact).max()
    assert len(with_scales) == 1 + tiles.token_tiles  # none is written while another product reads it


@pytest.mark.parametrize(("m", "prepared"), [(5, True), (130, False)])
def test_the_whole_operation(with_scales, m, prepared):
    arrays = cases.make(jax.random.key(np.random.default_rng().integers(1 << 31)), m=m, n=256, k=768, prepared=prepared)
    op = OPS["nvfp4_w4a4_matmul"]
    native = functools.partial(op, implementation="mosaic_native", platform=B200, out_dtype=jnp.float32)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        out = np.asarray(jax.jit(native)(*arrays))
    assert out.shape == (m, 256)
    assert cases.check(arrays, out, prepared=prepared) < 1e-6
