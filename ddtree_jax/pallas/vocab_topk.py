"""Exact top-K and logsumexp over a vocabulary, in one pass over the logits.

Three implementations with bit-equal values and ids: `lax.top_k`, which is fast on a CPU; a descent over block maxima
made of plain XLA operations, an order of magnitude faster on a GPU for vocabularies of 100k tokens and more; and the
same descent in two kernels (`vocab_kernels`), for K up to 128.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

import chex
import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.pallas import vocab_kernels
from ddtree_jax.pallas.backend import Platform

if TYPE_CHECKING:
    from ddtree_jax.pallas.choice import KernelChoice  # whose table lists the functions here

IMPLEMENTATIONS = ("top_k", "block_descent")

_BLOCK = 16
# Ranking by counting compares every pair. On an H200 a million pairs take 0.36 us (15 to 65 rows, 256 to 1024
# candidates a row), and a lax.top_k level in its place 4.5 us and 0.05 us for each of the k.
_US_PER_MILLION_PAIRS = 0.36
_US_PER_TOP_K_LEVEL, _US_PER_CHOSEN = 4.5, 0.05
_MAX_COUNTED = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class VocabTopK:
    """The K best entries of each row, best first.

    Attributes:
      values: float32[..., K], the logits.
      token_ids: int32[..., K]; among equal logits the smaller id comes first.
      logsumexp: float32[...], over the whole row; -inf where no entry is finite.
    """

    values: jax.Array  # [..., K]
    token_ids: jax.Array  # [..., K]
    logsumexp: jax.Array  # [...]


def vocab_topk(logits: jax.Array, k: int, *, implementation: str | KernelChoice = "auto") -> VocabTopK:
    """Returns the exact K = min(k, V) best logits of each row and the row's logsumexp.

    Args:
      logits: float[..., V] with V >= 1, any floating dtype; ranked and summed in float32. NaN and +inf count
        as -inf: a broken entry must never be the best one.
      k: static, >= 1.
      implementation: one of IMPLEMENTATIONS, or "auto": plain JAX, block_descent on a GPU and top_k elsewhere. A
        `KernelChoice` with kernels follows the table of kernels, `api.OPS`; one without is "auto".

    Returns:
      A `VocabTopK`. Entries that are -inf are ranked too (smaller id first), after every finite one.

    Raises:
      ValueError: k < 1, or an unknown implementation.
    """
    logits = _checked(logits, k)
    if not isinstance(implementation, str):
        if implementation.any:
            return implementation.run("vocab_topk", logits, k=k)
        implementation = "auto"
    return _vocab_topk(logits, k, implementation)


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def _vocab_topk(logits: jax.Array, k: int, implementation: str) -> VocabTopK:
    with jax.named_scope("vocab_topk"):
        rows = logits.astype(jnp.float32).reshape((-1, logits.shape[-1]))
        # -0.0 == 0.0 as logits, but a total order of floats would rank them apart and break the smaller-id
        # rule.
        rows = jnp.where(rows == 0.0, 0.0, rows)
        rows = jnp.where(rows < jnp.inf, rows, -jnp.inf)
        k = min(k, rows.shape[-1])
        log_normalizers = jax.nn.logsumexp(rows, axis=-1)
        values, token_ids = exact_topk(rows, k, implementation=implementation)
    return _with_lead(logits.shape[:-1], k, values, token_ids, log_normalizers)


@functools.partial(jax.jit, static_argnames=("k", "platform"))
def _vocab_topk_kernels(logits: jax.Array, k: int, platform: Platform) -> VocabTopK:
    with jax.named_scope("vocab_topk"):
        found = vocab_kernels.topk_logsumexp(logits.reshape((-1, logits.shape[-1])), k, platform=platform)
    return _with_lead(logits.shape[:-1], k, *found)


def _with_lead(
    lead: tuple[int, ...], k: int, values: jax.Array, token_ids: jax.Array, log_normalizers: jax.Array
) -> VocabTopK:
    chex.assert_equal_shape([values, token_ids])
    return VocabTopK(
        values=values.reshape((*lead, k)),
        token_ids=token_ids.reshape((*lead, k)),
        logsumexp=log_normalizers.reshape(lead),
    )


def _checked(logits: jax.Array, k: int) -> jax.Array:
    logits = jnp.asarray(logits)
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits: got dtype {logits.dtype}; it must be floating.")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"logits: got shape {logits.shape}; it must be [..., V] with V >= 1.")
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise ValueError(f"k: got {k!r}; it must be an int >= 1.")
    return logits


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def exact_topk(values: jax.Array, k: int, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """The k best of the last axis with the smaller index first among equals.

    Args:
      values: float32[..., V] without NaN and -0.0.
      k: static, 1..V.
      implementation: one of IMPLEMENTATIONS, or "auto" (block_descent on a GPU, top_k elsewhere).

    Returns:
      (values float32[..., k], indices int32[..., k]), best first.
    """
    if implementation == "auto":
        implementation = "block_descent" if jax.default_backend() == "gpu" else "top_k"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}; allowed: auto, {', '.join(IMPLEMENTATIONS)}.")
    if implementation == "top_k":
        best, indices = lax.top_k(values, k)
        return best, indices.astype(jnp.int32)
    lead = values.shape[:-1]
    best, indices = _block_descent(values.reshape((-1, values.shape[-1])), k)
    return best.reshape((*lead, k)), indices.reshape((*lead, k))


def vocab_topk_reference(logits: jax.Array, k: int, *, platform: Platform | None = None) -> VocabTopK:
    """`vocab_topk` by `lax.top_k` over whole rows."""
    del platform
    return vocab_topk(logits, k, implementation="top_k")


def vocab_topk_block_descent(logits: jax.Array, k: int, *, platform: Platform | None = None) -> VocabTopK:
    """`vocab_topk` by descent over block maxima: plain XLA operations, fast on every GPU."""
    del platform
    return vocab_topk(logits, k, implementation="block_descent")


def vocab_topk_triton(logits: jax.Array, k: int, *, platform: Platform) -> VocabTopK:
    """`vocab_topk` in two kernels, for k up to 128; its logsumexp does not depend on k.

    Raises:
      NotImplementedError: as `vocab_kernels.check_served` says.
    """
    logits = _checked(logits, k)
    vocab = logits.shape[-1]
    k = min(k, vocab)
    vocab_kernels.check_served(math.prod(logits.shape[:-1]), vocab, k, logits.dtype, platform)
    return _vocab_topk_kernels(logits, k, platform)


def counts_pairs(num_rows: int, n: int, k: int) -> bool:
    """Whether the k best of [num_rows, n] are found faster by comparing all pairs than by `lax.top_k`, on a GPU."""
    pairs = num_rows * n * n
    top_k_us = _US_PER_TOP_K_LEVEL + _US_PER_CHOSEN * k
    return n <= _MAX_COUNTED and pairs * 1e-6 * _US_PER_MILLION_PAIRS <= top_k_us


def _block_descent(rows: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Exact top-k of float32[R, V] through maxima over blocks of 16, then of 256.

    The k best blocks by (maximum, smaller index) hold the k best elements: an element outside them has k
    blocks ahead of it, each with an element that is larger, or equal at a smaller index.
    """
    num_rows, vocab = rows.shape
    top_block = _BLOCK * _BLOCK
    padded = math.ceil(vocab / top_block) * top_block
    # Padding ranks behind every real entry, -inf ones included, because its indices are larger.
    elements = jnp.pad(rows, ((0, 0), (0, padded - vocab)), constant_values=-jnp.inf)
    fine = jnp.max(elements.reshape((num_rows, -1, _BLOCK)), axis=-1)
    coarse = jnp.max(fine.reshape((num_rows, -1, _BLOCK)), axis=-1)

    values = coarse
    ids = jnp.broadcast_to(jnp.arange(coarse.shape[-1], dtype=jnp.int32), coarse.shape)
    for finer in (fine, elements):
        _, ids = _select_best(values, ids, k)
        if not counts_pairs(num_rows, ids.shape[-1] * _BLOCK, k):
            ids = jnp.sort(ids, axis=-1)  # lax.top_k prefers the smaller position, so positions must follow the ids
        blocks = finer.reshape((num_rows, -1, _BLOCK))
        values = jnp.take_along_axis(blocks, ids[:, :, None], axis=1).reshape((num_rows, -1))
        ids = (ids[:, :, None] * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)[None, None, :]).reshape((num_rows, -1))
        # Without the barrier XLA repeats the gather inside the all-pairs comparison that follows.
        values = lax.optimization_barrier(values)
    return _select_best(values, ids, k)


def _select_best(values: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The min(k, n) best of [R, n] pairs by (larger value, smaller id), best first; `ids` are distinct in a row, and
    ascend where pairs are not counted.
    """
    num_rows, n = values.shape
    k = min(k, n)
    if not counts_pairs(num_rows, n, k):
        best, positions = lax.top_k(values, k)  # prefers the smaller position
        return best, jnp.take_along_axis(ids, positions, axis=-1)
    mine_v, mine_i = values[:, :, None], ids[:, :, None]
    other_v, other_i = values[:, None, :], ids[:, None, :]
    ahead = (other_v > mine_v) | ((other_v == mine_v) & (other_i < mine_i))
    ranks = lax.optimization_barrier(jnp.sum(ahead, axis=-1, dtype=jnp.int32))
    at_rank = ranks[:, None, :] == jnp.arange(k, dtype=jnp.int32)[None, :, None]
    positions = jnp.argmax(at_rank, axis=-1)
    return jnp.take_along_axis(values, positions, axis=-1), jnp.take_along_axis(ids, positions, axis=-1)
