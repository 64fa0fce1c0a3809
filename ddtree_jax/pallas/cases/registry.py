"""Every operation with its cases: what the compile check, the benchmark and `doctor --kernels` go through."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import pkgutil
import runpy
from collections.abc import Iterator, Mapping

from ddtree_jax.errors import one_line
from ddtree_jax.pallas import cases
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.dispatch import REFERENCE, Op


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a compiled implementation must hold; a case module gives it as `EXPECTED = {implementation: Expected(...)}`.

    Attributes:
      kernel: False for an implementation in plain XLA. Without an entry every implementation but the reference must
        hold each kernel that its trace names, and at least one.
      code: key of `compile_targets.TARGETS` -> strings of which each is in the PTX, of any of the program's kernels,
        or in the optimised HLO.
    """

    kernel: bool = True
    code: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Registry:
    """Attributes:
    ops: name -> operation.
    cases: of all of them; an operation's first case stands for it where one is enough.
    expected: (operation, implementation) -> what its programs hold.
    """

    ops: Mapping[str, Op]
    cases: tuple[Case, ...]
    expected: Mapping[tuple[str, str], Expected] = dataclasses.field(default_factory=dict)

    def select(self, op: str | None = None, case: str | None = None) -> Registry:
        """The cases of one operation, or those with `case` in their names.

        Raises:
          ValueError: an unknown operation, or no case left.
        """
        if op is not None and op not in self.ops:
            raise ValueError(f"op: got {op!r}; allowed: {', '.join(self.ops) or 'none, there is no operation'}")
        kept = tuple(one for one in self.cases if op in (None, one.op) and (case is None or case in one.name))
        if self.cases and not kept:
            raise ValueError(f"case: no name of a case has {case!r} in it")
        return dataclasses.replace(self, cases=kept)

    def pairs(self, *, reference: bool = False) -> Iterator[tuple[Case, str]]:
        """Each case with each implementation of its operation; the reference last, if at all."""
        for case in self.cases:
            names = [name for name in self.ops[case.op].implementations if name != REFERENCE]
            yield from ((case, name) for name in (*names, *((REFERENCE,) if reference else ())))


def load_registry(file: str | pathlib.Path | None = None) -> Registry:
    """The operations of `api.OPS` with the cases of every module here, or those of a Python file.

    Args:
      file: defines OPS, CASES and, if need be, EXPECTED: {(operation, implementation): Expected}.

    Raises:
      ValueError: a case of an unknown operation, or a file that cannot be run or lacks one of these names.
    """
    if file is not None:
        try:
            names = runpy.run_path(str(file))
            given = Registry(names["OPS"], tuple(names["CASES"]), names.get("EXPECTED", {}))
        except Exception as error:  # whatever a user's program raises
            raise ValueError(f"ops: got {file}, which does not give OPS and CASES: {one_line(error)}") from error
        return _checked(given)
    from ddtree_jax.pallas.api import OPS

    found: list[Case] = []
    expected: dict[tuple[str, str], Expected] = {}
    for info in pkgutil.iter_modules(cases.__path__):
        module = importlib.import_module(f"{cases.__name__}.{info.name}")
        mine = tuple(getattr(module, "CASES", ()))
        found += mine
        for op in dict.fromkeys(case.op for case in mine):
            for implementation, one in getattr(module, "EXPECTED", {}).items():
                if implementation in OPS[op].implementations:
                    expected[op, implementation] = one
    return _checked(Registry(OPS, tuple(found), expected))


def _checked(registry: Registry) -> Registry:
    for case in registry.cases:
        if case.op not in registry.ops:
            raise ValueError(f"case {case.name!r}: its operation {case.op!r} is not in the table of operations")
    for op, implementation in registry.expected:
        if op not in registry.ops or implementation not in registry.ops[op].implementations:
            raise ValueError(f"EXPECTED: there is no implementation {implementation!r} of {op!r}")
    return registry
