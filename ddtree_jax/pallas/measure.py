"""Times and errors of kernels on the device at hand.

A call is timed inside a loop on the device, as the slope between two trip counts: what the host does falls out. Its
arguments come from several copies in turn, so that they are read from memory and not from the L2 cache.

Compile everything before the first measurement: beside compilers at work, times read 10 to 40 times too long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.pallas.backend import HOPPER, Platform
from ddtree_jax.pallas.cases.base import WHOLE, Case

# The rotated copies together are this many times the L2 cache.
_L2_MULTIPLE = 4
# A loop around one short kernel pays some 20 us a trip of its own: put several calls into a trip.
_MAX_CALLS = 8
_REPEATS = 5
_SAMPLE_S = 0.03
_MAX_TRIPS = 100_000
# A trip from which on one more is a sample, and what all samples of it may take, about. One of which there is time for
# one sample only is a sample itself: what it takes besides its calls does not count then.
_SLOW_S, _MOST_S = 0.1, 3.0
_POISON = 0x5A

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Timing:
    """us: median microseconds of a call. spread: (largest - smallest) / median of the repeats; None: of one sample."""

    us: float
    spread: float | None


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the device gives.

    copy: bytes a second of a copy, read and written. matmul: operations a second of a bfloat16 product. launch: seconds
    of a kernel with next to nothing to do, one behind the other as `Loop` has them; `seconds` leaves it out.
    """

    copy: float
    matmul: float
    launch: float

    def seconds(self, case: Case) -> float:
        """No call of this case can take less."""
        return max(case.traffic / self.copy, case.flops / self.matmul)

    def memory_bound(self, case: Case) -> bool:
        return case.traffic / self.copy >= case.flops / self.matmul


