"""Runs every operation of the kernel table over meshes of virtual CPU devices, kernels interpreted, at tiny shapes.

A process of its own, as the number of devices is fixed before JAX starts:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.engine.mesh_ops_worker MESH PART

MESH is ExT, experts by tensor; PART one of "plain" and "packed" weights, and "rest". Prints one line of JSON: {what:
{"error": the largest difference from the reference on one device, as a share of the largest value; "kernels": Pallas
calls that were traced; of weights "split": whether they lie in parts}}. PART "unpacked" runs no operation, and prints
what `unpacked` says of each packed linear layer.
"""

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddtree_jax.models import Target, make_mesh
from ddtree_jax.models import kernel_specs as specs
from ddtree_jax.models.folders import target_sharding
from ddtree_jax.models.glm5 import MLA, Glm5
from ddtree_jax.models.kernels import PACKED_FROM, with_kernels
from ddtree_jax.models.linear import (
    GridKernel,
    LayerHeads,
    LayerIndex,
    LayerKernel,
    Linear,
    PackedKernel,
    kernel_arrays,
)
from ddtree_jax.models.moe import MoE
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import packed_kernels
from ddtree_jax.models.quant import dequantise
from ddtree_jax.models.sharding import TENSOR
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import INTERPRETED
from ddtree_jax.pallas.choice import KernelChoice
from tests.engine.conftest import TARGET

REFERENCES = KernelChoice(INTERPRETED, tuple((name, "reference") for name in OPS))
CONFIG = dataclasses.replace(
    TARGET,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_attention_heads=8,
    v_head_dim=16,
    qk_nope_head_dim=16,
    q_lora_rank=32,
    n_routed_experts=36,
    num_hidden_layers=2,
    indexer_types=("full",) * 2,
    mlp_layer_types=("dense", "sparse"),
)
ROWS = 3
PREFIX = "stacks.layers"
# Outputs split, inputs split, two parts, no split, and the head, whose 61 tokens leave the hidden size to be split.
LAYERS = {
    *(f"{PREFIX}.{name}" for name in ("attention.mla.q_b", "attention.mla.o", "mlp.gate_up", "attention.mla.kv_a")),
    "head",
}


# What the kernels of LAYERS are made of; of the experts, all.
PACKED = tuple(f"{name}_proj.weight" for name in ("q_b", "o", "gate", "up", "down")) + (
    "kv_a_proj_with_mqa.weight",
    "lm_head.weight",
)


def draw(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def compare(run: Callable[..., Any], reference: Callable[..., Any], *args: Any, **more: Any) -> dict[str, Any]:
    jaxpr = str(jax.make_jaxpr(run)(*args))
    found, expected = (jax.tree.leaves(f(*args)) for f in (jax.jit(run), reference))
    errors = []
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(array, np.float64) for array in (one, other))
        assert one.shape == other.shape and np.isfinite(other[other != -np.inf]).all()
        assert ((one == -np.inf) == (other == -np.inf)).all()
        one, other = (np.where(array == -np.inf, 0, array) for array in (one, other))
        errors.append(float(np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30)))
    return {"error": max(errors), "kernels": jaxpr.count("pallas_call["), **more}


def target(packed: str, dtype: Any, mesh: Any) -> Target:
    names = packed_kernels(CONFIG, lambda name: name.endswith(PACKED)) if packed == "packed" else None
    module = nnx.eval_shape(lambda: Glm5(CONFIG, dtype=dtype, rngs=nnx.Rngs(1), packed=names, mesh=mesh))
    graphdef, params = nnx.split(module)
    rng, arrays = np.random.default_rng(5), []
    for path, leaf in flat_leaves(params).items():
        if leaf.dtype == jnp.uint8:
            values = rng.integers(0, 256, leaf.shape)
        else:  # scales and factors differ, so that a mixed-up order shows
            scaling = path[-1] in ("scales", "global_scale")
            values = rng.uniform(0.5, 2, leaf.shape) if scaling else rng.standard_normal(leaf.shape) * 0.1
        place = None if mesh is None else target_sharding(CONFIG, mesh)(path, leaf.shape)
        arrays.append(jax.device_put(values.astype(leaf.dtype), place))
    return Target(CONFIG, graphdef, jax.tree.unflatten(jax.tree.structure(params), arrays), mesh=mesh)


