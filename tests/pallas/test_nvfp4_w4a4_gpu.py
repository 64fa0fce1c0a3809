"""On a GPU, at real shapes: the quantiser, the reference, and whatever native implementation the GPU has.

No Blackwell GPU has run the native ones yet; this is the first thing to run there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, current_platform, triton_call
from ddtree_jax.pallas.cases.nvfp4_w4a4_matmul import CASES
from ddtree_jax.pallas.fp4_activations import quantise_activations
from ddtree_jax.pallas.fp4_convert import convert_pair, convert_pair_bits

pytestmark = pytest.mark.gpu
OP = OPS["nvfp4_w4a4_matmul"]


def test_quantiser_gives_what_the_cpu_gives():
    rng = np.random.default_rng()
    x = (rng.standard_normal((64, 384, 16)) * np.exp2(rng.uniform(-14, 9, (64, 384, 1)))).astype(jnp.bfloat16)
    x = x.reshape(64, -1)
    x[3, 5], x[7, 100], x[9, :32] = np.nan, -np.inf, -0.0
    input_scale = np.float32(0.0031)
    on_gpu = [np.asarray(part) for part in jax.jit(quantise_activations)(x, input_scale)]
    with jax.default_device(jax.devices("cpu")[0]):
        on_cpu = [np.asarray(part) for part in jax.jit(quantise_activations)(x, input_scale)]
    scales = [part[1].view(np.uint8) & 127 for part in (on_gpu, on_cpu)]  # the sign of a NaN is of no account
    same = scales[0] == scales[1]
    assert same.mean() > 0.999  # the quotient's last bit may differ, and decides where it meets a tie
    far = np.abs(scales[0].astype(int) - scales[1]) > 1
    peaks = np.abs(x.astype(np.float32)).reshape(64, 384, 16).max(axis=-1)
    assert not far.any(), list(zip(peaks[far], scales[0][far], scales[1][far], strict=True))[:10]
    np.testing.assert_array_equal(on_gpu[0].reshape(64, 384, 8)[same], on_cpu[0].reshape(64, 384, 8)[same])


@pytest.mark.parametrize("name", ["reference", "triton_native", "mosaic_native"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_shapes(case, name):
    arrays = jax.jit(case.make)(jax.random.key(np.random.default_rng().integers(1 << 31)))
    run = jax.jit(functools.partial(OP, implementation=name, **case.static))
    try:
        out = run(*arrays)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert case.check(arrays, out) < case.tolerance
    again = run(*arrays)  # a slot or barrier left in a wrong state shows in the second launch
    np.testing.assert_array_equal(np.asarray(out).view(np.uint16), np.asarray(again).view(np.uint16))


@pytest.mark.parametrize("name", ["triton_native", "mosaic_native"])
def test_a_broken_activation_shows_in_its_row_and_no_other(name):
    arrays = jax.jit(CASES[0].make)(jax.random.key(1))
    run = jax.jit(functools.partial(OP, implementation=name))
    try:
        whole = np.asarray(run(*arrays)).astype(np.float32)
    except NotImplementedError as error:
        pytest.skip(str(error))
    got = np.asarray(run(arrays[0].at[3, 77].set(jnp.inf), *arrays[1:])).astype(np.float32)
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(whole, 3, 0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_converter(dtype):
    platform = current_platform()
    if platform.generation not in (BLACKWELL, BLACKWELL_RTX):
        pytest.skip("needs Blackwell")
    column = np.arange(256, dtype=np.uint8)[:, None]
    every = np.random.default_rng().permuted(np.tile(column, 4), axis=0)  # each byte takes every value
    words = every.view(np.int32)[:, 0]

    def body(words_ref, out_ref):
        for byte in range(4):
            out_ref[byte] = convert_pair(words_ref[...], byte, dtype=dtype)

    shape = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    out = triton_call(body, name="fp4_convert", platform=platform, grid=(1,), out_shape=shape)(words)
    expected = [convert_pair_bits(jnp.asarray(words), byte, dtype=dtype) for byte in range(4)]
    np.testing.assert_array_equal(np.asarray(out), np.stack(expected))
