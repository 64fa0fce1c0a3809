"""Checks and times the indexer, the selection, the vocabulary passes and the commit on one GPU, at GLM-5's shapes.

    python benchmarks/dsa_ops.py                # everything, a few minutes
    python benchmarks/dsa_ops.py scores select  # some of: scores select vocab argmax choose tree commit

Times are slopes between two trip counts of a loop on the device, so that no host cost is in them; each trip makes
UNROLLED calls, so that XLA records it as one command buffer. Every program is compiled before any is timed.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas import commit_rows, index_select, indexer
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import current_platform
from ddtree_jax.pallas.cases import commit as commit_cases
from ddtree_jax.pallas.cases import indexer as indexer_cases
from ddtree_jax.pallas.cases import vocab as vocab_cases
from ddtree_jax.sampling import SamplingParams, choose_tokens
from ddtree_jax.tree import build_tree

UNROLLED, FEW, MANY, REPEATS = 8, 4, 24, 5
BYTES_PER_US, FLOPS_PER_US = 4.1e6, 790e6


def looped(call: Callable[..., Any], chained: bool) -> Callable[..., Any]:
    """A jitted function that makes trips * UNROLLED dependent calls; `call(u, arrays, last result)` -> result.

    chained: the calls use the last result, and write into it. Of others, each waits for the one before and every result
    is used, so that nothing is hoisted, merged or left out.
    """
    once = jax.jit(call)  # traced once, not UNROLLED times

    def run(trips, arrays, result):
        def body(_, carry):
            result, total = carry
            now, parts = arrays, []
            for u in range(UNROLLED):
                if not chained:
                    now, result = jax.lax.optimization_barrier((now, result))
                    parts.append(jax.tree.leaves(result)[0].ravel()[0].astype(jnp.float32))
                result = once(jnp.int32(u), now, result)
            return result, total + sum(parts, jnp.float32(0))

        return jax.lax.fori_loop(0, trips, body, (result, jnp.float32(0)))

    return jax.jit(run, donate_argnums=2)


class Timer:
    """Collects compiled pairs of loops, then times them all."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any, Any, Any, float]] = []

    def add(self, name: str, call: Callable[..., Any], arrays: Any, start: Any = None, floor_us: float = 0.0) -> None:
        """start: the first result; None: zeros of what `call` returns."""
        chained = start is not None
        try:
            if not chained:
                shapes = jax.eval_shape(functools.partial(call, jnp.int32(0)), arrays, None)
                start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            program = looped(call, chained).lower(jnp.int32(FEW), arrays, start).compile()
        except Exception as error:  # a variant that does not compile is a result too
            print(f"{name:78s} FAILED: {str(error).splitlines()[0][:100]}", flush=True)
            return
        self.entries.append((name, program, arrays, start, floor_us))

    def report(self) -> None:
        for name, program, arrays, result, floor_us in self.entries:
            times = {}
            for trips in (jnp.int32(FEW), jnp.int32(MANY)):
                taken = []
                for _ in range(REPEATS + 1):
                    jax.block_until_ready(result)
                    began = time.perf_counter()
                    result, _ = jax.block_until_ready(program(trips, arrays, result))
                    taken.append(time.perf_counter() - began)
                times[int(trips)] = np.median(taken[1:])
            us = (times[MANY] - times[FEW]) / (MANY - FEW) / UNROLLED * 1e6
            share = f"   floor {floor_us:6.1f} us = {100 * floor_us / us:4.0f} %" if floor_us else ""
            print(f"{name:78s} {us:9.1f} us{share}", flush=True)
        self.entries.clear()


def floor(case: Any) -> float:
    return max(case.traffic / BYTES_PER_US, case.flops / FLOPS_PER_US)


def checked(name: str, case: Any, arrays: Any, call: Callable[..., Any]) -> None:
    try:
        error = case.check(arrays, jax.jit(call)(*arrays))
        verdict = "ok" if error <= case.tolerance else "WRONG"
        print(f"check {name:72s} {verdict} ({error:.2e})", flush=True)
    except Exception as problem:
        print(f"check {name:72s} FAILED: {str(problem).splitlines()[0][:100]}", flush=True)


