"""Grammars without a single finite text, which a matcher can not tell from others: it would run for ever.

`start: "a" start`, or a schema whose required property is the schema itself: every step has a next one and none is the
last. Both checks answer True only where that is certain; what they do not understand counts as having texts.
"""

from __future__ import annotations

import re
from typing import Any

_UNKNOWN = object()
# Bounds on the work; what is not settled within them counts as not understood.
_MAX_PASSES = 100
_MAX_LARK_STEPS = 2_000_000


def schema_admits_nothing(schema: Any) -> bool:
    """True if no finite JSON text satisfies a schema, because of `$ref` cycles through what it requires.

    Args:
      schema: parsed JSON, not nested deeper than the interpreter can recurse.
    """
    # The least fixed point: a reference has no text until one is found that does not need it.
    admits: dict[str, bool] = {}
    for _ in range(_MAX_PASSES):
        before = dict(admits)
        if _schema_admits(schema, admits):
            return False
        for reference in list(admits):
            target = _resolve(schema, reference)
            admits[reference] = admits[reference] or target is _UNKNOWN or _schema_admits(target, admits)
        if admits == before:
            return True
    return False


def _schema_admits(schema: Any, admits: dict[str, bool]) -> bool:
    """If a schema has a text, given which references have; references met for the first time are entered as False."""
    if not isinstance(schema, dict):
        return schema is not False
    parts = []
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(admits.setdefault(reference, False))
    for every in _list(schema.get("allOf")):
        parts.append(_schema_admits(every, admits))
    for keyword in ("anyOf", "oneOf"):
        if options := _list(schema.get(keyword)):
            # A list, not a generator: every reference must be entered.
            parts.append(any([_schema_admits(option, admits) for option in options]))
    if schema.get("type") == "object" and isinstance(properties := schema.get("properties"), dict):
        parts += [
            _schema_admits(properties[name], admits) for name in _list(schema.get("required")) if name in properties
        ]
    least = schema.get("minItems", 0)
    if schema.get("type") == "array" and isinstance(least, int) and least > 0:
        first = _list(schema.get("prefixItems"))
        parts += [_schema_admits(item, admits) for item in first[:least]]
        if least > len(first):
            parts.append(_schema_admits(schema.get("items", True), admits))
    return all(parts)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(schema: Any, reference: str) -> Any:
    if reference == "#":
        return schema
    if not reference.startswith("#/") or "%" in reference:
        return _UNKNOWN
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or part not in schema:
            return _UNKNOWN
        schema = schema[part]
    return schema


# Of a Lark text: comments, terminals of any spelling (none of which refers to a rule), names, and what joins them.
_LARK_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*|\#[^\n]*)
      | (?P<newline>\n)
      | (?P<terminal>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\n]*>)
      | (?P<name>[A-Za-z_][A-Za-z_0-9]*)
      | (?P<repeat>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[*+?])
      | (?P<sign>[():|])""",
    re.VERBOSE,
)


def lark_admits_nothing(text: str) -> bool:
    """True if the rule `start` of a Lark text has no finite text. Only plain rules are understood."""
    rules = _lark_rules(text)
    if rules is None or "start" not in rules:
        return False
    users: dict[str, list[str]] = {}
    for name, body in rules.items():
        for used in {word for kind, word in body if kind == "name"}:
            users.setdefault(used, []).append(name)
    admits: set[str] = set()
    waiting, left = list(rules), _MAX_LARK_STEPS
    while waiting:
        name = waiting.pop()
        if name in admits:
            continue
        left -= 1 + len(rules[name])
        found, end = _alternatives(rules[name], 0, rules, admits)
        if end != len(rules[name]) or left < 0:
            return False
        if found:
            admits.add(name)
            waiting.extend(users.get(name, ()))
    return "start" not in admits


def _lark_rules(text: str) -> dict[str, list[tuple[str, str]]] | None:
    """Rule name -> its tokens; None for anything beyond rules, terminals, groups, alternatives and repeats."""
    tokens, at = [], 0
    while at < len(text):
        match = _LARK_TOKEN.match(text, at)
        if match is None:
            return None
        if match.lastgroup != "skip":
            tokens.append((match.lastgroup, match.group()))
        at = match.end()
    rules: dict[str, list[tuple[str, str]]] = {}
    body: list[tuple[str, str]] | None = None
    for n, (kind, word) in enumerate(tokens):
        if kind == "name" and tokens[n + 1 : n + 2] == [("sign", ":")]:
            if word in rules or (n and tokens[n - 1][0] != "newline"):
                return None
            body = rules[word] = []
        elif (kind, word) == ("sign", ":"):
            if not n or tokens[n - 1][0] != "name":
                return None
        elif kind != "newline":
            if body is None:
                return None
            body.append((kind, word))
    return rules


def _alternatives(body: list, at: int, rules: dict, admits: set[str], depth: int = 0) -> tuple[bool, int]:
    """(if one of the alternatives from `at` on has a text, place of what ends them)."""
    found, here = False, True
    while at < len(body):
        kind, word = body[at]
        if word == ")" and kind == "sign":
            break
        if word == "|" and kind == "sign":
            found, here, at = found or here, True, at + 1
            continue
        if word == "(" and kind == "sign":
            if depth > 100:
                return True, -1  # not understood
            item, at = _alternatives(body, at + 1, rules, admits, depth + 1)
            if at < 0 or at >= len(body):
                return True, -1
        elif kind == "name":
            item = word in admits or word not in rules
        elif kind == "terminal":
            item = True
        else:
            return True, -1
        at += 1
        while at < len(body) and body[at][0] == "repeat":
            # `*`, `?` and every count but a plain number may stand for no repetition at all, or is taken to.
            item = item or not (body[at][1] == "+" or re.fullmatch(r"[{~]\s*[1-9]\d*\s*\}?", body[at][1]))
            at += 1
        here = here and item
    return found or here, at
