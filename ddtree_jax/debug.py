"""`debug_checks`: the value rules of `tree.invariants` in every run, without touching the calls."""

import contextlib
import contextvars
from collections.abc import Iterator

_DEBUGGING: contextvars.ContextVar[bool] = contextvars.ContextVar("ddtree_jax_debug_checks", default=False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Inside this context every `generate` and `stream` checks each round's values (as their `debug=True` does).

    A broken rule raises InvariantError that begins with the rule's name. Of this thread or task alone; a stream checks
    if it was made inside, wherever it is read. Rounds then run one by one and several times slower.
    """
    token = _DEBUGGING.set(True)
    try:
        yield
    finally:
        _DEBUGGING.reset(token)


def debugging() -> bool:
    """If the caller is inside `debug_checks`."""
    return _DEBUGGING.get()
