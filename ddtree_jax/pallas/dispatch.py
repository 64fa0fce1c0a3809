"""How an operation chooses among its implementations. `api` holds the table; this holds the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ddtree_jax.pallas.backend import Platform, current_platform

REFERENCE = "reference"

Implementation = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation: functions of one signature, by name. Each also takes `platform`.

    A function that cannot serve a platform, shape or dtype raises NotImplementedError with the reason, before it has
    traced anything; that is the only way to say so. ValueError is for arguments that no implementation takes.

    Attributes:
      name: of the operation.
      implementations: name -> function; `reference`, plain JAX, serves everything.
      order: generation -> names, the preferred first. What is not listed is used only when named; the reference is
        always tried last.
    """

    name: str
    implementations: Mapping[str, Implementation]
    order: Mapping[str, tuple[str, ...]]

    def names(self, platform: Platform) -> tuple[str, ...]:
        """The implementations that are tried on a platform, in order."""
        listed = self.order.get(platform.generation, ())
        return (*(name for name in listed if name != REFERENCE), REFERENCE)

    def __call__(
        self, *args: Any, implementation: str | None = None, platform: Platform | None = None, **kwargs: Any
    ) -> Any:
        """Runs the named implementation, or the first of the order that can.

        Args:
          *args, **kwargs: as for `implementations[...]`.
          implementation: a name; it never falls back. None: the order of the platform.
          platform: None: that of the device.

        Raises:
          NotImplementedError: the named implementation cannot serve this call.
          ExceptionGroup: none of the order can.
          ValueError: an unknown name.
        """
        platform = current_platform() if platform is None else platform
        if implementation is not None:
            run = self._named(implementation)
            with jax.named_scope(f"{self.name}_{implementation}"):
                return run(*args, platform=platform, **kwargs)
        reasons = []
        for name in self.names(platform):
            try:
                with jax.named_scope(f"{self.name}_{name}"):
                    return self.implementations[name](*args, platform=platform, **kwargs)
            except NotImplementedError as error:
                reasons.append(NotImplementedError(f"{name}: {error}"))
        raise ExceptionGroup(f"{self.name}: no implementation can serve this call on {platform.generation}", reasons)

    def explain(self, *args: Any, platform: Platform | None = None, **kwargs: Any) -> dict[str, str | None]:
        """Name -> None where it could serve the call, else the reason; arguments may be `jax.ShapeDtypeStruct`s."""
        platform = current_platform() if platform is None else platform
        out: dict[str, str | None] = {}
        for name in dict.fromkeys((*self.names(platform), *self.implementations)):
            run = self.implementations[name]
            try:
                jax.eval_shape(lambda *a, run=run: run(*a, platform=platform, **kwargs), *args)
                out[name] = None
            except NotImplementedError as error:
                out[name] = str(error)
        return out

    def _named(self, name: str) -> Implementation:
        if name not in self.implementations:
            raise ValueError(
                f"implementation: got {name!r} for {self.name}; allowed: {', '.join(self.implementations)}"
            )
        return self.implementations[name]
