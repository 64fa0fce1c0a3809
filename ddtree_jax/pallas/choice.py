"""Which implementations a model runs on: a static value that its modules carry."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import HOPPER, HOST, Platform, current_platform
from ddtree_jax.pallas.dispatch import REFERENCE

AUTO, ALL = "auto", "all"
KERNELS = (AUTO, ALL, REFERENCE)
# Where kernels have been run and checked; elsewhere they only compile.
RUN_ON = (HOPPER,)


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """Static and hashable.

    Attributes:
      platform: whose order each operation follows; the host's has references only.
      named: (operation, implementation) pairs that override the order; a named one never falls back.
    """

    platform: Platform = HOST
    named: tuple[tuple[str, str], ...] = ()

    @property
    def any(self) -> bool:
        """Whether some operation may run as a kernel, so that weights and caches come in the kernels' form."""
        return self.platform.has_kernels

    def run(self, op: str, *args: Any, **kwargs: Any) -> Any:
        """`api.OPS[op]` on this platform."""
        return OPS[op](*args, implementation=dict(self.named).get(op), platform=self.platform, **kwargs)


def choose_kernels(name: str, *, split: bool = False) -> KernelChoice:
    """The choice of `load(kernels=)`.

    Args:
      name: "auto", the kernels of this device if they have ever been run on its generation; "all", also those that
        have only been compiled; "reference", plain JAX.
      split: parameters lie on several devices: references, which XLA can partition.
    """
    if name not in KERNELS:
        raise ValueError(f"kernels: got {name!r}, allowed are {', '.join(KERNELS)}")
    platform = HOST if name == REFERENCE or split else current_platform()
    return KernelChoice(platform) if name == ALL or platform.generation in RUN_ON else KernelChoice()
