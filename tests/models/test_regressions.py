"""Faults that other tree and block drafters had, one test each: what the networks and their caches must do.

A: draft input, features and vocabulary; C: masks, positions and layout; E: commits to the caches. B, D and the rest of
C and E, which need no network, are in tests/tree/test_regressions.py.
"""

import dflash_reference
import glm5_reference
import golden_models
import jax
import ml_dtypes
import numpy as np
import pytest
import sessions
from golden_models import FAULT, LAYER_IDS, TOLERANCE, largest_error
from sessions import DraftSession, Session, gather_features

from ddtree_jax import models
from ddtree_jax.errors import CheckpointError

CAPACITY = 128


@pytest.fixture(scope="module")
def mixed(load_golden):
    """(target, golden arrays) of the model with both kinds of indexer."""
    return load_golden("mixed")


@pytest.fixture(scope="module")
def all_features(mixed):
    """[L, B, T, D]: the residual stream after every layer, from one call."""
    target, golden = mixed
    features = np.asarray(models.target_features(target, golden["token_ids"], range(6)))
    return np.moveaxis(features.reshape(2, 24, 6, 32), 2, 0)


@pytest.fixture(scope="module")
def reference():
    """(config, float64 weights) of the same model."""
    return glm5_reference.load_folder(golden_models.path("mixed"))


def verified(mixed):
    """(session after a padded batch prefill and the golden tree's verification, logits, prefill features)."""
    target, golden = mixed
    lengths = golden["prefix_lengths"]
    session = Session(target, 2, CAPACITY, absorbed=True)
    session.extend(golden["token_ids"][:, : lengths.max()], lengths)
    features = np.asarray(session.output.features)
    return session, session.verify(golden["tree_token_ids"], golden["tree_parents"]), features


