"""Routed experts whose weights are not packed: the kernels of `moe` over plain arrays, as a checkpoint lays them.

The tiles of rows are those of `moe_tiles`, and a program reads the weights of the one expert that its tile is of. What
`lax.ragged_dot` compiles to on a GPU reads every expert, whichever the rows have chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform, dot, load, store, triton_call
from ddtree_jax.pallas.moe_tiles import ExpertTiles, combine, make_tiles

VALUE_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainExperts:
    """One matrix an expert, [K -> parts x width], of one layer or of a stack of layers.

    Attributes:
      values: bfloat16, float32 or float8_e4m3fn [(R,) E, K, parts, width].
      scales: float32[(R,) E, parts], what the values are to be multiplied with; None: nothing.
    """

    values: jax.Array
    scales: jax.Array | None = None

    @property
    def lead(self) -> tuple[int, ...]:
        return self.values.shape[:-3]

    @property
    def k(self) -> int:
        return self.values.shape[-3]

    @property
    def parts(self) -> int:
        return self.values.shape[-2]

    @property
    def width(self) -> int:
        return self.values.shape[-1]

    def check(self, name: str) -> None:
        """ValueError for dtypes or scales that no implementation takes."""
        if self.values.dtype not in VALUE_DTYPES:
            allowed = ", ".join(jnp.dtype(dtype).name for dtype in VALUE_DTYPES)
            raise ValueError(f"{name}: got values in {self.values.dtype}; allowed are {allowed}")
        expected = (*self.lead, self.parts)
        if self.scales is not None and (self.scales.shape != expected or self.scales.dtype != jnp.float32):
            found = f"{self.scales.dtype}{list(self.scales.shape)}"
            raise ValueError(f"{name}: got scales {found}; they must be float32{list(expected)}")


def product_dtype(x: Any, values: Any) -> Any:
    """What both sides of a product are converted to, without loss: float32 if one is, else bfloat16."""
    return jnp.float32 if jnp.float32 in (x, values) else jnp.bfloat16


def times_expert(x: jax.Array, weight: PlainExperts) -> jax.Array:
    """[M, K] by one expert, `weight` without leading axes -> float32[M, parts, width]; plain JAX."""
    dtype = product_dtype(x.dtype, weight.values.dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    y = jnp.einsum(
        "mk,kpn->mpn",
        x.astype(dtype),
        weight.values.astype(dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return y if weight.scales is None else y * weight.scales[None, :, None]


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: slots of a tile, 16 or more. columns x depth: of the weight, a step. num_warps, num_stages: of Triton."""

    rows: int = 16
    columns: int = 64
    depth: int = 128
    num_warps: int = 4
    num_stages: int = 3

    @property
    def label(self) -> str:
        return f"r{self.rows}_c{self.columns}_d{self.depth}_w{self.num_warps}_p{self.num_stages}"


def choose_tiles(pairs: int, num_experts: int, dtype: Any, platform: Platform) -> Tiles:
    """Not measured yet. dtype: of the products (`product_dtype`)."""
    # A second tile of an expert reads its weights again.
    rows = 16 if pairs <= 8 * num_experts else 32 if pairs <= 24 * num_experts else 64
    if dtype == jnp.float32:  # products without tensor cores, operands in registers
        return Tiles(min(rows, 32), depth=32, num_stages=2)
    return Tiles(rows, num_stages=2 if platform.shared_memory < 200_000 else 3)


@functools.partial(jax.jit, static_argnames=("tiles", "platform"))
def run_plain(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: PlainExperts,
    down: PlainExperts,
    layer: jax.Array,
    tiles: Tiles | None,
    platform: Platform,
) -> jax.Array:
    """`moe_triton` of plain weights, all with leading axes [R, E]; layer: int32[1]."""
    num_experts = gate_up.lead[-1]
    if tiles is None:
        dtype = product_dtype(x.dtype, gate_up.values.dtype)
        tiles = choose_tiles(expert_ids.size, num_experts, dtype, platform)
    groups = make_tiles(expert_ids, num_experts, tiles.rows)
    h = _gate_up(x, groups, gate_up, layer, tiles, platform)
    y = _down(h, groups, down, layer, tiles, platform)
    return combine(y, groups.slots, weights)


