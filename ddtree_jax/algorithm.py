"""The decoding algorithms, and the one table that says what each can do.

Admission and the decode round both read the table. Nothing tests for a single member: a test like `== DFLASH`
is how the next algorithm slips past a guard.
"""

import dataclasses
import enum

from ddtree_jax.errors import InvariantError, UnsupportedRequestError


class SpeculativeAlgorithm(enum.Enum):
    """How a round proposes tokens: not at all, as one chain, or as a tree."""

    NONE = "none"
    DFLASH = "dflash"
    DDTREE = "ddtree"

    @classmethod
    def parse(cls, value: "SpeculativeAlgorithm | str") -> "SpeculativeAlgorithm":
        """Returns the member itself, or the one whose name is `value` in any case; else raises ValueError."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            for member in cls:
                if member.name == value.upper():
                    return member
        allowed = ", ".join(member.value for member in cls)
        raise ValueError(f"algorithm: got {value!r}; allowed are {allowed}, in any case")


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """One row of the table.

    Attributes:
      needs_drafter: rounds run a drafter, so an engine without one cannot serve the algorithm.
      grammar: requests may constrain the output by a grammar.
      sampling: temperature, top-k, top-p and min-p.
      ragged_batch: sequences of different lengths in one batch.
      branching: verification of a tree with siblings; without it a budget has no meaning.
      recurrent_target: targets with recurrent layers, whose state a rejected sibling would spoil.
    """

    needs_drafter: bool
    grammar: bool
    sampling: bool
    ragged_batch: bool
    branching: bool
    recurrent_target: bool


# A False is a promise that admission refuses the request.
CAPABILITIES: dict[SpeculativeAlgorithm, Capabilities] = {
    SpeculativeAlgorithm.NONE: Capabilities(
        needs_drafter=False,
        grammar=True,
        sampling=True,
        ragged_batch=True,
        branching=False,
        recurrent_target=True,
    ),
    SpeculativeAlgorithm.DFLASH: Capabilities(
        needs_drafter=True,
        grammar=True,
        sampling=True,
        ragged_batch=True,
        branching=False,
        recurrent_target=False,
    ),
    SpeculativeAlgorithm.DDTREE: Capabilities(
        needs_drafter=True,
        grammar=True,
        sampling=True,
        ragged_batch=True,
        branching=True,
        recurrent_target=False,
    ),
}

# feature -> how a message calls it; these are the columns that a request can need
FEATURES = {
    "grammar": "grammar-constrained decoding",
    "sampling": "sampling (temperature > 0)",
    "ragged_batch": "a batch of different lengths",
    "branching": "branching verification",
    "recurrent_target": "a target with recurrent layers",
}


def capabilities(algorithm: SpeculativeAlgorithm | str) -> Capabilities:
    """Returns the row of an algorithm, given as a member or by name."""
    return CAPABILITIES[SpeculativeAlgorithm.parse(algorithm)]


def require(algorithm: SpeculativeAlgorithm | str, *features: str) -> None:
    """Admits a request: every feature that it needs must be True in the algorithm's row.

    Args:
      algorithm: a member or its name.
      *features: keys of `FEATURES`.

    Raises:
      UnsupportedRequestError: names the algorithm and the first feature that it lacks.
      ValueError: an unknown algorithm or feature.
    """
    member = SpeculativeAlgorithm.parse(algorithm)
    for feature in features:
        if feature not in FEATURES:
            raise ValueError(f"feature: got {feature!r}; allowed are {', '.join(FEATURES)}")
        if not getattr(CAPABILITIES[member], feature):
            able = [other.value for other, row in CAPABILITIES.items() if getattr(row, feature)]
            hint = f"algorithms that can: {', '.join(able)}" if able else "no algorithm can in this version"
            raise UnsupportedRequestError(
                f"algorithm {member.name} does not support {FEATURES[feature]} ({feature}); {hint}"
            )


def require_drafter(algorithm: SpeculativeAlgorithm | str, has_drafter: bool) -> None:
    """Raises UnsupportedRequestError where the algorithm drafts and the engine has no drafter."""
    member = SpeculativeAlgorithm.parse(algorithm)
    if CAPABILITIES[member].needs_drafter and not has_drafter:
        able = [other.value for other, row in CAPABILITIES.items() if not row.needs_drafter]
        raise UnsupportedRequestError(
            f"algorithm {member.name} needs a drafter and this engine was loaded without one; "
            f"load(target, drafter), or use {', '.join(able)}"
        )


def require_grammar_rows(algorithm: SpeculativeAlgorithm | None, *, constrained: bool, has_rows: bool) -> None:
    """The round's own grammar guard, at trace time and so free in the compiled program.

    Args:
      algorithm: what is really running; None where the round was not told.
      constrained: the batch has sequences that must follow a grammar.
      has_rows: the round masks the target's logits by grammar rows.

    Raises:
      InvariantError: a constrained batch without rows: its tokens would silently break the grammar.
    """
    if constrained and not has_rows:
        name = "an unnamed algorithm" if algorithm is None else algorithm.name
        raise InvariantError(
            f"{name} is running a batch that has grammar constraints in a round without grammar rows; admission "
            "should have refused the request, or routed it to a round that takes them"
        )