def leaves(cache, lengths):
    """Committed rows of every pool of a cache, by path: [R, lengths[b], width] for each sequence."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache.rows):
        for b, length in enumerate(lengths):
            found[jax.tree_util.keystr(path), b] = np.asarray(leaf)[:, b, :length]
    return found


def reference_features(reference, ids):
    """float64[T, F]: what the drafter must be given for these tokens."""
    residuals = glm5_reference.forward(*reference, [int(i) for i in ids])[1]
    return np.concatenate([residuals[k] for k in LAYER_IDS], axis=-1)


def reference_drafts(reference, config, weights, ids, *, head=None):
    """float64[L, V]: `draft_logits` of one sequence, with its own head if one is given."""
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    embed = reference[1]["model.embed_tokens.weight"]
    head = reference[1]["lm_head.weight"] if head is None else head
    features = reference_features(reference, ids[:-1])
    return dflash_reference.draft_logits(config, weights, embed, head, features, ids[-1])


# ---- A. Draft input, features, vocabulary


def test_regression_a1_slot_0_embeds_the_last_token(mixed, make_drafter):
    target, golden = mixed
    drafter, _, _ = make_drafter(target)
    token_ids = golden["token_ids"][:, :18].copy()
    before = models.draft_logits(drafter, target, token_ids)
    token_ids[:, -1] = (token_ids[:, -1] + 1) % 128
    after = models.draft_logits(drafter, target, token_ids)
    for row in range(drafter.config.block_size - 1):
        assert largest_error(before[:, row], after[:, row]) > FAULT


def test_regression_a2_features_are_states_after_the_layers(mixed, all_features):
    golden = mixed[1]
    for layer, residual in zip(golden["residual_layer_ids"], golden["residuals"], strict=True):
        assert largest_error(all_features[layer], residual) <= 10 * TOLERANCE
        for other in {0, 1, 2, 3, 4, 5} - {int(layer)}:
            assert largest_error(all_features[other], residual) > FAULT


def test_regression_a3_the_last_layer_is_a_tap_before_the_final_norm(mixed, make_drafter):
    target, golden = mixed
    drafter, _, _ = make_drafter(target, dflash_config=dict(target_layer_ids=[1, 3, 5]))
    features = models.target_features(target, golden["token_ids"], drafter.config.target_layer_ids)
    residual = golden["residuals"][-1]
    assert largest_error(features[..., -32:], residual) <= 10 * TOLERANCE
    assert models.draft_logits(drafter, target, golden["token_ids"]).shape == (2, 5, 128)


@pytest.mark.parametrize("layer_ids", [(5,), pytest.param((0, 5), marks=pytest.mark.slow), (5, 0, 3)])
def test_regression_a4_one_feature_per_listed_layer(mixed, all_features, layer_ids):
    target, golden = mixed
    features = models.target_features(target, golden["token_ids"], layer_ids)
    assert features.shape == (2, 24, 32 * len(layer_ids))
    expected = np.concatenate([all_features[layer] for layer in layer_ids], axis=-1)
    assert largest_error(features, expected) <= 10 * TOLERANCE


@pytest.mark.parametrize("layer_ids", [(6,), (0, 99), (-1,), (3, 3)])
def test_regression_a4_a_layer_that_does_not_exist_or_a_repeated_one_is_an_error(mixed, layer_ids):
    target, golden = mixed
    with pytest.raises(ValueError, match="layer_ids"):
        models.target_features(target, golden["token_ids"], layer_ids)


def test_regression_a5_a_drafter_for_a_deeper_target_is_refused(mixed, make_drafter):
    with pytest.raises(CheckpointError, match=r"target_layer_ids.*6"):
        make_drafter(mixed[0], dflash_config=dict(target_layer_ids=[1, 3, 6]))


def test_regression_a5_a_drafter_with_a_repeated_tap_is_refused(mixed, make_drafter):
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        make_drafter(mixed[0], dflash_config=dict(target_layer_ids=[1, 3, 3]))


def test_regression_a5_a_drafter_of_another_width_is_refused(mixed, tmp_path):
    config = dflash_reference.drafter_config()
    weights = dflash_reference.random_weights(config, seed=1, num_taps=2)
    folder = dflash_reference.write_folder(tmp_path / "drafter", config, weights)
    with pytest.raises(CheckpointError, match=r"fc.*96.*64|fc.*64.*96"):
        models.load_drafter(folder, mixed[0])
    config = dflash_reference.drafter_config(hidden_size=40)
    weights = dflash_reference.random_weights(config, seed=1)
    folder = dflash_reference.write_folder(tmp_path / "wider", config, weights)
    with pytest.raises(CheckpointError, match=r"hidden_size|fc"):
        models.load_drafter(folder, mixed[0])


def test_regression_a6_own_head_exactly_where_the_checkpoint_has_one(mixed, reference, tmp_path):
    target, golden = mixed
    config = dflash_reference.drafter_config()
    weights = dflash_reference.random_weights(config, seed=1)
    token_ids = golden["token_ids"][:, :18]
    head = np.random.default_rng(5).standard_normal((128, 32)).astype(np.float32) * 0.2
    expected = reference_drafts(reference, config, weights, token_ids[0])
    borrowed = dflash_reference.write_folder(tmp_path / "borrowed", config, weights)
    logits = models.draft_logits(models.load_drafter(borrowed, target), target, token_ids)
    assert largest_error(logits[0], expected) <= TOLERANCE
    folder = dflash_reference.write_folder(tmp_path / "own", config, weights | {"lm_head.weight": head})
    expected = reference_drafts(reference, config, weights, token_ids[0], head=head)
    try:
        drafter = models.load_drafter(folder, target)
    except CheckpointError as error:
        # Refusing such a checkpoint is right too; using the wrong head is not.
        assert "lm_head" in str(error)
        return
    assert largest_error(models.draft_logits(drafter, target, token_ids)[0], expected) <= TOLERANCE


def test_regression_a7_another_vocabulary_is_refused_and_a_mask_in_the_padding_is_not(mixed, make_drafter):
    target, golden = mixed
    with pytest.raises(CheckpointError, match="vocab_size"):
        make_drafter(target, vocab_size=120, dflash_config=dict(mask_token_id=119))
    # The mask token is usually one of the reserved rows beyond the tokenizer's last id.
    drafter, _, _ = make_drafter(target, dflash_config=dict(mask_token_id=124))
    assert models.draft_logits(drafter, target, golden["token_ids"]).shape == (2, 5, 128)


# 120 is the target's pad and 127 another of its end tokens.
@pytest.mark.parametrize("mask_token_id", [None, 128, -1, "126", 120, 127])
def test_regression_a9_a_missing_or_impossible_mask_id_is_an_error(mixed, make_drafter, mask_token_id):
    with pytest.raises(CheckpointError, match="mask_token_id"):
        make_drafter(mixed[0], dflash_config=dict(mask_token_id=mask_token_id))


def test_regression_a9_missing_target_layer_ids_are_an_error(mixed, tmp_path):
    config = dflash_reference.drafter_config()
    weights = dflash_reference.random_weights(config, seed=1)
    del config["dflash_config"]["target_layer_ids"]
    folder = dflash_reference.write_folder(tmp_path / "drafter", config, weights)
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        models.load_drafter(folder, mixed[0])


@pytest.mark.parametrize(
    "change", [dict(input_embedding_scale=1.7), dict(output_multiplier=0.8), dict(final_logit_softcapping=1.3)]
)
def test_regression_a10_embedding_scale_multiplier_and_softcap_reach_the_drafts(mixed, reference, make_drafter, change):
    """A GLM-5 target has none of them; a drafter's config may have each, and each alone shows in the drafts."""
    target, golden = mixed
    token_ids = golden["token_ids"][:1, :18]
    drafter, config, weights = make_drafter(target, dflash_config=change)
    found = models.draft_logits(drafter, target, token_ids)[0]
    assert largest_error(found, reference_drafts(reference, config, weights, token_ids[0])) <= TOLERANCE
    plain = make_drafter(target)[0]
    assert largest_error(found, models.draft_logits(plain, target, token_ids)[0]) > FAULT
    with pytest.raises(CheckpointError, match=next(iter(change))):
        make_drafter(target, dflash_config=dict.fromkeys(change, 0.0))


