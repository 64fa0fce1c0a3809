"""Attention of a block of rows (a draft tree, or a causal block) over a cached prefix and over the block itself.

Three operations: absorbed latent attention (MLA), the same over selected columns only (DSA), and grouped-query
attention. Every row of the block sees the whole valid prefix, so only the block needs a mask. Caches hold all stacked
layers and `layer` says which one is meant: a kernel reads it in place. Rows of a cache beyond `lengths` may hold
anything, NaN too.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.gqa_kernels import gqa_triton
from ddtree_jax.pallas.gqa_mosaic import gqa_mosaic
from ddtree_jax.pallas.mla_kernels import mla_selected_triton, mla_triton
from ddtree_jax.pallas.mla_mosaic import mla_mosaic
from ddtree_jax.pallas.mla_selected_mosaic import mla_selected_mosaic


def _check_mla(q, cache, layer, lengths, new, *, rank: int) -> None:
    if q.ndim != 4 or cache.ndim != 4 or new.ndim != 3:
        raise ValueError(
            f"got q {q.shape}, cache {cache.shape}, new {new.shape}; [B, T, H, C], [R, B, S, C], [B, T, C]"
        )
    (b, t, _, c), (_, cache_b, _, cache_c) = q.shape, cache.shape
    if new.shape != (b, t, c) or (cache_b, cache_c) != (b, c):
        raise ValueError(f"got q {q.shape}, cache {cache.shape}, new {new.shape}: B, T and C must agree")
    if not 0 < rank < c:
        raise ValueError(f"rank: got {rank}; it must be below the width {c} of a row")
    _check_rest(q, (cache, new), layer, lengths)


def _check_rest(q, others, layer, lengths) -> None:
    if any(x.dtype != q.dtype for x in others):
        raise ValueError(f"dtypes: got {[x.dtype.name for x in (q, *others)]}; they must be equal")
    if layer.shape != () or layer.dtype != jnp.int32:
        raise ValueError(f"layer: got {layer.dtype}{layer.shape}; it must be an int32 scalar")
    if lengths.shape != q.shape[:1] or lengths.dtype != jnp.int32:
        raise ValueError(f"lengths: got {lengths.dtype}{lengths.shape}; it must be int32[{q.shape[0]}]")


def _check_mask(q, mask) -> None:
    want = (q.shape[0], q.shape[1], q.shape[1])
    if mask.shape != want or mask.dtype != jnp.bool_:
        raise ValueError(f"mask: got {mask.dtype}{mask.shape}; it must be bool{want}")


def _visible(mask: jax.Array, lengths: jax.Array, slots: int) -> jax.Array:
    """bool[B, T, S + T] from the block's mask."""
    b, t, _ = mask.shape
    prefix = jnp.arange(slots, dtype=jnp.int32)[None, None, :] < lengths[:, None, None]
    return jnp.concatenate([jnp.broadcast_to(prefix, (b, t, slots)), mask], axis=-1)


def _weigh(scores: jax.Array, visible: jax.Array, scale: float) -> jax.Array:
    """Softmax over the last axis, float32; zeros in a row that sees nothing."""
    scores = jnp.where(visible, scores * scale, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _clean(rows: jax.Array, read: jax.Array) -> jax.Array:
    """Rows [..., M, width] with zeros where `read` [..., M] is False: 0 * NaN would spread what nobody sees."""
    return jnp.where(read[..., None], rows, jnp.zeros((), rows.dtype))


def _mla(q, cache, layer, new, visible, *, rank: int, scale: float) -> jax.Array:
    rows = jnp.concatenate([jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False), new], axis=1)
    scores = _product("bthc,bmc->bthm", q, rows)
    weights = _weigh(scores, visible[:, :, None], scale)
    # A column with NaN makes the rows that see it NaN by its scores; its values must not reach the others.
    values = rows[..., :rank]
    read = jnp.any(visible, axis=1) & jnp.all(jnp.isfinite(values), axis=-1)
    out = _product("bthm,bmr->bthr", weights.astype(q.dtype), _clean(values, read))
    return out.astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("rank", "scale", "platform"))
