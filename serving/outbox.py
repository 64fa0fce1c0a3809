"""The way back: what the device thread emits for one request, until the RPC of that request has written it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable

from serving.jobs import Event, Failed, Finished, Tokens


@dataclasses.dataclass(frozen=True)
class Piece:
    """What has come since the last piece. `end` is None until the last one."""

    token_ids: tuple[int, ...]
    num_cached_tokens: int
    end: Finished | Failed | None


class Outbox:
    """One request's events, handed from the device thread to the event loop.

    The device thread never waits. What a slow reader has not taken is one list of token ids, at most the tokens that
    the request may have, and one call waits in the event loop however many events come.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._lock = threading.Lock()
        # Guarded by the lock: both threads use them.
        self._token_ids: list[int] = []
        self._num_cached_tokens = 0
        self._end: Finished | Failed | None = None
        self._job_ended = False
        self._wake_is_due = False
        # Used by the event loop only.
        self._filled = asyncio.Event()
        self._when_job_ended: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Takes one event; from any thread. The first end counts, and tokens after it are dropped."""
        with self._lock:
            if isinstance(event, Tokens):
                if self._end is None:
                    self._token_ids.extend(event.token_ids)
                    self._num_cached_tokens = event.num_cached_tokens
            else:
                self._job_ended = True
                self._end = self._end or event
            if self._wake_is_due:
                return
            self._wake_is_due = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:  # the event loop is closed, and no reader is left
            pass

    async def take(self) -> Piece:
        """Waits for something and returns all there is. After the end, that end again and again."""
        await self._filled.wait()
        with self._lock:
            token_ids, self._token_ids = tuple(self._token_ids), []
            if self._end is None:
                self._filled.clear()
            return Piece(token_ids, self._num_cached_tokens, self._end)

    def cut(self, error: Exception) -> None:
        """Ends the stream for its reader now; the job goes on until the device thread ends it. On the event loop."""
        with self._lock:
            self._end = self._end or Failed(error)
        self._filled.set()

    @property
    def failure(self) -> Exception | None:
        """What ended the stream, if that was a failure."""
        with self._lock:
            return self._end.error if isinstance(self._end, Failed) else None

    @property
    def job_ended(self) -> bool:
        """Whether the device thread has let go of the job."""
        with self._lock:
            return self._job_ended

    def when_job_ended(self, call: Callable[[], None]) -> None:
        """Calls back once the device thread has let go of the job, at once if it has. On the event loop."""
        if self.job_ended:
            call()
        else:
            self._when_job_ended = call

    def _wake(self) -> None:
        with self._lock:
            self._wake_is_due = False
            job_ended = self._job_ended
        self._filled.set()
        if job_ended and self._when_job_ended is not None:
            call, self._when_job_ended = self._when_job_ended, None
            call()
