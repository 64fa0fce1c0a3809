"""Draft trees: build, mask, accept, commit, and the round that joins them. Pure functions, no model."""

from ddtree_jax.tree.accept import accept
from ddtree_jax.tree.base import NO_NODE, NO_PARENT, AcceptedPath, DraftTree
from ddtree_jax.tree.build import (
    FORMULATIONS,
    build_tree,
    build_tree_from_candidates,
    chain_tree,
    default_formulation,
    draft_candidates,
    root_tree,
)
from ddtree_jax.tree.commit import gather_rows
from ddtree_jax.tree.constrained import (
    TokenTable,
    advance_states,
    build_constrained_tree,
    constrained_chain,
    node_states,
    stack_tables,
    state_rows,
)
from ddtree_jax.tree.grammar_rows import mask_logits
from ddtree_jax.tree.invariants import check_path, check_round, check_tree
from ddtree_jax.tree.mask import ancestor_mask, positions
from ddtree_jax.tree.pairs import (
    PAIR_FORMULATIONS,
    build_tree_from_pairs,
    chain_from_pairs,
    default_pair_formulation,
)
from ddtree_jax.tree.round import RoundFunctions, RoundOutput, RoundState, Verified, speculative_round

__all__ = [
    "FORMULATIONS",
    "NO_NODE",
    "NO_PARENT",
    "PAIR_FORMULATIONS",
    "AcceptedPath",
    "DraftTree",
    "RoundFunctions",
    "RoundOutput",
    "RoundState",
    "TokenTable",
    "Verified",
    "accept",
    "advance_states",
    "ancestor_mask",
    "build_constrained_tree",
    "build_tree",
    "build_tree_from_candidates",
    "build_tree_from_pairs",
    "chain_from_pairs",
    "chain_tree",
    "check_path",
    "check_round",
    "check_tree",
    "constrained_chain",
    "default_formulation",
    "default_pair_formulation",
    "draft_candidates",
    "gather_rows",
    "mask_logits",
    "node_states",
    "positions",
    "root_tree",
    "speculative_round",
    "stack_tables",
    "state_rows",
]
