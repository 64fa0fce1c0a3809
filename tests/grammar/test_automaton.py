"""Tables over tokens equal the matcher on every path, or there is no table."""

import re

import numpy as np
import pytest

from ddtree_jax import grammar_bytes
from ddtree_jax.grammar import Grammar
from ddtree_jax.grammar_automaton import NO_STATE, token_automaton

from .conftest import OTHER_STOP, STOP, allowed, compiled
from .grammars import CASES

PATTERNS = [
    "hello",
    "(yes|no|maybe so)!?",
    "[0-9]{3}-[0-9]{2,4}",
    "(ab|ac)*d",
    "(a|b)*a(a|b){3}",
    "[^a-y\n]z+",
    "é?[α-ωあ-ん🙂-🙃]{2}",
    ".{2}x",
    "(a?){3}b{0,}",
    "(?:a|)+c",
    r"\(\[\.\*\]\)\n?",
    "",
    "[^é\U00010000-\U0010ffff]a",
]
GRAMMARS = {
    **{f"regex {pattern}": Grammar.regex(pattern) for pattern in PATTERNS},
    **{name: grammar for name, (grammar, _) in CASES.items() if name.startswith("choices")},
}


@pytest.mark.parametrize("size", ["tiny", "demo"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_equal_to_the_matcher(request, name, size):
    vocabulary = request.getfixturevalue(size)
    made = compiled(vocabulary, GRAMMARS[name], (STOP, OTHER_STOP) if size == "tiny" else (STOP,))
    automaton = token_automaton(made)
    assert automaton is not None
    # Every state is visited once, by a shortest path; from each of them every row is compared.
    seen, todo = {0}, [(0, made.start())]
    while todo:
        state, matcher = todo.pop(0)
        np.testing.assert_array_equal(automaton.allowed[state], matcher.root_row())
        assert automaton.accepting[state] == matcher.is_complete
        options = allowed(made, automaton.allowed[state])
        assert options == np.flatnonzero(automaton.next_state[state][automaton.class_of] != NO_STATE).tolist()
        for token in options:
            target = automaton.step(state, token)
            if target not in seen:
                seen.add(target)
                below = matcher.copy()
                below.advance([token])
                todo.append((target, below))
    assert seen == set(range(automaton.num_states))
    # Other ways into the same states, too.
    rng = np.random.default_rng(0)
    for _ in range(10):
        state, matcher = 0, made.start()
        for _ in range(12):
            token = int(rng.choice(allowed(made, automaton.allowed[state])))
            state = automaton.step(state, token)
            matcher.advance([token])
            np.testing.assert_array_equal(automaton.allowed[state], matcher.root_row())


def test_states_and_classes_are_few(demo):
    automaton = token_automaton(compiled(demo, Grammar.regex("(ab|ac)*d")))
    assert automaton.num_states == 4 and automaton.next_state.shape[1] < 20  # start, after a, the end, stopped


@pytest.mark.parametrize(
    "pattern",
    [r"\d+", r"\w", "(?i)a", "a+?", "a**", "[[:alpha:]]", "[ab&&b]", "^a$", r"\x41", r"\p{L}", "(?P<n>a)", "a{0}"],
)
def test_what_is_not_certain_has_no_table(demo, pattern):
    assert token_automaton(compiled(demo, Grammar.regex(pattern))) is None


def test_limits(demo):
    assert token_automaton(compiled(demo, Grammar.regex("(a|b)*a(a|b){5}")), max_states=20) is None
    assert token_automaton(compiled(demo, Grammar.regex(".*")), max_steps=100) is None
    assert token_automaton(compiled(demo, Grammar.choices(["a" * 5000]))) is None
    assert token_automaton(compiled(demo, Grammar.regex("((a{1,500}){1,500}){1,500}"))) is None
    # Too long a chain to merge its states, and right all the same.
    chain = token_automaton(compiled(demo, Grammar.choices(["ab" * 1500])), max_states=4000)
    assert chain.num_states == 3002 and allowed(compiled(demo, Grammar.regex("ab")), chain.allowed[0])
    for name in ("json null", "lark sum"):
        assert token_automaton(compiled(demo, CASES[name][0])) is None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_byte_automata_match_what_re_matches(pattern):
    automaton = grammar_bytes.of_pattern(pattern, 4096)
    rng = np.random.default_rng(0)
    alphabet = list("abcdxyz0123-hello!éαωあ🙂🙃\n([.*]) \U00010000\uffff")
    texts = ["", pattern] + ["".join(rng.choice(alphabet, rng.integers(0, 7))) for _ in range(3000)]
    for text in texts:
        state = 0
        for byte in text.encode():
            state = automaton.edges[state].get(byte, NO_STATE) if state != NO_STATE else state
        assert (state != NO_STATE and automaton.accepting[state]) == (re.fullmatch(pattern, text) is not None), text


@pytest.mark.parametrize("low, high", [(0, 0x10FFFF), (0x7E, 0x801), (0xD700, 0xE001), (0xFFFE, 0x10001), (5, 5)])
def test_utf8_ranges_spell_each_character_once(low, high):
    found = 0
    for ranges in grammar_bytes._utf8_ranges(low, high):
        found += int(np.prod([last - first + 1 for first, last in ranges]))
        for end in zip(*ranges, strict=True):
            assert low <= ord(bytes(end).decode()) <= high
    assert found == high - low + 1 - len(range(max(low, 0xD800), min(high, 0xDFFF) + 1))
