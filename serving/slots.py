"""Which sequence lies in which slot, and which slot holds a prefix of a new prompt already."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

MIN_REUSED_TOKENS = 16  # a shorter common prefix is computed again: opening a slot with it would not pay


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a new sequence goes.

    length: of its prefix that needs no prefill; they lie in slot `source`, which may be `slot` itself.
    """

    slot: int
    length: int
    source: int


class SlotTable:
    """Slots and what their caches hold. Host only; the device does what a `Place` says.

    A slot that is given back keeps its rows until another sequence takes it, so a prompt that begins as an earlier one
    did can start from them. Of the free slots the one that was given back first is taken first.
    """

    def __init__(self, num_slots: int, *, prefix_reuse: bool):
        self._held: list[np.ndarray] = [np.empty((0,), np.int32)] * num_slots
        self._free: list[int] = list(range(num_slots))  # given back longest ago first
        self._prefix_reuse = prefix_reuse

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, prompt: Sequence[int]) -> Place | None:
        """Takes a slot for a prompt, None where all are taken. The last token of a prompt is never reused: its logits
        give the first new token.
        """
        if not self._free:
            return None
        length, source = self._longest_prefix(np.asarray(prompt[:-1], np.int32))
        slot = self._free[0]
        if length < MIN_REUSED_TOKENS:
            length, source = 0, slot
        elif source in self._free and length == len(self._held[source]):
            slot = source  # all that it holds is reused: a copy would only be there twice
        self._free.remove(slot)
        self._held[slot] = np.asarray(prompt[:length], np.int32)
        return Place(slot, length, source)

    def hold(self, slot: int, token_ids: Sequence[int]) -> None:
        """Says which tokens' rows a slot holds now."""
        if self._prefix_reuse:
            self._held[slot] = np.asarray(token_ids, np.int32)

    def release(self, slot: int) -> None:
        """Gives a slot back; what it holds stays until it is taken."""
        if slot in self._free:
            raise ValueError(f"slot: got {slot}, which is free already")
        self._free.append(slot)

    def forget(self) -> None:
        """Nothing that any slot holds may be reused: the caches are new."""
        self._held = [np.empty((0,), np.int32)] * len(self._held)

    def _longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """(tokens, slot) of the slot that shares the longest prefix with a prompt."""
        best = (0, 0)
        if not self._prefix_reuse:
            return best
        for slot, held in enumerate(self._held):
            size = min(len(held), len(prompt))
            differs = held[:size] != prompt[:size]
            common = int(np.argmax(differs)) if differs.any() else size
            best = max(best, (common, slot), key=lambda pair: pair[0])
        return best
