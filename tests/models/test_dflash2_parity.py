"""DFlash2 drafters against a float64 reference: convolutions, selector, greedy path, caches, blocks side by side."""

import dataclasses
import json

import dflash2_reference
import dflash_reference
import glm5_reference
import golden_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_models import FAULT, TOLERANCE, largest_error
from sessions import DraftSession

from ddtree_jax import models
from ddtree_jax.models.config import DFlashConfig
from ddtree_jax.models.pair import flat_leaves
from ddtree_jax.safetensors_files import read_header
from ddtree_jax.tree import chain_from_pairs

NUM_CONTEXT = 17

VARIANTS = {
    "published_shape": {},  # two taps, bidirectional
    "three_taps": dict(dflash_config=dict(conv_kernel_size=3, conv_group_size=8)),
    "one_tap": dict(dflash_config=dict(conv_kernel_size=1, conv_group_size=1)),
    "one_group": dict(dflash_config=dict(conv_group_size=32)),
    "sliding": dict(layer_types=["sliding_attention"] * 2, sliding_window=5),
    "sliding_causal": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5, is_causal=True),
    "scaled": dict(dflash_config=dict(input_embedding_scale=1.7, output_multiplier=0.8, final_logit_softcapping=1.3)),
}


@pytest.fixture
def make_drafter(tmp_path):
    """make_drafter(target, seed=1, **config changes) -> (drafter, config, weights), by way of a folder."""

    def make(target, seed=1, **changes):
        config = dflash2_reference.drafter_config(**changes)
        weights = dflash2_reference.random_weights(config, seed)
        folder = dflash_reference.write_folder(tmp_path / str(len(list(tmp_path.iterdir()))), config, weights)
        return models.load_drafter(folder, target, dtype="float32"), config, weights

    return make


