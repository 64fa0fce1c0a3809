"""Byte automata of the grammars that are small enough to be one: choices, and a part of regular expressions.

A state of such an automaton stands for all texts with the same continuations, which is what a table needs and what a
matcher does not tell. Patterns are read here a second time, so only what is certain to mean the same to the matcher is
read: characters, `.`, plain classes, groups, alternatives and counts. For the rest there is no automaton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

_MAX_CODE = 0x10FFFF
_MAX_NFA = 20_000
_MAX_WORK = 3_000_000  # edges and nodes looked at while states are made
# Ranges of characters whose UTF-8 has one length; surrogates are no characters.
_LENGTHS = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, _MAX_CODE))


class NotRead(Exception):
    """A pattern beyond what is read here, or an automaton beyond its limit."""


@dataclasses.dataclass(frozen=True)
class ByteAutomaton:
    """Deterministic; state 0 is the start; every state can still reach an accepting one.

    Attributes:
      edges: for each state, byte -> next state.
      accepting: for each state, if the text may end there.
    """

    edges: tuple[dict[int, int], ...]
    accepting: tuple[bool, ...]


def of_choices(choices: list[str], max_states: int) -> ByteAutomaton:
    """The trie of the choices."""
    edges: list[dict[int, int]] = [{}]
    ends = set()
    for choice in choices:
        state = 0
        for byte in choice.encode("utf-8"):
            if byte not in edges[state]:
                if len(edges) >= max_states:
                    raise NotRead(f"more than {max_states} states")
                edges[state][byte] = len(edges)
                edges.append({})
            state = edges[state][byte]
        ends.add(state)
    return _merged(edges, [state in ends for state in range(len(edges))])


def of_pattern(pattern: str, max_states: int) -> ByteAutomaton:
    """The subset automaton of a pattern."""
    nfa = _Nfa()
    reader = _Reader(pattern, nfa)
    start, end = reader.alternatives(0)
    if reader.at != len(pattern):
        raise NotRead("an unopened )")
    index: dict[frozenset[int], int] = {}
    edges: list[dict[int, int]] = []
    todo: list[frozenset[int]] = []

    def state_of(nodes: frozenset[int]) -> int:
        closed = nfa.closure(nodes)
        if closed not in index:
            if len(index) >= max_states:
                raise NotRead(f"more than {max_states} states")
            index[closed] = len(index)
            edges.append({})
            todo.append(closed)
        return index[closed]

    state_of(frozenset([start]))
    work = 0
    while todo:
        nodes = todo.pop()
        targets: dict[int, set[int]] = {}
        work += len(nodes)
        for node in nodes:
            for low, high, target in nfa.ranges[node]:
                work += 1 + high - low
                for byte in range(low, high + 1):
                    targets.setdefault(byte, set()).add(target)
        if work + sum(map(len, targets.values())) > _MAX_WORK:
            raise NotRead("too large")
        edges[index[nodes]] = {byte: state_of(frozenset(targets[byte])) for byte in sorted(targets)}
    return _merged(edges, [end in nodes for nodes in index])


def _merged(edges: list[dict[int, int]], accepting: list[bool]) -> ByteAutomaton:
    """States with the same continuations made one, the start first: classes are split until none differ within."""
    block_of = [int(a) for a in accepting]
    work = 0
    while True:
        work += len(edges) + sum(map(len, edges))
        if work > _MAX_WORK:  # long chains of states take as many passes; unmerged is larger, not wrong
            return ByteAutomaton(tuple(edges), tuple(accepting))
        number: dict[tuple, int] = {}
        refined = []
        for state, edge in enumerate(edges):
            key = block_of[state], tuple((byte, block_of[edge[byte]]) for byte in sorted(edge))
            refined.append(number.setdefault(key, len(number)))
        done = len(number) == len(set(block_of))
        block_of = refined
        if done:
            break
    first = {block: state for state, block in reversed(list(enumerate(block_of)))}
    merged = [{byte: block_of[t] for byte, t in edges[first[block]].items()} for block in range(len(first))]
    return ByteAutomaton(tuple(merged), tuple(accepting[first[block]] for block in range(len(first))))


class TrieNode:
    """Byte -> node, and the tokens that are spelled by the way here."""

    __slots__ = ("branches", "tokens")

    def __init__(self):
        self.branches: dict[int, TrieNode] = {}
        self.tokens: list[int] = []


def trie(token_bytes: Sequence[bytes]) -> TrieNode:
    """The spellings of a vocabulary; tokens without bytes are left out."""
    root = TrieNode()
    for token, spelling in enumerate(token_bytes):
        node = root
        for byte in spelling:
            if byte not in node.branches:
                node.branches[byte] = TrieNode()
            node = node.branches[byte]
        if spelling:
            node.tokens.append(token)
    return root


class _Nfa:
    """Nodes with empty edges and byte ranges; every node is made on a way from a start to an end."""

    def __init__(self):
        self.empty: list[list[int]] = []
        self.ranges: list[list[tuple[int, int, int]]] = []

    def node(self) -> int:
        if len(self.empty) >= _MAX_NFA:
            raise NotRead("too large")
        self.empty.append([])
        self.ranges.append([])
        return len(self.empty) - 1

    def closure(self, nodes: frozenset[int]) -> frozenset[int]:
        seen, todo = set(nodes), list(nodes)
        while todo:
            for target in self.empty[todo.pop()]:
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return frozenset(seen)

    def characters(self, ranges: list[tuple[int, int]]) -> tuple[int, int]:
        start, end = self.node(), self.node()
        found = False
        for low, high in ranges:
            for sequence in _utf8_ranges(low, high):
                found, here = True, start
                for n, (first, last) in enumerate(sequence):
                    target = end if n == len(sequence) - 1 else self.node()
                    self.ranges[here].append((first, last, target))
                    here = target
        if not found:
            raise NotRead("an empty class")
        return start, end


def _utf8_ranges(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Sequences of byte ranges that spell exactly the characters low..high."""
    for first, last in _LENGTHS:
        todo = [(max(low, first), min(high, last))]
        while todo:
            a, b = todo.pop()
            if a > b:
                continue
            for n in (1, 2, 3):
                ones = (1 << 6 * n) - 1
                if b < 0x80 or a & ~ones == b & ~ones:
                    continue
                # Blocks that differ above their last n bytes must be whole in those.
                if a & ones:
                    todo += [(a, a | ones), ((a | ones) + 1, b)]
                    break
                if b & ones != ones:
                    todo += [(a, (b & ~ones) - 1), (b & ~ones, b)]
                    break
            else:
                yield list(zip(chr(a).encode(), chr(b).encode(), strict=True))


