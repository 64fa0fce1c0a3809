"""Compiles prefill and decoding of the full-size models for 8 virtual devices, from shapes alone.

    python benchmarks/full_size.py [--targets GLM-5,GLM-5.2] [--meshes 2x4,1x8] [--context 32768] [--json FILE]

No weights, no caches, no accelerator: parameters (routed experts NVFP4, the rest bfloat16), caches and tokens are
shapes with placements. Told are seconds to compile, peak host memory, bytes on each device, and what a good program
has none of: collectives that move a weight or a cache, and copies of a layer's packed experts. Each pair of target
and mesh runs in a process of its own.
"""

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEVICES = 8
SECONDS, HOST_GIB = 120, 12  # targets for prefill and one round
ITEM_BYTES = {
    **{"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2},
    **{"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8},
}
PASSED_ON = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")  # move nothing
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="GLM-5,GLM-5.2", help="published names, or paths of config.json")
    parser.add_argument(
        "--drafter", default="dflash2", help="dflash2: GLM-5.3-DFlash2; dflash: the same sizes as v1; or a config.json"
    )
    parser.add_argument("--meshes", default="2x4,1x8", help=f"expert x tensor, {DEVICES} devices each: 1x8, 2x4, 8x1")
    parser.add_argument("--context", type=int, default=32768, help="cache slots of a sequence")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=int, default=32, help="tree nodes")
    parser.add_argument("--large", type=int, default=64 * 2**20, help="bytes from which a move is listed")
    parser.add_argument("--json", help="also write the numbers here")
    parser.add_argument("--hlo", help="folder for the compiled programs as text")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    targets, meshes = args.targets.split(","), args.meshes.split(",")
    if len(targets) == len(meshes) == 1:
        results = [measure(args)]
    else:
        results = [measured_apart(args, target, mesh) for target in targets for mesh in meshes]
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")


def measured_apart(args: argparse.Namespace, target: str, mesh: str) -> dict[str, Any]:
    """`measure` in a process of its own, so that its peak of memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "numbers.json"
        own = vars(args) | {"targets": target, "meshes": mesh, "json": out}
        options = [f"--{name}={value}" for name, value in own.items() if value is not None]
        subprocess.run([sys.executable, __file__, *options], check=True)
        return json.loads(out.read_text())[0]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Compiles the programs of one target on one mesh, prints what it took, returns the numbers."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax  # only now: the flag is read when the backend starts

    jax.config.update("jax_platforms", "cpu")
    from ddtree_jax import abstract, decoding
    from ddtree_jax.algorithm import SpeculativeAlgorithm
    from ddtree_jax.models import DFlashConfig, Glm5Config, make_mesh, published
    from ddtree_jax.models.folders import describe_drafter, describe_target

    name, mesh = args.targets, args.meshes
    values = published.TARGETS[name] if name in published.TARGETS else json.loads(Path(name).read_text())
    config = Glm5Config.from_hf(values)
    values = drafter_values(args.drafter, published.GLM_5_3_DFLASH2)
    started = time.perf_counter(), user_seconds()
    expert, tensor = (int(n) for n in mesh.split("x"))
    target = describe_target(config, mesh=make_mesh(expert, tensor), packed=abstract.packed_experts(config))
    drafter = describe_drafter(DFlashConfig.from_hf(values), config, mesh=target.mesh)
    plan, weights = abstract.abstract_plan(target, drafter, SpeculativeAlgorithm.DDTREE, args.budget)
    shared = plan.for_prefill()
    prompt = abstract.abstract_prefill(shared, weights, args.batch, args.context)
    state, sampling, stop = abstract.abstract_round(plan, prompt[0])
    described = time.perf_counter() - started[0], user_seconds() - started[1]
    lowering = {
        "prefill_chunk": lambda: decoding.prefill_chunk.lower(shared, weights, *prompt),
        "round_step": lambda: decoding.round_step.lower(plan, weights, state, sampling, stop),
        "decode_loop": lambda: decoding.decode_loop.lower(plan, weights, state, sampling, stop, capacity=256),
    }
    programs = {}
    for program, lower in lowering.items():
        programs[program], text = compiled(lower, args.large)
        programs[program]["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if args.hlo:
            Path(args.hlo, f"{Path(name).stem}_{mesh}_{program}.txt").write_text(text)
    both = [programs["prefill_chunk"], programs["round_step"]]
    result = {
        **{
            "target": name,
            "drafter": args.drafter,
            "mesh": mesh,
            "context": args.context,
            "batch": args.batch,
            "budget": args.budget,
        },
        "describe_seconds": described[0],
        "prefill_and_round": {
            "seconds": described[0] + sum(p["lower_seconds"] + p["compile_seconds"] for p in both),
            "user_seconds": described[1] + sum(p["user_seconds"] for p in both),
            "peak_host_bytes": both[-1]["peak_host_bytes"],
        },
        "bytes": {
            "target": sizes(target.leaves),
            "drafter": sizes(drafter.leaves),
            "target_cache": sizes(state.cache),
            "drafter_cache": sizes(state.draft_cache),
        },
        "programs": programs,
    }
    print_result(result)
    return result


def drafter_values(choice: str, dflash2: dict[str, Any]) -> dict[str, Any]:
    """The drafter's config.json: published, the same sizes without convolutions and selector, or a file."""
    if choice == "dflash2":
        return dflash2
    if choice == "dflash":
        nested = {key: dflash2["dflash_config"][key] for key in ("block_size", "mask_token_id", "target_layer_ids")}
        return dflash2 | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    return json.loads(Path(choice).read_text())