def scores(timer: Timer) -> None:
    platform = current_platform()
    variants: dict[str, Callable[..., Any]] = {"triton": OPS["indexer_scores"].implementations["triton"]}
    for tiles in (
        indexer.Tiles(128, 2, 0, 4, 2),
        indexer.Tiles(128, 2, 0, 4, 4),
        indexer.Tiles(128, 1, 0, 4, 3),
        indexer.Tiles(128, 4, 0, 4, 2),
        indexer.Tiles(128, 4, 0, 8, 3),
        indexer.Tiles(256, 2, 0, 8, 3),
        indexer.Tiles(256, 1, 0, 8, 3),
        indexer.Tiles(256, 4, 0, 8, 2),
        indexer.Tiles(64, 4, 0, 4, 3),
    ):
        variants[str(tiles)] = functools.partial(indexer.indexer_scores_triton, tiles=tiles)
    for case in indexer_cases.CASES:
        if case.op != "indexer_scores":
            continue
        arrays = case.make(jax.random.key(0))
        big = "204800" in case.name
        for name, run in variants.items():
            run = functools.partial(run, platform=platform)
            if name == "triton" or big:
                checked(f"{case.name} {name}", case, arrays, run)

            def call(u, arrays, last, run=run):
                q, weights, cache, _, *rest = arrays
                return run(q, weights, cache, u % cache.shape[0], *rest)  # layers in turn: the keys come from memory

            timer.add(f"{case.name} {name}", call, arrays, floor_us=floor(case))
        timer.report()
    exact = indexer_cases._scores_arrays(jax.random.key(1), 17, 4096, jnp.float32)
    case = next(case for case in indexer_cases.CASES if case.op == "indexer_scores")
    checked(
        "float32 operands, 17 rows, 4096 slots", case, exact, functools.partial(variants["triton"], platform=platform)
    )
    reference = functools.partial(OPS["indexer_scores"].implementations["reference"], platform=platform)
    arrays = case.make(jax.random.key(0))
    checked(f"{case.name} reference", case, arrays, reference)
    timer.add(f"{case.name} reference", lambda u, a, last: reference(*a), arrays)
    timer.report()


def select(timer: Timer) -> None:
    platform = current_platform()
    variants: dict[str, Callable[..., Any]] = {
        "digits": index_select.select_top_k_indices_digits,
        "reference": index_select.select_top_k_indices_reference,
    }
    for tiles in (
        index_select.Tiles(steps=4),
        index_select.Tiles(lanes=1024),
        index_select.Tiles(lanes=1024, counting_warps=8),
        index_select.Tiles(digits=(5, 5, 5)),
        index_select.Tiles(digits=(6, 6), class_size=8192),
        index_select.Tiles(digits=(6, 6, 4)),
        index_select.Tiles(digits=(6, 6), class_size=8192, lanes=1024),
        index_select.Tiles(gathering_warps=4),
        index_select.Tiles(final_warps=16),
        index_select.Tiles(final_warps=4, class_size=2048),
    ):
        variants[str(tiles).removeprefix("Tiles")] = functools.partial(
            index_select.select_top_k_indices_digits, tiles=tiles
        )
    for case in indexer_cases.CASES:
        if case.op != "select_top_k_indices":
            continue
        arrays, k = case.make(jax.random.key(0)), case.static["k"]
        for name, run in variants.items():
            run = functools.partial(run, k=k, platform=platform)
            if "(" not in name or "204800" in case.name:
                checked(f"{case.name} {name}", case, arrays, run)
            timer.add(f"{case.name} {name}", lambda u, a, last, run=run: run(*a), arrays, floor_us=floor(case))
        for name, run in case.baselines.items():
            timer.add(f"{case.name} {name}", lambda u, a, last, run=run: run(*a), arrays)
        timer.report()
    run = functools.partial(variants["digits"], k=2048, platform=platform)
    for name, prefix in (
        ("all equal", jnp.ones((1, 17, 204800))),
        ("bfloat16 values", jax.random.normal(jax.random.key(2), (1, 17, 204800)).astype(jnp.bfloat16)),
        ("nine tenths zero", jnp.maximum(jax.random.normal(jax.random.key(3), (1, 17, 204800)) - 2.6, 0.0)),
        ("few visible", jnp.where(jnp.arange(204800) % 200 == 0, 1.0, -jnp.inf)[None, None].repeat(17, 1)),
    ):
        arrays = prefix.astype(jnp.float32), jnp.zeros((1, 17, 17))
        case = next(case for case in indexer_cases.CASES if "selection, 17 rows, 204800" in case.name)
        checked(f"{name}, 17 rows, 204800 slots", case, arrays, run)
        timer.add(f"{name}, 17 rows, 204800 slots", lambda u, a, last: run(*a), arrays)
    timer.report()


