"""Compiles operations over a mesh of two GPUs that need not be there; the work of one test in `test_compiles`.

    python -m tests.pallas.compile_mesh PLATFORM

Prints one line of JSON: {operation: {"kernels": names of the custom calls that hold kernels, "moves": the collectives
and copies in the compiled program}}. Imports nothing that the folder of compilers lacks.
"""

import dataclasses
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ddtree_jax.pallas.choice import KernelChoice, Specs
from ddtree_jax.pallas.compile_programs import kernels_in
from ddtree_jax.pallas.compile_targets import TARGETS
from ddtree_jax.pallas.nvfp4_grid import BYTES, GROUPS, ROWS, SHIFTED, GridWeight

BF16, INT, TENSOR = jnp.bfloat16, jnp.int32, "tensor"
MOVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "copy")


def operations(choice: KernelChoice) -> dict[str, tuple[Any, ...]]:
    """Operation -> (specs, static arguments, shapes of the arguments, as they lie on the mesh)."""

    def array(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(choice.mesh, P(*spec)))

    def grid(lead: tuple[int, ...], blocks: int, steps: int, k: int, parts: int, width: int, *split: str | None) -> Any:
        """Words and scales; and the same as specs. split: of blocks and steps."""
        none = (None,) * len(lead)
        weight = GridWeight(
            words=array((*lead, blocks, steps, 2, ROWS, GROUPS), INT, *none, *split),
            scales=array((*lead, blocks, steps, ROWS, GROUPS), jnp.uint8, *none, *split),
            factors=array((*lead, blocks), jnp.float32, *none, split[0]),
            k=k,
            parts=parts,
            width=width,
            arrangement=BYTES if choice.platform.converts_fp4 else SHIFTED,
        )
        own = P(*none, *split)
        return weight, dataclasses.replace(weight, words=own, scales=own, factors=P(*none, split[0]))

    layer, lengths = array((), INT), array((2,), INT)
    columns, columns_specs = grid((2,), 16, 8, 2048, 1, 512, TENSOR, None)
    gate_up, gate_up_specs = grid((2, 16), 16, 8, 2048, 2, 256, TENSOR, None)
    down, down_specs = grid((2, 16), 32, 2, 256, 1, 2048, None, TENSOR)
    q = array((2, 17, 128, 576), BF16, None, None, TENSOR)
    cache, new = array((2, 2, 1024, 576), BF16), array((2, 17, 576), BF16)
    heads = P(None, None, TENSOR)
    rows = (array((17, 2048), BF16), array((17, 8), INT), array((17, 8), jnp.float32))
    return {
        "layer_matmul": (
            Specs((P(None, TENSOR), P(None, TENSOR)), P(), (TENSOR,)),
            {"out_dtype": jnp.float32},
            (array((16, 4096), BF16, None, TENSOR), array((2, 4096, 1024), BF16, None, TENSOR), layer),
        ),
        "layer_heads_matmul": (
            Specs((heads, heads), heads),
            {"transposed": False},
            (
                array((1, 17, 128, 512), BF16, None, None, TENSOR),
                array((2, 512, 128, 256), BF16, None, None, TENSOR),
                layer,
            ),
        ),
        "nvfp4_matmul": (
            Specs((P(), columns_specs), P(None, None, TENSOR)),
            {"out_dtype": BF16},
            (rows[0], columns, layer),
        ),
        "moe": (
            Specs((P(), P(), P(), gate_up_specs, down_specs), P(), (TENSOR,)),
            {},
            (*rows, gate_up, down, layer),
        ),
        "mla_attention": (
            Specs((heads,), heads),
            {"rank": 512, "scale": 0.1},
            (q, cache, layer, lengths, new, array((2, 17, 17), jnp.bool_)),
        ),
        "commit_rows": (None, {}, ({"a": cache}, {"a": array((2, 2, 17, 576), BF16)}, array((2, 8), INT), lengths)),
    }


def main() -> None:
    target = TARGETS[sys.argv[1]]
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.description(), topology="1x1x2")
    mesh = Mesh(np.array(topology.devices).reshape(1, 2), ("expert", TENSOR))
    choice = KernelChoice(target.platform, mesh=mesh)
    answer = {}
    for op, (specs, static, arrays) in operations(choice).items():
        run = jax.jit(
            lambda *a, op=op, specs=specs, static=static: choice.run(op, *a, specs=specs, **static),
            donate_argnums=(0,) if op == "commit_rows" else (),
        )
        text = run.lower(*arrays).compile().as_text()
        moves = [name for name in MOVES if re.search(rf"\b{name}(-start)?\(", text)]
        answer[op] = {"kernels": sorted(kernels_in(text)), "moves": moves}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
