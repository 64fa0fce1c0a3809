"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from ddtree_jax.pallas import tree_attention
from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, HOPPER
from ddtree_jax.pallas.dispatch import REFERENCE, Op

_TRITON_FIRST = {generation: ("triton",) for generation in (HOPPER, BLACKWELL, BLACKWELL_RTX)}

OPS: dict[str, Op] = {
    "mla_attention": Op(
        "mla_attention",
        {REFERENCE: tree_attention.mla_attention_reference, "triton": tree_attention.mla_attention_triton},
        _TRITON_FIRST,
    ),
    "mla_attention_selected": Op(
        "mla_attention_selected",
        {
            REFERENCE: tree_attention.mla_attention_selected_reference,
            "triton": tree_attention.mla_attention_selected_triton,
        },
        _TRITON_FIRST,
    ),
    "gqa_attention": Op(
        "gqa_attention",
        {REFERENCE: tree_attention.gqa_attention_reference, "triton": tree_attention.gqa_attention_triton},
        _TRITON_FIRST,
    ),
}
