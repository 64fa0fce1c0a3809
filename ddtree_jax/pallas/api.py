"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from ddtree_jax.pallas.backend import BLACKWELL, BLACKWELL_RTX, HOPPER
from ddtree_jax.pallas.dispatch import REFERENCE, Op
from ddtree_jax.pallas.moe import moe_reference, moe_triton
from ddtree_jax.pallas.nvfp4_matmul import nvfp4_matmul_reference, nvfp4_matmul_triton

TRITON = "triton"
_TRITON_FIRST = {generation: (TRITON,) for generation in (HOPPER, BLACKWELL, BLACKWELL_RTX)}

OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op("nvfp4_matmul", {TRITON: nvfp4_matmul_triton, REFERENCE: nvfp4_matmul_reference}, _TRITON_FIRST),
        Op("moe", {TRITON: moe_triton, REFERENCE: moe_reference}, _TRITON_FIRST),
    )
}
