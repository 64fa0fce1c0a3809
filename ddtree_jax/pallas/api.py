"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_jax.pallas import commit_rows as commit
from ddtree_jax.pallas import index_select, indexer, vocab_rows, vocab_topk
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, HOPPER, OTHER_GPU
from ddtree_jax.pallas.dispatch import REFERENCE, Implementation, Op

KERNEL_GPUS = (HOPPER, BLACKWELL, BLACKWELL_RTX)


def _op(
    name: str,
    implementations: Mapping[str, Implementation],
    preferred: tuple[str, ...] = (),
    generations: tuple[str, ...] = KERNEL_GPUS,
) -> Op:
    return Op(name, implementations, {generation: preferred for generation in generations})


indexer_scores = _op(
    "indexer_scores",
    {REFERENCE: indexer.indexer_scores_reference, "triton": indexer.indexer_scores_triton},
    ("triton",),
)
select_top_k_indices = _op(
    "select_top_k_indices",
    {REFERENCE: index_select.select_top_k_indices_reference, "digits": index_select.select_top_k_indices_digits},
    ("digits",),
)
vocab_topk_op = _op(
    "vocab_topk",
    {REFERENCE: vocab_topk.vocab_topk_reference, "block_descent": vocab_topk.vocab_topk_block_descent},
    ("block_descent",),
    (*KERNEL_GPUS, OTHER_GPU),
)
vocab_argmax = _op("vocab_argmax", {REFERENCE: vocab_rows.vocab_argmax})
commit_rows = _op(
    "commit_rows",
    {REFERENCE: commit.commit_rows_reference, "triton": commit.commit_rows_triton},
    ("triton",),
)

OPS: dict[str, Op] = {
    op.name: op for op in (indexer_scores, select_top_k_indices, vocab_topk_op, vocab_argmax, commit_rows)
}
