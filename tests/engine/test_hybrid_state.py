"""F: states of recurrent layers in trees, commits and prefill, over trees that are forced on the round.

Faults that hybrid targets had elsewhere, one test each. The plain causal forward of `SlotOrderNet`, whose recurrence
knows no tree, is the reference of all; `TreeStateNet` must give its logits and states after every node.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddtree_jax import decoding
from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine
from ddtree_jax.models import Cache, make_mesh, write_states
from ddtree_jax.models.glm5 import causal_mask
from ddtree_jax.models.sharding import cache_sharding, placements
from ddtree_jax.sampling import SamplingParams
from ddtree_jax.tree import speculative_round
from tests.engine.hybrid_target import HybridConfig, SlotOrderNet, TreeStateNet, lineage, make_hybrid, parents_of
from tests.tree.tree_cases import tree_from_lists

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = HybridConfig()
PROMPTS = [[7, 3, 11, 2, 4, 14, 8, 1, 17, 20, 20, 6, 9], [5, 3, 3, 21, 8, 9]]
SLOTS, CAPACITY, LONGEST = 6, 64, 72
NO_STOPS = jnp.zeros((0,), jnp.int32)
# Float32 against float32, values of about 1; a fault must show at least this much.
TOLERANCE, FAULT = 5e-5, 1e-2
# (parents, the path on which the tokens are those of plain decoding) of each sequence
BRANCHES = (([-1, 0, 0, 1, 1, 2], [0, 2, 5]), ([-1, 0, 0, 1, 3, 2], [0, 1, 3, 4]))
CHAINS = (([-1, 0, 1, 2, 3, 4], [0, 1, 2]), ([-1, 0, 1, 2, 3, 4], [0, 1, 2, 3]))


@functools.partial(jax.jit, static_argnames="graphdef")
def _forward(graphdef, params, token_ids):
    module = nnx.merge(graphdef, params)
    b, t = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    out = module(token_ids, positions, causal_mask(b, t))
    return module.logits(out.hidden), out.states


def plain(sequences, module=SlotOrderNet):
    """([K, V] logits, states with leaves [R, K, ...]) after each whole sequence, from one forward without a cache."""
    target = make_hybrid(module, CONFIG, seed=1)
    ids = np.zeros((2 * SLOTS, LONGEST), np.int32)
    for row, sequence in zip(ids, sequences, strict=False):
        row[: len(sequence)] = sequence
    logits, states = _forward(target.graphdef, target.params, ids)
    at, last = np.arange(len(sequences)), np.array([len(s) for s in sequences]) - 1
    return np.asarray(logits)[at, last], jax.tree.map(lambda leaf: np.asarray(leaf)[:, at, last], states)


@pytest.fixture(scope="module")
def truth(quick_compilation):
    """Each prompt with its greedy continuation."""
    sequences = [list(prompt) for prompt in PROMPTS]
    for _ in range(20):
        chosen = plain(sequences)[0].argmax(-1)
        for sequence, token in zip(sequences, chosen.tolist(), strict=True):
            sequence.append(token)
    return sequences


class Rounds:
    """One net over the prompts; every round is the same compiled program, whatever its tree."""

    def __init__(self, module):
        sampling = SamplingParams.create(2)
        plan, weights = decoding.make_plan(
            Engine(make_hybrid(module, CONFIG, seed=1)), SpeculativeAlgorithm.NONE, 0, "greedy"
        )

        @chex.assert_max_traces(n=1)
        def one_round(weights, state, tree):
            functions, seen = decoding.round_functions(plan, weights, sampling), []

            def verify(*arguments):
                seen.append(functions.verify(*arguments))
                return seen[-1]

            def build(proposal, roots):
                return dataclasses.replace(tree, token_ids=tree.token_ids.at[:, 0].set(roots))

            forced = dataclasses.replace(functions, draft=lambda *_: None, build=build, verify=verify)
            return *speculative_round(state, forced, NO_STOPS, max_depth=SLOTS - 1), seen[0]

        self._round, self._weights = jax.jit(one_round), weights
        prompt = decoding.prefill(plan, weights, PROMPTS, CAPACITY)
        parts = (prompt.cache, prompt.draft_cache, prompt.hidden)
        limits = jnp.full((2,), 40, jnp.int32)
        self.start = decoding.first_token(plan.for_prefill(), weights, *parts, sampling, NO_STOPS, limits)

    def __call__(self, state, tree):
        """(state, output, verified) of the round with this tree; the given state stays usable."""
        return self._round(self._weights, state, tree)


@pytest.fixture(scope="module")
def exact(quick_compilation):
    return Rounds(TreeStateNet)


@pytest.fixture(scope="module")
def slot_order(quick_compilation):
    return Rounds(SlotOrderNet)


def forced_tree(state, truth, trees):
    """A DraftTree of these parents with the true continuation down each path, and wrong tokens everywhere else."""
    tokens = []
    for sequence, (parents, path), length in zip(truth, trees, np.asarray(state.lengths), strict=True):
        own = [sequence[length]]
        for node, parent in list(enumerate(parents))[1:]:
            right = sequence[length + 1 + path.index(parent)] if parent in path else 0
            own.append(right if node in path else (right + node) % CONFIG.vocab_size)
        tokens.append(own)
    return tree_from_lists([parents for parents, _ in trees], tokens, SLOTS)


def paths(state, truth, tree):
    """Token ids of every node of both sequences, from the start of the prompt to the node; row-major."""
    found = []
    for b, length in enumerate(np.asarray(state.lengths)):
        parents, tokens = np.asarray(tree.parents)[b], np.asarray(tree.token_ids)[b]
        for node in range(SLOTS):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tokens[at]))
                at = parents[at]
            found.append(truth[b][:length] + path)
    return found


def by_node(states):
    """Leaves [R, B, N, ...] -> [R, B * N, ...], as `plain` has them."""
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(leaf.shape[0], -1, *leaf.shape[3:]), states)


def error(found, expected):
    """Largest difference between two trees."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max()) for a, b in pairs)


