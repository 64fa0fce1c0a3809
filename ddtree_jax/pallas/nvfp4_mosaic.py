"""NVFP4 W4A16 products in Mosaic GPU for Hopper: weights on the 64-row side of wgmma, unpacked in registers.

One kernel serves linear layers and routed experts. Its work is cut into units: the rows of one tile (of one expert)
times `across` grid blocks of 64 columns. Blocks of threads, one a core, take units in turn; in each a warpgroup copies
steps of 256 inputs ahead, into the next unit too, and the others compute. A computing warpgroup has one grid block (of
gate and up, for SwiGLU, both) and every `depth`-th step; those of the same columns add their sums through shared memory
at the end of a unit.

A tile of packed weights lies in memory as the threads of a warpgroup need it (`nvfp4_grid.FRAGMENTS`): 16 bytes a
thread and 64 inputs, whose codes become registers of wgmma's left operand by shifts and masks. Activations are read as
they are: inputs keep their order.
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
from ddtree_jax.pallas.nvfp4_fragments import CHUNK, unpacked, unpacker
from ddtree_jax.pallas.nvfp4_grid import ROWS, STEP, GridWeight
from ddtree_jax.pallas.nvfp4_kernel import restore

_SHARED = 230_000  # bytes a block of threads may have, less what barriers and alignment take


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is cut.

    Attributes:
      across: grid blocks of a unit, a warpgroup each.
      depth: warpgroups that share the steps of a grid block.
      slots: rounds of `depth` steps in shared memory; None: what there is room for, up to 6.
    """

    across: int = 3
    depth: int = 1
    slots: int | None = None
    registers: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Units:
    """Static sizes of a call.

    Attributes:
      rows: activation rows of a tile, a multiple of 8 up to 128: the N side of wgmma.
      tiles: row tiles.
      experts: of a layer, 1 of a linear one.
      parts: 2: gate and up, whose SwiGLU is the result; else 1.
      blocks: grid blocks of a part.
      steps: of 256 inputs.
      routed: tiles have experts of their own, and not all may be in use.
    """

    rows: int
    tiles: int
    experts: int
    parts: int
    blocks: int
    steps: int
    routed: bool


def shared_bytes(units: Units, schedule: Schedule, slots: int, out_dtype: Any) -> int:
    across, depth = schedule.across, schedule.depth
    weights = across * depth * units.parts * ROWS * STEP * 9 // 16
    out = across * units.rows * ROWS * jnp.dtype(out_dtype).itemsize
    sums = across * (depth - 1) * units.parts * units.rows * ROWS * 4
    return slots * (weights + depth * units.rows * STEP * 2) + out + sums


def most_slots(units: Units, schedule: Schedule, out_dtype: Any) -> int:
    slots = schedule.slots or 6
    while slots > 2 and shared_bytes(units, schedule, slots, out_dtype) > _SHARED:
        slots -= 1
    return slots  # at least 2: a slot is freed when the next one has come


def require(x: Any, weight: GridWeight, platform: Platform) -> None:
    """NotImplementedError for what the kernel does not serve."""
    from ddtree_jax.pallas.nvfp4_grid import FRAGMENTS

    if platform.generation != HOPPER:
        raise NotImplementedError(f"needs wgmma (compute capability 9.0), got {platform.generation}")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"dtype {x.dtype}: bfloat16 only")
    if weight.arrangement != FRAGMENTS:
        raise NotImplementedError(f"weights laid out as {weight.arrangement}: {FRAGMENTS} only")
    require_mosaic()


