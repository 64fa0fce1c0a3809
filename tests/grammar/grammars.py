"""Grammars of many kinds, each with a check that knows nothing of the library under test."""

import json
import re
from typing import Any

import jsonschema

from ddtree_jax.grammar import Grammar


def _object(required=None, **properties) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


_TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": _object(["v"], v={"type": "boolean"}, kids={"type": "array", "items": {"$ref": "#/$defs/node"}})},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "anything": {},
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "integer range": {"type": "integer", "minimum": -17, "maximum": 2345},
    "integer open range": {"type": "integer", "exclusiveMinimum": 8, "exclusiveMaximum": 11},
    "number range": {"type": "number", "minimum": 0.25, "maximum": 1.5},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 7},
    "string": {"type": "string"},
    "string length": {"type": "string", "minLength": 2, "maxLength": 5},
    "string pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "string pattern unanchored": {"type": "string", "pattern": "ab+c", "maxLength": 9},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1, "é"]}]},
    "const": {"const": {"k": 'a "quoted" \\ text\n'}},
    "object": _object(a={"type": "integer"}, b={"type": "string", "maxLength": 4}),
    "optional": _object([], a={"type": "integer"}, b={"type": "null"}, c={"type": "boolean"}),
    "open object": {"type": "object", "additionalProperties": {"type": "integer"}},
    "mixed object": {**_object(a={"type": "boolean"}), "additionalProperties": {"type": "null"}},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x_": {"type": "integer"}},
        "additionalProperties": False,
    },
    "nested": _object(p=_object(q=_object(r={"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}))),
    "array bounds": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "null"}, {"const": "x"}], "items": False, "minItems": 2},
    "union types": {"type": ["null", "boolean", "integer"]},
    "any of": {"anyOf": [_object(t={"const": "a"}, n={"type": "integer"}), _object(t={"const": "b"})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "recursive": _TREE,
    "unicode keys": _object(**{"ключ": {"enum": ["да", "нет", "🙂"]}}),
}
REGEXES = {
    "literal": "hello, world",
    "alternatives": "(yes|no|maybe so)!?",
    "digits": "[0-9]{3}-[0-9]{2,4}",
    "loop": "(ab|ac)*d",
    "word": r"[A-Za-z_]\w{0,8}",
    "unicode digits": r"\d{1,3}",
    "unicode class": "[α-ω]{2,5}",
    "any characters": ".{3,6}",
    "not quote": '"[^"\\\\]{0,6}"',
    "case": "(?i:abc)x",
    "emoji": "(🙂|🙃|é|ß)+",
    "lines": r"(a\n|b\t){1,3}",
    "empty or more": "(aa)*",
}
CHOICES = {
    "plain choices": ["yes", "no", "not sure"],
    "prefixes": ["a", "ab", "abc", "abcd"],
    "awkward": ['"', "\\", "\n", "a/b", "é🙂", "<mask>", "| b", "\x00\x7f", ""],
}


def _is_sum(text: str) -> bool:
    if not re.fullmatch(r"[0-9+*()]+", text) or re.search(r"(?<![0-9])0[0-9]", text):
        return False
    try:
        return isinstance(eval(text, {"__builtins__": {}}), int)  # digits, signs and brackets alone
    except (SyntaxError, TypeError):
        return False


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 1000)
        if not 0 <= depth < 1000:
            return False
    return depth == 0


LARK = {
    "sum": ('start: term ("+" term)*\nterm: atom ("*" atom)*\natom: /[1-9][0-9]?/ | "(" start ")"', _is_sum),
    "balanced": ('start: ("(" start ")")*', _is_balanced),
    "palindrome": ('start: "a" start "a" | "b" start "b" | "c"', lambda t: t == t[::-1] and t.count("c") == 1),
    "thought": (
        'start: /[a-z ]*/ "</think>" "{" /[ab]*/ "}"',
        lambda t: re.fullmatch(r"[a-z ]*</think>\{[ab]*\}", t) is not None,
    ),
}


def _json_check(schema):
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())

    def check(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    return check


CASES = {
    **{f"json {name}": (Grammar.json_schema(schema), _json_check(schema)) for name, schema in SCHEMAS.items()},
    "json compact": (Grammar.json_schema(SCHEMAS["nested"], compact=True), _json_check(SCHEMAS["nested"])),
    **{
        f"regex {name}": (Grammar.regex(p), lambda text, p=p: re.fullmatch(p, text) is not None)
        for name, p in REGEXES.items()
    },
    **{f"choices {name}": (Grammar.choices(c), lambda text, c=c: text in c) for name, c in CHOICES.items()},
    **{f"lark {name}": (Grammar.lark(text), check) for name, (text, check) in LARK.items()},
}
