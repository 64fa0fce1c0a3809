"""The walk: which drafted tokens the target agrees with."""

import functools

import jax
import jax.numpy as jnp

from ddtree_jax.tree import checks, mask
from ddtree_jax.tree.base import NO_NODE, AcceptedPath, DraftTree


@functools.partial(jax.jit, static_argnames="max_depth")
def accept(tree: DraftTree, target_token_ids: jax.Array, *, max_depth: int | None = None) -> AcceptedPath:
    """Follows the target's choices from the root (DDTree, "walk" step).

    From the root, step to the child whose token equals the target's choice after the current node; stop where
    there is none: that choice is the bonus. Computed without a sequential walk: a node is on the path if and
    only if it and each of its ancestors equal the target's choice after their parents. Siblings carry
    distinct tokens, so at most one node of each depth qualifies.

    The walk is exact at any temperature as long as the tree does not depend on the draws behind
    `target_token_ids`.

    Args:
      tree: a valid tree; padding slots can not match.
      target_token_ids: int32[B, N], what the target chose after each slot; entries at padding slots are
        ignored.
      max_depth: static, default N - 1. The path stops at this depth even if a deeper node matches; the bonus
        is then that node's token, so that the emitted tokens are a prefix of the same sequence.

    Returns:
      An `AcceptedPath` with `node_ids` int32[B, max_depth + 1].

    Raises:
      ValueError: max_depth < 0.
    """
    batch, slots = checks.check_tree_shapes(tree)
    target = checks.as_int32(target_token_ids, "target_token_ids", (batch, slots), "B, N")
    max_depth = slots - 1 if max_depth is None else checks.static_int(max_depth, "max_depth", minimum=0)

    with jax.named_scope("accept"):
        own = jnp.arange(slots, dtype=jnp.int32)
        jump = mask.parent_jumps(tree)
        chosen_by_parent = jnp.take_along_axis(target, jump, axis=1)
        is_root = jnp.broadcast_to(own == 0, (batch, slots))
        is_valid = own[None, :] < tree.num_nodes[:, None]
        matched = is_root | (is_valid & (chosen_by_parent == tree.token_ids) & (tree.depths <= max_depth))
        for _ in range(mask.num_doublings(min(max_depth, slots - 1))):
            matched = matched & jnp.take_along_axis(matched, jump, axis=1)
            jump = jnp.take_along_axis(jump, jump, axis=1)

        by_depth = jnp.arange(max_depth + 1, dtype=jnp.int32)
        here = matched[:, None, :] & (tree.depths[:, None, :] == by_depth[None, :, None])
        node_ids = jnp.max(jnp.where(here, own[None, None, :], NO_NODE), axis=-1)
        length = jnp.sum(matched, axis=-1, dtype=jnp.int32)
        last = jnp.take_along_axis(node_ids, length[:, None] - 1, axis=1)
        bonus_token_ids = jnp.take_along_axis(target, last, axis=1)[:, 0]
    return AcceptedPath(node_ids=node_ids, length=length, bonus_token_ids=bonus_token_ids)
