"""Logs as JSON, one object a line on stderr, from a thread of their own: whoever logs never waits for a reader."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from ddtree_jax.errors import one_line
from serving.jobs import RequestRecord

LOGGER = "serving"
LOGGERS = (LOGGER, "ddtree_jax")
REQUESTS = "serving.requests"
MAX_WAITING_LINES = 10_000
LAST_LINES_S = 2.0  # at the end, for what has not been written yet
# What a client does or asks for is not a failure of the request: these end with their text.
SUCCESSES = ("stop", "length")


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger and message; what is in the record's `fields`; a traceback as one text."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, allow_nan=True, default=str)


class _Handler(logging.handlers.QueueHandler):
    """Hands records to the writing thread; drops those that find its queue full, and counts them."""

    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record  # for another thread of this process: nothing has to be made picklable

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class _Writing(threading.Thread):
    """Writes what waits. Its end waits for a reader that reads, and not for one that does not."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord | None], stream: TextIO) -> None:
        super().__init__(name="logs", daemon=True)
        self._waiting, self._stream, self._formatter = waiting, stream, JsonFormatter()

    def run(self) -> None:
        while (record := self._waiting.get()) is not None:
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):  # a stderr that is full or gone must not end the server
            self._stream.write(self._formatter.format(record) + "\n")
            self._stream.flush()

    def stop(self) -> bool:
        """Whether everything has been written."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=LAST_LINES_S)
        self.join(LAST_LINES_S)
        return not self.is_alive()


def _own_stderr() -> TextIO:
    """stderr through a file object of its own, and no handler of `logging`: at the end of the process Python takes the
    locks of both, which a thread that waits for a reader would never give back.
    """
    try:
        return open(sys.stderr.fileno(), "w", encoding="utf-8", closefd=False)
    except (AttributeError, OSError, ValueError):  # none, or one that is no file
        return sys.stderr


@contextlib.contextmanager
def logging_to(stream: TextIO | None = None, *, level: str = "info", requests: str = "all") -> Iterator[None]:
    """Writes what the server logs to a stream (None: stderr) until the end of the block.

    level: of messages, debug to error. requests: which request lines, all, failed or none, whatever the level.
    """
    waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING_LINES)
    handler = _Handler(waiting)
    writing = _Writing(waiting, _own_stderr() if stream is None else stream)
    lines = logging.getLogger(REQUESTS)
    roots = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger, logger.level, logger.propagate) for logger in (*roots, lines)]
    lines.setLevel({"all": logging.INFO, "failed": logging.WARNING, "none": logging.CRITICAL}[requests])
    for logger in roots:
        logger.setLevel(level.upper())
        logger.propagate = False
        logger.addHandler(handler)
    writing.start()
    try:
        yield
    finally:
        for logger in roots:
            logger.removeHandler(handler)
        if writing.stop() and handler.dropped:
            text = f"{handler.dropped} log lines were dropped: nobody read them"
            writing.write(logging.LogRecord(LOGGER, logging.WARNING, "", 0, text, None, None))
        handler.close()
        for logger, old_level, propagate in before:
            logger.setLevel(old_level)
            logger.propagate = propagate


def log_request(record: RequestRecord) -> None:
    """One line for a finished request: info where it came to its end, else warning."""
    logger = logging.getLogger(REQUESTS)
    level = logging.INFO if record.outcome in SUCCESSES else logging.WARNING
    if logger.isEnabledFor(level):
        logger.log(level, "request", extra={"fields": request_fields(record)})


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The values of the line, seconds with six digits and averages with three."""
    first = record.time_to_first_token_s
    return {
        "request_id": record.request_id,
        "outcome": record.outcome,
        "algorithm": record.algorithm.value,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "queue_s": round(record.queue_s, 6),
        "time_to_first_token_s": None if first is None else round(first, 6),
        "total_s": round(record.total_s, 6),
        "rounds": record.num_rounds,
        "mean_acceptance_length": round(record.mean_acceptance_length, 3),
        "mean_tree_size": round(record.mean_tree_size, 3),
        "grammar": record.has_grammar,
        **({} if record.error is None else {"error": one_line(record.error, limit=2000)}),
    }
