"""Products with one layer of a stack of plain weights, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.pallas import layer_matmul as module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.arg_specs import GLM5_LINEARS, TREE_ROWS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000

OP = OPS["layer_matmul"]
LAYERS = 3


def draw(rows, k, out, dtype=jnp.bfloat16):
    """x, the weights of LAYERS layers, all NaN but for layer 1."""
    rng = np.random.default_rng()
    weights = rng.normal(size=(LAYERS, k, *out))
    weights[[0, 2]] = np.nan
    return jnp.asarray(rng.normal(size=(rows, k)), dtype), jnp.asarray(weights, dtype)


def error(out, x, weights):
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(weights[1], np.float64), 1)
    assert out.shape == exact.shape
    return np.linalg.norm(np.asarray(out, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("out_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("rows", "k", "out"), [(1, 64, (96,)), (17, 128, (2, 40)), (64, 96, (64,)), (70, 64, (130,)), (128, 16, (5, 3, 2))]
)
def test_against_float64(rows, k, out, out_dtype, name):
    x, weights = draw(rows, k, out)
    run = jax.jit(functools.partial(OP, implementation=name, platform=INTERPRETED, out_dtype=out_dtype))
    found = run(x, weights, jnp.int32(1))
    assert found.dtype == out_dtype
    assert error(found, x, weights) <= (3e-3 if out_dtype == jnp.bfloat16 else 1e-6)


@settings(max_examples=6, deadline=None)
@given(rows=st.integers(1, 40), steps=st.integers(1, 6), columns=st.integers(1, 70), splits=st.sampled_from([1, 2, 3]))
def test_any_tiles(rows, steps, columns, splits):
    x, weights = draw(rows, 16 * steps * splits, (columns,))
    tiles = module.Tiles(16, 32, 16, splits)
    call = functools.partial(module.layer_matmul_triton, out_dtype=jnp.float32, platform=INTERPRETED, tiles=tiles)
    assert error(call(x, weights, jnp.int32(1)), x, weights) <= 1e-6


def test_a_row_of_nan_stays_alone():
    x, weights = draw(17, 64, (40,))
    broken = x.at[3, 5].set(jnp.nan)
    out = np.asarray(
        OP(broken, weights, jnp.int32(1), implementation="triton", platform=INTERPRETED, out_dtype=x.dtype)
    )
    assert np.isnan(out[3].astype(np.float32)).all()
    assert np.isfinite(np.delete(out, 3, 0).astype(np.float32)).all()


def test_float32_goes_to_the_reference():
    x, weights = draw(5, 64, (40,), jnp.float32)
    with pytest.raises(NotImplementedError, match="float32"):
        OP(x, weights, jnp.int32(1), implementation="triton", platform=INTERPRETED, out_dtype=jnp.float32)
    assert error(OP(x, weights, jnp.int32(1), platform=INTERPRETED, out_dtype=jnp.float32), x, weights) <= 1e-6


@pytest.mark.parametrize("platform", [H200, B200, RTX_PRO_6000], ids=lambda platform: platform.generation)
@pytest.mark.parametrize("name", GLM5_LINEARS)
@pytest.mark.parametrize("rows", [rows for rows in TREE_ROWS if rows <= module.MAX_ROWS])
def test_tiles_of_real_shapes(rows, name, platform):
    n, k = GLM5_LINEARS[name]
    tiles = module.choose_tiles(rows, k, n, platform)
    assert k % (tiles.depth * tiles.splits) == 0 and rows <= tiles.rows
    assert tiles.depth * (tiles.columns + tiles.rows) * 2 * tiles.num_stages <= platform.shared_memory
    if (k // tiles.depth) >= 32:
        assert -(-n // tiles.columns) * tiles.splits >= min(platform.cores, n) // 8  # few columns: more splits


def test_what_it_refuses():
    x, weights = draw(4, 64, (40,))
    call = functools.partial(module.layer_matmul_triton, out_dtype=x.dtype)
    for arrays, error_type, match in (
        ((x[:, :32], weights, jnp.int32(1)), ValueError, "M, K"),
        ((x, weights.astype(jnp.float32), jnp.int32(1)), ValueError, "both"),
        ((x, weights, jnp.zeros(1, jnp.int32)), ValueError, "layer"),
        ((x, weights[:0], jnp.int32(0)), ValueError, "there must be a layer"),
        ((jnp.zeros((129, 64), x.dtype), weights, jnp.int32(1)), NotImplementedError, "129 rows"),
        ((x[:, :24], weights[:, :24], jnp.int32(1)), NotImplementedError, "multiple of 16"),
        ((x[:, :0], weights[:, :0], jnp.int32(1)), NotImplementedError, "multiple of 16"),
        ((x, weights[..., :0], jnp.int32(1)), NotImplementedError, "some"),
    ):
        with pytest.raises(error_type, match=match):
            call(*arrays, platform=INTERPRETED)
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        call(x, weights, jnp.int32(1), platform=HOST)
