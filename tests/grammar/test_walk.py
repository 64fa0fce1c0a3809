"""A visit of a draft tree: every row that of its path, and nothing left behind."""

import numpy as np
import pytest

from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar import Grammar

from .conftest import MASK, OTHER_STOP, STOP, TINY_SIZE, allowed, compiled, fresh_row, paths, random_tree
from .grammars import CASES, LARK

NAMES = ["json nested", "json recursive", "json anything", "json string", "regex loop", "choices prefixes", "lark sum"]


def _ids(vocabulary, text: bytes) -> list[int]:
    """The text in single bytes."""
    return [vocabulary.token_bytes.index(bytes([b])) for b in text]


def _check_walk(made, state, prefix, tokens, parents):
    """The tree's rows against states that saw one path each. Slot 0 is the root, part of the prefix already."""
    rows, alive = state.walk(tokens, parents, len(tokens))
    assert rows.dtype == np.int32 and rows.shape == (len(tokens), made.vocabulary.num_words)
    for node, path in enumerate(paths(tokens, parents)):
        if node and not (alive[parents[node]] and tokens[node] in allowed(made, rows[parents[node]])):
            assert not alive[node] and not rows[node].any()
        else:
            assert alive[node]
            np.testing.assert_array_equal(rows[node], fresh_row(made, [*prefix, *path]))
    return rows, alive


@pytest.mark.parametrize("size", ["tiny", "demo"])
@pytest.mark.parametrize("name", NAMES)
def test_rows_equal_those_of_fresh_states(request, name, size):
    made = compiled(request.getfixturevalue(size), CASES[name][0], (STOP, OTHER_STOP) if size == "tiny" else (STOP,))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        tokens, parents = random_tree(made, rng, 25)
        state = made.start()
        before = state.root_row()
        first = _check_walk(made, state, [], tokens, parents)
        # Again, and padded: the visit left nothing behind, and padding changes nothing.
        again = state.walk([*tokens, 7, 7], [*parents, -1, -1], len(tokens))
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other[:-2])
            assert not other[-2:].any()
        np.testing.assert_array_equal(state.root_row(), before)
        # The state still goes where an untouched one goes.
        path = max((p for n, p in enumerate(paths(tokens, parents)) if first[1][n]), key=len)
        for n, token in enumerate(path):
            state.advance([token])
            np.testing.assert_array_equal(state.root_row(), fresh_row(made, path[: n + 1]))


def test_walks_and_emissions_take_turns(demo):
    """A whole text by rounds: walk a tree, emit some of a live path, walk again, until it stops."""
    made = compiled(demo, CASES["json object"][0])
    rng = np.random.default_rng(0)
    state, emitted, root = made.start(), [], 0
    for _ in range(40):
        options = allowed(made, state.root_row())
        tokens, parents = [root], [-1]
        for token in rng.permutation(options)[:3].tolist():
            parents.append(0)
            tokens.append(token)
            below = allowed(made, fresh_row(made, [*emitted, token]))
            parents.append(len(tokens) - 1)
            tokens.append(int(rng.choice(below)))
        rows, alive = _check_walk(made, state, emitted, tokens, parents)
        assert alive.all()
        path = [tokens[1], tokens[2], int(rng.choice(allowed(made, rows[2])))]
        path = path[: path.index(STOP) + 1] if STOP in path else path
        state.advance(path)
        emitted, root = emitted + path, path[-1]
        np.testing.assert_array_equal(state.root_row(), fresh_row(made, emitted))
        if state.is_finished:
            break


def test_the_root_must_be_the_newest_token(tiny):
    made = compiled(tiny, Grammar.regex("a*b"))
    a, b = _ids(tiny, b"ab")
    state = made.start()
    state.advance([a])
    assert state.walk([a, b], [-1, 0], 2)[1].all()
    with pytest.raises(InvariantError, match="newest token"):
        state.walk([b, a], [-1, 0], 2)