def test_regression_a11_both_shapes_of_the_rope_base_are_read(mixed, make_drafter, tmp_path):
    target, golden = mixed
    new, _, _ = make_drafter(target)
    old, _, _ = make_drafter(target, rope_parameters=None, rope_theta=500.0)
    assert new.config.rope_theta == old.config.rope_theta == 500.0
    logits = [models.draft_logits(drafter, target, golden["token_ids"]) for drafter in (new, old)]
    np.testing.assert_array_equal(*(np.asarray(x) for x in logits))
    with pytest.raises(CheckpointError, match="rope"):
        make_drafter(target, rope_parameters=None)
    changes = dict(rope_parameters=None, rope_theta=10000.0)
    path = golden_models.path("mixed")
    folder = golden_models.edited(path, tmp_path / "old_target", config=changes)
    assert models.load_target(folder).config == target.config
    folder = golden_models.edited(path, tmp_path / "none", config=dict(rope_parameters=None))
    with pytest.raises(CheckpointError, match="rope"):
        models.load_target(folder)


def test_regression_a12_the_block_size_is_the_drafters_own(mixed, make_drafter):
    target, golden = mixed
    drafter, _, _ = make_drafter(target, dflash_config=dict(block_size=8))
    assert models.draft_logits(drafter, target, golden["token_ids"]).shape == (2, 7, 128)
    top_level, _, _ = make_drafter(target, block_size=8, dflash_config=dict(block_size=None))
    assert top_level.config == drafter.config
    with pytest.raises(CheckpointError, match="block_size"):
        make_drafter(target, dflash_config=dict(block_size=None))


@pytest.mark.parametrize("width", [1, 8])
def test_regression_a13_every_verify_width_yields_features_of_its_own_tokens(mixed, reference, width):
    session, _, _ = verified(mixed)
    golden = mixed[1]
    parents = golden["tree_parents"][:width]
    previous = np.asarray(session.output.features)[:, :1]
    for tokens in (golden["tree_token_ids"], golden["tree_token_ids"][:, ::-1] + 1):
        tokens = tokens[:, :width] % 128
        session.verify(tokens, parents)
        features = np.asarray(session.output.features)
        assert features.shape == (2, width, 96)
        path = sessions.tree_path(parents, width - 1)
        for b, length in enumerate(golden["prefix_lengths"]):
            ids = [*golden["token_ids"][b, :length], *tokens[b, path]]
            expected = reference_features(reference, ids)[-1]
            assert largest_error(features[b, width - 1], expected) <= 10 * TOLERANCE
    assert largest_error(features[:, :1], previous) > FAULT


