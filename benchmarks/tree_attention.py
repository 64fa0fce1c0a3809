"""Tree attention kernels on this GPU: several tile choices a shape, against the roof and against plain XLA.

    python benchmarks/tree_attention.py                      # every op, the shapes of pallas/cases/tree_attention.py
    python benchmarks/tree_attention.py --op mla --match 8k  # some of them
    python benchmarks/tree_attention.py --defaults           # only what the library chooses
    python benchmarks/tree_attention.py --op gqa --only mosaic  # the schedules of the Mosaic kernel

A time is the slope over trips of a device loop whose body calls the kernel CALLS times on caches of different layers,
so that neither the host nor the L2 cache is measured; about 1 us of it chains the calls. `roof` is the larger of
bytes / 4.1 TB/s and operations / 790 TFLOP/s of one H200. `error` is against float64 on some rows and heads.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ddtree_jax.pallas import gqa_kernels, gqa_mosaic, gqa_mosaic_compute, mla_kernels, mla_mosaic, mla_mosaic_compute
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import current_platform
from ddtree_jax.pallas.cases.base import Case
from ddtree_jax.pallas.cases.tree_attention import CASES
from ddtree_jax.pallas.split_attention import Tiles

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.1e12, 790e12
CALLS, CACHE_BYTES, MOST_LAYERS = 16, 160e6, 16

KERNELS = {
    "mla_attention": mla_kernels.mla_triton,
    "mla_attention_selected": mla_kernels.mla_selected_triton,
    "gqa_attention": gqa_kernels.gqa_triton,
}
MOSAIC = {
    "mla_attention": (mla_mosaic.mla_mosaic, mla_mosaic_compute.Schedule),
    "gqa_attention": (gqa_mosaic.gqa_mosaic, gqa_mosaic_compute.Schedule),
}
OPS_BY_FLAG = {"mla": "mla_attention", "selected": "mla_attention_selected", "gqa": "gqa_attention"}


def candidates(op: str, rows: int) -> list[Tiles]:
    block = 32 if rows <= 32 else 64
    if op == "mla_attention":
        base = [Tiles(64, 64, block, 8, 2, apart=True), Tiles(64, 32, 32, 8, 3, apart=True)]
        base += [Tiles(64, 64, block, 8, 2), Tiles(64, 32, 32, 8, 3)]
        # One wave, two waves, and no split at all where the rows fill the cores.
        splits = {17: (7, 15, 23), 65: (1, 2, 4)}.get(rows, ())
        return base + [dataclasses.replace(base[0], splits=n) for n in splits]
    if op == "mla_attention_selected":
        base = [Tiles(64, 64, 32, 8, 2, apart=True), Tiles(64, 32, 32, 8, 3, apart=True), Tiles(64, 32, 32, 8, 3)]
        return base + [dataclasses.replace(base[0], splits=n) for n in (1, 2, 4, 7)]
    base = [Tiles(128, 64, block, 8, stages, merge_rows=8) for stages in (2, 3, 4)]
    base += [Tiles(128, 128, block, 8, stages, merge_rows=8) for stages in (2, 3)]
    base += [Tiles(64, 64, 32, 4, stages, per_core=2, merge_rows=8) for stages in (2, 3)]
    base += [Tiles(64, 128, 32, 4, 2, per_core=2, merge_rows=8), Tiles(128, 64, 32, 4, 2, merge_rows=8)]
    return base + [dataclasses.replace(base[1], merge_rows=rows) for rows in (2, 32)]


def schedules(op: str, rows: int) -> list[dict[str, int]]:
    """Of the Mosaic kernel, what differs: nothing, then splits for fewer or more blocks and less shared memory."""
    if op == "mla_attention":
        return [{}] + [{"splits": n} for n in {17: (7, 15), 65: (2, 4)}.get(rows, ())]
    return [{}] + [{"splits": n} for n in {16: (8, 16), 17: (8, 16), 65: (4, 12)}.get(rows, ())] + [{"slots": 2}]


def seconds(call: Callable, arrays: tuple, case: Case) -> float:
    """Device time of one call."""
    place = case.rotate[0]
    bytes_a_layer = arrays[place][0].nbytes * len(case.rotate)
    layers = max(2, min(MOST_LAYERS, round(CACHE_BYTES / bytes_a_layer)))
    arrays = list(arrays)
    for index in case.rotate:
        arrays[index] = jnp.tile(arrays[index][1:], (layers, 1, 1, 1))
    layer_at = case.rotate[-1] + 1

    @jax.jit
    def loop(trips: jax.Array, *given: jax.Array) -> jax.Array:
        def body(_, out: jax.Array) -> jax.Array:
            for j in range(CALLS):
                turn = list(given)
                turn[layer_at] = jnp.int32(j % layers)
                # Each call waits for the one before, or the compiler would drop all but the last.
                turn[layer_at + 1] = given[layer_at + 1] - (out[:, 0, 0, 0] > 1e30).astype(jnp.int32)
                out = call(*turn)
            return out

        return jax.lax.fori_loop(0, trips, body, call(*given))

    def run(trips: int) -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(loop(jnp.int32(trips), *arrays))
            best = min(best, time.perf_counter() - start)
        return best

    run(1)
    few, many = 4, 24
    return (run(many) - run(few)) / ((many - few) * CALLS)


def measure(case: Case, name: str, call: Callable, arrays: tuple, roof: float) -> None:
    call = jax.jit(call)  # traced and lowered once, and not for each of CALLS
    try:
        error = case.check(arrays, call(*arrays))
        taken = seconds(call, arrays, case)
    except Exception as failure:  # one choice that does not compile must not end the table
        print(f"    {name:<62} {type(failure).__name__}: {str(failure).splitlines()[0][:90]}", flush=True)
        return
    flag = "" if error <= case.tolerance else "  WRONG"
    print(f"    {name:<62} {taken * 1e6:9.1f} {100 * roof / taken:7.1f} % {error:10.1e}{flag}", flush=True)


def describe(tiles: Tiles) -> str:
    set_here = {
        f.name: getattr(tiles, f.name) for f in dataclasses.fields(tiles) if f.default is not dataclasses.MISSING
    }
    extra = [f"{k}={v}" for k, v in set_here.items() if v != getattr(Tiles(1, 1, 1, 1, 1), k)]
    shape = f"{tiles.rows}x{tiles.keys}/{tiles.block_keys} warps={tiles.num_warps} stages={tiles.num_stages}"
    return " ".join([shape, *extra])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=[*OPS_BY_FLAG, "all"], default="all")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--defaults", action="store_true", help="only the tiles that the library chooses")
    parser.add_argument("--only", choices=["triton", "mosaic"], help="variants of one implementation")
    parser.add_argument("--first", type=int, help="only so many variants of each implementation")
    parser.add_argument("--no-xla", action="store_true", help="leave the plain XLA baseline out")
    args = parser.parse_args(argv)
    platform = current_platform()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {platform.cores} cores")
    for case in CASES:
        if args.op != "all" and case.op != OPS_BY_FLAG[args.op] or args.match not in case.name:
            continue
        arrays = jax.jit(case.make)(jax.random.key(0))
        roof = max(case.traffic / BYTES_PER_SECOND, case.flops / FLOPS_PER_SECOND)
        print(f"{case.name}: roof {roof * 1e6:.1f} us\n    {'tiles':<62} {'us':>9} {'of roof':>9} {'error':>10}")
        op = OPS[case.op]
        if args.only != "mosaic":
            measure(case, "triton", lambda *a, o=op, c=case: o(*a, implementation="triton", **c.static), arrays, roof)
        if not args.defaults and args.only != "mosaic":
            for tiles in candidates(case.op, arrays[0].shape[1])[: args.first]:
                kernel = KERNELS[case.op]
                static = dict(case.static, platform=platform, tiles=tiles)
                measure(case, describe(tiles), lambda *a, k=kernel, s=static: k(*a, **s), arrays, roof)
        if case.op in MOSAIC and args.only != "triton":
            kernel, schedule = MOSAIC[case.op]
            for one in schedules(case.op, arrays[0].shape[1])[: 1 if args.defaults else args.first]:
                static = dict(case.static, platform=platform, schedule=schedule(**one))
                name = " ".join(["mosaic", *(f"{k}={v}" for k, v in one.items())])
                measure(case, name, lambda *a, k=kernel, s=static: k(*a, **s), arrays, roof)
        if not args.no_xla:
            for name, baseline in case.baselines.items():
                measure(case, name, baseline, arrays, roof)


if __name__ == "__main__":
    main()