def _mla_dense(q, cache, layer, lengths, new, mask, *, rank, scale, platform):
    del platform
    visible = _visible(mask, lengths, cache.shape[2])
    return _mla(q, cache, layer, new, visible, rank=rank, scale=scale)


def mla_attention_reference(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, mask: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """Latent attention of block rows over prefix and block.

    Args:
      q: [B, T, H, C], absorbed queries; C = rank + rope.
      cache: [R, B, S, C], rows of all stacked layers.
      layer: int32 scalar, 0..R-1.
      lengths: int32[B], valid rows of each prefix, 0..S.
      new: [B, T, C], the block's own rows.
      mask: bool[B, T, T], True where row t attends to block column u. A row that is not used sees itself.
      rank: width of the values, the first part of a row.
      scale: of the scores.

    Returns:
      [B, T, H, rank] in the dtype of q. Softmax and sums are float32. NaN in a block row reaches the rows that see it
      and no other; a row that sees nothing is zero.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_mask(q, mask)
    return _mla_dense(q, cache, layer, lengths, new, mask, rank=rank, scale=scale, platform=platform)


def mla_attention_triton(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, mask: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `mla_attention_reference`, a split-prefix kernel; rank and rope are powers of two of at least 16."""
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_mask(q, mask)
    return mla_triton(q, cache, layer, lengths, new, mask, rank=rank, scale=scale, platform=platform)


def mla_attention_mosaic(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, mask: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `mla_attention_reference`, a split-prefix kernel for Hopper; bfloat16, multiples of 64 heads, rank 512."""
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_mask(q, mask)
    return mla_mosaic(q, cache, layer, lengths, new, mask, rank=rank, scale=scale, platform=platform)


def mla_attention_selected_reference(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, selected: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """Latent attention of each row over the columns that were selected for it (DSA), the same for all heads.

    Args:
      q, cache, layer, lengths, new, rank, scale: as for `mla_attention_reference`.
      selected: int32[B, T, K], in any order and each column at most once: 0..S-1 are slots of the prefix,
        S..S+T-1 columns of the block, -1 is nothing. Slots beyond `lengths` count as nothing.

    Returns, Raises: as `mla_attention_reference`.
    """
    del platform
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_selected(q, selected)
    return _mla_selected(q, cache, layer, lengths, new, selected, rank=rank, scale=scale)


def _check_selected(q, selected) -> None:
    if selected.ndim != 3 or selected.shape[:2] != q.shape[:2] or selected.dtype != jnp.int32:
        raise ValueError(
            f"selected: got {selected.dtype}{selected.shape}; it must be int32[{q.shape[0]}, {q.shape[1]}, K]"
        )


@functools.partial(jax.jit, static_argnames=("rank", "scale"))
def _mla_selected(q, cache, layer, lengths, new, selected, *, rank, scale):
    slots, (b, t) = cache.shape[2], q.shape[:2]
    columns = slots + t
    where = jnp.where(selected < 0, columns, selected)
    rows = jnp.arange(b, dtype=jnp.int32)[:, None, None], jnp.arange(t, dtype=jnp.int32)[None, :, None]
    chosen = jnp.zeros((b, t, columns), bool).at[*rows, where].set(True, mode="drop")
    seen = _visible(jnp.ones((b, t, t), bool), lengths, slots)
    return _mla(q, cache, layer, new, chosen & seen, rank=rank, scale=scale)


def mla_attention_selected_triton(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, selected: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `mla_attention_selected_reference`; cache rows are gathered in the kernel."""
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_selected(q, selected)
    return mla_selected_triton(q, cache, layer, lengths, new, selected, rank=rank, scale=scale, platform=platform)


def mla_attention_selected_mosaic(
    q: jax.Array, cache: jax.Array, layer: jax.Array, lengths: jax.Array, new: jax.Array, selected: jax.Array, *,
    rank: int, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `mla_attention_selected_reference`, for Hopper; bfloat16, multiples of 64 heads, rank 512."""
    _check_mla(q, cache, layer, lengths, new, rank=rank)
    _check_selected(q, selected)
    return mla_selected_mosaic(q, cache, layer, lengths, new, selected, rank=rank, scale=scale, platform=platform)


def _check_gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask) -> None:
    if q.ndim != 4 or k_cache.ndim != 4 or new_k.ndim != 3:
        raise ValueError(f"got q {q.shape}, k_cache {k_cache.shape}, new_k {new_k.shape}")
    b, t, heads, head_dim = q.shape
    width = k_cache.shape[3]
    if width % head_dim or heads % (width // head_dim):
        raise ValueError(f"got q {q.shape} and rows of {width}: the KV heads must divide the {heads} query heads")
    if v_cache.shape != k_cache.shape or k_cache.shape[1] != b or not new_k.shape == new_v.shape == (b, t, width):
        raise ValueError(
            f"got q {q.shape}, k_cache {k_cache.shape}, v_cache {v_cache.shape}, new_k {new_k.shape}, "
            f"new_v {new_v.shape}: B, T and the width of the rows must agree"
        )
    _check_rest(q, (k_cache, v_cache, new_k, new_v), layer, lengths)
    _check_mask(q, mask)


def gqa_attention_reference(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, layer: jax.Array, lengths: jax.Array, new_k: jax.Array,
    new_v: jax.Array, mask: jax.Array, *, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """Grouped-query attention of block rows over prefix and block.

    Args:
      q: [B, T, Hq, hd].
      k_cache, v_cache: [R, B, S, Hkv * hd], rows of all stacked layers; Hkv divides Hq.
      layer, lengths, mask, scale: as for `mla_attention_reference`.
      new_k, new_v: [B, T, Hkv * hd], the block's own rows.

    Returns:
      [B, T, Hq, hd] in the dtype of q, as `mla_attention_reference` does.

    Raises:
      ValueError: shapes or dtypes that do not belong together.
    """
    del platform
    _check_gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask)
    return _gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, scale=scale)


@functools.partial(jax.jit, static_argnames=("scale",))
def _gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, *, scale):
    b, t, heads, head_dim = q.shape
    kv_heads = k_cache.shape[3] // head_dim

    def rows(cache: jax.Array, new: jax.Array) -> jax.Array:
        whole = jnp.concatenate([jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False), new], axis=1)
        return whole.reshape(b, -1, kv_heads, head_dim)

    k, v = rows(k_cache, new_k), rows(v_cache, new_v)
    visible = _visible(mask, lengths, k_cache.shape[2])
    scores = _product("btgqd,bmgd->btgqm", q.reshape(b, t, kv_heads, -1, head_dim), k)
    finite = jnp.all(jnp.isfinite(v), axis=-1)
    # As in the kernels, a value that is not finite makes the rows that see it NaN.
    scores = jnp.where(finite.swapaxes(1, 2)[:, None, :, None], scores, jnp.nan)
    weights = _weigh(scores, visible[:, :, None, None], scale)
    out = _product("btgqm,bmgd->btgqd", weights.astype(q.dtype), _clean(v, finite))
    return out.astype(q.dtype).reshape(q.shape)


def gqa_attention_triton(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, layer: jax.Array, lengths: jax.Array, new_k: jax.Array,
    new_v: jax.Array, mask: jax.Array, *, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `gqa_attention_reference`, a split-prefix kernel; hd is a power of two of at least 16."""
    _check_gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask)
    return gqa_triton(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, scale=scale, platform=platform)


def gqa_attention_mosaic(
    q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, layer: jax.Array, lengths: jax.Array, new_k: jax.Array,
    new_v: jax.Array, mask: jax.Array, *, scale: float, platform: Platform,
) -> jax.Array:  # fmt: skip
    """As `gqa_attention_reference`, for Hopper; bfloat16, hd 128, and 1, 2, 4 or 8 query heads a KV head."""
    _check_gqa(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask)
    return gqa_mosaic(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, scale=scale, platform=platform)
