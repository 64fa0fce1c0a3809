"""The training code computes what the library computes, and its labels are where they belong."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_training import drafter as drafting
from demo_training import indexer, modules, own_text, schedule
from demo_training import target as training
from flax import nnx

from ddtree_jax import models


def token_ids(batch: int, length: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(2, 512, (batch, length)), jnp.int32)


def test_token_losses_and_their_gradients() -> None:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(7, 5)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(5, 11)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 11, 7), jnp.int32)
    weights = jnp.asarray(rng.normal(size=7), jnp.float32)

    def plain(hidden, kernel):
        rows = jax.nn.log_softmax(hidden @ kernel, axis=-1)
        return -jnp.sum(weights * rows[jnp.arange(7), labels])

    def ours(hidden, kernel):
        return jnp.sum(weights * modules.token_losses(hidden, kernel, labels))

    for ours_value, plain_value in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1))(hidden, kernel)),
        jax.tree.leaves(jax.value_and_grad(plain, (0, 1))(hidden, kernel)),
        strict=True,
    ):
        np.testing.assert_allclose(ours_value, plain_value, atol=1e-5)


@functools.partial(jax.jit, static_argnums=(0, 3))
def jitted_losses(graphdef, params, tokens, sparse):
    return training.next_token_losses(graphdef, params, tokens, sparse=sparse)


def losses_of(target: models.Target, tokens: jax.Array, sparse: bool) -> tuple[jax.Array, jax.Array]:
    return jitted_losses(target.graphdef, target.params, tokens, sparse)


@pytest.mark.parametrize("sparse", [True, False])
def test_target_losses_are_those_of_the_library(pair, sparse: bool) -> None:
    target, _ = pair
    length = 48 if sparse else target.config.index_topk  # dense equals sparse up to index_topk tokens
    tokens = token_ids(2, length + 1)
    losses, load = losses_of(target, tokens, sparse)
    rows = jax.nn.log_softmax(models.target_logits(target, tokens[:, :-1]), axis=-1)
    expected = -jnp.take_along_axis(rows, tokens[:, 1:, None], axis=-1).reshape(-1)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    experts = target.config.n_routed_experts
    share = target.config.num_experts_per_tok / experts
    np.testing.assert_allclose(jnp.mean(load, axis=-1), share, rtol=1e-6)


def test_dense_training_differs_from_sparse_beyond_topk(pair) -> None:
    target, _ = pair
    tokens = token_ids(2, 49)
    dense, sparse = (losses_of(target, tokens, sparse)[0] for sparse in (False, True))
    assert jnp.max(jnp.abs(dense - sparse)) > 1e-4


def test_balance_moves_each_bias_towards_equal_load(pair) -> None:
    target, _ = pair
    count = target.config.mlp_layer_types.count("sparse")
    load = jnp.asarray(np.random.default_rng(1).random((count, target.config.n_routed_experts)), jnp.float32)
    moved = training.balance(target.config, target.graphdef, target.params, load, jnp.float32(0.5))
    before, after = schedule.named_leaves(target.params), schedule.named_leaves(moved)
    names = [name for name in before if name.endswith("router_bias")]
    assert len(names) == count
    for row, name in zip(load, names, strict=True):
        expected = 0.5 * np.sign(np.mean(row) - row)
        np.testing.assert_allclose(after[name][0] - before[name][0], expected)
    unchanged = [name for name in before if name not in names]
    assert all(after[name] is before[name] for name in unchanged)


def test_indexer_probabilities_are_the_attention_of_the_model(pair) -> None:
    target, _ = pair
    model = target.module()
    tokens = token_ids(2, 12)
    positions, mask = modules.causal_inputs(2, 12)
    expected = model(tokens, positions, mask, sparse=False, keep_rows=False).hidden
    angles = indexer.rope_angles(positions, target.config.qk_rope_head_dim, target.config.rope_theta)
    h = model.embed_tokens(tokens)
    for layer in indexer.layers_in_order(model):
        probabilities = indexer.attention_probabilities(layer.attention, layer.input_norm(h), angles, mask)
        np.testing.assert_allclose(jnp.sum(probabilities, axis=-1), 1.0, atol=1e-5)
        assert jnp.max(jnp.where(mask, 0.0, probabilities)) == 0.0
        h = indexer.dense_layer(layer, h, angles)
    np.testing.assert_allclose(h, expected, atol=1e-5)


def test_indexer_gradients_reach_indexers_alone(pair) -> None:
    target, _ = pair
    tokens = token_ids(2, 24)

    @jax.jit
    @jax.grad
    def gradient(params):
        return jnp.sum(indexer.indexer_losses(target.graphdef, params, tokens))

    gradients = schedule.named_leaves(gradient(target.params))
    moved = {name for name, leaf in gradients.items() if np.any(np.asarray(leaf))}
    assert moved and all("/indexer/" in name for name in moved)
    assert set(indexer.split_indexers(target.params)) - moved <= {
        name for name in gradients if name.endswith("k_norm/bias")
    }


@pytest.mark.slow
def test_writer_continues_greedily_as_the_full_forward_does(pair) -> None:
    target, _ = pair
    prompts = token_ids(3, 20)
    writer = own_text.make_writer(target.graphdef, 40)
    temperatures = jnp.asarray([0.0, 0.0, 1.0], jnp.float32)
    text = writer(target.params, prompts, temperatures, jax.random.key(0))
    np.testing.assert_array_equal(text[:, :20], prompts)
    chosen = jnp.argmax(models.target_logits(target, text[:, :-1]), axis=-1)[:, 19:]
    np.testing.assert_array_equal(text[:2, 20:], chosen[:2])
    assert np.any(text[2, 20:] != chosen[2])


# Every test drafts at the same places, so that the library's forward is compiled for two lengths only.
ANCHORS = (5, 20)
LENGTH = 30


def library_logits(pair, tokens: jax.Array) -> np.ndarray:
    """What the library drafts at each anchor, [B, A, L, V]."""
    target, drafter = pair
    each = [models.draft_logits(drafter, target, tokens[:, : anchor + 1]) for anchor in ANCHORS]
    return np.stack(each, axis=1)


def anchors_of(batch: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(ANCHORS, jnp.int32)[None], (batch, len(ANCHORS)))


@functools.cache
def block_function(target_graphdef, drafter_graphdef):
    @jax.jit
    def blocks(target_params, drafter_params, features, tokens, anchors):
        model, drafter = (
            nnx.merge(target_graphdef, target_params),
            nnx.merge(drafter_graphdef, drafter_params),
        )
        hidden = drafting.block_hidden(drafter, model.embed_tokens, features, tokens, anchors)
        return model.head_logits(hidden)

    return blocks


def blocks(pair, features: jax.Array, tokens: jax.Array) -> jax.Array:
    target, drafter = pair
    function = block_function(target.graphdef, drafter.graphdef)
    return function(target.params, drafter.params, features, tokens, anchors_of(len(tokens)))


@pytest.mark.slow
def test_blocks_equal_the_library_drafter_at_every_anchor(pair) -> None:
    target, drafter = pair
    tokens = token_ids(2, LENGTH)
    features = models.target_features(target, tokens, drafter.config.target_layer_ids)
    np.testing.assert_allclose(blocks(pair, features, tokens), library_logits(pair, tokens), atol=1e-5)


def test_nothing_from_the_anchor_on_reaches_a_block_but_its_root(pair) -> None:
    target, drafter = pair
    tokens = token_ids(2, LENGTH)
    features = models.target_features(target, tokens, drafter.config.target_layer_ids)
    first = ANCHORS[0]

    def first_block(features: jax.Array, tokens: jax.Array) -> np.ndarray:
        return np.asarray(blocks(pair, features, tokens)[:, 0])

    base = first_block(features, tokens)
    np.testing.assert_array_equal(base, first_block(features.at[:, first:].add(3.0), tokens))
    np.testing.assert_array_equal(base, first_block(features, tokens.at[:, first + 1 :].set(7)))
    assert np.max(np.abs(base - first_block(features.at[:, first - 1].add(3.0), tokens))) > 1e-4
    assert np.max(np.abs(base - first_block(features, tokens.at[:, first].add(1)))) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("soft", [0.0, 1.0])
def test_labels_are_the_tokens_at_the_drafted_positions(pair, sizes, soft: float) -> None:
    target, drafter = pair
    tokens = token_ids(2, LENGTH)
    chosen = dataclasses.replace(sizes, soft_label_weight=soft)

    @jax.jit
    def loss(target_params, drafter_params):
        network = nnx.merge(drafter.graphdef, drafter_params)
        return drafting.anchor_loss(chosen, target.graphdef, target_params, network, tokens, anchors_of(2))

    depth = sizes.block_size - 1
    rows = np.asarray(jax.nn.log_softmax(library_logits(pair, tokens), axis=-1))
    wanted = np.asarray(jax.nn.softmax(models.target_logits(target, tokens), axis=-1))
    weights = np.exp(-np.arange(depth) / sizes.draft_gamma)
    losses = []
    for b in range(2):
        for a, anchor in enumerate(ANCHORS):
            if soft:
                # The target's distribution of the token at anchor + 1 + r stands in the row before it.
                own = [-np.dot(wanted[b, anchor + r], rows[b, a, r]) for r in range(depth)]
            else:
                own = [-rows[b, a, r, tokens[b, anchor + 1 + r]] for r in range(depth)]
            losses.append(np.dot(weights / weights.sum(), own))
    assert float(loss(target.params, drafter.params)) == pytest.approx(np.mean(losses), abs=1e-5)


def test_anchors_lie_in_the_text_that_the_target_wrote() -> None:
    lengths = jnp.asarray([24, 8, 40], jnp.int32)
    seen = []
    for seed in range(200):
        anchors = drafting.draw_anchors(jax.random.key(seed), lengths, 48, 4, 3)
        assert jnp.all(anchors >= lengths[:, None]) and jnp.all(anchors + 3 <= 47)
        seen.append(np.asarray(anchors))
    for row, length in enumerate((24, 8, 40)):
        reached = {int(a) for anchors in seen for a in anchors[row]}
        assert reached == set(range(length, 45))
