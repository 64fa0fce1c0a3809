"""Training of a DFlash2 drafter: its losses, what their gradients reach, and rounds scored as they are decoded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_training import drafter as drafting
from demo_training import modules, schedule, simulate
from demo_training.sizes import DemoSizes
from flax import nnx

import ddtree_jax
from ddtree_jax import models
from ddtree_jax.engine import Engine
from ddtree_jax.models import DFlashConfig
from tests.engine.conftest import dflash2_noise

ANCHORS, LENGTH = (5, 20), 30


@pytest.fixture(scope="module")
def sizes2(sizes: DemoSizes) -> DemoSizes:
    overrides = {"conv_kernel_size": "2", "conv_group_size": "8", "selector_rank": "4", "selector_top_k": "6"}
    return DemoSizes.from_overrides(sizes, overrides)


@pytest.fixture(scope="module")
def pair2(pair, sizes2: DemoSizes) -> tuple[models.Target, models.Drafter]:
    target, _ = pair
    config = DFlashConfig.from_hf(sizes2.drafter_hf_config(0, 1))
    drafter = models.Drafter(config, *modules.new_drafter(config, 4, target.config.hidden_size))
    return target, dflash2_noise(drafter, conv=0.3, pairs=1.0)


def test_sizes_make_the_config(sizes: DemoSizes, sizes2: DemoSizes) -> None:
    first, second = (DFlashConfig.from_hf(s.drafter_hf_config(0, 1)) for s in (sizes, sizes2))
    assert (first.conv, first.selector) == (None, None)
    assert dataclasses.replace(second, conv=None, selector=None) == first
    assert (second.conv.group_size, second.selector.top_k) == (8, 6)


def tokens_and_anchors() -> tuple[jax.Array, jax.Array]:
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 512, (2, LENGTH)), jnp.int32)
    return tokens, jnp.broadcast_to(jnp.asarray(ANCHORS, jnp.int32)[None], (2, len(ANCHORS)))


@pytest.mark.slow
def test_the_loss_is_that_of_the_rows_and_that_of_the_candidates(pair2, sizes2: DemoSizes) -> None:
    target, drafter = pair2
    tokens, anchors = tokens_and_anchors()
    depth = sizes2.block_size - 1
    # Labels among the candidates are rare in random text: those of all rows but the last are made candidates.
    text = np.asarray(tokens).copy()
    for anchor in ANCHORS:
        for b in range(2):
            drafted = models.draft_pairs(drafter, target, text[b : b + 1, : anchor + 1])
            text[b, anchor + 1 : anchor + depth] = np.asarray(drafted.token_ids)[0, :-1, 2]

    @jax.jit
    def loss(target_params, drafter_params, tokens):
        network = nnx.merge(drafter.graphdef, drafter_params)
        return drafting.anchor_loss(sizes2, target.graphdef, target_params, network, tokens, anchors)

    weights = np.exp(-np.arange(depth) / sizes2.draft_gamma)
    weights /= weights.sum()
    losses, hits = [], 0
    for b in range(2):
        for anchor in ANCHORS:
            prefix = text[b : b + 1, : anchor + 1]
            logits = np.asarray(jax.nn.log_softmax(models.draft_logits(drafter, target, prefix)[0], axis=-1))
            pairs = jax.device_get(models.draft_pairs(drafter, target, prefix))
            own = np.zeros(depth)
            for r in range(depth):
                label = int(text[b, anchor + 1 + r])
                own[r] -= logits[r, label]
                ids = pairs.token_ids[0, r].tolist()
                above = [int(text[b, anchor])] * 6 if r == 0 else pairs.token_ids[0, r - 1].tolist()
                parent = int(text[b, anchor + r])
                # draft_pairs knows only parents that are candidates themselves.
                if label in ids and parent in above:
                    own[r] -= pairs.log_probs[0, r, above.index(parent), ids.index(label)]
                    hits += 1
                else:
                    assert label not in ids
            losses.append(np.dot(weights, own))
    assert 4 * (depth - 1) <= hits < 4 * depth
    assert float(loss(target.params, drafter.params, jnp.asarray(text))) == pytest.approx(np.mean(losses), abs=1e-4)


@pytest.mark.slow
def test_training_moves_what_dflash2_adds(pair2, sizes2: DemoSizes) -> None:
    """From the identity on: every new leaf gets a gradient, and the loss falls on one batch."""
    target, _ = pair2
    config = DFlashConfig.from_hf(sizes2.drafter_hf_config(0, 1))
    graphdef, params = modules.new_drafter(config, 4, target.config.hidden_size)
    tokens, anchors = tokens_and_anchors()

    @jax.jit
    def loss(params):
        network = nnx.merge(graphdef, params)
        return drafting.anchor_loss(sizes2, target.graphdef, target.params, network, tokens, anchors)

    chain = drafting.optimiser()

    @jax.jit
    def step(params, state):
        gradients = jax.grad(loss)(params)
        return *schedule.apply(chain, params, state, gradients, jnp.float32(0.02)), gradients

    before, state = float(loss(params)), chain.init(params)
    for _ in range(40):
        params, state, gradients = step(params, state)
    moved = {name for name, leaf in schedule.named_leaves(gradients).items() if np.any(np.asarray(leaf))}
    added = ("base_kernel", "kernel_projection/kernel")
    wanted = {f"layers/{conv}/{leaf}" for conv in ("attention_conv", "mlp_conv") for leaf in added}
    wanted |= {"selector/hidden_projection/kernel", "selector/predecessor_codebook", "selector/successor_codebook"}
    assert wanted <= moved
    assert float(loss(params)) < before - 0.5
    # And the selector has its share in that: without its pair scores, the same drafter is worse.
    silent = schedule.map_named(lambda name, x: 0 * x if name == "selector/successor_codebook" else x, params)
    assert float(loss(params)) < float(loss(silent)) - 0.1


@pytest.mark.slow
def test_simulated_rounds_are_those_of_real_decoding(pair2, sizes2: DemoSizes) -> None:
    target, drafter = pair2
    prompt_length, new = 12, 10
    prompts = np.random.default_rng(1).integers(2, 512, (2, prompt_length)).tolist()
    engine = Engine(target, drafter, None, "pair2")
    options = dict(stop_token_ids=[])
    plain = ddtree_jax.generate(engine, prompts, new + drafter.config.draft_depth, "none", **options)
    texts = np.asarray([p + r.token_ids for p, r in zip(prompts, plain, strict=True)], np.int32)
    spans = dict(prompt_length=prompt_length, new_tokens=new)
    scorer = simulate.make_scorer(target.graphdef, drafter.graphdef, budgets=(4,), **spans)
    rounds = simulate.simulate(scorer, target.params, drafter.params, texts, end_ids=[], batch=2, **spans)
    for name, arguments in {"dflash": ("dflash", 0), "ddtree4": ("ddtree", 4)}.items():
        results = ddtree_jax.generate(engine, prompts, new, *arguments, **options)
        assert [list(r.stats.acceptance_lengths) for r in results] == rounds[name]
