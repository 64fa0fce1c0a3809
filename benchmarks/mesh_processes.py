"""The section `processes` of `mesh.py`: greedy tokens of two processes with a device each, and of one.

A process of its own:  python benchmarks/mesh_processes.py REQUEST, a JSON object as `compare` writes it; the tokens are
the last line that it prints, if it is the first one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mesh_report import Section, say

MESHES = ("1x2", "2x1")
LENGTHS = (200, 160, 32, 20)  # of prompts


def compare(section: Section, args: argparse.Namespace, deadline: float) -> None:
    """A row for each shipped pair and mesh. The slice is no folder that processes could load."""
    pairs = [name for name in args.pairs if name.startswith("demo")]
    request = {"pairs": pairs, "kernels": args.kernels, "budget": args.budget, "tokens": args.tokens}
    request["lengths"] = (24, 16) if args.small else LENGTHS
    meshes = MESHES[:1] if args.small else MESHES
    together = request | {"meshes": meshes, "coordinator": f"127.0.0.1:{_free_port()}", "count": 2}
    requests = [request | {"meshes": [None]}, *(together | {"index": index} for index in range(2))]
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        # Files, not pipes: one that is not read would stop its process, and the other one with it.
        files = [(Path(folder, f"{i}.out"), Path(folder, f"{i}.err")) for i in range(len(requests))]
        try:
            processes += [_start(one, *own) for one, own in zip(requests, files, strict=True)]
            say("processes: started")
            for process in processes:
                process.wait(max(1.0, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            said = "; ".join((err.read_text().splitlines() or ["nothing"])[-1] for _, err in files)
            section.left_out(f"no time left; the processes said: {said}")
            return
        finally:
            for process in processes:
                process.kill()
                process.wait()
        outputs = [(out.read_text(), err.read_text()) for out, err in files]
    for process, (_, errors), name in zip(processes, outputs, ("one process", "process 0", "process 1"), strict=True):
        if process.returncode != 0:
            section.left_out(f"failed: {name} ended with status {process.returncode}: {errors[-1500:]}", wrong=True)
    if not section.ok:
        return
    alone, found = (json.loads(output.splitlines()[-1]) for output, _ in outputs[:2])
    expected = {row["pair"]: row for row in alone}
    for row in found:
        lines = list(zip(row["tokens"], expected[row["pair"]]["tokens"], strict=True))
        same = sum(a == b for a, b in lines)
        section.add(
            ok=same == len(lines) > 0,
            pair=row["pair"],
            mesh=row["mesh"],
            device=row["device"],
            processes=row["processes"],
            prompts=len(lines),
            same=same,
            tokens=sum(len(a) for a, _ in lines),
            different=len({token for _, b in lines for token in b}),
        )


def _start(request: dict[str, Any], out: Path, err: Path) -> subprocess.Popen:
    """A process that sees one device. None of them takes all of its memory: the first two share one."""
    index = request.get("index", 0)
    env = os.environ | {"CUDA_VISIBLE_DEVICES": _visible(index), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    flags = env.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if not flag.startswith("--xla_force_host_platform_device_count")]
    env["XLA_FLAGS"] = " ".join([*kept, "--xla_force_host_platform_device_count=1"])
    command = [sys.executable, __file__, json.dumps(request)]
    with out.open("w") as stdout, err.open("w") as stderr:
        return subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)


def _visible(index: int) -> str:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[index] if given and len(given.split(",")) > index else str(index)


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def work(request: dict[str, Any]) -> None:
    """What a process does."""
    import jax
    from slices import random_prompts

    import ddtree_jax
    from ddtree_jax.cluster import join_cluster, parse_mesh
    from ddtree_jax.models import make_mesh

    def note(text: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    start = time.perf_counter()
    join_cluster(request.get("coordinator"), request.get("count"), request.get("index"))
    options = {"budget": request["budget"], "stop_token_ids": []}
    note("joined")
    rows = []
    for pair in request["pairs"]:
        for mesh in request["meshes"]:
            devices = None if mesh is None else make_mesh(*parse_mesh(mesh))
            engine = ddtree_jax.load(pair, dtype="float32", mesh=devices, kernels=request["kernels"])
            note(f"{pair} on {mesh}: loaded")
            batch = random_prompts((request["lengths"],), engine)[0]
            results = ddtree_jax.generate(engine, batch, request["tokens"], **options)
            note(f"{pair} on {mesh}: done")
            device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
            rows.append({"pair": pair, "mesh": mesh, "device": device, "processes": jax.process_count()})
            rows[-1]["tokens"] = [result.token_ids for result in results]
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
