"""What a computing warpgroup of `mla_mosaic` does with its key tiles, and how they lie in shared memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ddtree_jax.pallas.split_attention import LOG2_E, LOWEST, cdiv, check_registers

RANK, ROPE = 512, 64
TILE = 64  # query rows, and keys: the M side of wgmma, and what two slots of shared memory hold
HALF = RANK // 2
SLOTS = 2
# Pieces of a row by their first column and width, in the order in which a slot becomes free.
PIECES = {"left": (0, HALF), "rope": (RANK, ROPE), "right": (HALF, HALF)}
HALVES = ("left", "right")
MASK = "mask"  # of a tile of the block; copied like a piece


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the work is cut.

    Attributes:
      splits: of the keys, or None: chosen by `split_attention.num_splits`.
      registers: of a thread that computes, and of one that copies.
    """

    splits: int | None = None
    registers: tuple[int, int] = (240, 24)

    def __post_init__(self) -> None:
        check_registers(self.registers)


def barrier_of(name: str, slot: Any, after: Any = 0) -> Any:
    """Index of the barrier of a piece's slot. Of all pieces there is one array of barriers: the phases of an array are
    kept in one register.

    `after`: 1 for tiles that follow the pairs, as all of the block do: in pairs a warpgroup does not wait for all
    pieces, and so does not know the phases of all their barriers.
    """
    return ((*PIECES, MASK).index(name) + after * len(PIECES)) * SLOTS + slot


