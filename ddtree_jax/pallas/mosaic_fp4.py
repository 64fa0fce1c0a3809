"""`nvfp4_w4a4_matmul` by tcgen05's block-scaled product, in Mosaic GPU, for sm_100a. Compiles, never run.

The weights are the side of 128 rows, the tokens the other one, so the kernel gives w x^T; the rest (sum of the parts
of K, transposition, scale, rounding) is one XLA fusion over a small array. One block of threads takes 128 weight rows
and one part of K: a warp copies codes and block scales of 256 columns a stage to shared memory by TMA, another copies
the scales on to tensor memory and issues the products. Every stage has its own place for scales in tensor memory: the
order of a product and a later copy over its scales is then by the stage's barrier, and not by how the hardware queues
them.

Mosaic's interpreter has no block-scaled products. The tests put stand-ins in their place to check copies, slots,
barriers and sums; tensor memory and the product itself have been checked in nothing but what they compile to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.models.quant import GROUP
from ddtree_jax.pallas.backend import BLACKWELL, Platform
from ddtree_jax.pallas.fp4_activations import quantise_activations
from ddtree_jax.pallas.nvfp4_w4a4_matmul import (
    SCALE_COLUMNS,
    SCALE_ROWS,
    Sizes,
    check_arguments,
    split_steps,
    swizzle_scales,
)
from ddtree_jax.pallas.nvfp4_w4a4_matmul import whole_scale as whole_scale_of

MAX_ROWS = 256
_ROWS_OF_A_PRODUCT = 128  # weights; also the most tokens whose scales one tensor-memory tile holds
_SCALE_STEP = GROUP * SCALE_COLUMNS  # columns of a tile of scales
_RESERVED = 4096  # bytes of shared memory left to barriers and alignment
_TENSOR_COLUMNS = 512  # of tensor memory on a multiprocessor, allocated in powers of two
_EPILOGUE = 64  # columns of the accumulator in registers at a time


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tokens (padded), columns of K a stage, stages, parts of K."""

    tokens: int
    block_k: int
    stages: int
    split_k: int

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // _ROWS_OF_A_PRODUCT)

    @property
    def stage_bytes(self) -> int:
        """Of shared memory: codes of both sides, and scales of both in tiles of 128 rows."""
        codes = (_ROWS_OF_A_PRODUCT + self.tokens) * self.block_k // 2
        return codes + (1 + self.token_tiles) * SCALE_ROWS * self.block_k // GROUP

    @property
    def tensor_columns(self) -> int:
        """Of tensor memory: the accumulators, and the scales of every stage; before rounding to a power of two."""
        return self.tokens + self.stages * (1 + self.token_tiles) * self.block_k // GROUP


