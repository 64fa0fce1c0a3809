"""Grammars of clients, tried out in a process of their own first: with a limit on time and on memory.

The grammar library's limits do not bound its compiler: on a few intersections or complements it works for hours and
fills the memory, and a call of it cannot be interrupted. What the process has done within its limits takes the server
about as long and as much.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import signal
import subprocess
import sys
from pathlib import Path

import tokenizers

from ddtree_jax.grammar import MAX_GRAMMAR_BYTES, Grammar, vocabulary_of
from ddtree_jax.tokenizer import Tokenizer

MAX_COMPILE_S = 5.0
# Besides what the process has before its first grammar; the stack of a compile is 256 MiB of it.
MAX_COMPILE_BYTES = 2**30
MAX_PASSED = 1024  # grammars that are remembered as harmless


class GrammarGuard:
    """Tries grammars out. Threads may share it: each call has a process to itself, which later calls use again."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        max_seconds: float = MAX_COMPILE_S,
        max_bytes: int = MAX_COMPILE_BYTES,
    ):
        self._start = json.dumps([tokenizer.to_json(), vocab_size, max_seconds, max_bytes])
        self._seconds, self._bytes = f"{max_seconds:g} s", f"{max_bytes >> 20} MiB"
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._passed: set[bytes] = set()  # digests
        self._is_closed = False

    def check(self, kind: str, text: str | list[str]) -> None:
        """Raises ValueError for a grammar that takes more than the limits. What else is wrong with one, who then makes
        it will find. kind: a constructor of `Grammar`; text: its argument.
        """
        if sum(map(len, text)) > MAX_GRAMMAR_BYTES:
            return  # refused without being compiled
        line = json.dumps([kind, text])
        digest = hashlib.sha256(line.encode()).digest()
        if digest in self._passed:
            return
        try:
            process = self._idle.get_nowait()
        except queue.Empty:
            process = _Process()
            if not process.does(self._start):
                raise RuntimeError("the process that tries grammars out could not start") from None
        if not process.does(line):
            limit = self._seconds if process.timed_out else self._bytes
            raise ValueError(f"grammar {kind}: takes more than {limit} to compile, allowed is a simpler one")
        if len(self._passed) >= MAX_PASSED:
            self._passed.clear()
        self._passed.add(digest)
        self._idle.put(process)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Ends the processes. One that is at work ends with its grammar."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().end()


class _Process:
    timed_out = False

    def __init__(self) -> None:
        root = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-c",
                f"import sys; sys.path.insert(0, {root!r}); import serving.grammar_guard as g; g.work()",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C at a terminal is for the server
        )

    def does(self, line: str) -> bool:
        """Whether it has done what the line says; it has ended if not."""
        try:
            print(line, file=self._process.stdin, flush=True)
            if self._process.stdout.readline() == "done\n":
                return True
        except OSError:  # it has ended before
            pass
        self.timed_out = self._process.wait() == -signal.SIGALRM
        self.end()
        return False

    def end(self) -> None:
        self._process.kill()
        self._process.stdout.close()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()


def work() -> None:
    """In the process: reads what to start with, then grammars, a line each, and answers every line with another."""
    tokenizer, vocab_size, max_seconds, max_bytes = json.loads(sys.stdin.readline())
    vocabulary = vocabulary_of(Tokenizer(tokenizers.Tokenizer.from_str(tokenizer)), vocab_size)
    _limit_memory(max_bytes)
    print("done", flush=True)
    for line in sys.stdin:
        kind, text = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, max_seconds)  # its signal ends the process, whoever has started that
        with contextlib.suppress(ValueError):
            vocabulary.template(getattr(Grammar, kind)(text)).deep_copy()
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("done", flush=True)


def _limit_memory(max_bytes: int) -> None:
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError:  # no Linux: the limit on time bounds the memory as well
        return
    limit = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
