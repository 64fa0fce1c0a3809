"""The sharded engine on the GPUs of one host: the tables of everything it must show, by one command.

    python benchmarks/mesh.py [--sections tokens,acceptance,rounds,load,processes] [--json FILE]
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/mesh.py --small    # without GPUs

tokens: greedy tokens in float32 are those of one device, over every mesh of the devices here.
acceptance: so are the acceptance lengths of a bfloat16 round on 95 % of rounds, each begun from one device's state.
rounds: the time of a bfloat16 round on a random cache, what of it is spent in collectives, and the ratio to one device.
load: seconds and host memory of loading a large synthetic checkpoint over two devices.
processes: two processes with a device each, joined by `jax.distributed`, give the tokens of one device.

Meshes are written as expert x tensor. Status 1 if anything but a time is not as it must be. Programs are compiled in
threads, and run from one. On a host with little time: XLA_FLAGS=--xla_gpu_autotune_level=0.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import load_memory
import mesh_processes
from mesh_programs import Programs, compiled
from mesh_report import MeshReport, Section, say
from slices import on_kernels, on_mesh, random_prompts, slice_engine

import ddtree_jax
from ddtree_jax.bench import held_out_prompts
from ddtree_jax.cluster import parse_mesh
from ddtree_jax.engine import Engine, open_pair
from ddtree_jax.models import make_mesh
from ddtree_jax.pallas.choice import ALL, KERNELS

SECTIONS = ("tokens", "acceptance", "rounds", "load", "processes")
SLICE, ALONE = "slice", "one device"
LAYERS, LOUD_TOKENS = 8, 16
SAME_ROUNDS, GOAL = 0.95, 0.60
LOAD_MESH = "2x1"


class Pair:
    """A pair in one dtype, on any mesh; the slice is drawn once."""

    def __init__(self, name: str, dtype: str, args: argparse.Namespace):
        self.name, self.dtype, self.args, self.drawn = name, dtype, args, None
        if name == SLICE:
            self.drawn = slice_engine(dtype, layers=args.layers, small=args.small, loud=LOUD_TOKENS)
            jax.block_until_ready(self.drawn.target.arrays)
        say(f"{name}, {dtype}: ready")

    def engine(self, mesh: str) -> Engine:
        """mesh: ALONE or ExT."""
        devices, kernels = None if mesh == ALONE else make_mesh(*parse_mesh(mesh)), self.args.kernels
        if self.drawn is None:
            return ddtree_jax.load(self.name, dtype=self.dtype, mesh=devices, kernels=kernels)
        engine = self.drawn if devices is None else on_mesh(self.drawn, devices)
        # Those that `load` would choose on this mesh.
        return on_kernels(engine, open_pair(mesh=devices, kernels=kernels).kernels)

    def prompts(self) -> list[list[int]]:
        """Four prompts for tokens: of the slice some that are longer than `index_topk`, so that keys are selected."""
        if self.name != SLICE:
            lengths = (200, 160, 32, 20)
        else:
            lengths = (150, 40, 24, 16) if self.args.small else (2300, 1100, 96, 64)
        return random_prompts((lengths,), self.engine(ALONE) if self.drawn is None else self.drawn)[0]

    def texts(self) -> list[list[int]]:
        """Four prompts for acceptance: held-out ones, or random ones where there is no text."""
        if self.name == SLICE:
            return random_prompts(((40, 32, 24, 16) if self.args.small else (256, 192, 128, 64),), self.drawn)[0]
        tokenizer = self.engine(ALONE).tokenizer
        return [tokenizer.encode(text)[:192] for text in held_out_prompts()[:4]]


_LAST: dict[tuple[str, str], Pair] = {}


def pair_of(name: str, dtype: str, args: argparse.Namespace) -> Pair:
    """Keeps the last one, which the next section may need; it goes before another one is drawn."""
    if (name, dtype) not in _LAST:
        _LAST.clear()
        gc.collect()
        _LAST[name, dtype] = Pair(name, dtype, args)
    return _LAST[name, dtype]


def groups() -> Iterator[list[str]]:
    """What is compiled at a time: one device with and without a mesh, then all meshes of 2, of 4, of 8 devices here."""
    yield [ALONE, "1x1"]
    for devices in (2, 4, 8):
        if devices <= jax.device_count():
            tensors = [2**i for i in range(devices.bit_length())]
            yield [f"{devices // tensor}x{tensor}" for tensor in tensors]


def build(
    section: Section, pair: Pair, meshes: Sequence[str], kinds: dict[Any, dict[str, Any]], deadline: float
) -> Iterator[tuple[str, dict[Any, Programs]]]:
    """Compiles the programs of some meshes; gives each mesh's, and drops them when the next is asked for.

    kinds: key -> arguments of `Programs` after the engine. What there is no program for has a row in the section.
    """
    if time.perf_counter() > deadline:
        section.left_out(f"{pair.name} on {', '.join(meshes)}: no time left")
        return
    jobs = {}
    for mesh in meshes:
        engine = pair.engine(mesh)
        jobs |= {(mesh, key): functools.partial(Programs, engine, **options) for key, options in kinds.items()}
    say(f"{section.name}, {pair.name}: compiling for {', '.join(meshes)}")
    done, failed = compiled(jobs, deadline)
    del jobs, engine
    for (mesh, key), reason in failed.items():
        section.left_out(f"{pair.name} on {mesh}, {key}: {reason}", wrong=reason.startswith("failed"))
    say(f"{section.name}, {pair.name}: compiled")
    for mesh in meshes:
        own = {key: done.pop((mesh, key)) for key in kinds if (mesh, key) in done}
        yield mesh, own
        own.clear()
        gc.collect()


def compare_tokens(section: Section, pair: Pair, args: argparse.Namespace, deadline: float) -> None:
    prompts = pair.prompts()
    options = {"budget": args.budget, "batch": len(prompts), "longest": max(map(len, prompts)), "loop": True}
    expected: list[list[int]] = []
    for meshes in groups():
        for mesh, programs in build(section, pair, meshes, {"loop": options | {"new_tokens": args.tokens}}, deadline):
            if "loop" not in programs or (mesh != ALONE and not expected):
                continue
            found = programs["loop"].generate(prompts)
            if mesh == ALONE:
                expected = found
                continue
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            section.add(
                ok=same == len(prompts),
                pair=pair.name,
                mesh=mesh,
                kernels=programs["loop"].kernels,
                prompts=len(prompts),
                same=same,
                tokens=sum(map(len, found)),
                different=len({token for one in expected for token in one}),
            )


def compare_acceptance(section: Section, pair: Pair, args: argparse.Namespace, deadline: float) -> None:
    prompts = pair.texts()
    steps = -(-args.rounds // len(prompts))
    new_tokens = steps * 8 + 8  # more than rounds of depth 7 can emit, so that no sequence finishes
    options = {"budget": args.budget, "batch": len(prompts), "longest": max(map(len, prompts)), "prompts": True}
    states: list[Any] = []
    expected: list[list[int]] = []
    for meshes in groups():
        meshes = [mesh for mesh in meshes if mesh != "1x1"]
        kinds = {"round": options | {"new_tokens": new_tokens, "prompts": ALONE in meshes}}
        for mesh, programs in build(section, pair, meshes, kinds, deadline):
            if "round" not in programs or (mesh != ALONE and not states):
                continue
            if mesh == ALONE:
                state = programs["round"].prefill(prompts)
                for _ in range(steps):
                    states.append(jax.device_get(state))
                    state, out = programs["round"].step(state)
                    expected.append(jax.device_get(out.acceptance_lengths).tolist())
                continue
            found = [_acceptance(programs["round"], state) for state in states]
            lengths = [(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)]
            share = sum(a == b for a, b in lengths) / len(lengths)
            section.add(
                ok=share >= SAME_ROUNDS,
                pair=pair.name,
                mesh=mesh,
                kernels=programs["round"].kernels,
                rounds=len(lengths),
                same=share,
                mean=sum(a for a, _ in lengths) / len(lengths),
                mean_one_device=sum(b for _, b in lengths) / len(lengths),
            )


def _acceptance(program: Programs, state: Any) -> list[int]:
    """Acceptance lengths of the round that begins with a state of the host."""
    return jax.device_get(program.step(program.put(state))[1].acceptance_lengths).tolist()


def time_rounds(section: Section, pair: Pair, args: argparse.Namespace, deadline: float) -> None:
    new_tokens = 8 * (args.repeats + args.profiled + 4)  # as above
    kinds = {
        (budget, context): {"budget": budget, "batch": 1, "longest": context, "new_tokens": new_tokens}
        | {"prompts": False}
        for context in args.contexts
        for budget in args.budgets
    }
    alone: dict[tuple[int, int], float] = {}
    for meshes in groups():
        meshes = [mesh for mesh in meshes if mesh != "1x1"]
        for mesh, programs in build(section, pair, meshes, kinds, deadline):
            for (budget, context), program in programs.items():
                if time.perf_counter() > deadline:
                    section.left_out(f"{pair.name} on {mesh}, budget {budget}, context {context}: no time left")
                    continue
                state = program.put(program.random_state(context, new_tokens))
                ms, state = program.milliseconds(state, args.repeats)
                traced = program.kernel_ms(state, args.profiled) if args.profiled else {}
                if mesh == ALONE:
                    alone[budget, context] = ms
                own = alone.get((budget, context))
                section.add(
                    ok=True,
                    pair=pair.name,
                    mesh=mesh,
                    budget=budget,
                    context=context,
                    ms=ms,
                    ratio=None if own is None or mesh == ALONE else ms / own,
                    kernel_ms={device: all_ms for device, (all_ms, _) in traced.items()},
                    collective_ms={device: collective_ms for device, (_, collective_ms) in traced.items()},
                    collectives=program.collectives,
                    kernels=program.kernels,
                )
            program = state = None  # its weights would stay while the next are placed
    best: dict[tuple[int, int, int], tuple[float, str]] = {}
    for row in section.rows:
        if row["pair"] == pair.name and row["ratio"] is not None:
            expert, tensor = parse_mesh(row["mesh"])
            key = (expert * tensor, row["budget"], row["context"])
            best[key] = min(best.get(key, (row["ratio"], row["mesh"])), (row["ratio"], row["mesh"]))
    for (devices, budget, context), (ratio, mesh) in sorted(best.items()):
        goal = f"; goal {GOAL:.2f}: {'met' if ratio <= GOAL else 'missed'}" if devices == 2 else ""
        section.note(f"{pair.name}, {devices} devices, budget {budget}, context {context}: {mesh}, {ratio:.2f}{goal}")


def measure_load(section: Section, args: argparse.Namespace) -> None:
    for one in load_memory.measured(args.gigabytes, nvfp4=args.nvfp4, mesh=LOAD_MESH, attempts=("first",)):
        say(f"load: {'loaded' if 'attempt' in one else 'written'}")
        if "attempt" in one:
            on_host = one["device"].endswith("cpu")
            if on_host:
                section.note("on a CPU the parameters themselves lie in host memory, so the bound is not checked")
            section.add(
                ok=on_host or one["taken"] <= one["bound"],
                device=one["device"],
                mesh=LOAD_MESH,
                experts="NVFP4" if args.nvfp4 else "bfloat16",
                gigabytes=one["size"] / 1e9,
                written_s=one["write_seconds"],
                seconds=one["seconds"],
                gigabytes_a_second=one["size"] / one["seconds"] / 1e9,
                before_gb=one["before"] / 1e9,
                peak_gb=one["peak"] / 1e9,
                taken_gb=one["taken"] / 1e9,
                bound_gb=one["bound"] / 1e9,
            )


def run_section(section: Section, args: argparse.Namespace, deadline: float) -> None:
    """Fills a section in; what goes wrong on the way is a note of it."""
    start = time.perf_counter()
    try:
        if section.name == "load":
            measure_load(section, args)
        elif section.name == "processes":
            mesh_processes.compare(section, args, deadline)
        else:
            run, dtype = {
                "tokens": (compare_tokens, "float32"),
                "acceptance": (compare_acceptance, "bfloat16"),
                "rounds": (time_rounds, "bfloat16"),
            }[section.name]
            for name in args.pairs if section.name != "rounds" else [SLICE]:
                if time.perf_counter() > deadline:
                    section.left_out(f"{name}: no time left")
                    continue
                run(section, pair_of(name, dtype, args), args, deadline)
                jax.clear_caches()
                gc.collect()
    except Exception as error:
        section.left_out(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:1000]}", wrong=True)
    section.seconds = time.perf_counter() - start


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--pairs", default=f"demo,demo-nvfp4,{SLICE}", help="for tokens, acceptance and processes")
    parser.add_argument("--kernels", choices=KERNELS, default=ALL, help="as for ddtree_jax.load")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the slice")
    parser.add_argument("--small", action="store_true", help="a tiny slice and checkpoint, few rounds")
    parser.add_argument("--budget", type=int, default=16, help="for tokens, acceptance and processes")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens a prompt")
    parser.add_argument("--rounds", type=int, help="rounds whose acceptance is compared; default 96")
    parser.add_argument("--budgets", type=numbers, help="for rounds; default 4,16,64")
    parser.add_argument("--contexts", type=numbers, help="for rounds; default 1024,8192")
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds")
    parser.add_argument("--profiled", type=int, default=3, help="rounds under the profiler; 0: no time of collectives")
    parser.add_argument("--gigabytes", type=float, help="of the checkpoint; default 40")
    parser.add_argument("--nvfp4", action="store_true", help="routed experts of the checkpoint as NVFP4")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds after which the rest is left out")
    parser.add_argument("--json", help="also write the numbers here, and the tables beside it as .md")
    args = parser.parse_args(argv)
    args.sections, args.pairs = args.sections.split(","), args.pairs.split(",")
    unknown = [name for name in args.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"--sections: got {unknown[0]!r}, allowed are {', '.join(SECTIONS)}")
    args.rounds = args.rounds or (16 if args.small else 96)
    args.budgets = args.budgets or ([4] if args.small else [4, 16, 64])
    args.contexts = args.contexts or ([160] if args.small else [1024, 8192])
    args.gigabytes = args.gigabytes or (0.1 if args.small else 40.0)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes of `processes` end with this one
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    deadline = time.perf_counter() + args.budget_s
    report = MeshReport({name: value for name, value in vars(args).items() if name != "json"})
    # What has processes of its own comes first: once this one has touched the devices, their memory is taken.
    for name in sorted(args.sections, key=lambda name: name not in ("load", "processes")):
        section = report.section(name)
        run_section(section, args, deadline)
        print(section.text(), flush=True)
        if args.json:
            report.write(args.json)
    print(report.title())
    if args.json:
        report.write(args.json)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