class _Reader:
    """A recursive descent over the pattern that builds the automaton as it goes."""

    def __init__(self, pattern: str, nfa: _Nfa):
        self.pattern, self.nfa, self.at = pattern, nfa, 0

    def _peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def _take(self) -> str:
        if self.at >= len(self.pattern):
            raise NotRead("an early end")
        self.at += 1
        return self.pattern[self.at - 1]

    def alternatives(self, depth: int) -> tuple[int, int]:
        if depth > 50:
            raise NotRead("too deep")
        start, end = self.nfa.node(), self.nfa.node()
        while True:
            first = last = self.nfa.node()
            while self._peek() not in ("", "|", ")"):
                one, other = self._repeated(depth)
                self.nfa.empty[last].append(one)
                last = other
            self.nfa.empty[start].append(first)
            self.nfa.empty[last].append(end)
            if self._peek() != "|":
                return start, end
            self.at += 1

    def _repeated(self, depth: int) -> tuple[int, int]:
        begin = self.at
        made = self._atom(depth)
        after = self.at
        least, most = self._count()
        if (least, most) == (1, 1):
            return made
        if self._peek() in ("*", "+", "?", "{") and self._peek():
            raise NotRead("a count of a count, or a lazy one")
        # Each copy is read anew: nodes can not be shared between them.
        resume = self.at
        start = last = self.nfa.node()
        end = self.nfa.node()
        for n in range(least if most is None else most):
            if n >= least:
                self.nfa.empty[last].append(end)
            one, other = made if n == 0 else self._again(begin, after, depth)
            self.nfa.empty[last].append(one)
            last = other
        if most is None:
            one, other = made if least == 0 else self._again(begin, after, depth)
            hub = self.nfa.node()
            self.nfa.empty[last].append(hub)
            self.nfa.empty[hub].append(one)
            self.nfa.empty[other].append(hub)
            last = hub
        self.nfa.empty[last].append(end)
        self.at = resume
        return start, end

    def _again(self, begin: int, after: int, depth: int) -> tuple[int, int]:
        self.at = begin
        made = self._atom(depth)
        assert self.at == after
        return made

    def _count(self) -> tuple[int, int | None]:
        sign = self._peek()
        if sign in ("*", "+", "?") and sign:
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        if sign != "{":
            return 1, 1
        close = self.pattern.find("}", self.at)
        parts = self.pattern[self.at + 1 : close].split(",") if close > 0 else []
        if not 1 <= len(parts) <= 2 or not all(
            p.isascii() and p.isdigit() for p in (parts if parts[-1] else parts[:1])
        ):
            raise NotRead("a count")
        self.at = close + 1
        least = int(parts[0])
        most = least if len(parts) == 1 else int(parts[1]) if parts[1] else None
        # {1} and {0} are counts too, but a plain one needs no copy and none at all no node.
        if max(least, most or 0) > 1000 or (most is not None and (most < least or most == 0)):
            raise NotRead("a count")
        return least, most

    def _atom(self, depth: int) -> tuple[int, int]:
        sign = self._take()
        if sign == "(":
            if self._peek() == "?":
                if self.pattern[self.at : self.at + 2] != "?:":
                    raise NotRead("a special group")
                self.at += 2
            made = self.alternatives(depth + 1)
            if self._take() != ")":
                raise NotRead("an open group")
            return made
        if sign == "[":
            return self.nfa.characters(self._class())
        if sign == ".":
            return self.nfa.characters([(0, 9), (11, _MAX_CODE)])
        if sign in "^$*+?{}])|":
            raise NotRead(f"{sign} as an item")
        code = ord(self._escaped() if sign == "\\" else sign)
        return self.nfa.characters([(code, code)])

    def _escaped(self) -> str:
        sign = self._take()
        if sign in "ntr":
            return {"n": "\n", "t": "\t", "r": "\r"}[sign]
        if sign in r"\.+*?()|[]{}^$-/":
            return sign
        raise NotRead(f"the escape {sign}")

    def _class(self) -> list[tuple[int, int]]:
        negated = self._peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = self._class_character()
            high = low
            if self._peek() == "-":
                self.at += 1
                high = self._class_character()
            if high < low:
                raise NotRead("a range from high to low")
            ranges.append((low, high))
        self.at += 1
        if not ranges:
            raise NotRead("an empty class")
        if not negated:
            return ranges
        outside, start = [], 0
        for low, high in sorted(ranges):
            outside.append((start, low - 1))
            start = max(start, high + 1)
        return [(a, b) for a, b in [*outside, (start, _MAX_CODE)] if a <= b]

    def _class_character(self) -> int:
        sign = self._take()
        # Signs that some dialect gives a meaning inside a class.
        if sign in "[]-^&~":
            raise NotRead(f"{sign} in a class")
        return ord(self._escaped() if sign == "\\" else sign)
