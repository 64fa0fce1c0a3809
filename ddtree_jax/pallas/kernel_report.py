"""Every kernel on this machine: is it right, how long does it take, and how near is that to what the device gives.

`benchmarks/kernels.py` and `ddtree-jax doctor --kernels` print and write what `measure_kernels` finds.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

import ddtree_jax
from ddtree_jax.errors import one_line
from ddtree_jax.pallas import measure
from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.cases.base import Baseline, Case
from ddtree_jax.pallas.cases.registry import Registry

OK, WRONG, FAILED, NOT_SERVED, LEFT_OUT = "ok", "wrong", "failed", "not served", "left out"
BASELINE = "xla: "
# Compiling may take this share of the time there is; what is not ready then is left out.
_COMPILE_SHARE = 0.5
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-triton", "triton")


@dataclasses.dataclass
class Row:
    """One implementation of one case.

    Attributes:
      status: OK; WRONG: the error is above the tolerance; FAILED: it did not compile or run; NOT_SERVED: it says that
        it cannot serve the case here; LEFT_OUT: there was no time.
      detail: the reason for any other status than OK.
      us, spread: time of a call, and (largest - smallest) / median of its repeats, if there were any.
      rate, unit: bytes or operations of the case over the time: "GB/s" where memory is the limit, else "TFLOP/s".
      share: of the limit: the least time that the device allows over the time.
      error: relative; None where the case has no exact answer.
      kernels: kernel -> us by the profiler, if asked for.
    """

    op: str
    case: str
    implementation: str
    status: str = OK
    detail: str = ""
    us: float | None = None
    spread: float | None = None
    rate: float | None = None
    unit: str = "GB/s"
    share: float | None = None
    error: float | None = None
    tolerance: float | None = None
    kernels: dict[str, float] | None = None

    def cells(self) -> tuple[str, ...]:
        def number(value: float | None, digits: str) -> str:
            return "-" if value is None else format(value, digits)

        remark = f"{self.status}: {self.detail}" if self.detail else self.status
        share = "-" if self.share is None else f"{100 * self.share:.0f} %"
        rate = "-" if self.rate is None else f"{self.rate:.4g} {self.unit}"
        us = number(self.us, ".1f") + ("" if self.spread is None else f" +-{50 * self.spread:.0f} %")
        return self.op, self.case, self.implementation, us, rate, share, number(self.error, ".1e"), remark


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Attributes:
    device: name, generation and count of the devices.
    versions: of the packages that matter.
    date: UTC, ISO 8601.
    seed: of the random inputs.
    limits: what the device gives.
    rows: in the order of the cases.
    """

    device: dict[str, Any]
    versions: dict[str, str]
    date: str
    seed: int
    limits: measure.Limits
    rows: tuple[Row, ...]

    HEADER = ("kernel", "shape", "implementation", "us", "rate", "of limit", "error", "")

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong and nothing failed; what was left out was not looked at."""
        return not any(row.status in (WRONG, FAILED) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        return _finite({"healthy": self.healthy, **dataclasses.asdict(self)})

    def title(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.device['name']} ({self.device['generation']}), {versions}, {self.date}"

    def _limits(self) -> str:
        copy, matmul, launch = self.limits.copy / 1e9, self.limits.matmul / 1e12, self.limits.launch * 1e6
        return f"copy {copy:.0f} GB/s, bfloat16 product {matmul:.0f} TFLOP/s, launch {launch:.1f} us, seed {self.seed}"

    def text(self) -> str:
        cells = [self.HEADER, *(row.cells() for row in self.rows)]
        widths = [max(len(line[column]) for line in cells) for column in range(len(self.HEADER) - 1)]
        padded = [[f"{cell:<{width}}" for cell, width in zip(line, [*widths, 0], strict=True)] for line in cells]
        return "\n".join([self.title(), self._limits(), *("  ".join(line).rstrip() for line in padded)])

    def markdown(self) -> str:
        """The table of what this device serves."""

        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        head = [line(self.HEADER), line("---" for _ in self.HEADER)]
        served = [line(row.cells()) for row in self.rows if row.status != NOT_SERVED]
        return "\n".join([self.title(), "", self._limits(), "", *head, *served, ""])

    def write(self, file: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes `file` as JSON, and the table beside it with the ending .md."""
        path = pathlib.Path(file)
        table = path.with_suffix(".md")
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        path.write_text(text + "\n")
        table.write_text(self.markdown())
        return path, table


