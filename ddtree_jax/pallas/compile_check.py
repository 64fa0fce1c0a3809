"""Compiles every kernel for GPUs that need not be there: `python -m ddtree_jax.pallas.compile_check --platform all`.

Needs the CUDA plugin of JAX and NVIDIA's compilers, and no GPU. To keep them out of the environment that tests and
users have (a plugin without a GPU makes every start of JAX complain), they may lie in a folder of their own:

    sh .ci/gpu-compilers DIR
    python -m ddtree_jax.pallas.compile_check --platform h200 --compilers DIR

One process an architecture. It proves that code is generated: neither that its numbers are right nor that it is fast.
Status: 0 all compile, 1 some do not, 2 bad usage or no compilers.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import ddtree_jax

PLATFORMS = ("h200", "b200", "rtx_pro_6000")
_MODULE = "ddtree_jax.pallas.compile_check"


class NoCompilersError(Exception):
    """The plugin or a compiler is missing, or does not start."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one platform. `programs`: the fields of each `compile_programs.Program`."""

    platform: str
    programs: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    seconds: float

    @property
    def failed(self) -> tuple[dict[str, Any], ...]:
        return tuple(program for program in self.programs if program["status"] == "failed")

    def text(self) -> str:
        counts = {
            status: sum(program["status"] == status for program in self.programs)
            for status in ("ok", "failed", "same tiles", "not served")
        }
        lines = [f"{self.platform}: " + ", ".join(f"{n} {s}" for s, n in counts.items()) + f" in {self.seconds:.0f} s"]
        for program in self.programs:
            name = f"{program['op']} {program['implementation']}, {program['case']}"
            if program["status"] == "failed":
                lines.append(f"  FAILED  {name}: {program['detail']}")
            for entry, used in program["resources"].items():
                if used.get("spill_stores") or used.get("spill_loads"):
                    spilled = f"{used['spill_stores']} bytes of stores, {used['spill_loads']} of loads"
                    lines.append(f"  spills  {name}: {entry}: {spilled}")
        return "\n".join(lines)


def compile_for(
    platform: str,
    *,
    compilers: str | os.PathLike[str] | None = None,
    ops: str | os.PathLike[str] | None = None,
    op: str | None = None,
    case: str | None = None,
    every: bool = False,
) -> Report:
    """Compiles for one platform, in a process of its own; a crash of a compiler is a failure of that program.

    Args:
      platform: one of PLATFORMS.
      compilers: folder with the plugin and the compilers; None: those of this environment.
      ops: Python file with OPS and CASES in place of the package's.
      op, case: only this operation, only cases with this in their names.
      every: every case; else the first one of each choice of tiles.

    Raises:
      NoCompilersError: nothing can be compiled here.
      ValueError: an unknown op, or no such case.
    """
    if compilers is not None and not pathlib.Path(compilers).is_dir():
        raise NoCompilersError(f"there is no folder {str(compilers)!r}; make it with: sh .ci/gpu-compilers {compilers}")
    command = [sys.executable, "-m", _MODULE, "--worker", "--platform", platform]
    for flag, value in (("--ops", ops), ("--op", op), ("--case", case)):
        command += [] if value is None else [flag, str(value)]
    command += ["--every"] if every else []
    start = time.perf_counter()
    programs: list[dict[str, Any]] = []
    under_way: dict[str, str] | None = None
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        environment = _environment(compilers, folder)
        # Its own handle on the log, so that what a compiler prints when it dies is there to be read.
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as worker:
            for line in worker.stdout or ():
                message = json.loads(line)
                if "program" in message:
                    programs.append(message["program"])
                    under_way = None
                under_way = message.get("start", under_way)
                versions |= message.get("versions", {})
                if "bad_input" in message:
                    raise ValueError(message["bad_input"])
                if "no_compilers" in message:
                    raise NoCompilersError(message["no_compilers"])
        errors.seek(0)
        said = " ".join(errors.read().split())[-1000:]
    if worker.returncode:
        if under_way is None:
            raise RuntimeError(f"the compile process for {platform} ended with {worker.returncode}: {said}")
        detail = f"the process died with {worker.returncode} while it compiled this: {said}"
        blank = {"seconds": 0.0, "sm": [], "kernels": [], "custom_calls": [], "resources": {}}
        programs.append({**under_way, "status": "failed", "detail": detail, **blank})
    return Report(platform, tuple(programs), versions, round(time.perf_counter() - start, 1))