def test_regression_a15_features_and_drafts_equal_the_reference_on_a_prompt(mixed, reference, make_drafter):
    target, golden = mixed
    drafter, config, weights = make_drafter(target)
    prompt = golden["token_ids"][:1]
    expected = reference_features(reference, prompt[0])
    assert largest_error(models.target_features(target, prompt, LAYER_IDS)[0], expected) <= 10 * TOLERANCE
    drafts = reference_drafts(reference, config, weights, prompt[0])
    found = np.asarray(models.draft_logits(drafter, target, prompt)[0])
    assert largest_error(found, drafts) <= TOLERANCE
    np.testing.assert_array_equal(found.argmax(-1), drafts.argmax(-1))


@pytest.mark.parametrize("name", [pytest.param("mixed", marks=pytest.mark.slow), "index_share"])
def test_regression_a15_greedy_decoding_equals_that_of_transformers(load_golden, name):
    target, golden = load_golden(name)
    session, emitted = Session(target, 2, CAPACITY, absorbed=True), []
    for start in (0, 8, 16):
        logits = session.extend(golden["token_ids"][:, start : start + 8])
    for _ in golden["greedy_token_ids"]:
        chosen = logits[:, -1].argmax(-1)
        emitted.append(int(chosen[0]))
        logits = session.extend(chosen[:, None])
    np.testing.assert_array_equal(emitted, golden["greedy_token_ids"])


# ---- C. Masks, positions, layout


def test_regression_c26_true_in_a_mask_means_visible(mixed):
    target, golden = mixed
    session = Session(target, 2, CAPACITY)
    token_ids, positions = golden["token_ids"][:, :8], np.broadcast_to(np.arange(8), (2, 8))
    causal = np.broadcast_to(np.tril(np.ones((8, 8), bool)), (2, 8, 8)).copy()
    expected = golden["logits"][:, :8]
    assert largest_error(session.run(token_ids, positions, causal), expected) <= TOLERANCE
    causal[:, 3, 1] = False
    hidden = session.run(token_ids, positions, causal)
    assert largest_error(hidden[:, 3], expected[:, 3]) > FAULT
    assert largest_error(hidden[:, :3], expected[:, :3]) <= TOLERANCE


def test_regression_c27_prefixes_of_3_and_50_equal_single_runs(mixed, reference):
    target, golden = mixed
    generator = np.random.default_rng(3)
    lengths, prefix = np.array([3, 50]), generator.integers(0, 128, (2, 50))
    parents, tree = golden["tree_parents"], golden["tree_token_ids"]
    session = Session(target, 2, CAPACITY, absorbed=True)
    session.extend(prefix, lengths)
    together = session.verify(tree, parents)
    for b, length in enumerate(lengths):
        expected = glm5_reference.tree_logits(*reference, prefix[b, :length], tree[b], parents)
        assert largest_error(together[b], expected) <= TOLERANCE


def test_regression_c29_spare_capacity_changes_nothing(mixed):
    target, golden = mixed
    found = []
    for capacity in (16, CAPACITY):
        session = Session(target, 2, capacity, absorbed=True)
        session.extend(golden["token_ids"][:, :14], golden["prefix_lengths"])
        found.append(session.verify(golden["tree_token_ids"], golden["tree_parents"]))
    assert np.isfinite(found).all()
    assert largest_error(*found) <= TOLERANCE
    assert largest_error(found[0], golden["tree_logits"]) <= TOLERANCE


def test_regression_c30_a_smaller_second_tree_sees_no_trace_of_the_first(mixed, reference):
    golden = mixed[1]
    session, _, _ = verified(mixed)
    session.commit([[0, 1, 3, 6], [0, 2, 5, -1]], [3, 2])
    small, parents = golden["tree_token_ids"][:, ::-1][:, :3], np.array([-1, 0, 0])
    found = session.verify(small, parents)
    for b, accepted in enumerate(([0, 1, 3], [0, 2])):
        length = golden["prefix_lengths"][b]
        prefix = [*golden["token_ids"][b, :length], *golden["tree_token_ids"][b, accepted]]
        expected = glm5_reference.tree_logits(*reference, prefix, small[b], parents)
        assert largest_error(found[b], expected) <= TOLERANCE


