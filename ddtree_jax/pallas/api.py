"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from collections.abc import Mapping

from ddtree_jax.pallas import commit_rows as commit
from ddtree_jax.pallas import (
    index_select,
    indexer,
    layer_heads_matmul,
    layer_matmul,
    moe,
    nvfp4_matmul,
    nvfp4_mosaic,
    tree_attention,
    vocab_rows,
    vocab_topk,
)
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, HOPPER, OTHER_GPU
from ddtree_jax.pallas.dispatch import REFERENCE, Implementation, Op
from ddtree_jax.pallas.mosaic_fp4 import nvfp4_w4a4_matmul_mosaic
from ddtree_jax.pallas.nvfp4_w4a4_matmul import nvfp4_w4a4_matmul_reference
from ddtree_jax.pallas.triton_fp4 import nvfp4_w4a4_matmul_triton

TRITON, MOSAIC = "triton", "mosaic"
KERNEL_GPUS = (HOPPER, BLACKWELL, BLACKWELL_RTX)


def _op(
    name: str,
    implementations: Mapping[str, Implementation],
    preferred: tuple[str, ...] = (TRITON,),
    generations: tuple[str, ...] = KERNEL_GPUS,
    own: Mapping[str, tuple[str, ...]] | None = None,
) -> Op:
    """own: generations with an order of their own."""
    return Op(name, implementations, {generation: preferred for generation in generations} | dict(own or {}))


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        _op(
            "nvfp4_matmul",
            {
                TRITON: nvfp4_matmul.nvfp4_matmul_triton,
                MOSAIC: nvfp4_mosaic.nvfp4_matmul_mosaic,
                REFERENCE: nvfp4_matmul.nvfp4_matmul_reference,
            },
            own={HOPPER: (MOSAIC, TRITON)},
        ),
        _op(
            "layer_matmul",
            {TRITON: layer_matmul.layer_matmul_triton, REFERENCE: layer_matmul.layer_matmul_reference},
        ),
        _op(
            "layer_heads_matmul",
            {
                TRITON: layer_heads_matmul.layer_heads_matmul_triton,
                REFERENCE: layer_heads_matmul.layer_heads_matmul_reference,
            },
        ),
        _op(
            "moe",
            {TRITON: moe.moe_triton, MOSAIC: moe.moe_mosaic, REFERENCE: moe.moe_reference},
            own={HOPPER: (MOSAIC, TRITON)},
        ),
        _op(
            "mla_attention",
            {
                TRITON: tree_attention.mla_attention_triton,
                MOSAIC: tree_attention.mla_attention_mosaic,
                REFERENCE: tree_attention.mla_attention_reference,
            },
            own={HOPPER: (MOSAIC, TRITON)},
        ),
        _op(
            "mla_attention_selected",
            {
                TRITON: tree_attention.mla_attention_selected_triton,
                MOSAIC: tree_attention.mla_attention_selected_mosaic,
                REFERENCE: tree_attention.mla_attention_selected_reference,
            },
            own={HOPPER: (MOSAIC, TRITON)},
        ),
        _op(
            "gqa_attention",
            {
                TRITON: tree_attention.gqa_attention_triton,
                MOSAIC: tree_attention.gqa_attention_mosaic,
                REFERENCE: tree_attention.gqa_attention_reference,
            },
            own={HOPPER: (MOSAIC, TRITON)},
        ),
        _op(
            "indexer_scores",
            {TRITON: indexer.indexer_scores_triton, REFERENCE: indexer.indexer_scores_reference},
        ),
        _op(
            "select_top_k_indices",
            {
                "digits": index_select.select_top_k_indices_digits,
                REFERENCE: index_select.select_top_k_indices_reference,
            },
            ("digits",),
        ),
        _op(
            "vocab_topk",
            {
                TRITON: vocab_topk.vocab_topk_triton,
                "block_descent": vocab_topk.vocab_topk_block_descent,
                REFERENCE: vocab_topk.vocab_topk_reference,
            },
            (TRITON, "block_descent"),
            own={OTHER_GPU: ("block_descent",)},
        ),
        _op("vocab_argmax", {REFERENCE: vocab_rows.vocab_argmax}, ()),
        _op("commit_rows", {TRITON: commit.commit_rows_triton, REFERENCE: commit.commit_rows_reference}),
        # The native ones compile and have never run: they are used only when named.
        _op(
            "nvfp4_w4a4_matmul",
            {
                "triton_native": nvfp4_w4a4_matmul_triton,
                "mosaic_native": nvfp4_w4a4_matmul_mosaic,
                REFERENCE: nvfp4_w4a4_matmul_reference,
            },
            (),
        ),
    )
}
