"""Faults that tree drafters had elsewhere, one test each: the triggering input and the right result.

B: tree building; D: acceptance and sampling; and what of C and E needs no network. The rest, and A, are in
tests/models/test_regressions.py.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
import toy_model
import tree_cases
from toy_model import Toy, generate, greedy_reference

import ddtree_jax
from ddtree_jax import cli
from ddtree_jax.pallas.vocab_topk import vocab_topk
from ddtree_jax.sampling import SamplingParams, choose_tokens
from ddtree_jax.tree import (
    FORMULATIONS,
    accept,
    ancestor_mask,
    build_tree,
    chain_tree,
    draft_candidates,
    gather_rows,
    invariants,
    positions,
    reference,
    root_tree,
    speculative_round,
)

TOY = Toy()
NO_STOPS = jnp.zeros((0,), jnp.int32)


def log_rows(*rows):
    """[1, L, V] logits with the given probabilities."""
    return jnp.log(jnp.asarray([rows], jnp.float32))


def test_regression_b16_empty_candidates():
    """Budget 0, no draft rows, one-token vocabulary: no index error, and a tree of what there is."""
    root = np.asarray([3], np.int32)
    for depth, vocab, budget, nodes in ((4, 5, 0, 1), (0, 5, 4, 1), (3, 1, 0, 1), (3, 1, 2, 3)):
        tree = build_tree(np.zeros((1, depth, vocab), np.float32), root, budget=budget)
        assert int(tree.num_nodes[0]) == nodes
        path = accept(tree, np.full((1, budget + 1), 2, np.int32))
        assert int(path.length[0]) == 1 and int(path.bonus_token_ids[0]) == 2


def test_regression_b17_token_zero_is_a_token():
    """Token 0 at the root and in the tree: live, visible, acceptable."""
    tree = build_tree(log_rows([0.7, 0.3], [0.9, 0.1]), np.zeros(1, np.int32), budget=2)
    assert np.asarray(tree.token_ids)[0].tolist() == [0, 0, 0] and int(tree.num_nodes[0]) == 3
    assert np.asarray(ancestor_mask(tree))[0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True] * 3,
    ]
    path = accept(tree, np.asarray([[0, 0, 0]], np.int32))
    assert int(path.length[0]) == 3 and int(path.bonus_token_ids[0]) == 0


FLAT = [0.2, 0.17, 0.16, 0.16, 0.16, 0.15]


def test_regression_b18_the_complete_chain_survives_flat_distributions():
    """Top probability 0.2 at all 7 depths: with the spine the complete chain is there, and a target that follows
    it is followed to its end; the best prefixes alone are all shallow.
    """
    logits = log_rows(*[FLAT] * 7)
    for budget in (7, 16, 64):
        forced, plain = (
            build_tree(logits, np.zeros(1, np.int32), budget=budget, force_spine=flag) for flag in (True, False)
        )
        choices = np.zeros((1, budget + 1), np.int32)  # the chain's token, whatever came before
        path = accept(forced, choices)
        assert int(path.length[0]) == 8 and int(path.bonus_token_ids[0]) == 0
        assert int(accept(plain, choices).length[0]) < 5
        assert int(forced.num_nodes[0]) == budget + 1


def test_regression_b19_budget_l_with_the_spine_is_the_chain():
    """Where the tree alone grows bushes, the spine forced into budget L is DFlash's chain, slot by slot; with more
    budget a target is never followed less far than by the chain.
    """
    batch = tree_cases.logits_batch(seed=19, per_kind=12, depth=6, vocab=9)
    batch = batch[np.isfinite(batch).any(-1).all(-1)]
    roots = np.arange(len(batch), dtype=np.int32)
    chain = chain_tree(batch, roots)
    for formulation in FORMULATIONS:
        tree = build_tree(batch, roots, budget=6, force_spine=True, formulation=formulation)
        jax.tree.map(np.testing.assert_array_equal, tree, chain)
    bushy = np.asarray(build_tree(batch, roots, budget=6).depths).max(axis=1)
    assert (bushy < 6).mean() > 0.3
    tokens = np.asarray(chain.token_ids)[:, 1:]
    shorter = 0
    for follow in range(7):
        wanted = np.where(np.arange(7) < follow, np.pad(tokens, ((0, 0), (0, 1))), -5)
        lengths = []
        for made in (
            chain,
            build_tree(batch, roots, budget=9, force_spine=True),
            build_tree(batch, roots, budget=9),
        ):
            choices = np.take_along_axis(wanted, np.asarray(made.depths), axis=1).astype(np.int32)
            lengths.append(np.asarray(accept(made, choices).length))
        assert (lengths[0] == follow + 1).all() and (lengths[1] == follow + 1).all()
        shorter += (lengths[2] < lengths[0]).sum()
    assert shorter


def test_regression_b20_siblings_before_a_spine():
    """p1 = (.55, .45), p2 = (.3, ...): budget 2 takes both first tokens. top_k changes a tree only where it
    cuts a rank that the tree needs.
    """
    logits = log_rows([0.55, 0.45, 1e-9, 1e-9], [0.3, 0.25, 0.25, 0.2])
    tree = build_tree(logits, np.zeros(1, np.int32), budget=2)
    assert np.asarray(tree.token_ids)[0].tolist() == [0, 0, 1] and np.asarray(tree.parents)[0].tolist() == [
        -1,
        0,
        0,
    ]
    cut = build_tree(logits, np.zeros(1, np.int32), budget=2, top_k=1)
    assert np.asarray(cut.depths)[0].tolist() == [0, 1, 2]
    batch = tree_cases.logits_batch(seed=20, per_kind=10, depth=5, vocab=12)
    roots = np.zeros(len(batch), np.int32)
    whole, narrow = (build_tree(batch, roots, budget=10, top_k=k) for k in (None, 3))
    log_probs, ids = draft_candidates(batch, 10)
    same = 0
    for b, nodes in enumerate(tree_cases.heap_trees(log_probs, ids, roots, 10)):
        if max((max(node.ranks) for node in nodes[1:]), default=0) < 3:
            same += 1
            for field in ("token_ids", "parents", "depths"):
                np.testing.assert_array_equal(getattr(whole, field)[b], getattr(narrow, field)[b])
    assert 0 < same < len(batch)


def test_regression_b21_parents_come_first():
    """Best-first order is not level order, and still every parent precedes its children."""
    logits = tree_cases.logits_batch(seed=21, per_kind=10, depth=6, vocab=10)
    tree = build_tree(logits, np.zeros(len(logits), np.int32), budget=24)
    depths = np.asarray(tree.depths)
    assert (np.diff(depths, axis=1) < 0).any()
    assert bool(invariants.parent_before_child(tree).all())


def test_regression_b22_underfull_trees_have_inert_padding():
    """Fewer candidates than budget: no duplicate sibling, padding never seen, never accepted."""
    logits = log_rows([0.6, 0.4, 0.0], [0.0, 1.0, 0.0])
    tree = build_tree(logits, np.zeros(1, np.int32), budget=9)
    assert int(tree.num_nodes[0]) == 5
    assert bool(invariants.siblings_distinct(tree).all()) and bool(invariants.padding_inert(tree).all())
    mask = np.asarray(ancestor_mask(tree))[0]
    assert not mask[:5, 5:].any() and (mask[5:] == np.eye(10, dtype=bool)[5:]).all()
    for token in range(3):
        assert int(accept(tree, np.full((1, 10), token, np.int32)).length[0]) <= 3


def test_regression_b24_large_vocabulary_in_blocks():
    """A vocabulary of a quarter million: the blockwise top-k equals the whole one."""
    logits = np.round(np.random.default_rng(24).normal(size=(2, 250_007)) * 8).astype(np.float32)
    whole, blocks = (vocab_topk(logits, 40, implementation=name) for name in ("top_k", "block_descent"))
    np.testing.assert_array_equal(whole.token_ids, blocks.token_ids)
    np.testing.assert_array_equal(whole.values, blocks.values)
    np.testing.assert_array_equal(whole.token_ids[0], np.argsort(-logits[0], kind="stable")[:40])


@pytest.mark.parametrize("mode", ["greedy", "sample", "filtered"])
def test_regression_b25_no_negative_token(mode):
    """All-masked and NaN rows give a token of the vocabulary, from the drafter and from the target."""
    bad = np.asarray([[[-np.inf] * 5, [np.nan] * 5, [np.nan, -np.inf, np.nan, -np.inf, -np.inf]]], np.float32)
    tree = build_tree(bad, np.ones(1, np.int32), budget=4)
    assert int(tree.num_nodes[0]) == 1 and (np.asarray(tree.token_ids) >= 0).all()
    params = SamplingParams.create(1, temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)
    got = np.asarray(choose_tokens(bad, np.zeros((1, 3), np.int32), np.zeros(1, np.int32), params, mode=mode))
    assert ((got >= 0) & (got < 5)).all()


def toy_verify(tree, prompt, mask=None):
    """The toy target's logits [N, V] for one sequence whose committed prefix is `prompt`."""
    rows = {
        "token": jnp.asarray([prompt], jnp.int32),
        "position": jnp.arange(len(prompt), dtype=jnp.int32)[None],
    }
    length = jnp.asarray([len(prompt)], jnp.int32)
    cache = toy_model.append(toy_model.empty_cache(1, 32), rows, length)
    mask = ancestor_mask(tree) if mask is None else mask
    return np.asarray(toy_model.verify(TOY, cache, tree.token_ids, positions(tree, length), mask).logits)[0]


