"""Measuring on the CPU with small operations: the loop makes every call, and errors are what they are called."""

import dataclasses
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddtree_jax.pallas import measure
from ddtree_jax.pallas.backend import B200, H200, HOST
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import load_registry

TOYS = load_registry(pathlib.Path(__file__).with_name("toy_ops.py"))
PRODUCT, _, ROW = TOYS.cases


def run_product(x, w):
    return 2.0 * (x @ w)


def run_row(cache, row, at):
    return TOYS.ops["toy_row"].implementations["reference"](cache, row, at, platform=HOST)


def weights_of(megabytes, **changes):
    def make(key):
        return jnp.zeros(4), jnp.zeros((megabytes, 10**6), jnp.uint8)

    return Case("toy_product", "x", make, {}, 1, 1, **{"rotate": (1,), **changes})


@pytest.mark.parametrize(
    ("megabytes", "platform", "copies"), [(10, H200, 8), (60, H200, 4), (100, H200, 3), (500, H200, 1), (500, B200, 2)]
)
def test_small_arguments_get_more_copies(megabytes, platform, copies):
    assert measure.plan(weights_of(megabytes), platform) == measure.Plan(8, copies)


def test_calls_of_nothing_but_rotated_arguments_are_as_many_as_copies():
    assert measure.plan(weights_of(100, rotate=(0, 1)), H200) == measure.Plan(3, 3)
    assert measure.plan(weights_of(100, rotate=()), H200) == measure.Plan(8, 1)


def test_calls_have_their_own_arguments_and_share_the_copies():
    plan = measure.Plan(calls=4, copies=2)
    inputs = measure.make_inputs(PRODUCT, plan, jax.random.key(0))
    calls = [measure.arguments(PRODUCT, plan, inputs, call) for call in range(4)]
    lefts = {np.asarray(x).tobytes() for x, _ in calls}
    assert len(lefts) == 4
    assert calls[0][1] is calls[2][1] and calls[1][1] is calls[3][1]
    assert not np.array_equal(calls[0][1], calls[1][1])
    x, w = PRODUCT.make(jax.random.split(jax.random.key(0), 4)[0])
    np.testing.assert_array_equal(calls[0][0], x)
    np.testing.assert_array_equal(calls[0][1], w)


def body_of(loop):
    """The loop's body after optimisation, with what it calls put in as often as it is called."""
    parts = re.split(r"\n(?=[%E])", loop.compiled.as_text())
    computations = {part.split(" ", 1)[0]: part for part in parts if part.startswith("%")}
    (name,) = {body for part in parts for body in re.findall(r"\bwhile\(.*?body=(%[\w.-]+)", part)}

    def inlined(name):
        called = re.findall(r"(?:calls|to_apply)=(%[\w.-]+)", computations[name])
        return computations[name] + "".join(inlined(one) for one in called)

    return inlined(name)


@pytest.mark.parametrize("plan", [measure.Plan(3, 3), measure.Plan(4, 2), measure.Plan(4, 1)])
def test_no_call_is_dropped_moved_out_of_the_loop_or_made_once_for_two(plan):
    loop = measure.Loop(run_product, PRODUCT, plan)
    body = body_of(loop)
    assert len(re.findall(r" dot\(", body)) == plan.calls
    assert not re.search(r"f32\[32,64\]\S* copy\(", body), "the weights are copied"


def test_the_result_of_the_loop_is_that_of_the_call():
    plan = measure.Plan(4, 2)
    loop = measure.Loop(run_product, PRODUCT, plan)
    inputs = measure.make_inputs(PRODUCT, plan, jax.random.key(5))
    arrays = measure.arguments(PRODUCT, plan, inputs, 0)
    assert measure.relative_error(PRODUCT, arrays, loop.result(inputs)) < 1e-6
    every = loop(3, inputs, inputs.carried)[1]
    for call in range(4):
        arrays = measure.arguments(PRODUCT, plan, inputs, call)
        assert measure.relative_error(PRODUCT, arrays, every[call]) < 1e-6


def test_results_start_as_garbage():
    loop = measure.Loop(lambda x, w: (x.sum(), x > 0, x.astype(jnp.int32)), PRODUCT, measure.Plan(1, 1))
    inputs = measure.make_inputs(PRODUCT, measure.Plan(1, 1), jax.random.key(0))
    number, flags, whole = loop(0, inputs, inputs.carried)[1][0]
    assert np.isnan(number) and np.all(flags) and np.all(whole == 0x5A)


def test_a_cache_is_handed_on_from_call_to_call():
    plan = measure.plan(ROW, HOST, max_calls=4)
    assert plan == measure.Plan(4, 4)
    loop = measure.Loop(run_row, ROW, plan)
    inputs = measure.make_inputs(ROW, plan, jax.random.key(0))
    carried, _ = loop(2, inputs, jax.tree.map(jnp.copy, inputs.carried))
    assert len(carried) == 4
    for call, state in enumerate(carried):
        cache, row, at = measure.arguments(ROW, plan, inputs, call)
        np.testing.assert_array_equal(state[0], run_row(cache, row, at)[1])
    assert not re.search(r"f32\[10,8\]\S* copy\(", body_of(loop)), "the cache is copied"


def time_with_clock(monkeypatch, trip_s):
    """(timing, trip counts) by a clock that stands still but for 1 ms a program and `trip_s` a trip, of 4 calls."""
    now, trips_seen = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    class Fake(measure.Loop):
        def __init__(self):
            self.plan = measure.Plan(4, 2)

        def __call__(self, trips, inputs, carried):
            trips_seen.append(trips)
            now[0] += 1e-3 + trip_s * trips
            return carried, None

    return Fake().time(measure.Inputs((), (), ()), repeats=3, sample_s=0.02), trips_seen


