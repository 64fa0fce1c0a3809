"""The k-th largest of many floats by bisection on their bits: exact, and without a sort.

32 passes of compare and count are vector work on every backend; a sort or `lax.top_k` is serial on a CPU, and for
many long rows slow on a GPU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

_SMALLEST = -(2**31)


def ordered_bits(values: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 values without NaN; -0.0 and 0.0 get the same key."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, jnp.int32(_SMALLEST) - bits, bits)


def largest_key(reaches: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest int32 key for which `reaches` holds, or -2^31 where it holds for none, bit by bit from the top.

    Args:
      reaches: maps int32 keys (a scalar or [..., 1]) to bool[..., 1]; where it holds for a key, it holds for every
        smaller one.

    Returns:
      int32[..., 1].
    """

    def refine(i: jax.Array, threshold: jax.Array) -> jax.Array:
        step = jnp.where(i == 0, jnp.int32(_SMALLEST), jnp.int32(1) << (31 - i).astype(jnp.int32))
        trial = threshold + step  # i == 0 flips the sign bit: -2^31 - 2^31 wraps to 0
        return jnp.where(reaches(trial), trial, threshold)

    shape = jax.eval_shape(reaches, jnp.int32(0)).shape
    return lax.fori_loop(0, 32, refine, jnp.full(shape, _SMALLEST, jnp.int32))
