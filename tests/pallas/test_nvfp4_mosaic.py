"""The Mosaic kernel of packed weights against float64, in Mosaic's interpreter; compiled under `-m gpu`.

The interpreter has the copies and barriers, and finds races among them. How codes become registers, and what wgmma
makes of them, is for the GPU tests; routed experts are in test_moe too. Each product costs the interpreter a second or
two, which is the compilation of the program of a thread.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from ddtree_jax.pallas import moe_mosaic, nvfp4_mosaic
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, HOST, INTERPRETED, RTX_PRO_6000, current_platform
from ddtree_jax.pallas.moe_tiles import make_tiles
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, SHIFTED
from ddtree_jax.pallas.nvfp4_mosaic import MAX_ROWS, choose_schedule, nvfp4_matmul_mosaic
from ddtree_jax.pallas.nvfp4_mosaic_kernel import Schedule, Units
from tests.pallas.nvfp4_weights import TOLERANCE, random_grid, relative, rounded

OP = OPS["nvfp4_matmul"]
# Two parts of two blocks of columns each, and K of a whole number of steps less a part: none is a multiple of its tile.
PARTS, WIDTH = 2, 70
BF16, F32 = jnp.bfloat16, jnp.float32


def steps_of_k(steps):
    return 256 * steps - 240


def interpreted(cores):
    return dataclasses.replace(INTERPRETED, cores=cores)


def run(x, weight, layer=None, schedule=None, *, cores=1, races=False, out_dtype=F32):
    call = functools.partial(
        nvfp4_matmul_mosaic, out_dtype=out_dtype, platform=interpreted(cores), schedule=schedule,
        interpret=plgpu.InterpretGPUParams(detect_races=races),
    )  # fmt: skip
    return jax.jit(call)(x, weight, layer)


def product(x, plain):
    return np.einsum("mk,kpn->mpn", x, plain)


def check(rows, dtype, steps, schedule=None, *, width=WIDTH, **kwargs):
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (), steps_of_k(steps), PARTS, width, FRAGMENTS)
    x, exact = rounded(rng.standard_normal((rows, weight.k)), dtype)
    got = run(x, weight, None, schedule, **kwargs)
    assert got.dtype == kwargs.get("out_dtype", F32)
    # Codes times scales are exact, and so are their products with bfloat16 rows: a float32 sum is all that is rounded.
    assert relative(got, product(exact, plain)) <= (5e-3 if got.dtype == BF16 else 1e-5)


SCHEDULED = {
    "chosen": (1, BF16, 2, None, {"cores": 3, "races": True}),
    "units in turn": (3, BF16, 3, Schedule(1), {"cores": 3, "out_dtype": BF16}),
    # One slot short of the rounds of a unit: slots and units drift apart.
    "few slots": (17, BF16, 3, Schedule(1, slots=2), {"races": True}),
    "across": (13, BF16, 2, Schedule(2), {"races": True}),
    "tiles of rows": (70, BF16, 2, Schedule(1), {"cores": 3}),
    # The sums change hands four times.
    "depth": (13, BF16, 4, Schedule(1, depth=2), {"races": True}),
    "depth of all steps": (3, F32, 2, Schedule(1, depth=2, slots=2), {}),
    "both": (3, BF16, 4, Schedule(2, depth=2, slots=2), {"races": True}),
}


@pytest.mark.parametrize(("rows", "dtype", "steps", "schedule", "options"), SCHEDULED.values(), ids=SCHEDULED)
def test_schedules(rows, dtype, steps, schedule, options):
    check(rows, dtype, steps, schedule, **options)


def fits(rows, dtype, blocks, steps, schedule):
    terms = 3 if dtype == F32 else 1
    tiles, rows = nvfp4_mosaic.cut_rows(rows, terms)
    units = Units(rows, terms, tiles, 1, 1, blocks, steps, routed=False)
    return units.slots(schedule, F32) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "dtype"), [(3, BF16), (40, BF16), (1, F32), (17, F32)])
@pytest.mark.parametrize(
    "schedule",
    [Schedule(1, slots=2), Schedule(2), Schedule(4, slots=3), Schedule(1, 2), Schedule(1, 4), Schedule(2, 2, slots=2)],
    ids=lambda schedule: f"{schedule.across}-{schedule.depth}-{schedule.slots}",
)
def test_rows_and_schedules(schedule, rows, dtype):
    if not fits(rows, dtype, 4, 4, schedule):
        pytest.skip(f"two steps of {rows} rows do not fit")
    for cores in (1, 3):
        check(rows, dtype, 4, schedule, cores=cores, races=cores == 1)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("steps", "width"), [(1, 1), (1, 64), (3, 65), (5, 190), (8, 130)])
def test_chosen_schedules(steps, width, rows):
    for cores in (2, 132):
        check(rows, BF16, steps, width=width, cores=cores)


@pytest.mark.parametrize("terms", [1, 3])
def test_rows_are_cut_into_even_tiles(terms):
    for rows in range(1, MAX_ROWS + 1):
        tiles, each = nvfp4_mosaic.cut_rows(rows, terms)
        assert each % 8 == 0 and each * terms <= 96 and (tiles - 1) * each < rows <= tiles * each


def test_one_of_a_stack():
    """Each layer's own weights; a layer that is not asked for does not reach the result, whatever it holds."""
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (3,), steps_of_k(2), 1, WIDTH, FRAGMENTS)
    x, exact = rounded(rng.standard_normal((3, weight.k)), BF16)
    for layer in (2, 1):
        others = jnp.arange(3)[:, None] != layer
        poisoned = dataclasses.replace(weight, factors=jnp.where(others, jnp.nan, weight.factors))
        got = run(x, poisoned, jnp.int32(layer))
        assert relative(got, product(exact, plain[layer])) <= 1e-5