def test_the_time_is_the_slope_over_trips(monkeypatch):
    timing, trips_seen = time_with_clock(monkeypatch, 1e-4)
    assert timing.us == pytest.approx(25.0) and timing.spread == pytest.approx(0.0, abs=1e-9)
    assert max(trips_seen) * 1e-4 >= 0.01


def test_a_trip_of_seconds_is_a_sample(monkeypatch):
    timing, trips_seen = time_with_clock(monkeypatch, 0.2)
    assert timing.us == pytest.approx(5e4) and timing.spread is not None and max(trips_seen) == 2
    timing, trips_seen = time_with_clock(monkeypatch, 4.0)
    assert timing.us == pytest.approx(1e6, rel=1e-3) and timing.spread is None and trips_seen == [1, 1]


def test_a_longer_call_takes_longer():
    def times(rounds):
        def run(x, w):
            return jax.lax.fori_loop(0, rounds, lambda _, y: jnp.sin(y), x)

        plan = measure.Plan(2, 2)
        inputs = measure.make_inputs(PRODUCT, plan, jax.random.key(0))
        return measure.Loop(run, PRODUCT, plan).time(inputs, sample_s=0.01).us

    assert times(2000) > 4 * times(50) > 0


def test_relative_errors():
    def error(found, wanted):
        case = dataclasses.replace(PRODUCT, exact=lambda: wanted)
        return measure.relative_error(case, (), found)

    two = np.array([3.0, 4.0])
    assert error(jnp.array([3.0, 4.0]), two) == 0.0
    assert error(jnp.array([3.0, 4.5]), two) == pytest.approx(0.1)
    assert error(jnp.array([3.0, jnp.nan]), two) == math.inf
    assert error(jnp.array([3.0, jnp.inf]), two) == math.inf
    # A row that is masked out whole has -inf as its answer.
    assert error(jnp.array([3.0, -jnp.inf]), np.array([3.0, -np.inf])) == 0.0
    assert error(jnp.array([3.0, jnp.inf]), np.array([3.0, -np.inf])) == math.inf
    assert error((jnp.array([3.0]), jnp.array([2.0])), (np.array([3.0]), np.array([1.0]))) == 1.0
    assert error(jnp.zeros(2), np.zeros(2)) == 0.0 and error(jnp.ones(2), np.zeros(2)) == math.inf
    with pytest.raises(ValueError, match=r"got shape \(3,\), the exact one has \(2,\)"):
        error(jnp.zeros(3), two)
    with pytest.raises(ValueError, match="exact gives 1 arrays, the operation 2"):
        error((jnp.zeros(2), jnp.zeros(2)), two)


def test_a_check_takes_the_place_of_the_exact_answer():
    case = dataclasses.replace(PRODUCT, exact=None, check=lambda arrays, result: float(result - arrays[0]))
    assert measure.relative_error(case, (1.0,), jnp.float32(1.25)) == 0.25
    assert math.isnan(measure.relative_error(dataclasses.replace(case, check=None), (), None))


def test_limits():
    found = measure.measure_limits(copy_bytes=2**20, matmul_size=64)
    assert found.copy > 0 and found.matmul > 0 and found.launch > 0
    limits = measure.Limits(copy=1e9, matmul=1e12, launch=1e-6)
    case = dataclasses.replace(PRODUCT, traffic=2000, flops=10**6)
    assert limits.memory_bound(case) and limits.seconds(case) == 2e-6
    case = dataclasses.replace(case, flops=10**7)
    assert not limits.memory_bound(case) and limits.seconds(case) == 1e-5


def test_the_profiler_has_no_kernels_of_a_cpu():
    arrays = PRODUCT.make(jax.random.key(0))
    assert measure.kernel_times(run_product, arrays, repeats=2) == {}


def test_the_profiler_s_kernels_are_summed(monkeypatch):
    def named(name, **rest):
        return type("Named", (), {"name": name, **rest})()

    events = [named("a", duration_ns=3000.0), named("b", duration_ns=500.0), named("a", duration_ns=1000.0)]
    planes = [
        named("/host:CPU", lines=[named("Stream #1", events=events)]),
        named("/device:GPU:0", lines=[named("Stream #7(Compute)", events=events), named("XLA Ops", events=events)]),
    ]
    fake = type("Data", (), {"planes": planes})()
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", staticmethod(lambda path: fake), raising=False)
    times = measure.kernel_times(run_product, PRODUCT.make(jax.random.key(0)), repeats=2)
    assert times == {"a": 2.0, "b": 0.25}


@pytest.mark.gpu
def test_on_a_gpu_the_loop_and_the_profiler_agree():
    from ddtree_jax.pallas.backend import current_platform

    def make(key):
        return jax.random.normal(key, (16, 6144), jnp.bfloat16), jax.random.normal(key, (6144, 24576), jnp.bfloat16)

    case = Case("toy_product", "x", make, {}, 2 * 6144 * 24576, 2 * 16 * 6144 * 24576, rotate=(1,))
    plan = measure.plan(case, current_platform())
    inputs = measure.make_inputs(case, plan, jax.random.key(0))
    loop = measure.Loop(lambda x, w: x @ w, case, plan)
    by_loop = loop.time(inputs).us
    by_profiler = sum(measure.kernel_times(loop.run, measure.arguments(case, plan, inputs, 0)).values())
    assert by_loop == pytest.approx(by_profiler, rel=0.25)
    assert measure.measure_limits().seconds(case) * 1e6 < 1.2 * by_loop