def node_errors(verified, reference):
    """(logits, states): the largest error of each node, [2 * SLOTS]."""
    logits, states = reference
    found = np.asarray(verified.logits).reshape(len(logits), -1)
    by_logits = np.abs(found - logits).max(-1)
    by_states = [
        np.abs(a - b).reshape(a.shape[0], a.shape[1], -1).max((0, 2))
        for a, b in zip(jax.tree.leaves(by_node(verified.states)), jax.tree.leaves(states), strict=True)
    ]
    return by_logits, np.max(by_states, axis=0)


def test_parents_come_from_the_mask():
    parents = np.array([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 0, -1, -1]])
    mask = np.zeros((2, 6, 6), bool)
    for b, row in enumerate(parents):
        for node in range(6):
            at = node
            while at >= 0:
                mask[b, node, at] = True
                at = row[at]
    np.testing.assert_array_equal(parents_of(jnp.asarray(mask)), parents)
    np.testing.assert_array_equal(parents_of(causal_mask(1, 5)), [[-1, 0, 1, 2, 3]])
    # node 5 of the first tree: itself, 2, the root, the last committed token
    assert np.asarray(lineage(jnp.asarray(parents, jnp.int32), 4))[0, 5].tolist() == [-1, 0, 2, 5]
    assert np.asarray(lineage(jnp.asarray(parents, jnp.int32), 4))[1, 4].tolist() == [-3, -2, -1, 4]


