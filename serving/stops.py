"""Stop strings, as the server finds them and as a client cuts them off: one rule for both."""

from __future__ import annotations

from collections.abc import Sequence

from ddtree_jax.tokenizer import StreamDecoder, Tokenizer


class StopCutter:
    """Cuts a text that comes in pieces, one a token, at the stop string that a piece completes; of several that it
    completes, at the one that begins first.

    No piece that it lets through holds any part of a stop string that later pieces complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Takes the next piece and returns what may be shown."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is held back; call it after the last piece."""
        held, self._held = self._held, ""
        return held


class StopStrings:
    """Finds the token that completes a stop string."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder, self._cutter = StreamDecoder(tokenizer), StopCutter(stops)

    def push(self, token_id: int) -> str | None:
        """Takes the next token; returns the stop string that it completes. Not for use behind that."""
        self._cutter.push(self._decoder.push([token_id]))
        return self._cutter.matched


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of `text` that `stop` begins with, less than all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
