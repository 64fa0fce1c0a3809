"""NVFP4 W4A16 products: activations in bfloat16 or float32 times weights that stay packed in memory."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, largest_divisor, require_kernels, store, triton_call
from ddtree_jax.pallas.nvfp4_grid import GROUPS, ROWS, STEP, GridWeight, decode_grid, part_factors, prepare_rows
from ddtree_jax.pallas.nvfp4_kernel import accumulate, require_arrangement, restore

MAX_ROWS = 128  # in one kernel call; beyond, unpacking the weight once is cheaper


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a call is cut up.

    rows: activation rows of a program, padded to it.
    blocks: grid blocks (ROWS columns each) of a program: 1 or 2.
    splits: programs that share the steps of one tile; their partial sums are added by XLA.
    weights_first: the weights are the left operand (wgmma takes them from registers).
    num_warps, num_stages: of Triton.
    join: places of a group that go into one product. More than 1 gives wrong results where the weights come first and
      there are 32 rows or more (wgmma with its left operand in registers; seen on an H200, jax 0.11.2).
    """

    rows: int
    blocks: int = 1
    splits: int = 1
    weights_first: bool = False
    num_warps: int = 4
    num_stages: int = 3
    join: int = 1

    def __post_init__(self) -> None:
        if self.join > 1 and self.weights_first and self.rows >= 32:
            raise ValueError(f"tiles: got {self}; weights first with {self.rows} rows allow join 1 alone")

    @property
    def label(self) -> str:
        order = "wx" if self.weights_first else "xw"
        return f"r{self.rows}_b{self.blocks}_s{self.splits}_{order}_w{self.num_warps}_p{self.num_stages}_j{self.join}"