def test_write_states_takes_the_state_of_the_last_node():
    old = {"a": jnp.zeros((2, 3, 4)), "b": jnp.full((1, 3, 2, 2), 7, jnp.bfloat16)}
    by_node = jnp.arange(3 * 5, dtype=jnp.float32).reshape(1, 3, 5)
    new = {
        "a": jnp.broadcast_to(by_node[..., None], (2, 3, 5, 4)),
        "b": jnp.broadcast_to(by_node[..., None, None], (1, 3, 5, 2, 2)),
    }
    cache = Cache(rows=(), lengths=jnp.asarray([4, 5, 6], jnp.int32), states=old)
    counts = jnp.asarray([3, 0, 1], jnp.int32)
    path = write_states(cache, new, counts, jnp.asarray([[0, 2, 4], [-1, -1, -1], [0, -1, -1]], jnp.int32))
    chunk = write_states(cache, new, counts)
    for written, first in ((path, 4), (chunk, 2)):
        assert np.asarray(written.states["a"])[1, :, 3].tolist() == [first, 0, 10]
        assert np.asarray(written.states["b"], np.float32)[0, :, 1, 0].tolist() == [first, 7, 10]
        assert written.states["b"].dtype == jnp.bfloat16
        np.testing.assert_array_equal(written.lengths, cache.lengths)


def test_write_states_of_a_target_without_states_does_nothing():
    cache = Cache(rows=(), lengths=jnp.zeros((1,), jnp.int32))
    assert write_states(cache, None, jnp.ones((1,), jnp.int32)) is cache
    for have, given in ((None, jnp.zeros((1, 1, 1))), (jnp.zeros((1, 1)), None)):
        with pytest.raises(ValueError):
            write_states(dataclasses.replace(cache, states=have), given, jnp.ones((1,), jnp.int32))


def test_states_lie_beside_the_rows_on_a_mesh():
    mesh = make_mesh(2, 1, "abstract")
    cache = Cache(rows=jnp.zeros((1, 4, 8, 2)), lengths=jnp.zeros((4,), jnp.int32), states={"a": jnp.zeros((1, 4, 3))})
    placed = placements(cache, mesh)
    assert placed.states == {"a": placed.rows} and placed.rows == cache_sharding(4, mesh)
    assert not placed.rows.is_fully_replicated and placed.lengths.is_fully_replicated


def test_both_nets_are_one_function_on_a_chunk():
    """Two implementations of the recurrence: without branches they may not differ."""
    sequences = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (12, LONGEST)).tolist()
    assert error(*(plain(sequences, module=module) for module in (SlotOrderNet, TreeStateNet))) < TOLERANCE


def test_regression_f65_a_chain_after_a_branching_tree(exact, truth):
    """One program for all rounds: parents are those of its own tree, never those of the round before."""
    state = exact.start
    emitted = [[int(token)] for token in state.root_token_ids]
    for trees in (BRANCHES, CHAINS, BRANCHES, CHAINS):
        tree = forced_tree(state, truth, trees)
        after, out, verified = exact(state, tree)
        for errors in node_errors(verified, plain(paths(state, truth, tree))):
            assert errors.max() < TOLERANCE
        for b, count in enumerate(np.asarray(out.counts)):
            emitted[b] += np.asarray(out.token_ids)[b, :count].tolist()
        state = after
    assert [len(found) for found in emitted] == [1 + 4 * 3, 1 + 4 * 4]
    for sequence, prompt, found in zip(truth, PROMPTS, emitted, strict=True):
        assert found == sequence[len(prompt) :][: len(found)]


def test_regression_f66_the_state_of_the_last_accepted_node(exact, truth):
    """Accepted [0, 2, 5]: the state after node 5, not after node 2 (length - 1), nor after the last slot."""
    tree = forced_tree(exact.start, truth, BRANCHES)
    after, out, verified = exact(exact.start, tree)
    accepted = [row[:n].tolist() for row, n in zip(np.asarray(out.path.node_ids), np.asarray(out.counts), strict=True)]
    assert accepted == [[0, 2, 5], [0, 1, 3, 4]]
    committed = [sequence[:length] for sequence, length in zip(truth, np.asarray(after.lengths), strict=True)]
    assert [len(c) - len(p) for c, p in zip(committed, PROMPTS, strict=True)] == [3, 4]
    expected = plain(committed)[1]
    assert error(after.cache.states, expected) < TOLERANCE
    for nodes in ([2, 3], [SLOTS - 1] * 2):  # length - 1, last slot
        wrong = jax.tree.map(lambda leaf, nodes=nodes: np.asarray(leaf)[:, [0, 1], nodes], verified.states)
        assert any(
            error(
                jax.tree.map(lambda leaf, b=b: leaf[:, b], wrong), jax.tree.map(lambda leaf, b=b: leaf[:, b], expected)
            )
            > FAULT
            for b in range(2)
        )


