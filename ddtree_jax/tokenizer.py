"""Text at the edge: a thin wrapper over `tokenizers`, and a decoder for streams."""

import os
import pathlib
import stat
from collections.abc import Sequence

import tokenizers

from ddtree_jax.errors import CheckpointError

# what a decoder puts where the bytes so far are not (yet) a character
_REPLACEMENT = "�"


class Tokenizer:
    """Reads `tokenizer.json` of a model folder; encodes and decodes."""

    def __init__(self, inner: tokenizers.Tokenizer):
        # A tokenizer.json may carry the truncation and padding of its training run: both change a prompt.
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special = frozenset(
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._vocab_size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer | None":
        """Returns the tokenizer of a model folder, or None where it has no `tokenizer.json`.

        Raises:
          CheckpointError: the file is there and cannot be read.
        """
        file = pathlib.Path(path) / "tokenizer.json"
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise CheckpointError(f"{file}: not a regular file")
        except FileNotFoundError:
            if file.is_symlink():  # a broken download, as for the other files
                raise CheckpointError(f"{file}: a link to nothing; expected a file") from None
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{str(file)!r}: cannot be read: {error}") from None
        try:
            return cls(tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8")))
        except Exception as error:  # `tokenizers` raises plain Exception for a bad file
            raise CheckpointError(f"{file}: expected a `tokenizers` file, found: {error}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; a model may pad its vocabulary beyond it."""
        return self._vocab_size

    def is_special(self, token_id: int) -> bool:
        """True for a token that marks structure (end of text, mask, ...) and that `decode` leaves out."""
        return token_id in self._special

    def has_token(self, token_id: int) -> bool:
        """False for an id between the tokens that no token has."""
        return self._inner.id_to_token(token_id) is not None

    def to_json(self) -> str:
        """Returns the tokenizer as the text of a `tokenizer.json`, without truncation and padding."""
        return self._inner.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        Args:
          text: any string that UTF-8 can hold; a lone surrogate raises ValueError.
          add_special_tokens: let the file's post-processor add what it adds (a start token, often nothing).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt: text that is not valid Unicode ({error.reason})") from error
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # `tokenizers` raises plain Exception: a vocabulary without its unknown token, ...
            raise ValueError(f"prompt: text that the model's tokenizer cannot encode ({error})") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids: U+FFFD for bytes that are no UTF-8, nothing for an unknown id."""
        return self._inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns one token as text for display, special tokens by their name."""
        text = self.decode([token_id], skip_special_tokens=False)
        if text == "" or _REPLACEMENT in text:
            return self._inner.id_to_token(token_id) or f"<{token_id}>"
        return text


class StreamDecoder:
    """Turns the tokens of a stream into text piece by piece.

    No piece ends inside a character, and the pieces with the rest from `flush` join to `tokenizer.decode` of
    all ids. That holds for decoders that map each token to fixed bytes (byte-level BPE, as GLM's).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Tokens [0, done) of the window have been emitted; some decoders look at the token before.
        self._window: list[int] = []
        self._done = 0

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that they complete, possibly empty."""
        self._window.extend(int(token_id) for token_id in token_ids)
        # An end that shows a replacement character may be the front of one that later tokens complete.
        return self._take(hold=True)

    def flush(self) -> str:
        """Returns what is held back; call it after the last token."""
        return self._take(hold=False)

    def _take(self, *, hold: bool) -> str:
        before = self._decode(self._window[: self._done])
        now = self._decode(self._window)
        if len(now) <= len(before) or (hold and now.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._done :]
        self._done = len(self._window)
        return now[len(before) :]
