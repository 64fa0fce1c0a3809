"""Grammars: what a caller writes, and what a model's vocabulary makes of it. Host only, no JAX.

`Grammar` is a checked text. `GrammarVocabulary` holds an engine's tokens in the form that the library `llguidance`
wants, once per engine; its `compile` gives a `CompiledGrammar`, whose `start` gives the state of one sequence
(`grammar_walk.SequenceGrammar`).

The law. A row says which tokens may come next: those whose bytes, appended to the text so far, still begin some text of
the grammar, in whatever way the tokens cut that text. The library can also insist on the tokenizer's own cut wherever
the grammar leaves one continuation only; that is switched off, because then a row would no longer follow from the text
alone. Special tokens are never text, and the stop tokens of a request are allowed exactly where the text is complete.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ddtree_jax.errors import UnsupportedRequestError, one_line, shown
from ddtree_jax.grammar_bytes import TrieNode, trie
from ddtree_jax.grammar_empty import lark_admits_nothing, schema_admits_nothing
from ddtree_jax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ddtree_jax.grammar_automaton import TokenAutomaton
    from ddtree_jax.grammar_walk import SequenceGrammar

KINDS = ("json_schema", "regex", "lark", "choices")
# Compile time and the library's recursion grow with the text: these keep the worst case at seconds and within the stack
# below. Whatever passes them meets the library's own limits on lexer and parser, which bound each later step.
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_SCHEMA_NESTING = 100
# The library recurses once per rule of a chain of rules, about 3 KB each; the usual 8 MiB end at 3,000 rules.
_STACK_BYTES = 256 * 2**20
_MAX_TABLE_STEPS = 400_000  # about 0.2 s of one core: a grammar that needs more is not small
_MAX_COMPILED = 64  # grammars that one vocabulary remembers
_STACK_LOCK = threading.Lock()
_VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, dict[int, GrammarVocabulary]] = weakref.WeakKeyDictionary()
_VOCABULARIES_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A text that the output must match from end to end. Immutable, hashable by content, free of any model.

    Make one with `json_schema`, `regex`, `lark` or `choices`, and use it for any number of calls and engines.

    Attributes:
      kind: one of `KINDS`.
      text: the schema as JSON text, the pattern, the Lark text, or the choices as a JSON list.
      compact: JSON Schema only: no white space between the tokens of the JSON text.
    """

    kind: str
    text: str
    compact: bool = False

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"grammar kind: got {self.kind!r}, allowed: {', '.join(KINDS)}")
        if not isinstance(self.compact, bool):
            raise ValueError(f"grammar compact: got {self.compact!r}, allowed is True or False")
        _check_text(self.kind, self.text)
        message = _with_large_stack(lambda: _library().LLMatcher.validate_grammar(self.program(), limits=_limits()))
        if message and not message.startswith("WARNING"):
            raise ValueError(f"grammar {self.kind}: {library_message(message)}")
        endless = (self.kind == "json_schema" and schema_admits_nothing(json.loads(self.text))) or (
            self.kind == "lark" and lark_admits_nothing(self.text)
        )
        if endless:
            raise ValueError(f"grammar {self.kind}: admits no finite text: what it requires always requires more")

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str, *, compact: bool = False) -> Grammar:
        """The JSON texts that a schema admits.

        Properties come in the order of the schema. A keyword that can not be enforced is refused, never ignored.

        Args:
          schema: the schema as a dict, or as JSON text.
          compact: no white space outside strings; otherwise JSON's own white space may stand between tokens.

        Raises:
          ValueError: not a schema, too large (`MAX_GRAMMAR_BYTES`, `MAX_SCHEMA_NESTING`), unsupported, or one that
            admits nothing, as far as that shows without a tokenizer.
          UnsupportedRequestError: `llguidance` is not installed. So for the other constructors.
        """
        if not isinstance(schema, (dict, str)):
            raise ValueError(f"grammar json_schema: got {type(schema).__name__}, allowed is a dict or JSON text")
        if isinstance(schema, str):
            schema = _parse_json("json_schema", schema)
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"grammar json_schema: got a JSON {type(schema).__name__}, allowed is an object")
        _check_json_value(schema)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except ValueError as error:  # an integer too long for Python to write out
            raise ValueError(f"grammar json_schema: can not be written as JSON: {error}") from None
        return cls("json_schema", text, compact)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """The texts that a regular expression matches as a whole (Rust syntax; no look-around, no back-references)."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """The texts of a context-free grammar in llguidance's variety of Lark; the rule `start` is the whole text.

        Special tokens (`<|name|>`, `<[id]>`) are not text: a grammar that demands one is refused or admits nothing.
        """
        return cls("lark", text)

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Grammar:
        """One of the given texts, exactly."""
        if not isinstance(choices, (list, tuple)) or not choices or not all(isinstance(c, str) for c in choices):
            raise ValueError(f"grammar choices: got {shown(choices, 80)}, allowed is a list of at least one str")
        if sum(map(len, choices)) + len(choices) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"grammar choices: longer than the {MAX_GRAMMAR_BYTES} bytes allowed")
        return cls("choices", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))

    def program(self) -> str:
        """Returns the grammar as llguidance takes it: the user's part, below a rule that switches forcing off."""
        if self.kind == "json_schema":
            schema = json.loads(self.text)
            if self.compact and isinstance(schema, dict):
                schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
            user = {"json_schema": schema}
        elif self.kind == "regex":
            user = json.loads(_library().LLMatcher.grammar_from_regex(self.text))["grammars"][0]
        elif self.kind == "lark":
            user = {"lark_grammar": self.text}
        else:
            user = {"lark_grammar": f"start: /{'|'.join(map(_literal, json.loads(self.text)))}/"}
        outer = {"name": "outer", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @user'}
        return json.dumps({"grammars": [outer, {**user, "name": "user"}]})


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> GrammarVocabulary:
    """The `GrammarVocabulary` of a tokenizer and V, made once for the life of the tokenizer. Errors: as there."""
    with _VOCABULARIES_LOCK:
        known = _VOCABULARIES.setdefault(tokenizer, {})
        if vocab_size not in known:
            known[vocab_size] = GrammarVocabulary(tokenizer, vocab_size)
        return known[vocab_size]


class GrammarVocabulary:
    """The tokens of one engine, as the grammar library sees them. Make one per engine and keep it.

    Attributes:
      vocab_size: V, the model's, padded rows included.
      num_words: W = ceil(V / 32).
      token_bytes: for each id below V its bytes; empty for special tokens, ids without a token, and the model's rows
        beyond the tokenizer: none of them is ever text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """Takes the engine's tokenizer and V.

        Raises:
          ValueError: the tokenizer has more tokens than V.
          UnsupportedRequestError: `llguidance` is not installed, or can not tell this tokenizer's bytes.
        """
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"vocab_size: got {vocab_size}, allowed is at least the tokenizer's {tokenizer.vocab_size}"
            )
        library = _library()
        try:
            base = library.LLTokenizer(tokenizer.to_json(), slices=[])
        except ValueError as error:
            raise UnsupportedRequestError(f"grammar: llguidance can not use this tokenizer: {error}") from None
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.token_bytes = tuple(
            base.decode_bytes([i])
            if i < min(base.vocab_size, tokenizer.vocab_size) and tokenizer.has_token(i) and not tokenizer.is_special(i)
            else b""
            for i in range(vocab_size)
        )
        self.is_text = np.array([len(b) > 0 for b in self.token_bytes], bool)  # [V]
        # The end that the library wants is a token that no model has, with id V: the request's own stop tokens,
        # which differ from call to call, are put in by `SequenceGrammar`.
        self._inner = library.LLTokenizer(_Tokens(base, self.token_bytes))
        self._compiled: collections.OrderedDict[Grammar, Any] = collections.OrderedDict()
        self._automata: collections.OrderedDict[tuple, TokenAutomaton | None] = collections.OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def is_byte_complete(self) -> bool:
        """True where single-byte tokens spell every UTF-8 text: then no text that can go on is without a token."""
        single = {b[0] for b in self.token_bytes if len(b) == 1}
        return single.issuperset([*range(0x00, 0xC0), *range(0xC2, 0xF5)])

    @functools.cached_property
    def byte_trie(self) -> TrieNode:
        """The spellings of the tokens, for `grammar_automaton`; made when first asked for."""
        return trie(self.token_bytes)

    def compile(self, grammar: Grammar, stop_token_ids: Sequence[int]) -> CompiledGrammar:
        """Returns the grammar for these tokens; the costly part is remembered (the last 64 grammars).

        Args:
          grammar: what the text must match.
          stop_token_ids: at least one id in [0, V): where the text is complete, each of them is allowed. An id among
            them that is ordinary text is then never used as text.

        Raises:
          ValueError: no stop token, a grammar that this vocabulary can not express, or one that admits nothing.
        """
        if not isinstance(grammar, Grammar):
            raise ValueError(f"grammar: got {type(grammar).__name__}, allowed is a ddtree_jax.Grammar")
        stops = tuple(dict.fromkeys(int(i) for i in stop_token_ids))
        if not stops or not all(0 <= i < self.vocab_size for i in stops):
            raise ValueError(
                f"stop_token_ids: got {shown(list(stops))}, allowed with a grammar are one or more ids in "
                f"[0, {self.vocab_size - 1}]: a text that is complete can only stop"
            )
        compiled = CompiledGrammar(self, grammar, stops)
        self.template(grammar)
        compiled.require_a_text()
        return compiled

    def automaton(self, compiled: CompiledGrammar) -> TokenAutomaton | None:
        """The grammar as a small table, None where it has none; remembered (the last 64)."""
        from ddtree_jax.grammar_automaton import token_automaton

        key = compiled.grammar, compiled.stop_token_ids
        with self._lock:
            if key in self._automata:
                self._automata.move_to_end(key)
                return self._automata[key]
        automaton = token_automaton(compiled, max_steps=_MAX_TABLE_STEPS)
        with self._lock:
            self._automata[key] = automaton
            while len(self._automata) > _MAX_COMPILED:
                self._automata.popitem(last=False)
        return automaton

    def template(self, grammar: Grammar, *, worn: Any = None) -> Any:
        """Returns an LLMatcher at the start, only ever to be copied; a new one in place of one that has worn out.

        All copies of a template share what the library has worked out about the grammar's tokens. That store has a
        limit, and once it is reached every copy fails: hence `worn`.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None and known is not worn:
                self._compiled.move_to_end(grammar)
                return known
        library = _library()
        matcher = _with_large_stack(
            lambda: library.LLMatcher(self._inner, grammar.program(), log_level=0, limits=_limits())
        )
        if matcher.is_error():
            raise ValueError(f"grammar {grammar.kind}: {library_message(matcher.get_error())}")
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return matcher


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar for one vocabulary and one set of stop tokens; holds no state of any sequence."""

    vocabulary: GrammarVocabulary
    grammar: Grammar
    stop_token_ids: tuple[int, ...]

    def start(self) -> SequenceGrammar:
        """Returns the state of a sequence that has emitted nothing."""
        from ddtree_jax.grammar_walk import SequenceGrammar

        return SequenceGrammar(self)

    @functools.cached_property
    def automaton(self) -> TokenAutomaton | None:
        """The grammar as a small table over tokens, None where it has none."""
        return self.vocabulary.automaton(self)

    @functools.cached_property
    def text_words(self) -> np.ndarray:
        """int32[W]: the tokens that may be text in this request."""
        is_text = self.vocabulary.is_text.copy()
        is_text[list(self.stop_token_ids)] = False
        return pack(is_text)

    @functools.cached_property
    def stop_words(self) -> np.ndarray:
        """int32[W]: the stop tokens."""
        stops = np.zeros((self.vocabulary.vocab_size,), bool)
        stops[list(self.stop_token_ids)] = True
        return pack(stops)

    def require_a_text(self) -> None:
        """Raises ValueError where no text of the grammar can be written with these tokens, as far as can be shown.

        Shown at the start always, and further on where the tokens do not spell every byte.
        """
        from ddtree_jax.grammar_walk import can_complete

        # With every byte a token of its own that may be text, only the start can be a dead end.
        is_complete = self.vocabulary.is_byte_complete and not self.vocabulary.is_text[list(self.stop_token_ids)].any()
        steps = 0 if is_complete else 200
        if can_complete(self.start(), max_steps=steps) is False:
            raise ValueError(
                f"grammar {self.grammar.kind}: admits no text that this model's tokens can write, before one of the "
                f"stop tokens {shown(list(self.stop_token_ids))}"
            )


def pack(allowed: np.ndarray) -> np.ndarray:
    """bool[..., V] -> int32[..., W]: token i is bit i % 32 of word i // 32; bits from V on are 0."""
    padding = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    packed = np.packbits(np.pad(allowed, padding), axis=-1, bitorder="little")
    return np.ascontiguousarray(packed).view("<i4").astype(np.int32)


def unpack(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """int32[..., W] -> bool[..., V]."""
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    return np.unpackbits(octets, axis=-1, count=vocab_size, bitorder="little").astype(bool)


class _Tokens:
    """What `LLTokenizer` reads a vocabulary from."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, base: Any, token_bytes: tuple[bytes, ...]):
        self._base = base
        self._token_bytes = token_bytes
        self.tokens = [*token_bytes, b"<end of the grammar>"]
        self.eos_token_id = len(token_bytes)
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        ids = self._base.tokenize_str(text)
        # The name of a special token, written as text, is not that token.
        if all(self._token_bytes[i] for i in ids):
            return ids
        return self._base.greedy_tokenize(text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedRequestError(
            f"grammar: needs the package llguidance ({error}); install it with: pip install 'ddtree-jax[grammar]'"
        ) from None
    return llguidance


@functools.cache
def _limits() -> Any:
    # Verbose errors repeat the grammar and the text so far: too long for one line, and none of a log's business.
    return _library().LLParserLimits(verbose_errors=False)


def _with_large_stack(call: Callable[[], Any]) -> Any:
    """Returns call() from a thread whose stack holds the library's deepest recursion on a text within the limits."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # handed to the caller's thread, whatever it is
            outcome.append((None, error))

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar-compile", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    value, error = outcome[0]
    if isinstance(error, Exception):
        raise error
    if error is not None:  # a panic of the library is no Exception
        raise ValueError(f"grammar: the library failed on it: {library_message(error)}")
    return value


def library_message(message: object) -> str:
    """A message of the library, which may draw the place in several lines, in one."""
    return one_line(str(message).replace("<non-verbose/>", ""))


def _literal(text: str) -> str:
    """A pattern that matches a text alone, also between slashes; the library's quoted strings lack some escapes."""
    return "".join(c if c.isalnum() or c == "_" else f"\\x{{{ord(c):X}}}" for c in text)


def _check_text(kind: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"grammar {kind}: got {type(text).__name__}, allowed is str")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"grammar {kind}: got {len(text)} characters, allowed are {MAX_GRAMMAR_BYTES} bytes")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise ValueError(f"grammar {kind}: text that is not valid Unicode ({error.reason})") from None
    if size > MAX_GRAMMAR_BYTES:
        raise ValueError(f"grammar {kind}: got {size} bytes, allowed are {MAX_GRAMMAR_BYTES}")
    if kind == "json_schema":
        value = _parse_json(kind, text)
        if not isinstance(value, (dict, bool)):
            raise ValueError(f"grammar json_schema: got a JSON {type(value).__name__}, allowed is an object")
        _check_json_value(value)
    elif kind == "choices":
        value = _parse_json(kind, text)
        if not isinstance(value, list) or not value or not all(isinstance(c, str) for c in value):
            raise ValueError("grammar choices: allowed is a JSON list of at least one string")


def _parse_json(kind: str, text: str) -> Any:
    if len(text) > MAX_GRAMMAR_BYTES:
        raise ValueError(f"grammar {kind}: got {len(text)} characters, allowed are {MAX_GRAMMAR_BYTES} bytes")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"grammar {kind}: nested deeper than the {MAX_SCHEMA_NESTING} levels allowed") from None
    except ValueError as error:
        raise ValueError(f"grammar {kind}: not JSON: {library_message(error)}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_json_value(value: Any) -> None:
    """Without recursion, and in bounded time for values that share or contain themselves."""
    if isinstance(value, dict) and "x-guidance" in value:
        raise ValueError("grammar json_schema: the keyword x-guidance is not supported; `compact` is an argument")
    levels, seen = [value], 0
    for _ in range(MAX_SCHEMA_NESTING + 1):
        below: list[Any] = []
        for item in levels:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise ValueError("grammar json_schema: got a key that is no string, allowed are strings")
                inner: Any = item.values()
            elif isinstance(item, list):
                inner = item
            elif item is None or isinstance(item, (str, bool, int)):
                continue
            elif isinstance(item, float) and np.isfinite(item):
                continue
            else:
                raise ValueError(f"grammar json_schema: got {shown(item, 80)}, allowed is what JSON can hold")
            seen += len(inner)
            if seen > MAX_GRAMMAR_BYTES:
                raise ValueError(f"grammar json_schema: longer than the {MAX_GRAMMAR_BYTES} bytes allowed")
            below.extend(inner)
        levels = below
        if not levels:
            return
    raise ValueError(f"grammar json_schema: nested deeper than the {MAX_SCHEMA_NESTING} levels allowed")