class Reference:
    """Hidden rows and logits of one sequence's block in float64, from the float64 target."""

    def __init__(self, config, weights, token_ids):
        target_config, target_weights = glm5_reference.load_folder(golden_models.path("mixed"))
        key = tuple(int(i) for i in token_ids[:-1])
        residuals = _residuals(target_config, target_weights, key)
        features = np.concatenate([residuals[k] for k in config["dflash_config"]["target_layer_ids"]], axis=-1)
        self.config = config
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        embed, head = (target_weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
        arguments = config, self.weights, embed
        self.hidden = dflash_reference.forward_block(*arguments, features, token_ids[-1])[1:]
        self.logits = dflash_reference.draft_logits(*arguments, head, features, token_ids[-1])
        self.root = int(token_ids[-1])

    def pair_log_probs(self, row, parent):
        scores = dflash2_reference.candidate_scores(
            self.config, self.weights, self.logits[row], self.hidden[row], parent
        )
        return dflash2_reference.log_probs(scores)

    def greedy_path(self):
        return dflash2_reference.greedy_path(self.config, self.weights, self.logits, self.hidden, self.root)


_known = {}


def _residuals(config, weights, token_ids):
    if token_ids not in _known:
        _known[token_ids] = glm5_reference.forward(config, weights, token_ids)[1]
    return _known[token_ids]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_pairs_equal_those_of_the_reference(load_golden, make_drafter, variant):
    target, golden = load_golden("mixed")
    drafter, config, weights = make_drafter(target, **VARIANTS[variant])
    token_ids = golden["token_ids"][:, : NUM_CONTEXT + 1]
    logits = models.draft_logits(drafter, target, token_ids)
    pairs = models.draft_pairs(drafter, target, token_ids)
    depth, k = config["dflash_config"]["block_size"] - 1, config["dflash_config"]["selector_top_k"]
    assert logits.shape == (2, depth, 128) and logits.dtype == np.float32
    assert pairs.log_probs.shape == (2, depth, k, k) and pairs.log_probs.dtype == np.float32
    assert pairs.token_ids.shape == (2, depth, k) and pairs.token_ids.dtype == np.int32
    for b, ids in enumerate(token_ids):
        reference = Reference(config, weights, ids)
        assert largest_error(logits[b], reference.logits) <= TOLERANCE
        found = np.asarray(pairs.token_ids[b])
        for row in range(depth):
            parents = [reference.root] if row == 0 else found[row - 1].tolist()
            for p, parent in enumerate(parents):
                expected = reference.pair_log_probs(row, parent)
                assert set(expected) == set(found[row].tolist())
                wanted = [expected[i] for i in found[row].tolist()]
                assert largest_error(np.asarray(pairs.log_probs[b, row, p]), np.asarray(wanted)) <= TOLERANCE


def test_the_chain_is_the_selectors_greedy_path(load_golden, make_drafter):
    """And not the argmax of the logits: the codebooks decide."""
    target, golden = load_golden("mixed")
    differs = 0
    for seed in range(4):
        drafter, config, weights = make_drafter(target, seed=seed)
        token_ids = golden["token_ids"][:, : NUM_CONTEXT + 1]
        pairs = models.draft_pairs(drafter, target, token_ids)
        chain = chain_from_pairs(*pairs, token_ids[:, -1])
        for b, ids in enumerate(token_ids):
            reference = Reference(config, weights, ids)
            assert chain.token_ids[b, 1:].tolist() == reference.greedy_path()
            differs += reference.greedy_path() != reference.logits.argmax(-1).tolist()
    assert differs >= 4


def test_no_context(load_golden, make_drafter):
    target, golden = load_golden("mixed")
    drafter, config, weights = make_drafter(target)
    _, target_weights = glm5_reference.load_folder(golden_models.path("mixed"))
    embed, head = (target_weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    ids = golden["token_ids"][:1, :1]
    expected = dflash_reference.draft_logits(config, weights, embed, head, [], ids[0, 0])
    assert largest_error(models.draft_logits(drafter, target, ids)[0], expected) <= TOLERANCE


def test_identity_convolutions_are_dflash_v1(load_golden, make_drafter, tmp_path):
    target, golden = load_golden("mixed")
    config = dflash2_reference.drafter_config()
    weights = dflash2_reference.random_weights(config, seed=1)
    for name, value in weights.items():
        if name.endswith("base_kernel"):
            value[:] = np.eye(1, value.shape[1])[:, :, None]
        elif "kernel_projection" in name:
            value[:] = 0
    second = models.load_drafter(dflash_reference.write_folder(tmp_path / "second", config, weights), target)
    first_config = dflash_reference.drafter_config()
    weights = {k: v for k, v in weights.items() if "conv" not in k and "selector" not in k}
    first = models.load_drafter(dflash_reference.write_folder(tmp_path / "first", first_config, weights), target)
    token_ids = golden["token_ids"][:, : NUM_CONTEXT + 1]
    logits = [models.draft_logits(drafter, target, token_ids) for drafter in (first, second)]
    assert largest_error(*logits) <= 1e-6
    random, _, _ = make_drafter(target)
    assert largest_error(logits[0], models.draft_logits(random, target, token_ids)) > FAULT


def test_a_new_drafter_starts_as_dflash_v1(load_golden):
    """Identity convolutions, and a selector without influence."""
    target, golden = load_golden("mixed")
    config = DFlashConfig.from_hf(dflash2_reference.drafter_config())
    drafter = models.make_drafter(config, target)
    token_ids = golden["token_ids"][:, : NUM_CONTEXT + 1]
    logits, pairs = (call(drafter, target, token_ids) for call in (models.draft_logits, models.draft_pairs))
    leaves = flat_leaves(drafter.params)
    for name in ("attention_conv", "mlp_conv"):
        np.testing.assert_array_equal(leaves["layers", name, "base_kernel"][:, :, 0], 1)
        np.testing.assert_array_equal(leaves["layers", name, "base_kernel"][:, :, 1:], 0)
        np.testing.assert_array_equal(leaves["layers", name, "kernel_projection", "kernel"], 0)
    best = jax.lax.top_k(logits, 5)
    np.testing.assert_array_equal(pairs.token_ids, best[1])
    expected = jnp.broadcast_to(jax.nn.log_softmax(best[0])[:, :, None], pairs.log_probs.shape)
    np.testing.assert_allclose(pairs.log_probs, expected, atol=1e-6)


@pytest.mark.slow
def test_incremental_context_equals_the_whole_context(load_golden, make_drafter):
    target, golden = load_golden("mixed")
    drafter, _, _ = make_drafter(target, **VARIANTS["sliding"])
    token_ids, lengths = golden["token_ids"], np.array([17, 12])
    features = np.asarray(models.target_features(target, token_ids, drafter.config.target_layer_ids))
    parts = DraftSession(drafter, target, 2, 32)
    parts.extend(features[:, :8])
    for counts in ([4, 1], [2, 1], [1, 2], [2, 0]):
        rows = np.full((2, 6, features.shape[-1]), 7.0, np.float32)
        for b, count in enumerate(counts):
            start = parts.lengths[b]
            rows[b, :count] = features[b, start : start + count]
        parts.extend(rows, np.array(counts))
    np.testing.assert_array_equal(parts.lengths, lengths)
    drafted = parts.draft(token_ids[np.arange(2), lengths])
    for b, length in enumerate(lengths):
        alone = models.draft_logits(drafter, target, token_ids[b : b + 1, : length + 1])
        assert largest_error(drafted[b], alone[0]) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("taps", [2, 4])
def test_blocks_side_by_side_do_not_touch(load_golden, make_drafter, taps):
    """Training drafts several blocks of a sequence in one pass: a convolution must not reach into the block before."""
    target, golden = load_golden("mixed")
    drafter, config, _ = make_drafter(target, dflash_config=dict(conv_kernel_size=taps))
    c, anchors = drafter.config, [3, 9, 10]
    token_ids = golden["token_ids"][:1]
    length, size = token_ids.shape[1], c.block_size
    features = models.target_features(target, token_ids, c.target_layer_ids)
    module, embedder = drafter.module(), target.module()
    at = jnp.arange(length, dtype=jnp.int32)[None]
    blocks = np.full((1, len(anchors), size), c.mask_token_id, np.int32)
    blocks[:, :, 0] = token_ids[:, anchors]
    starts = np.repeat(anchors, size)
    owner = np.arange(len(starts)) // size
    hidden = module.block_hidden(
        embedder.embed_tokens(jnp.asarray(blocks.reshape(1, -1))),
        jnp.asarray((np.asarray(anchors)[:, None] + np.arange(size)).reshape(1, -1), jnp.int32),
        module.context_rows(features, at),
        at,
        jnp.asarray(np.arange(length)[None, None] < starts[None, :, None]),
        jnp.asarray(owner[:, None] == owner[None])[None],
    )
    logits = embedder.head_logits(hidden.reshape(len(anchors), size, -1)[:, 1:])
    for i, anchor in enumerate(anchors):
        alone = models.draft_logits(drafter, target, token_ids[:, : anchor + 1])
        assert largest_error(logits[i], alone[0]) <= TOLERANCE


# Had the code made this mistake, it would equal the reference with it.
def _taps_swapped(config, weights, name, side, normed, rows):
    base = weights[f"{name}.base_kernel"]
    return _original(config, weights | {f"{name}.base_kernel": base[:, ::-1]}, name, side, normed, rows)


def _kernel_from_the_sublayer(config, weights, name, side, normed, rows):
    return _original(config, weights, name, side, rows, rows)


def _sides_swapped(config, weights, name, side, normed, rows):
    return _original(config, weights, name, 1 - side, normed, rows)


def _no_dynamic_part(config, weights, name, side, normed, rows):
    return _original(config, weights, name, side, [0 * row for row in normed], rows)


def _neighbour_below(config, weights, name, side, normed, rows):
    return _original(config, weights, name, side, normed[::-1], rows[::-1])[::-1]


_original = dflash_reference.convolved


@pytest.mark.parametrize(
    "fault", [_taps_swapped, _kernel_from_the_sublayer, _sides_swapped, _no_dynamic_part, _neighbour_below]
)
def test_reference_sees_the_fault(monkeypatch, fault):
    config = dflash2_reference.drafter_config()
    weights = dflash2_reference.random_weights(config, seed=1)
    token_ids = golden_models.arrays("mixed")["token_ids"][0, : NUM_CONTEXT + 1]
    right = Reference(config, weights, token_ids).logits
    monkeypatch.setattr(dflash_reference, "convolved", fault)
    assert largest_error(right, Reference(config, weights, token_ids).logits) > FAULT


def test_round_trip_through_a_folder(load_golden, make_drafter, tmp_path):
    target, _ = load_golden("mixed")
    drafter, config, weights = make_drafter(target)
    models.save_drafter(drafter, target, tmp_path / "again", dtype=jnp.float32)
    header = read_header(tmp_path / "again" / "model.safetensors")
    assert {name: entry.shape for name, entry in header.items()} == {n: w.shape for n, w in weights.items()}
    again = models.load_drafter(tmp_path / "again", target, dtype="float32")
    assert again.config == drafter.config
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    for path, leaf in flat_leaves(again.params).items():
        np.testing.assert_array_equal(leaf, flat_leaves(drafter.params)[path])


def test_masked_vocabulary_entries_are_no_candidates(load_golden, make_drafter):
    """A -inf logit never becomes a candidate, and a row without candidates ends the tree there, without a NaN."""
    target, _ = load_golden("mixed")
    drafter, _, _ = make_drafter(target)
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 5, 32)), jnp.float32)
    logits = np.full((1, 5, 128), -np.inf, np.float32)
    logits[0, 0, [3, 4]], logits[0, 1, :9] = [0.5, 0.25], rng.normal(size=9)
    pairs = drafter.module().selector(hidden, jnp.asarray(logits), jnp.asarray([7], jnp.int32))
    log_probs = np.asarray(pairs.log_probs)
    assert not np.isnan(log_probs).any() and (log_probs <= 0).all()
    assert np.isfinite(log_probs[0, 0, 0]).sum() == 2 and np.isfinite(log_probs[0, 1]).all()
    assert (log_probs[0, 2:] == -np.inf).all()
    assert int(chain_from_pairs(*pairs, [7]).num_nodes[0]) == 3


def test_pairs_need_a_selector(load_golden):
    target, golden = load_golden("mixed")
    drafter = models.make_drafter(DFlashConfig.from_hf(dflash_reference.drafter_config()), target)
    with pytest.raises(ValueError, match="selector"):
        models.draft_pairs(drafter, target, golden["token_ids"])
    conv_only = dataclasses.replace(drafter.config, conv=models.ConvConfig(kernel_size=2, group_size=4))
    assert DFlashConfig.from_hf(conv_only.to_hf()) == conv_only
    assert models.draft_logits(models.make_drafter(conv_only, target), target, [[1, 2]]).shape == (1, 5, 128)
