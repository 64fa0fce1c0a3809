"""The kernel of `nvfp4_mosaic`: how its work is cut into units, what is copied, and what a warpgroup computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.backend import Platform
from ddtree_jax.pallas.nvfp4_fragments import CHUNK, unpacked, unpacker
from ddtree_jax.pallas.nvfp4_grid import FRAGMENTS, ROWS, STEP
from ddtree_jax.pallas.nvfp4_kernel import restore

CHUNKS = STEP // CHUNK
# Products that may be unfinished while more weights are unpacked, each with 16 registers of weights. On an H200 one is
# as fast as three.
_UNDER_WAY = 3
_SHARED = 230_000  # bytes a block of threads may have, less what barriers and alignment take
_TILE_BYTES = ROWS * STEP * 9 // 16
# A tile of packed weights as TMA copies it: no axis longer than 256.
WORDS, SCALES = (8, 256), (4, 256)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How a call is cut.

    Attributes:
      across: grid blocks of a unit, a warpgroup each.
      depth: warpgroups that share the steps of a grid block.
      slots: rounds of `depth` steps in shared memory at most, at least 2.
    """

    across: int
    depth: int = 1
    slots: int = 6

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ValueError(f"schedule: got {self}; slots from 2 on")

    @property
    def workers(self) -> int:
        return self.across * self.depth


@dataclasses.dataclass(frozen=True)
class Units:
    """Static sizes of a call.

    Attributes:
      rows: activation rows of a tile, a multiple of 8: the N side of wgmma.
      terms: bfloat16 arrays whose sum the activations are, 1 or 3.
      tiles: row tiles.
      experts: of a layer; 1 of a linear one.
      parts: 2: gate and up, of which SwiGLU is the result; else 1.
      blocks: grid blocks of a part.
      steps: of 256 inputs.
      routed: tiles have experts of their own, and only the first ones may be in use.
    """

    rows: int
    terms: int
    tiles: int
    experts: int
    parts: int
    blocks: int
    steps: int
    routed: bool

    def shared_bytes(self, schedule: Schedule, slots: int, out_dtype: Any) -> int:
        weights = schedule.workers * self.parts * _TILE_BYTES
        inputs = schedule.depth * self.terms * self.rows * STEP * 2
        out = schedule.across * self.rows * ROWS * jnp.dtype(out_dtype).itemsize
        sums = schedule.across * (schedule.depth - 1) * self.parts * self.rows * ROWS * 4
        return slots * (weights + inputs) + out + sums

    def slots(self, schedule: Schedule, out_dtype: Any) -> int:
        """As many as there is room for; 0 where there is none for two: one is filled while the other is read."""
        slots = schedule.slots
        while slots and self.shared_bytes(schedule, slots, out_dtype) > _SHARED:
            slots -= 1
        return slots if slots > 1 else 0