def product(
    x: jax.Array, weight: GridWeight, layer: jax.Array, experts: jax.Array | None = None, count: jax.Array | None = None,
    *, swiglu: bool, out_dtype: Any, schedule: Schedule, platform: Platform, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """Each tile of rows times the weight of its expert.

    Args:
      x: bfloat16 [tiles * rows, steps * 256].
      weight: a stack [R] of linear layers, or [R, E] of experts, in fragments.
      layer: int32[1].
      experts: int32[tiles]; None: one tile, of a linear layer.
      count: int32[1], how many tiles are in use, the first ones. The rows of the others stay unwritten.
      swiglu: of two parts, silu(first) * second.

    Returns:
      [tiles * rows, columns] of `out_dtype`; columns of each part are padded to whole grid blocks.
    """
    routed = experts is not None
    num_tiles = experts.shape[0] if routed else 1
    parts = 2 if swiglu else 1
    units = Units(
        rows=x.shape[0] // num_tiles, tiles=num_tiles, experts=weight.words.shape[1] if routed else 1, parts=parts,
        blocks=weight.num_blocks // parts, steps=weight.num_steps, routed=routed,
    )  # fmt: skip
    if platform.interpret and interpret is None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        interpret = plgpu.InterpretGPUParams()
    run = _kernel(units, schedule, out_dtype, platform, interpret if platform.interpret else None)
    tiles = weight.words.size // (8 * 256)
    arrays = weight.words.reshape(tiles, 8, 256), weight.scales.reshape(tiles, 4, 256), weight.factors.reshape(-1)
    return run(layer, *((experts, count) if routed else ()), x, *arrays)


def _kernel(
    units: Units, schedule: Schedule, out_dtype: Any, platform: Platform, interpret: Any
) -> Callable[..., jax.Array]:
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    u, across, depth = units, schedule.across, schedule.depth
    slots = most_slots(units, schedule, out_dtype)
    assert u.blocks % across == 0 and u.steps % depth == 0, (units, schedule)
    workers, rounds, groups = across * depth, u.steps // depth, u.blocks // across
    cores = min(platform.cores, u.tiles * groups)
    unpack = unpacker(plgpu)
    factor = restore(platform, "shifted")

    def body(*refs, shared):
        layer_ref, *routing, x_ref, words_ref, scales_ref, factors_ref, out_ref = refs
        core, group = lax.axis_index("core"), lax.axis_index("group")
        total = (routing[1][0] if u.routed else u.tiles) * groups
        mine = jnp.maximum(total - core + cores - 1, 0) // cores
        full, free = shared["full"], shared["free"]

        def place(j):
            """(row tile, group of columns, first grid block in the weights) of this core's unit j."""
            unit = core + j * cores
            tile, columns = unit // groups, lax.rem(unit, jnp.int32(groups))
            expert = routing[0][tile] if u.routed else 0
            return tile, columns, (layer_ref[0] * u.experts + expert) * (u.parts * u.blocks) + columns * across

        @pl.when(group == workers)
        def _copy():
            if schedule.registers is not None:
                plgpu.set_max_registers(schedule.registers[1], action="decrease")

            def unit(j, done):
                tile, _, first = place(j)

                def copy(i, done):
                    slot = lax.rem(done, jnp.int32(slots))

                    @pl.when(done >= slots)
                    def _wait():
                        plgpu.barrier_wait(free.at[slot])

                    for deep in range(depth):
                        step = i * depth + deep
                        for wide in range(across):
                            for part in range(u.parts):
                                at = (first + part * u.blocks + wide) * u.steps + step
                                which = wide * depth + deep, part
                                for name, ref in (("words", words_ref), ("scales", scales_ref)):
                                    into = shared[name].at[slot, *which]
                                    plgpu.copy_gmem_to_smem(ref.at[at], into, full.at[slot])
                        inputs = x_ref.at[pl.ds(tile * u.rows, u.rows), pl.ds(step * STEP, STEP)]
                        plgpu.copy_gmem_to_smem(inputs, shared["x"].at[slot, deep], full.at[slot])
                    return done + 1

                return lax.fori_loop(0, rounds, copy, done)

            lax.fori_loop(0, mine, unit, jnp.int32(0))

        @pl.when(group != workers)
        def _compute():
            if schedule.registers is not None:
                plgpu.set_max_registers(schedule.registers[0], action="increase")
            deep, wide = lax.rem(group, jnp.int32(depth)), group // depth

            def unit(j, carry):
                tile, columns, first = place(j)

                def at(i):
                    return lax.rem(j * rounds + i, jnp.int32(slots))

                def packed(slot, part):
                    return shared["words"].at[slot, group, part], shared["scales"].at[slot, group, part]

                def inputs(slot, chunk):
                    return shared["x"].at[slot, deep, :, pl.ds(chunk * CHUNK, CHUNK)]

                def sums(*accs):
                    def step(i, carry):
                        slot = at(i)
                        plgpu.barrier_wait(full.at[slot])
                        for chunk in range(STEP // CHUNK):
                            for part, acc in enumerate(accs):
                                weights = unpack(*packed(slot, part), chunk)
                                plgpu.wgmma(acc, weights, inputs(slot, chunk).transpose((1, 0)))
                                # One product under way while the next weights are unpacked; more would take the
                                # registers of as many fragments.
                                plgpu.wgmma_wait(1)
                                if chunk == part == 0:
                                    # Those of the step before are done: its slot may be filled again.
                                    pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[at(i - 1)]))
                        return carry

                    lax.fori_loop(0, rounds, step, None)
                    return [acc[...] for acc in accs]

                def interpreted_sums():
                    """Mosaic's interpreter has neither sums that start from a value nor operands in registers."""

                    def step(i, totals):
                        slot = at(i)
                        plgpu.barrier_wait(full.at[slot])
                        for chunk in range(STEP // CHUNK):
                            x = inputs(slot, chunk)[...]
                            totals = [
                                total + jnp.dot(unpacked(*packed(slot, part), chunk), x.T, preferred_element_type=jnp.float32)
                                for part, total in enumerate(totals)
                            ]
                        plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
                        pl.when(i > 0)(lambda: plgpu.barrier_arrive(free.at[at(i - 1)]))
                        return totals

                    return lax.fori_loop(0, rounds, step, [jnp.zeros((ROWS, u.rows), jnp.float32)] * u.parts)

                if interpret is None:
                    found = pl.run_scoped(sums, *[plgpu.ACC((ROWS, u.rows), jnp.float32)] * u.parts)
                else:
                    found = interpreted_sums()
                plgpu.barrier_arrive(free.at[at(rounds - 1)])
                if depth > 1:

                    @pl.when(deep > 0)
                    def _give():
                        @pl.when(j > 0)
                        def _wait():
                            plgpu.barrier_wait(shared["taken"].at[wide])

                        for part, one in enumerate(found):
                            shared["sums"].at[wide, deep - 1, part][...] = one
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(shared["given"].at[wide])

                @pl.when(deep == 0)
                def _finish():
                    both = list(found)
                    if depth > 1:
                        plgpu.barrier_wait(shared["given"].at[wide])
                        for part in range(u.parts):
                            for other in range(depth - 1):
                                more = shared["sums"].at[wide, other, part]
                                both[part] += plgpu.load(more, layout=plgpu.Layout.WGMMA, optimized=False)
                        plgpu.barrier_arrive(shared["taken"].at[wide])
                    both = [one * (factors_ref[first + i * u.blocks + wide] * factor) for i, one in enumerate(both)]
                    out = both[0] if u.parts == 1 else both[0] / (1.0 + jnp.exp(-both[0])) * both[1]
                    into = shared["out"].at[wide]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    turned = plgpu.layout_cast(out.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    into.transpose((1, 0))[...] = turned
                    plgpu.commit_smem()
                    at = pl.ds(tile * u.rows, u.rows), pl.ds((columns * across + wide) * ROWS, ROWS)
                    plgpu.copy_smem_to_gmem(into, out_ref.at[*at])

                return carry

            lax.fori_loop(0, mine, unit, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
        columns = 128 // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    shared = {
        "words": plgpu.SMEM((slots, workers, u.parts, 8, 256), jnp.int32),
        "scales": plgpu.SMEM((slots, workers, u.parts, 4, 256), jnp.uint8),
        "x": tiled((slots, depth, u.rows, STEP), jnp.bfloat16),
        "out": tiled((across, u.rows, ROWS), out_dtype),
        "full": plgpu.Barrier(num_arrivals=2 * workers * u.parts + depth, num_barriers=slots),
        "free": plgpu.Barrier(num_arrivals=workers, num_barriers=slots),
    }
    if depth > 1:
        shared["sums"] = plgpu.SMEM((across, depth - 1, u.parts, ROWS, u.rows), jnp.float32)
        shared["given"] = plgpu.Barrier(num_arrivals=depth - 1, num_barriers=across)
        shared["taken"] = plgpu.Barrier(num_barriers=across)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((u.tiles * u.rows, u.blocks * ROWS), out_dtype),
        grid=(cores,),
        grid_names=("core",),
        num_threads=workers + 1,
        thread_name="group",
        kernel_name="nvfp4_swiglu_mosaic" if u.parts == 2 else "nvfp4_matmul_mosaic",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        scratch_types=dict(shared=shared),
    )
