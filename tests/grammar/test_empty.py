"""Which grammars have no finite text: certain answers only."""

import pytest

from ddtree_jax.grammar import Grammar
from ddtree_jax.grammar_empty import lark_admits_nothing, schema_admits_nothing

from .grammars import LARK, SCHEMAS


def _needs(schema, **more):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


_LOOP = {"$defs": {"x": _needs({"$ref": "#/$defs/y"}), "y": _needs({"$ref": "#/$defs/x"})}}
ENDLESS_SCHEMAS = [
    {"$ref": "#"},
    False,
    _needs({"$ref": "#"}),
    {**_LOOP, "$ref": "#/$defs/x"},
    {**_LOOP, "anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]},
    {**_LOOP, "type": "array", "items": {"$ref": "#/$defs/y"}, "minItems": 1},
    {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    {"allOf": [{"type": "object"}, {"$ref": "#"}]},
]
FINITE_SCHEMAS = [
    {**_needs({"$ref": "#"}), "required": []},
    {**_needs({"$ref": "#"}), "type": ["object", "null"]},
    {"anyOf": [_needs({"$ref": "#"}), {"type": "null"}]},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": _needs({"$ref": "#/$defs/leaf"}), "leaf": {"type": "null"}}},
    {"$ref": "elsewhere"},
    *SCHEMAS.values(),
]
ENDLESS_LARK = [
    'start: "a" start',
    "start: a\na: b\nb: a",
    'start: (x | "q" y) "z"?\nx: start+\ny: "b" x{3}',
    'start: a | b // "c"\na: "|" a\nb: /|/ b',
    "start: start start",
]
FINITE_LARK = [
    'start: "a" start | "b"',
    "start: start*",
    'start: "x" start?',
    "start: a{0,3}\na: a",
    'start: | "a" start',
    'start: a\na: "(" a ")"\n | ""',
    "start: A start2\nstart2: A\nA: /x/",
    "start: %json {} start",  # not understood
    "start: other::thing start",
    *(text for text, _ in LARK.values()),
]


@pytest.mark.parametrize("schema", ENDLESS_SCHEMAS)
def test_schemas_without_end(schema):
    assert schema_admits_nothing(schema)
    if isinstance(schema, dict):
        with pytest.raises(ValueError, match="grammar json_schema"):
            Grammar.json_schema(schema)


@pytest.mark.parametrize("schema", FINITE_SCHEMAS)
def test_schemas_with_an_end(schema):
    assert not schema_admits_nothing(schema)


@pytest.mark.parametrize("text", ENDLESS_LARK)
def test_lark_without_end(text):
    assert lark_admits_nothing(text)
    with pytest.raises(ValueError, match="grammar lark"):
        Grammar.lark(text)


@pytest.mark.parametrize("text", FINITE_LARK)
def test_lark_with_an_end(text):
    assert not lark_admits_nothing(text)


def test_long_chains_of_rules_take_no_time():
    forward = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(8000))
    assert not lark_admits_nothing(forward + '\nr8000: "a"')
    assert lark_admits_nothing(forward + "\nr8000: start")
    assert not lark_admits_nothing("start: " + " ".join(f"r{i}" for i in range(4000)) + "\n"
                                   + "\n".join(f'r{i}: "a"' for i in range(4000)))  # fmt: skip
