"""The kernel table: every operation, its implementations, and which GPU generation prefers which."""

from __future__ import annotations

from ddtree_jax.pallas.dispatch import Op
from ddtree_jax.pallas.mosaic_fp4 import nvfp4_w4a4_matmul_mosaic
from ddtree_jax.pallas.nvfp4_w4a4_matmul import nvfp4_w4a4_matmul_reference
from ddtree_jax.pallas.triton_fp4 import nvfp4_w4a4_matmul_triton

OPS: dict[str, Op] = {
    "nvfp4_w4a4_matmul": Op(
        "nvfp4_w4a4_matmul",
        {
            "reference": nvfp4_w4a4_matmul_reference,
            "triton_native": nvfp4_w4a4_matmul_triton,
            "mosaic_native": nvfp4_w4a4_matmul_mosaic,
        },
        order={},  # the native ones compile and have never run: they are used only when named
    ),
}
