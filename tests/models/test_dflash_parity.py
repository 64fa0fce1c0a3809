"""The drafter against a float64 reference that takes its features from the float64 target: no shared code."""

import dflash_reference
import glm5_reference
import golden_models
import numpy as np
import pytest
from golden_models import FAULT, TOLERANCE, largest_error
from sessions import DraftSession

from ddtree_jax import models

NUM_CONTEXT = 17  # tokens before the root

VARIANTS = {
    "bidirectional": {},
    "causal": dict(is_causal=True),
    # Shorter than the context, so that it matters; the first layer stays full.
    "sliding": dict(layer_types=["full_attention", "sliding_attention"], sliding_window=5),
    "sliding_causal": dict(layer_types=["sliding_attention"] * 2, sliding_window=5, is_causal=True),
    # No is_causal key: sliding layers are causal, full ones are not.
    "causality_by_layer": dict(layer_types=["sliding_attention", "full_attention"], sliding_window=5, is_causal=None),
    "scaled": dict(dflash_config=dict(input_embedding_scale=1.7, output_multiplier=0.8, final_logit_softcapping=1.3)),
    "old_rope_key": dict(rope_parameters=None, rope_theta=500.0),
    "taps_out_of_order": dict(dflash_config=dict(target_layer_ids=[5, 0, 3])),
}


@pytest.fixture(scope="module")
def reference_target():
    """(float64 weights, residuals(token_ids) of the mixed golden target)."""
    config, weights = glm5_reference.load_folder(golden_models.path("mixed"))
    known = {}

    def residuals(token_ids):
        key = tuple(int(i) for i in token_ids)
        if key not in known:
            known[key] = glm5_reference.forward(config, weights, key)[1]
        return known[key]

    return weights, residuals


def reference_logits(reference_target, config, weights, token_ids, layer_ids=None):
    """draft_logits of one sequence; `layer_ids` replaces the taps of the config, a fault."""
    target_weights, residuals = reference_target
    layer_ids = config["dflash_config"]["target_layer_ids"] if layer_ids is None else layer_ids
    features = np.concatenate([residuals(token_ids[:-1])[k] for k in layer_ids], axis=-1)
    return dflash_reference.draft_logits(
        config,
        {name: value.astype(np.float64) for name, value in weights.items()},
        target_weights["model.embed_tokens.weight"],
        target_weights["lm_head.weight"],
        features,
        token_ids[-1],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_draft_logits_equal_those_of_the_reference(load_golden, reference_target, make_drafter, variant):
    target, golden = load_golden("mixed")
    drafter, config, weights = make_drafter(target, **VARIANTS[variant])
    token_ids = golden["token_ids"][:, : NUM_CONTEXT + 1]
    logits = models.draft_logits(drafter, target, token_ids)
    assert logits.shape == (2, config["dflash_config"]["block_size"] - 1, 128)
    assert logits.dtype == np.float32
    expected = np.stack([reference_logits(reference_target, config, weights, ids) for ids in token_ids])
    assert largest_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize("num_context", [0, 1])
def test_little_or_no_context(load_golden, reference_target, make_drafter, num_context):
    target, golden = load_golden("mixed")
    drafter, config, weights = make_drafter(target)
    token_ids = golden["token_ids"][:, : num_context + 1]
    logits = models.draft_logits(drafter, target, token_ids)
    if num_context:
        expected = [reference_logits(reference_target, config, weights, ids) for ids in token_ids]
    else:
        embed, head = (reference_target[0][name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
        weights = {name: value.astype(np.float64) for name, value in weights.items()}
        expected = [dflash_reference.draft_logits(config, weights, embed, head, [], ids[0]) for ids in token_ids]
    assert largest_error(logits, np.stack(expected)) <= TOLERANCE


@pytest.mark.slow
def test_incremental_context_equals_the_whole_context(load_golden, make_drafter):
    target, golden = load_golden("mixed")
    drafter, _, _ = make_drafter(target, **VARIANTS["sliding"])
    token_ids, lengths = golden["token_ids"], np.array([17, 12])
    features = models.target_features(target, token_ids, drafter.config.target_layer_ids)
    features = np.asarray(features)
    whole, parts = (DraftSession(drafter, target, 2, 32) for _ in range(2))
    whole.extend(features, lengths)
    # A prompt, then rounds that accept 1..4 tokens of a block of six rows, the rows beyond them garbage.
    parts.extend(features[:, :8])
    for counts in ([4, 1], [2, 1], [1, 2], [2, 0]):
        rows = np.full((2, 6, features.shape[-1]), 7.0, np.float32)
        for b, count in enumerate(counts):
            start = parts.lengths[b]
            rows[b, :count] = features[b, start : start + count]
        parts.extend(rows, np.array(counts))
    np.testing.assert_array_equal(parts.lengths, lengths)
    roots = token_ids[np.arange(2), lengths]
    assert largest_error(parts.draft(roots), whole.draft(roots)) <= TOLERANCE
    # And each row of the ragged batch equals the cache-free drafting of its own tokens.
    for b, length in enumerate(lengths):
        alone = models.draft_logits(drafter, target, token_ids[b : b + 1, : length + 1])
        assert largest_error(parts.draft(roots)[b], alone[0]) <= TOLERANCE


# Each fault as a change of the reference's config alone: had the code made that mistake, it would equal this.
CONFIG_FAULTS = {
    "rope_theta_of_the_target": ({}, dict(rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})),
    "norm_eps_1e-6": ({}, dict(rms_norm_eps=1e-6)),
    "causal_block": ({}, dict(is_causal=True)),
    "window_off_by_one": (VARIANTS["sliding"], dict(VARIANTS["sliding"], sliding_window=6)),
    "window_ignored": (VARIANTS["sliding"], dict(VARIANTS["sliding"], layer_types=["full_attention"] * 2)),
    "mask_id_is_pad": ({}, dict(dflash_config=dict(mask_token_id=120))),
    "tap_before_the_layer": ({}, dict(dflash_config=dict(target_layer_ids=[0, 1, 2]))),
    "taps_in_another_order": ({}, dict(dflash_config=dict(target_layer_ids=[3, 2, 1]))),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_reference_sees_the_fault(reference_target, fault):
    right, wrong = (dflash_reference.drafter_config(**changes) for changes in CONFIG_FAULTS[fault])
    weights = dflash_reference.random_weights(right, seed=1)
    token_ids = golden_models.arrays("mixed")["token_ids"][0, : NUM_CONTEXT + 1]
    logits = [reference_logits(reference_target, config, weights, token_ids) for config in (right, wrong)]
    assert largest_error(*logits) > FAULT


@pytest.mark.parametrize("name", ["rope_half_split", "rms_norm"])
def test_reference_sees_the_wrong_rope_and_missing_norms(reference_target, monkeypatch, name):
    config = dflash_reference.drafter_config()
    weights = dflash_reference.random_weights(config, seed=1)
    token_ids = golden_models.arrays("mixed")["token_ids"][0, : NUM_CONTEXT + 1]
    right = reference_logits(reference_target, config, weights, token_ids)
    if name == "rope_half_split":
        monkeypatch.setattr(dflash_reference, name, glm5_reference.rope_interleaved)
    else:
        # Norms of heads only: their weights are the ones of length head_dim.
        original = dflash_reference.rms_norm
        skipped = lambda x, weight, eps: x if len(x) == config["head_dim"] else original(x, weight, eps)  # noqa: E731
        monkeypatch.setattr(dflash_reference, name, skipped)
    assert largest_error(right, reference_logits(reference_target, config, weights, token_ids)) > FAULT
