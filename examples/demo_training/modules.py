"""What the training stages share: building networks, casting parameters, the loss, windows of tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models.config import DFlashConfig, Glm5Config
from ddtree_jax.models.dflash import DFlash
from ddtree_jax.models.glm5 import Glm5, causal_mask

from .schedule import map_named

# The router and its selection bias stay float32 in every copy of the weights.
_FLOAT32_LEAVES = ("router", "router_bias")
_FLOAT32 = jnp.dtype(jnp.float32)


def on_gpu() -> bool:
    """Whether JAX computes on a GPU."""
    return jax.default_backend() == "gpu"


def compute_dtype() -> jnp.dtype:
    """Activations: bfloat16 on a GPU, float32 on a CPU (which has no fast bfloat16)."""
    return jnp.dtype(jnp.bfloat16 if on_gpu() else jnp.float32)


def causal_implementation() -> str:
    """The fused causal attention of this machine."""
    return "cudnn" if on_gpu() else "xla"


def new_target(config: Glm5Config, seed: int, *, scan: bool = False) -> tuple[nnx.GraphDef, Any]:
    """A target with random float32 parameters, as a graph and its parameter tree.

    Args:
      config: of the target.
      seed: of the initial values.
      scan: whether layers of one kind run in a loop. Unrolled layers train faster: nothing is stacked for the
        backward pass.
    """
    graphdef, _ = abstract_target(config, scan=scan)
    build = functools.partial(Glm5, config, dtype=_FLOAT32, scan=scan)
    return graphdef, jax.jit(lambda: nnx.split(build(rngs=nnx.Rngs(seed)))[1])()


def abstract_target(config: Glm5Config, *, compute: bool = False, scan: bool = False) -> tuple[nnx.GraphDef, Any]:
    """The graph and the parameter shapes of `new_target`; `compute`: in the compute dtype."""
    return _abstract(functools.partial(Glm5, config, dtype=_FLOAT32, scan=scan), compute)


def abstract_drafter(
    config: DFlashConfig, target_hidden_size: int, *, compute: bool = False
) -> tuple[nnx.GraphDef, Any]:
    """The graph and the parameter shapes of `new_drafter`, as `abstract_target`."""
    build = functools.partial(DFlash, config, dtype=_FLOAT32, target_hidden_size=target_hidden_size)
    return _abstract(build, compute)


def _abstract(build: Callable[..., nnx.Module], compute: bool) -> tuple[nnx.GraphDef, Any]:
    graphdef, params = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))
    if compute:
        params = jax.eval_shape(functools.partial(cast, dtype=compute_dtype()), params)
    return graphdef, params


def to_compute(params: Any) -> Any:
    """Parameters in the compute dtype, on the device."""
    return jax.jit(functools.partial(cast, dtype=compute_dtype()))(params)


def new_drafter(config: DFlashConfig, seed: int, target_hidden_size: int) -> tuple[nnx.GraphDef, Any]:
    """A drafter with random float32 parameters, as a graph and its parameter tree."""
    graphdef, _ = abstract_drafter(config, target_hidden_size)
    build = functools.partial(DFlash, config, dtype=_FLOAT32, target_hidden_size=target_hidden_size)
    return graphdef, jax.jit(lambda: nnx.split(build(rngs=nnx.Rngs(seed)))[1])()


def cast(params: Any, dtype: jnp.dtype, *, keep: tuple[str, ...] = ()) -> Any:
    """Parameters in the compute dtype.

    Args:
      params: parameter tree.
      dtype: wanted.
      keep: leaves that stay as they are besides the router's: `("embed",)` in training, because the gradient
        of a table is a sum over many tokens that bfloat16 cannot hold.
    """
    kept = (*_FLOAT32_LEAVES, *keep)
    return map_named(lambda name, x: x if name.split("/")[-1] in kept else x.astype(dtype), params)


def round_to_bfloat16(params: Any) -> Any:
    """Float32 parameters whose values are those of the exported bfloat16 weights."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), cast(params, jnp.dtype(jnp.bfloat16)))


def causal_inputs(batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Positions int32[B, T] and the causal mask bool[B, T, T] of full sequences."""
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    return positions, causal_mask(batch, length)


@jax.custom_vjp
def token_losses(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy of each row, float32[M].

    The backward pass recomputes the logits, so that float32[M, V] is never kept.

    Args:
      hidden: [M, D] after the final norm.
      kernel: [D, V] of the output head, in the dtype of `hidden`.
      labels: int32[M].
    """
    return _losses(hidden, kernel, labels)[0]


def _losses(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = jnp.einsum("md,dv->mv", hidden, kernel, preferred_element_type=jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0], total


def _losses_forward(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
    losses, total = _losses(hidden, kernel, labels)
    return losses, (hidden, kernel, labels, total)


def _losses_backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    hidden, kernel, labels, total = saved
    logits = jnp.einsum("md,dv->mv", hidden, kernel, preferred_element_type=jnp.float32)
    vocab = jnp.arange(kernel.shape[1], dtype=labels.dtype)
    error = jnp.exp(logits - total[:, None]) - (vocab[None] == labels[:, None])
    error = (error * cotangent[:, None]).astype(hidden.dtype)
    d_hidden = jnp.einsum("mv,dv->md", error, kernel, preferred_element_type=jnp.float32)
    d_kernel = jnp.einsum("md,mv->dv", hidden, error, preferred_element_type=jnp.float32)
    return d_hidden.astype(hidden.dtype), d_kernel.astype(kernel.dtype), None


token_losses.defvjp(_losses_forward, _losses_backward)


def windows(tokens: np.ndarray, length: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Endless batches [batch, length]: every epoch cuts the tokens at a new offset and shuffles the pieces.

    Raises:
      ValueError: fewer tokens than one batch needs.
    """
    if len(tokens) < 2 * length:
        raise ValueError(f"training text of {len(tokens)} tokens is too short; {2 * length} are needed at least")
    rng = np.random.default_rng(seed)
    pending = np.zeros(0, np.int64)
    while True:
        while len(pending) < batch:
            offset = int(rng.integers(length))
            starts = np.arange(offset, len(tokens) - length + 1, length)
            pending = np.concatenate([pending, rng.permutation(starts)])
        chosen, pending = pending[:batch], pending[batch:]
        yield np.stack([tokens[start : start + length] for start in chosen])