def test_regression_c26_true_means_visible():
    """The chain's mask is the causal one, gives the logits of plain decoding, and hiding one key changes
    them.
    """
    tree = tree_cases.tree_from_lists([[-1, 0, 1, 2]], [[4, 5, 6, 7]], 4)
    mask = ancestor_mask(tree)
    np.testing.assert_array_equal(mask[0], np.tril(np.ones((4, 4), bool)))
    logits = toy_verify(tree, [1, 2])
    np.testing.assert_array_equal(logits[3], TOY.logits_after([1, 2, 4, 5, 6, 7]))
    hidden = toy_verify(tree, [1, 2], mask.at[0, 3, 1].set(False))
    assert (hidden[3] != logits[3]).any()
    np.testing.assert_array_equal(hidden[:3], logits[:3])
    assert (toy_verify(tree, [1, 2], ~mask) != logits).any()


def test_regression_c28_mask_layout():
    """Chain of 2 behind a prefix of 3: rows TTTTF and TTTTT, query by key."""
    tree = tree_cases.tree_from_lists([[-1, 0]], [[4, 5]], 2)
    whole = np.concatenate([np.ones((2, 3), bool), np.asarray(ancestor_mask(tree))[0]], axis=1)
    assert ["".join("FT"[int(v)] for v in row) for row in whole] == ["TTTTF", "TTTTT"]


