"""Products of heads with their own weights of one layer of a stack, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas import layer_heads_matmul as module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.arg_specs import GLM5_HEADS, GLM5_MLA, TREE_ROWS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000

OP = OPS["layer_heads_matmul"]
LAYERS = 3


def draw(batch, rows, heads, rank, width, transposed, dtype=jnp.bfloat16):
    """x, the weights of LAYERS layers, all NaN but for layer 1."""
    rng = np.random.default_rng()
    weights = rng.normal(size=(LAYERS, rank, heads, width))
    weights[[0, 2]] = np.nan
    x = rng.normal(size=(batch, rows, heads, width if transposed else rank))
    return jnp.asarray(x, dtype), jnp.asarray(weights, dtype)


def error(out, x, weights, transposed):
    own = np.asarray(weights[1], np.float64)
    spec = "bthn,chn->bthc" if transposed else "bthc,chn->bthn"
    exact = np.einsum(spec, np.asarray(x, np.float64), own)
    assert out.shape == exact.shape and out.dtype == x.dtype
    return np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "rank", "width"),
    [(1, 1, 3, 32, 16), (2, 17, 4, 128, 48), (1, 70, 2, 64, 144), (1, 128, 1, 16, 16)],
)
def test_against_float64(batch, rows, heads, rank, width, transposed, name):
    x, weights = draw(batch, rows, heads, rank, width, transposed)
    run = jax.jit(functools.partial(OP, implementation=name, platform=INTERPRETED, transposed=transposed))
    assert error(run(x, weights, jnp.int32(1)), x, weights, transposed) <= 3e-3


@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 40), heads=st.integers(1, 3), steps=st.integers(1, 4), columns=st.integers(1, 70),
    transposed=st.booleans(),
)  # fmt: skip
def test_any_tiles(rows, heads, steps, columns, transposed):
    sizes = (columns, 16 * steps) if transposed else (16 * steps, columns)
    x, weights = draw(1, rows, heads, *sizes, transposed)
    call = functools.partial(module.layer_heads_matmul_triton, platform=INTERPRETED, transposed=transposed)
    assert error(call(x, weights, jnp.int32(1), tiles=module.Tiles(16, 32, 16)), x, weights, transposed) <= 3e-3


def test_a_row_of_nan_stays_alone():
    x, weights = draw(1, 17, 2, 64, 48, False)
    broken = x.at[0, 3, 1, 5].set(jnp.nan)
    run = functools.partial(OP, implementation="triton", platform=INTERPRETED, transposed=False)
    out = np.asarray(run(broken, weights, jnp.int32(1)), np.float32)
    assert np.isnan(out[0, 3, 1]).all() and np.isnan(out).sum() == 48


def test_float32_goes_to_the_reference():
    x, weights = draw(1, 5, 2, 64, 48, True, jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        OP(x, weights, jnp.int32(1), implementation="triton", platform=INTERPRETED, transposed=True)
    assert error(OP(x, weights, jnp.int32(1), platform=INTERPRETED, transposed=True), x, weights, True) <= 1e-6


@pytest.mark.parametrize("platform", [H200, B200, RTX_PRO_6000], ids=lambda platform: platform.generation)
@pytest.mark.parametrize("name", GLM5_HEADS)
@pytest.mark.parametrize("rows", [rows for rows in TREE_ROWS if rows <= module.MAX_ROWS])
def test_tiles_of_real_shapes(rows, name, platform):
    width, transposed = GLM5_HEADS[name]
    k, columns = (width, GLM5_MLA.rank) if transposed else (GLM5_MLA.rank, width)
    tiles = module.choose_tiles(rows, k, columns, platform)
    assert k % tiles.depth == 0 and rows <= tiles.rows and columns % tiles.columns == 0
    assert tiles.depth * (tiles.columns + tiles.rows) * 2 * tiles.num_stages <= platform.shared_memory


def test_what_it_refuses():
    x, weights = draw(1, 4, 2, 64, 48, False)
    call = functools.partial(module.layer_heads_matmul_triton, transposed=False)
    for arrays, error_type, match in (
        ((x[..., :32], weights, jnp.int32(1)), ValueError, "B, T, H, C"),
        ((x[:, :, :1], weights, jnp.int32(1)), ValueError, "R, C, H, N"),
        ((x, weights.astype(jnp.float32), jnp.int32(1)), ValueError, "both"),
        ((x, weights, jnp.zeros(1, jnp.int32)), ValueError, "layer"),
        ((x, weights[:0], jnp.int32(0)), ValueError, "there must be a layer"),
        ((jnp.zeros((3, 43, 2, 64), x.dtype), weights, jnp.int32(1)), NotImplementedError, "129 rows"),
        ((x[..., :24], weights[:, :24], jnp.int32(1)), NotImplementedError, "multiple of 16"),
        ((x[..., :0], weights[:, :0], jnp.int32(1)), NotImplementedError, "multiple of 16"),
        ((x, weights[..., :0], jnp.int32(1)), NotImplementedError, "some"),
        ((x[:, :, :0], weights[:, :, :0], jnp.int32(1)), NotImplementedError, "some"),
    ):
        with pytest.raises(error_type, match=match):
            call(*arrays, platform=INTERPRETED)
    with pytest.raises(ValueError, match="B, T, H, N"):
        OP(x, weights, jnp.int32(1), transposed=True, platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        call(x, weights, jnp.int32(1), platform=HOST)
