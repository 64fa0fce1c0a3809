"""NVFP4 W4A16 products in Mosaic GPU for Hopper: weights on the 64-row side of wgmma, unpacked in registers.

A block of threads has warpgroups that compute and one that copies. A computing warpgroup has 64 output columns (a grid
block) and every `depth`-th step of 256 inputs; those of the same columns add their sums through shared memory at the
end. A tile of packed weights lies in memory as the threads of a warpgroup need it (`nvfp4_grid.FRAGMENTS`): 16 bytes
a thread and 64 inputs, whose codes become the registers of wgmma's left operand by shifts and masks. Activations are
read as they are: inputs keep their order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import HOPPER, Platform, require_mosaic
from ddtree_jax.pallas.nvfp4_grid import GROUPS, ROWS, STEP

CHUNK = 64  # inputs of a register fragment
_LANES = 128  # threads of a warpgroup
_RESTORE = 2.0**7  # of codes and scales, see nvfp4_kernel


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is cut.

    Attributes:
      across: grid blocks of a block of threads, a warpgroup each.
      depth: warpgroups that share the steps of a grid block.
      slots: rounds of `depth` steps in shared memory.
    """

    across: int = 3
    depth: int = 1
    slots: int = 4


def product(
    x: jax.Array, words: jax.Array, scales: jax.Array, factors: jax.Array, layer: jax.Array, *, out_dtype: Any,
    schedule: Schedule, platform: Platform,
) -> jax.Array:  # fmt: skip
    """[N, columns] from x bf16 [N, K], N a multiple of 8 up to 128, and the arrays of a stack in fragments."""
    if platform.generation != HOPPER:
        raise NotImplementedError(f"needs wgmma (compute capability 9.0), got {platform.generation}")
    require_mosaic()
    stack, blocks, steps = words.shape[:3]
    run = _kernel(
        rows=x.shape[0], blocks=blocks, steps=steps, schedule=schedule, out_dtype=out_dtype
    )
    tiles = stack * blocks * steps
    return run(
        layer.reshape(1), x, words.reshape(tiles, 8, 256), scales.reshape(tiles, 4, 256), factors.reshape(-1)
    )