def test_regression_c31_three_odd_sized_trees_equal_single_ones():
    """Three trees of 7 slots, 49 mask entries each: masks, positions and paths are those of each tree alone."""
    rng = np.random.default_rng(31)
    lists = [tree_cases.random_tree(rng, nodes, 3) for nodes in (7, 3, 6)]
    tree = tree_cases.tree_from_lists([p for p, _ in lists], [t for _, t in lists], 7)
    prefix_lengths = np.asarray([3, 13, 6], np.int32)
    choices = rng.integers(0, 3, size=(3, 7)).astype(np.int32)
    mask, places, path = ancestor_mask(tree), positions(tree, prefix_lengths), accept(tree, choices)
    for b, (parents, _) in enumerate(lists):
        one = jax.tree.map(lambda x, b=b: x[b : b + 1], tree)
        np.testing.assert_array_equal(mask[b], ancestor_mask(one)[0])
        np.testing.assert_array_equal(
            np.asarray(mask)[b, : len(parents), : len(parents)], reference.visibility(parents)
        )
        np.testing.assert_array_equal(places[b], positions(one, prefix_lengths[b : b + 1])[0])
        alone = accept(one, choices[b : b + 1])
        jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y[0]), path, alone)
    assert not (np.asarray(mask)[0] == np.asarray(mask)[2]).all()


def test_regression_c37_padding_rows_are_finite_and_alone():
    """Padding rows attend to themselves: a softmax over them is finite, and no valid row's logits depend on
    them.
    """
    small = tree_cases.tree_from_lists([[-1, 0, 0]], [[4, 5, 6]], 3)
    padded = tree_cases.tree_from_lists([[-1, 0, 0]], [[4, 5, 6]], 8)
    mask = np.asarray(ancestor_mask(padded))[0]
    assert mask.any(-1).all()
    weights = jax.nn.softmax(jnp.where(mask, 0.0, -jnp.inf), axis=-1)
    assert np.isfinite(np.asarray(weights)).all()
    np.testing.assert_array_equal(toy_verify(padded, [1, 2])[:3], toy_verify(small, [1, 2]))
    other = dataclasses.replace(padded, token_ids=padded.token_ids.at[:, 3:].set(9))
    np.testing.assert_array_equal(toy_verify(other, [1, 2])[:3], toy_verify(small, [1, 2]))


