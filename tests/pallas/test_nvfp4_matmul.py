"""NVFP4 products against float64, of the reference and Triton (test_nvfp4_mosaic has the rest); what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import nvfp4_matmul as module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000, Platform
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, SHIFTED, GridWeight
from tests.pallas.nvfp4_weights import TOLERANCE, random_grid, relative, rounded

OP = OPS["nvfp4_matmul"]
NAMES = ("triton", "reference")
K, PARTS, WIDTH = 272, 2, 70


reference = jax.jit(functools.partial(OP, implementation="reference"), static_argnames=("out_dtype", "platform"))


def run(x, weight, layer=None, *, implementation, out_dtype=jnp.float32, **kwargs):
    # The kernel's own program is compiled once for all calls of a shape.
    call = reference if implementation == "reference" else functools.partial(OP, implementation=implementation)
    return call(x, weight, layer, out_dtype=out_dtype, platform=INTERPRETED, **kwargs)


def check(rng, rows, dtype, implementation, arrangement=SHIFTED, **kwargs):
    weight, plain = random_grid(rng, (), K, PARTS, WIDTH, arrangement)
    x, exact = rounded(rng.standard_normal((rows, K)), dtype)
    got = run(x, weight, implementation=implementation, **kwargs)
    assert got.dtype == jnp.float32
    assert relative(got, np.einsum("mk,kpn->mpn", exact, plain)) <= TOLERANCE[dtype]


def cells():
    """Every row count for both dtypes; of the kernel, one of each tile choice is fast."""
    for implementation in NAMES:
        for dtype in TOLERANCE:
            for rows in (1, 2, 3, 16, 17, 33, 65):
                quick = (1, 3, 17, 65) if dtype == jnp.bfloat16 else (17,)
                marks = [] if rows in quick or implementation == "reference" and rows == 3 else [pytest.mark.slow]
                name = f"{implementation}-{jnp.dtype(dtype).name}-{rows}"
                yield pytest.param(implementation, dtype, rows, marks=marks, id=name)


@pytest.mark.parametrize(("implementation", "dtype", "rows"), list(cells()))
def test_against_float64(implementation, dtype, rows):
    check(np.random.default_rng(), rows, dtype, implementation)


@pytest.mark.parametrize(
    ("implementation", "arrangement"), [*((name, BYTES) for name in NAMES), ("reference", FRAGMENTS)]
)
def test_other_arrangements(implementation, arrangement):
    check(np.random.default_rng(), 3, jnp.bfloat16, implementation, arrangement)


@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param(module.Tiles(16, blocks=2, splits=2, join=2), marks=pytest.mark.slow),
        pytest.param(module.Tiles(16, blocks=2, weights_first=True), marks=pytest.mark.slow),
        pytest.param(module.Tiles(32, splits=2, join=4), marks=pytest.mark.slow),
    ],
    ids=lambda tiles: tiles.label,
)
def test_other_tiles(tiles):
    check(np.random.default_rng(), 17, jnp.bfloat16, "triton", tiles=tiles)


@pytest.mark.parametrize("implementation", NAMES)
def test_one_of_a_stack(implementation):
    """Each layer's own weights; one program serves all of them."""
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (3,), K, PARTS, WIDTH)
    x, exact = rounded(rng.standard_normal((3, K)), jnp.bfloat16)
    for layer in range(3):
        got = run(x, weight, jnp.int32(layer), implementation=implementation)
        assert relative(got, np.einsum("mk,kpn->mpn", exact, plain[layer])) <= 1e-2


