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
from ddtree_jax.models import Target, make_drafter, target_logits
from ddtree_jax.models.config import Glm5Config
from ddtree_jax.models.folders import describe_target
from ddtree_jax.models.glm5 import Glm5
from ddtree_jax.models.kernels import PACKED_FROM, leaves_on_kernels, with_kernels
from ddtree_jax.models.linear import (
    GridKernel,
    LayerHeads,
    LayerIndex,
    LayerKernel,
    Linear,
    PackedKernel,
    kernel_arrays,
)
from ddtree_jax.models.moe import DENSE_EXPERTS_LIMIT, MoE, bfloat16_terms
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.models.params import packed_kernels
from ddtree_jax.models.published import GLM_5
from ddtree_jax.models.quant import dequantise
from ddtree_jax.pallas import choice as choice_module
from ddtree_jax.pallas.api import OPS
from ddtree_jax.pallas.backend import B200, H200, INTERPRETED
from ddtree_jax.pallas.choice import KernelChoice, choose_kernels
from ddtree_jax.profiling import random_state
from tests.engine.conftest import DRAFTER, TARGET

KERNELS = KernelChoice(INTERPRETED)
REFERENCES = dataclasses.replace(KERNELS, named=tuple((name, "reference") for name in OPS))
Jaxprs = (Jaxpr, ClosedJaxpr)
NEW_TOKENS, PROMPT = 5, np.random.default_rng(3).integers(0, 60, 13).tolist()


def make_pair(num_experts, *, packed, dtype=jnp.float32):
    """A random pair with two stacked expert layers.

    packed: "all" kernels that can be, the "experts", the "linears", which are all others, or "none".
    """
    config = dataclasses.replace(
        TARGET,
        q_lora_rank=32,
        n_routed_experts=num_experts,
        indexer_types=("full",) * 3,
        mlp_layer_types=("dense", "sparse", "sparse"),
    )
    assert config.index_topk < len(PROMPT)  # so that attention is over a selection
    is_packed = {
        "all": lambda name: True,
        "experts": lambda name: ".experts." in name,
        "linears": lambda name: ".experts." not in name,
    }
    names = packed_kernels(config, is_packed[packed]) if packed != "none" else None
    module = Glm5(config, dtype=dtype, rngs=nnx.Rngs(1), packed=names)
    assert [segment.repeats for segment in module.plan] == [1, 2]
    rng = np.random.default_rng(4)  # scales differ, so that a mixed-up order shows
    for kernel in [node for _, node in nnx.iter_modules(module) if isinstance(node, PackedKernel)]:
        for param in (kernel.scales, kernel.global_scale):
            uneven = np.asarray(param[...], np.float32) * rng.uniform(0.5, 2, param.shape)
            param[...] = jnp.asarray(uneven, param.dtype)
    loud = module.head.kernel.global_scale if packed in ("all", "linears") else module.head.kernel
    loud[...] = loud[...] * jnp.asarray(60, loud.dtype)  # flat logits have near-ties
    target = Target(config, *nnx.split(module))
    return Engine(target, make_drafter(DRAFTER, target, seed=2), None, "kernels")