def kernel(
    units: Units, schedule: Schedule, out_dtype: Any, platform: Platform, interpret: Any
) -> Callable[..., jax.Array]:
    """(layer int32[1], [experts int32[tiles], used int32[1],] x, words, scales, factors) -> [tiles * rows, columns].

    x: bf16 [terms, tiles * rows, steps * 256]; words: int32 [grid tiles, 8, 256]; scales: uint8 [grid tiles, 4, 256];
    factors: float32 [grid blocks].
    """
    # Where kernels are built only: it costs an import of a second that other platforms need not pay.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    u, across, depth, workers = units, schedule.across, schedule.depth, schedule.workers
    slots = units.slots(schedule, out_dtype)
    if u.blocks % across or u.steps % depth:
        raise ValueError(f"got {schedule}; {u.blocks} blocks and {u.steps} steps must be multiples of across and depth")
    if not slots:
        raise NotImplementedError(f"{u.rows} rows: two steps of {schedule} do not fit into shared memory")
    rounds, groups = u.steps // depth, u.blocks // across
    cores = min(max(platform.cores, 1), u.tiles * groups)
    unpack = unpacker(plgpu)

    def body(*refs, shared):
        layer_ref, *routing, x_ref, words_ref, scales_ref, factors_ref, out_ref = refs
        core, group = lax.axis_index("core"), lax.axis_index("group")
        total = (routing[1][0] if u.routed else u.tiles) * groups
        mine = jnp.maximum(total - core + cores - 1, 0) // cores
        full, free = shared["full"], shared["free"]

        def place(j):
            """(row tile, group of columns, first grid block of the weights) of this core's unit j."""
            unit = core + j * cores
            if u.routed:
                tile, columns = unit // groups, lax.rem(unit, jnp.int32(groups))
                expert = routing[0][tile]
            else:
                # Tiles of the same weights together: all but one read them from the L2 cache.
                tile, columns = lax.rem(unit, jnp.int32(u.tiles)), unit // u.tiles
                expert = 0
            return tile, columns, (layer_ref[0] * u.experts + expert) * (u.parts * u.blocks) + columns * across

        @pl.when(group == workers)
        def _copy():
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
                                for name, ref in (("words", words_ref), ("scales", scales_ref)):
                                    into = shared[name].at[slot, wide * depth + deep, part]
                                    plgpu.copy_gmem_to_smem(ref.at[at], into, full.at[slot])
                        for term in range(u.terms):
                            inputs = x_ref.at[term, pl.ds(tile * u.rows, u.rows), pl.ds(step * STEP, STEP)]
                            plgpu.copy_gmem_to_smem(inputs, shared["x"].at[slot, deep, term], full.at[slot])
                    return done + 1

                return lax.fori_loop(0, rounds, copy, done)

            lax.fori_loop(0, mine, unit, jnp.int32(0))

        @pl.when(group != workers)
        def _compute():
            deep, wide = lax.rem(group, jnp.int32(depth)), group // depth

            def unit(j, carry):
                tile, columns, first = place(j)
                # Read before the sums, so that nothing waits for them at the end.
                factors = [factors_ref[first + part * u.blocks + wide] for part in range(u.parts)]
                slot_of = lambda i: lax.rem(j * rounds + i, jnp.int32(slots))  # noqa: E731
                work = _Work(plgpu, unpack, shared, u, schedule, group, deep, rounds, slot_of)
                if interpret is not None:
                    found = work.interpreted()
                else:
                    found = work.sums() if u.terms == 1 else work.exact_sums()
                if depth > 1:
                    pl.when(deep > 0)(lambda: give(j, found))
                pl.when(deep == 0)(lambda: finish(found, factors, tile, columns))
                return carry

            def give(j, found):
                @pl.when(j > 0)
                def _wait():
                    plgpu.barrier_wait(shared["taken"].at[wide])

                for part, one in enumerate(found):
                    shared["sums"].at[wide, deep - 1, part][...] = one
                plgpu.commit_smem()
                plgpu.barrier_arrive(shared["given"].at[wide])

            def finish(found, factors, tile, columns):
                found = list(found)
                if depth > 1:
                    plgpu.barrier_wait(shared["given"].at[wide])
                    for part in range(u.parts):
                        for other in range(depth - 1):
                            more = shared["sums"].at[wide, other, part]
                            found[part] += plgpu.load(more, layout=plgpu.Layout.WGMMA, optimized=False)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(shared["taken"].at[wide])
                scale = restore(platform, FRAGMENTS)
                found = [one * (factor * scale) for one, factor in zip(found, factors, strict=True)]
                out = found[0] if u.parts == 1 else found[0] / (1.0 + jnp.exp(-found[0])) * found[1]
                into = shared["out"].at[wide]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                turned = plgpu.layout_cast(out.astype(out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                into.transpose((1, 0))[...] = turned
                plgpu.commit_smem()
                at = pl.ds(tile * u.rows, u.rows), pl.ds((columns * across + wide) * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(into, out_ref.at[*at])

            lax.fori_loop(0, mine, unit, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
        columns = 128 // jnp.dtype(dtype).itemsize
        transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    shared = {
        "words": plgpu.SMEM((slots, workers, u.parts, *WORDS), jnp.int32),
        "scales": plgpu.SMEM((slots, workers, u.parts, *SCALES), jnp.uint8),
        "x": tiled((slots, depth, u.terms, u.rows, STEP), jnp.bfloat16),
        "out": tiled((across, u.rows, ROWS), out_dtype),
        "full": plgpu.Barrier(num_arrivals=2 * workers * u.parts + depth * u.terms, num_barriers=slots),
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


class _Work:
    """The sums of a computing warpgroup over its steps of a unit: float32 [64 columns, rows], one for each part."""

    def __init__(self, plgpu, unpack, shared, units: Units, schedule: Schedule, group, deep, rounds: int, slot_of):
        self.plgpu, self.unpack, self.shared, self.units, self.schedule = plgpu, unpack, shared, units, schedule
        self.group, self.deep, self.rounds, self.slot_of = group, deep, rounds, slot_of

    def packed(self, slot, part: int) -> tuple[Any, Any]:
        return tuple(self.shared[name].at[slot, self.group, part] for name in ("words", "scales"))

    def inputs(self, slot, term: int, chunk: int) -> Any:
        return self.shared["x"].at[slot, self.deep, term, :, pl.ds(chunk * CHUNK, CHUNK)]

    def begin(self, i) -> jax.Array:
        slot = self.slot_of(i)
        self.plgpu.barrier_wait(self.shared["full"].at[slot])
        return slot

    def end(self, slot) -> None:
        self.plgpu.barrier_arrive(self.shared["free"].at[slot])

    def multiply(self, accs, i, under_way: int) -> None:
        plgpu, slot = self.plgpu, self.begin(i)
        begun = 0
        for chunk in range(CHUNKS):
            for part, acc in enumerate(accs):
                weights = self.unpack(*self.packed(slot, part), chunk)
                for term in range(self.units.terms):
                    plgpu.wgmma(acc, weights, self.inputs(slot, term, chunk).transpose((1, 0)))
                    begun += 1
                # A needless wait would keep ptxas from putting products between what unpacks.
                if begun > under_way:
                    plgpu.wgmma_wait(under_way)
        # In the next step it would be too late: the last of several warpgroups frees a slot.
        plgpu.wgmma_wait(0)
        self.end(slot)

    def accumulators(self) -> list[Any]:
        return [self.plgpu.ACC((ROWS, self.units.rows), jnp.float32)] * self.units.parts

    def sums(self) -> list[jax.Array]:
        def run(*accs):
            def step(i, carry):
                self.multiply(accs, i, _UNDER_WAY)
                return carry

            lax.fori_loop(0, self.rounds, step, None)
            return [acc[...] for acc in accs]

        return pl.run_scoped(run, *self.accumulators())

    def exact_sums(self) -> list[jax.Array]:
        """Tensor cores cut off the low bits of a running sum: each step has one of its own."""

        def step(i, totals):
            def run(*accs):
                self.multiply(accs, i, self.units.terms)
                return [acc[...] for acc in accs]

            own = pl.run_scoped(run, *self.accumulators())
            return [total + one for total, one in zip(totals, own, strict=True)]

        zeros = self.plgpu.layout_cast(jnp.zeros((ROWS, self.units.rows), jnp.float32), self.plgpu.Layout.WGMMA)
        return lax.fori_loop(0, self.rounds, step, [zeros] * self.units.parts)

    def interpreted(self) -> list[jax.Array]:
        """Mosaic's interpreter has neither sums that start from a value nor operands in registers."""

        def step(i, totals):
            slot = self.begin(i)
            weights = [unpacked(*self.packed(slot, part)) for part in range(self.units.parts)]
            for term in range(self.units.terms):
                x = jnp.concatenate([self.inputs(slot, term, chunk)[...] for chunk in range(CHUNKS)], axis=1)
                totals = [
                    total + jnp.dot(w, x.T, preferred_element_type=jnp.float32)
                    for total, w in zip(totals, weights, strict=True)
                ]
            self.plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
            self.end(slot)
            return totals

        return lax.fori_loop(0, self.rounds, step, [jnp.zeros((ROWS, self.units.rows), jnp.float32)] * self.units.parts)
