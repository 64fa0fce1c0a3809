"""Trace-time argument checks: free after compilation, and every message names the argument.

Shape and dtype faults are programmer errors and raise chex's AssertionError; a static value out of range
raises ValueError.
"""

import chex
import jax
import jax.numpy as jnp


def as_int32(value, name: str, shape: tuple[int | None, ...], letters: str) -> jax.Array:
    """`value` as int32 after checking that it holds integers of the given shape (None: any size)."""
    array = jnp.asarray(value)
    _check(array, name, shape, f"int32[{letters}]", jnp.issubdtype(array.dtype, jnp.integer))
    return array.astype(jnp.int32)


def as_float32(value, name: str, shape: tuple[int | None, ...], letters: str) -> jax.Array:
    """`value` as float32 after checking that it holds floats of the given shape (None: any size)."""
    array = jnp.asarray(value)
    _check(array, name, shape, f"float[{letters}]", jnp.issubdtype(array.dtype, jnp.floating))
    return array.astype(jnp.float32)


def as_bool(value, name: str, shape: tuple[int | None, ...], letters: str) -> jax.Array:
    """`value` as a boolean array after checking dtype and shape (None: any size)."""
    array = jnp.asarray(value)
    _check(array, name, shape, f"bool[{letters}]", array.dtype == jnp.bool_)
    return array


def check_tree_shapes(tree, name: str = "tree") -> tuple[int, int]:
    """Checks ranks, dtypes and mutual shapes of a DraftTree; returns (B, N)."""
    as_int32(tree.token_ids, f"{name}.token_ids", (None, None), "B, N")
    batch, slots = tree.token_ids.shape
    if slots < 1:
        raise ValueError(f"{name}.token_ids: got {slots} slots; a tree has at least the root slot.")
    for field in ("parents", "depths"):
        as_int32(getattr(tree, field), f"{name}.{field}", (batch, slots), "B, N")
    as_float32(tree.log_probs, f"{name}.log_probs", (batch, slots), "B, N")
    as_int32(tree.num_nodes, f"{name}.num_nodes", (batch,), "B")
    return batch, slots


def static_int(value, name: str, *, minimum: int) -> int:
    """`value` as a Python int; ValueError naming the argument if it is not one or below `minimum`."""
    is_array = isinstance(value, jax.Array)
    if is_array or isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name}: got {value!r}; it must be a static int >= {minimum}.")
    number = value.__index__()
    if number < minimum:
        raise ValueError(f"{name}: got {number}; it must be an int >= {minimum}.")
    return number


def static_bool(value, name: str) -> bool:
    """`value` as a Python bool; ValueError naming the argument if it is anything else."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {value!r}; it must be a static True or False.")
    return value


def _check(array: jax.Array, name: str, shape: tuple[int | None, ...], expected: str, right_kind: bool) -> None:
    message = f"{name} must be {expected}"
    chex.assert_rank(array, len(shape), custom_message=message)
    chex.assert_shape(array, shape, custom_message=message)
    if not right_kind:
        raise AssertionError(f"{message}; got dtype {array.dtype}")
