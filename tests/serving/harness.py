"""A server in the test's process, in front of a loop that does what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from ddtree_jax.algorithm import SpeculativeAlgorithm
from ddtree_jax.engine import Engine, open_pair
from ddtree_jax.stats import Stats
from serving.errors import CancelledError, DeadlineError, NotReadyError, QueueFullError
from serving.jobs import EngineLoop, Failed, Finished, Job, Load, LoopSettings, RequestRecord, RoundRecord, Tokens
from serving.server import ListenOptions, Server
from serving.servicer import Backend

TIMEOUT_S = 30  # of one test, and of whatever it waits for
CONTEXT = 64


def run[T](test: Coroutine[Any, Any, T]) -> T:
    """Runs an asynchronous test to its end, which must come."""

    async def bounded() -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await test

    return asyncio.run(bounded())


@functools.cache
def outline() -> Engine:
    """The shipped pair without its weights."""
    return open_pair("demo").outline()


def settings(**changes: Any) -> LoopSettings:
    values = dict(
        algorithm=SpeculativeAlgorithm.DDTREE,
        budget=8,
        max_running_requests=4,
        max_queued_requests=4,
        context_length=CONTEXT,
    )
    return LoopSettings(**{**values, **changes})


def finished(num_prompt: int, num_output: int, **changes: Any) -> Finished:
    """The end of a job, with two rounds."""
    values = dict(
        finish_reason="length",
        stats=Stats(
            algorithm="ddtree",
            budget=8,
            acceptance_lengths=(3, 1),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            time_to_first_token_s=0.5,
            tokens_per_second=2.0,
        ),
        matched_stop=None,
        num_cached_tokens=1,
        num_draft_tokens=16,
        num_accepted_draft_tokens=2,
        mean_tree_size=9.0,
    )
    return Finished(**{**values, **changes})


class FakeLoop:
    """An EngineLoop with a real device thread, and no device.

    A job is echoed: its prompt again and again up to its `max_new_tokens`, two tokens a round. With `manual` it waits
    for what the test does with `emit` and `finish`. `seen` and `aborted` take the ids that came in, `ended` each end.
    """

    def __init__(self, loop_settings: LoopSettings, *, manual: bool = False):
        self.settings, self.manual = loop_settings, manual
        self.jobs: dict[str, Job] = {}
        self.seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.aborted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[tuple[str, Finished | Failed]] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.watchers: list[Callable[[], None]] = []
        self.state = "ready"
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="fake device", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self.state != "ready":
            raise NotReadyError(f"the server is {self.state}")
        if len(self.jobs) >= self.settings.max_running_requests + self.settings.max_queued_requests:
            raise QueueFullError(
                f"queue: got {self.settings.max_queued_requests} requests that wait, allowed are as many"
            )
        assert job.request_id not in self.jobs, "one id for two jobs"
        self.jobs[job.request_id] = job
        self.seen.put(job.request_id)
        self._calls.put(lambda: None)  # wakes the thread, which may sleep until a later deadline
        if not self.manual:
            self._calls.put(lambda: self._echo(job))

    def abort(self, request_id: str) -> None:
        self.aborted.put(request_id)
        self._calls.put(lambda: self._end(request_id, Failed(CancelledError("the client asked for an end"))))

    def drain(self) -> None:
        self.state = "draining"

    def load(self) -> Load:
        return Load(
            state=self.state,
            running=len(self.jobs),
            waiting=3,
            waiting_tokens=30,
            used_tokens=64,
            max_tokens=256,
            max_running_requests=self.settings.max_running_requests,
            tokens_per_second=12.5,
            cache_hit_rate=0.25,
        )

    def watch(self, callback: Callable[[], None]) -> None:
        self.watchers.append(callback)

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()
        self.stopped.set()

    def emit(self, request_id: str, *token_ids: int) -> None:
        """Tokens of one round."""
        self._calls.put(lambda: self.jobs[request_id].on_event(Tokens(token_ids, 1)))

    def finish(self, request_id: str, **changes: Any) -> None:
        self.end(request_id, finished(3, 4, **changes))

    def end(self, request_id: str, event: Finished | Failed) -> None:
        self._calls.put(lambda: self._end(request_id, event))

    async def next_seen(self) -> str:
        return await asyncio.to_thread(self.seen.get, timeout=TIMEOUT_S)

    async def next_aborted(self) -> str:
        return await asyncio.to_thread(self.aborted.get, timeout=TIMEOUT_S)

    async def next_ended(self) -> tuple[str, Finished | Failed]:
        return await asyncio.to_thread(self.ended.get, timeout=TIMEOUT_S)

    async def settled(self) -> None:
        """Waits until the device thread has done all that it was told."""
        done = threading.Event()
        self._calls.put(done.set)
        assert await asyncio.to_thread(done.wait, TIMEOUT_S)

    def _run(self) -> None:
        while (call := self._next_call()) is not None:
            call()
        for request_id in list(self.jobs):
            self._end(request_id, Failed(NotReadyError("stopped")))

    def _next_call(self) -> Callable[[], None] | None:
        """The next thing to do, at the latest when a deadline passes."""
        now = time.monotonic()
        due = min(((job.deadline, name) for name, job in self.jobs.items() if job.deadline is not None), default=None)
        try:
            return self._calls.get(timeout=None if due is None else max(due[0] - now, 0.0))
        except queue.Empty:
            return lambda: self._end(due[1], Failed(DeadlineError("deadline: passed")))

    def _echo(self, job: Job) -> None:
        prompt, wanted = job.request.prompts[0], job.request.max_new_tokens
        output = [prompt[i % len(prompt)] for i in range(wanted)]
        for start in range(0, wanted, 2):
            job.on_event(Tokens(tuple(output[start : start + 2]), 1))
        self._end(job.request_id, finished(len(prompt), wanted))

    def _end(self, request_id: str, event: Finished | Failed) -> None:
        job = self.jobs.pop(request_id, None)
        if job is not None:
            self.ended.put((request_id, event))
            job.on_event(event)


@dataclasses.dataclass
class Records:
    """An observer that keeps what it is told. steps: "prefill" and "round", in their order."""

    requests: list[RequestRecord] = dataclasses.field(default_factory=list)
    rounds: list[RoundRecord] = dataclasses.field(default_factory=list)
    prefills: list[int] = dataclasses.field(default_factory=list)
    steps: list[str] = dataclasses.field(default_factory=list)
    loads: queue.SimpleQueue[Load] = dataclasses.field(default_factory=queue.SimpleQueue)

    def request_finished(self, record: RequestRecord) -> None:
        self.requests.append(record)

    def round_finished(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        self.steps.append("round")

    def prefill_finished(self, num_tokens: int, seconds: float) -> None:
        self.prefills.append(num_tokens)
        self.steps.append("prefill")

    def load_changed(self, load: Load) -> None:
        self.loads.put(load)


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that is up, and a client of it."""

    server: Server
    loop: FakeLoop | EngineLoop
    records: Records
    channel: grpc.aio.Channel
    stub: vllm_engine_pb2_grpc.VllmEngineStub

    async def collect(self, message: pb.GenerateRequest, **call: Any) -> list[pb.GenerateResponse]:
        return [response async for response in self.stub.Generate(message, **call)]

    async def refusal(self, message: pb.GenerateRequest, **call: Any) -> tuple[grpc.StatusCode, str]:
        """Status and details of a Generate that must fail."""
        try:
            await self.collect(message, **call)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details()
        raise AssertionError("the request was served")


