"""Routed experts of a mixture, for few rows: two grouped products that read only the experts that rows have chosen.

Rows are grouped by expert into tiles (`moe_tiles`). The first kernel takes gate and up of one expert for one tile and
writes silu(gate) * up; the second multiplies with the down weights. The routing weights multiply the outputs as they
are summed by row. The kernels here are those of NVFP4 weights in Triton; `moe_mosaic` has those in Mosaic GPU for
Hopper, `moe_plain` those of plain weights.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ddtree_jax.models.quant import GROUP
from ddtree_jax.pallas import moe_mosaic as mosaic
from ddtree_jax.pallas import moe_plain, nvfp4_mosaic
from ddtree_jax.pallas.backend import Platform, require_kernels, store, triton_call
from ddtree_jax.pallas.moe_plain import PlainExperts
from ddtree_jax.pallas.moe_tiles import ExpertTiles, combine, make_tiles
from ddtree_jax.pallas.nvfp4_grid import (
    GROUPS,
    ROWS,
    STEP,
    GridWeight,
    decode_grid,
    num_parts,
    part_factors,
    prepare_rows,
)
from ddtree_jax.pallas.nvfp4_kernel import accumulate, require_arrangement, restore

MAX_ROWS = 512  # in one call; more rows hit every expert several times over

Experts = GridWeight | PlainExperts


@dataclasses.dataclass(frozen=True)
class Tiles:
    """rows: slots of a tile, 1, 2 or 16. The rest as in `nvfp4_matmul.Tiles`; `down_splits` share a step range."""

    rows: int
    weights_first: bool = False
    num_warps: int = 4
    num_stages: int = 3
    join: int = 1
    down_splits: int = 1

    @property
    def label(self) -> str:
        order = "wx" if self.weights_first else "xw"
        return f"r{self.rows}_{order}_w{self.num_warps}_p{self.num_stages}_j{self.join}_s{self.down_splits}"


def choose_tiles(platform: Platform) -> Tiles:
    """The tile table, measured on one H200 (benchmarks/RESULTS.md)."""
    small = platform.shared_memory < 200_000
    return Tiles(16, num_stages=2 if small else 3, join=4)


def moe_reference(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: Experts,
    down: Experts,
    layer: jax.Array | None = None,
    *,
    platform: Platform,
) -> jax.Array:
    """Routed experts, one expert at a time over those that are chosen.

    Args:
      x: bfloat16 or float32 [M, D].
      expert_ids: int32[M, k]; ids outside 0..E-1 are served by no expert here and add nothing, whatever x holds.
      weights: float32[M, k], of the outputs.
      gate_up: [(R,) E, D -> 2 x I]; down: [(R,) E, I -> 1 x D], of the same kind. R only with `layer`.
      layer: int32[], which of R stacked layers.

    Returns:
      float32[M, D].
    """
    del platform
    num_experts = _check(x, expert_ids, weights, gate_up, down, layer)
    chosen = expert_ids[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None, :]
    by_expert = jnp.sum(jnp.where(chosen, weights[:, :, None], 0.0), axis=1)  # [M, E]
    chosen = jnp.any(chosen, axis=1)
    hit = jnp.any(chosen, axis=0)
    order = jnp.argsort(~hit)
    gate_up, down, layer = _stacks(gate_up, down, layer)

    def times(x: jax.Array, weight: Experts, e: jax.Array) -> jax.Array:
        def pick(a: jax.Array) -> jax.Array:
            zeros = (jnp.int32(0),) * (a.ndim - 2)
            return jax.lax.dynamic_slice(a, (layer[0], e.astype(jnp.int32), *zeros), (1, 1, *a.shape[2:]))[0, 0]

        own = jax.tree.map(pick, weight)
        if isinstance(own, PlainExperts):
            return moe_plain.times_expert(x, own)
        product = moe_plain.times_expert(x, PlainExperts(decode_grid(own, x.dtype, factors=False)))
        return product * part_factors(own)[None, :, None]  # as the kernels: the factor multiplies the sum

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        e = order[i]
        gu = times(x, gate_up, e)
        h = (jax.nn.silu(gu[:, 0]) * gu[:, 1]).astype(x.dtype)
        y = times(h, down, e)[:, 0] * jax.lax.dynamic_index_in_dim(by_expert, e, axis=1)
        # What an expert makes of rows that have not chosen it may be NaN: chosen away, not multiplied away.
        return total + jnp.where(jax.lax.dynamic_index_in_dim(chosen, e, axis=1), y, 0.0)

    return jax.lax.fori_loop(0, jnp.sum(hit), body, jnp.zeros(x.shape, jnp.float32))


def moe_triton(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: Experts,
    down: Experts,
    layer: jax.Array | None = None,
    *,
    platform: Platform,
    tiles: Tiles | moe_plain.Tiles | None = None,
) -> jax.Array:
    """The Pallas-Triton kernels. Arguments as for the reference; `tiles`, of the weights' kind, overrides the table."""
    require_kernels(platform)
    _check(x, expert_ids, weights, gate_up, down, layer)
    if x.shape[0] > MAX_ROWS:
        raise NotImplementedError(f"{x.shape[0]} rows; the kernels are made for up to {MAX_ROWS}")
    gate_up, down, layer = _stacks(gate_up, down, layer)
    if isinstance(gate_up, PlainExperts):
        return moe_plain.run_plain(x, expert_ids, weights, gate_up, down, layer, tiles, platform)
    for weight in (gate_up, down):
        require_arrangement(platform, weight.arrangement)
    if tiles is None:
        tiles = choose_tiles(platform)
    return _run(x, expert_ids, weights, gate_up, down, layer, tiles, platform)


