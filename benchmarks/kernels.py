"""Times and errors of every kernel at the shapes of real models, beside what the device gives.

    python benchmarks/kernels.py [--op NAME] [--case TEXT] [--budget-s 600] [--json kernels.json] [--profile] [--list]
    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/kernels.py --processes 8 --json kernels.json  # on 16 cores

Prints kernel x shape x implementation: us (median of 5, and half their range), GB/s or TFLOP/s, the share of the limit
(the larger of traffic / copy bandwidth and operations / bfloat16 rate), the relative error against float64. `--json
FILE` writes all of it, and the table beside it as Markdown, anew after each case; `--resume` goes on with what is not
in FILE yet. Status 1: an error is above its tolerance, or a failure.

Everything is compiled first. A time is a slope inside a device loop of 8 calls a trip, on copies that are together
well over the L2 cache; what the loop itself takes, 10-20 us a trip, is in it. `--profile` adds the profiler's sums.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import pathlib
import queue
import secrets
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddtree_jax.errors import one_line
from ddtree_jax.pallas import kernel_report, measure
from ddtree_jax.pallas.backend import current_platform
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import Registry, load_registry
from ddtree_jax.pallas.kernel_report import KernelReport, Row


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", help="only this operation")
    parser.add_argument("--case", help="only cases with this in their names")
    parser.add_argument("--list", action="store_true", help="name the cases and implementations, and stop")
    parser.add_argument("--budget-s", type=float, help="leave out what does not fit into so many seconds")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a new one each time")
    parser.add_argument(
        "--processes", type=int, default=1, help="that share the compiling; then they measure one by one"
    )
    parser.add_argument("--threads", type=int, help="that compile; default: one a core")
    parser.add_argument("--profile", action="store_true", help="also the profiler's time of each kernel")
    parser.add_argument("--no-reference", action="store_true", help="neither references nor baselines")
    parser.add_argument("--ops", metavar="FILE", help="Python file with OPS and CASES in place of the package's")
    parser.add_argument("--json", metavar="FILE", help="write everything here, and the table beside it as .md")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cases that FILE of --json has; measure the others"
    )
    return parser.parse_args()


def kept_rows(args: argparse.Namespace) -> tuple[Row, ...]:
    """What an earlier run has written.

    Raises:
      ValueError: it is of other versions, or no report.
    """
    if not args.resume:
        return ()
    if not args.json:
        raise ValueError("--resume: got no --json FILE to go on with")
    if not pathlib.Path(args.json).exists():
        return ()
    try:
        report = json.loads(pathlib.Path(args.json).read_text())
        rows = tuple(Row(**{**row, "error": row["error"] and float(row["error"])}) for row in report["rows"])
        versions = report["versions"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--resume: got {args.json}, which is no report of this program: {one_line(error)}") from error
    if versions != kernel_report.package_versions():
        raise ValueError(f"--resume: got a report of {versions}; here are {kernel_report.package_versions()}")
    return rows


def select(args: argparse.Namespace) -> Registry:
    """What is to be measured: cases that lack an implementation, a time, or a right answer."""
    registry = load_registry(args.ops).select(args.op, args.case)
    done = {
        (row.op, row.case, row.implementation)
        for row in args.kept
        if row.status == kernel_report.NOT_SERVED or row.status == kernel_report.OK and row.us is not None
    }

    def lacks(case: Case) -> bool:
        names = kernel_report.names_of(registry, case, not args.no_reference)
        return any((case.op, case.name, name) not in done for name in names)

    return dataclasses.replace(registry, cases=tuple(filter(lacks, registry.cases)))


def whole(args: argparse.Namespace, report: KernelReport) -> KernelReport:
    """With the kept rows of cases that this run has not come to; in the order of the cases."""
    place = {(case.op, case.name): index for index, case in enumerate(load_registry(args.ops).cases)}
    kept = {(row.op, row.case) for row in args.kept}
    not_yet = kernel_report.NOT_SERVED, kernel_report.LEFT_OUT
    fresh = {(row.op, row.case) for row in report.rows if row.status not in not_yet}
    rows = [row for row in args.kept if (row.op, row.case) not in fresh]
    rows += [row for row in report.rows if (row.op, row.case) in fresh or (row.op, row.case) not in kept]
    rows.sort(key=lambda row: place.get((row.op, row.case), -1))  # stable
    return dataclasses.replace(report, rows=tuple(rows))


def measure_in_turn(args: argparse.Namespace, share: int, barrier: Any, lock: Any, reports: Any) -> None:
    """A process of several: compiles every `processes`-th case with the others, then measures alone."""

    alone = contextlib.ExitStack()

    def limits() -> measure.Limits:
        # Beside compilers at work, times read far too long; a process that failed must not keep the others waiting.
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait()
        alone.enter_context(lock)
        return measure.measure_limits()

    try:
        with alone:
            registry = select(args)
            own = tuple(case for case in registry.cases if case.is_for(current_platform()))[share :: args.processes]
            tell = lambda report: reports.put((share, False, report))  # noqa: E731
            found = run(args, dataclasses.replace(registry, cases=own), limits, tell)
    except Exception as error:
        barrier.abort()
        found = f"{type(error).__name__}: {error}"
    reports.put((share, True, found))


def run(
    args: argparse.Namespace,
    registry: Registry,
    limits: Callable[[], measure.Limits],
    tell: Callable[[KernelReport], None],
) -> KernelReport:
    return kernel_report.measure_kernels(
        registry,
        current_platform(),
        budget_s=args.budget_s,
        seed=args.seed,
        reference=not args.no_reference,
        profile=args.profile,
        threads=args.threads,
        limits=limits,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
        found=tell,
    )


def run_processes(args: argparse.Namespace) -> KernelReport:
    """The cases dealt out to processes: to trace a kernel is Python's work, which threads do not share."""
    context = multiprocessing.get_context("spawn")
    barrier, lock, reports = context.Barrier(args.processes), context.Lock(), context.Queue()
    args.seed = secrets.randbits(31) if args.seed is None else args.seed
    workers = [
        context.Process(target=measure_in_turn, args=(args, share, barrier, lock, reports))
        for share in range(args.processes)
    ]
    for worker in workers:
        worker.start()
    found: dict[int, KernelReport] = {}
    failed: list[str] = []
    running = args.processes
    while running:
        try:
            share, done, report = reports.get(timeout=5)
        except queue.Empty:
            if any(worker.exitcode for worker in workers):  # killed: those that wait for it would wait for ever
                for worker in workers:
                    worker.kill()
                raise SystemExit("kernels.py: error: a process ended early; what was measured is written") from None
            continue
        running -= done
        if isinstance(report, str):
            failed.append(report)
            continue
        found[share] = report
        merged = dataclasses.replace(report, rows=tuple(row for one in found.values() for row in one.rows))
        write(args, merged)
    for worker in workers:
        worker.join()
    if failed:
        raise SystemExit(f"kernels.py: error: {failed[0]}")
    return merged


def write(args: argparse.Namespace, report: KernelReport) -> None:
    if args.json:
        whole(args, report).write(args.json)


def main() -> int:
    args = parse_args()
    try:
        args.kept = kept_rows(args)
        registry = select(args)
    except ValueError as error:
        print(f"kernels.py: error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for case in registry.cases:
            names = kernel_report.names_of(registry, case, reference=True)
            print(f"{case.op}: {case.name}: {', '.join(names)}")
        return 0
    if args.processes > 1:
        report = run_processes(args)
    else:
        report = run(args, registry, measure.measure_limits, functools.partial(write, args))
    report = whole(args, report)
    print(report.text())
    if args.profile:
        for row in report.rows:
            for kernel, us in sorted((row.kernels or {}).items(), key=lambda item: -item[1]):
                print(f"{row.op}, {row.case}, {row.implementation}: {kernel} {us:.1f} us")
    if args.json:
        print("wrote", *report.write(args.json))
    return 0 if report.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
