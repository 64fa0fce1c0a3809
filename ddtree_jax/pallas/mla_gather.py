"""Rows of keys from anywhere in memory -> a tile of `mla_mosaic` in shared memory, by asynchronous copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ddtree_jax.pallas.mla_mosaic_compute import HALF, HALVES, PIECES, RANK, ROPE, TILE

CHUNK = 16  # bytes of a copy
LINE = 128  # bytes of a row that 8 threads copy together: what a swizzled tile of 8 rows has of each
ATOM = 8 * LINE  # bytes of 8 rows of 64 columns
FOURS = 4  # A warp has 16 rows of a tile and copies from four of them at a time.
_ROW = 2 * (RANK + ROPE)  # bytes


def lines_of(name: str) -> int:
    """Lines that a row of a piece has."""
    return 2 * PIECES[name][1] // LINE


def row_of(thread: Any, four: int) -> Any:
    """The row of a tile that a thread (0..127) copies from."""
    return thread // 32 * 16 + 4 * four + thread % 32 // 8


def source_of(thread: Any, name: str) -> Any:
    """Where in its row a thread's first chunk of a piece begins, in bytes. Its others follow, a line away each."""
    return thread % 8 * CHUNK + 2 * PIECES[name][0]


def target_of(thread: Any, four: int, name: str) -> Any:
    """Where in the piece it goes, the others an atom away each: where TMA puts it, which swizzles 16 bytes by rows."""
    of_eight = thread % 32 // 8 + 4 * (four % 2)
    eight = thread // 32 * 2 + four // 2
    return eight * (lines_of(name) * ATOM) + of_eight * LINE + (thread % 8 ^ of_eight) * CHUNK


def gatherer(plgpu: Any) -> Callable[..., None]:
    """(cache, block, rows int32 [64], {"halves", "rope"} of all slots, slot, name): begins to copy one piece of a tile.

    `rows`: of the cache, from 0 on; -2 - i: row i of the block; -1: zeros. `commit` closes the group of copies.
    """
    import jax
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith, vector
    from jaxlib.mlir.dialects import llvm

    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    tiled, plain = plgpu.RefType(transforms=transforms), plgpu.RefType()

    def gather(cache: Any, block: Any, rows: Any, keys: dict[str, Any], slot: jax.Array, name: str) -> None:
        @plgpu.inline_mgpu(arg_types=(plain, plain, plain, tiled, plgpu.Layout.WG_SPLAT))
        def copies(ctx: Any, cache_ref: Any, block_ref: Any, rows_ref: Any, into_ref: Any, slot_array: Any) -> None:
            del ctx
            i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

            def integer(value: Any) -> _Integer:
                return _Integer(arith, value if isinstance(value, ir.Value) else arith.constant(i32, value))

            def address(ref: Any, kind: Any) -> _Integer:
                return integer(llvm.ptrtoint(kind, mgpu.utils.memref_ptr(ref)))

            thread = integer(mgpu.utils.thread_idx()) % 128
            before = 0 if name == "rope" else HALVES.index(name) * TILE * 2 * HALF
            base = address(into_ref, i32) + before
            base += integer(slot_array.registers.item()) * (TILE * 2 * (ROPE if name == "rope" else RANK))
            in_row = integer(arith.extui(i64, source_of(thread, name).value))
            cache_at, block_at = address(cache_ref, i64), address(block_ref, i64)
            zero, minus_one = integer(0), integer(-1)
            for four in range(FOURS):
                at = arith.index_cast(ir.IndexType.get(), row_of(thread, four).value)
                place = vector.extract(vector.load(ir.VectorType.get((1,), i32), rows_ref, [at]), [], [0])
                of_cache = arith.cmpi(arith.CmpIPredicate.sge, place, zero.value)
                nothing = arith.cmpi(arith.CmpIPredicate.eq, place, minus_one.value)
                of_block = arith.select(nothing, zero.value, arith.subi(integer(-2).value, place))
                row = integer(arith.extsi(i64, arith.select(of_cache, place, of_block)))
                source = integer(arith.select(of_cache, cache_at.value, block_at.value)) + row * _ROW + in_row
                size = arith.select(nothing, zero.value, integer(CHUNK).value)  # what is missing becomes zeros
                target = base + target_of(thread, four, name)
                for line in range(lines_of(name)):
                    llvm.inline_asm(
                        ir.Type.parse("!llvm.void"),
                        [target.value, source.value, size],
                        f"cp.async.cg.shared.global [$0 + {line * ATOM}], [$1 + {line * LINE}], {CHUNK}, $2;",
                        "r,l,r",
                        has_side_effects=True,
                    )

        copies(cache, block, rows, keys["rope" if name == "rope" else "halves"], slot)

    return gather


@dataclasses.dataclass(frozen=True)
class _Integer:
    """An unsigned integer of a program, with the operators of Python's."""

    arith: Any
    value: Any

    def _with(self, operation: Callable[[Any, Any], Any], other: Any) -> _Integer:
        value = other.value if isinstance(other, _Integer) else self.arith.constant(self.value.type, other)
        return _Integer(self.arith, operation(self.value, value))

    def __add__(self, other: Any) -> _Integer:
        return self._with(self.arith.addi, other)

    def __mul__(self, other: Any) -> _Integer:
        return self._with(self.arith.muli, other)

    def __floordiv__(self, other: Any) -> _Integer:
        return self._with(self.arith.divui, other)

    def __mod__(self, other: Any) -> _Integer:
        return self._with(self.arith.remui, other)

    def __xor__(self, other: Any) -> _Integer:
        return self._with(self.arith.xori, other)


def commit(plgpu: Any) -> None:
    """Closes a group of copies."""
    _instruction(plgpu, "cp.async.commit_group;")


def landed(plgpu: Any, later: int) -> None:
    """Waits for this thread's copies, but for the last `later` groups, and makes them seen by tensor cores.

    Others must be told by a barrier.
    """
    _instruction(plgpu, f"cp.async.wait_group {later};\nfence.proxy.async.shared::cta;")


def _instruction(plgpu: Any, text: str) -> None:
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu()
    def run(ctx: Any) -> None:
        del ctx
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], text, "~{memory}", has_side_effects=True)

    run()
