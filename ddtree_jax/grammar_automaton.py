"""Small grammars as tables over tokens: next state and allowed tokens, without a matcher. Host only; arrays of numpy.

With the tables on a device, the rows of a whole tree are gathers: state of a child = next_state[state of its parent,
class_of[token]], row = allowed[state].
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from ddtree_jax import grammar_bytes
from ddtree_jax.grammar import CompiledGrammar

NO_STATE = -1
_MAX_BYTE_STATES = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """Deterministic over tokens; equal to the matcher on every path.

    Tokens that lead to the same place from every state share a class. State 0 is the start, the last state is that
    after a stop token.

    Attributes:
      class_of: int32[V]; class 0 is that of tokens that are never allowed.
      next_state: int32[S, C], NO_STATE where a token is not allowed.
      allowed: int32[S, W], the row of each state.
      accepting: bool[S], if a stop token is allowed.
    """

    class_of: np.ndarray
    next_state: np.ndarray
    allowed: np.ndarray
    accepting: np.ndarray

    @property
    def num_states(self) -> int:
        return self.next_state.shape[0]

    def step(self, state: int, token_id: int) -> int:
        """The next state, or NO_STATE."""
        return int(self.next_state[state, self.class_of[token_id]])


def token_automaton(
    compiled: CompiledGrammar, *, max_states: int = 256, max_steps: int = 2_000_000
) -> TokenAutomaton | None:
    """Returns a grammar's table, or None where it has none within the limits.

    Choices have one, and patterns of characters, `.`, plain classes, groups, alternatives and counts. Other grammars
    have none: a matcher does not tell which of its states are the same.

    Args:
      compiled: the grammar and its vocabulary.
      max_states: states over tokens, the one after a stop token included.
      max_steps: token-trie edges to look at; a state that allows nearly all of 155,000 tokens takes some 400,000.
    """
    kind, text = compiled.grammar.kind, compiled.grammar.text
    try:
        if kind == "choices":
            automaton = grammar_bytes.of_choices(json.loads(text), _MAX_BYTE_STATES)
        elif kind == "regex":
            automaton = grammar_bytes.of_pattern(text, _MAX_BYTE_STATES)
        else:
            return None
    except grammar_bytes.NotRead:
        return None

    vocabulary = compiled.vocabulary
    stops = list(compiled.stop_token_ids)
    index, order = {0: 0}, [0]  # byte state -> token state; token states in the order they are found
    moves: list[dict[int, int]] = []  # per token state: token -> token state
    steps = 0
    while len(moves) < len(order):
        move: dict[int, int] = {}
        todo = [(vocabulary.byte_trie, order[len(moves)])]
        while todo:
            node, state = todo.pop()
            edges = automaton.edges[state]
            branches = node.branches
            # The shorter side is looked through: a state may allow one byte of a node's two hundred, or the reverse.
            for byte in edges if len(edges) < len(branches) else branches:
                steps += 1
                if byte not in edges or byte not in branches:
                    continue
                below, target = branches[byte], edges[byte]
                todo.append((below, target))
                for token in below.tokens:
                    if token not in compiled.stop_token_ids:
                        if target not in index:
                            index[target] = len(order)
                            order.append(target)
                        move[token] = index[target]
            if steps > max_steps or len(order) >= max_states:
                return None
        moves.append(move)

    stopped = len(order)
    accepting = [automaton.accepting[state] for state in order] + [True]
    moves.append({})
    ways: dict[int, list[tuple[int, int]]] = {}
    for state, move in enumerate(moves):
        ends = dict.fromkeys(stops, stopped) if accepting[state] else {}
        for token, target in sorted({**move, **ends}.items()):
            ways.setdefault(token, []).append((state, target))
    classes: dict[tuple[tuple[int, int], ...], int] = {(): 0}
    class_of = np.zeros((vocabulary.vocab_size,), np.int32)
    allowed = np.zeros((len(moves), vocabulary.num_words), np.int32)
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
    for token, way in ways.items():
        class_of[token] = classes.setdefault(tuple(way), len(classes))
        for state, _ in way:
            allowed[state, token >> 5] |= bits[token & 31]
    next_state = np.full((len(moves), len(classes)), NO_STATE, np.int32)
    for way, column in classes.items():
        for state, target in way:
            next_state[state, column] = target
    return TokenAutomaton(class_of, next_state, allowed, np.array(accepting, bool))