def on_kernels(engine, choice=KERNELS, packed_from=0):
    """packed_from: 0, since all that is packed in a model of tests would be unpacked else."""
    return dataclasses.replace(
        engine,
        target=with_kernels(engine.target, choice, packed_from=packed_from),
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


@pytest.mark.slow
def test_greedy_tokens_are_the_same_by_reference():
    check(DENSE_EXPERTS_LIMIT + 8, "experts", "ddtree", REFERENCES)


def linears(module):
    return {path: node for path, node in nnx.iter_modules(module) if isinstance(node, Linear)}


def plain_values(linear, dtype):
    """What the kernel of a packed layer, or of a stack of them, stands for."""
    codes, scales, factor = kernel_arrays(linear.kernel)
    return jax.jit(dequantise, static_argnames=("axis", "dtype"))(
        codes, scales, factor, axis=codes.ndim - 1 - len(linear.letters), dtype=dtype
    )


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_packed_matrices_below_a_size_become_plain_ones(part):
    dtype = jnp.bfloat16
    engine = make_pair(4, packed="all", dtype=dtype)
    old = linears(engine.target.module())

    def size(node):  # of one layer
        codes = node.kernel.codes
        return 2 * codes.size // (codes.shape[0] if codes.ndim > 1 + len(node.letters) else 1)

    sizes = {path: size(node) for path, node in old.items() if isinstance(node.kernel, PackedKernel)}
    assert len(sizes) > 15 and ("head",) in sizes
    packed_from = sorted(sizes.values())[len(sizes) // 2] if part == "some" else max(sizes.values()) + 1
    fast = on_kernels(engine, packed_from=packed_from)
    assert all(isinstance(moe.gate_up, GridKernel) and isinstance(moe.down, GridKernel) for moe in modules(fast, MoE))
    new = linears(fast.target.module())
    for path, count in sizes.items():
        kernel = new[path].kernel
        assert isinstance(kernel, GridKernel) == (count >= packed_from), path
        if count < packed_from:
            values = kernel[...] if path == ("head",) else kernel.values[...]
            expected = plain_values(old[path], dtype)
            assert values.dtype == dtype and (values == expected).all(), path


def test_unpacked_layers_give_the_logits_and_the_tokens_of_plain_jax():
    engine = make_pair(4, packed="linears")
    fast = on_kernels(engine, REFERENCES, PACKED_FROM)
    assert modules(engine, PackedKernel) and modules(fast, LayerKernel)
    assert not modules(fast, PackedKernel) and not modules(fast, GridKernel)
    (token_ids,) = tokens(fast, "ddtree")
    found, expected = (target_logits(each.target, [PROMPT + token_ids[:-1]]) for each in (fast, engine))
    assert (found == expected).all() and float(jnp.std(expected)) > 0.1
    assert token_ids == expected[0, len(PROMPT) - 1 :].argmax(-1).tolist()


def test_what_is_unpacked_of_glm_5():
    config = Glm5Config.from_hf(GLM_5)
    opened = describe_target(config, packed=packed_kernels(config, lambda name: True))
    before, after = opened.leaves, leaves_on_kernels(opened)
    plain = describe_target(config).leaves
    new = after.keys() - before.keys()
    assert all((after[path].shape, after[path].dtype) == (plain[path].shape, plain[path].dtype) for path in new)
    names = {".".join(part for part in path if isinstance(part, str)) for path in new}
    prefix, indexer = "stacks.layers.attention", ("wk", "wq_b", "weights_proj")
    assert names == {
        *(f"{prefix}.{name}.kernel" for name in ("mla.q_a", "mla.kv_a")),
        *(f"{prefix}.indexer.{name}.kernel" for name in indexer),
        "stacks.layers.mlp.shared.down.kernel",
    }
    in_float32 = describe_target(config, dtype="float32")
    (router,) = [path for path in after if path[-1] == "router"]
    assert leaves_on_kernels(in_float32)[router] == in_float32.leaves[router]
    layers, width, experts = before[router].shape
    assert (after[router].shape, after[router].dtype) == ((layers, width, 3, experts), jnp.bfloat16)
    assert before.keys() - after.keys() == {
        (*path, name) for path in new for name in ("codes", "scales", "global_scale")
    }


@pytest.mark.parametrize("jitted", [False, True])
def test_bfloat16_terms_are_whole_float32_weights(jitted):
    weights = np.random.default_rng().standard_normal((2, 32, 8)).astype(np.float32)
    weights[0, :4] *= np.float32(10.0) ** np.arange(-24, 24, 12)[:, None]
    weights[1, 0] = [0, -0.0, 1, 2**-30, 1 + 2**-23, 3e38, 1 + 2**-8, -(1 + 2**-16)]
    terms = (jax.jit(bfloat16_terms) if jitted else bfloat16_terms)(jnp.asarray(weights))
    assert terms.shape == (2, 32, 3, 8) and terms.dtype == jnp.bfloat16
    assert (np.asarray(terms, np.float64).sum(axis=2) == weights.astype(np.float64)).all()
    # XLA for GPUs drops a conversion there and back; what it must not drop is this.
    assert str(jax.make_jaxpr(bfloat16_terms)(weights)).count("reduce_precision[") == 3


def test_routers_of_bfloat16_models_stay_exact():
    engine = make_pair(4, packed="none", dtype=jnp.bfloat16)
    fast = on_kernels(engine)
    (slow_moe,), (fast_moe,) = modules(engine, MoE), modules(fast, MoE)
    assert isinstance(fast_moe.router, LayerKernel)
    weights = np.asarray(slow_moe.router[...], np.float64)[0]
    fast_moe.router.layer = LayerIndex(jnp.int32(0))
    x = jnp.asarray(np.random.default_rng().standard_normal((5, weights.shape[0])), jnp.bfloat16)
    exact = np.asarray(x, np.float64) @ weights
    assert np.abs(np.asarray(fast_moe._logits(x), np.float64) - exact).max() <= 2e-6 * np.abs(exact).max()
    assert not any(isinstance(moe.router, LayerKernel) for moe in modules(on_kernels(make_pair(4, packed="none")), MoE))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_model_that_is_on_kernels_may_go_onto_others(dtype):
    once = on_kernels(make_pair(4, packed="all", dtype=dtype))
    again = on_kernels(once, REFERENCES)
    assert modules(again, LayerHeads) and all(moe.kernels == REFERENCES for moe in modules(again, MoE))


def test_what_is_made_anew_is_freed():
    target = make_pair(4, packed="all", dtype=jnp.bfloat16).target
    given = flat_leaves(target.params)
    kept = flat_leaves(with_kernels(target, KERNELS, free=True).params)
    anew = {path for path, leaf in given.items() if leaf.is_deleted()}
    assert {path[-1] for path in anew} >= {"router", "codes", "scales", "global_scale"}
    assert not any(leaf.is_deleted() for leaf in kept.values())


def seen_by_layers(jaxpr, inside=False):
    """Shapes of what the bodies of a program's loops are given, loops within loops too."""
    found = [variable.aval.shape for variable in jaxpr.invars] if inside else []
    for equation in jaxpr.eqns:
        for one in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxprs)):
            if isinstance(one, Jaxprs):
                found += seen_by_layers(getattr(one, "jaxpr", one), equation.primitive.name == "scan")
    return found


def test_no_plain_weight_is_cut_out_of_its_stack():
    engine = make_pair(4, packed="none")
    fast = on_kernels(engine)
    found = [node for _, node in nnx.iter_modules((fast.target.module(), fast.drafter.module()))]
    shapes = {node.values.shape for node in found if isinstance(node, (LayerKernel, LayerHeads))}
    assert len(shapes) >= 8 and modules(fast, LayerHeads)

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


@pytest.mark.parametrize("packed_from", [0, PACKED_FROM])
@pytest.mark.parametrize("free", [False, True])
def test_packed_weights_are_freed_only_when_asked(free, packed_from):
    engine = make_pair(4, packed="all")
    old = [array for node in modules(engine, PackedKernel) for array in kernel_arrays(node)]
    fast = with_kernels(engine.target, KERNELS, free=free, packed_from=packed_from)
    assert old and all(array.is_deleted() == free for array in old)
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
