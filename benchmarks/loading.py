"""Load time and host memory: an HF folder beside the converted one, each load in a process of its own.

    python benchmarks/loading.py [--target DIR] [--synthetic-gb N] [--work DIR] [--repeats 3] [--cold] [--json FILE]

The default is the shipped target. `--synthetic-gb N` makes a GLM-5-like target of about N GB of random bfloat16 in a
temporary folder instead; with its converted copy it needs 2 N GB of disk. Files are in the page cache when they are
loaded, unless `--cold` drops them from it before each load. Memory is the highest resident size of the process less
what it has with JAX started and nothing loaded; on a CPU that includes the weights themselves.
"""

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
SHARD_BYTES = 2 * 10**9


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="HF-format folder; default: the shipped target")
    parser.add_argument("--synthetic-gb", type=float, help="make a random target of about this size instead")
    parser.add_argument("--work", help="where temporary folders go; default: the system's place")
    parser.add_argument("--dtype", default="bfloat16", help="of the converted copy and of every load")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop each folder from the page cache before it is loaded")
    parser.add_argument("--json", help="also write the numbers here")
    parser.add_argument("--child", nargs=2, metavar=("ACTION", "ARGUMENTS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def synthetic_config(size_gb: float):
    """GLM-5's proportions, smaller: widths grow with the fourth root of the size, experts and layers take the rest."""
    from ddtree_jax.models import Glm5Config

    scale = max(1, round(4 * max(size_gb, 0.01) ** 0.25))  # 8 gives a hidden size of 2048
    hidden, expert = 256 * scale, 96 * scale
    vocab, experts = 19200 * scale // 4, 64
    per_layer = 2 * (3 * hidden * expert * (experts + 1) + 8 * hidden * hidden)
    layers = max(3, round((size_gb * 1e9 - 4 * vocab * hidden) / per_layer))
    return Glm5Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=expert,
        num_hidden_layers=layers,
        num_attention_heads=16,
        q_lora_rank=hidden // 4,
        kv_lora_rank=128,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=64,
        n_routed_experts=experts,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_topk=256,
        index_n_heads=16,
        index_head_dim=64,
        indexer_types=("full",) * layers,
        mlp_layer_types=("dense",) + ("sparse",) * (layers - 1),
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
    )


def make_synthetic(name: str, size: str) -> dict:
    """Writes random weights: uniform in [-0.0625, 0.0625), quick to draw and as hard to compress as trained ones."""
    import ml_dtypes
    import numpy as np

    from ddtree_jax.checkpoint import ShardWriter
    from ddtree_jax.models.folders import write_target_config
    from ddtree_jax.models.params import target_tensors

    config, folder = synthetic_config(float(size)), Path(name)
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, SHARD_BYTES)
    for spec in target_tensors(config):
        values = rng.random(spec.shape, np.float32)
        values -= 0.5
        values *= 0.125
        writer.add(spec.name, values if spec.float32 else values.astype(ml_dtypes.bfloat16))
    writer.close()
    write_target_config(config, folder, "bfloat16")
    return {"bytes": disk_bytes(folder)}


def largest_tensor(folder: Path) -> int:
    """Bytes of the largest tensor of an HF folder, on disk."""
    from ddtree_jax.safetensors_files import CheckpointReader

    return max(entry.num_bytes for entry in CheckpointReader(folder).entries.values())


def peak_bytes() -> int:
    """The highest resident size of this process so far."""
    try:  # of this program alone: getrusage also counts what the parent had when it started this one
        status = Path("/proc/self/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
    except (OSError, StopIteration):
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run_load(folder: str, dtype: str) -> dict:
    """One load, in this process: seconds, bytes of parameters, peak memory above that of JAX alone."""
    import jax
    import jax.numpy as jnp

    from ddtree_jax.models.folders import open_target
    from ddtree_jax.models.pair import flat_leaves

    jax.block_until_ready(jnp.zeros(8) + 1)  # starts the device; what follows is the load
    before = peak_bytes()
    start = time.perf_counter()
    target = open_target(folder, dtype=dtype).read()
    jax.block_until_ready(target.arrays)
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "parameter_bytes": sum(leaf.nbytes for leaf in flat_leaves(target.params).values()),
        "peak_bytes": peak_bytes() - before,
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "jax": jax.__version__,
    }