def test_nan_of_a_row_stays_in_it():
    rng = np.random.default_rng()
    weight, plain = random_grid(rng, (), steps_of_k(2), 1, WIDTH, FRAGMENTS)
    x, exact = rounded(rng.standard_normal((9, weight.k)), BF16)
    got = np.asarray(run(x.at[3, 5].set(jnp.nan), weight, None, Schedule(1, 2)))
    others = np.arange(9) != 3
    assert np.isnan(got[3]).all()
    assert relative(got[others], product(exact, plain)[others]) <= 1e-5


def test_a_sum_is_rounded_once_to_the_dtype_asked_for():
    rng = np.random.default_rng()
    weight, _ = random_grid(rng, (), steps_of_k(2), 1, WIDTH, FRAGMENTS)
    x = jnp.asarray(rng.standard_normal((3, weight.k)), BF16)
    exact, got = (run(x, weight, None, Schedule(1), out_dtype=dtype) for dtype in (F32, BF16))
    assert got.dtype == BF16 and got.shape == (3, 1, WIDTH)
    np.testing.assert_array_equal(got.astype(F32), exact.astype(BF16).astype(F32))


def swiglu(rng, schedule, used, *, dtype=BF16, rows=8, platform=None, **kwargs):
    """(rows of the tiles in use, the same in float64): SwiGLU of three tiles, of experts 2, 0, 2."""
    experts, steps, layer = np.array([2, 0, 2], np.int32), 2, 1
    weight, plain = random_grid(rng, (2, 3), steps_of_k(steps), 2, WIDTH, FRAGMENTS)
    x, exact = rounded(rng.standard_normal((len(experts) * rows, weight.k)), dtype)
    call = functools.partial(
        nvfp4_mosaic.product, swiglu=True, out_dtype=F32, platform=platform, schedule=schedule, **kwargs
    )
    # Tiles beyond the used ones have the id of no expert, as `make_tiles` gives it.
    ids = jnp.asarray(np.where(np.arange(3) < used, experts, 3), jnp.int32)
    got = np.asarray(jax.jit(call)(x, weight, jnp.full((1,), layer), ids, jnp.full((1,), used)))
    assert got.shape == (3 * rows, 128)
    want = []
    for tile in range(used):
        gate, up = np.moveaxis(product(exact[tile * rows : (tile + 1) * rows], plain[layer, experts[tile]]), 1, 0)
        want.append(gate / (1 + np.exp(-gate)) * up)
    return got[: used * rows, :WIDTH], np.concatenate(want)


