"""Building blocks shared by the target and the drafter.

The dtype of the parameters is the compute dtype; every product accumulates in float32, and float32 products run at full
precision (no TF32), because greedy losslessness rests on it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.thresholds import largest_key, ordered_bits

NEGATIVE = -1e30  # a finite stand-in for -inf: a row with nothing visible stays finite (uniform), never NaN


def einsum(spec: str, a: jax.Array, b: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """`jnp.einsum` with float32 accumulation; the result is cast to `out_dtype` (default: that of operand `a`)."""
    out_dtype = out_dtype or a.dtype
    if a.dtype == b.dtype == jnp.bfloat16:
        return _bfloat16_einsum(spec, jnp.dtype(out_dtype), a, b)
    precision = jax.lax.Precision.HIGHEST if jnp.float32 in (a.dtype, b.dtype) else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32).astype(out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bfloat16_einsum(spec: str, out_dtype: jnp.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32).astype(out_dtype)


def _bfloat16_einsum_forward(
    spec: str, out_dtype: jnp.dtype, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _bfloat16_einsum(spec, out_dtype, a, b), (a, b)


def _bfloat16_einsum_backward(
    spec: str, out_dtype: jnp.dtype, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # The float32 result would make JAX's own transpose multiply float32 cotangents: several times slower on a GPU.
    _, pull_back = jax.vjp(functools.partial(jnp.einsum, spec), *operands)
    return pull_back(cotangent.astype(operands[0].dtype))


_bfloat16_einsum.defvjp(_bfloat16_einsum_forward, _bfloat16_einsum_backward)


def truncated_init(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype, std: float) -> nnx.Param:
    draw = jax.random.truncated_normal(rngs.params(), -3.0, 3.0, shape, jnp.float32)
    return nnx.Param((std * draw).astype(dtype))


class RMSNorm(nnx.Module):
    """weight * cast(x / rms(x)): the weight is applied after the cast back to the activation dtype."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...]
        return jnp.expand_dims(weight, tuple(range(x.ndim - 1))) * (x32 * scale).astype(x.dtype)


class LayerNorm(nnx.Module):
    """True LayerNorm with mean and bias (the indexer's key norm, eps 1e-6)."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        axes = tuple(range(x.ndim - 1))
        weight, bias = (jnp.expand_dims(p[...].astype(jnp.float32), axes) for p in (self.weight, self.bias))
        return (centred * scale * weight + bias).astype(x.dtype)


def rope_angles(positions: jax.Array, dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., dim / 2], of position * theta^(-2j / dim)."""
    inverse = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions.astype(jnp.float32)[..., None] * jnp.expand_dims(inverse, tuple(range(positions.ndim)))
    return jnp.cos(angle), jnp.sin(angle)


def rope_interleaved(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_2j, x_2j+1); the result is de-interleaved: first components, then second ones.

    Queries and keys get the same permutation, so scores equal those of an in-place layout; only raw cached values
    differ in order. x: [..., dim]; cos, sin: broadcastable to [..., dim / 2].
    """
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rope_half_split(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x_j, x_j+dim/2), the Qwen3 form that DFlash drafters use."""
    cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis in float32. mask: bool, True = may attend, same rank as scores."""
    return jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), NEGATIVE), axis=-1)


def select_top_k(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """bool[..., M]: the `k` best visible entries of each row, equal scores by lower index; all if fewer are visible.

    scores: float32[..., M]; visible: bool[..., M]. The order among visible entries is all that ties depend on, so a
    prefix-plus-tree layout and a plain causal one select the same tokens.
    """
    if scores.shape[-1] <= k:
        return visible
    ranked = jnp.where(visible, scores, -jnp.inf)
    ordered = ordered_bits(ranked)
    threshold = largest_key(lambda key: jnp.sum(ordered >= key, axis=-1, keepdims=True) >= k)
    reached = ordered >= threshold

    # Ties at the threshold are rare, and a running count over the row costs more than the whole search.
    def lower_index_first() -> jax.Array:
        above, equal = ordered > threshold, ordered == threshold
        spare = k - jnp.sum(above, axis=-1, keepdims=True)
        return above | (equal & (jnp.cumsum(equal, axis=-1) <= spare))

    tied = jnp.any(jnp.sum(reached & visible, axis=-1) > k)
    return jax.lax.cond(tied, lower_index_first, lambda: reached) & visible
