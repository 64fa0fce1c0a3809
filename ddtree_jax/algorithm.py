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
      recurrent_target: targets whose recurrent layers run over a block in slot order, one state a sequence. The next
        sibling in the block would start from the state that the one before it left.
    """

    needs_drafter: bool
    grammar: bool
    sampling: bool
    ragged_batch: bool
    branching: bool
    recurrent_target: bool


# A False is a promise that admission refuses the request. `recurrent_target`: a chain has no siblings and its commit
# takes the state of the last accepted node; a tree is refused unless it cannot branch, the target follows it
# (`tree_states`), or the engine allows the damage.
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
        recurrent_target=True,
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

MAX_BUDGET = 1024  # tree nodes besides the root
ALLOW_HYBRID_UNSAFE = "--speculative-ddtree-allow-hybrid-unsafe"

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


def spoils_recurrent_state(algorithm: SpeculativeAlgorithm | str, budget: int) -> bool:
    """Whether a round of this algorithm can put siblings before recurrent layers that run in slot order.

    budget: tree nodes besides the root, read where the algorithm branches; with one of them there is no sibling.
    """
    row = capabilities(algorithm)
    is_chain = row.branching and budget <= 1
    return not row.recurrent_target and not is_chain


def require_recurrent(
    algorithm: SpeculativeAlgorithm | str, budget: int, layers: tuple[int, ...], *, allow_unsafe: bool, name: str
) -> bool:
    """The hybrid gate: admits a request on a target whose recurrent layers run in slot order.

    Args:
      algorithm: a member or its name.
      budget: tree nodes besides the root.
      layers: the layers that do so; () admits everything.
      allow_unsafe: admit what would be refused.
      name: of the engine, for the message.

    Returns:
      Whether the request is one that only `allow_unsafe` admits.

    Raises:
      UnsupportedRequestError: names the algorithm, the layers, and the flag that would allow the request.
    """
    member = SpeculativeAlgorithm.parse(algorithm)
    if not layers or not spoils_recurrent_state(member, budget):
        return False
    if not allow_unsafe:
        able = [other.value for other, row in CAPABILITIES.items() if row.recurrent_target]
        raise UnsupportedRequestError(
            f"algorithm {member.name} with budget {budget} does not support {FEATURES['recurrent_target']} "
            f"(recurrent_target): layers {', '.join(map(str, layers))} of {name} are recurrent and run in slot order, "
            "so siblings of a tree would spoil each other's state and the text would degrade; allowed are "
            f"{', '.join(able)} and budgets up to 1, or at your own risk allow_hybrid_unsafe=True of ddtree_jax.load, "
            f"{ALLOW_HYBRID_UNSAFE} on the command line"
        )
    return True
