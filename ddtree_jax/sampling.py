"""The target's choice after each tree node: greedy, or a reproducible sample from filtered logits.

Filters follow transformers and vLLM: temperature, then top-k, then top-p, then min-p. Randomness belongs to
the position in the output, not to the round or to the tree: the token with output index i of a sequence is
always drawn with the noise `gumbel(fold_in(key, i))`. So a sequence with its key gives the same tokens alone,
in any batch, and with any speculative algorithm, and nodes of one depth share one row of noise (exact: a walk
reads one node of each depth).
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ddtree_jax.pallas.vocab_rows import clean_logits, vocab_argmax
from ddtree_jax.thresholds import largest_key, ordered_bits
from ddtree_jax.tree import checks

MODES = ("greedy", "sample", "filtered", "mixed")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SamplingParams:
    """How each sequence of a batch chooses its tokens.

    Attributes:
      temperature: float32[B], 0 = greedy.
      top_k: int32[B], 0 = off.
      top_p: float32[B], 1 = off.
      min_p: float32[B], 0 = off.
      keys: typed PRNG keys [B], one per sequence (threefry: other generators are not bit-equal across batch
        sizes).
    """

    temperature: jax.Array  # [B]
    top_k: jax.Array  # [B]
    top_p: jax.Array  # [B]
    min_p: jax.Array  # [B]
    keys: jax.Array  # [B]

    @classmethod
    def create(
        cls,
        batch_size: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] = 0,
    ) -> "SamplingParams":
        """The same settings for every sequence, with one seed or one per sequence (any int; not traced)."""
        batch_size = checks.static_int(batch_size, "batch_size", minimum=0)
        seeds = [seed] * batch_size if hasattr(seed, "__index__") else list(seed)
        if len(seeds) != batch_size:
            raise ValueError(f"seed: got {len(seeds)} seeds; batch_size is {batch_size}.")
        return cls(
            temperature=jnp.full((batch_size,), temperature, jnp.float32),
            top_k=jnp.full((batch_size,), 0 if top_k is None else top_k, jnp.int32),
            top_p=jnp.full((batch_size,), 1.0 if top_p is None else top_p, jnp.float32),
            min_p=jnp.full((batch_size,), 0.0 if min_p is None else min_p, jnp.float32),
            keys=jnp.stack([key_from_seed(s) for s in seeds]) if seeds else jax.random.split(jax.random.key(0), 0),
        )


def key_from_seed(seed: int) -> jax.Array:
    """A threefry key from any Python int, negative and beyond 32 bits included."""
    words = operator.index(seed) % 2**64
    key = jax.random.key(words % 2**32, impl="threefry2x32")
    return key if words < 2**32 else jax.random.fold_in(key, words >> 32)


@jax.jit
def filter_logits(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Temperature, top-k, top-p, min-p, in this order; each filter sees what the one before left.

    Args:
      logits: float[..., V]. NaN and -inf are never kept; +inf counts as the largest finite float.
      temperature: float32, of a leading part of logits' batch shape (a scalar, [B] for [B, N, V], ...). 0
        keeps the best token only (the smallest id among equals).
      top_k: int32, same shapes; keeps the k largest and all that equal the k-th. <= 0 or >= V: off.
      top_p: float32, same shapes; keeps the smallest set of most probable tokens whose mass reaches top_p;
        among equal tokens at the edge the smaller ids. At least the best token stays. >= 1: off.
      min_p: float32, same shapes; keeps tokens with at least min_p times the best token's probability. <= 0:
        off.

    Returns:
      float32[..., V]: log-probabilities up to a constant, relative to the best token (0.0); -inf where
      filtered. A row without any finite logit keeps token 0, so that no draw can leave the vocabulary.
    """
    logits = clean_logits(logits)
    per_row = _row_params(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    with jax.named_scope("filter_logits"):
        scaled = _scale(logits, per_row["temperature"])
        keys = ordered_bits(scaled)
        # A filter that no row uses keeps everything; its search is then left out.
        everything = jnp.ones_like(keys, jnp.bool_)
        uses_top_k = jnp.any((per_row["top_k"] > 0) & (per_row["top_k"] < keys.shape[-1]))
        kept = lax.cond(uses_top_k, lambda: _top_k_mask(keys, per_row["top_k"]), lambda: everything)
        kept = kept & lax.cond(
            jnp.any(per_row["top_p"] < 1.0),
            lambda: _top_p_mask(keys, jnp.where(kept, jnp.exp(scaled), 0.0), per_row["top_p"]),
            lambda: everything,
        )
        kept = kept & ((jnp.exp(scaled) >= per_row["min_p"]) | (per_row["min_p"] <= 0.0))
        return jnp.where(kept, scaled, -jnp.inf)


@functools.partial(jax.jit, static_argnames=("mode", "max_depth"))
def choose_tokens(
    logits: jax.Array,
    depths: jax.Array,
    emitted: jax.Array,
    params: SamplingParams,
    *,
    mode: str,
    max_depth: int | None = None,
) -> jax.Array:
    """The target's choice after each tree slot.

    The choice after a node at depth d gets output index `emitted + d`. It consumes no key: the noise is
    `gumbel(fold_in(keys[b], emitted[b] + d), (V,))`, and the choice is argmax(filtered logits + noise).

    Args:
      logits: float[B, N, V].
      depths: int32[B, N].
      emitted: int32[B], new tokens of the sequence so far.
      params: `SamplingParams` of the B sequences. Rows with temperature 0 take the argmax in every mode.
      mode: static. "greedy": argmax of the logits (the smallest id among equals); "sample": temperature only;
        "filtered": all filters; "mixed": as "filtered", and as cheap as "greedy" while every temperature is 0.
        A row whose filters are off chooses the same token in "sample" and "filtered".
      max_depth: static upper bound on `depths`, default N - 1: noise is made for max_depth + 1 depths.

    Returns:
      int32[B, N], in 0..V-1 whatever the logits (a row without a finite logit gives 0).

    Raises:
      ValueError: an unknown mode, max_depth < 0.
    """
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}; allowed: {', '.join(MODES)}.")
    batch, slots, _ = checks.as_float32(logits, "logits", (None, None, None), "B, N, V").shape
    depths = checks.as_int32(depths, "depths", (batch, slots), "B, N")
    emitted = checks.as_int32(emitted, "emitted", (batch,), "B")
    max_depth = slots - 1 if max_depth is None else checks.static_int(max_depth, "max_depth", minimum=0)
    greedy = vocab_argmax(logits)
    if mode == "greedy":
        return greedy

    def sampled(with_filters: bool) -> jax.Array:
        # Cleaned in here: an operand of the branch of "mixed" would be written out, though the branch is not taken.
        tokens = _sampled(clean_logits(logits), depths, emitted, params, with_filters, min(max_depth, slots - 1))
        return jnp.where(params.temperature[:, None] > 0.0, tokens, greedy)

    with jax.named_scope("choose_tokens"):
        if mode == "mixed":
            is_sampled = jnp.any(params.temperature > 0.0)
            return lax.cond(is_sampled, functools.partial(sampled, True), lambda: greedy)
        return sampled(mode == "filtered")