def measure_kernels(
    registry: Registry,
    platform: Platform,
    *,
    budget_s: float | None = None,
    seed: int | None = None,
    reference: bool = True,
    profile: bool = False,
    threads: int | None = None,
    limits: Callable[[], measure.Limits] = measure.measure_limits,
    progress: Callable[[str], None] = lambda text: None,
    found: Callable[[KernelReport], None] = lambda report: None,
    sample_s: float = 0.03,
) -> KernelReport:
    """Compiles everything in threads, and then checks and times one implementation after the other.

    Args:
      registry: which cases, of which those for other GPUs are passed over; with a budget they are taken in turn from
        each operation.
      platform: that of this machine.
      budget_s: seconds after which the rest is left out; None: no end.
      seed: of the inputs; None: a new one each time.
      reference: also the references and the baselines of the cases.
      profile: also the profiler's time of each kernel.
      threads: that compile; None: one a core.
      limits: measures the device.
      progress: told what is done.
      found: given the report so far after each case: what is killed then has not been for nothing.
      sample_s: seconds of a timed sample.
    """
    seed = secrets.randbits(31) if seed is None else seed
    start = time.perf_counter()
    own = (case for case in registry.cases if case.is_for(platform))
    registry = dataclasses.replace(registry, cases=tuple(_in_turn(own)))
    rows: dict[tuple[int, str], Row] = {}
    loops: dict[tuple[int, str], measure.Loop] = {}
    runs = {(index, name): run for index, name, run in _runs(registry, platform, reference)}
    progress(f"compiling {len(runs)} programs for {len(registry.cases)} cases")
    with concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count() or 1) as pool:
        futures = {}
        for (index, name), run in runs.items():
            case = _case_of(registry.cases[index], name)
            futures[index, name] = pool.submit(measure.Loop, run, case, measure.plan(case, platform))
        for (index, name), future in futures.items():
            row = rows[index, name] = Row(registry.cases[index].op, registry.cases[index].name, name)
            left = None if budget_s is None else max(0.0, start + _COMPILE_SHARE * budget_s - time.perf_counter())
            try:
                loops[index, name] = future.result(left)
            except NotImplementedError as error:
                row.status, row.detail = NOT_SERVED, one_line(error)
            except TimeoutError:
                future.cancel()
                row.status, row.detail = LEFT_OUT, "not compiled in time"
            except Exception as error:  # a row of the report, not its end
                row.status, row.detail = FAILED, f"{type(error).__name__}: {one_line(error)}"
    # From here on nothing compiles: it would spoil the times.
    device_limits = limits()
    device = jax.devices()[0]
    about = {"name": device.device_kind, "generation": platform.generation, "count": jax.device_count()}
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def report() -> KernelReport:
        ops = list(registry.ops)
        known = (row for row in rows.values() if row.status != OK or row.us is not None or row.detail)
        ordered = sorted(known, key=lambda row: ops.index(row.op))  # stable: the cases keep their order
        return KernelReport(about, package_versions(), date, seed, device_limits, tuple(ordered))

    for index, case in enumerate(registry.cases):
        names = [name for at, name in loops if at == index]
        if not names:
            continue
        if budget_s is not None and time.perf_counter() - start > budget_s:
            for name in names:
                rows[index, name].status, rows[index, name].detail = LEFT_OUT, "no time left"
            continue
        progress(f"{time.perf_counter() - start:.0f} s  {case.op}, {case.name}")
        # Of the case's own number, so that a smaller selection has the same inputs.
        key = jax.random.fold_in(jax.random.key(seed), _stable_hash(f"{case.op} {case.name}"))
        exact, drawn = None, {}
        for name in names:
            row = rows[index, name]
            try:
                own = _case_of(case, name)
                loop = loops.pop((index, name))
                if own.make not in drawn:  # drawing takes longer than measuring; a baseline's own arrays go with it
                    drawn = {own.make: measure.make_inputs(own, loop.plan, key)}
                inputs = drawn.pop(own.make) if own.carries else drawn[own.make]  # carried ones are used up
                exact = _measure_row(row, own, loop, inputs, exact, device_limits, sample_s)
                if profile:
                    inputs = measure.make_inputs(own, measure.Plan(1, 1), key)
                    row.kernels = measure.kernel_times(runs[index, name], _first(own, inputs))
            except Exception as error:
                row.status, row.detail = FAILED, f"{type(error).__name__}: {one_line(error)}"
        found(report())
    return report()