def choose_tiles(rows: int, num_blocks: int, num_steps: int, platform: Platform) -> Tiles:
    """The tile table, measured on one H200 (benchmarks/RESULTS.md)."""
    # Three programs a multiprocessor, which is what there is room for, if the steps can be shared out so.
    splits = largest_divisor(num_steps, max(1, min(12, 3 * max(platform.cores, 1) // num_blocks)))
    small = platform.shared_memory < 200_000
    if rows <= 2:
        return Tiles(rows, splits=largest_divisor(num_steps, max(2, 2 * splits)), weights_first=True)
    if rows <= 16:
        return Tiles(16, splits=splits, join=4)
    if rows <= 32:
        return Tiles(32, splits=splits, num_stages=2 if small else 3, join=4)
    return Tiles(64, splits=splits, weights_first=True, num_stages=2)


def nvfp4_matmul_reference(
    x: jax.Array, weight: GridWeight, layer: jax.Array | None = None, *, out_dtype: Any, platform: Platform
) -> jax.Array:
    """Unpacks the weight as a whole, then multiplies; as fast as plain weights plus one pass over them.

    Args:
      x: bfloat16 or float32 [M, K].
      weight: of one matrix, or with `layer` of a stack of them.
      layer: int32[], which of the stack; None: `weight` has no leading axis.
      out_dtype: of the result; sums are float32.

    Returns:
      [M, P, width].
    """
    del platform
    arrays = check_arguments(x, weight, layer)
    if layer is not None:
        arrays = [jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in arrays]
    words, scales, factors = arrays
    one = dataclasses.replace(weight, words=words, scales=scales, factors=factors)
    plain = decode_grid(one, x.dtype, factors=False)  # as the kernel: the factor multiplies the sum
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum("mk,kpn->mpn", x, plain, precision=precision, preferred_element_type=jnp.float32)
    return (out * part_factors(one)[None, :, None]).astype(out_dtype)


def nvfp4_matmul_triton(
    x: jax.Array,
    weight: GridWeight,
    layer: jax.Array | None = None,
    *,
    out_dtype: Any,
    platform: Platform,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The Pallas-Triton kernel. Arguments as for the reference; `tiles` overrides the table."""
    require_kernels(platform)
    require_arrangement(platform, weight.arrangement)
    arrays = check_arguments(x, weight, layer)
    rows = x.shape[0]
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} rows; the kernel is made for up to {MAX_ROWS}")
    if tiles is None:
        tiles = choose_tiles(rows, weight.num_blocks, weight.num_steps, platform)
    if layer is None:
        arrays = [a[None] for a in arrays]
        layer = jnp.int32(0)
    out = _run(x, arrays, layer.reshape(1), weight.arrangement, jnp.dtype(out_dtype), tiles, platform)
    return out.reshape(out.shape[0], weight.parts, -1)[:, :, : weight.width]


@functools.partial(jax.jit, static_argnames=("arrangement", "out_dtype", "tiles", "platform"))
def _run(
    x: jax.Array,
    arrays: list[jax.Array],
    layer: jax.Array,
    arrangement: str,
    out_dtype: Any,
    tiles: Tiles,
    platform: Platform,
) -> jax.Array:
    """[M, columns]."""
    words, scales, factors = arrays
    rows = x.shape[0]
    blocks, steps = words.shape[1:3]
    assert blocks % tiles.blocks == 0 and steps % tiles.splits == 0
    row_tiles = pl.cdiv(rows, tiles.rows)
    padded = row_tiles * tiles.rows
    prepared = prepare_rows(jnp.pad(x, ((0, padded - rows), (0, 0))), steps, tiles.join)
    shape = (tiles.splits, rows, blocks * ROWS)
    kernel = functools.partial(_kernel, tiles=tiles, arrangement=arrangement, platform=platform)
    out = triton_call(
        kernel,
        name=f"nvfp4_matmul_{blocks * ROWS}_{steps * STEP}_{tiles.label}",
        platform=platform,
        grid=(blocks // tiles.blocks, row_tiles, tiles.splits),
        out_shape=jax.ShapeDtypeStruct(shape, out_dtype if tiles.splits == 1 else jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, prepared, words, scales, factors)
    return jnp.sum(out, axis=0).astype(out_dtype) if tiles.splits > 1 else out[0]


def _kernel(layer_ref, x_ref, words_ref, scales_ref, factors_ref, out_ref, *, tiles, arrangement, platform):
    """One tile of columns, one tile of rows, one share of the steps.

    layer: int32[1]; x: bfloat16[parts, KB, 16 / join, M padded, join G]; words: int32[R, NB, KB, 2, ROWS, G]; scales:
    uint8[R, NB, KB, ROWS, G]; factors: float32[R, NB]; out: [splits, M, NB * ROWS], float32 where there are several.
    """
    layer = layer_ref[0]
    block, row_tile, split = pl.program_id(0) * tiles.blocks, pl.program_id(1), pl.program_id(2)
    share = words_ref.shape[2] // tiles.splits
    columns = tiles.blocks * ROWS
    at_rows = pl.ds(row_tile * tiles.rows, tiles.rows)
    at_blocks = block if tiles.blocks == 1 else pl.ds(block, tiles.blocks)

    def body(s: jax.Array, total: jax.Array) -> jax.Array:
        step = split * share + s
        words = tuple(words_ref[layer, at_blocks, step, h].reshape(columns, GROUPS) for h in range(2))
        scales = scales_ref[layer, at_blocks, step].reshape(columns, GROUPS)
        return accumulate(
            total,
            words,
            scales,
            lambda part, n: x_ref[part, step, n, at_rows],
            parts=x_ref.shape[0],
            weights_first=tiles.weights_first,
            platform=platform,
            arrangement=arrangement,
            join=tiles.join,
        )

    shape = (columns, tiles.rows) if tiles.weights_first else (tiles.rows, columns)
    total = jax.lax.fori_loop(0, share, body, jnp.zeros(shape, jnp.float32))
    # One factor a block of columns.
    factors = factors_ref[layer, at_blocks] * restore(platform, arrangement)
    if tiles.blocks > 1:
        factors = jnp.broadcast_to(factors[:, None], (tiles.blocks, ROWS)).reshape(columns)
        factors = factors[:, None] if tiles.weights_first else factors[None, :]
    total = (total * factors).astype(out_ref.dtype)
    total = total.T if tiles.weights_first else total
    mask = None
    if out_ref.shape[1] % tiles.rows:  # the last tile of rows is not full
        live = row_tile * tiles.rows + jnp.arange(tiles.rows) < out_ref.shape[1]
        mask = jnp.broadcast_to(live[:, None], total.shape)
    store(out_ref.at[split, at_rows, pl.ds(block * ROWS, columns)], total, mask=mask)


def check_arguments(x: jax.Array, weight: GridWeight, layer: jax.Array | None) -> list[jax.Array]:
    """The weight's arrays; ValueError for arguments that no implementation takes."""
    if x.ndim != 2 or x.shape[1] != weight.k:
        raise ValueError(f"x: got shape {x.shape}; it must be [M, {weight.k}]")
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x: got {x.dtype}; allowed are bfloat16 and float32")
    if len(weight.lead) != (0 if layer is None else 1):
        raise ValueError(f"weight: got leading axes {weight.lead}; allowed is one with `layer`, none without")
    return [weight.words, weight.scales, weight.factors]