def _sampled(
    logits: jax.Array, depths: jax.Array, emitted: jax.Array, params: SamplingParams, with_filters: bool, max_depth: int
) -> jax.Array:
    """int32[B, N]: draws from clean logits, one row of noise a depth."""
    if with_filters:
        filtered = filter_logits(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    else:
        filtered = _scale(logits, _row_params(logits, temperature=params.temperature)["temperature"])
    indices = emitted[:, None] + jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :]
    noise = jax.vmap(jax.vmap(_noise, in_axes=(None, 0, None)), in_axes=(0, 0, None))(
        params.keys, indices, logits.shape[-1]
    )
    node_noise = jnp.take_along_axis(noise, jnp.minimum(depths, max_depth)[:, :, None], axis=1)
    return jnp.argmax(filtered + node_noise, axis=-1).astype(jnp.int32)


def _noise(key: jax.Array, index: jax.Array, vocab: int) -> jax.Array:
    """The noise of one output index. *Unbatched.*"""
    return jax.random.gumbel(jax.random.fold_in(key, index), (vocab,), jnp.float32)


def _row_params(logits: jax.Array, **params: jax.Array) -> dict[str, jax.Array]:
    """Each parameter reshaped to broadcast against `logits`, after checking that its shape leads the batch
    shape.
    """
    rows = {}
    for name, value in params.items():
        value = jnp.asarray(value)
        value = value.astype(jnp.int32 if name == "top_k" else jnp.float32)
        if value.shape != logits.shape[:-1][: value.ndim]:
            raise AssertionError(f"{name} must have a leading part of shape {logits.shape[:-1]}; got {value.shape}")
        rows[name] = value.reshape(value.shape + (1,) * (logits.ndim - value.ndim))
    return rows


def _scale(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logits - best) / temperature; for temperature 0 the smallest-id best token alone."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    vocab_ids = jnp.arange(logits.shape[-1], dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (-1,))
    argmax = jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    # Relative to the best before dividing: a tiny temperature then gives -inf, not inf - inf.
    relative = logits - jnp.maximum(best, jnp.finfo(jnp.float32).min)
    scaled = relative / jnp.where(temperature > 0.0, temperature, 1.0)
    alone = (temperature <= 0.0) | (best == -jnp.inf)
    return jnp.where(alone, jnp.where(vocab_ids == argmax, 0.0, -jnp.inf), scaled)


def _top_k_mask(keys: jax.Array, top_k: jax.Array) -> jax.Array:
    """Everything at or above the k-th largest value."""
    vocab = keys.shape[-1]
    k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    kth = largest_key(lambda key: jnp.sum(keys >= key, axis=-1, keepdims=True, dtype=jnp.int32) >= k)
    return keys >= kth


def _top_p_mask(keys: jax.Array, mass: jax.Array, top_p: jax.Array) -> jax.Array:
    """The smallest most-probable set with at least `top_p` of the mass (zero where an earlier filter
    removed).
    """
    wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)

    def mass_from(key):
        return jnp.sum(jnp.where(keys >= key, mass, 0.0), axis=-1, keepdims=True)

    edge = largest_key(lambda key: mass_from(key) >= wanted)
    edge = jnp.minimum(edge, jnp.max(keys, axis=-1, keepdims=True))
    above, at_edge = keys > edge, keys == edge

    # Equal tokens at the edge: as many as the mass needs, smaller ids first.
    each = jnp.max(jnp.where(at_edge, mass, 0.0), axis=-1, keepdims=True)
    short = wanted - jnp.sum(jnp.where(above, mass, 0.0), axis=-1, keepdims=True)
    needed = jnp.maximum(jnp.ceil(short / jnp.where(each > 0.0, each, 1.0)), 1.0)
    num_at_edge = jnp.sum(at_edge, axis=-1, keepdims=True, dtype=jnp.int32)
    needed = jnp.minimum(needed, num_at_edge.astype(jnp.float32)).astype(jnp.int32)

    def first_needed():
        return at_edge & (jnp.cumsum(at_edge, axis=-1, dtype=jnp.int32) <= needed)

    kept_at_edge = lax.cond(jnp.any(needed < num_at_edge), first_needed, lambda: at_edge)
    return above | kept_at_edge | (top_p >= 1.0)