@pytest.mark.parametrize(
    ("schedule", "used", "cores"),
    [
        (Schedule(1, depth=2), 3, 1),
        (Schedule(2), 2, 2),
        pytest.param(Schedule(2, depth=2), 3, 1, marks=pytest.mark.slow),
        pytest.param(Schedule(1, slots=2), 1, 4, marks=pytest.mark.slow),
        pytest.param(None, 3, 4, marks=pytest.mark.slow),
    ],
)
def test_gate_and_up_of_experts(schedule, used, cores):
    races = plgpu.InterpretGPUParams(detect_races=True)
    got, want = swiglu(np.random.default_rng(), schedule, used, platform=interpreted(cores), interpret=races)
    assert relative(got, want) <= 1e-5


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 16).map(lambda n: 8 * n),
    terms=st.sampled_from([1, 3]),
    tiles=st.integers(1, 300),
    parts=st.sampled_from([1, 2]),
    blocks=st.integers(1, 400),
    steps=st.integers(1, 100),
    cores=st.sampled_from([0, 1, 114, 132]),
    out_dtype=st.sampled_from([BF16, F32]),
)
def test_chosen_schedules_divide_and_fit(rows, terms, tiles, parts, blocks, steps, cores, out_dtype):
    units = Units(rows, terms, tiles, 1, parts, blocks, steps, routed=tiles > 1)
    platform = dataclasses.replace(H200, cores=cores)
    try:
        schedule = choose_schedule(units, out_dtype, platform)
    except NotImplementedError as error:
        assert f"{rows} rows: two steps of them do not fit into shared memory" in str(error)
        assert units.shared_bytes(Schedule(1), 2, out_dtype) > 225_000
        return
    assert blocks % schedule.across == 0 and steps % schedule.depth == 0 and 1 <= schedule.workers <= 3
    slots = units.slots(schedule, out_dtype)
    assert 2 <= slots <= schedule.slots
    assert units.shared_bytes(schedule, slots, out_dtype) <= H200.shared_memory - 1024


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_tiles_of_experts_always_fit(dtype):
    """Whatever the routing, both products of every call that `moe_mosaic` takes have a schedule."""
    for pairs in (1, 16, 136, 513, 1032, 4096):
        for experts in (1, 5, 64, 256):
            rows = moe_mosaic.tile_rows(pairs, experts, dtype)
            assert rows % 8 == 0
            for parts, out_dtype in ((2, dtype), (1, F32)):
                units = Units(rows, 3 if dtype == F32 else 1, 9, experts, parts, 7, 5, routed=True)
                choose_schedule(units, out_dtype, H200)


def spec(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def weight_specs(arrangement, k=512, width=128, lead=(), parts=1):
    grid = functools.partial(random_grid, np.random.default_rng(0), lead, k, parts, width, arrangement)
    return jax.eval_shape(lambda: grid()[0])


def test_what_is_refused():
    fragments = weight_specs(FRAGMENTS)

    def ask(rows=8, weight=fragments, dtype=BF16, platform=H200):
        # Not traced: what it refuses, it refuses before it looks at a value.
        OP(spec((rows, 512), dtype), weight, implementation="mosaic", platform=platform, out_dtype=BF16)

    for platform in (B200, RTX_PRO_6000, HOST):
        with pytest.raises(NotImplementedError, match="needs wgmma"):
            ask(platform=platform)
    for arrangement in (SHIFTED, BYTES):
        with pytest.raises(NotImplementedError, match=f"laid out as '{arrangement}': 'fragments' only"):
            ask(weight=weight_specs(arrangement))
    for rows in (0, MAX_ROWS + 1):
        with pytest.raises(NotImplementedError, match=f"{rows} rows; the kernel is made for 1 to {MAX_ROWS}"):
            ask(rows)


def test_schedules_that_are_refused():
    def ask(rows, schedule):
        specs = spec((rows, 512), BF16), weight_specs(FRAGMENTS)
        call = functools.partial(nvfp4_matmul_mosaic, out_dtype=BF16, platform=H200, schedule=schedule)
        jax.eval_shape(call, *specs)

    for schedule in (Schedule(3), Schedule(1, 3)):
        with pytest.raises(ValueError, match="2 blocks and 2 steps must be multiples of across and depth"):
            ask(8, schedule)
    with pytest.raises(NotImplementedError, match="64 rows: two steps of .* do not fit"):
        ask(64, Schedule(2, 2))
    with pytest.raises(ValueError, match="slots from 2 on"):
        Schedule(1, slots=1)


def test_what_hopper_takes():
    """Fragments: Mosaic, or plain JAX where it cannot; other layouts: Triton. No other GPU tries Mosaic."""
    assert OP.names(H200) == OPS["moe"].names(H200) == ("mosaic", "triton", "reference")
    for op in (OP, OPS["moe"]):
        assert all("mosaic" not in op.names(platform) for platform in (B200, RTX_PRO_6000, HOST))
    for arrangement, rows, taken in (
        (FRAGMENTS, 1, "mosaic"), (FRAGMENTS, MAX_ROWS, "mosaic"), (FRAGMENTS, MAX_ROWS + 1, "reference"),
        (SHIFTED, 1, "triton"), (SHIFTED, 129, "reference"),
    ):  # fmt: skip
        weight = weight_specs(arrangement)
        reasons = OP.explain(spec((rows, 512)), weight, platform=H200, out_dtype=BF16)
        assert next(name for name in OP.names(H200) if reasons[name] is None) == taken
        if arrangement == FRAGMENTS:
            assert reasons["triton"] == "weights laid out as fragments of wgmma"
    gate_up, down = weight_specs(FRAGMENTS, lead=(4,), parts=2), weight_specs(FRAGMENTS, 128, 512, (4,))
    rows = spec((8, 512)), spec((8, 2), jnp.int32), spec((8, 2), F32)
    assert OPS["moe"].explain(*rows, gate_up, down, platform=H200) == {
        "mosaic": None,
        "triton": "weights laid out as fragments of wgmma",
        "reference": None,
    }


@pytest.fixture(scope="module")
def wide():
    """(a stack of two, the second one in float64), of 600 blocks of columns: more units than a GPU has cores."""
    weight, plain = random_grid(np.random.default_rng(), (2,), steps_of_k(4), 1, 600 * 64 - 6, FRAGMENTS)
    # The layer that is not asked for must not matter.
    return dataclasses.replace(weight, factors=weight.factors.at[0].set(jnp.nan)), plain[1]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [None, (1, 1), (3, 1), (1, 4), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "rows"), [*((BF16, rows) for rows in (1, 8, 17, 64, 128, 300)), *((F32, rows) for rows in (1, 17, 70))]
)
def test_products_on_the_gpu(wide, dtype, rows, schedule):
    weight, plain = wide
    x, exact = rounded(np.random.default_rng().standard_normal((rows, weight.k)), dtype)
    want = product(exact, plain)
    for slots in (6, 2):
        chosen = Schedule(*schedule, slots) if schedule else None
        if chosen is not None and not fits(rows, dtype, 600, 4, chosen):
            pytest.skip(f"two steps of {rows} rows do not fit")
        call = functools.partial(nvfp4_matmul_mosaic, out_dtype=F32, platform=current_platform(), schedule=chosen)
        assert relative(jax.jit(call)(x, weight, jnp.int32(1)), want) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("used", [1, 2, 3])