def _environment(compilers: str | os.PathLike[str] | None, scratch: str) -> dict[str, str]:
    environment = dict(os.environ)
    paths = [str(pathlib.Path(ddtree_jax.__file__).parents[1]), environment.get("PYTHONPATH", "")]
    if compilers is not None:
        paths.insert(0, str(pathlib.Path(compilers).resolve()))
    cuda = _cuda_folder(compilers)
    if cuda is not None:
        # jax-triton looks for ptxas here; a toolkit of this machine may be too old for its PTX.
        environment["PATH"] = f"{cuda / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_gpu_cuda_data_dir={cuda}".strip()
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    # With the plugin there and no GPU, JAX must not try to start it.
    environment["JAX_PLATFORMS"] = "cpu"
    # A program out of a cache would leave no PTX to look at.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    environment["TRITON_CACHE_DIR"] = environment["MOSAIC_GPU_DUMP_TO"] = scratch
    environment["MOSAIC_GPU_DUMP_PTX"] = "1"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return environment


def _cuda_folder(compilers: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Where NVIDIA's packages put the compilers of CUDA 13."""
    if compilers is not None:
        return pathlib.Path(compilers).resolve() / "nvidia" / "cu13"
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return pathlib.Path(folders[0]) if folders else None


def _worker(arguments: argparse.Namespace) -> int:
    from ddtree_jax.errors import one_line
    from ddtree_jax.pallas import compile_programs
    from ddtree_jax.pallas.cases.registry import load_registry
    from ddtree_jax.pallas.compile_targets import TARGETS

    # What a library prints must not mix with the messages: they keep stdout, everything else goes to stderr.
    messages = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        registry = load_registry(arguments.ops).select(arguments.op, arguments.case)
    except ValueError as error:
        tell(bad_input=str(error))
        return 2
    try:
        compiler = compile_programs.Compiler(TARGETS[arguments.platform[0]])
    except Exception as error:  # of many kinds, from the plugin
        tell(no_compilers=f"the CUDA plugin of JAX does not start: {one_line(error)}; see sh .ci/gpu-compilers DIR")
        return 2
    packages = ("jax", "jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm", "jax-triton", "triton")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    tell(versions=versions)

    def started(case: Any, implementation: str) -> None:
        tell(start={"op": case.op, "implementation": implementation, "case": case.name})

    for program in compile_programs.check_all(compiler, registry, every=arguments.every, started=started):
        tell(program=dataclasses.asdict(program))
    return 0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__.splitlines()[0])
    parser.add_argument("--platform", action="append", choices=(*PLATFORMS, "all"), required=True)
    parser.add_argument("--compilers", metavar="DIR", help="the plugin and the compilers; default: this environment's")
    parser.add_argument("--op", metavar="NAME", help="only this operation")
    parser.add_argument("--case", metavar="TEXT", help="only cases with this in their names")
    parser.add_argument("--every", action="store_true", help="every case, not one of each choice of tiles")
    parser.add_argument("--ops", metavar="FILE", help="Python file with OPS and CASES in place of the package's")
    parser.add_argument("--json", metavar="FILE", help="also write the whole report here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_args(argv)
    if arguments.worker:
        return _worker(arguments)
    platforms = PLATFORMS if "all" in arguments.platform else tuple(dict.fromkeys(arguments.platform))
    options = {name: getattr(arguments, name) for name in ("compilers", "ops", "op", "case", "every")}
    try:
        with concurrent.futures.ThreadPoolExecutor(len(platforms)) as pool:
            reports = list(pool.map(lambda platform: compile_for(platform, **options), platforms))
    except (NoCompilersError, ValueError) as error:
        print(f"compile_check: error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        print(report.text())
    if arguments.json:
        document = [{**dataclasses.asdict(report), "failed": len(report.failed)} for report in reports]
        pathlib.Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