def _gate_up(
    x: jax.Array, groups: ExpertTiles, weight: PlainExperts, layer: jax.Array, tiles: Tiles, platform: Platform
) -> jax.Array:
    """silu(gate) * up of every slot, [T R, I] in x's dtype."""
    return triton_call(
        functools.partial(_gate_up_kernel, tiles=tiles),
        name=f"moe_plain_gate_up_{tiles.label}",
        platform=platform,
        grid=(pl.cdiv(weight.width, tiles.columns), groups.experts.shape[0]),
        out_shape=jax.ShapeDtypeStruct((groups.rows.shape[0], weight.width), x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, groups.experts, groups.rows, x, *_arrays(weight))


def _arrays(weight: PlainExperts) -> tuple[jax.Array, ...]:
    return (weight.values,) if weight.scales is None else (weight.values, weight.scales)


def _gate_up_kernel(layer_ref, experts_ref, rows_ref, x_ref, values_ref, *rest, tiles):
    """One block of columns (gate and up) of one tile."""
    *scales_ref, out_ref = rest
    block, tile = pl.program_id(0), pl.program_id(1)
    layer, expert = layer_ref[0], experts_ref[tile]

    @pl.when(expert < values_ref.shape[1])
    def _():
        at = pl.ds(tile * tiles.rows, tiles.rows)
        rows = jnp.maximum(rows_ref[at], 0)
        gate, up = _products(x_ref, rows, values_ref, layer, expert, block, tiles)
        if scales_ref:
            gate = gate * scales_ref[0][layer, expert, 0]
            up = up * scales_ref[0][layer, expert, 1]
        h = gate * jax.nn.sigmoid(gate) * up
        _store(out_ref, tile, block, h.astype(out_ref.dtype), tiles)


def _down(
    h: jax.Array, groups: ExpertTiles, weight: PlainExperts, layer: jax.Array, tiles: Tiles, platform: Platform
) -> jax.Array:
    """float32[T R, D]: every slot's output, without its routing weight."""
    return triton_call(
        functools.partial(_down_kernel, tiles=tiles),
        name=f"moe_plain_down_{tiles.label}",
        platform=platform,
        grid=(pl.cdiv(weight.width, tiles.columns), groups.experts.shape[0]),
        out_shape=jax.ShapeDtypeStruct((h.shape[0], weight.width), jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, groups.experts, h, *_arrays(weight))


def _down_kernel(layer_ref, experts_ref, h_ref, values_ref, *rest, tiles):
    """One block of columns of one tile."""
    *scales_ref, out_ref = rest
    block, tile = pl.program_id(0), pl.program_id(1)
    layer, expert = layer_ref[0], experts_ref[tile]

    @pl.when(expert < values_ref.shape[1])
    def _():
        slots = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
        (y,) = _products(h_ref, slots, values_ref, layer, expert, block, tiles)
        if scales_ref:
            y = y * scales_ref[0][layer, expert, 0]
        _store(out_ref, tile, block, y, tiles)


def _products(
    x_ref: Any, rows: jax.Array, values_ref: Any, layer: jax.Array, expert: jax.Array, block: jax.Array, tiles: Tiles
) -> tuple[jax.Array, ...]:
    """float32[rows, columns] of each part: rows of x times a block of columns of one expert."""
    k, parts, width = values_ref.shape[2:]
    dtype = product_dtype(x_ref.dtype, values_ref.dtype)
    columns = block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    # Only what does not fill its tiles pays for masks.
    ragged_k, ragged_columns = k % tiles.depth != 0, width % tiles.columns != 0

    def body(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        at = step * tiles.depth + jnp.arange(tiles.depth, dtype=jnp.int32)
        inside = at < k
        x_at = x_ref.at[rows[:, None], at[None, :]]
        # What lies beyond K may be NaN, and 0 * NaN is no zero: both sides are masked.
        x = _load(x_at, (tiles.rows, tiles.depth), inside[None, :] if ragged_k else None)
        mask = inside[:, None] if ragged_k else None
        if ragged_columns:
            in_width = columns[None, :] < width
            mask = in_width if mask is None else mask & in_width
        sums = []
        for part in range(parts):
            w_at = values_ref.at[layer, expert, at[:, None], part, columns[None, :]]
            w = _load(w_at, (tiles.depth, tiles.columns), mask)
            sums.append(totals[part] + dot(x.astype(dtype), w.astype(dtype)))
        return tuple(sums)

    zeros = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(k, tiles.depth), body, (zeros,) * parts)


def _load(at: Any, shape: tuple[int, int], mask: jax.Array | None) -> jax.Array:
    return load(at) if mask is None else load(at, mask=jnp.broadcast_to(mask, shape), other=0.0)


def _store(out_ref: Any, tile: jax.Array, block: jax.Array, value: jax.Array, tiles: Tiles) -> None:
    slots = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    columns = block * tiles.columns + jnp.arange(tiles.columns, dtype=jnp.int32)
    mask = None
    if out_ref.shape[1] % tiles.columns:
        mask = jnp.broadcast_to(columns[None, :] < out_ref.shape[1], value.shape)
    store(out_ref.at[slots[:, None], columns[None, :]], value, mask=mask)