@pytest.mark.parametrize("schedule", [None, Schedule(1, 2), Schedule(2, 1), Schedule(2, 2, slots=2)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: jnp.dtype(dtype).name)
def test_gate_and_up_on_the_gpu(dtype, schedule, used):
    got, want = swiglu(
        np.random.default_rng(),
        schedule,
        used,
        dtype=dtype,
        rows=16 if dtype == BF16 else 8,
        platform=current_platform(),
        interpret=None,
    )
    assert relative(got, want) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 17, 128, 300])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: jnp.dtype(dtype).name)
def test_tiles_that_nobody_uses_do_not_matter_on_the_gpu(monkeypatch, dtype, rows):
    """What the kernel leaves unwritten becomes NaN between the products and after them."""
    rng = np.random.default_rng()
    experts, k, width, top_k, real = 32, 528, 208, 4, nvfp4_mosaic.product
    gate_up, down = (random_grid(rng, (1, experts), *shape, FRAGMENTS)[0] for shape in ((k, 2, width), (width, 1, k)))
    x = jnp.asarray(rng.standard_normal((rows, k)), dtype)
    ids = jnp.asarray(rng.integers(0, experts, (rows, top_k)), jnp.int32).at[0, 0].set(-1)
    weights = jnp.asarray(rng.uniform(0.1, 1, ids.shape), F32)

    def poisoned(x, weight, layer, tiles, used, **kwargs):
        out = real(x, weight, layer, tiles, used, **kwargs)
        written = jnp.arange(len(out)) < used * (len(out) // len(tiles))
        return jnp.where(written[:, None], out, jnp.nan)

    def call():
        run = functools.partial(OPS["moe"], implementation="mosaic")
        return np.asarray(jax.jit(run)(x, ids, weights, gate_up, down, jnp.int32(0)))

    clean = call()
    monkeypatch.setattr(nvfp4_mosaic, "product", poisoned)
    tiles = make_tiles(ids, experts, moe_mosaic.tile_rows(ids.size, experts, dtype))
    assert (np.asarray(tiles.experts) == experts).any()
    np.testing.assert_array_equal(call(), clean)
    assert np.isfinite(clean).all()