def user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def sizes(tree: Any) -> dict[str, int]:
    """Bytes of placed shapes: in all, and on each device."""
    import jax

    whole = part = 0
    for leaf in jax.tree.leaves(tree):
        whole += leaf.size * leaf.dtype.itemsize
        part += math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return {"in_all": whole, "per_device": part}


def compiled(lower: Any, large: int) -> tuple[dict[str, Any], str]:
    """Lowers and compiles one program: seconds, bytes on a device, large moves; and its text."""
    user, start = user_seconds(), time.perf_counter()
    lowered = lower()
    middle = time.perf_counter()
    program = lowered.compile()
    end = time.perf_counter()
    memory, text = program.memory_analysis(), program.as_text()
    moves, widened = large_moves(text, large)
    numbers = {
        "lower_seconds": middle - start,
        "compile_seconds": end - middle,
        "user_seconds": user_seconds() - user,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "donated_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "widened_scale_bytes": widened,
        "hlo_lines": text.count("\n"),
        "large_moves": moves,
    }
    return numbers, text


def large_moves(text: str, large: int) -> tuple[list[str], int]:
    """From a compiled program: what moves `large` bytes or more and should not, and the bytes of float16 copies.

    Listed are collectives, and copies of NVFP4 codes, which alone are uint8. Nothing in these models is float16: the
    CPU compiler widens float8 scales to it, whole stacks before a loop. No accelerator with float8 does that, so those
    bytes of its temporaries mean nothing there. It also widens bfloat16 collectives to float32, so that the bytes of
    those are up to twice what an accelerator would move.
    """
    found, widened, inside = [], 0, ""
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header:
            inside = header[1]
        result = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(", line)
        if not result or "fused" in inside or "wrapped" in inside or result[2] in PASSED_ON:
            continue
        shape, operation = result[1], result[2].removesuffix("-start")
        parts = [
            (dtype, ITEM_BYTES.get(dtype, 0) * math.prod(int(n) for n in dims.split(",") if n))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)
        ]
        size = sum(n for _, n in parts)
        if size >= large and (operation in COLLECTIVES or any(dtype == "u8" for dtype, _ in parts)):
            found.append(f"{operation} {shape} ({size / 1e6:.1f} MB)")
        if size >= large:
            widened += sum(n for dtype, n in parts if dtype == "f16")
    return found, widened


def print_result(result: dict[str, Any]) -> None:
    mesh, both = result["mesh"], result["prefill_and_round"]
    print(
        f"\n{result['target']}, mesh {mesh} (expert x tensor), {result['batch']} x {result['context']} tokens, "
        f"ddtree budget {result['budget']}, drafter {result['drafter']}"
    )
    for what, size in result["bytes"].items():
        whole, part = size["in_all"] / 1e9, size["per_device"] / 1e9
        print(f"  {what.replace('_', ' '):14} {whole:8.2f} GB in all, {part:7.2f} GB a device")
    header = ("program", "lower s", "compile s", "user s", "args GB", "out GB", "temps GB", "f8->f16 GB", "HLO lines")
    print("  " + "  ".join(f"{cell:>13}" if i == 0 else f"{cell:>10}" for i, cell in enumerate(header)))
    for name, p in result["programs"].items():
        seconds = [f"{p[key]:10.1f}" for key in ("lower_seconds", "compile_seconds", "user_seconds")]
        keys = ("argument_bytes", "output_bytes", "temporary_bytes", "widened_scale_bytes")
        sizes = [f"{p[key] / 1e9:10.2f}" for key in keys]
        print("  " + "  ".join([f"{name:>13}", *seconds, *sizes, f"{p['hlo_lines']:10}"]))
        for line in p["large_moves"]:
            print(f"    LARGE: {line}")
    gib = both["peak_host_bytes"] / 2**30
    print(
        f"  prefill and round: {both['seconds']:.1f} s (user CPU {both['user_seconds']:.1f} s; target {SECONDS} s), "
        f"peak host memory {gib:.2f} GiB (target {HOST_GIB} GiB)",
        flush=True,
    )


if __name__ == "__main__":
    main()
