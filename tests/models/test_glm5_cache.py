"""The cached target: chunks, decoding, ragged batches, tree verification and commits equal plain forwards."""

import chex
import glm5_reference
import golden_models
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
import sessions
from golden_models import FAULT, LAYER_IDS, NAMES, TOLERANCE, largest_error
from sessions import Session

from ddtree_jax import models

CAPACITY = 128
BOTH_FORMS = pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])


def prefilled(target, golden, **options):
    """A session of both golden sequences, of unequal prefix lengths, prefilled as one padded batch."""
    lengths = golden["prefix_lengths"]
    session = Session(target, 2, CAPACITY, **options)
    session.extend(golden["token_ids"][:, : lengths.max()], lengths)
    return session


@pytest.mark.parametrize(
    ("name", "absorbed"),
    [
        ("mixed", True),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mixed", False), ("index_share", True))),
    ],
    ids=str,
)
def test_chunked_prefill_and_decoding_equal_those_of_transformers(load_golden, name, absorbed):
    target, golden = load_golden(name)
    token_ids = golden["token_ids"]
    session, pieces, start = Session(target, 2, CAPACITY, absorbed=absorbed), [], 0
    for size in [*golden["chunks"], *[1] * int(token_ids.shape[1] - golden["chunks"].sum())]:
        pieces.append(session.extend(token_ids[:, start : start + size]))
        start += size
    assert largest_error(np.concatenate(pieces, axis=1), golden["cached_logits"]) <= TOLERANCE
    np.testing.assert_array_equal(session.lengths, [24, 24])


@pytest.mark.parametrize("sizes", [(1,) * 24, (8, 8, 8)], ids=str)
def test_chunk_size_does_not_matter(load_golden, sizes):
    target, golden = load_golden("mixed")
    session, pieces, start = Session(target, 2, CAPACITY), [], 0
    for size in sizes:
        pieces.append(session.extend(golden["token_ids"][:, start : start + size]))
        start += size
    assert largest_error(np.concatenate(pieces, axis=1), golden["logits"]) <= TOLERANCE


def test_batch_of_different_lengths_equals_singles(load_golden):
    target, golden = load_golden("mixed")
    batch = prefilled(target, golden)
    np.testing.assert_array_equal(batch.lengths, golden["prefix_lengths"])
    next_ids = golden["tree_token_ids"][:, :1]
    together = batch.extend(next_ids)
    for b, length in enumerate(golden["prefix_lengths"]):
        single = Session(target, 1, CAPACITY)
        single.extend(golden["token_ids"][b : b + 1, :14], [length])
        assert largest_error(together[b], single.extend(next_ids[b : b + 1])[0]) <= TOLERANCE
    assert largest_error(together[:, 0], golden["tree_logits"][:, 0]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "absorbed"),
    [
        pytest.param(name, absorbed, marks=[] if quick else [pytest.mark.slow], id=f"{name}-{form}")
        for name in NAMES
        for absorbed, form in ((False, "expanded"), (True, "absorbed"))
        for quick in (name == "mixed" or absorbed == (name == "index_share"),)
    ],
)
def test_each_tree_node_equals_the_plain_forward_of_its_path(load_golden, name, absorbed):
    target, golden = load_golden(name)
    session = prefilled(target, golden, absorbed=absorbed)
    logits = session.verify(golden["tree_token_ids"], golden["tree_parents"])
    assert largest_error(logits, golden["tree_logits"]) <= TOLERANCE


def test_unrolled_layers_equal_scanned_ones(load_golden):
    scanned, golden = load_golden("index_share")
    unrolled = models.load_target(golden_models.path("index_share"), dtype="float32", scan=False)
    assert len(unrolled.module().plan) == 11 > len(scanned.module().plan)
    logits, features = [], []
    for target in (scanned, unrolled):
        session = prefilled(target, golden, absorbed=True)
        logits.append(session.verify(golden["tree_token_ids"], golden["tree_parents"]))
        features.append(session.output.features)
    assert largest_error(*logits) <= TOLERANCE
    assert largest_error(*features) <= 10 * TOLERANCE
    assert largest_error(logits[1], golden["tree_logits"]) <= TOLERANCE