@pytest.mark.parametrize("implementation", NAMES)
def test_a_sum_is_rounded_once_to_the_dtype_asked_for(implementation):
    rng = np.random.default_rng()
    weight, _ = random_grid(rng, (), K, PARTS, WIDTH)
    x = jnp.asarray(rng.standard_normal((3, K)), jnp.bfloat16)
    exact = run(x, weight, implementation=implementation)
    got = run(x, weight, implementation=implementation, out_dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16 and got.shape == (3, PARTS, WIDTH)
    np.testing.assert_array_equal(got.astype(jnp.float32), exact.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("implementation", NAMES)
def test_nan_of_a_row_stays_in_it(implementation):
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (), K, PARTS, WIDTH)
    x, exact = rounded(rng.standard_normal((3, K)), jnp.bfloat16)
    got = np.asarray(run(x.at[1, 5].set(jnp.nan), weight, implementation=implementation))
    assert np.isnan(got[1]).all()
    assert relative(got[[0, 2]], np.einsum("mk,kpn->mpn", exact, plain)[[0, 2]]) <= 1e-2


@pytest.mark.parametrize("platform", [H200, B200, RTX_PRO_6000], ids=lambda platform: platform.generation)
def test_chosen_tiles_fit_every_shape(platform):
    """Splits divide the steps; a product's rows are one of those that Triton takes."""
    for steps in (1, 2, 3, 8, 17, 24, 48, 97):
        for blocks in (1, 4, 12, 64, 384):
            for rows in range(1, module.MAX_ROWS + 1):
                tiles = module.choose_tiles(rows, blocks, steps, platform)
                assert steps % tiles.splits == 0 and blocks % tiles.blocks == 0
                assert tiles.rows in (1, 2, 16, 32, 64) and (tiles.rows > 2) == (rows > 2)
                assert not (tiles.weights_first and tiles.rows >= 32 and tiles.join > 1)


def test_wrong_arguments_are_named():
    rng = np.random.default_rng(0)
    weight, _ = random_grid(rng, (), 48, 1, 20)
    stack, _ = random_grid(rng, (2,), 48, 1, 20)
    x, layer = jnp.zeros((2, 48), jnp.bfloat16), jnp.int32(0)
    for implementation in OP.implementations:
        for args, message in (
            ((x[:, :47], weight), r"x: got shape \(2, 47\); it must be \[M, 48\]"),
            ((x[None], weight), r"x: got shape \(1, 2, 48\)"),
            ((x.astype(jnp.float16), weight), "x: got float16; allowed are bfloat16 and float32"),
            ((x, stack), r"weight: got leading axes \(2,\); allowed is one with `layer`, none without"),
            ((x, weight, layer), r"weight: got leading axes \(\);"),
        ):
            with pytest.raises(ValueError, match=message):
                OP(*args, implementation=implementation, platform=INTERPRETED, out_dtype=jnp.float32)
    with pytest.raises(
        ValueError, match="implementation: got 'other' for nvfp4_matmul; allowed: triton, mosaic, reference"
    ):
        OP(x, weight, implementation="other", platform=INTERPRETED, out_dtype=jnp.float32)


def test_a_named_implementation_never_falls_back():
    weight, _ = random_grid(np.random.default_rng(0), (), 48, 1, 20)
    few = jnp.zeros((2, 48), jnp.bfloat16)
    many = jnp.zeros((module.MAX_ROWS + 1, 48), jnp.bfloat16)
    call = functools.partial(OP, out_dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=f"{len(many)} rows; the kernel is made for up to {module.MAX_ROWS}"):
        call(many, weight, implementation="triton", platform=INTERPRETED)
    assert call(many, weight, platform=INTERPRETED).shape == (len(many), 1, 20)  # unnamed, it does
    for platform, found in ((HOST, "this is a CPU"), (Platform("other_gpu"), "this is another GPU")):
        with pytest.raises(NotImplementedError, match=f"needs a GPU of compute capability.*{found}"):
            call(few, weight, implementation="triton", platform=platform)
    assert OP.explain(few, weight, platform=HOST, out_dtype=jnp.bfloat16) == {
        "reference": None,
        "mosaic": "needs wgmma (compute capability 9.0), got cpu",
        "triton": "needs a GPU of compute capability 9.0, 10.0 or 12.0; this is a CPU",
    }


def stack_of(layers):
    """Shapes alone of a stack of one-tile weights: 1 KiB of scales a layer."""
    spec = jax.ShapeDtypeStruct
    return GridWeight(
        words=spec((layers, 1, 1, 2, 64, 16), jnp.int32),
        scales=spec((layers, 1, 1, 64, 16), jnp.uint8),
        factors=spec((layers, 1), jnp.float32),
        k=256,
        parts=1,
        width=64,
    )


@pytest.mark.parametrize(
    ("layers", "served"), [(2**21 - 1, True), (2**21, False), (2**22, False), (2**22 + 1, True)], ids=str
)
def test_scales_whose_offsets_would_overflow_are_refused(layers, served):
    call = functools.partial(OP, implementation="triton", platform=H200, out_dtype=jnp.bfloat16)
    args = (jax.ShapeDtypeStruct((1, 256), jnp.bfloat16), stack_of(layers), jax.ShapeDtypeStruct((), jnp.int32))
    if served:
        assert jax.eval_shape(call, *args).shape == (1, 1, 64)
        return
    with pytest.raises(NotImplementedError, match=r"uint8\[\d+, 1, 1, 64, 16\]: offsets from 2\^31 to 2\^32 overflow"):
        jax.eval_shape(call, *args)
    fallen_back = jax.eval_shape(functools.partial(OP, platform=H200, out_dtype=jnp.bfloat16), *args)
    assert fallen_back.shape == (1, 1, 64)


def test_a_factor_of_another_part_would_show():
    """The oracle has teeth: swapping the parts' factors is far off."""
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (), K, PARTS, WIDTH)
    swapped = dataclasses.replace(weight, factors=weight.factors[::-1] * 2)
    x, exact = rounded(rng.standard_normal((3, K)), jnp.bfloat16)
    assert relative(run(x, swapped, implementation="triton"), np.einsum("mk,kpn->mpn", exact, plain)) > 0.1