def first_layer(kernel: Any) -> Any:
    if isinstance(kernel, (GridKernel, LayerKernel, LayerHeads)) and kernel.layer is not None:
        kernel.layer = LayerIndex(jnp.int32(0))
    return kernel


def products(packed: str, mesh: Any) -> dict[str, Any]:
    """Every linear layer, the matrices of heads and the experts of a model."""
    dtype = jnp.float32 if packed == "packed" else jnp.bfloat16
    fast = with_kernels(target(packed, dtype, mesh), KernelChoice(INTERPRETED), free=True, packed_from=0).module()
    slow = dict(nnx.iter_modules(with_kernels(target(packed, dtype, None), REFERENCES, packed_from=0).module()))
    out = {}
    for path, node in nnx.iter_modules(fast):
        name = ".".join(part for part in path if isinstance(part, str))
        linear = isinstance(node, Linear) and isinstance(node.kernel, (GridKernel, LayerKernel))
        if linear and name in LAYERS and name not in out:
            one, other = first_layer(node.kernel), first_layer(slow[path].kernel)
            grid = isinstance(one, GridKernel)
            array = one.words[...] if grid else one.values[...]
            x = draw(7, 1, ROWS, other.weight.k if grid else other.values.shape[1], dtype=dtype)
            run, reference = (lambda x, k=k: k.multiply(x, jnp.float32) for k in (one, other))
            out[name] = compare(run, reference, x, split=not array.is_fully_replicated)
        for matrix in ("k_b", "v_b") if isinstance(node, MLA) and packed == "plain" else ():
            one, other = first_layer(getattr(node, matrix)), first_layer(getattr(slow[path], matrix))
            _, rank, heads, width = other.values.shape
            transposed = matrix == "k_b"
            assert one.axis == TENSOR
            x = draw(9, 2, ROWS, heads, width if transposed else rank, dtype=dtype)
            run, reference = (lambda x, k=k, t=transposed: k.multiply(x, transposed=t) for k in (one, other))
            out[f"{name}.{matrix}"] = compare(run, reference, x, split=not one.values[...].is_fully_replicated)
        if isinstance(node, MoE):
            assert isinstance(node.gate_up, GridKernel) == (packed == "packed")
            other = slow[path]
            x = draw(8, ROWS, CONFIG.hidden_size, dtype=dtype)
            for moe in (node, other):
                first_layer(moe.gate_up), first_layer(moe.down)
                whole = isinstance(moe.router, LayerKernel)  # of bfloat16 models
                moe.router = first_layer(moe.router) if whole else nnx.Param(moe.router[...][0])
                moe.router_bias = nnx.Param(moe.router_bias[...][0])
            run, reference = (lambda x, m=m: m._grouped(x, jnp.int32(0))[0] for m in (node, other))
            array = node.down.words[...] if packed == "packed" else node.down[...]
            out[name] = compare(run, reference, x, split=not array.is_fully_replicated)
    return out


def unpacked(mesh: Any) -> dict[str, Any]:
    """Of every packed linear layer, once it is unpacked: whether it is "split", lies as a plain one would ("in_place"),
    and holds the "exact" values; "small": whether a device's part is smaller than the whole of the layer `o`, and
    "small_plain": whether it is unpacked if that is the size to stay packed.
    """

    def fast(packed_from: int) -> dict[tuple, Any]:
        model = with_kernels(target("packed", jnp.float32, mesh), REFERENCES, free=True, packed_from=packed_from)
        return dict(nnx.iter_modules(model.module()))

    whole = {path: node for path, node in nnx.iter_modules(target("packed", jnp.float32, None).module())}
    old = {path: kernel_arrays(node) for path, node in whole.items() if isinstance(node, PackedKernel)}
    old = {path[:-1]: arrays for path, arrays in old.items() if path[-1] == "kernel"}  # without experts
    size = 2 * next(arrays[0].size for path, arrays in old.items() if path[-1] == "o")
    place, out, new, some = target_sharding(CONFIG, mesh), {}, fast(PACKED_FROM), fast(size)
    for path, arrays in old.items():
        kernel = new[path].kernel
        values = kernel.values[...] if isinstance(kernel, LayerKernel) else kernel[...]
        plain = dequantise(*arrays, axis=arrays[0].ndim - 1 - len(new[path].letters), dtype=jnp.float32)
        own = place((*path, "kernel"), values.shape)
        out[".".join(map(str, path))] = {
            "split": not values.is_fully_replicated,
            "in_place": values.sharding.is_equivalent_to(own, values.ndim),
            "exact": bool((np.asarray(values) == np.asarray(plain)).all()),
            "small": values.addressable_data(0).size < size,
            "small_plain": not isinstance(some[path].kernel, GridKernel),
        }
    return out


