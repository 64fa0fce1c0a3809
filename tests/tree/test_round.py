"""The round on a toy model whose cache shows every wrong commit: all algorithms equal plain decoding, token
for token.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_model
from toy_model import Toy, generate, greedy_reference

from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import RoundFunctions, reference, speculative_round

TOY = Toy()
PROMPTS = [[1], [2, 7, 1, 8, 2, 8], [3, 1, 4], [0] * 9]
ALGORITHMS = [
    ("none", 0),
    ("chain", 0),
    ("tree", 0),
    ("tree", 1),
    ("tree", 4),
    ("tree", 15),
    ("tree", 32),
    ("tree", 64),
]


@pytest.mark.parametrize("algorithm, budget", ALGORITHMS)
def test_greedy_equals_plain_decoding(algorithm, budget):
    outputs, accepted, state = generate(TOY, PROMPTS, algorithm=algorithm, budget=budget)
    assert outputs == [greedy_reference(TOY, prompt, 24) for prompt in PROMPTS]
    lengths = np.concatenate(accepted)
    if toy_model.round_depth(TOY, algorithm, budget) == 0:
        assert set(lengths) == {1}
    else:
        assert lengths.max() > 1 and lengths.max() <= 1 + toy_model.round_depth(TOY, algorithm, budget)
    # Everything but the newest token is committed, in place: the cache is the sequence.
    for b, prompt in enumerate(PROMPTS):
        committed = prompt + outputs[b][:-1]
        assert int(state.lengths[b]) == len(committed)
        for cache in (state.cache, state.draft_cache):
            np.testing.assert_array_equal(np.asarray(cache["rows"]["token"])[b, : len(committed)], committed)
            np.testing.assert_array_equal(
                np.asarray(cache["rows"]["position"])[b, : len(committed)], range(len(committed))
            )


@pytest.mark.parametrize("mode", [pytest.param("sample", marks=pytest.mark.slow), "filtered"])
def test_sampled_outputs_do_not_depend_on_the_algorithm(mode):
    params = SamplingParams.create(4, temperature=0.9, top_k=7, top_p=0.95, min_p=0.02, seed=[3, 1, 4, 1])
    runs = {
        (algorithm, budget): generate(TOY, PROMPTS, algorithm=algorithm, budget=budget, params=params, mode=mode)
        for algorithm, budget in (("none", 0), ("chain", 0), ("tree", 4), ("tree", 32))
    }
    plain = runs["none", 0][0]
    assert plain != [greedy_reference(TOY, prompt, 24) for prompt in PROMPTS]
    for outputs, accepted, _ in runs.values():
        assert outputs == plain
        assert accepted
    assert np.mean(np.concatenate(runs["tree", 32][1])) > np.mean(np.concatenate(runs["chain", 0][1])) > 1


def test_a_sequence_alone_equals_the_same_in_a_batch():
    params = SamplingParams.create(4, temperature=1.0, seed=[5, 6, 7, 8])
    together, _, _ = generate(TOY, PROMPTS, algorithm="tree", budget=4, params=params, mode="sample")
    alone, _, _ = generate(
        TOY,
        [PROMPTS[2]],
        algorithm="tree",
        budget=4,
        params=SamplingParams.create(1, temperature=1.0, seed=7),
        mode="sample",
    )
    assert alone[0] == together[2]


def test_stop_tokens_cut_inside_the_path():
    plain = [greedy_reference(TOY, prompt, 24) for prompt in PROMPTS]
    stops = (plain[0][9], plain[1][4])
    expected = [greedy_reference(TOY, prompt, 24, stops) for prompt in PROMPTS]
    assert min(len(tokens) for tokens in expected) < 24
    for algorithm, budget in (("none", 0), ("chain", 0), ("tree", 15)):
        outputs, _, state = generate(TOY, PROMPTS, algorithm=algorithm, budget=budget, stop_token_ids=stops)
        assert outputs == expected
        np.testing.assert_array_equal(
            state.lengths, [len(p) + len(t) - 1 for p, t in zip(PROMPTS, outputs, strict=True)]
        )


def test_each_sequence_has_its_own_limit():
    limits = [1, 2, 7, 24]
    outputs, _, state = generate(TOY, PROMPTS, algorithm="tree", budget=15, max_new_tokens=limits)
    assert outputs == [greedy_reference(TOY, prompt, n) for prompt, n in zip(PROMPTS, limits, strict=True)]
    np.testing.assert_array_equal(state.remaining, 0)
    np.testing.assert_array_equal(state.emitted, limits)


def scripted_round(chain, choices, *, remaining, stops=(), finished=False, max_depth=None):
    """One round on a scripted chain: tree node d carries chain[d - 1]; the target chooses choices[d] after
    node d.
    """
    depth = len(chain)
    toy = Toy(depth=depth)
    logits = jax.nn.one_hot(jnp.asarray(chain), toy.vocab)[None]
    state = toy_model.prefill(toy, [[1, 2]], SamplingParams.create(1), "greedy", 40, (), 32)
    state = dataclasses.replace(state, remaining=jnp.asarray([remaining], jnp.int32), finished=jnp.asarray([finished]))
    fns = toy_model.functions(toy, "chain", 0, lambda logits, depths, emitted: jnp.asarray([choices], jnp.int32))
    fns = dataclasses.replace(fns, draft=lambda cache, roots, lengths: logits)
    max_depth = depth if max_depth is None else max_depth
    after, out = speculative_round(state, fns, jnp.asarray(stops, jnp.int32), max_depth=max_depth)
    return state, after, out


def test_scripted_cuts_agree_with_the_plain_cut():
    chain, choices = [4, 5, 6, 7], [4, 5, 6, 7, 8]
    for remaining in (1, 2, 3, 5, 9):
        for stops in ((), (8,), (5,), (4, 7), (6, 5)):
            before, after, out = scripted_round(chain, choices, remaining=remaining, stops=stops)
            kept = reference.cut([4, 5, 6, 7, 8], stops, remaining)
            count = int(out.counts[0])
            assert np.asarray(out.token_ids)[0, :count].tolist() == kept
            assert int(out.acceptance_lengths[0]) == 5
            assert int(after.root_token_ids[0]) == kept[-1]
            assert int(after.lengths[0] - before.lengths[0]) == len(kept)
            assert bool(out.stopped[0]) == (kept[-1] in stops)
            assert bool(after.finished[0]) == (kept[-1] in stops or len(kept) == remaining)
            start = int(before.lengths[0])
            committed = np.asarray(after.cache["rows"]["token"])[0, start : start + count]
            assert committed.tolist() == ([int(before.root_token_ids[0])] + kept)[:count]


def test_finished_sequences_are_inert():
    before, after, out = scripted_round([4, 5], [4, 5, 6], remaining=3, finished=True)
    assert int(out.counts[0]) == 0 and int(out.acceptance_lengths[0]) == 0 and not bool(out.stopped[0])
    chex.assert_trees_all_equal(before, after)
    exhausted, after, out = scripted_round([4, 5], [4, 5, 6], remaining=0)
    assert int(out.counts[0]) == 0 and bool(after.finished[0])
    chex.assert_trees_all_equal(dataclasses.replace(exhausted, finished=after.finished), after)


def test_depth_limit_only_delays_tokens():
    _, after, out = scripted_round([4, 5, 6], [4, 5, 6, 7], remaining=9, max_depth=1)
    assert int(out.counts[0]) == 2
    assert np.asarray(out.token_ids)[0].tolist() == [4, 5]
    assert int(after.root_token_ids[0]) == 5


def test_debug_mode_passes_on_real_rounds_and_fires_on_a_broken_build():
    def step(state, params, stops, fns):
        return speculative_round(state, fns, stops, max_depth=TOY.depth, debug=True)

    params = SamplingParams.create(4)
    state = toy_model.prefill(TOY, PROMPTS, params, "greedy", 24, (), 64)
    fns = toy_model.functions(TOY, "tree", 8, lambda logits, depths, emitted: jnp.argmax(logits, -1).astype(jnp.int32))
    checked = chex.chexify(jax.jit(step, static_argnames="fns"), async_check=False)
    plain_state, plain = speculative_round(state, fns, jnp.zeros((0,), jnp.int32), max_depth=TOY.depth)
    new_state, out = checked(state, params, jnp.zeros((0,), jnp.int32), fns=fns)
    chex.assert_trees_all_equal((plain_state, plain), (new_state, out))

    def broken(draft_logits, roots):
        tree = fns.build(draft_logits, roots)
        return dataclasses.replace(tree, depths=tree.depths.at[:, 2].add(1))

    with pytest.raises(ValueError, match="depth_is_parent_depth_plus_one"):
        checked(state, params, jnp.zeros((0,), jnp.int32), fns=dataclasses.replace(fns, build=broken))


def test_wrong_arguments_are_named():
    state = toy_model.prefill(TOY, PROMPTS, SamplingParams.create(4), "greedy", 24, (), 64)
    fns = toy_model.functions(TOY, "none", 0, lambda logits, depths, emitted: jnp.argmax(logits, -1).astype(jnp.int32))
    stops = jnp.zeros((0,), jnp.int32)
    with pytest.raises(ValueError, match="max_depth"):
        speculative_round(state, fns, stops, max_depth=-1)
    with pytest.raises(ValueError, match="draft"):
        speculative_round(state, dataclasses.replace(fns, draft=lambda *a: None), stops, max_depth=1)
    with pytest.raises(AssertionError, match="stop_token_ids"):
        speculative_round(state, fns, jnp.zeros((0,), jnp.float32), max_depth=0)
    with pytest.raises(AssertionError, match="state.remaining"):
        speculative_round(dataclasses.replace(state, remaining=state.remaining[:1]), fns, stops, max_depth=0)
    with pytest.raises(AssertionError, match="fns.choose"):
        wrong = dataclasses.replace(fns, choose=lambda logits, depths, emitted: emitted)
        speculative_round(state, wrong, stops, max_depth=0)
    assert hash(fns) == hash(RoundFunctions(verify=fns.verify, choose=fns.choose, commit=fns.commit))