def test_features_of_tree_nodes_are_those_of_their_paths(load_golden):
    target, golden = load_golden("mixed")
    reference = glm5_reference.load_folder(golden_models.path("mixed"))
    session = prefilled(target, golden)
    session.verify(golden["tree_token_ids"], golden["tree_parents"])
    path = sessions.tree_path(golden["tree_parents"], 7)
    for b, length in enumerate(golden["prefix_lengths"]):
        ids = [*golden["token_ids"][b, :length], *golden["tree_token_ids"][b, path]]
        residuals = glm5_reference.forward(*reference, [int(i) for i in ids])[1]
        expected = np.concatenate([residuals[k][-len(path) :] for k in LAYER_IDS], axis=-1)
        assert largest_error(session.output.features[b, np.array(path)], expected) <= 10 * TOLERANCE


def test_tree_comparison_sees_a_wrong_selection(load_golden):
    target, golden = load_golden("mixed")
    session = prefilled(target, golden)
    parents, token_ids = golden["tree_parents"], golden["tree_token_ids"]
    positions = session.lengths[:, None] + sessions.depths(parents)
    mask = np.broadcast_to(sessions.ancestor_mask(parents), (2, 8, 8)).copy()
    # A sibling made visible to node 2 may enter its top-k; a causal mask is the extreme case.
    mask[:, 2, 1] = True
    wrong = session.run(token_ids, positions, mask)
    assert largest_error(wrong[:, 2], golden["tree_logits"][:, 2]) > FAULT
    others = [n for n in range(8) if n not in (2, 5)]
    assert largest_error(wrong[:, others], golden["tree_logits"][:, others]) <= TOLERANCE


@BOTH_FORMS
def test_two_rounds_with_a_commit_between(load_golden, absorbed):
    target, golden = load_golden("mixed")
    reference = glm5_reference.load_folder(golden_models.path("mixed"))
    parents, first = golden["tree_parents"], golden["tree_token_ids"]
    session = prefilled(target, golden, absorbed=absorbed)
    session.verify(first, parents)
    # Paths of different lengths; unused entries are NO_NODE.
    accepted, counts = np.array([[0, 1, 3, 6], [0, 2, -1, -1]]), np.array([4, 2])
    session.commit(accepted, counts)
    np.testing.assert_array_equal(session.lengths, golden["prefix_lengths"] + counts)
    second = (first[:, ::-1] + 3) % 128
    logits = session.verify(second, parents)
    for b in range(2):
        prefix = [*golden["token_ids"][b, : golden["prefix_lengths"][b]], *first[b, accepted[b, : counts[b]]]]
        expected = glm5_reference.tree_logits(*reference, prefix, second[b], parents)
        assert largest_error(logits[b], expected) <= TOLERANCE
        # A commit of the wrong nodes would show.
        prefix[-1] = int(first[b, 4])
        assert largest_error(logits[b], glm5_reference.tree_logits(*reference, prefix, second[b], parents)) > FAULT


@hypothesis.given(seed=st.integers(0, 2**32 - 1))
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True, database=None)
def test_random_trees_equal_the_reference(load_golden, seed):
    target, _ = load_golden("mixed")
    config, weights = glm5_reference.load_folder(golden_models.path("mixed"))
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 15, 2)
    prefix, tree = generator.integers(0, 128, (2, 14)), generator.integers(0, 128, (2, 8))
    parents = np.array([[-1, *(generator.integers(0, n) for n in range(1, 8))] for _ in range(2)])
    session = Session(target, 2, CAPACITY)
    session.extend(prefix, lengths)
    logits = session.verify(tree, parents)
    for b in range(2):
        expected = glm5_reference.tree_logits(config, weights, prefix[b, : lengths[b]], tree[b], parents[b])
        assert largest_error(logits[b], expected) <= TOLERANCE


def test_one_compilation_serves_every_length(load_golden):
    target, golden = load_golden("mixed")
    chex.clear_trace_counter()
    counted = jax.jit(chex.assert_max_traces(sessions.forward.__wrapped__, n=1), static_argnames=sessions.STATIC)
    session = Session(target, 2, CAPACITY, forward=counted)
    for t in range(4):
        session.extend(golden["token_ids"][:, t : t + 1], np.array([1, t % 2]))
    np.testing.assert_array_equal(session.lengths, [4, 2])
