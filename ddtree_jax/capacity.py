"""What a model needs on its devices, from headers alone, against what the devices have."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.folders import Opened, leaf_bytes_per_device
from ddtree_jax.models.kernels import leaves_on_kernels
from ddtree_jax.models.sharding import EXPERT, axis_size

CHECKED_CONTEXT = 4096  # tokens of one sequence for which `load` wants room beside the weights
HEADROOM = 0.95  # of a device's memory; programs and activations need the rest


@dataclasses.dataclass(frozen=True)
class Need:
    """One thing that takes memory: bytes in all, and on the fullest device."""

    what: str
    total: int
    per_device: int


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Needs against devices.

    needs: weights and caches.
    num_devices: over which they are spread.
    available: bytes that a device has free; None where JAX does not say.
    sharing: that many devices share it, as host memory (CPU); 0 where each has its own.
    """

    needs: tuple[Need, ...]
    num_devices: int
    available: int | None
    sharing: int

    @property
    def on_host(self) -> bool:
        return self.sharing > 0

    @property
    def needed(self) -> int:
        """Bytes that must fit into `available`."""
        per_device = sum(need.per_device for need in self.needs)
        return per_device * max(self.sharing, 1)

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= HEADROOM * self.available

    def table(self) -> str:
        """The needs, line by line, in GB of 10^9 bytes."""
        lines = [f"{'memory needed':34} {'in all':>10} {'a device':>10}"]
        for need in self.needs:
            lines.append(f"  {need.what:32} {need.total / 1e9:7.2f} GB {need.per_device / 1e9:7.2f} GB")
        total, most = sum(n.total for n in self.needs), sum(n.per_device for n in self.needs)
        lines.append(f"  {'sum':32} {total / 1e9:7.2f} GB {most / 1e9:7.2f} GB")
        where = "host memory" if self.on_host else f"each of {self.num_devices} device(s)"
        if self.available is None:
            lines.append(f"  available: unknown ({where})")
        else:
            verdict = "fits" if self.fits else "does not fit"
            free = self.available / 1e9
            lines.append(f"  {where}: {free:.2f} GB free, {self.needed / 1e9:.2f} GB needed: {verdict}")
        return "\n".join(lines)

    def require(self, name: str) -> None:
        """Raises `CheckpointError` unless everything fits."""
        if not self.fits:
            where = "of host memory" if self.on_host else f"on each of {self.num_devices} device(s)"
            raise CheckpointError(
                f"{name}: needs {self.needed / 1e9:.2f} GB {where}, of which {self.available / 1e9:.2f} GB are free "
                f"({100 * HEADROOM:.0f} % of that may be used); expected a smaller or quantised checkpoint, or more "
                "devices (mesh=); `ddtree-jax doctor --target DIR` shows the table"
            )


def estimate(
    target: Opened,
    drafter: Opened | None,
    *,
    context: int,
    batch: int = 1,
    kernels: bool = False,
) -> Capacity:
    """What a pair needs, on GPU kernels or not, with caches of `context` tokens for each of `batch` sequences."""
    mesh = target.mesh
    needs = [_weights("target weights", target, kernels)]
    caches = [_cache("target cache", target, context, batch)]
    if drafter is not None:
        needs.append(_weights("drafter weights", drafter, kernels))
        caches.append(_cache("drafter cache", drafter, context, batch))
    return Capacity((*needs, *caches), 1 if mesh is None else mesh.size, *free_memory(mesh))


def _weights(what: str, opened: Opened, kernels: bool) -> Need:
    leaves = list((leaves_on_kernels(opened) if kernels else opened.leaves).values())
    total = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
    return Need(what, total, leaf_bytes_per_device(leaves))


def _cache(what: str, opened: Opened, context: int, batch: int) -> Need:
    graphdef, params = opened.abstract

    def empty(params: Any) -> Any:
        return nnx.merge(graphdef, params).empty_cache(batch, context)

    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(empty, params)))
    ways = axis_size(opened.mesh, EXPERT)
    return Need(f"{what}, {batch} x {context} tokens", total, total // ways if batch % ways == 0 else total)


def free_memory(mesh: Mesh | AbstractMesh | None) -> tuple[int | None, int]:
    """(bytes free on the device of this process that has least, how many devices share them as host memory or 0)."""
    if isinstance(mesh, AbstractMesh):  # devices that are not here
        return None, 0
    devices = jax.local_devices()[:1] if mesh is None else [d for d in mesh.devices.flat if d in jax.local_devices()]
    if not devices:
        raise ValueError(
            f"mesh: got {mesh!r}, which has no device of process {jax.process_index()}; allowed is a mesh over devices "
            "of all processes"
        )
    if devices[0].platform == "cpu":
        return host_memory_free(), len(devices)
    stats = [device.memory_stats() or {} for device in devices]
    free = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
    return (min(free) if free else None), 0


def host_memory_free() -> int:
    """Bytes of host memory that a program can still get, the limit of its container considered."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), free)
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit ("max")
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, max(limit - used, 0))
    return free