def run_convert(source: str, output: str, dtype: str) -> dict:
    """One conversion, in this process."""
    import jax
    import jax.numpy as jnp

    from ddtree_jax.converted import convert

    jax.block_until_ready(jnp.zeros(8) + 1)
    before = peak_bytes()
    (done,) = convert(source, None, output, dtype=dtype)
    return {
        "load_s": done.load_s,
        "write_s": done.write_s,
        "bytes": done.num_bytes,
        "peak_bytes": peak_bytes() - before,
    }


ACTIONS = {"load": run_load, "convert": run_convert, "make": make_synthetic}


def in_process(action: str, *arguments: str) -> dict:
    """Runs an action in a fresh process and returns its numbers; ends this one with its error if it fails."""
    command = [sys.executable, __file__, "--child", action, json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"loading.py: {action} {' '.join(arguments)} failed with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def drop_from_cache(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(folder: Path, dtype: str, repeats: int, cold: bool) -> dict:
    """Medians of several loads; memory is the highest of them."""
    runs = []
    for _ in range(repeats):
        if cold:
            drop_from_cache(folder)
        runs.append(in_process("load", str(folder), dtype))
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        **runs[0],
        "seconds": seconds,
        "all_seconds": [run["seconds"] for run in runs],
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "disk_bytes": disk_bytes(folder),
        "gb_per_s": runs[0]["parameter_bytes"] / 1e9 / seconds,
    }


def main() -> None:
    args = parse_args()
    if args.child:
        action, arguments = args.child
        print(json.dumps(ACTIONS[action](*json.loads(arguments))))
        return
    if args.repeats < 1 or (args.synthetic_gb is not None and not 0 < args.synthetic_gb < math.inf):
        sys.exit("loading.py: --repeats and --synthetic-gb must be above 0")
    if args.target and args.synthetic_gb:
        sys.exit("loading.py: give --target or --synthetic-gb, not both")
    sys.path.insert(0, str(ROOT))
    work = Path(tempfile.mkdtemp(prefix="ddtree-loading-", dir=args.work))
    try:
        if args.synthetic_gb:
            free = shutil.disk_usage(work).free
            if 2.1e9 * args.synthetic_gb > free:
                sys.exit(
                    f"loading.py: needs {2.1 * args.synthetic_gb:.1f} GB of disk, {work} has {free / 1e9:.1f} free"
                )
            source = work / "hf"
            start = time.perf_counter()
            made = in_process("make", str(source), str(args.synthetic_gb))
            print(f"made {made['bytes'] / 1e9:.2f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        else:
            source = Path(args.target) if args.target else ROOT / "ddtree_jax" / "demo" / "target"
        conversion = in_process("convert", str(source), str(work / "converted"), args.dtype)
        print(
            f"converted: loaded in {conversion['load_s']:.2f} s, written in {conversion['write_s']:.2f} s, "
            f"{conversion['bytes'] / 1e9:.2f} GB, peak memory {conversion['peak_bytes'] / GIB:.2f} GiB",
            flush=True,
        )
        folders = {"HF": source, "converted": work / "converted"}
        results = {name: measure(folder, args.dtype, args.repeats, args.cold) for name, folder in folders.items()}
        largest = largest_tensor(source)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bound = 2 * largest + GIB
    first = results["HF"]
    print(
        f"\n{first['device']}, jax {first['jax']}, {os.cpu_count()} cores, {args.dtype}, "
        f"{first['parameter_bytes'] / 1e9:.3f} GB of parameters, page cache {'cold' if args.cold else 'warm'}, "
        f"median of {args.repeats}\n"
    )
    print(f"{'folder':10} {'disk GB':>9} {'seconds':>9} {'GB/s':>7} {'peak GiB':>9} {'2 x largest + 1 GiB':>20}")
    for name, r in results.items():
        print(
            f"{name:10} {r['disk_bytes'] / 1e9:9.3f} {r['seconds']:9.3f} {r['gb_per_s']:7.2f} "
            f"{r['peak_bytes'] / GIB:9.2f} {bound / GIB:20.2f}"
        )
    print(f"\nconverted loads {first['seconds'] / results['converted']['seconds']:.2f} x as fast as HF")
    if first["platform"] == "cpu":
        print("on a CPU, the peak includes the parameters themselves")
    if args.json:
        numbers = {"results": results, "conversion": conversion, "largest_tensor_bytes": largest, "bound_bytes": bound}
        Path(args.json).write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
