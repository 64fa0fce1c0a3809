"""The state of one sequence under a grammar: what it may emit next, and after every node of a draft tree. Host only.

The rules kept here, by their numbers in the tests: the persistent matcher moves by emitted tokens only (G3); every
visit of a tree is undone (G4); ids outside the tokenizer are never allowed (G5); after a stop token only stop tokens
are allowed (G6); a token is alive below a node exactly if the node's row allows it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from ddtree_jax.errors import InvariantError
from ddtree_jax.grammar import CompiledGrammar, library_message

_T = TypeVar("_T")


class _LimitReached(ValueError):
    """The library gave up, and the matcher that it happened to is of no more use."""

    def __init__(self, error: str):
        # The parser's limits are for one step, those of the lexer for all that copies of a template ever did.
        self.is_worn = "parser error" not in error.lower()
        super().__init__(f"grammar: too complex at this place of the text: {library_message(error)}")


class SequenceGrammar:
    """Where one sequence stands. `advance` moves it; everything else leaves it as it was.

    Not for use by several threads at once. Methods raise ValueError where the grammar exceeds the library's limits at
    this place (an ambiguous or very large grammar); the state is then the one before the call.
    """

    def __init__(self, compiled: CompiledGrammar):
        self.compiled = compiled
        self._template = compiled.vocabulary.template(compiled.grammar)
        self._matcher = self._template.deep_copy()
        self._emitted: list[int] = []  # text tokens
        self._finished = False
        self._last: int | None = None
        self._num_words = compiled.vocabulary.num_words
        # The library's row has one bit more than the model has tokens: its own end.
        self._buffer_words = -(-(compiled.vocabulary.vocab_size + 1) // 32)
        self._text_words = compiled.text_words
        self._stop_words = compiled.stop_words
        self._stops = frozenset(compiled.stop_token_ids)
        self._root: tuple[np.ndarray, bool] | None = None

    def _place(self) -> tuple[int, bool]:
        """Changes with every move that changes what is allowed."""
        return len(self._emitted), self._finished

    def copy(self) -> SequenceGrammar:
        """Returns an independent state at the same place."""
        other = SequenceGrammar.__new__(SequenceGrammar)
        other.__dict__.update(self.__dict__)
        other._matcher = self._matcher.deep_copy()
        other._emitted = list(self._emitted)
        return other

    # --- the persistent state -------------------------------------------------------------------------------------

    def advance(self, token_ids: Iterable[int]) -> None:
        """Moves by emitted tokens, in order: through the first stop token, after which only stop tokens may follow.

        Raises:
          InvariantError: a token that the row before it does not allow: the round broke the grammar. Nothing moved.
        """
        tokens = [operator.index(token) for token in token_ids]
        self.recovering(lambda: self._advance(tokens))

    def _advance(self, tokens: list[int]) -> None:
        consumed, finished = [], self._finished
        for token in tokens:
            if token in self._stops:
                allowed = finished or self._matcher.is_accepting()
                finished = True
            else:
                allowed = not finished and self._is_text(token) and self._consume(token)
                consumed += [token] * allowed
            if not allowed:
                if consumed:
                    self._matcher.rollback(len(consumed))
                raise InvariantError(f"token {token} was emitted and the grammar does not allow it there")
        self._emitted.extend(consumed)
        if consumed:
            self._root = None
        self._finished = finished
        if tokens:
            self._last = tokens[-1]

    def _consume(self, token: int) -> bool:
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        if self._matcher.is_error():
            raise _LimitReached(self._matcher.get_error())
        return False

    def recovering(self, call: Callable[[], _T]) -> _T:
        """Returns call(); where it meets a limit of the library, once more with a new matcher.

        A matcher in error never leaves it. The limit may also have been reached by other sequences of the same
        grammar (see `GrammarVocabulary.template`), which a new template ends.
        """
        try:
            return call()
        except _LimitReached as error:
            self._rebuild(worn=error.is_worn)
            if not error.is_worn:
                raise
        try:
            return call()
        except _LimitReached:
            self._rebuild(worn=True)
            raise

    def _rebuild(self, *, worn: bool) -> None:
        """A new matcher at the same place, from a new template where that of the old one has worn out."""
        if worn:
            self._template = self.compiled.vocabulary.template(self.compiled.grammar, worn=self._template)
        self._matcher = self._template.deep_copy()
        for token in self._emitted:
            if not self._consume(token):
                raise InvariantError("the grammar no longer accepts what it has accepted")

    @property
    def is_finished(self) -> bool:
        """A stop token has been emitted."""
        return self._finished

    @property
    def is_complete(self) -> bool:
        """The text so far is a text of the grammar: a stop token is allowed now."""
        return self._finished or self._root_state()[1]

    @property
    def must_stop(self) -> bool:
        """Nothing but a stop token is allowed now."""
        return self._finished or (self.is_complete and not np.any(self._root_state()[0] & self._text_words))

    @property
    def is_dead(self) -> bool:
        """Nothing is allowed now, not even a stop token: the vocabulary can not write what the grammar demands."""
        return not self.is_complete and not np.any(self._root_state()[0] & self._text_words)

    def root_row(self) -> np.ndarray:
        """int32[W]: the tokens allowed after everything emitted."""
        if self._finished:
            return self._stop_words.copy()
        words, accepting = self._root_state()
        row = words & self._text_words
        return row | self._stop_words if accepting else row

    def _root_state(self) -> tuple[np.ndarray, bool]:
        if self._root is None:
            words = np.zeros((self._buffer_words,), np.int32)
            accepting = self.recovering(lambda: self._fill(words))
            self._root = words[: self._num_words], accepting
        return self._root

    def _fill(self, words: np.ndarray) -> bool:
        """Writes the library's row of the matcher's place into int32[W'] words; returns if the text is complete.

        At a dead end `_matcher` is afterwards another one, at the place of the sequence itself.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            error = self._matcher.get_error()
            if not error.startswith("NoExtension"):
                raise _LimitReached(error)
            # No token of this vocabulary continues the text: an answer, but the library takes it for an error.
            words.fill(0)
            self._rebuild(worn=False)
            return False
        # The bit of the library's end is no answer: it is also set where the text can neither go on nor end.
        return self._matcher.is_accepting()

    def _is_text(self, token: int) -> bool:
        in_range = 0 <= token < self.compiled.vocabulary.vocab_size
        return in_range and bool(self._text_words[token >> 5] >> (token & 31) & 1)

    # --- a tree ---------------------------------------------------------------------------------------------------

    def walk(
        self, token_ids: Sequence[int] | np.ndarray, parents: Sequence[int] | np.ndarray, num_nodes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The row of every node of a draft tree, by one depth-first visit that is undone.

        Args:
          token_ids: int[N], slot 0 the root: the newest emitted token, which `advance` has already taken.
          parents: int[N], parents before children.
          num_nodes: valid slots, the root included, 1..N.

        Returns:
          (rows int32[N, W], alive bool[N]). A node is alive if each token of its path is allowed by the row before
          it; its row holds what is allowed after it (G2). The rows of dead nodes and of padding are all zero: no
          row above them allows their token, so the walk can not reach them (G7), and a program that reads one by
          mistake finds nothing to emit. A live stop token's row holds the stop tokens alone (G6).

        Raises:
          ValueError: arrays that are no tree.
          InvariantError: the root is not the newest token that `advance` took.
        """
        tokens, above = _as_ids(token_ids, "token_ids"), _as_ids(parents, "parents")
        slots, count = len(tokens), operator.index(num_nodes)
        if len(above) != slots or not 1 <= count <= slots:
            raise ValueError(f"num_nodes: got {count} with {slots} token_ids and {len(above)} parents")
        children: list[list[int]] = [[] for _ in range(count)]
        for node in range(1, count):
            if not 0 <= above[node] < node:
                raise ValueError(f"parents: got {above[node]} at slot {node}, allowed are slots before it")
            children[above[node]].append(node)
        if self._last is not None and tokens[0] != self._last:
            raise InvariantError(f"the tree's root is token {tokens[0]}, the grammar's newest token is {self._last}")

        def visit_all() -> tuple[np.ndarray, np.ndarray]:
            with Visit(self, slots) as visit:
                stack = [0]
                while stack:
                    node = stack.pop()
                    if node == 0 or visit.enter(node, above[node], tokens[node]):
                        # Reversed: the stack then gives the first child first, and each step goes down or back up.
                        stack.extend(reversed(children[node]))
                return visit.rows(), visit.alive

        return self.recovering(visit_all)

    def forced_tokens(self, max_tokens: int) -> list[int]:
        """The tokens that must come next, because at each step exactly one token is allowed; at most `max_tokens`.

        A stop token is never in the list. With tokens for single bytes and for longer pieces of one text there is
        often a choice of how to cut a text that is itself forced: see `suggested_tokens` for that.
        """

        def follow() -> list[int]:
            found: list[int] = []
            with Visit(self, max(0, operator.index(max_tokens)) + 1) as visit:
                while len(found) < max_tokens and (token := visit.only_token(len(found))) is not None:
                    visit.enter(len(found) + 1, len(found), token)
                    found.append(token)
            return found

        return self.recovering(follow)

    def suggested_tokens(self, max_tokens: int) -> list[int]:
        """The text that must come next in the tokenizer's own cut: live as a chain, and likely, but not the only way.

        Good to draft, wrong to emit unverified.
        """
        if self._finished or max_tokens <= 0:
            return []
        tokens = _forced_text(self._matcher)[:max_tokens]
        alive = self.walk([self._last or 0, *tokens], range(-1, len(tokens)), len(tokens) + 1)[1]
        return tokens[: int(np.sum(alive)) - 1]


class Candidates:
    """Tokens to look up together, row by row, in the rows of one sequence's slots: `Visit.allowed_of`."""

    def __init__(self, sequence: SequenceGrammar, token_ids: np.ndarray):
        """Takes int[L, K]; ids outside the vocabulary are never allowed."""
        in_range = (token_ids >= 0) & (token_ids < sequence.compiled.vocabulary.vocab_size)
        safe = np.where(in_range, token_ids, 0).astype(np.int64)
        bits = np.left_shift(in_range.astype(np.uint32), (safe & 31).astype(np.uint32)).view(np.int32)
        self.words = safe >> 5
        self.text_bits = bits & sequence._text_words[self.words]
        self.is_stop = bits & sequence._stop_words[self.words] != 0


class Visit:
    """An excursion of a sequence's matcher over tree slots, entered parents first; the end of `with` brings it home.

    Where the library meets a limit it raises; run the whole excursion under `SequenceGrammar.recovering`. A later
    `with` goes on with the same slots, as long as the sequence has not moved.

    Attributes:
      alive: bool[N], slots entered whose path is allowed; slot 0 from the start.
    """

    def __init__(self, sequence: SequenceGrammar, num_slots: int):
        self._sequence = sequence
        self._matcher = sequence._matcher
        self._place = sequence._place()
        self._words = np.zeros((num_slots, sequence._buffer_words), np.int32)
        self.alive = np.zeros((num_slots,), bool)
        self._has_row = [False] * num_slots
        self._accepting = [False] * num_slots
        self._finished = [False] * num_slots
        self._parents = [-1] * num_slots
        self._tokens = [0] * num_slots
        self._depths = [0] * num_slots
        self._path: list[int] = []  # slots that the matcher has consumed since the root, by depth
        self.alive[0] = self._has_row[0] = True
        self._finished[0] = sequence._finished
        if not sequence._finished:
            words, self._accepting[0] = sequence._root_state()
            self._words[0, : sequence._num_words] = words

    def allows(self, slot: int, token: int) -> bool:
        """If the row of a live slot allows a token."""
        if token in self._sequence._stops:
            return self._finished[slot] or self._accepting[slot]
        if self._finished[slot] or not self._sequence._is_text(token):
            return False
        return bool(self._words[slot, token >> 5] >> (token & 31) & 1)

    def allowed_of(self, slot: int, candidates: Candidates, row: int) -> np.ndarray:
        """bool[K]: as `allows`, for all candidates of a row."""
        if self._finished[slot]:
            return candidates.is_stop[row]
        found = self._words[slot].take(candidates.words[row]) & candidates.text_bits[row] != 0
        return found | candidates.is_stop[row] if self._accepting[slot] else found

    def enter(self, slot: int, parent: int, token: int, *, fill: bool = True) -> bool:
        """Puts a node into a slot, fills its row and returns if it is alive; the parent must be, and have a row.

        Without `fill` the matcher stays where it is, and the row is left to `fill` or `complete`.
        """
        if not self.allows(parent, token):
            return False
        self._parents[slot], self._tokens[slot] = parent, token
        if token in self._sequence._stops:
            self._finished[slot] = self._has_row[slot] = True
        else:
            self._depths[slot] = self._depths[parent] + 1
            if fill:
                self.fill(slot)
        self.alive[slot] = True
        return True

    def fill(self, slot: int) -> None:
        """Computes the row of a slot that was entered, if it has none yet."""
        if self._has_row[slot]:
            return
        self._go_to(slot)
        self._accepting[slot] = self._sequence._fill(self._words[slot])
        if self._sequence._matcher is not self._matcher:
            self._matcher = self._sequence._matcher
            self._path.clear()
        self._has_row[slot] = True

    def complete(self) -> np.ndarray:
        """Fills the rows that are missing and returns `rows()`. Not within `with`.

        Raises:
          InvariantError: rows are missing and the sequence has moved.
          ValueError: a grammar too complex at some slot.
        """
        missing = [slot for slot in np.flatnonzero(self.alive).tolist() if not self._has_row[slot]]
        # Depth first, so that neighbours share most of their paths.
        missing.sort(key=self._path_to)

        def fill_missing() -> None:
            with self:
                for slot in missing:
                    self.fill(slot)

        if missing:
            self._sequence.recovering(fill_missing)
        return self.rows()

    def _path_to(self, slot: int) -> list[int]:
        path = [slot]
        while path[-1]:
            path.append(self._parents[path[-1]])
        return path[::-1]

    def is_finished(self, slot: int) -> bool:
        return self._finished[slot]

    def only_token(self, slot: int) -> int | None:
        """The one text token that may follow a slot, if there is exactly one and no stop token."""
        if self._finished[slot] or self._accepting[slot]:
            return None
        row = self._words[slot, : self._sequence._num_words] & self._sequence._text_words
        if _num_bits(row) != 1:
            return None
        word = int(np.flatnonzero(row)[0])
        return word * 32 + (int(row[word]) & 0xFFFFFFFF).bit_length() - 1

    def num_allowed(self, slot: int) -> int:
        """How many tokens the row of a filled slot allows."""
        sequence = self._sequence
        text = self._words[slot, : sequence._num_words] & sequence._text_words
        found = 0 if self._finished[slot] else _num_bits(text)
        return found + len(sequence._stops) if self._accepting[slot] or self._finished[slot] else found

    def suggested_token(self, slot: int) -> int | None:
        """The next token of the text that must follow a slot, in the tokenizer's own cut, if the text is forced."""
        if self._finished[slot] or self._accepting[slot]:
            return None
        self._go_to(slot)
        forced = _forced_text(self._matcher)
        return forced[0] if forced and self.allows(slot, forced[0]) else None

    def rows(self) -> np.ndarray:
        """int32[N, W], final: text tokens, and stop tokens where the text is complete."""
        sequence = self._sequence
        rows = self._words[:, : sequence._num_words] & sequence._text_words[None, :]
        rows[np.array(self._accepting) | np.array(self._finished)] |= sequence._stop_words[None, :]
        return rows

    def _go_to(self, slot: int) -> None:
        """Moves the matcher to a text slot: up to the nearest ancestor that it stands below, then down."""
        pending = []
        while (depth := self._depths[slot]) and (depth > len(self._path) or self._path[depth - 1] != slot):
            pending.append(slot)
            slot = self._parents[slot]
        matcher, up = self._matcher, len(self._path) - depth
        if up:
            matcher.rollback(up)
            del self._path[depth:]
        for below in reversed(pending):
            if not self._sequence._consume(self._tokens[below]):
                raise InvariantError(f"the grammar's row allows token {self._tokens[below]}, its matcher does not")
            self._path.append(below)

    def __enter__(self) -> Visit:
        if self._place != self._sequence._place():
            raise InvariantError("the sequence has moved since its tree was made")
        # Another one than before, where something between two excursions replaced it.
        self._matcher = self._sequence._matcher
        return self

    def __exit__(self, *_: object) -> None:
        """Undoes everything consumed (G4)."""
        # One in error can not go back, and will be replaced.
        if self._path and not self._matcher.is_error():
            self._matcher.rollback(len(self._path))
        self._path.clear()


def _num_bits(row: np.ndarray) -> int:
    # Unsigned: of a negative number NumPy counts the bits of its absolute value.
    return int(np.bitwise_count(row.view(np.uint32)).sum())


def _forced_text(matcher: Any) -> list[int]:
    """The tokenizer's own tokens of the text that must come next, as far as their cut is certain."""
    # The library works out the forced bytes only when asked for them; without that its tokens are always none.
    return [int(i) for i in matcher.compute_ff_tokens()] if matcher.compute_ff_bytes() else []


def can_complete(sequence: SequenceGrammar, max_steps: int) -> bool | None:
    """If some text of the grammar can be written: True or False where `max_steps` rows show it, else None.

    With 0 steps only the start is looked at: False if nothing is allowed there.
    """
    if sequence.is_complete:
        return True
    if sequence.is_dead:
        return False
    # Depth first, children made as they are needed: each takes a step.
    stack = [(sequence, iter(_ids(sequence.root_row())))]
    for _ in range(max_steps):
        while stack and (token := next(stack[-1][1], None)) is None:
            stack.pop()
        if not stack:
            return False
        below = stack[-1][0].copy()
        try:
            below.advance([token])
            if below.is_complete:
                return True
        except ValueError:  # too complex there: not known
            return None
        stack.append((below, iter(_ids(below.root_row()))))
    return None


def _ids(row: np.ndarray) -> list[int]:
    """The token ids of a row, ascending."""
    return np.flatnonzero(np.unpackbits(row.astype("<i4").view(np.uint8), bitorder="little")).tolist()


def _as_ids(values: Any, name: str) -> list[int]:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}, allowed is a vector of integers")
    return array.tolist()
