"""Picking the accepted nodes' rows out of what the verification pass computed."""

import jax
import jax.numpy as jnp

from ddtree_jax.tree import checks


def gather_rows(rows, node_ids: jax.Array, *, node_axis: int, batch_axis: int):
    """Gathers per-node rows of a pytree in path order.

    All rows are read before anything is written, so the result can overwrite the slots that the rows came
    from. Keys that were rotated for `prefix_length + depth` need no second rotation: the accepted node at
    depth d becomes the committed token at exactly that position.

    Args:
      rows: pytree of arrays that all have `node_axis` of size N and `batch_axis` of size B.
      node_ids: int32[B, D + 1], as `AcceptedPath.node_ids`. NO_NODE reads slot 0: a finite row that the
        caller masks by count.
      node_axis: axis of the N node slots in every leaf; negative counts from the end.
      batch_axis: axis of the batch in every leaf; negative counts from the end.

    Returns:
      The same pytree with `node_axis` of size D + 1.

    Raises:
      ValueError: an axis outside a leaf's rank, or node_axis equal to batch_axis.
    """
    node_ids = checks.as_int32(node_ids, "node_ids", (None, None), "B, D + 1")
    indices = jnp.maximum(node_ids, 0)

    def gather(leaf):
        node, batch = _axis(node_axis, leaf.ndim, "node_axis"), _axis(batch_axis, leaf.ndim, "batch_axis")
        if node == batch:
            raise ValueError(f"node_axis: got {node_axis}, the same axis as batch_axis of a leaf of rank {leaf.ndim}.")
        if leaf.shape[batch] != node_ids.shape[0]:
            raise ValueError(
                f"rows: a leaf of shape {leaf.shape} has {leaf.shape[batch]} batch rows at axis {batch}; "
                f"node_ids has {node_ids.shape[0]}."
            )
        within_row = node - (batch < node)
        return jax.vmap(
            lambda row, index: jnp.take(row, index, axis=within_row, mode="clip"),
            in_axes=(batch, 0),
            out_axes=batch,
        )(leaf, indices)

    with jax.named_scope("gather_rows"):
        return jax.tree.map(gather, rows)


def _axis(axis: int, rank: int, name: str) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"{name}: got {axis}; a leaf has rank {rank}.")
    return axis % rank