def test_regression_f67_every_node_has_the_window_of_its_own_path(exact, slot_order, truth):
    """Windows of siblings share their parent's inputs and not each other's; in slot order they do not, and it shows."""
    tree = forced_tree(exact.start, truth, BRANCHES)
    expected = plain(paths(exact.start, truth, tree))
    windows = expected[1]["window"]
    verified = exact(exact.start, tree)[2]
    assert error(by_node(verified.states)["window"], windows) < TOLERANCE
    found = by_node(slot_order(slot_order.start, tree)[2].states)["window"]
    off = np.abs(found - windows).max((0, 2, 3)) > FAULT
    # right only where the path is the slots before it
    assert off.reshape(2, SLOTS).tolist() == [[False, False, True, True, True, True]] * 2


def test_the_hazard_is_on_record(exact, slot_order, truth):
    """In slot order a branching tree gives other logits than the plain forward wherever a sibling came between, and a
    chain gives the same.
    """
    for trees, off in ((BRANCHES, [False, False, True, True, True, True]), (CHAINS, [False] * SLOTS)):
        tree = forced_tree(slot_order.start, truth, trees)
        reference = plain(paths(slot_order.start, truth, tree))
        for errors in node_errors(slot_order(slot_order.start, tree)[2], reference):
            assert (errors.reshape(2, SLOTS) > FAULT).tolist() == [off] * 2
        for errors in node_errors(exact(exact.start, tree)[2], reference):
            assert errors.max() < TOLERANCE


@pytest.mark.parametrize("module", [SlotOrderNet, TreeStateNet])
def test_regression_f68_states_across_chunks_are_those_of_one_pass(module, monkeypatch):
    """Prompts that end inside, at and far before a chunk's end, beside one of three chunks."""
    monkeypatch.setattr(decoding, "CHUNK_TOKENS", 32)
    rng = np.random.default_rng(68)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (71, 32, 5, 64)]
    plan, weights = decoding.make_plan(
        Engine(make_hybrid(module, CONFIG, seed=1)), SpeculativeAlgorithm.NONE, 0, "greedy"
    )
    state = decoding.prefill(plan, weights, prompts, 128)
    np.testing.assert_array_equal(state.cache.lengths, [71, 32, 5, 64])
    assert error(state.cache.states, plain(prompts)[1]) < TOLERANCE


def test_regression_f70_verifying_without_a_commit_changes_nothing(exact, truth):
    """Two trees are verified over one state: it stays bit-identical, and the second pass is that of a fresh state."""
    before = jax.tree.map(np.array, exact.start.cache)
    first, second = (forced_tree(exact.start, truth, trees) for trees in (BRANCHES, CHAINS))
    fresh = jax.tree.map(np.array, exact(exact.start, second))
    exact(exact.start, first)
    exact(exact.start, first)
    again = exact(exact.start, second)
    jax.tree.map(np.testing.assert_array_equal, exact.start.cache, before)
    jax.tree.map(np.testing.assert_array_equal, again, fresh)


def test_a_sequence_that_has_finished_keeps_its_state(exact, truth):
    """Beside one that goes on; what its inert rows compute is never taken."""
    state = dataclasses.replace(exact.start, finished=jnp.asarray([False, True]))
    after = exact(state, forced_tree(state, truth, BRANCHES))[0]
    moved = jax.tree.map(
        lambda new, old: np.abs(np.asarray(new - old)).max((0, *range(2, new.ndim))),
        *(s.cache.states for s in (after, state)),
    )
    for leaf in jax.tree.leaves(moved):
        assert leaf[0] > FAULT and leaf[1] == 0.0
