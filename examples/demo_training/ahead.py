"""Compilation in the background: a stage's functions are compiled from shapes while an earlier stage runs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from .schedule import Log


class Ahead:
    """Named compilations in a few threads; JAX's compilation cache keeps them for a later process too."""

    def __init__(self, log: Log, workers: int = 4):
        self._pool = ThreadPoolExecutor(workers)
        self._futures: dict[str, Future] = {}
        self._log = log

    def submit(self, name: str, compile_function: Callable[[], Any]) -> None:
        """Start a compilation. The first one runs alone: it is needed first, and threads trace in turn."""
        first = next(iter(self._futures.values()), None)

        def work() -> Any:
            if first is not None:
                wait([first])
            return compile_function()

        self._futures[name] = self._pool.submit(work)

    def get(self, name: str) -> Any:
        """The compiled function, waited for; None if it was not submitted or failed (use jit then)."""
        future = self._futures.get(name)
        if future is None:
            return None
        try:
            return future.result()
        except Exception as error:
            self._log("compile", name=name, error=f"{type(error).__name__}: {error}"[:300])
            return None

    def close(self) -> None:
        """Wait for what is running and drop what has not started."""
        self._pool.shutdown(wait=True, cancel_futures=True)