def scripted(chain, choices, remaining, stops=()):
    """One round in which the drafter proposes `chain` and the target chooses `choices`."""
    toy = Toy(depth=len(chain))
    state = toy_model.prefill(toy, [[1, 2]], SamplingParams.create(1), "greedy", remaining + 1, (), 32)
    fns = toy_model.functions(toy, "chain", 0, lambda logits, depths, emitted: jnp.asarray([choices], jnp.int32))
    fns = dataclasses.replace(fns, draft=lambda *_: jax.nn.one_hot(jnp.asarray(chain), toy.vocab)[None])
    after, out = speculative_round(state, fns, jnp.asarray(stops, jnp.int32), max_depth=len(chain))
    return state, after, out, np.asarray(out.token_ids)[0, : int(out.counts[0])].tolist()


def test_regression_d40_nothing_after_the_stop_token():
    """The stop token at depth 2 of an accepted path of 5: it is the last token, and nothing behind it is
    committed.
    """
    before, after, out, emitted = scripted([5, 9, 6, 7], [5, 9, 6, 7, 8], remaining=20, stops=[9])
    assert emitted == [5, 9] and int(out.acceptance_lengths[0]) == 5
    assert bool(out.stopped[0]) and bool(after.finished[0])
    assert int(after.lengths[0] - before.lengths[0]) == 2


def test_regression_d41_never_more_than_allowed():
    """Two tokens remain and the path has 5: exactly 2, ended by length, 2 rows committed."""
    before, after, out, emitted = scripted([5, 6, 7, 8], [5, 6, 7, 8, 9], remaining=2)
    assert emitted == [5, 6] and not bool(out.stopped[0]) and bool(after.finished[0])
    assert int(after.lengths[0] - before.lengths[0]) == 2 and int(after.remaining[0]) == 0
    outputs, _, _ = generate(
        TOY, [[1], [2, 7, 1, 8, 2, 8], [3, 1, 4], [0] * 9], algorithm="tree", budget=15, max_new_tokens=24
    )
    assert {len(tokens) for tokens in outputs} == {24}


def test_regression_d45_bonus_of_every_sequence():
    """A shallow limit beside many nodes, in a batch: each bonus is read by its own sequence's last node."""
    rng = np.random.default_rng(45)
    lists = [tree_cases.random_tree(rng, 30, 5) for _ in range(16)]
    tree = tree_cases.tree_from_lists([p for p, _ in lists], [t for _, t in lists], 40)
    choices = rng.integers(0, 5, size=(16, 40)).astype(np.int32)
    path = accept(tree, choices, max_depth=3)
    for b, (parents, tokens) in enumerate(lists):
        nodes, bonus = reference.walk(tokens, parents, choices[b])
        expected = bonus if len(nodes) <= 4 else tokens[nodes[4]]
        assert int(path.bonus_token_ids[b]) == expected
    assert len(set(np.asarray(path.bonus_token_ids).tolist())) > 1


def test_regression_d46_mask_and_walk_are_of_one_tree():
    """Without a tree there is the root alone: no path longer than 1; a chain's mask is causal."""
    roots = np.asarray([4, 5], np.int32)
    tree = root_tree(roots)
    assert np.asarray(ancestor_mask(tree)).tolist() == [[[True]], [[True]]]
    for token in (4, 5):
        np.testing.assert_array_equal(accept(tree, np.full((2, 1), token, np.int32)).length, [1, 1])
    chain = chain_tree(tree_cases.logits_batch(46, 1, 5, 8)[:1], np.zeros(1, np.int32))
    np.testing.assert_array_equal(ancestor_mask(chain)[0], np.tril(np.ones((6, 6), bool)))


