"""Filtered trees and chains against the enumeration of all live prefixes; rows late, and all there in the end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax import grammar_walk
from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar import Grammar, GrammarVocabulary, unpack
from ddtree_jax.grammar_tree import FORCED, filtered_chain, filtered_tree

from .conftest import OTHER_STOP, STOP, TINY_SIZE, allowed, compiled, make_tiny_tokenizer
from .grammars import CASES
from .proposals import KINDS, assert_tree_holds, best_live_chain, best_live_prefixes, random_proposals

ROOT = 5
NAMES = [
    "json string", "json nested", "json recursive", "json null", "regex any characters", "regex loop",
    "regex empty or more", "lark balanced", "lark sum", "choices prefixes", "choices plain choices",
]  # fmt: skip


def _text(vocabulary, text: bytes) -> list[int]:
    return [vocabulary.token_bytes.index(bytes([b])) for b in text]


def _some_way_in(made, rng, steps):
    """(state, its newest token) after a few random tokens, which have not finished it."""
    state, root = made.start(), ROOT
    for _ in range(steps):
        options = [i for i in allowed(made, state.root_row()) if i not in made.stop_token_ids]
        if options:
            root = int(rng.choice(options))
            state.advance([root])
    return state, root


@settings(deadline=None, max_examples=250)
@given(
    name=st.sampled_from(NAMES), kind=st.sampled_from(KINDS), paired=st.booleans(), renormalise=st.booleans(),
    forced=st.sampled_from(FORCED), budget=st.integers(0, 14), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_equal_to_all_live_prefixes(tiny, name, kind, paired, renormalise, forced, budget, seed):
    made = compiled(tiny, CASES[name][0], (STOP, OTHER_STOP))
    rng = np.random.default_rng(seed)
    scores, tokens = random_proposals(made, rng, 3, 6, kind=kind, paired=paired)
    state, root = _some_way_in(made, rng, int(rng.integers(3)))
    before, options = state.root_row(), {"renormalise": renormalise, "forced": forced}

    tree = filtered_tree(state, root, scores, tokens, budget, **options)
    chain = filtered_chain(state, root, scores, tokens, **options)
    assert_tree_holds(tree, best_live_prefixes(state, scores, tokens, budget, **options), root, before)
    assert_tree_holds(chain, best_live_chain(state, scores, tokens, **options), root, before)
    np.testing.assert_array_equal(state.root_row(), before)
    for found in (tree, chain):
        walked, alive = state.walk(found.token_ids, found.parents, found.num_nodes)
        assert alive[: found.num_nodes].all()
        np.testing.assert_array_equal(found.rows(), walked)


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_demo_vocabulary(demo, renormalise):
    """Rows of 64 words, wide rows of candidates, and trees that fill their budget."""
    made = compiled(demo, CASES["json object"][0])
    options, full = {"renormalise": renormalise, "forced": "token"}, 0
    for seed in range(4):
        rng = np.random.default_rng(seed)
        scores, tokens = random_proposals(made, rng, 4, 12, kind=KINDS[seed % 2], paired=False, useful=6)
        state = made.start()
        tree = filtered_tree(state, ROOT, scores, tokens, 20, **options)
        expected = best_live_prefixes(state, scores, tokens, 20, **options)
        assert_tree_holds(tree, expected, ROOT, state.root_row())
        full += len(expected) == 20
    assert full >= 2


def test_scores_are_shares_of_what_is_allowed(tiny):
    made = compiled(tiny, Grammar.regex("(a|b)c?z"))
    a, b, c, z, q = _text(tiny, b"abczq")
    scores = np.log(np.array([[0.5, 0.3, 0.1], [0.6, 0.1, 0.3], [0.9, 0.05, 0.01]], np.float32))
    tokens = np.array([[q, a, b], [q, c, z], [q, a, z]])
    tree = filtered_tree(made.start(), ROOT, scores, tokens, 20)
    found = dict(
        zip(map(tuple, zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)), tree.log_probs, strict=True)
    )
    share = {token: np.exp(found[token, 0]) for token in (a, b)}
    # "bc" is allowed too: of the 0.1 that the drafter gives to other tokens it has one in V.
    mass = 0.3 + 0.1 + 0.1 / TINY_SIZE
    np.testing.assert_allclose([share[a], share[b]], [0.3 / mass, 0.1 / mass], rtol=1e-6)
    below_a = tree.token_ids.tolist().index(a)
    np.testing.assert_allclose(np.exp(found[z, below_a]), share[a] * 0.75, rtol=1e-6)
    # The only allowed candidate costs nothing, however improbable.
    below_c = next(n for n in range(tree.num_nodes) if tree.token_ids[n] == c and tree.parents[n] == below_a)
    assert found[z, below_c] == tree.log_probs[below_c]


def test_forced_tokens_join_the_tree(tiny):
    made = compiled(tiny, Grammar.regex("xab1(c|d)yy"))
    x, a, d, y, q, b, one = _text(tiny, b"xadyqb1")
    ab = tiny.token_bytes.index(b"ab")
    scores = np.array([[-1.0, -2.0]] * 6, np.float32)
    tokens = np.array([[q, a], [q, a], [q, a], [d, q], [q, a], [q, a]])
    state = made.start()

    def of(forced, rows=tokens, make=filtered_tree, **options):
        found = make(state, ROOT, scores, rows, *([8] if make is filtered_tree else []), forced=forced, **options)
        count = found.num_nodes
        assert state.walk(found.token_ids, found.parents, count)[1][:count].all()
        return found.token_ids[1:count].tolist(), found.log_probs[1:count].tolist(), found.depths[1:count].tolist()

    nothing = ([], [], [])
    assert of("off") == of("off", make=filtered_chain) == nothing
    # x is forced; then "ab" or "a" may follow, of which only a is a candidate; below it b and 1 are forced, 12 is not
    # a token of this text; then c or d, neither a candidate.
    others = (1.0 - np.exp(-1.0) - np.exp(-2.0)) / TINY_SIZE
    share = -2.0 - np.log(np.exp(-2.0) + others)
    for make in (filtered_tree, filtered_chain):
        for forced in ("token", "text"):
            found, scored, depths = of(forced, make=make)
            assert (found, depths) == ([x, a, b, one], [1, 2, 3, 4])
            np.testing.assert_allclose(scored, [0.0, share, share, share], rtol=1e-5)
        assert of("token", make=make, renormalise=False) == ([x, a, b, one], [0.0, -2.0, -2.0, -2.0], [1, 2, 3, 4])
    # Without a candidate for either cut, only the tokenizer's own is added.
    tokens = np.where(tokens == a, q + 1, tokens)
    assert of("token", tokens) == ([x], [0.0], [1])
    assert of("text", tokens)[0][:2] == [x, ab] and of("text", tokens)[1][:2] == [0.0, 0.0]


def test_a_stop_token_ends_its_prefix(tiny):
    made = compiled(tiny, Grammar.regex("a*"), (STOP, OTHER_STOP))
    (a,) = _text(tiny, b"a")
    scores, tokens = np.zeros((4, 3), np.float32), np.array([[STOP, OTHER_STOP, a]] * 4)
    tree = filtered_tree(made.start(), ROOT, scores, tokens, 30)
    is_stop = np.isin(tree.token_ids, [STOP, OTHER_STOP])
    assert tree.num_nodes == 1 + 3 * 4 and not is_stop[tree.parents[1 : tree.num_nodes]].any()
    for slot in np.flatnonzero(is_stop[: tree.num_nodes]):
        assert allowed(made, tree.rows()[slot]) == [STOP, OTHER_STOP]
    chain = filtered_chain(made.start(), ROOT, scores, tokens)
    assert chain.num_nodes == 2 and chain.token_ids.tolist() == [ROOT, STOP, 0, 0, 0]
    finished = made.start()
    finished.advance([a, STOP])
    for found in (filtered_tree(finished, STOP, scores, tokens, 9), filtered_chain(finished, STOP, scores, tokens)):
        assert found.num_nodes == 1 and allowed(made, found.rows()[0]) == [STOP, OTHER_STOP]


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Grows by one entry with each row that a matcher computes."""
    counted: list[int] = []
    fill = grammar_walk.SequenceGrammar._fill

    def count(self, words):
        counted.append(1)
        return fill(self, words)

    monkeypatch.setattr(grammar_walk.SequenceGrammar, "_fill", count)
    return counted


