"""Rows against outside judges: what they let through is right, and they let through all that is right."""

import numpy as np
import pytest

from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar import Grammar, pack, unpack

from .conftest import MASK, OTHER_STOP, STOP, TINY_SIZE, allowed, compiled, fresh_row
from .grammars import CASES, CHOICES

CLOSERS = set('"}])0e<')


def _random_text(grammar, rng, *, max_tokens=300):
    """Token ids that follow the rows until a stop token, or None where that takes too long."""
    state, emitted = grammar.start(), []
    token_bytes = grammar.vocabulary.token_bytes
    while len(emitted) < max_tokens:
        options = allowed(grammar, state.root_row())
        assert options, "a live state without a token"
        stops = [i for i in options if i in grammar.stop_token_ids]
        assert bool(stops) == state.is_complete and state.must_stop == (stops == options)
        if stops and (rng.random() < 0.4 or len(emitted) > 12):
            options = stops
        elif len(emitted) > 12:  # free strings and nested parts come to an end
            options = [i for i in options if token_bytes[i].decode("latin-1") in CLOSERS] or options
        token = int(rng.choice(options))
        state.advance([token])
        emitted.append(token)
        if state.is_finished:
            return emitted
    return None


def test_there_are_enough_grammars():
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_what_follows_the_rows_is_in_the_language(demo, demo_tokenizer, name):
    grammar, check = CASES[name]
    made = compiled(demo, grammar)
    texts = set()
    for seed in range(8):
        emitted = _random_text(made, np.random.default_rng(seed))
        if emitted is not None:
            text = b"".join(demo.token_bytes[i] for i in emitted[:-1]).decode("utf-8")
            assert demo_tokenizer.decode(emitted) == text
            assert check(text), text
            texts.add(text)
    assert texts, "no walk came to an end"


@pytest.mark.parametrize("name", CASES)
def test_a_row_holds_every_token_that_can_be_appended(tiny, name):
    """Brute force: each of the model's tokens tried on a copy."""
    made = compiled(tiny, CASES[name][0], (STOP, OTHER_STOP))
    rng = np.random.default_rng(len(name))
    state = made.start()
    for _ in range(6):
        before = state.root_row()
        expected = np.zeros((TINY_SIZE,), bool)
        for token in range(TINY_SIZE):
            try:
                state.copy().advance([token])
            except InvariantError:
                continue
            expected[token] = True
        np.testing.assert_array_equal(unpack(before, TINY_SIZE), expected)
        assert not expected[MASK] and expected[STOP] == expected[OTHER_STOP] == state.is_complete
        np.testing.assert_array_equal(state.root_row(), before)
        text = [i for i in np.flatnonzero(expected) if i not in (STOP, OTHER_STOP)]
        if not text:
            break
        state.advance([int(rng.choice(text))])


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("size", ["tiny", "demo"])
def test_choices_are_their_prefixes(request, name, size):
    """The law itself, without the library: a token is allowed if some choice goes on with its bytes."""
    vocabulary = request.getfixturevalue(size)
    made = compiled(vocabulary, Grammar.choices(CHOICES[name]))
    whole = [choice.encode() for choice in CHOICES[name]]
    rng = np.random.default_rng(1)
    for _ in range(6):
        state, text = made.start(), b""
        while True:
            expected = np.array(
                [bool(b) and any(w.startswith(text + b) for w in whole) for b in vocabulary.token_bytes]
            )
            expected[STOP] = text in whole
            np.testing.assert_array_equal(unpack(state.root_row(), vocabulary.vocab_size), expected)
            assert state.is_complete == (text in whole)
            token = int(rng.choice(np.flatnonzero(expected)))
            state.advance([token])
            if token == STOP:
                break
            text += vocabulary.token_bytes[token]