def _measure_row(
    row: Row,
    case: Case,
    loop: measure.Loop,
    inputs: measure.Inputs,
    exact: Any,
    limits: measure.Limits,
    sample_s: float,
) -> Any:
    """Fills a row in; returns the exact answer, for the case's other implementations."""
    arrays = measure.arguments(case, loop.plan, inputs, 0)
    if exact is None and case.check is None and case.exact is not None:
        exact = case.exact(*arrays)
    # Where a cache is handed on, the loop's results are not the whole answer, and it uses its arguments up.
    result = jax.jit(loop.run)(*arrays) if case.carries else loop.result(inputs)
    baseline = row.implementation.startswith(BASELINE)
    try:
        error = measure.relative_error(case, arrays, result, exact)
    except ValueError:
        if not baseline:  # which does the same work, and may lay its answer out in another way
            raise
        error = math.nan
    row.error = None if math.isnan(error) else error
    row.tolerance = case.tolerance
    timing = loop.time(inputs, sample_s=sample_s)
    if timing.us <= 0.0:
        row.detail = "no time: the machine is too busy to tell"
    else:
        row.us, row.spread = timing.us, timing.spread
        memory = limits.memory_bound(case)
        row.unit = "GB/s" if memory else "TFLOP/s"
        row.rate = case.traffic / timing.us / 1e3 if memory else case.flops / timing.us / 1e6
        row.share = limits.seconds(case) * 1e6 / timing.us
    if row.error is not None and not row.error <= case.tolerance and not baseline:
        row.status, row.detail = WRONG, f"error above {case.tolerance:.1e}"
    return exact


def names_of(registry: Registry, case: Case, reference: bool) -> list[str]:
    """What a case is measured with: implementations, and with `reference` that and the baselines."""
    names = [name for _, name in dataclasses.replace(registry, cases=(case,)).pairs(reference=reference)]
    return names + [BASELINE + name for name in case.baselines if reference]


def _runs(registry: Registry, platform: Platform, reference: bool) -> Iterator[tuple[int, str, measure.Run]]:
    for index, case in enumerate(registry.cases):
        for name in names_of(registry, case, reference):
            if name.startswith(BASELINE):
                run = case.baselines[name.removeprefix(BASELINE)]
                yield index, name, run.run if isinstance(run, Baseline) else run
            else:
                yield index, name, _bound(registry.ops[case.op].implementations[name], platform, case)


def _case_of(case: Case, implementation: str) -> Case:
    """The case as an implementation is measured on it: a baseline may have arrays of its own, and no exact answer."""
    baseline = case.baselines.get(implementation.removeprefix(BASELINE))
    if not implementation.startswith(BASELINE) or not isinstance(baseline, Baseline):
        return case
    return dataclasses.replace(
        case,
        make=baseline.make,
        traffic=baseline.traffic,
        rotate=baseline.rotate,
        exact=None,
        check=lambda *_: math.nan,
    )


def _bound(run: measure.Run, platform: Platform, case: Case) -> measure.Run:
    return lambda *arrays: run(*arrays, platform=platform, **case.static)


def _in_turn(cases: Iterable[Case]) -> Iterator[Case]:
    """One of each operation, then the next one of each: what a budget cuts off then leaves something of every one."""
    by_op: dict[str, list[Case]] = {}
    for case in cases:
        by_op.setdefault(case.op, []).append(case)
    for row in itertools.zip_longest(*by_op.values()):
        yield from (case for case in row if case is not None)


def _first(case: Case, inputs: measure.Inputs) -> tuple[Any, ...]:
    return measure.arguments(case, measure.Plan(1, 1), inputs, 0)


def _stable_hash(text: str) -> int:
    value = 0
    for byte in text.encode():
        value = (value * 31 + byte) % 2**31
    return value


def package_versions() -> dict[str, str]:
    """Of this package and of those that matter to its kernels, where they are installed."""
    found = {"ddtree-jax": ddtree_jax.__version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
