"""Shared types of the tree: the draft tree, the accepted path, sentinels. No logic.

Dimension letters: B batch, L draft depth (drafter block size - 1), V vocabulary, K candidates kept per depth,
N tree slots (budget + 1; slot 0 is the root), D deepest node that a round may accept.
"""

import dataclasses

import jax

NO_PARENT = -1
NO_NODE = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees in structure-of-arrays form, with a fixed number of slots.

    Slot 0 is the root: the current token, already emitted and not yet in any cache. The valid nodes fill
    slots 0..num_nodes-1, parents before children; the slots beyond are padding. Validity is by count, never
    by token id.

    Attributes:
      token_ids: int32[B, N]. Padding slots hold 0, an id that is safe to embed.
      parents: int32[B, N], slot of the parent, smaller than the node's own; NO_PARENT for the root and for
        padding.
      depths: int32[B, N], root 0; padding 0.
      log_probs: float32[B, N], cumulative drafter log-probability of the path; root 0; padding -inf.
      num_nodes: int32[B], valid slots, the root included: 1..N.
    """

    token_ids: jax.Array  # [B, N]
    parents: jax.Array  # [B, N]
    depths: jax.Array  # [B, N]
    log_probs: jax.Array  # [B, N]
    num_nodes: jax.Array  # [B]

    @property
    def batch_size(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_slots(self) -> int:
        """N = budget + 1."""
        return self.token_ids.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AcceptedPath:
    """The root path that the target's choices follow, and the choice that left the tree.

    Attributes:
      node_ids: int32[B, D + 1]: the root, then the matched nodes by depth; NO_NODE at and beyond `length`.
      length: int32[B], 1..D+1, the root counted. The round emits `length` tokens: those of
        `node_ids[1:length]`, then the bonus.
      bonus_token_ids: int32[B], the target's choice after the last matched node.
    """

    node_ids: jax.Array  # [B, D + 1]
    length: jax.Array  # [B]
    bonus_token_ids: jax.Array  # [B]
