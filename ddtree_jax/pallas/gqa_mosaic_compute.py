"""What a computing warpgroup of `gqa_mosaic` does with its key tiles, and how the work is cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.split_attention import LOG2_E, LOWEST, cdiv, check_registers

WIDTH = 128  # of a head
ROWS = 64  # of a row tile: the M side of wgmma
KEYS = 64  # of a key tile


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the work is cut.

    Attributes:
      slots: tiles of keys, and of values, in shared memory; an even number.
      splits: of the keys, or None: chosen by `split_attention.num_splits`. An even number where a row tile is alone.
      registers: of a thread that computes, and of one that copies.
    """

    slots: int = 4
    splits: int | None = None
    registers: tuple[int, int] = (232, 40)

    def __post_init__(self) -> None:
        check_registers(self.registers)
        if self.slots % 2:
            # Every other tile is a warpgroup's own where both have the same rows, and so must be every other slot.
            raise ValueError(f"slots: got {self.slots}; an even number only")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a call: T is `block`, S is `slots`."""

    batch: int
    block: int
    heads: int
    kv_heads: int
    slots: int
    splits: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def part(self) -> int:
        """Block rows of a row tile."""
        return ROWS // self.group

    @property
    def row_tiles(self) -> int:
        return cdiv(self.block, self.part)

    @property
    def pairs(self) -> int:
        """Pairs of row tiles, whose splits have a block of threads each. The last tile of an odd number is alone."""
        return self.row_tiles // 2

    @property
    def units(self) -> int:
        """Blocks of threads of a KV head. One of a tile that is alone has two splits, one for each warpgroup."""
        return self.pairs * self.splits + self.row_tiles % 2 * self.splits // 2

    def place(self, rows: jax.Array) -> jax.Array:
        """Where the parts of a sequence have the rows [T, Hq] of the result, taken as one axis."""
        row, head = rows // self.heads, rows % self.heads
        tile = head // self.group * self.row_tiles + row // self.part
        return tile * ROWS + head % self.group * self.part + row % self.part


class Compute:
    """A computing warpgroup, `which` of two."""

    def __init__(
        self, plgpu, which: jax.Array, shared, schedule: Schedule, scale: float, interpreted: bool, *,
        held: bool, alone: jax.Array, first, length, start_of,
    ):  # fmt: skip
        """held: the queries stay in registers, for shared memory to be read less."""
        self.plgpu, self.which, self.shared = plgpu, which, shared
        self.schedule, self.interpreted = schedule, interpreted
        self.factor = scale * LOG2_E
        self.alone, self.first, self.length, self.start_of = alone, first, length, start_of
        self.q = shared["q"].at[which]
        if held and not interpreted:  # Mosaic's interpreter has no operands in registers.
            self.q = plgpu.load(self.q, layout=plgpu.Layout.WGMMA)
        self.across, self.down = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

    def run(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(sums of weighted values [64, 128], maxima [64], sums of weights [64]) of the tiles of this warpgroup."""
        cast, wgmma = self.plgpu.layout_cast, self.plgpu.Layout.WGMMA
        empty = (
            cast(jnp.zeros((ROWS, WIDTH), jnp.float32), wgmma),
            cast(jnp.full((ROWS,), LOWEST, jnp.float32), self.down),
            cast(jnp.zeros((ROWS,), jnp.float32), self.down),
        )

        # Alone, every other tile is this warpgroup's, and every other slot: there is an even number of them.
        stride, start = jnp.where(self.alone, 2, 1), jnp.where(self.alone, self.which, 0)

        def count(n: jax.Array) -> jax.Array:
            return (n + stride - 1 - start) // stride

        def at(j: jax.Array) -> jax.Array:
            return stride * j + start

        plain = jnp.clip(self.length // KEYS - self.first, 0, steps)
        carry = lax.fori_loop(0, count(plain), lambda j, c: self.step(at(j), c), empty)
        # The last tile of the prefix, if it is not full, and those of the block.
        return lax.fori_loop(count(plain), count(steps), lambda j, c: self.step(at(j), c, masked=True), carry)

    def release(self, barrier: Any) -> None:
        """Arrives at a barrier that waits for both readers."""
        self.plgpu.barrier_arrive(barrier)
        pl.when(self.alone)(lambda: self.plgpu.barrier_arrive(barrier))

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(i, jnp.int32(self.schedule.slots))

    def step(self, i: jax.Array, carry: Any, *, masked: bool = False) -> Any:
        acc, top, total = carry
        slot = self.slot(i)
        scores = self.scores(slot)
        self.plgpu.barrier_wait(self.shared["full"]["v"].at[slot])
        if masked:
            scores = self.masked(scores, i, slot)
        weights, sums, top, fade = self.weigh(scores, top)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        return self.add(acc, weights, slot), top, total * fade + sums

    def scores(self, slot: jax.Array) -> jax.Array:
        """float32 [64, keys] of a tile."""
        plgpu, k = self.plgpu, self.shared["k"].at[slot]
        plgpu.barrier_wait(self.shared["full"]["k"].at[slot])

        def product(acc):
            plgpu.wgmma(acc, self.q, k.transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, KEYS), jnp.float32))
        self.release(self.shared["free"]["k"].at[slot])
        return scores

    def masked(self, scores: jax.Array, i: jax.Array, slot: jax.Array) -> jax.Array:
        """-inf for what a row does not see, NaN for a value that is not finite; the values are clean then."""
        plgpu, shared = self.plgpu, self.shared
        step = self.first + i
        of_block = step >= cdiv(self.length, KEYS)
        start = self.start_of(step)
        low = jnp.where(of_block, 0, step * KEYS - start)
        high = jnp.where(of_block, KEYS, self.length - start)

        @pl.when(self.alone | (self.which == 0))
        def _clean():
            self.clean(slot, low, high)
            plgpu.barrier_arrive(shared["clean"].at[slot])

        # Alone, for its own arrival: the phases of barriers go on.
        plgpu.barrier_wait(shared["clean"].at[slot])
        broken = plgpu.load(shared["broken"].at[slot], layout=self.across)
        scores = scores + lax.broadcast_in_dim(broken, scores.shape, [1])

        def block(scores: jax.Array) -> jax.Array:
            plgpu.barrier_wait(shared["seen"].at[lax.rem(i, jnp.int32(2))])
            mask = plgpu.load(shared["mask"].at[self.which], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
            self.release(shared["used"])
            return jnp.where(mask > 0.5, scores, -jnp.inf)

        def end(scores: jax.Array) -> jax.Array:
            at = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            return jnp.where((at >= low) & (at < high), scores, -jnp.inf)

        return lax.cond(of_block, block, end, scores)

    def clean(self, slot: jax.Array, low: jax.Array, high: jax.Array) -> None:
        """Zeros in rows of values outside [low, high) and in those that are not finite; NaN in `broken` for these."""
        plgpu = self.plgpu
        ref = self.shared["v"].at[slot]
        values = plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        flaw = jnp.sum(values * 0.0, axis=1)
        at = plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=self.down)
        sound = (at >= low) & (at < high) & (flaw == 0.0)
        ref[...] = jnp.where(lax.broadcast_in_dim(sound, values.shape, [0]), values, 0.0).astype(jnp.bfloat16)
        self.shared["broken"].at[slot][...] = flaw
        plgpu.commit_smem()

    def weigh(self, scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(weights bf16 [64, keys], their sums, the new maxima, what older sums fade by)."""
        # Scaled after the maximum, so that it is one instruction with the difference.
        new = jnp.maximum(top, jnp.max(scores, axis=1) * self.factor)
        weights = jnp.exp2(scores * self.factor - lax.broadcast_in_dim(new, scores.shape, [0]))
        return weights.astype(jnp.bfloat16), jnp.sum(weights, axis=1), new, jnp.exp2(top - new)

    def add(self, acc: jax.Array, weights: jax.Array, slot: jax.Array) -> jax.Array:
        """acc + weights @ values; the slot is free then."""
        plgpu, values = self.plgpu, self.shared["v"].at[slot]
        if self.interpreted:
            # Mosaic's interpreter has neither sums that start from a value nor operands in registers.
            given = values[...]
            plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
            acc = acc + jnp.dot(weights, given, preferred_element_type=jnp.float32)
        else:

            def product(ref):
                ref[...] = acc
                plgpu.wgmma(ref, weights, values)
                return ref[...]

            acc = pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))
        self.release(self.shared["free"]["v"].at[slot])
        return acc

    def normalised(self, acc: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(values [64, 128], logarithm to base 2 of the sum of weights [64])."""
        safe = jnp.where(total == 0.0, 1.0, total)
        return acc * lax.broadcast_in_dim(1.0 / safe, acc.shape, [0]), top + jnp.log(safe) * LOG2_E