@dataclasses.dataclass(frozen=True)
class Plan:
    """How many calls a trip has, and how many copies of the rotated arguments they take in turn."""

    calls: int
    copies: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments by index. rotated: one a copy; own: one a call; carried: what the loop hands on, one a copy or call."""

    rotated: tuple[Mapping[int, Any], ...]
    own: tuple[Mapping[int, Any], ...]
    carried: tuple[Mapping[int, Any], ...]


def plan(case: Case, platform: Platform, *, max_calls: int = _MAX_CALLS) -> Plan:
    """More copies for small arguments, until all together are well over the L2 cache."""
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    size = sum(_bytes(shapes[index]) for index in case.rotate)
    l2 = 60e6 if platform.generation == HOPPER else 134e6
    copies = min(max_calls, max(1, math.ceil(_L2_MULTIPLE * l2 / size))) if size else 1
    # With nothing of its own, a call on the same copy would be the same call, which XLA makes once.
    has_own = any(jax.tree.leaves(shapes[i]) for i in range(len(shapes)) if i not in case.rotate)
    return Plan(max_calls if has_own else copies, copies)


def make_inputs(case: Case, plan: Plan, key: jax.Array) -> Inputs:
    """Random arguments; those of call 0 are those of copy 0."""
    keys = jax.random.split(key, plan.calls)
    count = len(jax.eval_shape(case.make, keys[0]))
    carried = set(case.carries.values())
    shared, own = _shares(case, count)
    maker = _maker if isinstance(key, jax.core.Tracer) else _compiled_maker
    some_shared, some_own = maker(case.make, shared), maker(case.make, own)
    rotated = [some_shared(one) for one in keys[: plan.copies]]
    owned = [some_own(one) for one in keys]
    states = [{**rotated[state % plan.copies], **owned[state]} for state in _states(case, plan)]
    return Inputs(
        tuple({index: one[index] for index in shared if index not in carried} for one in rotated),
        tuple({index: one[index] for index in own if index not in carried} for one in owned),
        tuple({index: one[index] for index in carried} for one in states),
    )


def arguments(case: Case, plan: Plan, inputs: Inputs, call: int) -> tuple[Any, ...]:
    """The arguments of one call, in order."""
    states = _states(case, plan)
    parts = {**inputs.rotated[call % plan.copies], **inputs.own[call], **inputs.carried[call % len(states)]}
    return tuple(parts[index] for index in range(len(parts)))


class Loop:
    """A case's call in a loop on the device; compiled when made, so it may be made in a thread.

    Args:
      run: the call, of the case's arrays alone.
      case: whose arrays.
      plan: as given by `plan`.
    """

    def __init__(self, run: Run, case: Case, plan: Plan):
        self.run, self.case, self.plan = run, case, plan
        specs = jax.eval_shape(lambda key: make_inputs(case, plan, key), jax.random.key(0))
        for indices in _shares(case, len(jax.eval_shape(case.make, jax.random.key(0)))):
            _compiled_maker(case.make, indices)  # now, as nothing must compile between measurements
        donated = (1,) if case.carries else ()
        program = jax.jit(loop_program(run, case, plan), donate_argnums=donated)
        rest = dataclasses.replace(specs, carried=())
        self.compiled = program.lower(jax.ShapeDtypeStruct((), jnp.int32), specs.carried, rest).compile()

    def __call__(self, trips: int, inputs: Inputs, carried: Any) -> tuple[Any, Any]:
        rest = dataclasses.replace(inputs, carried=())
        return jax.block_until_ready(self.compiled(jnp.int32(trips), carried, rest))

    def result(self, inputs: Inputs) -> Any:
        """What call 0 gives for `arguments(..., call=0)`; not for cases that carry."""
        return self(1, inputs, inputs.carried)[1][0]

    def time(self, inputs: Inputs, *, repeats: int = _REPEATS, sample_s: float = _SAMPLE_S) -> Timing:
        """Slope between two trip counts, or one trip that takes seconds. `inputs` of cases that carry are used up."""
        carried = inputs.carried

        def seconds(trips: int) -> float:
            nonlocal carried
            start = time.perf_counter()
            carried, _ = self(trips, inputs, carried)
            return time.perf_counter() - start

        seconds(1)
        one, more = seconds(1), 4
        if one > _SLOW_S:  # a plain reference may take seconds a trip
            more, repeats = 1, min(repeats, round(_MOST_S / one / 3))
            if repeats < 2:
                return Timing(one / self.plan.calls * 1e6, None)
        while one <= _SLOW_S and more < _MAX_TRIPS and seconds(1 + more) - seconds(1) < sample_s / 2:
            more *= 4
        samples = [(seconds(1 + more) - seconds(1)) / more / self.plan.calls for _ in range(repeats)]
        middle = statistics.median(samples)
        return Timing(middle * 1e6, (max(samples) - min(samples)) / middle if middle > 0 else math.inf)


def loop_program(run: Run, case: Case, plan: Plan) -> Run:
    """(trips, carried, inputs) -> (carried, results of each call of the last trip).

    Nothing is added to the calls but a counter. The results are what the loop hands on, so none is dropped; what a call
    has of its own passes a barrier with the counter, so none is moved out of the loop, and one with the result before
    it, so that calls stay apart; the copies are picked by an unrolled body, so none is copied. The results start as
    garbage.
    """
    states = _states(case, plan)
    call = jax.jit(run)  # traced once, not once a call

    def split(result: Any) -> tuple[dict[int, Any], Any]:
        if not case.carries:
            return {}, result
        if WHOLE in case.carries:
            return {case.carries[WHOLE]: result}, ()
        handed_on = {argument: result[index] for index, argument in case.carries.items()}
        return handed_on, tuple(one for index, one in enumerate(result) if index not in case.carries)

    def program(trips: jax.Array, carried: Any, inputs: Inputs) -> tuple[Any, Any]:
        inputs = dataclasses.replace(inputs, carried=carried)
        first = jax.eval_shape(run, *arguments(case, plan, inputs, 0))
        garbage = jax.tree.map(_poison, split(first)[1])

        def trip(_: Any, carry: Any) -> Any:
            counter, carried, _ = carry
            has_own = any(jax.tree.leaves(one) for one in inputs.own)
            tied, counter = lax.optimization_barrier((inputs.own if has_own else inputs.rotated, counter))
            now = dataclasses.replace(inputs, **{"own" if has_own else "rotated": tied})
            state, results = list(carried), []
            for index in range(plan.calls):
                now = dataclasses.replace(now, carried=tuple(state))
                if has_own and results and not case.carries:
                    # One after the other: XLA would make one product of several with the same weights.
                    own, _ = lax.optimization_barrier((now.own[index], _smallest(results[-1])))
                    now = dataclasses.replace(now, own=(*now.own[:index], own, *now.own[index + 1 :]))
                handed_on, result = split(call(*arguments(case, plan, now, index)))
                state[index % len(states)] = handed_on
                results.append(result)
            return counter + 1, tuple(state), tuple(results)

        start = (jnp.int32(0), carried, (garbage,) * plan.calls)
        _, carried, results = lax.fori_loop(0, trips, trip, start)
        return carried, results

    return program


def relative_error(case: Case, arrays: tuple[Any, ...], result: Any, exact: Any = None) -> float:
    """||result - exact|| / ||exact||; inf where a result is not finite and the exact one is.

    Args:
      exact: of the same arrays, where it has been worked out already.
    """
    if case.check is not None:
        return float(case.check(arrays, result))
    if case.exact is None:
        return math.nan
    wanted = jax.tree.leaves(case.exact(*arrays) if exact is None else exact)
    found = jax.tree.leaves(result)
    if len(wanted) != len(found):
        raise ValueError(f"case {case.name!r}: exact gives {len(wanted)} arrays, the operation {len(found)}")
    return max(_relative(_float64(a), _float64(b)) for a, b in zip(found, wanted, strict=True))


def kernel_times(run: Run, arrays: tuple[Any, ...], *, repeats: int = 10) -> dict[str, float]:
    """Kernel -> microseconds a call on the device, by the profiler: a second opinion on `Loop.time`."""
    compiled = jax.jit(run).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    return traced_times(lambda _: compiled(*arrays), repeats=repeats)


def traced_times(call: Callable[[int], Any], *, repeats: int) -> dict[str, float]:
    """Kernel -> microseconds on the device, summed over a call and over devices, of `call(0)` to `call(repeats - 1)`.

    Reads some 10 % high for kernels of 1 us. Empty on a CPU. With loops captured in command buffers (not the default)
    the profiler misses kernels.
    """
    totals: dict[str, float] = {}
    for times in traced_times_by_device(call, repeats=repeats).values():
        for kernel, us in times.items():
            totals[kernel] = totals.get(kernel, 0.0) + us
    return totals


def traced_times_by_device(call: Callable[[int], Any], *, repeats: int) -> dict[str, dict[str, float]]:
    """Device, such as "GPU:0" -> what `traced_times` gives for it. Kernels that overlap count in full, each of them."""
    totals: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for index in range(repeats):
                jax.block_until_ready(call(index))
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            data = jax.profiler.ProfileData.from_file(str(path))
            for plane in data.planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                times = totals.setdefault(plane.name.removeprefix("/device:"), {})
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            times[event.name] = times.get(event.name, 0.0) + event.duration_ns / 1e3 / repeats
    return totals


def measure_limits(*, copy_bytes: int | None = None, matmul_size: int | None = None) -> Limits:
    """Of the default device, with a copy of `copy_bytes` and a square product. None: sizes for the device."""
    on_gpu = jax.default_backend() == "gpu"
    elements = (copy_bytes or (2**30 if on_gpu else 2**26)) // 4
    n = matmul_size or (8192 if on_gpu else 512)
    copying = Case("limits", "copy", lambda key: (jnp.zeros(elements),), {}, 0, 0, rotate=(0,), carries={0: 0})
    weights = _normal((n, n), 1 / math.sqrt(n))
    product = Case(
        "limits",
        "product",
        lambda key: (weights(key), _normal((n, n), 1.0)(key)),
        {},
        0,
        0,
        rotate=(0,),
        carries={0: 1},
    )
    one = Plan(1, 1)
    key = jax.random.key(0)
    copy = Loop(lambda x: (x + 1,), copying, one)
    matmul = Loop(lambda w, x: (x @ w,), product, one)
    nothing = Case("limits", "launch", lambda key: (jax.random.normal(key, (128,)),), {}, 0, 0)
    eight = Plan(_MAX_CALLS, 1)
    launch = Loop(lambda x: x + 1, nothing, eight)
    launch_s = launch.time(make_inputs(nothing, eight, key)).us / 1e6
    copy_s = copy.time(make_inputs(copying, one, key)).us / 1e6
    matmul_s = matmul.time(make_inputs(product, one, key)).us / 1e6
    return Limits(2 * 4 * elements / copy_s, 2 * n**3 / matmul_s, launch_s)


def _normal(shape: Sequence[int], scale: float) -> Callable[[jax.Array], jax.Array]:
    return lambda key: (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)


def _states(case: Case, plan: Plan) -> range:
    """Indices of the carried values: one a copy where they are rotated, else one a call."""
    rotated = any(index in case.rotate for index in case.carries.values())
    return range(plan.copies if rotated else plan.calls)


Maker = Callable[[jax.Array], dict[int, Any]]


def _shares(case: Case, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the arguments that are rotated, and of the others."""
    return tuple(sorted(case.rotate)), tuple(sorted(set(range(count)) - set(case.rotate)))


