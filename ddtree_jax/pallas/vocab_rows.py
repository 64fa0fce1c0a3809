"""Rows of logits over a vocabulary: what counts as a logit, and the best token of each row.

XLA's fusions do this in one pass, of bfloat16 logits too, with no float32 copy of them: a kernel reads partial maxima
with their ids, a second one joins them. So there is no kernel of ours here. What it must not meet is a cleaned copy of
the logits as the operand of a branch (`lax.cond`), which is written to memory whether or not the branch is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from ddtree_jax.pallas.backend import Platform


def clean_logits(logits: jax.Array) -> jax.Array:
    """float32 logits [..., V] without NaN (to -inf) and +inf (to the largest finite float)."""
    logits = jnp.asarray(logits)
    if logits.ndim < 1 or logits.shape[-1] < 1 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise AssertionError(f"logits must be float[..., V] with V >= 1; got {logits.dtype}{list(logits.shape)}")
    logits = logits.astype(jnp.float32)
    return jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), jnp.finfo(jnp.float32).max)


def vocab_argmax(logits: jax.Array, *, platform: Platform | None = None) -> jax.Array:
    """int32[...]: the best token of each row of float[..., V], the smallest id among equals.

    NaN counts as -inf and +inf as the largest finite float; a row without a finite logit gives 0.
    """
    del platform
    return jnp.argmax(clean_logits(logits), axis=-1).astype(jnp.int32)
