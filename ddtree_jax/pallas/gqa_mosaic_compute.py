"""What a computing warpgroup of `gqa_mosaic` does with its key tiles, and how the work is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.split_attention import LOG2_E, LOWEST, cdiv, check_registers

WIDTH = 128  # of a head
ROWS = 64  # of a row tile: the M side of wgmma


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the work is cut and overlapped.

    Attributes:
      keys: of a tile, 64 or 128.
      slots: tiles of keys, and of values, in shared memory; an even number.
      splits: of the keys, or None: chosen by `split_attention.num_splits`.
      ahead: the scores of the next tile are under way while a tile is weighed and its values are added.
      registers: of a thread that computes, and of one that copies.
    """

    keys: int = 64
    slots: int = 4
    splits: int | None = None
    ahead: bool = False
    registers: tuple[int, int] = (232, 40)

    def __post_init__(self) -> None:
        check_registers(self.registers)


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
    def pairs(self) -> bool:
        """Two row tiles a block of threads; else both warpgroups have the same."""
        return self.row_tiles > 1

    @property
    def sources(self) -> int:
        """Parts of a row tile."""
        return self.splits * (1 if self.pairs else 2)

    @property
    def tiles(self) -> int:
        """Blocks of threads of a KV head and a split."""
        return cdiv(self.row_tiles, 2)

    @property
    def stored(self) -> int:
        """Row tiles of a KV head in the parts, those without rows too."""
        return 2 * self.tiles if self.pairs else 1

    def place(self, rows: jax.Array) -> jax.Array:
        """Where the parts of a sequence have the rows [T, Hq] of the result, taken as one axis."""
        row, head = rows // self.heads, rows % self.heads
        tile = head // self.group * self.stored + row // self.part
        return tile * ROWS + head % self.group * self.part + row % self.part