def test_regression_c31_three_requests_of_odd_sizes_equal_single_runs(mixed, reference):
    """7 nodes over a cache of 51 tokens: no product of query and key counts is a multiple of 8."""
    target, _ = mixed
    generator = np.random.default_rng(31)
    lengths, prefix = np.array([3, 13, 6]), generator.integers(0, 128, (3, 13))
    parents = np.array([[-1, 0, 1, 2, 3, 4, 5], [-1, 0, 0, 0, 1, 1, 2], [-1, 0, 1, 1, 0, 4, 5]])
    tree = generator.integers(0, 128, (3, 7))
    session = Session(target, 3, 51, absorbed=True)
    session.extend(prefix, lengths)
    together = session.verify(tree, parents)
    for b, length in enumerate(lengths):
        expected = glm5_reference.tree_logits(*reference, prefix[b, :length], tree[b], parents[b])
        assert largest_error(together[b], expected) <= TOLERANCE
        other = glm5_reference.tree_logits(*reference, prefix[b, :length], tree[b], parents[b - 1])
        assert largest_error(together[b], other) > FAULT


def test_regression_c33_jitted_equals_eager_and_siblings_share_a_position(mixed):
    target, golden = mixed
    session, jitted, _ = verified(mixed)
    eager = Session(target, 2, CAPACITY, absorbed=True, forward=sessions.forward.__wrapped__)
    eager.cache = session.cache
    assert largest_error(eager.verify(golden["tree_token_ids"], golden["tree_parents"]), jitted) <= TOLERANCE
    # Nodes 1 and 2 are siblings: with one token they are one continuation.
    twins = golden["tree_token_ids"].copy()
    twins[:, 2] = twins[:, 1]
    logits = session.verify(twins, golden["tree_parents"])
    assert largest_error(logits[:, 1], logits[:, 2]) <= TOLERANCE


def test_regression_c34_positions_start_at_the_committed_length_after_partial_acceptance(mixed, reference):
    _, golden = mixed
    session, _, _ = verified(mixed)
    session.commit([[0, 2, 5, -1], [0, 1, 4, -1]], [2, 1])
    np.testing.assert_array_equal(session.lengths, golden["prefix_lengths"] + [2, 1])
    tree, parents = golden["tree_token_ids"], golden["tree_parents"]
    right = session.verify(tree, parents)
    for b, accepted in enumerate(([0, 2], [0])):
        prefix = [*golden["token_ids"][b, : golden["prefix_lengths"][b]], *tree[b, accepted]]
        expected = glm5_reference.tree_logits(*reference, prefix, tree[b], parents)
        assert largest_error(right[b], expected) <= TOLERANCE
    mask = np.broadcast_to(sessions.ancestor_mask(parents), (2, 8, 8))
    optimistic = golden["prefix_lengths"][:, None] + 4 + sessions.depths(parents)
    assert largest_error(session.run(tree, optimistic, mask), right) > FAULT


def test_regression_c35_positions_come_from_depth_and_not_from_the_slot(mixed):
    _, golden = mixed
    session, right, _ = verified(mixed)
    parents, tree = golden["tree_parents"], golden["tree_token_ids"]
    assert largest_error(right, golden["tree_logits"]) <= TOLERANCE
    mask = np.broadcast_to(sessions.ancestor_mask(parents), (2, 8, 8))
    by_slot = session.run(tree, session.lengths[:, None] + np.arange(8), mask)
    assert largest_error(by_slot, golden["tree_logits"]) > FAULT
    # Slot order is free where parents come first: a relabelled tree gives the same logits in the new order.
    order = np.array([0, 2, 5, 1, 4, 6, 3, 7])
    place = {int(old): new for new, old in enumerate(order)}
    relabelled = np.array([-1 if parents[old] < 0 else place[int(parents[old])] for old in order])
    assert largest_error(session.verify(tree[:, order], relabelled), right[:, order]) <= TOLERANCE


