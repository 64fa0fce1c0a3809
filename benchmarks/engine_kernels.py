"""The engine on the kernels of this device, beside plain JAX: same tokens, time of a round, and what the program holds.

    python benchmarks/engine_kernels.py [--pairs demo,demo-nvfp4,slice] [--budget 16] [--profile] [--json FILE]

For each pair: greedy tokens of some prompts in float32 with both (they must be equal; status 1 if not), then the
median time of one `ddtree` round in bfloat16 with both (plain JAX without XLA's autotuning), and the kernels that the
compiled round calls. `--only tokens` compiles all without autotuning, which takes minutes for plain JAX in float32.
`slice` is a random GLM-5 of true layer shapes (3 dense and 4 MoE layers, NVFP4 experts) with a random DFlash drafter;
one of its prompts is longer than `index_topk`, so that the selection of keys runs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from slices import on_kernels, random_prompts, slice_engine

import ddtree_jax
from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.choice import AUTO, choose_kernels
from ddtree_jax.pallas.compile_programs import kernels_in
from ddtree_jax.pallas.dispatch import REFERENCE
from ddtree_jax.pallas.measure import traced_times
from ddtree_jax.profiling import random_state

START = time.perf_counter()
PAIRS = ("demo", "demo-nvfp4", "slice")
LAYERS = 7  # of the slice, three of them dense
KERNELS = (AUTO, REFERENCE)
# Of the rounds. XLA's search for its own products' tiles does not end within minutes for the slice in plain JAX.
COMPILER_OPTIONS = {AUTO: None, REFERENCE: {"xla_gpu_autotune_level": "0"}}
LONGEST = 12  # kernels that are shown


def load_pair(name: str, dtype: str) -> dict[str, Engine]:
    """Kernels -> engine. The slice is drawn once: both have the same weights."""
    if name != "slice":
        return {kernels: ddtree_jax.load(name, dtype=dtype, kernels=kernels) for kernels in KERNELS}
    engine = slice_engine(dtype, layers=LAYERS)
    return {REFERENCE: engine, AUTO: on_kernels(engine, choose_kernels(AUTO))}


def prompts_of(name: str, engine: Engine) -> list[list[list[int]]]:
    """Batches of prompts: one whose context stays within `index_topk`, so that attention is dense, and one beyond."""
    return random_prompts(((96,), (2300,)) if name == "slice" else ((32,), (200, 160)), engine)


def kernels_of(program: str) -> list[str]:
    """Names of the kernels that a compiled program calls, without their tile sizes (moe_down_r16_xw_...)."""
    return sorted({re.sub(r"_[a-z]?\d.*", "", name) for name in kernels_in(program)})


class Round:
    """One `ddtree` round on a state after a random prompt, compiled when made, so it may be made in a thread."""

    def __init__(self, engine: Engine, budget: int, context: int, options: dict[str, str] | None = None):
        plan, weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, budget, "greedy")
        self.state, self.sampling = random_state(engine, plan, weights, 1, context, 32)
        self.weights, self.stop = weights, jnp.zeros((0,), jnp.int32)
        lowered = decoding.round_step.lower(plan, weights, self.state, self.sampling, self.stop)
        self.program = lowered.compile(options)
        self.copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
        jax.block_until_ready(self.copy(self.state))

    def milliseconds(self, repeats: int) -> float:
        """Median of a round by itself, its launch included; the copy that it uses up is made off the clock."""
        times = []
        for _ in range(repeats + 2):
            own = jax.block_until_ready(self.copy(self.state))
            start = time.perf_counter()
            jax.block_until_ready(self.program(self.weights, own, self.sampling, self.stop))
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:]) * 1e3

    def kernel_us(self, repeats: int = 3) -> dict[str, float]:
        """Kernel -> microseconds a round, by the profiler, the longest first."""
        states = [jax.block_until_ready(self.copy(self.state)) for _ in range(repeats)]
        times = traced_times(lambda i: self.program(self.weights, states[i], self.sampling, self.stop), repeats=repeats)
        return dict(sorted(times.items(), key=lambda item: -item[1]))


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


def measure_pair(name: str, args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"pair": name, "budget": args.budget}
    if args.only != "rounds":
        result |= compare_tokens(name, args)
        jax.clear_caches()
    if args.only != "tokens":
        result |= time_rounds(name, args)
        jax.clear_caches()
    return result


def compare_tokens(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy tokens in float32 with kernels and without."""
    engines = load_pair(name, "float32")
    say(f"{name}: loaded in float32")
    batches = prompts_of(name, engines[AUTO])

    def tokens(kernels: str, batch: list[list[int]]) -> list[list[int]]:
        outputs = ddtree_jax.generate(
            engines[kernels], batch, max_new_tokens=args.tokens, budget=args.budget, stop_token_ids=[]
        )
        say(f"{name}: {len(batch)} prompts with {kernels}")
        return [output.token_ids for output in outputs]

    with concurrent.futures.ThreadPoolExecutor() as pool:  # compiling is most of it
        jobs = {(k, i): pool.submit(tokens, k, batch) for k in KERNELS for i, batch in enumerate(batches)}
        found = {key: job.result() for key, job in jobs.items()}
    pairs = [(a, b) for i in range(len(batches)) for a, b in zip(found[AUTO, i], found[REFERENCE, i], strict=True)]
    return {"same": [a == b for a, b in pairs]}


