"""Models on kernels: the same greedy tokens as without, in float32.

The fast test runs every operation by its reference: what it has of its own is the weights' layout, each layer's index
in a stack, and attention over whole caches and selected indices. The slow ones interpret the kernels as well, which
takes minutes each: an interpreted kernel copies its operands for every program of its grid.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr

import ddtree_jax
from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.models import Target, make_drafter
from ddtree_jax.models.glm5 import Glm5
from ddtree_jax.models.kernels import with_kernels
from ddtree_jax.models.linear import GridKernel, LayerKernel, PackedKernel
from ddtree_jax.models.moe import DENSE_EXPERTS_LIMIT, MoE
from ddtree_jax.models.params import packed_kernels
from ddtree_jax.pallas import choice as choice_module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, INTERPRETED
from ddtree_jax.pallas.choice import KernelChoice, choose_kernels
from ddtree_jax.profiling import random_state
from tests.engine.conftest import DRAFTER, TARGET

KERNELS = KernelChoice(INTERPRETED)
Jaxprs = (Jaxpr, ClosedJaxpr)
NEW_TOKENS, PROMPT = 5, np.random.default_rng(3).integers(0, 60, 13).tolist()


def make_pair(num_experts, *, packed):
    """A random pair with two stacked expert layers. packed: "all" kernels that can be, the "experts", or "none"."""
    config = dataclasses.replace(
        TARGET,
        q_lora_rank=32,
        n_routed_experts=num_experts,
        indexer_types=("full",) * 3,
        mlp_layer_types=("dense", "sparse", "sparse"),
    )
    assert config.index_topk < len(PROMPT)  # so that attention is over a selection
    names = packed_kernels(config, lambda name: packed == "all" or ".experts." in name) if packed != "none" else None
    module = Glm5(config, dtype=jnp.float32, rngs=nnx.Rngs(1), packed=names)
    assert [segment.repeats for segment in module.plan] == [1, 2]
    loud = module.head.kernel.global_scale if packed == "all" else module.head.kernel
    loud[...] = loud[...] * jnp.float32(60)  # flat logits have near-ties
    target = Target(config, *nnx.split(module))
    return Engine(target, make_drafter(DRAFTER, target, seed=2), None, "kernels")


def on_kernels(engine, choice=KERNELS):
    return dataclasses.replace(
        engine,
        target=with_kernels(engine.target, choice),
        drafter=with_kernels(engine.drafter, choice),
        compiled=set(),
    )


def tokens(engine, algorithm, prompts=PROMPT):
    results = ddtree_jax.generate(
        engine, prompts, max_new_tokens=NEW_TOKENS, algorithm=algorithm, budget=7, stop_token_ids=[]
    )
    results = results if isinstance(results, list) else [results]
    assert all(len(result.token_ids) == NEW_TOKENS for result in results)
    return [list(result.token_ids) for result in results]


def modules(engine, kind):
    return [node for _, node in nnx.iter_modules(engine.target.module()) if isinstance(node, kind)]


def check(num_experts, packed, algorithm, choice):
    engine = make_pair(num_experts, packed=packed)
    fast = on_kernels(engine, choice)
    assert len(modules(fast, GridKernel)) == len(modules(engine, PackedKernel))
    assert not modules(fast, PackedKernel) and (packed == "none") == (not modules(fast, GridKernel))
    assert all(moe.kernels == choice for moe in modules(fast, MoE))
    assert tokens(fast, algorithm) == tokens(engine, algorithm)


def test_greedy_tokens_are_the_same_by_reference():
    references = tuple((name, "reference") for name in OPS)
    check(DENSE_EXPERTS_LIMIT + 8, "experts", "ddtree", dataclasses.replace(KERNELS, named=references))


def seen_by_layers(jaxpr, inside=False):
    """Shapes of what the bodies of a program's loops are given, loops within loops too."""
    found = [variable.aval.shape for variable in jaxpr.invars] if inside else []
    for equation in jaxpr.eqns:
        for one in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxprs)):
            if isinstance(one, Jaxprs):
                found += seen_by_layers(getattr(one, "jaxpr", one), equation.primitive.name == "scan")
    return found


def test_no_weight_of_a_linear_layer_is_cut_out_of_its_stack():
    engine = make_pair(4, packed="none")
    fast = on_kernels(engine)
    found = [node for _, node in nnx.iter_modules((fast.target.module(), fast.drafter.module()))]
    shapes = {node.values.shape for node in found if isinstance(node, LayerKernel)}
    assert len(shapes) >= 6

    def cut(engine):
        plan, weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, 7, "greedy")
        jaxpr = jax.make_jaxpr(decoding.run_round, static_argnums=0)(plan, weights, *given)
        seen = seen_by_layers(jaxpr.jaxpr)
        return {shape for shape in shapes if shape[1:] in seen}

    plan, weights = decoding.make_plan(engine, SpeculativeAlgorithm.DDTREE, 7, "greedy")
    given = (*random_state(engine, plan, weights, 1, 5, 8), jnp.zeros((0,), jnp.int32))
    assert not cut(fast)
    assert cut(engine) == shapes  # a plain model cuts all of them


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_experts", "packed", "algorithm"),
    [
        (4, "all", "ddtree"),
        (4, "none", "dflash"),
        (DENSE_EXPERTS_LIMIT + 8, "experts", "ddtree"),
        (DENSE_EXPERTS_LIMIT + 8, "none", "none"),
    ],
)
def test_greedy_tokens_are_the_same(num_experts, packed, algorithm):
    check(num_experts, packed, algorithm, KERNELS)


def test_no_kernels_leave_the_model_alone(small_engine):
    assert with_kernels(small_engine.target, KernelChoice()) is small_engine.target


@pytest.mark.parametrize("free", [False, True])
def test_packed_weights_are_freed_only_when_asked(free):
    engine = make_pair(4, packed="all")
    old = [node.codes[...] for node in modules(engine, PackedKernel)]
    fast = with_kernels(engine.target, KERNELS, free=free)
    assert old and all(codes.is_deleted() == free for codes in old)
    assert all(np.isfinite(leaf).all() for leaf in map(np.asarray, fast.arrays) if leaf.dtype == np.float32)


def test_choice_by_name(monkeypatch):
    for wrong in ("triton", "Auto", ""):
        with pytest.raises(ValueError, match=f"kernels: got {wrong!r}, allowed are auto, all, reference"):
            ddtree_jax.load("demo", kernels=wrong)
        with pytest.raises(ValueError, match="kernels: got"):
            choose_kernels(wrong)
    assert choose_kernels("auto") == choose_kernels("reference") == KernelChoice()  # on a CPU
    assert not choose_kernels("all").any
    monkeypatch.setattr(choice_module, "current_platform", lambda: H200)
    assert choose_kernels("auto") == choose_kernels("all") == KernelChoice(H200)
    assert choose_kernels("reference") == choose_kernels("auto", split=True) == KernelChoice()
    assert choose_kernels("all", split=True) == KernelChoice(H200)
    monkeypatch.setattr(choice_module, "current_platform", lambda: B200)  # where no kernel has ever run
    assert choose_kernels("auto") == KernelChoice() and choose_kernels("all") == KernelChoice(B200)
