"""`ddtree-jax doctor`: what this installation has, and for what is missing, why and what to do."""

import collections
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import platform
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ddtree_jax
from ddtree_jax.errors import one_line

if TYPE_CHECKING:
    from ddtree_jax.capacity import Capacity
    from ddtree_jax.models.folders import Opened
    from ddtree_jax.pallas.cases.base import Case
    from ddtree_jax.pallas.kernel_report import KernelReport

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors", "orbax-checkpoint", "chex")
# Package -> the extra that brings it, and what for.
_OPTIONAL = {
    "llguidance": ("grammar", "constrained decoding"),
    "grpcio": ("serving", "the server and its client"),
    "grpcio-health-checking": ("serving", "the server and its client"),
    "grpcio-reflection": ("serving", "the server and its client"),
    "prometheus-client": ("serving", "the server and its client"),
    "smg-grpc-proto": ("serving", "the server and its client"),
    "huggingface-hub": ("hub", "names of Hugging Face repositories"),
    "matplotlib": ("viz", "figures"),
}
_CUDA_EXTRA = "pip install 'ddtree-jax[cuda]'"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      name: what was looked at.
      value: what was found; for something that is missing, the reason and what to do.
      status: "ok", "info" (missing, and nobody needs it here) or "bad" (missing, and the package needs it).
    """

    name: str
    value: str
    status: str = "ok"


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return all(finding.status != "bad" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def text(self) -> str:
        marks = {"ok": "ok  ", "info": "--  ", "bad": "BAD "}
        width = max(len(finding.name) for finding in self.findings)
        lines = [f"{marks[f.status]}{f.name:<{width}}  {f.value}" for f in self.findings]
        verdict = "everything that this package needs is there" if self.healthy else "something needed is missing"
        return "\n".join([*lines, verdict])


def examine() -> Report:
    """Looks at everything. A check that fails becomes a finding and does not end the report."""
    checks: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
        ("versions", _versions),
        ("devices", _devices),
        ("CUDA plugin", _cuda),
        ("kernels", _kernels),
        ("demo pair", _demo),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except Exception as error:  # the whole point is to report it
            findings.append(Finding(name, f"not available: {type(error).__name__}: {one_line(error)}", "bad"))
    return Report(tuple(findings))


@dataclasses.dataclass(frozen=True)
class FolderReport:
    """What model folders hold and need. `folders`: one (name, value) list a folder; `capacity`: the table."""

    folders: tuple[tuple[tuple[str, str], ...], ...]
    capacity: "Capacity"

    def to_dict(self) -> dict[str, Any]:
        needs = [dataclasses.asdict(need) for need in self.capacity.needs]
        capacity = {"needs": needs, "available": self.capacity.available, "fits": self.capacity.fits}
        folders = [[" ".join(line).strip() for line in lines] for lines in self.folders]
        return {"folders": folders, "capacity": capacity}

    def text(self) -> str:
        lines = [f"{name:<12}{value}" for folder in self.folders for name, value in folder]
        return "\n".join([*lines, self.capacity.table()])


def examine_folders(
    target: str,
    drafter: str | None,
    *,
    dtype: Any = "auto",
    mesh_sizes: tuple[int, int] | None = None,
    context: int = 4096,
    batch: int = 1,
) -> FolderReport:
    """Opens folders by their headers alone and says what they hold and what memory they need.

    Args:
      target, drafter: as for `load`.
      dtype: as for `load`.
      mesh_sizes: (expert, tensor); the devices need not be here.
      context: tokens of each sequence's cache.
      batch: sequences.

    Raises:
      CheckpointError, ValueError: as `load`.
    """
    import jax

    from ddtree_jax.capacity import estimate
    from ddtree_jax.engine import open_pair
    from ddtree_jax.models.sharding import make_mesh

    for name, value in (("context", context), ("batch", batch)):
        if not 1 <= value < 2**31:
            raise ValueError(f"{name}: got {value}, allowed is an integer >= 1")
    mesh = None
    if mesh_sizes is not None:
        abstract = mesh_sizes[0] * mesh_sizes[1] > jax.device_count()
        mesh = make_mesh(*mesh_sizes, devices="abstract" if abstract else None)
    pair = open_pair(target, drafter, dtype=dtype, mesh=mesh)
    opened = [folder for folder in (pair.target, pair.drafter) if folder is not None]
    capacity = estimate(pair.target, pair.drafter, context=context, batch=batch, kernels=pair.kernels.any)
    return FolderReport(tuple(_folder(folder) for folder in opened), capacity)


# Cases that do not fit are in the report as left out.
_KERNELS_BUDGET_S = 1200.0


def examine_kernels(progress: Callable[[str], None] = lambda text: None) -> "KernelReport":
    """Checks the numbers of every kernel on this machine, and times it.

    Raises:
      UnsupportedRequestError: no kernel runs on this machine.
    """
    from ddtree_jax.errors import UnsupportedRequestError
    from ddtree_jax.pallas.backend import current_platform, require_kernels
    from ddtree_jax.pallas.cases.registry import load_registry
    from ddtree_jax.pallas.kernel_report import measure_kernels

    platform = current_platform()
    try:
        require_kernels(platform)
    except NotImplementedError as error:
        raise UnsupportedRequestError(f"--kernels {error}") from None
    return measure_kernels(load_registry(), platform, budget_s=_KERNELS_BUDGET_S, progress=progress)


def _folder(opened: "Opened") -> tuple[tuple[str, str], ...]:
    kinds: dict[str, int] = collections.Counter(tensor.encoding.value for tensor in opened.stored.values())
    encodings = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if opened.converted is not None:
        encodings = f"converted, {len(opened.leaves)} arrays in {opened.dtype.name}"
    parameters = sum(math.prod(spec.shape) for spec in opened.specs())
    name = opened.kind.__name__.lower()
    return (
        (name, str(opened.folder)),
        ("", f"{parameters / 1e9:.3f} billion parameters, {opened.bytes_on_disk / 1e9:.3f} GB on disk"),
        ("", f"weights: {encodings}{opened.ignored}"),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> list[Finding]:
    findings = [
        Finding("ddtree-jax", ddtree_jax.__version__),
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    for package in _PACKAGES:
        version = _version(package)
        if version is None:
            findings.append(Finding(package, f"not available: not installed; pip install {package}", "bad"))
        else:
            findings.append(Finding(package, version))
    for package, (extra, purpose) in _OPTIONAL.items():
        version = _version(package)
        if version is None:
            value = f"not available: not installed; needed for {purpose} only: pip install 'ddtree-jax[{extra}]'"
            findings.append(Finding(package, value, "info"))
        else:
            findings.append(Finding(package, version))
    return findings


def _devices() -> list[Finding]:
    import jax

    findings = [Finding("backend", jax.default_backend())]
    for device in jax.devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            limit, used = stats["bytes_limit"] / 2**30, stats.get("bytes_in_use", 0) / 2**30
            memory = f"{limit:.1f} GiB for JAX, {used:.1f} in use"
        else:
            memory = f"{_host_memory_gib():.1f} GiB of host memory, {os.cpu_count()} cores"
        findings.append(Finding(f"device {device.id}", f"{device.device_kind} ({device.platform}), {memory}"))
    x64 = bool(jax.config.jax_enable_x64)
    findings.append(Finding("x64", "on; this package works in 32 bits all the same" if x64 else "off"))
    return findings


def _host_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _cuda() -> list[Finding]:
    import jax

    # jax[cuda13] brings jax-cuda13-plugin; an older plugin is told by its own name
    plugins = [(f"jax-cuda{major}-plugin", _version(f"jax-cuda{major}-plugin")) for major in (13, 12)]
    installed = [f"{name} {version}" for name, version in plugins if version is not None]
    has_gpu = pathlib.Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    on_gpu = jax.default_backend() == "gpu"
    if installed and on_gpu:
        return [Finding("CUDA plugin", ", ".join(installed)), _jax_triton()]
    if installed:
        reason = "no NVIDIA driver was found" if not has_gpu else "JAX did not start it"
        value = f"not available: {', '.join(installed)} is installed, but {reason}; check nvidia-smi"
        return [Finding("CUDA plugin", f"{value} and JAX_PLATFORMS", "info")]
    if has_gpu:
        value = f"not available: an NVIDIA driver is here and the plugin is not installed; {_CUDA_EXTRA}"
    else:
        value = f"not available: no NVIDIA driver on this machine; on one with a GPU: {_CUDA_EXTRA}"
    return [Finding("CUDA plugin", value, "info")]


def _jax_triton() -> Finding:
    version = _version("jax-triton")
    if version is None:
        value = f"not available: not installed; needed for native FP4 products on Blackwell only: {_CUDA_EXTRA}"
        return Finding("jax-triton", value, "info")
    return Finding("jax-triton", f"{version}, for native FP4 products on Blackwell")


def _kernels() -> list[Finding]:
    """Which implementation of each operation this machine takes for a representative call, and why not the others."""
    from ddtree_jax.pallas.backend import current_platform
    from ddtree_jax.pallas.cases.registry import load_registry
    from ddtree_jax.pallas.choice import RUN_ON
    from ddtree_jax.pallas.dispatch import REFERENCE

    registry = load_registry()
    platform = current_platform()
    unproven = platform.has_kernels and platform.generation not in RUN_ON
    asked = ", only with kernels='all': never run on such a GPU" if unproven else ""
    findings = []
    for name, op in registry.ops.items():
        case = next((case for case in registry.cases if case.op == name and case.is_for(platform)), None)
        if case is None:
            continue
        reasons = op.explain(*_shapes(case), platform=platform, **case.static)
        taken = next((one for one in op.names(platform) if reasons[one] is None), None)
        others = [
            f"{one}: {reason or 'by name only'}"
            for one, reason in reasons.items()
            if one != taken and (reason or one != REFERENCE)
        ]
        because = f" ({'; '.join(others)})" if others else ""
        if taken is None:
            findings.append(Finding(f"kernel {name}", f"not available: nothing serves {case.name}{because}", "bad"))
        elif taken == REFERENCE and others:
            findings.append(Finding(f"kernel {name}", f"not available: plain JAX serves{because}", "info"))
        else:
            findings.append(Finding(f"kernel {name}", f"{taken} for {case.name}{asked}{because}"))
    return findings


def _shapes(case: "Case") -> tuple[Any, ...]:
    import jax

    return jax.eval_shape(case.make, jax.random.key(0))


def _demo() -> list[Finding]:
    folder = pathlib.Path(ddtree_jax.__file__).parent / "demo"
    if not folder.is_dir():
        value = "not available: the folder ddtree_jax/demo is missing; install the package again"
        return [Finding("demo pair", value, "bad")]
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    start = time.perf_counter()
    engine = ddtree_jax.load("demo")
    seconds = time.perf_counter() - start
    if engine.drafter is None or engine.tokenizer is None:
        missing = "drafter" if engine.drafter is None else "tokenizer"
        return [Finding("demo pair", f"not available: it has no {missing}; install the package again", "bad")]
    return [Finding("demo pair", f"{size:.1f} MiB on disk, loaded in {seconds:.1f} s")]
