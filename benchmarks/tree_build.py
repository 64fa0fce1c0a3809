"""Times of the tree build: formulation x budget beside the plain heap, and the vocabulary top-k variants.

    python benchmarks/tree_build.py [--depth 15] [--vocab 8192] [--budgets 4,16,64] [--json FILE]

A call's wall time includes its dispatch. `--loop` gives the time inside a device loop instead (the slope
between two trip counts), which is what a build costs within a larger program; it is the default on a GPU.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ddtree_jax.pallas.vocab_topk import IMPLEMENTATIONS, vocab_topk
from ddtree_jax.tree import (
    FORMULATIONS,
    accept,
    ancestor_mask,
    build_tree,
    build_tree_from_candidates,
    reference,
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--depth", type=int, default=15, help="drafter rows L")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--budgets", default="4,16,32,64,128,256,512,1024")
    parser.add_argument("--widths", default="16,32,64", help="K of the vocabulary top-k")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-sequential", type=int, default=1024, help="largest budget of the sequential frontier")
    parser.add_argument("--loop", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--json", help="also write the numbers here")
    return parser.parse_args()


def median_call_us(fn, *args, repeats: int) -> float:
    """Median wall time of a call, each sample over enough calls to fill a few milliseconds."""
    jax.block_until_ready(fn(*args))
    start = time.perf_counter()
    jax.block_until_ready(fn(*args))
    calls = max(1, min(100, int(5e-3 / max(time.perf_counter() - start, 1e-6))))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = fn(*args)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples) * 1e6


def median_loop_us(fn, values, *rest, repeats: int, few: int = 5, many: int = 45) -> float:
    """Time of one trip of a device loop around `fn(values, *rest)`, by the slope between two trip counts."""

    @functools.partial(jax.jit, static_argnames="trips")
    def loop(values, *rest, trips):
        def trip(_, carry):
            # The carry makes every trip depend on the one before; it stays 0.
            leaves = jax.tree.leaves(fn(values + carry, *rest))
            return carry + sum(jnp.sum(leaf.astype(jnp.float32) > 1e30) for leaf in leaves).astype(jnp.float32) * 0.0

        return lax.fori_loop(0, trips, trip, jnp.float32(0.0))

    slow = median_call_us(functools.partial(loop, trips=many), values, *rest, repeats=repeats)
    fast = median_call_us(functools.partial(loop, trips=few), values, *rest, repeats=repeats)
    return (slow - fast) / (many - few)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)), flush=True)


def main() -> None:
    args = parse_args()
    in_loop = jax.default_backend() != "cpu" if args.loop is None else args.loop
    measure = functools.partial(median_loop_us if in_loop else median_call_us, repeats=args.repeats)
    budgets = [int(b) for b in args.budgets.split(",")]
    widths = [int(k) for k in args.widths.split(",")]
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(args.batch, args.depth, args.vocab)).astype(np.float32) * 3)
    roots = jnp.zeros((args.batch,), jnp.int32)
    numbers: dict[str, dict[str, float]] = {"build": {}, "round": {}, "vocab_topk": {}}
    kind = "in a device loop" if in_loop else "per call"
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: microseconds {kind}, median of {args.repeats}")

    rows = []
    for budget in budgets:
        best = vocab_topk(logits, min(budget, args.vocab), implementation="top_k")
        log_probs = best.values - best.logsumexp[..., None]
        cells = [str(budget)]
        for formulation in FORMULATIONS:
            build = functools.partial(build_tree_from_candidates, budget=budget, formulation=formulation)
            try:
                if formulation == "sequential_frontier" and budget > args.max_sequential:
                    raise ValueError("not asked for")
                fn = build if in_loop else jax.jit(build)
                us = measure(fn, log_probs, best.token_ids, roots)
                numbers["build"][f"{formulation}/{budget}"] = us
                cells.append(f"{us:.0f}")
            except ValueError:
                cells.append("-")
        host_log_probs, host_ids = np.asarray(log_probs[0]), np.asarray(best.token_ids[0])
        start = time.perf_counter()
        for _ in range(3):
            reference.best_first_tree(host_log_probs, host_ids, 0, budget)
        us = (time.perf_counter() - start) / 3 * 1e6
        numbers["build"][f"heap/{budget}"] = us
        rows.append([*cells, f"{us:.0f}"])
    print_table(
        f"Tree build, batch {args.batch}, L {args.depth} (the heap: one sequence, plain Python)",
        ["budget", *FORMULATIONS, "heap"],
        rows,
    )

    def whole(values, target_token_ids, roots, budget):
        tree = build_tree(values, roots, budget=budget)
        return (
            tree,
            ancestor_mask(tree, max_depth=args.depth),
            accept(tree, target_token_ids, max_depth=args.depth),
        )

    rows = []
    for budget in budgets:
        targets = jnp.asarray(rng.integers(0, args.vocab, size=(args.batch, budget + 1)), jnp.int32)
        fn = functools.partial(whole, budget=budget)
        us = measure(fn if in_loop else jax.jit(fn), logits, targets, roots)
        numbers["round"][str(budget)] = us
        rows.append([str(budget), f"{us:.0f}"])
    print_table(f"top-k + logsumexp + build + mask + accept, V {args.vocab}", ["budget", "us"], rows)

    rows = []
    for k in widths:
        cells = [str(k)]
        for implementation in IMPLEMENTATIONS:
            fn = functools.partial(vocab_topk, k=k, implementation=implementation)
            us = measure(fn if in_loop else jax.jit(fn), logits)
            numbers["vocab_topk"][f"{implementation}/{k}"] = us
            cells.append(f"{us:.0f}")
        rows.append(cells)
    print_table(f"top-k + logsumexp of [{args.batch}, {args.depth}, {args.vocab}]", ["K", *IMPLEMENTATIONS], rows)

    if args.json:
        with open(args.json, "w") as file:
            json.dump(numbers, file, indent=2)


if __name__ == "__main__":
    main()
