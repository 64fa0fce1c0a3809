"""Packed weights of `nvfp4_grid.FRAGMENTS` in shared memory -> registers of wgmma's left operand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.models.quant import GROUP
from ddtree_jax.pallas.nvfp4_grid import (
    FRAGMENTS,
    GROUPS,
    ROWS,
    code_values,
    scale_values,
    tile_codes,
    tile_scales,
)
from ddtree_jax.pallas.nvfp4_kernel import shifted

CHUNK = 64  # inputs of a fragment
_THREADS = 128  # of a warpgroup

# PTX that takes the scale bytes of four groups apart, into both halves of a register: those of groups 0 and 2, and of 1
# and 3. A byte lies at bits 4 to 11, and the exponent's offset is added.
_SCALE = ".reg .b32 t;\n{}\nshl.b32 t, t, 4;\nadd.u32 $0, t, 0x76007600;"
SPREAD = _SCALE.format("and.b32 t, $1, 0x00FF00FF;"), _SCALE.format("prmt.b32 t, $1, 0, 0x4341;")


def unpacker(plgpu: Any) -> Callable[[Any, Any, int], jax.Array]:
    """(words int32 [8, 256], scales uint8 [4, 256], chunk) -> bf16 [64, 64], the left operand of `wgmma`.

    Values are those of `nvfp4_kernel`: `restore` multiplies the sum.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, vector
    from jaxlib.mlir.dialects import llvm

    def unpack(words: Any, scales: Any, chunk: int) -> jax.Array:
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((ROWS, CHUNK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
        )
        def fragment(ctx: Any, words_ref: Any, scales_ref: Any) -> Any:
            del ctx
            i8, i32 = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
            index, bf16x2 = ir.IndexType.get(), ir.VectorType.get((2,), ir.BF16Type.get())

            def number(n: int) -> ir.Value:
                return arith.constant(i32, ir.IntegerAttr.get(i32, n))

            def load(ref: ir.Value, count: int, kind: ir.Type, row: ir.Value, column: ir.Value) -> ir.Value:
                at = [arith.index_cast(index, n) for n in (row, column)]
                return vector.load(ir.VectorType.get((count,), kind), ref, at)

            def asm(text: str, *operands: ir.Value) -> ir.Value:
                constraints = "=r" + ",r" * len(operands)
                return llvm.inline_asm(i32, list(operands), f"{{\n{text}\n}}", constraints, has_side_effects=False)

            def register(value: ir.Value) -> ir.Value:
                return vector.bitcast(bf16x2, vector.broadcast(ir.VectorType.get((1,), i32), value))

            thread = arith.remui(mgpu.utils.thread_idx(), number(_THREADS))
            # 4 words of each thread, 64 threads a row; 8 scales of each four threads.
            row = arith.addi(number(2 * chunk), arith.divui(thread, number(64)))
            four = load(words_ref, 4, i32, row, arith.muli(arith.remui(thread, number(64)), number(4)))
            eight = load(scales_ref, 8, i8, number(chunk), arith.muli(arith.divui(thread, number(4)), number(8)))
            halves = vector.bitcast(ir.VectorType.get((2,), i32), eight)
            # A register for each 8 inputs and each half of a warp's 16 rows.
            registers = np.empty((CHUNK // 8, 2), dtype=object)
            scales = [[asm(text, vector.extract(halves, [], [half])) for text in SPREAD] for half in range(2)]
            for group in range(CHUNK // GROUP):
                word = vector.extract(four, [], [group])
                # ptxas makes the repeated half a modifier of the product.
                scale = f"mov.b32 {{l, h}}, $2;\nmov.b32 c, {{{'hl'[group < 2]}, {'hl'[group < 2]}}};"
                for half in range(2):
                    for right in range(2):
                        code = shifted("$1", 2 * right + half)
                        text = f".reg .b16 l, h;\n.reg .b32 a, b, c;\n{code}\n{scale}\nmul.rn.bf16x2 $0, a, c;"
                        product = asm(text, word, scales[half][group % 2])
                        registers[2 * group + right, half] = register(product)
            registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, CHUNK)))
            return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

        return fragment(words, scales)

    return unpack


def unpacked(words: Any, scales: Any) -> jax.Array:
    """bf16 [64, 256], the same of all chunks in plain JAX, for interpreted kernels: the weights themselves."""
    codes = tile_codes(words[...].reshape(2, ROWS, GROUPS), FRAGMENTS)
    factors = scale_values(tile_scales(scales[...].reshape(ROWS, GROUPS), FRAGMENTS))
    return (code_values(codes) * factors[..., None]).reshape(ROWS, -1).astype(jnp.bfloat16)
