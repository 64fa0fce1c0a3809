"""The target against transformers and a float64 reference, and proof that the comparison can fail."""

import glm5_reference
import golden_models
import numpy as np
import pytest
from golden_models import FAULT, NAMES, TOLERANCE, largest_error

from ddtree_jax import models


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_transformers(load_golden, name):
    target, golden = load_golden(name)
    logits = models.target_logits(target, golden["token_ids"])
    assert logits.dtype == np.float32
    assert largest_error(logits, golden["logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_features_are_the_residual_stream_after_the_listed_layers(load_golden, name):
    target, golden = load_golden(name)
    layer_ids = tuple(int(k) for k in golden["residual_layer_ids"])
    features = models.target_features(target, golden["token_ids"], layer_ids)
    residuals = golden["residuals"]  # [k, B, T, D]
    expected = np.moveaxis(residuals, 0, 2).reshape(*residuals.shape[1:3], -1)
    # The stream grows with depth, the float32 error with it.
    assert largest_error(features, expected) <= TOLERANCE * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_of_the_float64_reference(load_golden, name):
    target, golden = load_golden(name)
    config, weights = glm5_reference.load_folder(golden_models.path(name))
    expected, residuals = glm5_reference.forward(config, weights, golden["token_ids"][0])
    # The reference stands on its own: it agrees with transformers too.
    assert largest_error(expected, golden["logits"][0]) <= TOLERANCE
    assert largest_error(models.target_logits(target, golden["token_ids"])[0], expected) <= TOLERANCE


def test_tokens_see_only_their_past(load_golden):
    target, golden = load_golden("mixed")
    changed = golden["token_ids"].copy()
    changed[:, 15:] = (changed[:, 15:] + 1) % 128
    before, after = (np.asarray(models.target_logits(target, ids)) for ids in (golden["token_ids"], changed))
    np.testing.assert_array_equal(before[:, :15], after[:, :15])
    assert np.abs(before[:, 15:] - after[:, 15:]).max() > FAULT


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", "groups"])
def test_sorted_experts_equal_the_wide_form(many_experts, name):
    """Models of many experts take another path through the MoE layers; here a small one does too."""
    many_experts()
    target, golden = models.load_target(golden_models.path(name), dtype="float32"), golden_models.arrays(name)
    assert largest_error(models.target_logits(target, golden["token_ids"]), golden["logits"]) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_target_loads_as_the_same_target(load_golden, tmp_path, name):
    target, golden = load_golden(name)
    models.save_target(target, tmp_path, dtype="float32")
    loaded = models.load_target(tmp_path, dtype="float32")
    assert loaded.config == target.config
    logits = [models.target_logits(model, golden["token_ids"]) for model in (target, loaded)]
    np.testing.assert_array_equal(*(np.asarray(x) for x in logits))
    # transformers' own names and shapes: what it saved is what is saved here, but for the MTP layer.
    saved, original = (
        glm5_reference.load_folder(tmp_path),
        glm5_reference.load_folder(golden_models.path(name)),
    )
    last = f"model.layers.{target.config.num_hidden_layers}."
    assert saved[1].keys() == {key for key in original[1] if not key.startswith(last)}
    for key, value in saved[1].items():
        np.testing.assert_array_equal(value, original[1][key])


MIXED = ["full", "full", "shared", "shared", "full", "shared"]
FAULTS = {
    "indexer_rope_half_split": ("mixed", {}, golden_models.indexer_rope_half_split),
    "q_a_norm_eps_1e-5": ("mixed", {}, golden_models.q_a_norm_eps_ten_times),
    "kv_a_norm_eps_1e-5": ("mixed", {}, golden_models.kv_a_norm_eps_ten_times),
    "rms_norm_eps_1e-6": ("mixed", {"rms_norm_eps": 1e-6}, None),
    "shared_layers_recompute": (
        "mixed",
        {"indexer_types": ["full"] * 6},
        golden_models.indexers_everywhere(MIXED),
    ),
    "indexer_switched_off": ("mixed", {"index_topk": 24}, None),
    "router_bias_dropped": ("mixed", {}, golden_models.router_bias_dropped),
    "top_k_weights_not_normalised": ("mixed", {"norm_topk_prob": False}, None),
    "groups_ignored": ("groups", {"n_group": 1, "topk_group": 1}, None),
    "default_rope_theta": (
        "index_share",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        None,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_sees_the_fault(tmp_path, fault):
    name, config, tensors = FAULTS[fault]
    folder = golden_models.edited(golden_models.path(name), tmp_path / "target", config=config, tensors=tensors)
    golden = golden_models.arrays(name)
    logits = models.target_logits(models.load_target(folder, dtype="float32"), golden["token_ids"])
    assert largest_error(logits, golden["logits"]) > FAULT