def moe_mosaic(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: Experts,
    down: Experts,
    layer: jax.Array | None = None,
    *,
    platform: Platform,
    **how: Any,
) -> jax.Array:
    """The Mosaic GPU kernel of packed experts. Arguments as for the reference; `how` as for `moe_mosaic.run_mosaic`."""
    _check(x, expert_ids, weights, gate_up, down, layer)
    if isinstance(gate_up, PlainExperts):
        raise NotImplementedError("plain experts: packed ones only")
    for weight in (gate_up, down):
        nvfp4_mosaic.require(weight, platform)
    if not 0 < x.shape[0] <= MAX_ROWS:
        raise NotImplementedError(f"{x.shape[0]} rows; the kernels are made for 1 to {MAX_ROWS}")
    return mosaic.run_mosaic(x, expert_ids, weights, *_stacks(gate_up, down, layer), platform=platform, **how)


def _stacks(gate_up: Experts, down: Experts, layer: jax.Array | None) -> tuple[Experts, Experts, jax.Array]:
    """The weights as stacks of layers, and int32[1], which layer of them."""
    if layer is None:
        gate_up, down = (jax.tree.map(lambda a: a[None], w) for w in (gate_up, down))
    return gate_up, down, jnp.zeros(1, jnp.int32) if layer is None else layer.astype(jnp.int32).reshape(1)


@functools.partial(jax.jit, static_argnames=("tiles", "platform"))
def _run(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: GridWeight,
    down: GridWeight,
    layer: jax.Array,
    tiles: Tiles,
    platform: Platform,
) -> jax.Array:
    groups = make_tiles(expert_ids, gate_up.words.shape[1], tiles.rows)
    h = _gate_up(x, groups, gate_up, layer, tiles, platform)
    y = _down(h, groups, down, layer, tiles, platform)
    return combine(y, groups.slots, weights)[:, : down.width]


