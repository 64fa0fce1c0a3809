"""The tokenizer wrapper, and streams: no half character, and pieces that join to the whole."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from ddtree_jax import CheckpointError
from ddtree_jax.tokenizer import StreamDecoder, Tokenizer

# Every byte is a token, so that a character of n bytes is n tokens; two merges, and two added tokens of which
# one is special.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS, THINK = 258, 259


def byte_level() -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate([*ALPHABET, "he", "Ġa"])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("Ġ", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True)])
    inner.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    return inner


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = byte_level()
    # settings of a training run, which must not cut or pad a prompt
    inner.enable_truncation(4)
    inner.enable_padding(length=6)
    inner.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.from_folder(folder)
    assert loaded is not None
    return loaded


def test_a_folder_without_a_tokenizer_gives_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"model": {"type": "Unheard"}})])
def test_a_broken_file_is_a_checkpoint_error_that_names_it(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_bytes_that_are_no_utf8_are_a_checkpoint_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip(tokenizer, text):
    # `<` begins an added token, whose text is skipped or split on purpose
    text = text.replace("<", "")
    token_ids = tokenizer.encode(text)
    assert all(type(token_id) is int for token_id in token_ids)
    assert tokenizer.decode(token_ids) == text


def test_neither_truncated_nor_padded(tokenizer):
    assert len(tokenizer.encode("xyzxyz")) == 6
    assert len(tokenizer.encode("x")) == 1


def test_a_lone_surrogate_is_a_value_error(tokenizer):
    with pytest.raises(ValueError, match="prompt"):
        tokenizer.encode("a\ud800")


def test_special_tokens(tokenizer):
    assert tokenizer.vocab_size == 260
    assert tokenizer.encode("he<|end|>") == [256, EOS]
    assert tokenizer.decode([256, EOS]) == "he"
    assert tokenizer.decode([256, EOS], skip_special_tokens=False) == "he<|end|>"
    assert tokenizer.decode([THINK, 256]) == "<think>he"
    assert tokenizer.decode([]) == ""
    assert tokenizer.decode([256, 100_000]) == "he"  # a padded row of the model's vocabulary has no token


def test_is_special(tokenizer):
    assert [token_id for token_id in range(-1, 300) if tokenizer.is_special(token_id)] == [EOS]


def test_the_vocabulary_counts_gaps_of_the_ids():
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    assert Tokenizer(inner).vocab_size == 10


def test_token_text(tokenizer):
    assert tokenizer.token_text(256) == "he"
    assert tokenizer.token_text(EOS) == "<|end|>"
    assert tokenizer.token_text(100_000) == "<100000>"
    half = tokenizer.encode("é")[0]
    assert tokenizer.token_text(half) == "Ã"  # half a character: the name of the token, not U+FFFD


def split(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    return [token_ids[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(st.lists(st.integers(0, 259), max_size=24), st.lists(st.integers(0, 1000), max_size=8))
def test_pieces_join_to_the_whole_for_any_ids_and_cuts(tokenizer, token_ids, cuts):
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(part) for part in split(token_ids, cuts)] + [decoder.flush()]
    assert "".join(pieces) == tokenizer.decode(token_ids)


@given(st.text(alphabet="aé☃🙂 h", max_size=12))
def test_no_piece_has_half_a_character(tokenizer, text):
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push([token_id]) for token_id in tokenizer.encode(text)]
    assert decoder.flush() == ""
    assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) == text


def test_a_character_appears_with_its_last_byte_and_text_before_it_does_not_wait(tokenizer):
    decoder = StreamDecoder(tokenizer)
    token_ids = tokenizer.encode("a🙂")
    assert [decoder.push([token_id]) for token_id in token_ids] == ["a", "", "", "", "🙂"]


def test_what_stays_incomplete_comes_with_flush_once(tokenizer):
    decoder = StreamDecoder(tokenizer)
    front = tokenizer.encode("☃")[:2]
    assert decoder.push(front) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""
    assert tokenizer.decode(front) == "\ufffd"


def test_the_window_does_not_grow_with_the_stream(tokenizer):
    decoder = StreamDecoder(tokenizer)
    for _ in range(200):
        decoder.push([256])
    assert len(decoder._window) <= 2


def test_a_decoder_that_looks_at_the_token_before(tmp_path):
    # Metaspace drops the space of the first token only: a piece decoded on its own would lose it
    inner = tokenizers.Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "s": 2}, unk_token="s"))
    inner.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(inner)
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push([token_id]) for token_id in (0, 1, 2, 1)] == ["one", " two", "s", " two"]


def test_a_link_to_nothing_is_no_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a link to nothing"):
        Tokenizer.from_folder(tmp_path)