def test_text_can_be_cut_in_every_way(tiny):
    made = compiled(tiny, Grammar.regex("abc"))
    pieces = {tiny.token_bytes[i] for i in allowed(made, made.start().root_row())}
    assert pieces == {b"a", b"ab"}
    by_bytes = {b: i for i, b in enumerate(tiny.token_bytes) if b}
    assert allowed(made, fresh_row(made, [by_bytes[b"a"]])) == sorted([by_bytes[b"b"], by_bytes[b"bc"]])


def test_tokens_of_the_same_spelling_are_equal(tiny):
    same = [i for i, b in enumerate(tiny.token_bytes) if b == b" b"]
    made = compiled(tiny, Grammar.regex(" b"))
    assert len(same) == 2 and set(same) < set(allowed(made, made.start().root_row()))


def test_only_stop_tokens_after_the_end(tiny):
    made = compiled(tiny, Grammar.regex("a"), (STOP, OTHER_STOP))
    state = made.start()
    a = allowed(made, state.root_row())[0]
    assert not (state.is_complete or state.must_stop or state.is_dead or state.is_finished)
    state.advance([a])
    assert state.is_complete and state.must_stop and not state.is_finished
    assert allowed(made, state.root_row()) == [STOP, OTHER_STOP]
    state.advance([OTHER_STOP])
    assert state.is_finished and allowed(made, state.root_row()) == [STOP, OTHER_STOP]
    state.advance([STOP])
    with pytest.raises(InvariantError, match="does not allow"):
        state.advance([a])


def test_a_stop_token_that_is_text_is_never_text(tiny):
    b = tiny.token_bytes.index(b"b")
    made = compiled(tiny, Grammar.regex("ab?"), (b,))
    state = made.start()
    assert {tiny.token_bytes[i] for i in allowed(made, state.root_row())} == {b"a", b"ab"}
    state.advance([tiny.token_bytes.index(b"a")])
    assert allowed(made, state.root_row()) == [b] and state.must_stop


def test_ids_beyond_the_tokenizer_are_never_allowed(tiny):
    size = next(i for i in range(TINY_SIZE, 0, -1) if tiny.token_bytes[i - 1])
    assert size < TINY_SIZE
    made = compiled(tiny, Grammar.regex("(?s:.*)"))
    row = unpack(made.start().root_row(), tiny.num_words * 32)
    assert row[3:size].sum() > 150 and not row[size:].any() and not row[1:3].any() and row[STOP]


@pytest.mark.parametrize("vocab_size", [2048, 2049, 2079, 2080, 2081, 2112, 4096])
def test_every_padding_of_the_vocabulary(demo_tokenizer, vocab_size):
    from ddtree_jax.grammar import GrammarVocabulary

    made = compiled(GrammarVocabulary(demo_tokenizer, vocab_size), Grammar.regex("ab?c*"), (0, vocab_size - 1))
    row = made.start().root_row()
    assert row.shape == (-(-vocab_size // 32),) and row.dtype == np.int32
    assert [demo_tokenizer.token_text(i) for i in allowed(made, row)] == ["a", "ab", "ac"]
    assert vocab_size - 1 in allowed(made, fresh_row(made, allowed(made, row)[:1]))


def test_an_illegal_emission_moves_nothing(tiny):
    made = compiled(tiny, Grammar.regex("a+b"))
    a, b, c = (tiny.token_bytes.index(x) for x in (b"a", b"b", b"c"))
    for bad in ([a, a, c], [a, b, a], [a, STOP], [a, MASK], [a, TINY_SIZE], [a, -1], [c]):
        state = made.start()
        state.advance([a])
        before = state.root_row()
        with pytest.raises(InvariantError):
            state.advance(bad)
        np.testing.assert_array_equal(state.root_row(), before)
        state.advance([a, b, STOP])
        assert state.is_finished


def test_pack_is_word_by_word():
    allowed_tokens = np.zeros((70,), bool)
    allowed_tokens[[0, 31, 32, 69]] = True
    np.testing.assert_array_equal(pack(allowed_tokens), np.array([1 - 2**31, 1, 1 << 5], np.int32))
    np.testing.assert_array_equal(unpack(pack(allowed_tokens), 70), allowed_tokens)