def _maker(make: Callable[[jax.Array], tuple[Any, ...]], indices: tuple[int, ...]) -> Maker:
    """Key -> some of a case's arguments; the others are not worked out."""

    def some(key: jax.Array) -> dict[int, Any]:
        made = make(key)
        return {index: made[index] for index in indices}

    return jax.jit(some) if indices else lambda key: {}


@functools.cache
def _compiled_maker(make: Callable[[jax.Array], tuple[Any, ...]], indices: tuple[int, ...]) -> Maker:
    some = _maker(make, indices)
    return some.lower(jax.random.key(0)).compile() if indices else some


def _smallest(tree: Any) -> Any:
    return min(jax.tree.leaves(tree), key=_bytes)


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def _float64(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)


def _poison(spec: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(spec.dtype, jnp.floating):
        return jnp.full(spec.shape, jnp.nan, spec.dtype)
    return jnp.full(spec.shape, spec.dtype == jnp.bool_ or _POISON, spec.dtype)


def _relative(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape:
        raise ValueError(f"result: got shape {found.shape}, the exact one has {wanted.shape}")
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))  # infinities too, which have no difference
    if not np.all(np.isfinite(found) & np.isfinite(wanted) | same):
        return math.inf
    difference = np.linalg.norm(np.where(same, 0.0, found) - np.where(same, 0.0, wanted))
    size = np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0))
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return float(difference / size)
