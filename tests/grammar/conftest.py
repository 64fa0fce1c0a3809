"""A tokenizer of a few hundred tokens, the shipped one, and rows by the slowest way there is."""

import numpy as np
import pytest
import tokenizers

from ddtree_jax.engine import demo_folder
from ddtree_jax.grammar import CompiledGrammar, Grammar, GrammarVocabulary, unpack
from ddtree_jax.tokenizer import Tokenizer

STOP, OTHER_STOP, MASK = 0, 1, 2
TINY_SIZE = 330  # the model's rows; the tokenizer has fewer


def make_tiny_tokenizer(*, drop: str = "") -> Tokenizer:
    """Byte-level: three special tokens, every byte (but those of `drop`), a few longer tokens, one added word."""
    alphabet = sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(drop))
    vocab = {token: i for i, token in enumerate(["<stop>", "<other>", "<mask>", *alphabet])}
    merges = []
    for left, right in ["ab", "bc", '":', '{"', "12", "tr", "ue", ("tr", "ue"), ("Ã", "©"), "no", ("no", "t"), "Ġb"]:
        if left in vocab and right in vocab:
            merges.append((left, right))
            vocab[left + right] = len(vocab)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<stop>", "<other>", "<mask>"])
    inner.add_tokens(["</think>", " b"])  # the second spells what a merged token also spells
    return Tokenizer(inner)


@pytest.fixture(scope="session")
def tiny() -> GrammarVocabulary:
    return GrammarVocabulary(make_tiny_tokenizer(), TINY_SIZE)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_folder() / "target")


@pytest.fixture(scope="session")
def demo(demo_tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(demo_tokenizer, 2048)


def compiled(vocabulary: GrammarVocabulary, grammar: Grammar, stops=(STOP,)) -> CompiledGrammar:
    return vocabulary.compile(grammar, stops)


def fresh_row(grammar: CompiledGrammar, path) -> np.ndarray:
    """The row after a path by a state that has seen nothing else."""
    state = grammar.start()
    for token in path:
        state.advance([token])
    return state.root_row()


def allowed(grammar: CompiledGrammar, row: np.ndarray) -> list[int]:
    return np.flatnonzero(unpack(row, grammar.vocabulary.vocab_size)).tolist()


def paths(tokens, parents) -> list[list[int]]:
    """Of every slot the tokens below the root."""
    found = [[]]
    for node in range(1, len(tokens)):
        found.append([*found[parents[node]], tokens[node]])
    return found


def random_tree(grammar: CompiledGrammar, rng, num_nodes: int, *, wild: float = 0.2):
    """(token_ids, parents) with distinct siblings: mostly allowed tokens, some arbitrary ones."""
    tokens, parents, rows = [0], [-1], {0: grammar.start().root_row()}
    used = {0: set()}
    while len(tokens) < num_nodes:
        parent = int(rng.integers(len(tokens)))
        options = [] if rows[parent] is None else allowed(grammar, rows[parent])
        if not options or rng.random() < wild:
            options = range(grammar.vocabulary.vocab_size)
        token = int(rng.choice(options))
        if token in used[parent]:
            continue
        used[parent].add(token)
        used[len(tokens)] = set()
        path = [*paths(tokens, parents)[parent], token]
        is_alive = rows[parent] is not None and token in allowed(grammar, rows[parent])
        rows[len(tokens)] = fresh_row(grammar, path) if is_alive else None
        tokens.append(token)
        parents.append(parent)
    return tokens, parents
