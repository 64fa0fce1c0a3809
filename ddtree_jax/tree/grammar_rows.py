"""Grammar rows on a device: which tokens may come after each tree slot.

A row is int32[W] with W = ceil(V / 32): token i is allowed if bit i % 32 of word i // 32 is 1 (bit 31 is the sign).
Bits from V on stand for no token and are never read. It is the layout of `grammar.pack` and of the rows of
`grammar_walk.SequenceGrammar`; a row of a request without a grammar has every bit below V set.
"""

import jax
import jax.numpy as jnp

from ddtree_jax.tree import checks

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """W = ceil(V / 32)."""
    return -(-vocab_size // WORD_BITS)


@jax.jit
def mask_logits(logits: jax.Array, rows: jax.Array) -> jax.Array:
    """The target's logits with everything that the rows forbid at -inf; apply before temperature and filters.

    Args:
      logits: float[B, N, V], any floating dtype.
      rows: int32[B, N, W], W = ceil(V / 32), packed as above.

    Returns:
      float32[B, N, V]: logits where the row's bit is 1, whatever they are (NaN too), -inf where it is 0. A row of
      zeros (a dead node, padding) forbids everything; choose nothing from it that is then emitted.
    """
    logits = checks.as_float32(logits, "logits", (None, None, None), "B, N, V")
    batch, slots, vocab = logits.shape
    words = num_words(vocab)
    rows = checks.as_int32(rows, "rows", (batch, slots, words), f"B, N, {words}")
    with jax.named_scope("mask_logits"):
        places = jnp.arange(WORD_BITS, dtype=jnp.int32).reshape(1, 1, 1, WORD_BITS)
        allowed = jnp.right_shift(rows[..., None], places) & 1  # the shift copies the sign bit: only bit 0 counts
        allowed = allowed.reshape(batch, slots, words * WORD_BITS)[..., :vocab]
        return jnp.where(allowed == 1, logits, -jnp.inf)
