"""What a measured and checked call of an operation is: shared by the tests, the benchmark and `doctor --kernels`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from ddtree_jax.pallas.backend import Platform

WHOLE = -1  # in `Case.carries`, the result as a whole


@dataclasses.dataclass(frozen=True)
class Baseline:
    """What is put beside a case and needs arrays of its own, such as the weights in another format.

    run: function of the arrays of `make`. make, traffic, rotate: as for `Case`.
    """

    run: Callable[..., Any]
    make: Callable[[jax.Array], tuple[Any, ...]]
    traffic: int
    rotate: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operation at a real shape.

    Attributes:
      op: key of `api.OPS`.
      name: which shape of which model, for example "glm5 dense_down, 16 rows".
      make: key -> the call's arrays (a tuple of pytrees), random, all in the dtypes that are served. It is
        traced, for the shapes without the arrays.
      static: keyword arguments of the call.
      traffic: bytes that must move at least: weights, caches and activations, each read or written once.
      flops: operations that must be done at least (a multiply-add counts two).
      tolerance: largest relative error against `exact`, ||out - exact|| / ||exact||.
      exact: the arrays of `make` -> the result in float64 on the host, or None where an exact check is made in
        another way (`check`).
      check: (arrays, result) -> relative error, in place of `exact`: for results too large to work out whole.
      baselines: name -> function of the same arrays that does the same work in plain XLA, for the table; or a
        `Baseline`, where that needs other arrays.
      rotate: indices of the arguments whose bytes are to come from memory and not from the L2 cache; the benchmark
        keeps several copies of them.
      carries: index in the result (a tuple) -> index of the argument that it takes the place of, for an operation that
        changes a cache in place: the benchmark feeds it into the next call, where a second use of the argument would
        cost a copy of it.
      code: key of `compile_targets.TARGETS` -> strings that a program of this case holds, beside `registry.Expected`.
      generations: of GPUs that this case is measured on, where its arrays are laid out for some alone; None: of all.
      compile_slow: left out of the compile check unless every case is asked for: another case of the operation has
        nearly its code.
    """

    op: str
    name: str
    make: Callable[[jax.Array], tuple[Any, ...]]
    static: Mapping[str, Any]
    traffic: int
    flops: int
    tolerance: float = 1e-2
    exact: Callable[..., np.ndarray] | None = None
    check: Callable[[tuple[Any, ...], Any], float] | None = None
    baselines: Mapping[str, Callable[..., Any] | Baseline] = dataclasses.field(default_factory=dict)
    rotate: tuple[int, ...] = ()
    carries: Mapping[int, int] = dataclasses.field(default_factory=dict)
    code: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    generations: tuple[str, ...] | None = None
    compile_slow: bool = False

    def is_for(self, platform: Platform) -> bool:
        return self.generations is None or platform.generation in self.generations


class SomeParts:
    """A `Case.check` of some parts of a result; a whole one in float64 may take minutes.

    exact: (*arrays) -> pairs of an index into the result and what it must have there, float64. It is asked once for the
      same arrays, whatever the number of implementations.
    """

    def __init__(self, exact: Callable[..., list[tuple[Any, np.ndarray]]]):
        self.exact = exact
        self.first: Callable[[], Any] = lambda: None  # of the arrays, weakly: they may be gigabytes
        self.parts: list[tuple[Any, np.ndarray]] = []

    def __call__(self, arrays: tuple[Any, ...], result: Any) -> float:
        if self.first() is not arrays[0]:
            self.parts, self.first = self.exact(*arrays), weakref.ref(arrays[0])
        found = np.asarray(result).astype(np.float64)
        if not np.all(np.isfinite(found)):
            return float("inf")
        wrong = sum(np.sum(np.square(found[index] - part)) for index, part in self.parts)
        return float(np.sqrt(wrong / sum(np.sum(np.square(part)) for _, part in self.parts)))


def rarely_compiled(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The cases with `compile_slow`."""
    return tuple(dataclasses.replace(case, compile_slow=True) for case in cases)
