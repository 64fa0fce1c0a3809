"""Which tree slots may attend to which, and at what absolute positions they stand."""

import functools

import jax
import jax.numpy as jnp

from ddtree_jax.tree import checks
from ddtree_jax.tree.base import DraftTree


@functools.partial(jax.jit, static_argnames="max_depth")
def ancestor_mask(tree: DraftTree, *, max_depth: int | None = None) -> jax.Array:
    """The attention mask inside the tree (DDTree, "compile" step).

    Args:
      tree: any valid tree.
      max_depth: static upper bound on the tree's depth, default N - 1; a tight bound only saves work.

    Returns:
      bool[B, N, N], True = may attend. Row n is True at n's ancestors, the root and n itself. A padding row
      is True only at itself, so that its softmax is over a non-empty set, and no other row sees it.
    """
    batch, slots = checks.check_tree_shapes(tree)
    bound = slots - 1 if max_depth is None else min(checks.static_int(max_depth, "max_depth", minimum=0), slots - 1)
    with jax.named_scope("ancestor_mask"):
        own = jnp.arange(slots, dtype=jnp.int32)
        mask = jnp.broadcast_to(own[:, None] == own[None, :], (batch, slots, slots))
        jump = parent_jumps(tree)
        for _ in range(num_doublings(bound)):
            mask = mask | jnp.take_along_axis(mask, jump[:, :, None], axis=1)
            jump = jnp.take_along_axis(jump, jump, axis=1)
    return mask


def positions(tree: DraftTree, prefix_lengths: jax.Array) -> jax.Array:
    """Absolute positions int32[B, N]: `prefix_lengths[B] + depths`. Siblings share a position; padding stands
    at the root's.
    """
    batch, _ = checks.check_tree_shapes(tree)
    prefix_lengths = checks.as_int32(prefix_lengths, "prefix_lengths", (batch,), "B")
    return prefix_lengths[:, None] + tree.depths


def parent_jumps(tree: DraftTree) -> jax.Array:
    """int32[B, N]: each slot's parent, or the slot itself for the root and for padding (absorbing)."""
    own = jnp.arange(tree.num_slots, dtype=jnp.int32)[None, :]
    return jnp.where(tree.parents >= 0, tree.parents, own)


def num_doublings(max_depth: int) -> int:
    """Pointer-doubling steps after which a node has seen all of its at most `max_depth` proper ancestors."""
    return max_depth.bit_length()
