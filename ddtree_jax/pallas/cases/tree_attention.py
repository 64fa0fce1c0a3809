"""Tree attention at the shapes of GLM-5 (MLA, DSA selection, drafter) and of Qwen3-8B."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.pallas.arg_specs import (
    CONTEXTS,
    GLM5_DRAFTER_GQA,
    GLM5_INDEX,
    GLM5_MLA,
    QWEN3_8B_GQA,
    Gqa,
)
from ddtree_jax.pallas.cases.base import Case, SomeParts, rarely_compiled
from ddtree_jax.pallas.cases.registry import Expected

LAYERS, LAYER = 2, 1
Part = tuple[tuple[int, int, int], np.ndarray]
ROWS = (17, 65)
# Rows and heads that are checked; a whole result in float64 takes minutes at the longest contexts.
_CHECKED_ROWS, _CHECKED_HEADS = (0, 1, -2, -1), (0, 7, -1)


def tree_mask(t: int, causal: bool) -> np.ndarray:
    """bool[T, T]: a causal block, or a tree in which each row hangs below one about half as deep."""
    mask = np.eye(t, dtype=bool)
    for row in range(1, t):
        mask[row] |= mask[row - 1 if causal else (row - 1) // 2]
    return mask


def _name(context: int) -> str:
    return f"{context // 1024}k"


def _common(t: int, context: int, causal: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.int32(LAYER), jnp.full((1,), context, jnp.int32), jnp.asarray(tree_mask(t, causal))[None]


def _capacity(context: int, t: int) -> int:
    return -(-(context + t) // 128) * 128


def _normal(key: jax.Array, *shape: int) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)


def _attention(scores: np.ndarray, values: np.ndarray, visible: np.ndarray) -> np.ndarray:
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ values


def _f64(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32).astype(np.float64)


def _exact_mla(q, cache, _, lengths, new, which, *, rank: int, scale: float, selected: bool) -> list[Part]:
    n, slots = int(lengths[0]), cache.shape[2]
    t = q.shape[1]
    rows = np.concatenate([_f64(cache[LAYER, 0, :n]), _f64(new[0])])
    parts = []
    for row in _CHECKED_ROWS:
        visible = np.zeros((n + t,), bool)
        if selected:
            chosen = np.asarray(which)[0, row]
            visible[chosen[(chosen >= 0) & (chosen < n)]] = True
            visible[n + chosen[chosen >= slots] - slots] = True
        else:
            visible[:n] = True
            visible[n:] = np.asarray(which)[0, row]
        for head in _CHECKED_HEADS:
            scores = rows @ _f64(q[0, row, head]) * scale
            parts.append(((0, row, head), _attention(scores, rows[:, :rank], visible)))
    return parts


def mla_baseline(q, cache, layer, lengths, new, mask, *, rank: int, scale: float) -> jax.Array:
    """What models.glm5.MLA.attend_absorbed does: all scores of prefix and block in memory, one masked softmax."""
    b, t, heads, c = q.shape
    prefix = jax.lax.dynamic_index_in_dim(cache, layer, keepdims=False)
    rows = q.swapaxes(1, 2).reshape(b, heads * t, c)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = jnp.concatenate([dot("bqc,bmc->bqm", rows, part) for part in (prefix, new)], axis=-1) * scale
    weights = _masked_softmax(scores.reshape(b, heads, t, -1), lengths, mask[:, None]).astype(q.dtype)
    weights = weights.reshape(b, heads * t, -1)
    slots = prefix.shape[1]
    out = dot("bqm,bmc->bqc", weights[..., :slots], prefix) + dot("bqm,bmc->bqc", weights[..., slots:], new)
    return out.astype(q.dtype)[..., :rank].reshape(b, heads, t, rank).swapaxes(1, 2)


def _masked_softmax(scores: jax.Array, lengths: jax.Array, mask: jax.Array) -> jax.Array:
    """scores [B, .., T, S + T]; mask [B, .., T, T]."""
    slots = scores.shape[-1] - mask.shape[-1]
    prefix = jnp.arange(slots)[None, :] < lengths[:, None]
    prefix = jnp.expand_dims(prefix, range(1, mask.ndim - 1))
    visible = jnp.concatenate([jnp.broadcast_to(prefix, (*mask.shape[:-1], slots)), mask], axis=-1)
    return jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)


def gqa_baseline(q, k_cache, v_cache, layer, lengths, new_k, new_v, mask, *, scale: float) -> jax.Array:
    """What models.dflash.DraftAttention does."""
    b, t, heads, hd = q.shape
    kv_heads = k_cache.shape[3] // hd
    split = lambda x: x.reshape(b, x.shape[1], kv_heads, hd)  # noqa: E731
    past = [split(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)) for x in (k_cache, v_cache)]
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    grouped = q.reshape(b, t, kv_heads, -1, hd)
    scores = jnp.concatenate([dot("btgqd,bmgd->bgqtm", grouped, k) for k in (past[0], split(new_k))], axis=-1)
    weights = _masked_softmax(scores * scale, lengths, mask[:, None, None]).astype(q.dtype)
    slots = past[1].shape[1]
    parts = (weights[..., :slots], past[1]), (weights[..., slots:], split(new_v))
    out = sum(dot("bgqtm,bmgd->btgqd", w, v) for w, v in parts)
    return out.astype(q.dtype).reshape(q.shape)


def _mla(t: int, context: int, causal: bool) -> Case:
    m = GLM5_MLA
    width, rows = m.rank + m.rope, t * m.heads
    static = {"rank": m.rank, "scale": m.scale}

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 3)
        layer, lengths, mask = _common(t, context, causal)
        cache = _normal(keys[1], LAYERS, 1, _capacity(context, t), width)
        return _normal(keys[0], 1, t, m.heads, width), cache, layer, lengths, _normal(keys[2], 1, t, width), mask

    return Case(
        op="mla_attention",
        name=f"glm5 mla, {t} rows, {_name(context)}, {'causal' if causal else 'tree'}",
        make=make,
        static=static,
        traffic=2 * ((context + t) * width + rows * (width + m.rank)),
        flops=2 * rows * (context + t) * (width + m.rank),
        check=SomeParts(functools.partial(_exact_mla, **static, selected=False)),
        baselines={"xla": functools.partial(mla_baseline, **static)},
        rotate=(1,),
    )


def _selected(t: int, context: int) -> Case:
    m, k = GLM5_MLA, GLM5_INDEX.top_k
    width, rows = m.rank + m.rope, t * m.heads
    static = {"rank": m.rank, "scale": m.scale}
    slots = _capacity(context, t)

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)
        layer, lengths, mask = _common(t, context, False)
        cache = _normal(keys[1], LAYERS, 1, slots, width)
        # Random distinct slots, those of a row in no order; then the row's own ancestors.
        order = jnp.argsort(jax.random.uniform(keys[3], (1, t, context)), axis=-1)[..., : k - t].astype(jnp.int32)
        own = jnp.where(mask, slots + jnp.arange(t, dtype=jnp.int32)[None, None], -1)
        empty = jnp.full((1, t, k - t - order.shape[-1]), -1, jnp.int32)
        selected = jnp.concatenate([order, empty, own], axis=-1)
        return _normal(keys[0], 1, t, m.heads, width), cache, layer, lengths, _normal(keys[2], 1, t, width), selected

    seen = min(context, k - t) + t
    return Case(
        op="mla_attention_selected",
        name=f"glm5 dsa, {t} rows, {_name(context)}",
        make=make,
        static=static,
        traffic=2 * (min(context, seen * t) * width + rows * (width + m.rank)),
        flops=2 * rows * seen * (width + m.rank),
        check=SomeParts(functools.partial(_exact_mla, **static, selected=True)),
        rotate=(1,),
    )


def _exact_gqa(q, k_cache, v_cache, _, lengths, new_k, new_v, mask, *, scale: float) -> list[Part]:
    n, hd = int(lengths[0]), q.shape[3]
    group = q.shape[2] // (k_cache.shape[3] // hd)
    parts = []
    for head in _CHECKED_HEADS:
        kv = head % q.shape[2] // group
        own = slice(kv * hd, (kv + 1) * hd)
        k = np.concatenate([_f64(k_cache[LAYER, 0, :n, own]), _f64(new_k[0, :, own])])
        v = np.concatenate([_f64(v_cache[LAYER, 0, :n, own]), _f64(new_v[0, :, own])])
        for row in _CHECKED_ROWS:
            visible = np.concatenate([np.ones((n,), bool), np.asarray(mask)[0, row]])
            parts.append(((0, row, head), _attention(k @ _f64(q[0, row, head]) * scale, v, visible)))
    return parts


def _gqa(name: str, shape: Gqa, t: int, context: int) -> Case:
    width, static = shape.kv_heads * shape.head_dim, {"scale": shape.head_dim**-0.5}

    def make(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 5)
        layer, lengths, mask = _common(t, context, False)
        caches = [_normal(k, LAYERS, 1, _capacity(context, t), width) for k in keys[1:3]]
        news = [_normal(k, 1, t, width) for k in keys[3:]]
        return _normal(keys[0], 1, t, shape.heads, shape.head_dim), *caches, layer, lengths, *news, mask

    rows = t * shape.heads
    return Case(
        op="gqa_attention",
        name=f"{name} gqa, {t} rows, {_name(context)}",
        make=make,
        static=static,
        traffic=2 * (2 * (context + t) * width + 2 * rows * shape.head_dim),
        flops=4 * rows * (context + t) * shape.head_dim,
        check=SomeParts(functools.partial(_exact_gqa, **static)),
        baselines={"xla": functools.partial(gqa_baseline, **static)},
        rotate=(1, 2),
    )


def _cases() -> tuple[Case, ...]:
    gqa = functools.partial(_gqa, "qwen3-8b", QWEN3_8B_GQA)
    # Few rows of latent attention have the code of many, whose tiles take the most shared memory.
    out = [*rarely_compiled(_mla(ROWS[0], n, False) for n in CONTEXTS[:-1])]
    out += [_mla(ROWS[-1], n, False) for n in CONTEXTS[:-1]]
    out += [gqa(t, n) for t in ROWS for n in CONTEXTS[:-1]]
    # The longest contexts differ in how many splits they have.
    out += rarely_compiled(make(t, CONTEXTS[-1]) for make in (lambda t, n: _mla(t, n, False), gqa) for t in ROWS)
    # A selection is as long at each context; few splits of it take the most shared memory, as many rows have.
    out.append(_selected(ROWS[-1], CONTEXTS[1]))
    pairs = [(t, n) for t in ROWS for n in CONTEXTS]
    out += rarely_compiled(_selected(t, n) for t, n in pairs if (t, n) != (ROWS[-1], CONTEXTS[1]))
    out += [*rarely_compiled([_mla(ROWS[0], 8192, True)]), _mla(ROWS[-1], 8192, True)]
    out += [_gqa("glm5 drafter", GLM5_DRAFTER_GQA, 16, n) for n in CONTEXTS[:2]]
    return tuple(out)


CASES = _cases()

EXPECTED = {"mosaic": Expected(code={"h200": ("wgmma.mma_async",)})}