def _gate_up(
    x: jax.Array, groups: ExpertTiles, weight: GridWeight, layer: jax.Array, tiles: Tiles, platform: Platform
) -> jax.Array:
    """silu(gate) * up of every slot, as `_down` reads it: bfloat16[parts, KB, 16 / join, T R, join G]."""
    blocks = weight.num_blocks // 2
    parts, steps = num_parts(x.dtype), -(-blocks * ROWS // STEP)
    prepared = prepare_rows(x, weight.num_steps, tiles.join)
    shape = (parts, steps, GROUP // tiles.join, groups.rows.shape[0], GROUPS * tiles.join)
    kernel = functools.partial(_gate_up_kernel, tiles=tiles, arrangement=weight.arrangement, platform=platform)
    return triton_call(
        kernel,
        name=f"moe_gate_up_{tiles.label}",
        platform=platform,
        # Where a step of the next product has more columns than there are blocks, the rest is written as zeros.
        grid=(steps * STEP // ROWS, groups.experts.shape[0]),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, groups.experts, groups.rows, prepared, weight.words, weight.scales, weight.factors)


def _gate_up_kernel(
    layer_ref,
    experts_ref,
    rows_ref,
    x_ref,
    words_ref,
    scales_ref,
    factors_ref,
    out_ref,
    *,
    tiles,
    arrangement,
    platform,
):
    """One block of columns (gate and up) of one tile."""
    block, tile = pl.program_id(0), pl.program_id(1)
    layer, expert = layer_ref[0], experts_ref[tile]
    blocks = words_ref.shape[2] // 2
    slots = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    parts = x_ref.shape[0]
    shape = (ROWS, tiles.rows) if tiles.weights_first else (tiles.rows, ROWS)

    @pl.when((expert < words_ref.shape[1]) & (block < blocks))
    def _():
        rows = jnp.maximum(rows_ref[pl.ds(tile * tiles.rows, tiles.rows)], 0)

        def body(step: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            def product(total: jax.Array, at: jax.Array) -> jax.Array:
                words = tuple(words_ref[layer, expert, at, step, h] for h in range(2))
                return accumulate(
                    total,
                    words,
                    scales_ref[layer, expert, at, step],
                    lambda part, n: x_ref[part, step, n, rows, :],
                    parts=parts,
                    weights_first=tiles.weights_first,
                    platform=platform,
                    arrangement=arrangement,
                    join=tiles.join,
                )

            return product(totals[0], block), product(totals[1], blocks + block)

        zeros = jnp.zeros(shape, jnp.float32)
        gate, up = jax.lax.fori_loop(0, words_ref.shape[3], body, (zeros, zeros))
        scale = restore(platform, arrangement)
        gate = gate * (factors_ref[layer, expert, block] * scale)
        up = up * (factors_ref[layer, expert, blocks + block] * scale)
        _store_hidden(out_ref, block, slots, gate * jax.nn.sigmoid(gate) * up, parts, tiles)

    @pl.when((expert < words_ref.shape[1]) & (block >= blocks))
    def _():
        _store_hidden(out_ref, block, slots, jnp.zeros(shape, jnp.float32), parts, tiles)


def _store_hidden(out_ref: Any, block: jax.Array, slots: jax.Array, h: jax.Array, parts: int, tiles: Tiles) -> None:
    """Writes columns ROWS block.. of the slots to the places that `prepare_rows` would give them."""
    column = jnp.arange(ROWS, dtype=jnp.int32)
    k = block % (STEP // ROWS) * ROWS + column
    group, place = k // GROUP, k % GROUP
    step, n, lane = block // (STEP // ROWS), place // tiles.join, tiles.join * group + place % tiles.join
    if tiles.weights_first:  # [columns, slots]
        slots, n, lane = slots[None, :], n[:, None], lane[:, None]
    else:
        slots, n, lane = slots[:, None], n[None, :], lane[None, :]
    for part in range(parts):
        piece = h.astype(jnp.bfloat16)
        h = h - piece.astype(jnp.float32)
        store(out_ref.at[part, step, n, slots, lane], piece)


def _down(
    h: jax.Array, groups: ExpertTiles, weight: GridWeight, layer: jax.Array, tiles: Tiles, platform: Platform
) -> jax.Array:
    """float32[T R, columns]: every slot's output, without its routing weight."""
    shape = (tiles.down_splits, groups.rows.shape[0], weight.num_blocks * ROWS)
    kernel = functools.partial(_down_kernel, tiles=tiles, arrangement=weight.arrangement, platform=platform)
    out = triton_call(
        kernel,
        name=f"moe_down_{tiles.label}",
        platform=platform,
        grid=(weight.num_blocks, groups.experts.shape[0], tiles.down_splits),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )(layer, groups.experts, h, weight.words, weight.scales, weight.factors)
    return jnp.sum(out, axis=0) if tiles.down_splits > 1 else out[0]


def _down_kernel(
    layer_ref, experts_ref, h_ref, words_ref, scales_ref, factors_ref, out_ref, *, tiles, arrangement, platform
):
    """One block of columns of one tile, one share of the steps."""
    block, tile, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, expert = layer_ref[0], experts_ref[tile]
    share = words_ref.shape[3] // tiles.down_splits
    at_slots = pl.ds(tile * tiles.rows, tiles.rows)
    shape = (ROWS, tiles.rows) if tiles.weights_first else (tiles.rows, ROWS)

    @pl.when(expert < words_ref.shape[1])
    def _():
        def body(s: jax.Array, total: jax.Array) -> jax.Array:
            step = split * share + s
            return accumulate(
                total,
                tuple(words_ref[layer, expert, block, step, h] for h in range(2)),
                scales_ref[layer, expert, block, step],
                lambda part, n: h_ref[part, step, n, at_slots],
                parts=h_ref.shape[0],
                weights_first=tiles.weights_first,
                platform=platform,
                arrangement=arrangement,
                join=tiles.join,
            )

        total = jax.lax.fori_loop(0, share, body, jnp.zeros(shape, jnp.float32))
        total = total * (factors_ref[layer, expert, block] * restore(platform, arrangement))
        out_ref[split, at_slots, pl.ds(block * ROWS, ROWS)] = total.T if tiles.weights_first else total


def _check(
    x: jax.Array,
    expert_ids: jax.Array,
    weights: jax.Array,
    gate_up: Experts,
    down: Experts,
    layer: jax.Array | None,
) -> int:
    if x.ndim != 2 or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"x: got {x.dtype}{list(x.shape)}; it must be bfloat16 or float32 [M, D]")
    if expert_ids.ndim != 2 or expert_ids.shape[0] != x.shape[0] or weights.shape != expert_ids.shape:
        raise ValueError(
            f"expert_ids, weights: got shapes {expert_ids.shape} and {weights.shape}; both must be [{x.shape[0]}, k]"
        )
    if type(gate_up) is not type(down):
        raise ValueError(f"down: got {type(down).__name__}; it must be {type(gate_up).__name__}, as gate_up is")
    lead = 1 if layer is None else 2
    for name, weight, k, parts in (("gate_up", gate_up, x.shape[1], 2), ("down", down, gate_up.width, 1)):
        if len(weight.lead) != lead or weight.k != k or weight.parts != parts:
            raise ValueError(
                f"{name}: got lead {weight.lead}, {weight.k} -> {weight.parts} x {weight.width}; it must have {lead} "
                f"leading axes and be {k} -> {parts} x width"
            )
        if isinstance(weight, PlainExperts):
            weight.check(name)
    if down.width != x.shape[1] or down.lead != gate_up.lead:
        raise ValueError(f"down: got {down.lead} of width {down.width}; it must be {gate_up.lead} of {x.shape[1]}")
    return gate_up.lead[-1]
