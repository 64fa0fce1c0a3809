"""Rows of keys from anywhere in memory -> a tile of `mla_mosaic` in shared memory, by asynchronous copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtree_jax.pallas.mla_mosaic_compute import HALF, HALVES, PIECES, RANK, ROPE, TILE

_CHUNK = 16  # bytes of a copy
_LINE = 128  # bytes of a row that 8 threads copy together: what a swizzled tile of 8 rows has of each
_ROW = 2 * (RANK + ROPE)  # bytes
_ATOM = 8 * _LINE  # bytes of 8 rows of 64 columns


def gatherer(plgpu: Any) -> Callable[..., None]:
    """(cache, block, rows int32 [64], {"halves", "rope"} of all slots, slot, name): begins to copy one piece of a tile.

    `rows`: of the cache, from 0 on; -2 - i: row i of the block; -1: zeros. `commit` closes the group of copies. The
    threads of a warp copy 128 bytes of 4 rows at a time, to where TMA would put them: 16 bytes of row r of eight rows
    are at their own place xor r.
    """
    import jax
    from jax.experimental.mosaic import gpu as mgpu
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith
    from jaxlib.mlir.dialects import llvm, vector

    transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    tiled, plain = plgpu.RefType(transforms=transforms), plgpu.RefType()

    def gather(cache: Any, block: Any, rows: Any, keys: dict[str, Any], slot: jax.Array, name: str) -> None:
        start, width = PIECES[name]
        lines = 2 * width // _LINE

        @plgpu.inline_mgpu(arg_types=(plain, plain, plain, tiled, plgpu.Layout.WG_SPLAT))
        def copies(ctx: Any, cache_ref: Any, block_ref: Any, rows_ref: Any, into_ref: Any, slot_array: Any) -> None:
            del ctx
            i32, i64, index = (*(ir.IntegerType.get_signless(bits) for bits in (32, 64)), ir.IndexType.get())

            def number(n: int, kind: Any = i32) -> Any:
                return arith.constant(kind, ir.IntegerAttr.get(kind, n))

            def plus(a: Any, *others: Any) -> Any:
                for other in others:
                    a = arith.addi(a, other)
                return a

            def address(ref: Any, space: int | None, kind: Any) -> Any:
                return llvm.ptrtoint(kind, mgpu.utils.memref_ptr(ref, space) if space else mgpu.utils.memref_ptr(ref))

            thread = arith.remui(mgpu.utils.thread_idx(), number(128))
            warp, lane = arith.divui(thread, number(32)), arith.remui(thread, number(32))
            own, chunk = arith.divui(lane, number(8)), arith.remui(lane, number(8))  # row of four; 16 bytes of 128
            base = address(into_ref, None, i32)
            of_slot = TILE * 2 * (ROPE if name == "rope" else RANK)
            before = 0 if name == "rope" else HALVES.index(name) * TILE * 2 * HALF
            base = plus(base, arith.muli(slot_array.registers.item(), number(of_slot)), number(before))
            cache_at, block_at = (address(ref, None, i64) for ref in (cache_ref, block_ref))
            offset = plus(arith.muli(arith.extui(i64, chunk), number(_CHUNK, i64)), number(2 * start, i64))
            for four in range(4):  # of a warp's 16 rows
                row = plus(arith.muli(warp, number(16)), number(4 * four), own)
                place = vector.load(ir.VectorType.get((1,), i32), rows_ref, [arith.index_cast(index, row)])
                place = vector.extract(place, [], [0])
                of_cache = arith.cmpi(arith.CmpIPredicate.sge, place, number(0))
                nothing = arith.cmpi(arith.CmpIPredicate.eq, place, number(-1))
                of_block = arith.select(nothing, number(0), arith.subi(number(-2), place))
                where = arith.extsi(i64, arith.select(of_cache, place, of_block))
                source = arith.select(of_cache, cache_at, block_at)
                source = plus(source, arith.muli(where, number(_ROW, i64)), offset)
                size = arith.select(nothing, number(0), number(_CHUNK))  # the rest of the 16 bytes become zeros
                in_eight = plus(own, number(4 * (four % 2)))
                eight = plus(arith.muli(warp, number(2)), number(four // 2))
                target = plus(
                    base,
                    arith.muli(eight, number(lines * _ATOM)),
                    arith.muli(in_eight, number(_LINE)),
                    arith.muli(arith.xori(chunk, in_eight), number(_CHUNK)),
                )
                for line in range(lines):
                    llvm.inline_asm(
                        ir.Type.parse("!llvm.void"),
                        [target, source, size],
                        f"cp.async.cg.shared.global [$0 + {line * _ATOM}], [$1 + {line * _LINE}], 16, $2;",
                        "r,l,r",
                        has_side_effects=True,
                    )

        copies(cache, block, rows, keys["rope" if name == "rope" else "halves"], slot)

    return gather


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