def client(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    # A channel of its own, not one that an earlier test's server left behind.
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, credentials, options)


@contextlib.asynccontextmanager
async def serving(
    *,
    manual: bool = False,
    engine: Engine | None = None,
    loop_settings: LoopSettings | None = None,
    options: ListenOptions | None = None,
    gate: threading.Event | None = None,
    loop: EngineLoop | None = None,
) -> AsyncIterator[Running]:
    """A server on a free port; `gate` keeps it loading until it is set, otherwise it is ready. loop: a real one, which
    the server stops at its end.
    """
    loop_settings, records = loop_settings or settings(), Records()
    fake = loop is None
    loop = loop or FakeLoop(loop_settings, manual=manual)

    def factory() -> Backend:
        assert gate is None or gate.wait(TIMEOUT_S)
        return Backend(engine=engine or outline(), settings=loop_settings, loop=loop, observer=records)

    server = Server(factory, options or ListenOptions(port=0))
    await server.start()
    try:
        if gate is None:
            await server.loaded()
        async with client(f"127.0.0.1:{server.port}") as channel:
            yield Running(server, loop, records, channel, vllm_engine_pb2_grpc.VllmEngineStub(channel))
    finally:
        if gate is not None:
            gate.set()
        server.hurry()
        await server.stop(0.0)
        if fake and not loop.stopped.is_set():
            loop.stop()
