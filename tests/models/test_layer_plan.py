"""Layers of one kind are scanned: what is compiled does not grow with depth."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from ddtree_jax.models.glm5 import Glm5, LayerKind, PackedKernels, Segment, causal_mask, layer_plan
from tests.engine.conftest import TARGET


def with_layers(count: int):
    """The small target with `count` layers in the pattern of GLM-5.2: full 0, 1, 2, then every fourth."""
    full = ["full" if i < 3 or (i - 2) % 4 == 0 else "shared" for i in range(count)]
    dense = ["dense" if i < 3 else "sparse" for i in range(count)]
    return dataclasses.replace(TARGET, num_hidden_layers=count, indexer_types=tuple(full), mlp_layer_types=tuple(dense))


def test_plan_of_glm_5_2():
    dense, shared, full = LayerKind("full", "dense"), LayerKind("shared", "sparse"), LayerKind("full", "sparse")
    assert layer_plan(with_layers(78)) == (
        Segment((dense,), 3, 0),
        Segment((shared,), 3, 3),
        Segment((full, shared, shared, shared), 18, 6),
    )


def test_every_layer_has_one_place():
    for scan in (True, False):
        for count in (1, 2, 3, 7, 13, 78):
            config = with_layers(count)
            places = {
                segment.layer_index(place, repeat): kind
                for segment in layer_plan(config, scan=scan)
                for place, kind in enumerate(segment.pattern)
                for repeat in range(segment.repeats)
            }
            assert [places[i][:2] for i in range(count)] == list(config.layer_kinds)


def test_packed_kernels_split_a_stack_where_they_change():
    """An export that leaves the last layers' experts unquantised: those layers are of another kind."""
    experts = ("mlp.down", "mlp.gate_up")
    packed = PackedKernels(tuple(() if i < 3 or i > 75 else experts for i in range(78)))
    plan = layer_plan(with_layers(78), packed=packed)
    kinds = {s.layer_index(p, r): k for s in plan for p, k in enumerate(s.pattern) for r in range(s.repeats)}
    assert [i for i in range(78) if kinds[i].packed] == list(range(3, 76))
    assert sum(len(segment.pattern) for segment in plan) <= 12


def _equations(jaxpr) -> int:
    inner = [v for eqn in jaxpr.eqns for v in eqn.params.values()]
    return len(jaxpr.eqns) + sum(_equations(v.jaxpr) for v in inner if hasattr(v, "jaxpr"))


def test_traced_program_does_not_grow_with_depth():
    def size(count: int, scan: bool) -> int:
        build = functools.partial(Glm5, with_layers(count), dtype=jnp.dtype(jnp.float32), scan=scan)
        graphdef, params = nnx.split(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0))))

        def forward(params):
            ids = jnp.zeros((1, 12), jnp.int32)
            return nnx.merge(graphdef, params)(ids, ids, causal_mask(1, 12)).hidden

        return _equations(jax.make_jaxpr(forward)(params).jaxpr)

    assert size(78, True) < 1.1 * size(14, True)
    assert size(14, False) > 1.8 * size(14, True)  # the measure does see depth