def test_regression_d47_tree_accepts_what_the_chain_accepts():
    """Where the chain is a root path of the tree, the tree accepts at least as much, and the same tokens
    first.
    """
    rng = np.random.default_rng(47)
    logits = tree_cases.random_logits(rng, "continuous", (200, 4, 6)) * 2
    roots = np.zeros(200, np.int32)
    chain, tree = chain_tree(logits, roots), build_tree(logits, roots, budget=20)
    follow = rng.random((200, 4)) < 0.8
    wanted = np.where(follow, logits.argmax(-1), rng.integers(0, 6, (200, 4)))
    compared = longer = 0
    for b in range(200):
        tokens, parents = np.asarray(tree.token_ids)[b].tolist(), np.asarray(tree.parents)[b].tolist()
        nodes, _ = reference.walk(tokens, parents, [logits[b].argmax(-1)[d] if d < 4 else -5 for d in tree.depths[b]])
        if len(nodes) < 5:
            continue
        compared += 1
        choice = np.append(wanted[b], 0)
        paths = [
            accept(
                jax.tree.map(lambda x, b=b: x[b : b + 1], made),
                choice[np.asarray(made.depths)[b : b + 1]].astype(np.int32),
            )
            for made in (chain, tree)
        ]
        assert int(paths[1].length[0]) >= int(paths[0].length[0])
        longer += int(paths[1].length[0]) > int(paths[0].length[0])
        if compared == 12:
            break
    assert compared == 12 and longer


def first_token_counts(params, logits, tree, mode):
    """Histogram of the first emitted token over the batch of seeds."""
    batch = params.keys.shape[0]
    tree = jax.tree.map(lambda x: jnp.broadcast_to(x[0], (batch, *x.shape[1:])), tree)
    logits = jnp.broadcast_to(logits, (batch, tree.num_slots, logits.shape[-1]))
    choices = choose_tokens(logits, tree.depths, jnp.zeros((batch,), jnp.int32), params, mode=mode)
    path = accept(tree, choices)
    child = np.asarray(tree.token_ids)[np.arange(batch), np.maximum(np.asarray(path.node_ids)[:, 1], 0)]
    first = np.where(np.asarray(path.length) > 1, child, np.asarray(path.bonus_token_ids))
    return laws.histogram(first[:, None])


def seeds(batch, **settings):
    one = SamplingParams.create(1, **settings)
    fields = {f: jnp.broadcast_to(getattr(one, f), (batch,)) for f in ("temperature", "top_k", "top_p", "min_p")}
    return SamplingParams(**fields, keys=jax.random.split(jax.random.key(1), batch))


def test_regression_d48_there_is_no_penalty_to_apply_on_one_side(capsys):
    """Nothing that depends on a node's ancestors changes its logits: no entry takes a penalty or a bias.

    Whoever adds one must count the tokens of each node's own path, and this test is then the one to replace.
    """
    for call in (ddtree_jax.generate, ddtree_jax.stream):
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"):
            with pytest.raises(TypeError, match=name):
                call(None, [1], **{name: 1.1})
        words = " ".join(inspect.signature(call).parameters)
        assert "penalty" not in words and "bias" not in words
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == {"temperature", "top_k", "top_p", "min_p", "keys"}
    assert cli.main(["generate", "p", "--repetition-penalty", "1.1"]) == 2
    assert "--repetition-penalty" in capsys.readouterr().err
    # Logits in, token out: the tokens of the path are not even an argument.
    assert list(inspect.signature(choose_tokens).parameters) == [
        "logits",
        "depths",
        "emitted",
        "params",
        "mode",
        "max_depth",
    ]


def test_regression_d49_temperature_is_honoured():
    """T = 0.6: the frequencies are those of the sharpened distribution, and not those of T = 1."""
    p = np.asarray([0.5, 0.3, 0.2])
    tree = tree_cases.tree_from_lists([[-1, 0]], [[0, 1]], 2)
    counts = first_token_counts(seeds(50_000, temperature=0.6), jnp.log(jnp.asarray(p, jnp.float32)), tree, "sample")
    sharp = p ** (1 / 0.6)
    sharp /= sharp.sum()
    assert laws.chi_square_p_value(counts, {(t,): sharp[t] for t in range(3)}) > 1e-6
    assert laws.chi_square_p_value(counts, {(t,): p[t] for t in range(3)}) < 1e-6