def rest(mesh: Any, batch: int) -> dict[str, Any]:
    """What is not split by weights: attention, the indexer, the commit, the vocabulary."""
    layers, slots, rows, heads, rank, rope = 2, 32, 3, 8, 16, 16
    lengths, layer = jnp.arange(batch, dtype=jnp.int32) * 7 + 9, jnp.int32(1)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((rows, rows), bool)), (batch, rows, rows))
    width = rank + rope
    q, cache, new = (
        draw(1, batch, rows, heads, width),
        draw(2, layers, batch, slots, width),
        draw(3, batch, rows, width),
    )
    selected = jnp.tile(jnp.asarray([[[0, 5, 3, slots, -1]]], jnp.int32), (batch, rows, 1))
    keys = [draw(seed, layers, batch, slots, 2 * 16) for seed in (4, 5)]
    own = [draw(seed, batch, rows, 2 * 16) for seed in (6, 7)]
    index = (draw(8, batch, rows, 4, 16), draw(9, batch, rows, 4), draw(10, layers, batch, slots, 16))
    scores = REFERENCES.run("indexer_scores", *index, layer, lengths, draw(11, batch, rows, 16), mask)
    paths = jnp.tile(jnp.asarray([[0, 2, -1]], jnp.int32), (batch, 1))
    sizes = {"rank": rank, "scale": 0.2}
    calls = {
        "mla_attention": ((q, cache, layer, lengths, new, mask), specs.mla_specs(q, mesh), sizes),
        "mla_attention_selected": ((q, cache, layer, lengths, new, selected), specs.mla_specs(q, mesh), sizes),
        "gqa_attention": (
            (draw(12, batch, rows, 4, 16), *keys, layer, lengths, *own, mask),
            specs.gqa_specs(batch, mesh),
            {"scale": 0.2},
        ),
        "indexer_scores": (
            (*index, layer, lengths, draw(11, batch, rows, 16), mask),
            specs.indexer_specs(batch, mesh),
            {},
        ),
        "select_top_k_indices": (scores, specs.selection_specs(batch, mesh), {"k": 4}),
        "commit_rows": (({"a": cache}, {"a": draw(13, layers, batch, rows, width)}, paths, lengths), None, {}),
        "vocab_topk": ((draw(14, batch, rows, 300),), None, {"k": 5}),
    }
    chosen, out = KernelChoice(INTERPRETED, mesh=mesh), {}
    for op, (args, own, static) in calls.items():
        own = specs.commit_specs(batch, mesh) if op == "commit_rows" else own

        def tidy(result: Any, op: str = op) -> Any:  # in which order columns are listed is open, and what -1 writes
            if op == "commit_rows":
                return [row[:, :, : n + 2] for n, row in zip((9, 16), jnp.split(result["a"], batch, 1), strict=False)]
            return jnp.sort(result, axis=-1) if op == "select_top_k_indices" else result

        run = lambda *a, op=op, own=own, static=static, tidy=tidy: tidy(chosen.run(op, *a, specs=own, **static))  # noqa: E731
        reference = lambda *a, op=op, static=static, tidy=tidy: tidy(REFERENCES.run(op, *a, **static))  # noqa: E731
        out[op] = compare(run, reference, *args)
    return out


def main() -> None:
    jax.config.update("jax_numpy_rank_promotion", "raise")
    name, part = sys.argv[1:]
    mesh = make_mesh(*map(int, name.split("x")))
    found = {"rest": lambda: rest(mesh, 2), "unpacked": lambda: unpacked(mesh)}.get(part, lambda: products(part, mesh))
    print(json.dumps(found()))


if __name__ == "__main__":
    main()