def choose_tiles(sizes: Sizes, platform: Platform) -> Tiles:
    """Tiles of a call. By reasoning, not by measurement: no GPU has run them.

    Raises NotImplementedError for a platform or sizes that have none.
    """
    if platform.generation != BLACKWELL:
        raise NotImplementedError(f"needs tcgen05 (compute capability 10.0), got {platform.generation}")
    if platform.interpret:
        raise NotImplementedError("no interpreter has block-scaled products")
    if not 1 <= sizes.m <= MAX_ROWS:
        raise NotImplementedError(f"serves 1..{MAX_ROWS} rows, got {sizes.m}")
    if not sizes.n or sizes.n % _ROWS_OF_A_PRODUCT:
        raise NotImplementedError(f"N must be a multiple of {_ROWS_OF_A_PRODUCT}, got {sizes.n}")
    block_k = next((size for size in (256, 128) if sizes.k and sizes.k % size == 0), None)
    if block_k is None:
        raise NotImplementedError(f"K must be a multiple of 128, got {sizes.k}")
    tokens = max(16, 1 << (sizes.m - 1).bit_length())
    # Two blocks on a multiprocessor where they fit: one loads while the other stores its result.
    blocks = 2 if tokens <= 128 else 1
    steps = sizes.k // block_k
    split = split_steps(steps, sizes.n // _ROWS_OF_A_PRODUCT, blocks * platform.cores)
    tiles = Tiles(tokens, block_k, 1, split)
    stages = min(8, steps // split, (platform.shared_memory // blocks - _RESERVED) // tiles.stage_bytes)
    tiles = dataclasses.replace(tiles, stages=max(1, stages))
    while tiles.tensor_columns > _TENSOR_COLUMNS // blocks:
        tiles = dataclasses.replace(tiles, stages=tiles.stages - 1)
    return tiles


def nvfp4_w4a4_matmul_mosaic(
    x: Any,
    codes: Any,
    scales: Any,
    global_scale: Any,
    input_scale: Any,
    *,
    out_dtype: Any = jnp.bfloat16,
    platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:
    """As `nvfp4_w4a4_matmul_reference`, for 1..256 rows on sm_100a, N and K multiples of 128.

    The sums are float32 in the order of the tensor cores. Takes the scales as `prepare_weights` gives them; those of a
    checkpoint are re-ordered in each call. `tiles` is for measurements. Raises NotImplementedError for other platforms
    and shapes.
    """
    sizes = check_arguments(x, codes, scales, global_scale, input_scale)
    chosen = choose_tiles(sizes, platform)
    tiles = chosen if tiles is None else tiles
    x_codes, x_scales = quantise_activations(jnp.pad(x, ((0, tiles.tokens - sizes.m), (0, 0))), input_scale)
    weights = scales if sizes.swizzled else swizzle_scales(scales)
    parts = _kernel(sizes.n, sizes.k, tiles)(_as_fp4(codes), weights, _as_fp4(x_codes), swizzle_scales(x_scales))
    total = parts[:, :, : sizes.m].sum(axis=0).T * whole_scale_of(global_scale, input_scale)
    return total.astype(out_dtype)


def _as_fp4(codes: jax.Array) -> jax.Array:
    """uint8 [rows, K/2] -> float4_e2m1fn [rows, K]; low nibble first in both, so it moves nothing on a GPU."""
    return lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(codes.shape[0], -1)


def _kernel(n: int, k: int, tiles: Tiles) -> Callable[..., jax.Array]:
    """(w fp4 [N, K], its scales, x fp4 [tokens, K], its scales) -> float32 [split_k, N, tokens]."""
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stages, block_k, tokens, count = tiles.stages, tiles.block_k, tiles.tokens, tiles.token_tiles
    tile = tokens // count
    steps = k // tiles.split_k // block_k
    scale_steps, scale_columns = block_k // _SCALE_STEP, block_k // GROUP
    swizzle = plgpu.find_swizzle(4 * block_k)
    transforms = (plgpu.TilingTransform((8, 2 * swizzle)), plgpu.SwizzleTransform(swizzle))  # two codes a byte

    def body(w, w_scales, x, x_scales, out, shared, tensor, loaded, consumed, finished):
        row, part = lax.axis_index("rows"), lax.axis_index("part")

        def load_step(i, carry):
            slot = lax.rem(i, jnp.int32(stages))

            @pl.when(i >= stages)
            def _wait_for_the_slot():
                plgpu.barrier_wait(consumed.at[slot])

            at = part * steps + i
            columns, tiles_at = pl.ds(at * block_k, block_k), pl.ds(at * scale_steps, scale_steps)
            rows = pl.ds(row * _ROWS_OF_A_PRODUCT, _ROWS_OF_A_PRODUCT)
            plgpu.copy_gmem_to_smem(w.at[rows, columns], shared["w"].at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(w_scales.at[pl.ds(row, 1), tiles_at], shared["w_scales"].at[slot], loaded.at[slot])
            plgpu.copy_gmem_to_smem(x.at[:, columns], shared["x"].at[slot], loaded.at[slot])
            for j in range(count):
                own = x_scales.at[pl.ds(j, 1), tiles_at]
                plgpu.copy_gmem_to_smem(own, shared["x_scales"][j].at[slot], loaded.at[slot])
            return carry

        def multiply_step(i, carry):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(loaded.at[slot])
            place = pl.ds(slot * scale_columns, scale_columns)
            own_w = tensor["w_scales"].at[:, place]
            plgpu.async_copy_scales_to_tmem(shared["w_scales"].at[slot], own_w)
            for j in range(count):
                own_x = tensor["x_scales"][j].at[:, place]
                plgpu.async_copy_scales_to_tmem(shared["x_scales"][j].at[slot], own_x)
                plgpu.tcgen05_mma(
                    tensor["sums"][j],
                    shared["w"].at[slot],
                    shared["x"].at[slot, pl.ds(j * tile, tile)].transpose((1, 0)),
                    a_scale=own_w,
                    b_scale=own_x,
                    accumulate=i > 0,
                )

            @pl.when(i < steps - stages)
            def _free_the_slot():  # when the products and copies issued so far are done
                plgpu.tcgen05_commit_arrive(consumed.at[slot])

            return carry

        @plgpu.warp_map
        def _by_warp(warp):
            @pl.when(warp == 0)
            def _load():
                lax.fori_loop(0, steps, load_step, None)

            @pl.when(warp == 1)
            def _multiply():
                lax.fori_loop(0, steps, multiply_step, None)
                plgpu.tcgen05_commit_arrive(finished)

        plgpu.barrier_wait(finished)
        rows = pl.ds(row * _ROWS_OF_A_PRODUCT, _ROWS_OF_A_PRODUCT)
        width = min(tile, _EPILOGUE)
        for j in range(count):
            for start in range(0, tile, width):
                value = plgpu.async_load_tmem(tensor["sums"][j].at[:, pl.ds(start, width)])
                plgpu.wait_load_tmem()
                out.at[part, rows, pl.ds(j * tile + start, width)][...] = value

    def scales_in_shared():
        return plgpu.SMEM((stages, 1, scale_steps, 32, 16), jnp.float8_e4m3fn)

    def scales_in_tensor():
        shape = (SCALE_ROWS, stages * scale_columns)
        return plgpu.TMEM(shape, jnp.float8_e4m3fn, layout=plgpu.TMEMLayout.SCALES_LAYOUT)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tiles.split_k, n, tokens), jnp.float32),
        grid=(n // _ROWS_OF_A_PRODUCT, tiles.split_k),
        grid_names=("rows", "part"),
        kernel_name="nvfp4_w4a4_matmul_mosaic",
        scratch_types=dict(
            shared={
                "w": plgpu.SMEM((stages, _ROWS_OF_A_PRODUCT, block_k), jnp.float4_e2m1fn, transforms=transforms),
                "w_scales": scales_in_shared(),
                "x": plgpu.SMEM((stages, tokens, block_k), jnp.float4_e2m1fn, transforms=transforms),
                "x_scales": [scales_in_shared() for _ in range(count)],
            },
            tensor={
                "sums": [plgpu.TMEM((_ROWS_OF_A_PRODUCT, tile), jnp.float32) for _ in range(count)],
                "w_scales": scales_in_tensor(),
                "x_scales": [scales_in_tensor() for _ in range(count)],
            },
            loaded=plgpu.Barrier(num_arrivals=3 + count, num_barriers=stages),
            consumed=plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
            finished=plgpu.Barrier(orders_tensor_core=True),
        ),
    )
