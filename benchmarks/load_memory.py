"""Host memory and speed of loading a large checkpoint: a synthetic GLM-5 target is written, then loaded in a process of
its own that reports its peak.

python benchmarks/load_memory.py --gigabytes 8                       # bfloat16, one device
python benchmarks/load_memory.py --gigabytes 8 --nvfp4 --mesh 2x1    # experts as NVFP4, over two devices
"""

import argparse
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ddtree_jax.checkpoint import ShardWriter
from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.params import target_tensors
from ddtree_jax.models.published import GLM_5_2
from ddtree_jax.safetensors_files import write_json

SHARD_BYTES = 500 * 10**6


def config_of(num_layers: int) -> Glm5Config:
    """GLM-5.2 in everything but width and depth: one MoE layer is 0.82 GB of bfloat16."""
    smaller = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 16,
        "q_lora_rank": 768,
        "n_routed_experts": 64,
        "indexer_types": GLM_5_2["indexer_types"][:num_layers],
        "mlp_layer_types": ["dense"] + ["sparse"] * (num_layers - 1),
        "max_position_embeddings": 4096,
    }
    return Glm5Config.from_hf(GLM_5_2 | smaller)


def write_synthetic(folder: pathlib.Path, gigabytes: float, nvfp4: bool) -> int:
    """Random weights of at least this size on disk; returns the bytes of the largest tensor."""
    num_layers, size = 2, 0
    while size < gigabytes * 1e9:
        num_layers += 1
        size = sum(_bytes(spec.name, spec.shape, nvfp4) for spec in target_tensors(config_of(num_layers)))
    config = config_of(num_layers)
    noise = np.random.default_rng(0).standard_normal(1 << 22).astype(np.float32)
    writer, largest = ShardWriter(folder, SHARD_BYTES), 0
    for spec in target_tensors(config):
        count = math.prod(spec.shape)
        largest = max(largest, _bytes(spec.name, spec.shape, nvfp4))
        if nvfp4 and ".mlp.experts." in spec.name:
            rows, columns = spec.shape
            writer.add(spec.name, np.resize(noise.view(np.uint8), (rows, columns // 2)))
            writer.add(f"{spec.name}_scale", np.full((rows, columns // 16), 0.5, ml_dtypes.float8_e4m3fn))
            writer.add(f"{spec.name}_scale_2", np.float32(spec.shape[1] ** -0.5).reshape(()))
            continue
        dtype = np.float32 if spec.float32 else ml_dtypes.bfloat16
        values = np.resize((noise * spec.shape[-1] ** -0.5).astype(dtype), count).reshape(spec.shape)
        writer.add(spec.name, values)
    writer.close()
    write_json(folder / "config.json", config.to_hf())
    return largest


def _bytes(name: str, shape: tuple[int, ...], nvfp4: bool) -> int:
    return math.prod(shape) * 9 // 16 if nvfp4 and ".mlp.experts." in name else math.prod(shape) * 2


def load_here(folder: pathlib.Path, mesh: str | None) -> dict[str, float]:
    """Loads the folder in this process; seconds, bytes of parameters, and host memory before and at its peak."""
    import jax
    import jax.numpy as jnp

    from ddtree_jax.cluster import parse_mesh
    from ddtree_jax.models import load_target, make_mesh
    from ddtree_jax.models.pair import flat_leaves

    for (
        device
    ) in jax.devices():  # what starting a device takes, 3.5 GB of host memory on an H200, is no part of loading
        (jnp.zeros(8, device=device) + 1).block_until_ready()
    before = host_memory("VmRSS")
    start = time.perf_counter()
    target = load_target(folder, dtype="bfloat16", mesh=None if mesh is None else make_mesh(*parse_mesh(mesh)))
    arrays = list(flat_leaves(target.params).values())
    jax.block_until_ready(arrays)
    return {
        "seconds": time.perf_counter() - start,
        "parameters": sum(array.nbytes for array in arrays),
        "before": before,
        "peak": host_memory("VmHWM"),  # not ru_maxrss, which a process inherits from the one that started it
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
    }


def host_memory(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS is what the process holds, VmHWM the most that it held."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measured(
    gigabytes: float, *, nvfp4: bool = False, mesh: str | None = None, attempts: Sequence[str] = ("first", "again")
) -> Iterator[dict[str, Any]]:
    """Writes a checkpoint and loads it, each time in a process of its own.

    Yields {"size", "largest", "write_seconds"} when it is written, bytes and seconds; then for each of `attempts` what
    `load_here` returns with these, "attempt", and in bytes "taken", host memory that loading took, and "bound".
    """
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        start = time.perf_counter()
        largest = write_synthetic(folder, gigabytes, nvfp4)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        written = {"size": size, "largest": largest, "write_seconds": time.perf_counter() - start}
        yield written
        command = [sys.executable, __file__, "--load", str(folder), *(["--mesh", mesh] if mesh else [])]
        for attempt in attempts:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"loading ended with status {done.returncode}: {done.stderr[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            bounds = {"taken": found["peak"] - found["before"], "bound": 2 * largest + 2**30}
            yield {"attempt": attempt, **written, **found, **bounds}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--nvfp4", action="store_true", help="routed experts as NVFP4")
    parser.add_argument("--mesh", help="ExT, as for ddtree-jax")
    parser.add_argument("--load", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load_here(options.load, options.mesh)))
        return
    for one in measured(options.gigabytes, nvfp4=options.nvfp4, mesh=options.mesh):
        size, largest = one["size"] / 1e9, one["largest"] / 1e9
        if "attempt" not in one:
            seconds = one["write_seconds"]
            print(f"written: {size:.2f} GB in {seconds:.0f} s, largest tensor {largest:.2f} GB", flush=True)
            continue
        print(
            f"{one['attempt']} load on {one['device']}: {one['seconds']:.1f} s, {size / one['seconds']:.2f} GB/s, "
            f"parameters {one['parameters'] / 1e9:.2f} GB; host memory {one['before'] / 1e9:.2f} GB before, "
            f"peak {one['peak'] / 1e9:.2f} GB: {one['taken'] / 1e9:.2f} GB for loading, "
            f"bound {one['bound'] / 1e9:.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
