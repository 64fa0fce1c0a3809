"""Bad grammars end in one ValueError, soon, without noise; time limits here are generous guards against hangs."""

import builtins
import json
import subprocess
import sys
import time

import pytest

import ddtree_jax
from ddtree_jax.errors import UnsupportedRequestError
from ddtree_jax.grammar import MAX_GRAMMAR_BYTES, Grammar, GrammarVocabulary

from .conftest import STOP, TINY_SIZE, make_tiny_tokenizer

SECONDS = 60.0


def _nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _cyclic():
    schema = {"type": "array"}
    schema["items"] = schema
    return schema


def _shared(depth):
    """Small in memory, 2**depth nodes when written out."""
    schema = {"type": "null"}
    for _ in range(depth):
        schema = {"anyOf": [schema, schema]}
    return schema


_BIG = json.dumps({"enum": [f"value {i}" for i in range(80_000)]})
assert len(_BIG) > 10**6
MAKE = {
    "schema type": lambda: Grammar.json_schema([1]),
    "schema None": lambda: Grammar.json_schema(None),
    "schema number": lambda: Grammar.json_schema("3"),
    "schema not JSON": lambda: Grammar.json_schema("{"),
    "schema NaN": lambda: Grammar.json_schema('{"const": NaN}'),
    "schema infinity": lambda: Grammar.json_schema({"const": float("inf")}),
    "schema set": lambda: Grammar.json_schema({"enum": {1, 2}}),
    "schema key": lambda: Grammar.json_schema({1: 2}),
    "schema huge integer": lambda: Grammar.json_schema('{"const": ' + "9" * 5000 + "}"),
    "schema option": lambda: Grammar.json_schema({"x-guidance": {"lenient": True}}),
    "schema false": lambda: Grammar.json_schema("false"),
    "schema keyword": lambda: Grammar.json_schema({"type": "array", "uniqueItems": True}),
    "schema bad type": lambda: Grammar.json_schema({"type": "strin"}),
    "schema remote": lambda: Grammar.json_schema({"$ref": "http://localhost:1/x"}),
    "schema pattern": lambda: Grammar.json_schema({"type": "string", "pattern": "("}),
    "schema empty range": lambda: Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
    "schema 1 MB text": lambda: Grammar.json_schema(_BIG),
    "schema 1 MB dict": lambda: Grammar.json_schema(json.loads(_BIG)),
    "schema deep dict": lambda: Grammar.json_schema(_nested(1000)),
    "schema deeper dict": lambda: Grammar.json_schema(_nested(100_000)),
    "schema deep text": lambda: Grammar.json_schema('{"items":' * 1000 + "{}" + "}" * 1000),
    "schema deeper text": lambda: Grammar.json_schema('{"a":[' * 20_000),
    "schema cycle": lambda: Grammar.json_schema(_cyclic()),
    "schema doubling": lambda: Grammar.json_schema(_shared(60)),
    "schema surrogate": lambda: Grammar.json_schema({"const": "\ud800"}),
    "schema compact": lambda: Grammar.json_schema({}, compact=1),
    "regex type": lambda: Grammar.regex(b"a"),
    "regex open": lambda: Grammar.regex("("),
    "regex look-ahead": lambda: Grammar.regex("(?=a)b"),
    "regex back-reference": lambda: Grammar.regex(r"(a)\1"),
    "regex deep": lambda: Grammar.regex("(" * 5000 + "a" + ")" * 5000),
    "regex long": lambda: Grammar.regex("a" * (MAX_GRAMMAR_BYTES + 1)),
    "regex long in bytes": lambda: Grammar.regex("é" * (MAX_GRAMMAR_BYTES // 2 + 1)),
    "regex surrogate": lambda: Grammar.regex("\udfff"),
    "lark type": lambda: Grammar.lark(3),
    "lark empty": lambda: Grammar.lark(""),
    "lark syntax": lambda: Grammar.lark("start: ("),
    "lark name": lambda: Grammar.lark("start: nothing"),
    "lark token cycle": lambda: Grammar.lark('start: A\nA: "a" A | "b"'),
    "lark deep": lambda: Grammar.lark("start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "choices type": lambda: Grammar.choices("yes"),
    "choices empty": lambda: Grammar.choices([]),
    "choices mixed": lambda: Grammar.choices(["a", 1]),
    "choices long": lambda: Grammar.choices(["a" * 100_000, "b" * 100_000]),
    "choices surrogate": lambda: Grammar.choices(["\ud800"]),
    "kind": lambda: Grammar("xml", "<a/>"),
    "direct": lambda: Grammar("choices", "[]"),
}


@pytest.mark.parametrize("name", MAKE)
def test_refused_when_made(name, capfd):
    started = time.monotonic()
    with pytest.raises(ValueError) as caught:
        MAKE[name]()
    assert time.monotonic() - started < SECONDS
    message = str(caught.value)
    assert message.startswith("grammar") and "\n" not in message and len(message) < 500
    assert capfd.readouterr() == ("", "")


def test_the_library_names_the_keyword():
    with pytest.raises(ValueError, match="uniqueItems"):
        Grammar.json_schema({"type": "array", "uniqueItems": True})


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex(r"[^\s\S]"),
        Grammar.regex(r"[^\s\S]a"),
        Grammar.lark("start: <[0]>"),
    ],
)
def test_a_grammar_that_admits_nothing(tiny, grammar, capfd):
    with pytest.raises(ValueError, match="grammar"):
        tiny.compile(grammar, [STOP])
    assert capfd.readouterr() == ("", "")


def test_special_tokens_are_not_text(tiny):
    with pytest.raises(ValueError, match="special token"):
        tiny.compile(Grammar.lark("start: <[0]> <|mask|>"), [STOP])


def test_a_grammar_that_the_tokens_cannot_write():
    vocabulary = GrammarVocabulary(make_tiny_tokenizer(drop="xĊ"), TINY_SIZE)  # neither x nor a line feed
    assert not vocabulary.is_byte_complete
    for pattern in ("x", "ax", "a(b|c)?x", "[abc]{3}\n"):
        with pytest.raises(ValueError, match="no text that this model's tokens can write"):
            vocabulary.compile(Grammar.regex(pattern), [STOP])
    state = vocabulary.compile(Grammar.regex("axx|ab"), [STOP]).start()
    a, b, c = (vocabulary.token_bytes.index(x) for x in (b"a", b"b", b"c"))
    state.advance([a, b])
    assert state.must_stop
    dead = vocabulary.compile(Grammar.regex("cx|ab"), [STOP]).start()
    # A dead end inside a tree: its row is empty, and the visit goes on.
    rows, alive = dead.walk([9, c, a, b, a], [-1, 0, 0, 2, 1], 5)
    assert alive.tolist() == [True, True, True, True, False]
    assert not rows[1].any() and rows[2].any() and rows[3][STOP] == 1
    dead.advance([c])
    assert dead.is_dead and not dead.must_stop and not dead.root_row().any()


@pytest.mark.parametrize(
    "pattern",
    ["(a*)*b", "(x+x+)+y", "(a|b)*a(a|b){20}", ".*a.{300}b", "(((a{1,1000}){1,1000}){1,1000}){1,1000}", ".{100000}",
     r"[\p{L}\p{N}]{1,500}[^\p{L}]{3,40}x", "((.*a.{12})|(.*b.{13})|(.*c.{14})){3}"],
)  # fmt: skip
def test_patterns_that_make_other_matchers_blow_up(tiny, pattern, capfd):
    """Each step is bounded: it gives a row, or a ValueError and the state before it."""
    started = time.monotonic()
    state = tiny.compile(Grammar.regex(pattern), [STOP]).start()
    ids = {b: i for i, b in enumerate(tiny.token_bytes)}
    for step in range(40):
        row = state.root_row()
        options = [ids[b] for b in (b"a", b"x", b"b", b"c", b"ab") if row[ids[b] >> 5] >> (ids[b] & 31) & 1]
        if not options:
            break
        try:
            state.advance([options[step % len(options)]])
            state.walk([options[step % len(options)], *options], [-1] + [0] * len(options), 1 + len(options))
        except ValueError as error:
            assert str(error).startswith("grammar: too complex")
            break
    assert time.monotonic() - started < SECONDS
    assert capfd.readouterr() == ("", "")


def test_a_step_over_the_limits_leaves_the_state_before_it(tiny):
    """5,000 optional properties: the parser's limit is met behind the first brace."""
    properties = {f"k{i}": {"type": "null"} for i in range(3000)}
    grammar = Grammar.json_schema({"type": "object", "properties": properties, "additionalProperties": False})
    state = tiny.compile(grammar, [STOP]).start()
    row, brace = state.root_row(), tiny.token_bytes.index(b"{")
    for _ in range(2):
        with pytest.raises(ValueError, match="too complex"):
            state.walk([9, brace, brace], [-1, 0, 1], 3)
        with pytest.raises(ValueError, match="too complex"):
            state.advance([brace])
            state.root_row()
        assert (state.root_row() == row).all()


def test_long_chains_of_rules_do_not_end_the_process():
    """Deep recursion inside the library would be a crash, so in a process of its own."""
    count = 7000
    text = "start: r0\n" + "\n".join(f"r{i}:r{i + 1}" for i in range(count)) + f'\nr{count}: "b"'
    assert len(text) < MAX_GRAMMAR_BYTES
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from ddtree_jax.grammar import *; from ddtree_jax.engine import "
        "demo_folder; from ddtree_jax.tokenizer import Tokenizer\n"
        "v = GrammarVocabulary(Tokenizer.from_folder(demo_folder() / 'target'), 2048)\n"
        "try:\n    s = v.compile(Grammar.lark(sys.stdin.read()), [0]).start(); s.copy().advance([s.root_row().nonzero()"
        "[0][0] * 0 + v.token_bytes.index(b'b')]); print('compiled')\n"
        "except ValueError as e:\n    print('refused', e)"
    )
    folder = str(__import__("pathlib").Path(ddtree_jax.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", program, folder], input=text, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stderr == "" and done.stdout.split()[0] in ("compiled", "refused"), done


def test_stop_tokens(tiny):
    grammar = Grammar.regex("a")
    for stops in ([], [-1], [TINY_SIZE]):
        with pytest.raises(ValueError, match="stop_token_ids"):
            tiny.compile(grammar, stops)
    with pytest.raises(ValueError, match="allowed is a ddtree_jax.Grammar"):
        tiny.compile("a", [STOP])
    with pytest.raises(ValueError, match="vocab_size"):
        GrammarVocabulary(make_tiny_tokenizer(), 10)


def test_equal_by_content():
    assert Grammar.choices(["a", "b"]) == Grammar.choices(("a", "b", "a"))
    assert hash(Grammar.json_schema({"type": "null"})) == hash(Grammar.json_schema('{ "type": "null" }'))
    assert Grammar.json_schema({}) != Grammar.json_schema({}, compact=True)
    assert len({Grammar.regex("a"), Grammar.lark('start: "a"'), Grammar.regex("a")}) == 2


def test_without_the_library(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "llguidance":
            raise ImportError("No module named 'llguidance'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedRequestError, match=r"pip install 'ddtree-jax\[grammar\]'"):
        Grammar.regex("a")


def test_a_number_too_long_to_write_is_named():
    with pytest.raises(ValueError, match="^grammar json_schema: can not be written as JSON"):
        Grammar.json_schema({"const": 10**5000})
