"""Times and errors of every kernel at the shapes of real models, beside what the device gives.

    python benchmarks/kernels.py [--op NAME] [--case TEXT] [--budget-s 600] [--json kernels.json] [--profile] [--list]

Prints kernel x shape x implementation: us (median of 5, and half their range), GB/s or TFLOP/s, the share of the limit
(the larger of traffic / copy bandwidth and operations / bfloat16 rate), the relative error against float64. `--json
FILE` writes all of it, and the table beside it as Markdown. Status 1: an error is above its tolerance, or a failure.

Everything is compiled first. A time is a slope inside a device loop of 8 calls a trip, on copies that are together
well over the L2 cache; what the loop itself takes, 10-20 us a trip, is in it. `--profile` adds the profiler's sums.
"""

import argparse
import sys

from ddtree_jax.pallas import kernel_report
from ddtree_jax.pallas.backend import current_platform
from ddtree_jax.pallas.cases.registry import load_registry


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", help="only this operation")
    parser.add_argument("--case", help="only cases with this in their names")
    parser.add_argument("--list", action="store_true", help="name the cases and implementations, and stop")
    parser.add_argument("--budget-s", type=float, help="leave out what does not fit into so many seconds")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a new one each time")
    parser.add_argument("--threads", type=int, help="that compile; default: one a core")
    parser.add_argument("--profile", action="store_true", help="also the profiler's time of each kernel")
    parser.add_argument("--no-reference", action="store_true", help="neither references nor baselines")
    parser.add_argument("--ops", metavar="FILE", help="Python file with OPS and CASES in place of the package's")
    parser.add_argument("--json", metavar="FILE", help="write everything here, and the table beside it as .md")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    try:
        registry = load_registry(args.ops).select(args.op, args.case)
    except ValueError as error:
        print(f"kernels.py: error: {error}", file=sys.stderr)
        return 2
    if args.list:
        for case in registry.cases:
            names = [
                *registry.ops[case.op].implementations,
                *(kernel_report.BASELINE + name for name in case.baselines),
            ]
            print(f"{case.op}: {case.name}: {', '.join(names)}")
        return 0
    report = kernel_report.measure_kernels(
        registry,
        current_platform(),
        budget_s=args.budget_s,
        seed=args.seed,
        reference=not args.no_reference,
        profile=args.profile,
        threads=args.threads,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
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