def plain_tiles(first: jax.Array, length: jax.Array, steps: jax.Array) -> jax.Array:
    """How many tiles come before the first masked one."""
    return jnp.clip(length // TILE - first, 0, steps)


def piece_of(rows: dict[str, Any], name: str, *slot: Any) -> Any:
    """A piece of rows in shared memory. The halves lie in one array, so that one body serves both warpgroups."""
    return rows["rope"].at[slot] if name == "rope" else rows["halves"].at[*slot, HALVES.index(name)]


class Compute:
    """A computing warpgroup, `which` of two; the one that holds columns [which * 256, which * 256 + 256)."""

    def __init__(
        self, plgpu, which: int | jax.Array, shared, *, first, length, block: int, scale: float, interpreted: bool,
    ):  # fmt: skip
        self.plgpu, self.which, self.shared = plgpu, which, shared
        self.first, self.length, self.block = first, length, block
        self.factor, self.interpreted = scale * LOG2_E, interpreted
        self.across, self.down = plgpu.Layout.WGMMA.reduce(0), plgpu.Layout.WGMMA.reduce(1)

    def meet(self) -> None:
        """Waits for the other computing warpgroup."""
        self.plgpu.barrier_arrive(self.shared["met"])
        self.plgpu.barrier_wait(self.shared["met"])

    def plain(self, steps: jax.Array) -> jax.Array:
        """How many tiles may be taken in pairs."""
        return plain_tiles(self.first, self.length, steps)

    def is_masked(self, step: jax.Array) -> jax.Array:
        return self.first + step >= self.length // TILE

    def block_tile(self, step: jax.Array) -> jax.Array:
        """Which tile of the block; negative: of the prefix."""
        return self.first + step - cdiv(self.length, TILE)

    def count(self, step: jax.Array) -> jax.Array:
        """Rows of the tile that count, from its first one on; may be more than there are."""
        tile = self.block_tile(step)
        return jnp.where(tile < 0, self.length - (self.first + step) * TILE, self.block - tile * TILE)

    def empty(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        cast = self.plgpu.layout_cast
        return (
            cast(jnp.zeros((TILE, HALF), jnp.float32), self.plgpu.Layout.WGMMA),
            cast(jnp.full((TILE,), LOWEST, jnp.float32), self.down),
            cast(jnp.zeros((TILE,), jnp.float32), self.down),
        )

    def zero(self, i: jax.Array) -> jax.Array:
        """0, which the compiler does not know: addresses with a constant index, or one that no step of a loop changes,
        it computes before the loop, and then it has no registers left for the loop.
        """
        return i & (self.length >> 31)

    def products(self, slot: Any, tail: bool, zero: jax.Array) -> jax.Array:
        """float32 [64, 64]: queries times the keys of a tile."""
        plgpu, shared = self.plgpu, self.shared
        after = int(tail)

        def product(acc):
            for name in PIECES:
                plgpu.barrier_wait(shared["full"].at[barrier_of(name, slot, after)])
                plgpu.wgmma(acc, piece_of(shared["q"], name, zero), piece_of(shared["k"], name, slot).transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))

    def scores(self, step: jax.Array, slot: Any, tail: bool, zero: jax.Array) -> jax.Array:
        """float32 [64, 64] of a tile; of one that follows the pairs masked, if it needs it."""
        plgpu, shared = self.plgpu, self.shared
        scores = self.products(slot, tail, zero)

        def mask_row():
            plgpu.barrier_wait(shared["full"].at[barrier_of(MASK, slot, 1)])
            return plgpu.load(shared[MASK].at[slot], layout=self.across, optimized=False).astype(jnp.float32)

        def all_seen():
            return plgpu.layout_cast(jnp.ones((TILE,), jnp.float32), self.across)

        def mask(scores):
            seen = lax.cond(self.block_tile(step) >= 0, mask_row, all_seen)
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (TILE,), 0), self.across)
            visible = lax.broadcast_in_dim((seen > 0.0) & (column < self.count(step)), scores.shape, [1])
            # A key with an infinity may give -inf, which would hide it, where its values are NaN for those that see it.
            return jnp.where(visible, jnp.where(jnp.abs(scores) < jnp.inf, scores, jnp.nan), -jnp.inf)

        if tail:
            return lax.cond(self.is_masked(step), mask, lambda scores: scores, scores)
        return scores

    def values(self, slot: Any) -> Any:
        """This half of a tile's values."""
        return self.shared["k"]["halves"].at[slot, self.which]

    def clean(self, step: jax.Array, slot: Any) -> None:
        """Zeros for what is not finite in this half of the values of a tile, if it is masked.

        No scores may need them any more. Rows that see what is not finite have it in their weights; for the others, and
        in rows of keys that do not count, weights of zero meet it.
        """
        plgpu, values = self.plgpu, self.values(slot)

        # A few columns at a time, for registers; a loop, for instructions.
        def columns(i, carry):
            part = values.at[pl.ds(0, TILE), pl.ds(i * ROPE, ROPE)]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
            part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(jnp.bfloat16)
            return carry

        @pl.when(self.is_masked(step))
        def _clean():
            lax.fori_loop(0, HALF // ROPE, columns, None)
            plgpu.commit_smem()

    def weigh(self, scores: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(weights bf16 [64, 64], their sums, the new maxima, what older sums fade by)."""
        # Scaled after the maximum, so that it is one instruction with the difference.
        new = jnp.maximum(top, jnp.max(scores, axis=1) * self.factor)
        weights = jnp.exp2(scores * self.factor - lax.broadcast_in_dim(new, scores.shape, [0]))
        return weights.astype(jnp.bfloat16), jnp.sum(weights, axis=1), new, jnp.exp2(top - new)

    def add(
        self, acc: jax.Array, fade: jax.Array, weights: jax.Array | None, slot: Any,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> tuple[jax.Array, Any]:  # fmt: skip
        """(acc * fade + weights @ the values of this half, what `meanwhile` gives while the product is under way).

        Shared memory has then been read. `weights` None: those that the other warpgroup has left in the slot.
        """
        plgpu, keys = self.plgpu, self.shared["k"]
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, [0])
        if self.interpreted:
            # Mosaic's interpreter has neither sums that start from a value nor operands in registers.
            given = keys["rope"].at[slot][...] if weights is None else weights
            values = self.values(slot)[...]
            plgpu.commit_smem()  # these reads, unlike those of wgmma, are not ordered before a later copy
            acc = acc + jnp.dot(given, values, preferred_element_type=jnp.float32)
            return acc, meanwhile()

        def product(ref):
            ref[...] = acc
            plgpu.wgmma(ref, keys["rope"].at[slot] if weights is None else weights, self.values(slot))
            other = meanwhile()
            return ref[...], other

        return pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

    def release(self, slot: Any, *names: str) -> None:
        for name in names:
            self.plgpu.barrier_arrive(self.shared["free"].at[barrier_of(name, slot)])

    def tile(self, i: jax.Array, carry: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """One tile that follows the pairs; both warpgroups compute all of its scores."""
        acc, top, total = carry
        slot = lax.rem(i, jnp.int32(SLOTS))
        weights, sums, top, fade = self.weigh(self.scores(i, slot, True, self.zero(i)), top)

        # Both must have read the keys before one warpgroup cleans them, or frees a piece for both.
        self.meet()
        self.clean(i, slot)
        acc, _ = self.add(acc, fade, weights, slot)
        pl.when(self.which == 0)(lambda: self.release(slot, "left"))
        pl.when(self.which == 1)(lambda: self.release(slot, "rope", "right"))
        return acc, top, total * fade + sums

    def run(self, steps: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(sums of weighted values, maxima, sums of weights) of all tiles.

        Of a pair of tiles without a mask, warpgroup w computes the scores of that in slot w, and they pass weights and
        maxima to each other through shared memory; the second one weighs its scores while the values of the tile before
        are added. In all other tiles both compute all scores, half again as many products, and pass nothing.
        """
        pairs = self.plain(steps) // 2
        acc, top, total = lax.cond(
            self.which == 0,
            lambda *carry: self.as_role(0).pairs(pairs, carry),
            lambda *carry: self.as_role(1).pairs(pairs, carry),
            *self.empty(),
        )
        # Each has summed the weights of its own tiles.
        carry = lax.fori_loop(2 * pairs, steps, self.tile, (acc, top, self.sum_of_both(total)))
        self.meet()  # both have read the queries
        return carry

    def as_role(self, which: int) -> Compute:
        """This warpgroup where it is known to be `which`."""
        role = copy.copy(self)
        role.which = which
        return role

    def pairs(self, count: jax.Array, carry: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        plgpu, shared, which = self.plgpu, self.shared, self.which
        ready, row = shared["ready"], shared["row"]

        def give(slot, weights, top):
            # The scores are done, so the piece of the keys that no value needs has room for the weights.
            shared["k"]["rope"].at[slot][...] = weights
            row.at[slot][...] = top
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])

        def take(slot, top):
            plgpu.barrier_wait(ready.at[slot])
            new = plgpu.load(row.at[slot], layout=self.down)
            return new, jnp.exp2(top - new)

        def theirs(acc, fade, slot, meanwhile=lambda: None):
            plgpu.barrier_wait(shared["full"].at[barrier_of(HALVES[which], slot)])
            acc, other = self.add(acc, fade, None, slot, meanwhile)
            self.release(slot, "rope", HALVES[which])
            return acc, other

        def ours(acc, fade, weights, slot):
            acc, _ = self.add(acc, fade, weights, slot)
            self.release(slot, HALVES[which])
            return acc

        def first(j, carry):
            acc, top, total = carry
            zero = self.zero(j)
            one = zero + 1
            weights, sums, top, fade = self.weigh(self.scores(2 * j, zero, False, zero), top)
            give(zero, weights, top)
            acc = ours(acc, fade, weights, zero)
            top, later = take(one, top)
            return theirs(acc, later, one)[0], top, (total * fade + sums) * later

        def second(j, carry):
            acc, top, total = carry
            zero = self.zero(j)
            one = zero + 1
            scores = self.scores(2 * j + 1, one, False, zero)
            top, early = take(zero, top)

            def own_weights():
                weights, sums, new, fade = self.weigh(scores, top)
                give(one, weights, new)
                return weights, sums, new, fade

            acc, (weights, sums, top, fade) = theirs(acc, early, zero, own_weights)
            return ours(acc, fade, weights, one), top, total * early * fade + sums

        return lax.fori_loop(0, count, second if which else first, carry)

    def sum_of_both(self, total: jax.Array) -> jax.Array:
        plgpu, row = self.plgpu, self.shared["sums"]
        row.at[self.which][...] = total
        plgpu.commit_smem()
        self.meet()
        return total + plgpu.load(row.at[1 - self.which], layout=self.down)
