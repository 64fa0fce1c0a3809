"""What a model needs on its devices, from headers alone, against what the devices have."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from ddtree_jax.errors import CheckpointError
from ddtree_jax.models.folders import Opened
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
    shared: the devices share that memory (CPU), so it must hold all of them together.
    """

    needs: tuple[Need, ...]
    num_devices: int
    available: int | None
    shared: bool

    @property
    def needed(self) -> int:
        """Bytes that must fit into `available`."""
        per_device = sum(need.per_device for need in self.needs)
        return per_device * self.num_devices if self.shared else per_device

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
        where = "host memory" if self.shared else f"each of {self.num_devices} device(s)"
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
            where = "of host memory" if self.shared else f"on each of {self.num_devices} device(s)"
            raise CheckpointError(
                f"{name}: needs {self.needed / 1e9:.2f} GB {where}, of which {self.available / 1e9:.2f} GB are free "
                f"({100 * HEADROOM:.0f} % of that may be used); expected a smaller or quantised checkpoint, or more "
                "devices (mesh=); `ddtree-jax doctor --target DIR` shows the table"
            )


def estimate(target: Opened, drafter: Opened | None, *, context: int, batch: int = 1) -> Capacity:
    """What a pair needs with caches of `context` tokens for each of `batch` sequences."""
    mesh = target.mesh
    needs = [_weights("target weights", target)]
    caches = [_cache("target cache", target, context, batch)]
    if drafter is not None:
        needs.append(_weights("drafter weights", drafter))
        caches.append(_cache("drafter cache", drafter, context, batch))
    available, shared = free_memory(mesh)
    return Capacity((*needs, *caches), 1 if mesh is None else mesh.size, available, shared)


def _weights(what: str, opened: Opened) -> Need:
    total = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in opened.leaves.values())
    return Need(what, total, opened.bytes_per_device())


def _cache(what: str, opened: Opened, context: int, batch: int) -> Need:
    graphdef, params = opened.abstract

    def empty(params: Any) -> Any:
        return nnx.merge(graphdef, params).empty_cache(batch, context)

    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(empty, params)))
    ways = axis_size(opened.mesh, EXPERT)
    return Need(f"{what}, {batch} x {context} tokens", total, total // ways if batch % ways == 0 else total)


def free_memory(mesh: Mesh | AbstractMesh | None) -> tuple[int | None, bool]:
    """(bytes free on the device that has least, whether all devices share them)."""
    if isinstance(mesh, AbstractMesh):  # devices that are not here
        return None, False
    devices = jax.local_devices()[:1] if mesh is None else [d for d in mesh.devices.flat if d in jax.local_devices()]
    if not devices:
        raise ValueError(
            f"mesh: got {mesh!r}, which has no device of process {jax.process_index()}; allowed is a mesh over devices "
            "of all processes"
        )
    if devices[0].platform == "cpu":
        return host_memory_free(), True
    stats = [device.memory_stats() or {} for device in devices]
    free = [s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
    return (min(free) if free else None), False


def host_memory_free() -> int:
    """Bytes of host memory that a program can still get."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
