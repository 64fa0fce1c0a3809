"""Routed experts of every implementation and kind of weight against float64, row by row; and what they refuse."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import moe as module
from ddtree_jax.pallas import moe_plain
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000
from ddtree_jax.pallas.moe_plain import PlainExperts
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, SHIFTED, GridWeight
from tests.pallas.nvfp4_weights import TOLERANCE, random_grid, relative, rounded

OP = OPS["moe"]
# Neither is a multiple of 256 or 128, nor of 64.
E, D, WIDTH, TOP_K = 5, 272, 80, 2
FP8 = jnp.float8_e4m3fn
KINDS = ("nvfp4", "bfloat16", "float32", "float8")
# Several tiles a core, for the persistent kernel.
FEW_CORES = dataclasses.replace(INTERPRETED, cores=2)


def pairs(*kinds, slow=()):
    """Every implementation of every kind; `slow`: (kind, implementation) pairs. Mosaic has packed experts alone."""
    found = [(kind, name) for kind in kinds for name in OP.implementations if name != "mosaic" or kind == "nvfp4"]
    slow = {pair: [pytest.mark.slow] for pair in slow}
    cells = [pytest.param(*pair, marks=slow.get(pair, ()), id="-".join(pair)) for pair in found]
    return pytest.mark.parametrize(("kind", "implementation"), cells)


reference = jax.jit(functools.partial(OP, implementation="reference"), static_argnames="platform")


def run(*args, implementation, platform=FEW_CORES, **how):
    if implementation == "reference":
        return reference(*args, platform=platform)
    call = functools.partial(OP, implementation=implementation, platform=platform, **how)
    # Triton's own program is compiled once for all calls of a shape.
    return jax.jit(call)(*args) if implementation == "mosaic" else call(*args)


def layout(implementation):
    return FRAGMENTS if implementation == "mosaic" else SHIFTED


def random_experts(rng, kind, lead, k, parts, width, arrangement=SHIFTED):
    """(weights of that kind, the same in float64)."""
    if kind == "nvfp4":
        return random_grid(rng, lead, k, parts, width, arrangement)
    drawn = rng.standard_normal((*lead, k, parts, width)) * k**-0.5
    if kind != "float8":
        values = jnp.asarray(drawn, kind)
        return PlainExperts(values), np.asarray(values).astype(np.float64)
    values = (16 * drawn).astype(ml_dtypes.float8_e4m3fn)
    scales = (rng.uniform(0.3, 1.2, (*lead, parts)) / 16).astype(np.float32)
    exact = values.astype(np.float64) * scales.astype(np.float64)[..., None, :, None]
    return PlainExperts(jnp.asarray(values), jnp.asarray(scales)), exact


def oracle(x, ids, weights, gate_up, down):
    """float64[M, D]; gate_up [E, D, 2, I], down [E, I, 1, D]."""
    out = np.zeros((len(x), down.shape[-1]))
    for m, row in enumerate(x):
        for e, weight in zip(ids[m], weights[m], strict=True):
            if 0 <= e < len(gate_up):
                gate, up = row @ gate_up[e, :, 0], row @ gate_up[e, :, 1]
                out[m] += float(weight) * ((gate / (1 + np.exp(-gate)) * up) @ down[e, :, 0])
    return out


class Mixture:
    """One random layer, or a stack of them; `call` and `exact` take the same rows and routing."""

    def __init__(self, rng, kind, lead=(), num_experts=E, arrangement=SHIFTED):
        lead = (*lead, num_experts)
        self.gate_up, self.gate_up_exact = random_experts(rng, kind, lead, D, 2, WIDTH, arrangement)
        self.down, self.down_exact = random_experts(rng, kind, lead, WIDTH, 1, D, arrangement)

    def call(self, x, ids, weights, layer=None, **kwargs):
        return run(x, jnp.asarray(ids, jnp.int32), weights, self.gate_up, self.down, layer, **kwargs)

    def check(self, rng, dtype, ids, implementation, layer=None, **kwargs):
        x, exact = rounded(rng.standard_normal((len(ids), D)), dtype)
        weights = rng.uniform(0.1, 1, np.shape(ids)).astype(np.float32)
        at = ... if layer is None else layer
        want = oracle(exact, np.asarray(ids), weights, self.gate_up_exact[at], self.down_exact[at])
        layer = None if layer is None else jnp.int32(layer)
        got = self.call(x, ids, weights, layer, implementation=implementation, **kwargs)
        assert got.dtype == jnp.float32
        assert relative(got, want) <= TOLERANCE[dtype]
        nobody = ~((np.asarray(ids) >= 0) & (np.asarray(ids) < E)).any(axis=1)
        assert not np.asarray(got)[nobody].any()


def random_ids(rng, rows, num_experts=E):
    return np.argsort(rng.random((rows, num_experts)), axis=1)[:, :TOP_K]


def cells():
    """Every row count for every kind of weight and rows; of the kernels, a few are fast."""
    for kind in KINDS:
        for implementation in OP.implementations:
            if implementation == "mosaic" and kind != "nvfp4":
                continue
            for dtype in TOLERANCE:
                for rows in (1, 2, 3, 16, 17, 33, 65):
                    quick = rows == 17 if dtype == jnp.bfloat16 else rows == 3
                    if implementation == "reference" and (kind != "nvfp4" or dtype == jnp.float32):
                        quick = False
                    # Of the two kernels of packed weights one is quick in each dtype.
                    if kind == "nvfp4" and implementation == {jnp.bfloat16: "triton", jnp.float32: "mosaic"}.get(dtype):
                        quick = False
                    name = f"{kind}-{implementation}-{jnp.dtype(dtype).name}-{rows}"
                    marks = [] if quick else [pytest.mark.slow]
                    yield pytest.param(kind, implementation, dtype, rows, marks=marks, id=name)


@pytest.mark.parametrize(("kind", "implementation", "dtype", "rows"), list(cells()))
def test_against_float64(kind, implementation, dtype, rows):
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, arrangement=layout(implementation))
    mixture.check(rng, dtype, random_ids(rng, rows), implementation)


ROUTINGS = {
    "all to one": np.full((17, TOP_K), [3, 0]),
    "all to one expert, twice": np.full((17, TOP_K), 2),
    "some experts empty": np.resize([[1, 4], [4, 1]], (17, TOP_K)),
    "full tiles": np.concatenate([np.full((16, TOP_K), [0, 2]), [[1, -1]]]),
    "padding": np.concatenate([[[-1, -1]], random_ids(np.random.default_rng(7), 8), np.full((8, TOP_K), -1)]),
    "experts of another device": np.resize([[4, 5], [99, 0], [-7, 5]], (17, TOP_K)),
    "nobody": np.full((17, TOP_K), -1),
}


MOSAIC = ("nvfp4", "mosaic")


@pairs("nvfp4", "float8", slow=[MOSAIC])
def test_routings(kind, implementation):
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, arrangement=layout(implementation))
    for name, ids in ROUTINGS.items():
        assert ids.shape == (17, TOP_K), name
        if name == "nobody":
            got = mixture.call(
                jnp.ones((17, D), jnp.bfloat16), ids, jnp.ones((17, TOP_K)), implementation=implementation
            )
            assert not np.asarray(got).any()
        else:
            mixture.check(rng, jnp.bfloat16, ids, implementation)


def test_mosaic_finds_no_race():
    """An expert with two tiles, a row that takes an expert twice, experts of nobody, and tiles of nobody."""
    rng = np.random.default_rng()
    ids = np.array([[3, 3]] * 5 + [[3, 0]] * 3 + [[-1, 9]])
    races = plgpu.InterpretGPUParams(detect_races=True)
    Mixture(rng, "nvfp4", arrangement=FRAGMENTS).check(rng, jnp.bfloat16, ids, "mosaic", rows=8, interpret=races)


@pairs("nvfp4", "float8")
def test_nan_of_a_padding_row_spreads_nowhere(kind, implementation):
    """Row 0 too, which the empty slots of tiles stand for; and a row that is served keeps its NaN to itself."""
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, arrangement=layout(implementation))
    x, exact = rounded(rng.standard_normal((17, D)), jnp.bfloat16)
    ids = random_ids(rng, 17)
    ids[[0, 5]] = -1
    weights = rng.uniform(0.1, 1, ids.shape).astype(np.float32)
    want = oracle(exact, ids, weights, mixture.gate_up_exact, mixture.down_exact)
    bad = np.array([0, 5, 9])
    got = np.array(mixture.call(x.at[bad].set(jnp.nan), ids, weights, implementation=implementation))
    assert np.isnan(got[9]).all() and not got[[0, 5]].any()
    got[9] = want[9]
    assert relative(got, want) <= 1e-2


@pairs("nvfp4", "float8", slow=[MOSAIC])
def test_nan_of_an_expert_reaches_only_those_that_chose_it(kind, implementation):
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, arrangement=layout(implementation))
    field = "factors" if kind == "nvfp4" else "scales"
    bad = getattr(mixture.gate_up, field).at[2].set(jnp.nan)
    mixture.gate_up = dataclasses.replace(mixture.gate_up, **{field: bad})
    ids = np.resize([[0, 1], [3, 4], [2, 1]], (17, TOP_K))
    x = jnp.asarray(rng.standard_normal((17, D)), jnp.bfloat16)
    got = np.asarray(mixture.call(x, ids, jnp.ones((17, TOP_K)), implementation=implementation))
    np.testing.assert_array_equal(np.isnan(got).all(axis=1), (ids == 2).any(axis=1))
    assert np.isfinite(got[(ids != 2).all(axis=1)]).all()


@pairs("nvfp4", "bfloat16", slow=[("nvfp4", name) for name in OP.implementations])
def test_one_of_a_stack(kind, implementation):
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, lead=(3,), arrangement=layout(implementation))
    for layer in (2, 0):
        mixture.check(rng, jnp.bfloat16, random_ids(rng, 3), implementation, layer=layer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "arrangement"), [("triton", BYTES), ("reference", BYTES), ("reference", FRAGMENTS)]
)
def test_other_arrangements(implementation, arrangement):
    rng = np.random.default_rng()
    Mixture(rng, "nvfp4", arrangement=arrangement).check(rng, jnp.bfloat16, random_ids(rng, 5), implementation)


@pytest.mark.parametrize(
    ("kind", "tiles"),
    [
        ("bfloat16", moe_plain.Tiles(32, columns=32, depth=64)),
        pytest.param("float32", moe_plain.Tiles(16, columns=128, depth=32), marks=pytest.mark.slow),
        pytest.param("nvfp4", module.Tiles(1, weights_first=True), marks=pytest.mark.slow),
        pytest.param("nvfp4", module.Tiles(2, weights_first=True), marks=pytest.mark.slow),
        pytest.param("nvfp4", module.Tiles(16, weights_first=True), marks=pytest.mark.slow),
        pytest.param("nvfp4", module.Tiles(16, join=2), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_other_tiles(kind, tiles):
    rng = np.random.default_rng()
    Mixture(rng, kind).check(rng, jnp.bfloat16, random_ids(rng, 17), "triton", tiles=tiles)


def test_plain_tiles_grow_with_the_pairs_of_an_expert():
    for platform in (H200, RTX_PRO_6000):
        for dtype in (jnp.bfloat16, jnp.float32):
            chosen = [moe_plain.choose_tiles(pairs, 64, dtype, platform) for pairs in (1, 136, 513, 1032, 2048, 4096)]
            rows = [tiles.rows for tiles in chosen]
            assert rows == sorted(rows) and rows[0] == rows[1] == 16 and rows[-1] > 16
            for tiles in chosen:  # both weight tiles and the rows of every stage fit a block
                size = jnp.dtype(dtype).itemsize
                stage = tiles.depth * (2 * tiles.columns + tiles.rows) * size
                assert stage * tiles.num_stages <= platform.shared_memory


def test_wrong_arguments_are_named():
    rng = np.random.default_rng(0)
    for kind in ("nvfp4", "bfloat16"):
        mixture, stack = Mixture(rng, kind), Mixture(rng, kind, lead=(2,))
        gate_up, down = mixture.gate_up, mixture.down
        x, ids, weights = jnp.zeros((3, D), jnp.bfloat16), jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2))
        other = Mixture(rng, "float32" if kind == "nvfp4" else "nvfp4").down
        fewer = Mixture(rng, kind, num_experts=3).down
        for name in OP.implementations:
            for args, message in (
                ((x[0], ids, weights, gate_up, down), r"x: got bfloat16\[272\]; it must be bfloat16 or float32"),
                ((x.astype(jnp.float16), ids, weights, gate_up, down), "x: got float16"),
                ((x, ids[:2], weights, gate_up, down), r"shapes \(2, 2\) and \(3, 2\); both must be \[3, k\]"),
                ((x, ids, weights[:, :1], gate_up, down), "expert_ids, weights: got shapes"),
                ((x[:, :-16], ids, weights, gate_up, down), "gate_up: got lead .* 272 -> 2 x 80; it must have 1"),
                ((x, ids, weights, down, down), "gate_up: got lead"),
                ((x, ids, weights, gate_up, gate_up), "down: got lead"),
                ((x, ids, weights, stack.gate_up, stack.down), r"gate_up: got lead \(2, 5\)"),
                ((x, ids, weights, gate_up, down, jnp.int32(0)), "it must have 2 leading axes"),
                ((x, ids, weights, gate_up, fewer), r"down: got \(3,\) of width 272; it must be \(5,\) of 272"),
                ((x, ids, weights, gate_up, other), f"down: got .*; it must be {type(gate_up).__name__}, as gate_up"),
            ):
                with pytest.raises(ValueError, match=message):
                    OP(*args, implementation=name, platform=INTERPRETED)
    halves = PlainExperts(gate_up.values.astype(jnp.float16))
    scaled = PlainExperts(gate_up.values, jnp.ones((E, 1)))
    for wrong, message in (
        (halves, "gate_up: got values in float16; allowed are bfloat16, float32, float8_e4m3fn"),
        (scaled, r"gate_up: got scales float32\[5, 1\]; they must be float32\[5, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            OP(x, ids, weights, wrong, down, platform=INTERPRETED)


@pytest.mark.parametrize("kind", ["nvfp4", "float8"])
def test_a_named_implementation_never_falls_back(kind):
    mixture = Mixture(np.random.default_rng(0), kind)

    def call(rows, **kwargs):
        shape = (jax.ShapeDtypeStruct((rows, D), jnp.bfloat16), jax.ShapeDtypeStruct((rows, 2), jnp.int32))
        weights = jax.ShapeDtypeStruct((rows, 2), jnp.float32)
        return jax.eval_shape(functools.partial(OP, **kwargs), *shape, weights, mixture.gate_up, mixture.down)

    many = module.MAX_ROWS + 1
    with pytest.raises(NotImplementedError, match=f"{many} rows; the kernels are made for up to {module.MAX_ROWS}"):
        call(many, implementation="triton", platform=INTERPRETED)
    assert call(many, platform=INTERPRETED).shape == (many, D)
    with pytest.raises(NotImplementedError, match="needs a GPU of compute capability 9.0, 10.0 or 12.0; this is a CPU"):
        call(2, implementation="triton", platform=HOST)
    assert call(2, platform=HOST).shape == (2, D)
    with pytest.raises(ValueError, match="implementation: got 'ragged' for moe; allowed: triton, mosaic, reference"):
        call(2, implementation="ragged", platform=HOST)


def test_what_mosaic_refuses():
    packed, other, plain = (
        Mixture(np.random.default_rng(0), kind, arrangement=arrangement)
        for kind, arrangement in (("nvfp4", FRAGMENTS), ("nvfp4", SHIFTED), ("bfloat16", None))
    )

    def ask(rows=2, gate_up=packed.gate_up, down=packed.down, **kwargs):
        # Not traced: what it refuses, it refuses before it looks at a value.
        spec = jax.ShapeDtypeStruct
        rows = spec((rows, D), jnp.bfloat16), spec((rows, TOP_K), jnp.int32), spec((rows, TOP_K), jnp.float32)
        OP(*rows, gate_up, down, **{"platform": H200, "implementation": "mosaic"} | kwargs)

    for platform in (B200, RTX_PRO_6000, HOST):
        with pytest.raises(NotImplementedError, match="needs wgmma"):
            ask(platform=platform)
    with pytest.raises(NotImplementedError, match="plain experts: packed ones only"):
        ask(gate_up=plain.gate_up, down=plain.down)
    for weights in ({"gate_up": other.gate_up}, {"down": other.down}):
        with pytest.raises(NotImplementedError, match="laid out as 'shifted': 'fragments' only"):
            ask(**weights)
        with pytest.raises(NotImplementedError, match="laid out as fragments"):
            ask(**weights, implementation="triton")
    for rows in (0, module.MAX_ROWS + 1):
        with pytest.raises(NotImplementedError, match=f"{rows} rows; the kernels are made for 1 to {module.MAX_ROWS}"):
            ask(rows)


def spec_weights(kind, layers):
    """Shapes alone: 2^20 bytes of scales, or of values, a layer."""
    spec = jax.ShapeDtypeStruct
    if kind == "float8":
        gate_up, down = spec((layers, 1, 1024, 2, 512), FP8), spec((layers, 1, 512, 1, 1024), FP8)
        return PlainExperts(gate_up), PlainExperts(down)

    def grid(blocks, steps, k, parts, width):
        lead = (layers, 1, blocks)
        return GridWeight(
            spec((*lead, steps, 2, 64, 16), jnp.int32),
            spec((*lead, steps, 64, 16), jnp.uint8),
            spec(lead, jnp.float32),
            k,
            parts,
            width,
        )

    return grid(32, 32, 8192, 2, 1024), grid(128, 4, 1024, 1, 8192)


@pytest.mark.parametrize("kind", ["nvfp4", "float8"])
@pytest.mark.parametrize(("layers", "served"), [(2047, True), (2048, False), (4096, False), (8193, True)], ids=str)
def test_bytes_whose_offsets_would_overflow_are_refused(kind, layers, served):
    gate_up, down = spec_weights(kind, layers)
    spec = jax.ShapeDtypeStruct
    args = (spec((1, gate_up.k), jnp.bfloat16), spec((1, 2), jnp.int32), spec((1, 2), jnp.float32))
    args = (*args, gate_up, down, spec((), jnp.int32))
    call = functools.partial(OP, implementation="triton", platform=H200)
    if served:
        assert jax.eval_shape(call, *args).shape == (1, gate_up.k)
        return
    with pytest.raises(NotImplementedError, match=r"offsets from 2\^31 to 2\^32 overflow"):
        jax.eval_shape(call, *args)
    assert jax.eval_shape(functools.partial(OP, platform=H200), *args).shape == (1, gate_up.k)  # the reference


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: jnp.dtype(dtype).name)
@pairs(*KINDS)
def test_shapes_that_fill_no_tile_on_the_gpu(kind, implementation, dtype):
    rng = np.random.default_rng()
    mixture = Mixture(rng, kind, arrangement=layout(implementation))
    for rows in (1, 3, 17, 65):
        mixture.check(rng, dtype, random_ids(rng, rows), implementation, platform=None)
    for ids in ROUTINGS.values():
        if (ids >= 0).any():
            mixture.check(rng, dtype, ids, implementation, platform=None)