def test_rows_of_leaves_come_late(tiny, steps):
    made = compiled(tiny, Grammar.regex("[a-z]*"))
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(_text(tiny, b"abcdefgh")) for _ in range(3)])
    scores = np.log(rng.dirichlet(np.full(8, 0.3), size=3)).astype(np.float32)
    state = made.start()
    state.root_row()
    for options, most in (({}, None), ({"renormalise": False}, 12)):
        steps.clear()
        tree = filtered_tree(state, ROOT, scores, tokens, 20, **options)
        early = len(steps)
        rows = tree.rows()
        assert tree.num_nodes == 21 and len(steps) == 20 and rows is tree.rows()
        # Without a row of its own: the deepest nodes, and the one that filled the budget.
        late = set(np.flatnonzero(tree.depths == 3).tolist()) | {20}
        assert early == 20 - len(late) if most is None else early < most
    steps.clear()
    chain = filtered_chain(state, ROOT, scores, tokens)
    assert len(steps) == 2 and chain.num_nodes == 4
    chain.rows()
    assert len(steps) == 3


def test_rows_come_before_the_sequence_moves(tiny):
    made = compiled(tiny, Grammar.regex("[ab]*c?"))
    a, b, c = _text(tiny, b"abc")
    scores, tokens = np.zeros((2, 3), np.float32), np.array([[a, b, c]] * 2)
    state = made.start()
    first, second = (filtered_tree(state, ROOT, scores, tokens, 12) for _ in range(2))
    finished = filtered_tree(state, ROOT, scores, tokens, 12)
    # Other looks at the sequence in between change nothing.
    state.walk([ROOT, a, b], [-1, 0, 1], 3)
    third = filtered_tree(state, ROOT, scores, tokens, 12)
    rows = first.rows()
    np.testing.assert_array_equal(rows, state.walk(first.token_ids, first.parents, first.num_nodes)[0])
    np.testing.assert_array_equal(third.rows(), rows)
    state.advance([a])
    np.testing.assert_array_equal(first.rows(), rows)
    with pytest.raises(InvariantError, match="has moved"):
        second.rows()
    other = made.start()
    late = filtered_tree(other, ROOT, scores, tokens, 12)
    other.advance([STOP])
    for tree in (finished, late):
        with pytest.raises(InvariantError, match="has moved"):
            tree.rows()