def test_regression_c38_the_draft_block_is_bidirectional_also_after_a_verification(mixed, reference, make_drafter):
    target, golden = mixed
    drafter, config, weights = make_drafter(target)
    session, _, prefill_features = verified(mixed)
    lengths, tree = golden["prefix_lengths"], golden["tree_token_ids"]
    drafts = DraftSession(drafter, target, 2, CAPACITY)
    drafts.extend(prefill_features, lengths)
    accepted, counts = np.array([[0, 1, 3], [0, 2, -1]]), np.array([3, 2])
    drafts.extend(gather_features(session.output.features, accepted), counts)
    roots = tree[:, 6]
    found = drafts.draft(roots)
    for b in range(2):
        ids = [*golden["token_ids"][b, : lengths[b]], *tree[b, accepted[b, : counts[b]]], roots[b]]
        assert largest_error(found[b], reference_drafts(reference, config, weights, ids)) <= TOLERANCE
    # Row 1 sees the rows after it: a shorter block changes it, unless the config asks for a causal block.
    ids = golden["token_ids"][:, :18]
    for causal in (False, True):
        block_sizes = (dict(block_size=size) for size in (3, 6))
        pair = [make_drafter(target, is_causal=causal, dflash_config=size)[0] for size in block_sizes]
        error = largest_error(*(models.draft_logits(drafter, target, ids)[:, 0] for drafter in pair))
        assert error <= TOLERANCE if causal else error > FAULT