def test_arrays_that_are_no_tree(tiny):
    state = compiled(tiny, Grammar.regex("a*b")).start()
    for tokens, parents, count in [
        ([0, 1], [-1, 1], 2), ([0, 1], [-1, -1], 2), ([0, 1], [-1], 2), ([0], [-1], 2), ([0], [-1], 0),
        ([0.0], [-1], 1), ([[0]], [-1], 1),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            state.walk(tokens, parents, count)


def test_regression_g74_an_illegal_sibling_before_a_legal_one(tiny):
    """xgrammar #613: ids outside, a refused token, a stop too early, each before the legal child, and below each."""
    made = compiled(tiny, Grammar.regex("ab+c"))
    a, b, c, z = _ids(tiny, b"abcz")
    state = made.start()
    before = state.root_row()
    for bad in (z, MASK, STOP, -1, TINY_SIZE, 2**31 - 1):
        tokens, parents = [9, bad, a, a, bad, b], [-1, 0, 1, 0, 3, 3]
        rows, alive = state.walk(tokens, parents, 6)
        assert alive.tolist() == [True, False, False, True, False, True]
        np.testing.assert_array_equal(rows[3], fresh_row(made, [a]))
        np.testing.assert_array_equal(rows[5], fresh_row(made, [a, b]))
        assert not rows[[1, 2, 4]].any()
        np.testing.assert_array_equal(state.root_row(), before)
    state.advance([a, b, c, STOP])


def test_regression_g74_a_chain_of_a_thousand(tiny):
    made = compiled(tiny, Grammar.lark('start: "(" start ")" | "x"'))
    opening, x, z = _ids(tiny, b"(xz")
    tokens, parents = [9] + [opening] * 1000, list(range(-1, 1000))
    tokens, parents = [*tokens, z, x], [*parents, 500, 500]
    state = made.start()
    before = state.root_row()
    rows, alive = state.walk(tokens, parents, len(tokens))
    assert alive[:1001].all() and alive[1001:].tolist() == [False, True]
    np.testing.assert_array_equal(rows[1000], fresh_row(made, [opening] * 1000))
    np.testing.assert_array_equal(rows[1002], fresh_row(made, [opening] * 500 + [x]))
    np.testing.assert_array_equal(state.root_row(), before)


def test_stop_tokens_in_the_tree(tiny):
    made = compiled(tiny, Grammar.regex("ab?"), (STOP, OTHER_STOP))
    a, b = _ids(tiny, b"ab")
    #            root  stop  a  stop  stop  a  other  b  stop
    tokens = [9, STOP, a, STOP, STOP, a, OTHER_STOP, b, STOP]
    parents = [-1, 0, 0, 2, 3, 3, 2, 2, 7]
    rows, alive = made.start().walk(tokens, parents, 9)
    assert alive.tolist() == [True, False, True, True, True, False, True, True, True]
    for node in (3, 4, 6, 8):
        assert allowed(made, rows[node]) == [STOP, OTHER_STOP]
    finished = made.start()
    finished.advance([a, STOP])
    rows, alive = finished.walk([STOP, STOP, a], [-1, 0, 0], 3)
    assert alive.tolist() == [True, True, False] and allowed(made, rows[0]) == [STOP, OTHER_STOP]


def test_regression_g75_a_section_that_ends_inside_a_path(tiny):
    """vllm #44006 and kin: `</think>` and `{` in one window, and the `{` is not expected a second time."""
    made = compiled(tiny, Grammar.lark(LARK["thought"][0]))
    end, (h, brace, close) = tiny.token_bytes.index(b"</think>"), _ids(tiny, b"h{}")
    state = made.start()
    state.advance([h])
    rows, alive = state.walk([h, end, brace, brace, close], [-1, 0, 1, 2, 2], 5)
    assert alive.tolist() == [True, True, True, False, True]
    assert allowed(made, rows[1]) == [brace] and brace not in allowed(made, rows[2])
    state.advance([end, brace])
    np.testing.assert_array_equal(state.root_row(), rows[2])
    assert not state.is_complete
    state.advance([close])
    assert state.must_stop


def test_copies_are_independent(demo):
    made = compiled(demo, CASES["json object"][0])
    state = made.start()
    other = state.copy()
    row = state.root_row()
    other.advance(allowed(made, row)[:1])
    np.testing.assert_array_equal(state.root_row(), row)
    assert not np.array_equal(other.root_row(), row)


def test_forced_tokens_are_the_only_ones(tiny, demo):
    # "é" is one token or two: not forced as a token, though the text is.
    made = compiled(tiny, Grammar.regex("xyz(q|é)"))
    state = made.start()
    assert state.forced_tokens(10) == _ids(tiny, b"xyz") and state.forced_tokens(2) == _ids(tiny, b"xy")
    assert state.forced_tokens(0) == []
    assert compiled(tiny, Grammar.regex("xab")).start().forced_tokens(9) == _ids(tiny, b"x")
    # The text may end after xy: a stop token is then also allowed.
    assert compiled(tiny, Grammar.regex("xyz?")).start().forced_tokens(9) == _ids(tiny, b"xy")
    for name, (grammar, _) in CASES.items():
        made = compiled(demo, grammar)
        path = []
        for token in made.start().forced_tokens(20):
            assert allowed(made, fresh_row(made, path)) == [token], name
            path.append(token)
        rest = allowed(made, fresh_row(made, path))
        assert len(path) == 20 or len(rest) != 1 or rest == [STOP], name


def test_two_tokens_at_the_sign_of_a_word_are_no_choice_of_one(tiny):
    """Rows are signed words: bits 30 and 31 together must count as two."""
    word = next(
        w
        for w in range(2, 8)
        if all(len(tiny.token_bytes[32 * w + bit]) == 1 for bit in (30, 31)) and 32 * w + 31 < 256
    )
    pair = [32 * word + 30, 32 * word + 31]
    choices = [tiny.token_bytes[i].decode("latin-1") for i in pair]
    if not all(one.isascii() for one in choices):
        pytest.fail("the tokens of this vocabulary have moved: find two that are characters")
    state = compiled(tiny, Grammar.choices(choices)).start()
    assert allowed(state.compiled, state.root_row()) == pair
    assert state.forced_tokens(3) == []


def test_suggested_tokens_are_the_tokenizers_own_cut(demo, demo_tokenizer):
    made = compiled(demo, Grammar.json_schema(
        {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}, compact=True
    ))  # fmt: skip
    state = made.start()
    suggested = state.suggested_tokens(20)
    assert suggested == demo_tokenizer.encode('{"name":"')[: len(suggested)] and len(suggested) >= 3
    assert state.suggested_tokens(2) == suggested[:2]
    state.advance(suggested)
    assert not state.is_dead
    assert compiled(demo, Grammar.regex("[ab]c")).start().suggested_tokens(4) == []