def test_dead_ends():
    """A vocabulary without x: where x must come the library fails, and another matcher takes over."""
    vocabulary = GrammarVocabulary(make_tiny_tokenizer(drop="x"), TINY_SIZE)
    made = compiled(vocabulary, Grammar.regex("a(bx|cd|e)|bx|cd"))
    a, b, c, d, e = _text(vocabulary, b"abcde")
    ids = np.array([[a, b, c, d, e]] * 3)
    scores = np.log(np.array([[0.5, 0.4, 0.1, 0.2, 0.3], [0.1, 0.6, 0.3, 0.2, 0.3], [0.2] * 5], np.float32))
    state = made.start()
    for found in (filtered_tree(state, ROOT, scores, ids, 12), filtered_tree(state, ROOT, scores[:1], ids[:1], 12)):
        rows, alive = state.walk(found.token_ids, found.parents, found.num_nodes)
        dead = [n for n in range(found.num_nodes) if not rows[n].any()]
        assert alive[: found.num_nodes].all() and b in found.token_ids[dead]
        assert not np.isin(found.parents, dead).any()
        np.testing.assert_array_equal(found.rows(), rows)
    assert filtered_chain(state, ROOT, scores, ids).token_ids.tolist() == [ROOT, a, b, 0]


def test_a_limit_met_late_is_tried_again(tiny, monkeypatch):
    """What `recovering` promises, for the rows that come late: a new matcher, then the error, then the state before."""
    made = compiled(tiny, Grammar.regex("[a-d]*"))
    a, b, c = _text(tiny, b"abc")
    scores, tokens = np.zeros((2, 3), np.float32), np.array([[a, b, c]] * 2)
    state = made.start()
    trees = [filtered_tree(state, ROOT, scores, tokens, 12) for _ in range(2)]
    fill, failures = grammar_walk.SequenceGrammar._fill, []

    def fail(self, words):
        if failures and failures.pop():
            raise grammar_walk._LimitReached("too many lexer states")
        return fill(self, words)

    monkeypatch.setattr(grammar_walk.SequenceGrammar, "_fill", fail)
    failures[:] = [True, False]
    expected = state.walk(trees[0].token_ids, trees[0].parents, trees[0].num_nodes)[0]
    failures[:] = [True, False, False]
    np.testing.assert_array_equal(trees[0].rows(), expected)
    assert not failures
    failures[:] = [True, True]
    with pytest.raises(ValueError, match="too complex"):
        trees[1].rows()
    np.testing.assert_array_equal(trees[1].rows(), expected)
    state.advance([a])
    np.testing.assert_array_equal(state.root_row(), expected[1])