def test_regression_c39_row_r_of_the_drafts_is_block_row_r_plus_1(mixed, reference, make_drafter):
    target, golden = mixed
    drafter, config, weights = make_drafter(target)
    ids = golden["token_ids"][:1, :18]
    features = reference_features(reference, ids[0, :-1])
    embed, head = (reference[1][name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    hidden = dflash_reference.forward_block(config, weights, embed, features, ids[0, -1])
    found = np.asarray(models.draft_logits(drafter, target, ids)[0])
    assert largest_error(found, hidden[1:] @ head.T) <= TOLERANCE
    assert largest_error(found, hidden[:-1] @ head.T) > FAULT


# ---- E. Cache and state commits

# A tree in which 0, 2, 5 is a path and the slots between are rejected siblings.
PARENTS_025 = np.array([-1, 0, 0, 1, 1, 2, 2, 3])


def committed_025(mixed):
    """[0, 2, 5] committed, in the second sequence [0, 2].

    Returns (session, committed ids by sequence, counts, features of the accepted nodes, of the prefill).
    """
    target, golden = mixed
    session, _, prefill_features = verified(mixed)
    session.verify(golden["tree_token_ids"], PARENTS_025)
    accepted, counts = np.array([[0, 2, 5], [0, 2, -1]]), np.array([3, 2])
    features = gather_features(session.output.features, accepted)
    session.commit(accepted, counts)
    ids = [
        np.array([*golden["token_ids"][b, :length], *golden["tree_token_ids"][b, accepted[b, : counts[b]]]])
        for b, length in enumerate(golden["prefix_lengths"])
    ]
    return session, ids, counts, features, prefill_features


def test_regression_e54_features_are_those_of_the_accepted_rows(mixed, reference):
    session, ids, counts, features, _ = committed_025(mixed)
    for b in range(2):
        expected = reference_features(reference, ids[b])[-counts[b] :]
        assert largest_error(features[b, : counts[b]], expected) <= 10 * TOLERANCE
        first_rows = np.asarray(session.output.features)[b, : counts[b]]
        assert largest_error(first_rows, expected) > FAULT


def test_regression_e55_the_next_step_equals_one_after_a_fresh_prefill(mixed, reference):
    _, golden = mixed
    session, ids, _, _, _ = committed_025(mixed)
    roots = golden["tree_token_ids"][:, 7:8]
    found = session.extend(roots)
    for b in range(2):
        expected = glm5_reference.forward(*reference, [int(i) for i in (*ids[b], *roots[b])])[0][-1]
        assert largest_error(found[b, -1], expected) <= TOLERANCE


def test_regression_e56_every_pool_of_both_caches_holds_the_accepted_rows(mixed, make_drafter):
    target, golden = mixed
    drafter, _, _ = make_drafter(target)
    session, ids, counts, features, prefill_features = committed_025(mixed)
    drafts = DraftSession(drafter, target, 2, CAPACITY)
    drafts.extend(prefill_features, golden["prefix_lengths"])
    drafts.extend(features, counts)
    width = max(len(row) for row in ids)
    padded = np.stack([np.pad(row, (0, width - len(row))) for row in ids])
    fresh = Session(target, 2, CAPACITY, absorbed=True)
    fresh.extend(padded, session.lengths)
    fresh_drafts = DraftSession(drafter, target, 2, CAPACITY)
    fresh_drafts.extend(fresh.output.features, session.lengths)
    for found, expected in ((session.cache, fresh.cache), (drafts.cache, fresh_drafts.cache)):
        np.testing.assert_array_equal(found.lengths, session.lengths)
        found, expected = leaves(found, session.lengths), leaves(expected, session.lengths)
        assert found.keys() == expected.keys()
        for key in found:
            assert largest_error(found[key], expected[key]) <= TOLERANCE, key
    kinds = {key.split("'")[-2] for key, _ in [*leaves(session.cache, [1, 1])]}
    assert kinds == {"latent", "index_key"}


def test_regression_e57_a_hundred_rounds_use_no_more_than_their_tokens(mixed, reference):
    target, golden = mixed
    session = Session(target, 2, CAPACITY, absorbed=True)
    generator = np.random.default_rng(9)
    shapes = jax.tree.map(lambda leaf: leaf.shape, session.cache)
    ids = golden["token_ids"][:, :8]
    session.extend(ids)
    for _ in range(100):
        tree = generator.integers(0, 128, (2, 8))
        session.verify(tree, PARENTS_025)
        session.commit([[0, 2, 5]] * 2, [1, 1])
        ids = np.concatenate([ids, tree[:, :1]], axis=1)
    np.testing.assert_array_equal(session.lengths, [108, 108])
    assert jax.tree.map(lambda leaf: leaf.shape, session.cache) == shapes
    # Two rejected rows of the last round may lie beyond the length; more was never written.
    assert all((np.asarray(leaf)[:, :, 110:] == 0).all() for leaf in jax.tree.leaves(session.cache.rows))
    found = session.extend(ids[:, :1])
    for b in range(2):
        expected = glm5_reference.forward(*reference, [int(i) for i in (*ids[b], ids[b, 0])])[0][-1]
        assert largest_error(found[b, -1], expected) <= TOLERANCE


def test_regression_e58_the_first_pass_of_a_fresh_cache_may_be_a_tree_that_commits_apart(mixed, reference):
    """Nothing that moves rows is set up late: without any prefill, [0, 2, 5] is kept of the very first tree."""
    target, golden = mixed
    session = Session(target, 2, CAPACITY, absorbed=True)
    tree = golden["tree_token_ids"]
    session.verify(tree, PARENTS_025)
    session.commit([[0, 2, 5]] * 2, [3, 3])
    roots = tree[:, 7:8]
    found = session.extend(roots)
    for b in range(2):
        expected = glm5_reference.forward(*reference, [int(i) for i in (*tree[b, [0, 2, 5]], *roots[b])])[0][-1]
        assert largest_error(found[b, -1], expected) <= TOLERANCE


def test_regression_e58_a_network_whose_state_no_commit_can_move_is_refused_at_load(mixed, make_drafter, tmp_path):
    """Recurrent layers have a state instead of rows: named from the config, before any weights are read."""
    with pytest.raises(CheckpointError, match=r"layer_types.*linear_attention"):
        make_drafter(mixed[0], layer_types=["full_attention", "linear_attention"])
    changes = dict(model_type="glm5_next", architectures=["Glm5NextForCausalLM"])
    folder = golden_models.edited(golden_models.path("mixed"), tmp_path / "hybrid", config=changes)
    with pytest.raises(CheckpointError, match=r"model_type.*glm5_next"):
        models.load_target(folder)


def test_regression_e60_a_reused_prefix_has_the_drafters_rows_too(mixed, make_drafter):
    target, golden = mixed
    drafter, _, _ = make_drafter(target)
    session, _, prefill_features = verified(mixed)
    drafts = DraftSession(drafter, target, 2, CAPACITY)
    drafts.extend(prefill_features, golden["prefix_lengths"])
    snapshot, roots = (session.cache, drafts.cache), golden["tree_token_ids"][:, 0]
    results = []
    for _ in range(2):
        session.cache, drafts.cache = snapshot
        drafted = drafts.draft(roots)
        chain = np.concatenate([roots[:, None], drafted.argmax(-1)], axis=1)
        logits = session.verify(chain, np.arange(-1, 5))
        results.append((drafted, logits))
        session.commit(np.broadcast_to(np.arange(3), (2, 3)), [3, 2])
        drafts.extend(np.asarray(session.output.features)[:, :3], np.array([3, 2]))
    # Caches are values: the rounds after the snapshot left no trace in it.
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


def test_regression_e62_fp8_is_a_clear_error_where_it_cannot_be(mixed, tmp_path):
    """Neither as the dtype of weights and caches, nor as that of a stored tensor without its scale."""
    path = golden_models.path("mixed")
    for dtype in ("float8_e4m3fn", "fp8", ml_dtypes.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"dtype: got .*float32.*bfloat16"):
            models.load_target(path, dtype=dtype)
    name = "model.layers.0.self_attn.o_proj.weight"

    def quantise(weights):
        weights[name] = weights[name].astype(ml_dtypes.float8_e4m3fn)

    folder = golden_models.edited(path, tmp_path / "fp8", tensors=quantise)
    with pytest.raises(CheckpointError, match=rf"{name}_scale' is missing beside '{name}'"):
        models.load_target(folder)


@pytest.mark.parametrize("target_dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_regression_e62_target_and_drafter_may_differ_in_dtype(mixed, tmp_path, target_dtype):
    """Each cache has the dtype of its own network; a drafter in the other dtype costs rounding and no more."""
    config = dflash_reference.drafter_config()
    weights = dflash_reference.random_weights(config, seed=1)
    folder = dflash_reference.write_folder(tmp_path / "drafter", config, weights)
    target = models.load_target(golden_models.path("mixed"), dtype=target_dtype)
    token_ids, found = mixed[1]["token_ids"][:1, :18], []
    for dtype in ("float32", "bfloat16"):
        drafter = models.load_drafter(folder, target, dtype=dtype)
        drafts = DraftSession(drafter, target, 1, CAPACITY)
        drafts.extend(models.target_features(target, token_ids[:, :-1], LAYER_IDS))
        found.append(drafts.draft(token_ids[:, -1]).astype(np.float32))
        for expected, cache in ((target_dtype, Session(target, 1, CAPACITY).cache), (dtype, drafts.cache)):
            assert {leaf.dtype.name for leaf in jax.tree.leaves(cache.rows)} == {expected}
    assert largest_error(*found) < 0.2 * np.std(found[0])


def test_regression_e63_a_tree_wider_than_the_draft_block(mixed, make_drafter, reference):
    target, golden = mixed
    drafter, _, _ = make_drafter(target, dflash_config=dict(block_size=16))
    assert drafter.config.draft_depth == 15
    generator = np.random.default_rng(11)
    parents = np.array([-1, *(generator.integers(max(0, n - 6), n) for n in range(1, 32))])
    tree = generator.integers(0, 128, (2, 32))
    session = Session(target, 2, CAPACITY, absorbed=True)
    session.extend(golden["token_ids"][:, :14], golden["prefix_lengths"])
    logits = session.verify(tree, parents)
    assert session.output.features.shape == (2, 32, 96)
    for b, length in enumerate(golden["prefix_lengths"]):
        expected = glm5_reference.tree_logits(*reference, golden["token_ids"][b, :length], tree[b], parents)
        assert largest_error(logits[b], expected) <= TOLERANCE
    # A path longer than the draft depth fits a commit as well.
    drafts = DraftSession(drafter, target, 2, CAPACITY)
    drafts.extend(np.asarray(session.output.features)[:, :16], np.array([16, 16]))
    np.testing.assert_array_equal(drafts.lengths, [16, 16])
