"""The product of codes with codes: the reference against float64, and what the native ones refuse and choose."""

import functools
import secrets
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas import mosaic_fp4, triton_fp4
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.arg_specs import GLM5_LINEARS, TREE_ROWS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000, Platform
from ddtree_jax.pallas.cases import nvfp4_w4a4_matmul as cases
from ddtree_jax.pallas.nvfp4_w4a4_matmul import Sizes, prepare_weights, swizzle_scales, unswizzle_scales

OP = OPS["nvfp4_w4a4_matmul"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = ml_dtypes.float8_e4m3fn


@functools.partial(jax.jit, static_argnames="out_dtype")
def reference(*arrays, out_dtype=jnp.bfloat16):
    return OP(*arrays, out_dtype=out_dtype)


def weights(n, k, rng):
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = np.exp2(rng.uniform(-9, 8.8, (n, k // 16))).astype(E4M3)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(n, k)]
    return codes, scales, values * np.repeat(scales.astype(np.float64), 16, axis=1)


def exact_activations(m, k, rng, input_scale):
    """x that the quantiser keeps as it is: E2M1 values, with a 6 in every block, times a scale that e4m3 has."""
    values = E2M1[rng.integers(0, 16, (m, k // 16, 16))]
    values[..., 3] = 6 * rng.choice([-1, 1], (m, k // 16))
    scales = np.exp2(rng.uniform(-9, 8.8, (m, k // 16, 1))).astype(E4M3).astype(np.float64)
    return (values * scales * input_scale).reshape(m, k)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (5, 48, 64), (17, 130, 208), (33, 256, 512)])
@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
def test_reference_where_activations_are_exact(m, n, k, out_dtype):
    rng = np.random.default_rng()
    input_scale, global_scale = 2.0**-7, np.float32(0.0123)
    codes, scales, w = weights(n, k, rng)
    x = exact_activations(m, k, rng, input_scale)
    exact = x @ w.T * float(global_scale)
    size = np.abs(x) @ np.abs(w).T * float(global_scale)
    got = reference(x.astype(np.float32), codes, scales, global_scale, np.float32(input_scale), out_dtype=out_dtype)
    assert got.shape == (m, n) and got.dtype == out_dtype
    # Sums of k terms in float32, then one rounding.
    allowed = size * 2.0**-22 * np.sqrt(k) + np.abs(exact) * (2.0**-8 if out_dtype == jnp.bfloat16 else 2.0**-22)
    assert np.all(np.abs(np.asarray(got).astype(np.float64) - exact) <= allowed)


def test_reference_rounds_activations_to_four_bits():
    """Random activations: near the exact product of the rounded ones, and clearly off that of the given ones."""
    rng = np.random.default_rng()
    codes, scales, w = weights(64, 512, rng)
    x = rng.standard_normal((9, 512)).astype(ml_dtypes.bfloat16)
    input_scale = np.float32(4 / (6 * 448))
    got = np.asarray(reference(x, codes, scales, np.float32(1e-3), input_scale, out_dtype=jnp.float32)).astype(
        np.float64
    )
    given = x.astype(np.float64) @ w.T * 1e-3
    error = np.linalg.norm(got - given) / np.linalg.norm(given)
    assert 0.04 < error < 0.2
    arrays = (x, codes, scales, np.float32(1e-3), input_scale)
    assert cases.check(arrays, got, prepared=False) < 1e-6


def test_shapes_of_scalars_and_prepared_scales_change_nothing():
    rng = np.random.default_rng()
    for n, k in ((130, 208), (256, 128)):
        codes, scales, _ = weights(n, k, rng)
        x = rng.standard_normal((3, k)).astype(np.float32)
        plain = reference(x, codes, scales, np.float32(0.5), np.float32(0.01))
        same_codes, prepared = jax.jit(prepare_weights)(codes, scales)
        assert prepared.shape == (-(-n // 128), -(-k // 64), 32, 16)
        other = reference(x, same_codes, prepared, np.float32([0.5]), np.float32([0.01]))
        np.testing.assert_array_equal(np.asarray(plain).view(np.uint16), np.asarray(other).view(np.uint16))


def test_order_of_the_scales():
    """Position by position as PTX gives it: 128 rows in four columns of 32 lanes, four bytes a lane and column."""
    rows, columns = 300, 10
    scales = np.random.default_rng().integers(0, 0x7F, (rows, columns), dtype=np.uint8)
    out = np.asarray(swizzle_scales(scales.view(E4M3))).view(np.uint8)
    assert out.shape == (3, 3, 32, 16)
    expected = np.zeros((3, 3, 32, 16), np.uint8)
    for row in range(rows):
        for column in range(columns):
            expected[row // 128, column // 4, row % 32, 4 * (row % 128 // 32) + column % 4] = scales[row, column]
    np.testing.assert_array_equal(out, expected)
    back = unswizzle_scales(jnp.asarray(out.view(E4M3)), rows, columns)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8), scales)


def test_a_broken_activation_shows_in_its_row_and_no_other():
    rng = np.random.default_rng()
    codes, scales, _ = weights(32, 64, rng)
    x = rng.standard_normal((4, 64)).astype(np.float32)
    whole = np.asarray(reference(x, codes, scales, np.float32(1), np.float32(0.01)))
    for broken in (np.nan, np.inf):
        x[2, 40] = broken
        got = np.asarray(reference(x, codes, scales, np.float32(1), np.float32(0.01)))
        assert np.isnan(got[2].astype(np.float32)).all()
        np.testing.assert_array_equal(got[[0, 1, 3]], whole[[0, 1, 3]])


@pytest.mark.parametrize("name", ["reference", "triton_native", "mosaic_native"])
def test_arguments_that_nobody_takes(name):
    rng = np.random.default_rng()
    codes, scales, _ = weights(128, 256, rng)
    good = [np.zeros((2, 256), np.float32), codes, scales, np.float32(1), np.float32(1)]
    bad = [
        (0, np.zeros((2, 3, 256), np.float32), "x:"),
        (0, np.zeros((2, 256), np.int32), "x:"),
        (0, np.zeros((2, 264), np.float32), "multiple of 16"),
        (1, codes.view(np.int8), "codes:"),
        (1, codes[:, :64], "codes:"),
        (2, scales.view(np.uint8), "scales:"),
        (2, scales[:, :8], "scales:"),
        (2, np.zeros((2, 4, 32, 16), E4M3), "scales:"),
        (3, np.float64(1), "global_scale:"),
        (4, np.ones(2, np.float32), "input_scale:"),
    ]
    for index, value, message in bad:
        with pytest.raises(ValueError, match=message):
            OP(*good[:index], value, *good[index + 1 :], implementation=name, platform=B200)


def arguments(m, n, k):
    spec = jax.ShapeDtypeStruct
    scalar = spec((), jnp.float32)
    return (
        spec((m, k), jnp.bfloat16),
        spec((n, k // 2), jnp.uint8),
        spec((n, k // 16), jnp.float8_e4m3fn),
        scalar,
        scalar,
    )


REFUSALS = [
    ("triton_native", HOST, (16, 128, 256), "needs Blackwell"),
    ("triton_native", H200, (16, 128, 256), "needs Blackwell"),
    ("triton_native", INTERPRETED, (16, 128, 256), "needs Blackwell"),
    ("triton_native", Platform("blackwell", 148, 232448, True), (16, 128, 256), "interpreted"),
    ("triton_native", B200, (257, 128, 256), "rows"),
    ("triton_native", B200, (0, 128, 256), "rows"),
    ("triton_native", B200, (16, 192, 256), "multiple of 128"),
    ("triton_native", RTX_PRO_6000, (16, 96, 256), "multiple of 64"),
    ("triton_native", RTX_PRO_6000, (16, 128, 96), "multiple of 64"),
    ("mosaic_native", HOST, (16, 128, 256), "tcgen05"),
    ("mosaic_native", H200, (16, 128, 256), "tcgen05"),
    ("mosaic_native", RTX_PRO_6000, (16, 128, 256), "tcgen05"),
    ("mosaic_native", Platform("blackwell", 148, 232448, True), (16, 128, 256), "interpreter"),
    ("mosaic_native", B200, (257, 128, 256), "rows"),
    ("mosaic_native", B200, (16, 192, 256), "multiple of 128"),
    ("mosaic_native", B200, (16, 128, 192), "multiple of 128"),
]


@pytest.mark.parametrize(("name", "platform", "shape", "message"), REFUSALS)
def test_what_is_not_served(name, platform, shape, message):
    """Before anything is traced: shapes and dtypes alone are looked at."""
    with pytest.raises(NotImplementedError, match=message):
        OP(*arguments(*shape), implementation=name, platform=platform)


def test_without_jax_triton_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(triton_fp4.importlib, "import_module", missing)
    with pytest.raises(NotImplementedError, match="pip install .*jax-triton.*triton"):
        OP(*arguments(16, 128, 256), implementation="triton_native", platform=B200)


@pytest.mark.parametrize(
    ("jax_triton", "triton", "version_of_jax", "refusal"),
    [
        ("0.3.1", "3.6.0", (0, 11, 2), None),
        ("0.3.1", "3.6.0", (0, 12, 0), None),
        ("0.3.1", "3.5.1", (0, 11, 2), "needs triton"),
        ("0.4.1", "3.6.0", (0, 11, 2), "needs triton"),
        ("0.4.1", "3.9.0", (0, 11, 2), None),
        ("0.4.1", "3.9.0", (0, 12, 0), "fails with jax"),
        ("0.4.2", "3.10.0+git1", (0, 12, 0), None),
    ],
)
def test_versions_of_triton_and_the_name_of_the_output(monkeypatch, jax_triton, triton, version_of_jax, refusal):
    seen = {}
    monkeypatch.setattr(jax, "__version_info__", version_of_jax)

    def old(*args, kernel, out_shape, grid, **kwargs):
        seen.update(kwargs, kernel=kernel, grid=grid, args=args)
        return jnp.zeros(out_shape.shape, out_shape.dtype)

    def new(*args, kernel, out_type, grid, **kwargs):
        return old(*args, kernel=kernel, out_shape=out_type, grid=grid, **kwargs)

    modules = {
        "jax_triton": types.SimpleNamespace(
            __version__=jax_triton, triton_call=old if jax_triton.startswith("0.3") else new
        ),
        "triton": types.SimpleNamespace(__version__=triton),
        "ddtree_jax.pallas.triton_fp4_kernel": types.SimpleNamespace(w4a4_kernel="kernel"),
    }
    monkeypatch.setattr(triton_fp4.importlib, "import_module", modules.__getitem__)

    def call():
        run = functools.partial(OP, implementation="triton_native", platform=RTX_PRO_6000)
        return jax.eval_shape(run, *arguments(5, 256, 2048))

    if refusal:
        with pytest.raises(NotImplementedError, match=refusal):
            call()
        return
    out = call()
    assert out.shape == (5, 256) and out.dtype == jnp.bfloat16
    assert seen["kernel"] == "kernel" and seen["rows"] == 16 and not seen["WEIGHTS_FIRST"]
    assert seen["grid"] == (4, 1, seen["SPLIT_K"])
    assert [a.shape for a in seen["args"]] == [(16, 1024), (16, 128), (256, 1024), (256, 128), (1,)]


@pytest.mark.parametrize("m", [m for m in TREE_ROWS if m <= 256])
def test_tiles_fit_the_gpus(m):
    for n, k in GLM5_LINEARS.values():
        sizes = Sizes(m, n, k, True)
        for platform in (B200, RTX_PRO_6000):
            if n % (128 if platform is B200 else 64):
                continue
            tiles = triton_fp4.choose_tiles(sizes, platform)
            assert tiles.shared_memory <= 0.9 * platform.shared_memory
            assert k % (tiles.split_k * tiles.block_k) == 0 and n % tiles.block_n == 0
            assert 16 <= tiles.block_m <= 128 and tiles.block_m & (tiles.block_m - 1) == 0
        if n % 128:
            continue
        tiles = mosaic_fp4.choose_tiles(sizes, B200)
        assert tiles.stages >= 1 and tiles.stages * tiles.stage_bytes < B200.shared_memory
        assert tiles.tokens >= m and tiles.tensor_columns <= 512
        assert k % (tiles.split_k * tiles.block_k) == 0
        if k >= 2048:
            assert tiles.stages >= 3  # enough to have loads under way while a product runs


def test_mosaic_program_traces_here():
    """The kernel's own arithmetic of slots, tiles and barriers passes Mosaic's checks at tracing, without a GPU."""
    for m in (1, 64, 200, 256):
        shape = jax.eval_shape(
            lambda *a: OP(*a, implementation="mosaic_native", platform=B200), *arguments(m, 256, 2048)
        )
        assert shape.shape == (m, 256) and shape.dtype == jnp.bfloat16


def test_nothing_native_is_used_unasked():
    for platform in (B200, RTX_PRO_6000, H200, HOST):
        assert OP.names(platform) == ("reference",)


@pytest.mark.parametrize(
    "case", [case for case in cases.CASES if case.name.startswith("glm5 kv_a")], ids=lambda c: c.name
)
def test_a_case_checks_what_it_should(case):
    """The check of the cases passes the reference and fails one wrong block of scales."""
    arrays = case.make(jax.random.key(secrets.randbits(31)))
    out = np.asarray(reference(*arrays, **case.static))
    assert case.check(arrays, out) < case.tolerance
    x, codes, scales, *scalars = arrays
    wrong = reference(x, codes, jnp.roll(scales, 1, axis=1), *scalars, **case.static)
    assert case.check(arrays, wrong) > 10 * case.tolerance