def time_rounds(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a bfloat16 round with kernels and without, and the kernels in its program."""
    engines = load_pair(name, "bfloat16")
    say(f"{name}: loaded in bfloat16")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        pairs = [(kernels, context) for kernels in KERNELS for context in args.contexts]
        made = {(k, c): pool.submit(Round, engines[k], args.budget, c, COMPILER_OPTIONS[k]) for k, c in pairs}
        rounds = {key: job.result() for key, job in made.items()}
    say(f"{name}: rounds compiled")
    result: dict[str, Any] = {"kernels": kernels_of(rounds[AUTO, args.contexts[0]].program.as_text())}
    for (kernels, context), one in rounds.items():
        result[f"round_ms_{kernels}_{context}"] = one.milliseconds(args.repeats)
    if args.profile:
        result["kernel_us"] = rounds[AUTO, args.contexts[0]].kernel_us()
    return result


def show(result: dict[str, Any]) -> str:
    lines = [f"{result['pair']}:"]
    if "same" in result:
        lines.append(f"    greedy tokens in float32 equal for {sum(result['same'])} of {len(result['same'])} prompts")
    if "kernels" in result:
        lines.append("    kernels in the round: " + (", ".join(result["kernels"]) or "none"))
    if "kernel_us" in result:
        times = result["kernel_us"]
        lines.append(f"    kernels of a round at the first context: {sum(times.values()) / 1e3:.2f} ms in all")
        lines += [f"        {us:8.1f} us  {kernel}" for kernel, us in list(times.items())[:LONGEST]]
    for key, value in result.items():
        if key.startswith("round_ms_auto_"):
            context = key.rsplit("_", 1)[1]
            other = result[f"round_ms_reference_{context}"]
            lines.append(f"    round, context {context}: {value:.2f} ms with kernels, {other:.2f} ms in plain JAX")
    return "\n".join(lines)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text!r}; a positive integer")
    return int(text)


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def pairs(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(PAIRS):
        raise argparse.ArgumentTypeError(f"got {text!r}; of {', '.join(PAIRS)}, with commas between them")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=pairs, default=list(PAIRS))
    parser.add_argument("--budget", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=16, help="new tokens a prompt")
    parser.add_argument("--contexts", type=positives, default=[1024])
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--only", choices=("tokens", "rounds"), help="one half alone")
    parser.add_argument("--profile", action="store_true", help="also the longest kernels of a round with kernels")
    parser.add_argument("--json", help="also write the numbers here")
    args = parser.parse_args()
    if args.only == "tokens":  # read when the first device is asked for
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}; operations: {', '.join(OPS)}")
    results = []
    for name in args.pairs:
        results.append(measure_pair(name, args))
        print(show(results[-1]), flush=True)
        jax.clear_caches()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0 if all(all(result.get("same", [])) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