def _kernel(*, rows: int, blocks: int, steps: int, schedule: Schedule, out_dtype: Any) -> Callable[..., jax.Array]:
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    across, depth, slots = schedule.across, schedule.depth, schedule.slots
    assert blocks % across == 0 and steps % depth == 0, (blocks, steps, schedule)
    workers = across * depth
    rounds = steps // depth
    unpack = _unpacker(plgpu)

    def body(layer_ref, x_ref, words_ref, scales_ref, factors_ref, out_ref, shared):
        tile, group = lax.axis_index("tile"), lax.axis_index("group")
        first = layer_ref[0] * blocks + tile * across
        full, free = shared["full"], shared["free"]

        @pl.when(group == workers)
        def _copy():
            def copy(i, carry):
                slot = lax.rem(i, jnp.int32(slots))

                @pl.when(i >= slots)
                def _wait():
                    plgpu.barrier_wait(free.at[slot])

                for deep in range(depth):
                    step = i * depth + deep
                    for wide in range(across):
                        at, which = (first + wide) * steps + step, wide * depth + deep
                        plgpu.copy_gmem_to_smem(words_ref.at[at], shared["words"].at[slot, which], full.at[slot])
                        plgpu.copy_gmem_to_smem(scales_ref.at[at], shared["scales"].at[slot, which], full.at[slot])
                    inputs = x_ref.at[:, pl.ds(step * STEP, STEP)]
                    plgpu.copy_gmem_to_smem(inputs, shared["x"].at[slot, deep], full.at[slot])
                return carry

            lax.fori_loop(0, rounds, copy, None)

        @pl.when(group != workers)
        def _compute():
            deep, wide = lax.rem(group, jnp.int32(depth)), group // depth

            def sums(acc):
                def step(i, carry):
                    slot = lax.rem(i, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    words, scales = shared["words"].at[slot, group], shared["scales"].at[slot, group]
                    for chunk in range(STEP // CHUNK):
                        weights = unpack(words, scales, chunk)
                        x = shared["x"].at[slot, deep, :, pl.ds(chunk * CHUNK, CHUNK)]
                        plgpu.wgmma(acc, weights, x.transpose((1, 0)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free.at[slot])
                    return carry

                lax.fori_loop(0, rounds, step, None)
                return acc[...]

            total = pl.run_scoped(sums, plgpu.ACC((ROWS, rows), jnp.float32))
            if depth > 1:

                @pl.when(deep > 0)
                def _give():
                    shared["sums"].at[wide, deep - 1][...] = total
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(shared["given"].at[wide])

            @pl.when(deep == 0)
            def _finish():
                out = total
                if depth > 1:
                    plgpu.barrier_wait(shared["given"].at[wide])
                    for other in range(depth - 1):
                        out = out + plgpu.load(shared["sums"].at[wide, other], layout=plgpu.Layout.WGMMA, optimized=False)
                out = (out * (factors_ref[first + wide] * _RESTORE)).astype(out_dtype)
                place = shared["out"].at[wide]
                place.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place, out_ref.at[:, pl.ds((tile * across + wide) * ROWS, ROWS)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    shared = {
        "words": plgpu.SMEM((slots, workers, 8, 256), jnp.int32),
        "scales": plgpu.SMEM((slots, workers, 4, 256), jnp.uint8),
        "x": plgpu.SMEM((slots, depth, rows, STEP), jnp.bfloat16, transforms=transforms),
        "out": plgpu.SMEM((across, rows, ROWS), out_dtype, transforms=transforms),
        "full": plgpu.Barrier(num_arrivals=2 * workers + depth, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
    }
    if depth > 1:
        shared["sums"] = plgpu.SMEM((across, depth - 1, ROWS, rows), jnp.float32)
        shared["given"] = plgpu.Barrier(num_arrivals=depth - 1, num_barriers=across)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, blocks * ROWS), out_dtype),
        grid=(blocks // across,),
        grid_names=("tile",),
        num_threads=workers + 1,
        thread_name="group",
        kernel_name="nvfp4_matmul_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        scratch_types=dict(shared=shared),
    )


def _unpacker(plgpu: Any) -> Callable[[Any, Any, int], jax.Array]:
    """(words int32 [8, 256], scales uint8 [4, 256], chunk) -> bf16 [64, 64] in the layout of wgmma's left operand."""
    import numpy as np
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, vector
    from jaxlib.mlir.dialects import llvm

    from ddtree_jax.pallas.nvfp4_kernel import _shifted

    def unpack(words: Any, scales: Any, chunk: int) -> jax.Array:
        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), plgpu.RefType()),
            return_type=plgpu.ShapeDtypeStruct((ROWS, CHUNK), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
        )
        def fragment(ctx, words_ref, scales_ref):
            del ctx
            i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()

            def number(n: int) -> ir.Value:
                return arith.constant(i32, ir.IntegerAttr.get(i32, n))

            def at(n: ir.Value) -> ir.Value:
                return arith.index_cast(index, n)

            def asm(text: str, *operands: ir.Value) -> ir.Value:
                return llvm.inline_asm(i32, list(operands), text, "=r" + ",r" * len(operands), has_side_effects=False)

            thread = arith.remui(mgpu.utils.thread_idx(), number(_LANES))
            # words of a chunk: [128 threads, 4], rows of 256 words
            row = arith.addi(number(2 * chunk), arith.divui(thread, number(64)))
            column = arith.muli(arith.remui(thread, number(64)), number(4))
            four = vector.load(ir.VectorType.get((4,), i32), words_ref, [at(row), at(column)])
            # scales of a chunk: [32 quads of threads, 2 halves of the rows, 4 groups]
            i8 = ir.IntegerType.get_signless(8)
            place = arith.muli(arith.divui(thread, number(4)), number(8))
            eight = vector.load(ir.VectorType.get((8,), i8), scales_ref, [at(number(chunk)), at(place)])
            pair = vector.bitcast(ir.VectorType.get((2,), i32), eight)
            bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
            registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((ROWS, CHUNK)), dtype=object)
            flat = {}
            for group in range(4):
                word = vector.extract(four, [], [group])
                for half in range(2):
                    some = vector.extract(pair, [], [half])
                    select = group | 0x40 | group << 8 | 0x4000
                    scale = asm(
                        f"{{\n.reg .b32 t;\nprmt.b32 t, $1, 0, {select:#x};\nshl.b32 t, t, 4;\n"
                        "add.u32 $0, t, 0x76007600;\n}",
                        some,
                    )
                    for right in range(2):
                        body = _shifted("$1", 2 * right + half)
                        value = asm(f"{{\n.reg .b32 a, b, c;\n{body}\nmul.rn.bf16x2 $0, a, $2;\n}}", word, scale)
                        flat[2 * group + right, half] = vector.bitcast(
                            bf16x2, vector.broadcast(ir.VectorType.get((1,), i32), value)
                        )
            # One register for each 8 columns and each half of a warp's 16 rows.
            shape = registers.shape
            order = registers.reshape(CHUNK // 8, 2)
            for (eighth, half), value in flat.items():
                order[eighth, half] = value
            return mgpu.FragmentedArray(
                _registers=order.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
            )

        return fragment(words, scales)

    return unpack
