"""Which implementations a model runs on: a static value that its modules carry."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import HOPPER, HOST, Platform, current_platform, require_wgmma
from ddtree_jax.pallas.dispatch import REFERENCE
from ddtree_jax.pallas.nvfp4_grid import BYTES, FRAGMENTS, SHIFTED

AUTO, ALL = "auto", "all"
KERNELS = (AUTO, ALL, REFERENCE)
# Where kernels have been run and checked; elsewhere they only compile.
RUN_ON = (HOPPER,)


@dataclasses.dataclass(frozen=True)
class Specs:
    """How an operation's arguments and results lie over a mesh; each device runs it on its own part.

    Attributes:
      operands: a `PartitionSpec`, or a tree of them, an argument; those beyond are whole on every device.
      results: of the results, one or a tree.
      sums: mesh axes along which the devices' results are parts of one sum.
    """

    operands: tuple[Any, ...] = ()
    results: Any = P()
    sums: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """Static and hashable.

    Attributes:
      platform: whose order each operation follows; the host's has references only.
      named: (operation, implementation) pairs that override the order; a named one never falls back.
      mesh: over which the model lies; None: one device. Of several devices, XLA cannot split a kernel by itself.
    """

    platform: Platform = HOST
    named: tuple[tuple[str, str], ...] = ()
    mesh: Mesh | AbstractMesh | None = None

    @property
    def any(self) -> bool:
        """Whether some operation may run as a kernel, so that weights and caches come in the kernels' form."""
        return self.platform.has_kernels

    @property
    def fp4_arrangement(self) -> str:
        """How NVFP4 weights are laid out for this platform's kernels (`nvfp4_grid`)."""
        if self.platform.converts_fp4:
            return BYTES
        # Mosaic's interpreter takes seconds for the smallest product.
        if self.platform.interpret:
            return SHIFTED
        try:
            require_wgmma(self.platform)
        except NotImplementedError:
            return SHIFTED
        return FRAGMENTS

    def run(self, op: str, *args: Any, specs: Specs | None = None, **kwargs: Any) -> Any:
        """`api.OPS[op]` on this platform.

        Args:
          *args: arrays, trees of them, None.
          specs: over a mesh, where the arguments lie; None: all whole on every device, as the results then are.
          **kwargs: static.
        """
        call = functools.partial(OPS[op], implementation=dict(self.named).get(op), platform=self.platform, **kwargs)
        if self.mesh is None:
            return call(*args)
        specs = Specs() if specs is None else specs

        def local(*own: Any) -> Any:
            out = call(*own)
            return jax.lax.psum(out, specs.sums) if specs.sums else out

        operands = (*specs.operands, *[P()] * (len(args) - len(specs.operands)))
        split = jax.shard_map(local, mesh=self.mesh, in_specs=operands, out_specs=specs.results, check_vma=False)
        return split(*args)


def choose_kernels(name: str, *, split: bool = False) -> KernelChoice:
    """The choice of `load(kernels=)`.

    Args:
      name: "auto", the kernels of this device if they have ever been run on its generation; "all", also those that
        have only been compiled; "reference", plain JAX.
      split: the model lies over a mesh: no mesh of GPUs has run kernels yet, so "auto" is plain JAX there.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels: got {name!r}, allowed are {', '.join(KERNELS)}")
    platform = HOST if name == REFERENCE else current_platform()
    run_there = platform.generation in RUN_ON and not split
    return KernelChoice(platform) if name == ALL or run_there else KernelChoice()
