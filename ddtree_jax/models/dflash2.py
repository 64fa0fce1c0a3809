"""What DFlash2 adds to a DFlash drafter: convolutions over the rows of a block, and a selector that scores pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models.config import DFlashConfig
from ddtree_jax.models.layers import einsum, truncated_init
from ddtree_jax.models.linear import Linear
from ddtree_jax.pallas.choice import KernelChoice
from ddtree_jax.pallas.vocab_topk import vocab_topk

SIDES = 2  # before the sublayer and after it


class PairProposal(NamedTuple):
    """What a DFlash2 drafter proposes: K candidates a row, scored for each candidate of the row above as the parent."""

    log_probs: jax.Array  # float32[B, L, K, K], [b, l, p, k]: candidate k of row l below candidate p of row l - 1
    token_ids: jax.Array  # int32[B, L, K], distinct in a row


class BlockConv(nnx.Module):
    """Grouped dynamic convolution on both sides of a sublayer.

    A row's kernel is a learned one, per channel, plus a part computed from the row's normed input, per group of
    channels. It reaches over the row and the rows above it, and never out of the block. Initially the identity.
    """

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c, d = config.conv, config.hidden_size
        self.taps, self.group, self.block_size = c.kernel_size, c.group_size, config.block_size
        first = jnp.expand_dims(jnp.arange(c.kernel_size) == 0, (0, 2))
        self.base_kernel = nnx.Param(jnp.broadcast_to(first, (SIDES, c.kernel_size, d)).astype(dtype))
        # Columns in the order (side, tap, group).
        width = SIDES * c.kernel_size * (d // c.group_size)
        self.kernel_projection = Linear(d, width, dtype=dtype, rngs=rngs, std=0.0)

    def __call__(self, x: jax.Array, sublayer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """x: [B, T, D], normed rows, `block_size` a block. Both sides' kernels come from x. Returns [B, T, D]."""
        b, t, d = x.shape
        with jax.named_scope("block_conv"):
            delta = self.kernel_projection(x).reshape(b, t, SIDES, self.taps, d // self.group, 1)
            y = self._side(0, delta, x)
        y = sublayer(y)
        chex.assert_shape(y, x.shape)
        with jax.named_scope("block_conv"):
            return self._side(1, delta, y)

    def _side(self, side: int, delta: jax.Array, x: jax.Array) -> jax.Array:
        b, t, d = x.shape
        rows = np.arange(t) % self.block_size
        base = self.base_kernel[...][side]
        out = None
        for tap in range(min(self.taps, t)):
            above = jnp.pad(x[:, : t - tap], ((0, 0), (tap, 0), (0, 0)))
            if tap > 0:
                above = jnp.where((rows >= tap)[None, :, None], above, jnp.zeros((), x.dtype))
            own = jnp.expand_dims(base[tap], (0, 1))
            # One rounding a term, in the order that published drafters were trained with: in bfloat16 another order
            # may cost acceptance.
            out = _multiply_add(jnp.zeros_like(above) if out is None else out, own, above)
            grouped = above.reshape(b, t, d // self.group, self.group)
            out = _multiply_add(out.reshape(grouped.shape), delta[:, :, side, tap], grouped).reshape(b, t, d)
        return out


def _multiply_add(total: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """total + a b with one rounding to the dtype of `total`."""
    wide = total.astype(jnp.float32) + a.astype(jnp.float32) * b.astype(jnp.float32)
    if total.dtype == jnp.bfloat16:
        wide = jax.lax.reduce_precision(wide, 8, 7)  # a mere cast and back would be optimised away
    return wide.astype(total.dtype)


class CandidateSelector(nnx.Module):
    """Scores a row's best tokens given the token above them: logit + <predecessor * W hidden, successor>.

    The successor codebook starts at zero, so that an untrained selector leaves the logits as they are.
    """

    def __init__(self, config: DFlashConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        rank, vocab = config.selector.rank, config.vocab_size
        self.top_k = config.selector.top_k
        self.hidden_projection = Linear(config.hidden_size, rank, dtype=dtype, rngs=rngs)
        self.predecessor_codebook = truncated_init(rngs, (vocab, rank), dtype, 1.0)
        self.successor_codebook = nnx.Param(jnp.zeros((vocab, rank), dtype))
        self.kernels = KernelChoice()

    def __call__(self, hidden: jax.Array, logits: jax.Array, root_token_ids: jax.Array) -> PairProposal:
        """The candidates of every row and their log-probabilities below every candidate of the row above.

        Args:
          hidden: [B, L, D] after the final norm.
          logits: float32[B, L, V], scaled.
          root_token_ids: int32[B], the parent of the first row, whichever entry is read there.
        """
        with jax.named_scope("candidate_selector"):
            best = vocab_topk(logits, self.top_k, implementation=self.kernels)
            roots = jnp.broadcast_to(root_token_ids[:, None, None], (logits.shape[0], 1, self.top_k))
            parents = jnp.concatenate([roots, best.token_ids[:, :-1]], axis=1)
            scores = self.scores(hidden, best.values, best.token_ids, parents)
        return PairProposal(log_probs=log_softmax(scores), token_ids=best.token_ids)

    def scores(self, hidden: jax.Array, unary: jax.Array, token_ids: jax.Array, parents: jax.Array) -> jax.Array:
        """float32[B, L, P, K]: the candidates' scores below each of P parents a row.

        hidden: [B, L, D]; unary: float32[B, L, K], the candidates' logits; token_ids: int32[B, L, K]; parents:
        int32[B, L, P].
        """
        above = jnp.take(self.predecessor_codebook[...], parents, axis=0)
        queries = above * self.hidden_projection(hidden)[:, :, None]
        keys = jnp.take(self.successor_codebook[...], token_ids, axis=0)
        pairs = einsum("blpr,blkr->blpk", queries, keys, out_dtype=jnp.float32)
        return unary[:, :, None].astype(jnp.float32) + pairs


def log_softmax(scores: jax.Array) -> jax.Array:
    """Over the last axis; entries that are not finite are no candidates and get -inf, a row of them too."""
    scores = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
    total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Guarded before the subtraction: -inf - -inf would be a NaN.
    return scores - jnp.where(total > -jnp.inf, total, 0.0)