class Compute:
    """A computing warpgroup, `which` of two."""

    def __init__(
        self, plgpu, which: jax.Array, shared, sizes: Sizes, schedule: Schedule, scale: float, interpreted: bool,
        *, first, length, start_of,
    ):  # fmt: skip
        self.plgpu, self.which, self.shared = plgpu, which, shared
        self.sizes, self.schedule, self.interpreted = sizes, schedule, interpreted
        self.factor = scale * LOG2_E
        self.first, self.length, self.start_of = first, length, start_of
        self.own = which if sizes.pairs else 0
        self.q = shared["q"].at[self.own]
        self.across, self.down = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

    def run(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(sums of weighted values [64, 128], maxima [64], sums of weights [64]) of the tiles of this warpgroup."""
        cast, wgmma = self.plgpu.layout_cast, self.plgpu.Layout.WGMMA
        empty = (
            cast(jnp.zeros((ROWS, WIDTH), jnp.float32), wgmma),
            cast(jnp.full((ROWS,), LOWEST, jnp.float32), self.down),
            cast(jnp.zeros((ROWS,), jnp.float32), self.down),
        )

        count = (lambda n: n) if self.sizes.pairs else (lambda n: (n + 1 - self.which) // 2)
        at = (lambda j: j) if self.sizes.pairs else (lambda j: 2 * j + self.which)
        plain = jnp.clip(self.length // self.schedule.keys - self.first, 0, steps)
        if self.schedule.ahead and not self.interpreted:
            carry = self.ahead(count(plain), at, empty)
        else:
            carry = lax.fori_loop(0, count(plain), lambda j, c: self.step(at(j), c), empty)
        # The last tile of the prefix, if it is not full, and those of the block.
        prefix = jnp.clip(cdiv(self.length, self.schedule.keys) - self.first, 0, steps)
        for start, stop, mask in ((plain, prefix, self.end), (prefix, steps, self.block)):
            carry = lax.fori_loop(
                count(start), count(stop), lambda j, c, mask=mask: self.step(at(j), c, mask=mask), carry
            )
        return carry

    def slot(self, i: jax.Array) -> jax.Array:
        return lax.rem(i, jnp.int32(self.schedule.slots))

    def step(self, i: jax.Array, carry: Any, *, mask: Callable[..., jax.Array] | None = None) -> Any:
        acc, top, total = carry
        slot = self.slot(i)
        scores = self.scores(slot)
        self.plgpu.barrier_wait(self.shared["full"]["v"].at[slot])
        if mask is not None:
            scores = mask(scores, i, slot)
        weights, sums, top, fade = self.weigh(scores, top)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        return self.add(acc, weights, slot), top, total * fade + sums

    def ahead(self, count: jax.Array, at: Callable[[jax.Array], jax.Array], empty: Any) -> Any:
        """`count` tiles without a mask. The scores of a tile are asked for before the values of the one before it are
        added, and weighed while these are."""
        plgpu, shared = self.plgpu, self.shared

        def some(acc, top, total):
            weights, sums, top, _ = self.weigh(self.scores(self.slot(at(0))), top)

            def step(j, carry):
                acc, weights, top, total = carry
                slot, following = self.slot(at(j)), self.slot(at(j + 1))
                plgpu.barrier_wait(shared["full"]["k"].at[following])

                def products(ref, scores_ref):
                    ref[...] = acc
                    plgpu.wgmma(scores_ref, self.q, shared["k"].at[following].transpose((1, 0)))
                    plgpu.barrier_wait(shared["full"]["v"].at[slot])
                    plgpu.wgmma(ref, weights, shared["v"].at[slot])
                    scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                    plgpu.barrier_arrive(shared["free"]["k"].at[following])
                    out = self.weigh(scores, top)
                    return ref[...], out

                shapes = plgpu.ACC((ROWS, WIDTH), jnp.float32), plgpu.ACC((ROWS, self.schedule.keys), jnp.float32)
                acc, (weights, sums, top, fade) = pl.run_scoped(products, *shapes)
                plgpu.barrier_arrive(shared["free"]["v"].at[slot])
                return acc * lax.broadcast_in_dim(fade, acc.shape, [0]), weights, top, total * fade + sums

            acc, weights, top, total = lax.fori_loop(0, count - 1, step, (acc, weights, top, sums))
            slot = self.slot(at(count - 1))
            plgpu.barrier_wait(shared["full"]["v"].at[slot])
            return self.add(acc, weights, slot), top, total

        return lax.cond(count > 0, some, lambda *carry: carry, *empty)

    def scores(self, slot: jax.Array) -> jax.Array:
        """float32 [64, keys] of a tile."""
        plgpu, k = self.plgpu, self.shared["k"].at[slot]
        plgpu.barrier_wait(self.shared["full"]["k"].at[slot])

        def product(acc):
            plgpu.wgmma(acc, self.q, k.transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(product, plgpu.ACC((ROWS, self.schedule.keys), jnp.float32))
        plgpu.barrier_arrive(self.shared["free"]["k"].at[slot])
        return scores

    def end(self, scores: jax.Array, i: jax.Array, slot: jax.Array) -> jax.Array:
        """-inf for what lies behind the prefix, NaN for a value that is not finite; the values are clean then."""
        keys = self.schedule.keys
        step = self.first + i
        start = self.start_of(step)
        low, high = step * keys - start, self.length - start
        scores = self.cleaned(scores, slot, low, high)
        at = self.plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=self.plgpu.Layout.WGMMA)
        return jnp.where((at >= low) & (at < high), scores, -jnp.inf)

    def block(self, scores: jax.Array, i: jax.Array, slot: jax.Array) -> jax.Array:
        """As `end` for a tile of the block and its mask."""
        plgpu, shared = self.plgpu, self.shared
        scores = self.cleaned(scores, slot, 0, self.schedule.keys)
        plgpu.barrier_wait(shared["seen"])
        mask = plgpu.load(shared["mask"].at[self.own], layout=plgpu.Layout.WGMMA).astype(jnp.float32)
        plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
        plgpu.barrier_arrive(shared["used"])
        return jnp.where(mask > 0.5, scores, -jnp.inf)

    def cleaned(self, scores: jax.Array, slot: jax.Array, low: Any, high: Any) -> jax.Array:
        """The scores, NaN for a value that is not finite; the values are clean then."""
        plgpu, shared = self.plgpu, self.shared
        if self.sizes.pairs:

            @pl.when(self.which == 0)
            def _clean():
                self.clean(slot, low, high)
                plgpu.barrier_arrive(shared["clean"].at[slot])

            @pl.when(self.which == 1)
            def _wait():
                plgpu.barrier_wait(shared["clean"].at[slot])
        else:
            self.clean(slot, low, high)
        broken = plgpu.load(shared["broken"].at[slot], layout=self.across)
        return scores + lax.broadcast_in_dim(broken, scores.shape, [1])

    def clean(self, slot: jax.Array, low: jax.Array, high: jax.Array) -> None:
        """Zeros in the rows of values outside of [low, high) and for what is not finite; NaN in `broken` for these."""
        plgpu = self.plgpu
        for half in range(self.schedule.keys // 64):
            rows = pl.ds(half * 64, 64)
            ref = self.shared["v"].at[slot, rows]
            values = plgpu.load(ref, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
            at = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=plgpu.Layout.WGMMA) + half * 64
            finite = jnp.abs(values) < jnp.inf
            ref[...] = jnp.where(finite & (at >= low) & (at < high), values, 0.0).astype(jnp.bfloat16)
            worst = jnp.max(jnp.where(finite, 0.0, 1.0), axis=1)
            self.shared["broken"].at[slot, rows][...] = jnp.where(worst > 0.0, jnp.nan, 0.0)
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
        plgpu.barrier_arrive(self.shared["free"]["v"].at[slot])
        return acc

    def normalised(self, acc: jax.Array, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(values [64, 128], logarithm to base 2 of the sum of weights [64])."""
        safe = jnp.where(total == 0.0, 1.0, total)
        return acc / lax.broadcast_in_dim(safe, acc.shape, [0]), top + jnp.log(safe) * LOG2_E