def test_regression_d50_deterministic_siblings_are_unbiased():
    """p = (.5, .3, .2) with siblings {0, 1}: emitted frequencies are p; the min(1, p/q) rule would not give
    them.
    """
    p = np.asarray([0.5, 0.3, 0.2])
    tree = tree_cases.tree_from_lists([[-1, 0, 0]], [[2, 0, 1]], 3)
    counts = first_token_counts(seeds(50_000, temperature=1.0), jnp.log(jnp.asarray(p, jnp.float32)), tree, "sample")
    assert laws.chi_square_p_value(counts, {(t,): p[t] for t in range(3)}) > 1e-6
    greedy = first_token_counts(seeds(50, temperature=0.0), jnp.log(jnp.asarray(p, jnp.float32)), tree, "sample")
    assert greedy == {(0,): 50}


def test_regression_d51_noise_is_independent_of_the_draft_and_of_other_tokens():
    """Two sequences, and two output indices of one, draw independently, whatever tree they are drawn in."""
    params = seeds(20_000, temperature=1.0)
    logits = jnp.zeros((20_000, 2, 3))
    depths = jnp.asarray([[0, 1]] * 20_000, jnp.int32)
    emitted = jnp.zeros((20_000,), jnp.int32)
    pairs = np.asarray(choose_tokens(logits, depths, emitted, params, mode="sample"))
    uniform = {(a, b): 1 / 9 for a in range(3) for b in range(3)}
    assert laws.chi_square_p_value(laws.histogram(pairs), uniform) > 1e-6
    neighbours = np.stack([pairs[:-1:2, 0], pairs[1::2, 0]], axis=1)
    assert laws.chi_square_p_value(laws.histogram(neighbours), uniform) > 1e-6
    # The next round's index 1 is this round's depth 1: the same token, however many rounds it took.
    again = np.asarray(choose_tokens(logits[:, :1], depths[:, :1], emitted + 1, params, mode="sample"))
    np.testing.assert_array_equal(again[:, 0], pairs[:, 1])


def test_regression_d52_greedy_drafts_keep_a_sampling_target_exact():
    """The argmax chain under a sampling target: frequencies are the target's (a point mass as proposal, no
    correction).
    """
    p = np.asarray([0.2, 0.5, 0.3])
    tree = chain_tree(log_rows([0.9, 0.05, 0.05]), np.zeros(1, np.int32))
    counts = first_token_counts(seeds(50_000, temperature=1.0), jnp.log(jnp.asarray(p, jnp.float32)), tree, "sample")
    assert laws.chi_square_p_value(counts, {(t,): p[t] for t in range(3)}) > 1e-6


def test_regression_e54_features_of_the_accepted_nodes():
    """Accepted [0, 2, 5]: rows 0, 2 and 5 are kept, not the first three."""
    tree = tree_cases.tree_from_lists([[-1, 0, 0, 1, 1, 2]], [[9, 4, 5, 4, 6, 7]], 6)
    path = accept(tree, np.asarray([[5, 0, 7, 0, 0, 1]], np.int32))
    assert np.asarray(path.node_ids)[0, : int(path.length[0])].tolist() == [0, 2, 5]
    features = np.arange(6, dtype=np.float32)[None, :, None] * np.ones((1, 1, 3), np.float32)
    kept = np.asarray(gather_rows(features, path.node_ids, node_axis=1, batch_axis=0))
    assert kept[0, :3, 0].tolist() == [0.0, 2.0, 5.0]

    # The same through a round: the next logits are those of a fresh prefill with the emitted tokens.
    toy = Toy(depth=2)
    state = toy_model.prefill(toy, [[1, 2]], SamplingParams.create(1), "greedy", 20, (), 32)
    root = int(state.root_token_ids[0])
    choose = functools.partial(lambda choices, *_: choices, jnp.asarray([[5, 0, 7, 0, 0, 1]], jnp.int32))
    fns = dataclasses.replace(
        toy_model.functions(toy, "tree", 5, choose),
        build=lambda logits, roots: dataclasses.replace(tree, token_ids=tree.token_ids.at[:, 0].set(roots)),
    )
    after, out = speculative_round(state, fns, NO_STOPS, max_depth=2)
    assert np.asarray(out.token_ids)[0].tolist() == [5, 7, 1]
    logits = toy_model.verify(
        toy, after.cache, jnp.asarray([[1]], jnp.int32), after.lengths[:, None], jnp.ones((1, 1, 1), bool)
    )
    np.testing.assert_array_equal(np.asarray(logits.logits)[0, 0], toy.logits_after([1, 2, root, 5, 7, 1]))
    assert greedy_reference(toy, [1, 2], 1) == [root]