def test_bad_arguments(tiny):
    state = compiled(tiny, Grammar.regex("a*")).start()
    good = np.zeros((2, 3), np.float32), np.arange(6).reshape(2, 3)
    for scores, tokens, options in [
        (good[0][:1], good[1], {}), (good[0].astype(int), good[1], {}), (good[0], good[1] * 1.0, {}),
        (good[0], good[1], {"forced": "always"}),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            filtered_tree(state, ROOT, scores, tokens, 4, **options)
        with pytest.raises(ValueError):
            filtered_chain(state, ROOT, scores, tokens, **options)
    with pytest.raises(ValueError, match="budget"):
        filtered_tree(state, ROOT, *good, -1)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 3, 3), (2, 0, 0)])
def test_nothing_proposed(tiny, shape):
    state = compiled(tiny, Grammar.regex("a|zz")).start()
    scores, tokens = np.zeros(shape, np.float32), np.zeros(shape[:2], int)
    tree = filtered_tree(state, ROOT, scores, tokens, 4, forced="token")
    assert tree.num_nodes == 1 and unpack(tree.rows()[0], TINY_SIZE).sum() == 2
    (z,) = _text(tiny, b"z")
    state.advance([z])
    for found in (
        filtered_tree(state, z, scores, tokens, 4, forced="token"),
        filtered_chain(state, z, scores, tokens, forced="token"),
    ):
        assert found.token_ids[: found.num_nodes].tolist() == [z] + [z] * (shape[0] == 2)


@pytest.mark.parametrize("stops", [(STOP, OTHER_STOP), (40, 65)])
def test_many_tokens_are_looked_up_as_one(tiny, stops):
    """Rows with text only, text that may also be a stop token, both, stop tokens only, and that of a dead node."""
    made = compiled(tiny, Grammar.regex("a[^é]{2,}"), stops)
    tokens = np.array([-1, -(2**31), *range(-40, TINY_SIZE + 40), 2**31 - 1])
    state = made.start()
    (a,) = _text(tiny, b"a")
    candidates, counts = grammar_walk.Candidates(state, np.stack([tokens[::-1], tokens])), []
    with grammar_walk.Visit(state, 6) as visit:
        assert all(visit.enter(slot, slot - 1, token) for slot, token in enumerate([a, a, a, stops[0]], 1))
        assert not visit.enter(5, 1, stops[0])
        for slot in range(6):
            expected = [visit.allows(slot, token) for token in tokens.tolist()]
            assert visit.allowed_of(slot, candidates, 1).tolist() == expected
            counts.append(sum(expected))
    assert counts[0] == 2 and min(counts[1:4]) > 100 and counts[3] == counts[2] + 2 and counts[4:] == [2, 0]


def test_candidates_outside_the_vocabulary(tiny):
    state = compiled(tiny, Grammar.regex("a*")).start()
    (a,) = _text(tiny, b"a")
    tokens = np.array([[-1, TINY_SIZE, 2**31 - 1, a]])
    tree = filtered_tree(state, ROOT, np.zeros((1, 4), np.float32), tokens, 4)
    assert tree.token_ids[: tree.num_nodes].tolist() == [ROOT, a]