def vocab(timer: Timer) -> None:
    for case in vocab_cases.CASES:
        if case.op != "vocab_topk":
            continue
        arrays = case.make(jax.random.key(0))
        for name in ("block_descent", "reference"):
            run = functools.partial(OPS[case.op], implementation=name, **case.static)
            checked(f"{case.name} {name}", case, arrays, run)
            timer.add(f"{case.name} {name}", lambda u, a, last, run=run: run(*a), arrays, floor_us=floor(case))
    timer.report()
    for rows, k in ((15, 64), (65, 32), (65, 64), (15, 256)):
        logits = np.random.default_rng(k).integers(0, 5, size=(rows, 154880)).astype(np.float32)
        got = OPS["vocab_topk"](jnp.asarray(logits), k, implementation="block_descent")
        want = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        print(f"check ties, {rows} rows, k {k}: {'ok' if np.array_equal(got.token_ids, want) else 'WRONG'}", flush=True)


def argmax(timer: Timer) -> None:
    for case in vocab_cases.CASES:
        if case.op != "vocab_argmax":
            continue
        arrays, run = case.make(jax.random.key(0)), functools.partial(OPS[case.op])
        checked(case.name, case, arrays, run)
        timer.add(case.name, lambda u, a, last, run=run: run(*a), arrays, floor_us=floor(case))
    timer.report()


def choose(timer: Timer) -> None:
    """The target's choices over 17 rows; "mixed, all greedy" against "greedy" shows what the branch costs."""
    logits = jax.random.normal(jax.random.key(0), (1, 17, 154880)) * 4
    depths = jnp.arange(17, dtype=jnp.int32)[None] % 8
    settings = {
        "greedy": ("greedy", {}),
        "mixed, all greedy": ("mixed", {}),
        "mixed, temperature alone": ("mixed", {"temperature": 0.8}),
        "sample": ("sample", {"temperature": 0.8}),
        "filtered, top_k": ("filtered", {"temperature": 0.8, "top_k": 50}),
        "filtered, top_p": ("filtered", {"temperature": 0.8, "top_p": 0.9}),
        "filtered, all": ("filtered", {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01}),
    }
    for name, (mode, keywords) in settings.items():
        params = SamplingParams.create(1, **keywords)

        def call(u, arrays, last, mode=mode):
            return choose_tokens(arrays[0], arrays[1], jnp.full((1,), u, jnp.int32), arrays[2], mode=mode, max_depth=8)

        timer.add(f"choose_tokens {name}", call, (logits, depths, params))
    timer.report()


def tree(timer: Timer) -> None:
    roots = jnp.zeros((1,), jnp.int32)
    for budget in (64, 128, 256):
        for kind, scale in (("peaked", 4.0), ("flat", 0.01)):
            logits = jax.random.normal(jax.random.key(budget), (1, 15, 154880)) * scale
            programs = {
                cap: jax.jit(functools.partial(build_tree, budget=budget, candidate_cap=cap)) for cap in (32, None)
            }
            capped, whole = (programs[cap](logits, roots) for cap in (32, None))
            same = all(np.array_equal(getattr(capped, f), getattr(whole, f)) for f in ("token_ids", "parents"))
            print(f"check build_tree, budget {budget}, {kind}: {'ok' if same else 'DIFFERS'}", flush=True)
            for cap in (32, None):

                def call(u, arrays, last, budget=budget, cap=cap):
                    return build_tree(*arrays, budget=budget, candidate_cap=cap)

                timer.add(f"build_tree, budget {budget}, {kind}, candidate_cap {cap}", call, (logits, roots))
    timer.report()


def commit(timer: Timer) -> None:
    platform = current_platform()
    variants: dict[str, Callable[..., Any]] = {
        "reference": commit_rows.commit_rows_reference,
        "triton": commit_rows.commit_rows_triton,
    }
    for tiles in (
        commit_rows.Tiles(nodes=4),
        commit_rows.Tiles(nodes=8),
        commit_rows.Tiles(nodes=8, num_warps=8),
        commit_rows.Tiles(num_warps=8),
        commit_rows.Tiles(piece=64),
    ):
        variants[str(tiles)] = functools.partial(commit_rows.commit_rows_triton, tiles=tiles)
    for case in commit_cases.CASES:
        arrays = case.make(jax.random.key(0))
        for name, run in variants.items():
            run = functools.partial(run, platform=platform)
            checked(f"{case.name} {name}", case, arrays, run)

            def call(u, arrays, caches, run=run):
                new_rows, node_ids, lengths = arrays
                return run(caches, new_rows, node_ids, lengths - u % 2)

            # The caches are the carry: donated, and written in place or not at all quickly.
            timer.add(f"{case.name} {name}", call, arrays[1:], jax.tree.map(jnp.copy, arrays[0]), floor(case))
            timer.report()


def main() -> None:
    parts = {f.__name__: f for f in (scores, select, vocab, argmax, choose, tree, commit)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="which to run; default all")
    timer = Timer()
    print(current_platform(), jax.__version__, flush=True)
    for name in parser.parse_args().parts or parts:
        parts[name](timer)


if __name__ == "__main__":
    main()
