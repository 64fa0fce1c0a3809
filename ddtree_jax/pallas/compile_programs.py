"""Compiles programs for one GPU that need not be there, and says what each binary holds; the work of `compile_check`.

This proves that code is generated: neither that its numbers are right nor that it is fast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.serialize_executable import serialize
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from ddtree_jax.errors import one_line
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.registry import Expected, Registry
from ddtree_jax.pallas.compile_targets import Target

OK, FAILED, NOT_SERVED, SAME_TILES = "ok", "failed", "not served", "same tiles"

# Custom calls that hold a kernel: Pallas-Triton; jax-triton; Mosaic GPU.
_KERNEL_TARGETS = re.compile(r"xla\.gpu\.triton|triton_kernel_call|mosaic_gpu")
_KERNEL_PRIMITIVES = {"pallas_call", "triton_kernel_call", "mosaic_gpu_kernel", "core_map", "mpmd_map"}
_CUSTOM_CALL = re.compile(r'custom_call_target="([^"]+)"(?:[^\n]*?op_name="([^"]*)")?')
_PTXAS_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_PTXAS_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
_OPAQUE = re.compile(r'opaque = "((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-9A-F]{2}|.)", re.DOTALL)
_NUMBER = re.compile(r"\d+")
_ERROR_CHARACTERS = 1000


@dataclasses.dataclass
class Program:
    """One implementation of one case, compiled.

    Attributes:
      status: OK, FAILED, NOT_SERVED (NotImplementedError, in `detail`), or SAME_TILES: not compiled, for an earlier
        case has the same kernels with the same tiles.
      detail: what is wrong, or why it is not served.
      sm: target strings in the binary.
      kernels: names of the custom calls that hold kernels, as in the optimised HLO.
      custom_calls: targets of all custom calls.
      resources: entry function -> registers, bytes of the stack frame and of register spills, as ptxas says.
      seconds: of tracing and compiling.
    """

    op: str
    implementation: str
    case: str
    status: str = OK
    detail: str = ""
    sm: list[str] = dataclasses.field(default_factory=list)
    kernels: list[str] = dataclasses.field(default_factory=list)
    custom_calls: list[str] = dataclasses.field(default_factory=list)
    resources: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


class Compiler:
    """Compiles for one target. One a process: Mosaic GPU keeps the first architecture that it meets."""

    def __init__(self, target: Target):
        self.target = target
        topology = target.topology()
        self._device = topology.devices[0]
        self._mesh = topologies.make_mesh(topology, (1,), ("device",))
        self._sharding = NamedSharding(self._mesh, PartitionSpec())
        self._seen: set[tuple[str, str, str]] = set()

    def check(
        self, run: Callable[..., Any], case: Case, implementation: str, expected: Expected, *, every: bool
    ) -> Program:
        """Compiles `run(*arrays, platform=, **static)` at the shapes of `case`.

        Args:
          expected: what the program must hold.
          every: also compile what has the tiles of an earlier case.
        """
        program = Program(case.op, implementation, case.name)
        start = time.perf_counter()
        try:
            self._compile(run, case, expected, every, program)
        except NotImplementedError as error:
            program.status, program.detail = NOT_SERVED, one_line(error)
        except Exception as error:  # whatever it is, this program does not compile and the next may
            program.status, program.detail = FAILED, f"{type(error).__name__}: {_short(error)}"
        program.seconds = round(time.perf_counter() - start, 3)
        return program

    def _compile(self, run: Callable[..., Any], case: Case, expected: Expected, every: bool, program: Program) -> None:
        specs = jax.eval_shape(case.make, jax.random.key(0))
        with jax.default_device(self._device), use_abstract_mesh(self._mesh.abstract_mesh):
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), specs)
            traced = jax.jit(lambda *arrays: run(*arrays, platform=self.target.platform, **case.static)).trace(*specs)
            named = [name for name in map(pallas_name, kernel_equations(traced.jaxpr)) if name]
            key = (case.op, program.implementation, tile_fingerprint(traced.jaxpr))
            if key in self._seen and not every:
                program.status, program.kernels = SAME_TILES, named
                return
            with tempfile.TemporaryDirectory() as folder:
                # PTX alone: the dump of every Triton pass takes seconds a kernel.
                options = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
                compiled = traced.lower(lowering_platforms=("cuda",)).compile(options)
                ptx = [path.read_text() for path in sorted(pathlib.Path(folder).glob("*.ptx"))]
        text = compiled.as_text()
        ptx += [*_jax_triton_ptx(text), *_mosaic_ptx()]
        binary = serialize(compiled)[0]
        program.sm = sorted({found.decode() for found in re.findall(rb"sm_\d+a?", binary)})
        program.custom_calls = sorted({target for target, _ in _CUSTOM_CALL.findall(text)})
        program.kernels = sorted(kernels_in(text))
        for one in ptx:
            program.resources |= resources(one, self.target.sm)
        problems = list(self._problems(program, named, expected, case, "\n".join([*ptx, text])))
        if problems:
            program.status, program.detail = FAILED, "; ".join(problems)
        else:
            self._seen.add(key)

    def _problems(self, program: Program, named: list[str], expected: Expected, case: Case, code: str) -> Iterator[str]:
        if expected.kernel:
            if self.target.sm not in program.sm:
                yield f"the binary is for {', '.join(program.sm) or 'no GPU'}, not for {self.target.sm}"
            if not program.kernels:
                yield "there is no kernel in the compiled program: it fell back to plain XLA"
            missing = sorted(set(named) - set(program.kernels))
            if missing:
                yield f"the kernels {', '.join(missing)} are not in the compiled program"
        elif program.kernels:
            yield f"meant to be plain XLA, and holds the kernels {', '.join(program.kernels)}"
        for wanted in (*expected.code.get(self.target.name, ()), *case.code.get(self.target.name, ())):
            if wanted not in code:
                yield f"{wanted!r} is neither in the PTX nor in the HLO"


def check_all(
    compiler: Compiler, registry: Registry, *, every: bool, started: Callable[[Case, str], None]
) -> Iterator[Program]:
    """Each case with each implementation but the reference; `started` is told before a program is compiled."""
    for case, implementation in registry.pairs():
        if case.compile_slow and not every:
            continue
        started(case, implementation)
        run = registry.ops[case.op].implementations[implementation]
        expected = registry.expected.get((case.op, implementation), Expected())
        yield compiler.check(run, case, implementation, expected, every=every)


def kernels_in(hlo: str) -> set[str]:
    """Names of the kernels in an optimised HLO text: the scope that `name=` of the kernel makes."""
    found = set()
    for target, op_name in _CUSTOM_CALL.findall(hlo):
        if _KERNEL_TARGETS.search(target):
            *_, scope, last = ("", *op_name.split("/"))
            # jax-triton's calls have no name but that of a `named_scope` around them.
            found.add(scope if last in _KERNEL_PRIMITIVES and scope and not scope.startswith("jit(") else last)
    return found


def kernel_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations that launch kernels, those of inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in _KERNEL_PRIMITIVES:
            yield equation
            continue
        for inner in _inner(equation):
            yield from kernel_equations(inner)


def pallas_name(equation: Any) -> str | None:
    return equation.params.get("name") if equation.primitive.name == "pallas_call" else None


def tile_fingerprint(jaxpr: Any) -> str:
    """Equal for programs whose kernels do the same things to tiles of the same shapes and dtypes.

    The shapes of whole arrays, grids and trip counts are left out, and with them the numbers in names: they change no
    code but its constants.
    """
    parts: set[str] = set()
    for equation in kernel_equations(jaxpr):
        name = _NUMBER.sub("#", pallas_name(equation) or "")
        parts.add(f"{equation.primitive.name} {name} {equation.params.get('compiler_params')}")
        inner = list(_inner(equation))
        for one in inner:
            parts.update(_tiles(one))
        if not inner:  # jax-triton: the kernel is not a jaxpr, its constants are parameters
            parts.add(str(equation.params))
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _tiles(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            aval = variable.aval
            if type(aval).__name__ == "ShapedArray" and aval.shape:
                yield f"{equation.primitive.name} {aval.str_short()} {equation.params.get('asm', '')}"
        for inner in _inner(equation):
            yield from _tiles(inner)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one


def _jax_triton_ptx(hlo: str) -> Iterator[str]:
    """jax-triton compiles before XLA sees the program; the PTX is in the compressed argument of its custom call."""
    for escaped in _OPAQUE.findall(hlo):
        raw = _ESCAPE.sub(lambda match: _unescape(match[1]), escaped.encode("latin-1", "ignore"))
        try:
            content = zlib.decompress(raw)
        except zlib.error:
            continue
        yield content.decode("latin-1")


def _unescape(code: bytes) -> bytes:
    return {b"n": b"\n", b"t": b"\t"}.get(code) or (code if len(code) == 1 else bytes([int(code, 16)]))


def _mosaic_ptx() -> Iterator[str]:
    """Mosaic GPU writes what it compiles into a folder that the check gives it."""
    folder = os.environ.get("MOSAIC_GPU_DUMP_TO")
    for path in sorted(pathlib.Path(folder).glob("*.ptx")) if folder else ():
        yield path.read_text()
        path.unlink()


def resources(ptx: str, sm: str) -> dict[str, dict[str, int]]:
    """Entry function -> what ptxas says of it; empty where there is no ptxas among the compilers."""
    ptxas = _ptxas()
    if ptxas is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [ptxas, "-v", f"-arch={sm}", str(path), "-o", str(path.with_suffix(".cubin"))]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    found: dict[str, dict[str, int]] = {}
    entry = None
    for line in lines:
        if match := _PTXAS_ENTRY.search(line):
            entry = found.setdefault(match[1], {})
        elif entry is not None and (match := _PTXAS_SPILLS.search(line)):
            entry |= {"stack": int(match[1]), "spill_stores": int(match[2]), "spill_loads": int(match[3])}
        elif entry is not None and (match := _PTXAS_REGISTERS.search(line)):
            entry["registers"] = int(match[1])
    return found


def _ptxas() -> str | None:
    """That of the compilers' folder, never one that happens to be on this machine."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations or () if spec is not None else ():
            path = pathlib.Path(folder, "bin", "ptxas")
            if path.is_file():
                return str(path)
    return None


def _short(error: Exception) -> str:
    text = one_line(error, limit=10**6)
    if len(text) <= _ERROR_CHARACTERS:
        return text
    return f"{text[: _ERROR_CHARACTERS // 2]} ... {text[-_ERROR_CHARACTERS // 2 :]}"
