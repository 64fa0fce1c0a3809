"""The RPCs of `vllm.grpc.engine.VllmEngine`, on the event loop, in front of one device thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

import ddtree_jax
from ddtree_jax.engine import Engine
from ddtree_jax.errors import one_line, shown
from serving import tokenizer_files, translate
from serving.errors import CancelledError, InternalError, NotBuiltError, NotReadyError, QueueFullError, status_of
from serving.grammar_guard import GrammarGuard
from serving.jobs import (
    DRAINING,
    LOADING,
    READY,
    EngineLoop,
    Failed,
    Finished,
    Job,
    LoopSettings,
    Observer,
    RequestRecord,
)
from serving.outbox import Outbox

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
ADMISSION_THREADS = 2  # requests that are tokenised and whose grammars are compiled at a time
# gRPC cancels an RPC at its deadline, by a clock and a rounding of its own. So near to it, a job is left to the loop's
# own deadline: it then counts as DEADLINE_EXCEEDED, and not as one whose client has gone.
DEADLINE_SLACK_S = 0.1

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What the RPCs stand in front of, once it is loaded.

    engine: or its outline; the RPCs read config, tokenizer and folder.
    settings: those that the loop runs with.
    loop: ready.
    observer: told of requests that never reach the loop; must then take calls from the event loop's thread too.
    """

    engine: Engine
    settings: LoopSettings
    loop: EngineLoop
    observer: Observer | None = None


@dataclasses.dataclass(eq=False)
class _Live:
    """A request whose id is in use: until its RPC has ended, and the device thread has let go of its job."""

    request_id: str
    outbox: Outbox
    submitted: bool = False
    deadline: float | None = None  # as in Job

    def is_due(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline - DEADLINE_SLACK_S


class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Every method runs on the event loop that made it."""

    def __init__(self, *, served_model_name: str | None = None):
        self.backend: Backend | None = None  # None: loading
        self.draining = False
        self._is_cut = False
        self._served_model_name = served_model_name
        self._started = time.monotonic()
        self._last_request = 0.0  # seconds since the epoch
        self._live: dict[str, _Live] = {}
        self._checking = 0
        self._num_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Apart: a grammar takes up to seconds, and requests without one do not wait for that.
        self._admission = concurrent.futures.ThreadPoolExecutor(ADMISSION_THREADS, "admission")
        self._grammar_admission = concurrent.futures.ThreadPoolExecutor(ADMISSION_THREADS, "grammar-admission")
        self._guard: GrammarGuard | None = None
        self._tokenizer: asyncio.Task | None = None

    # Generation

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        request_id = request.request_id or uuid.uuid4().hex
        self._last_request, started = time.time(), time.monotonic()
        self._num_streams += 1
        self._idle.clear()
        live = None
        try:
            backend = self._ready()
            live = self._claim(request_id)
            admitted = await self._admit(backend, request)
            self._submit(backend, live, admitted, context)
            await context.send_initial_metadata(translate.as_metadata({"request_id": request_id}))
            await self._answer(live, admitted, request.stream, context)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            if live is None or not live.submitted:
                self._refused(request_id, request, error, started)
            await _fail(context, error, request_id)
        finally:
            self._release(live)
            self._num_streams -= 1
            if self._num_streams == 0:
                self._idle.set()

    def _ready(self) -> Backend:
        if self.draining:
            raise NotReadyError("the server is shutting down; ask another one")
        if self.backend is None:
            raise NotReadyError("the server is loading its model; ask again later")
        return self.backend

    def _claim(self, request_id: str) -> _Live:
        if len(request_id) > translate.MAX_REQUEST_ID_CHARS:
            raise ValueError(
                f"request_id: got {len(request_id)} characters, allowed are {translate.MAX_REQUEST_ID_CHARS}; "
                "empty gets one made up"
            )
        if request_id in self._live:
            raise ValueError(
                f"request_id: got {shown(request_id)}, which is in use; allowed is an id of no running request"
            )
        live = self._live[request_id] = _Live(request_id, Outbox(asyncio.get_running_loop()))
        return live

    async def _admit(self, backend: Backend, request: pb.GenerateRequest) -> translate.Admitted:
        """The checks, in one of few threads; what waits for these threads is bounded as the loop's queue is."""
        most = backend.settings.max_running_requests + backend.settings.max_queued_requests
        if self._checking >= most:
            raise QueueFullError(f"requests that are being checked: got {most}, allowed are {most}; ask again later")
        self._checking += 1
        try:
            engine, threads, guard = backend.engine, self._admission, None
            if request.sampling_params.WhichOneof("constraint") is not None and engine.tokenizer is not None:
                if self._guard is None:
                    self._guard = GrammarGuard(engine.tokenizer, engine.target.config.vocab_size)
                threads, guard = self._grammar_admission, self._guard
            check = functools.partial(translate.admit, engine, backend.settings, request, guard)
            return await asyncio.get_running_loop().run_in_executor(threads, check)
        finally:
            self._checking -= 1

    def _submit(
        self, backend: Backend, live: _Live, admitted: translate.Admitted, context: grpc.aio.ServicerContext
    ) -> None:
        if (failure := live.outbox.failure) is not None:  # aborted, or cut, while it was checked
            raise failure
        remaining = context.time_remaining()
        live.deadline = None if remaining is None else time.monotonic() + remaining
        job = Job(
            request_id=live.request_id,
            request=admitted.request,
            on_event=live.outbox.put,
            stop_strings=admitted.stop_strings,
            deadline=live.deadline,
        )
        backend.loop.submit(job)
        live.submitted = True

    async def _answer(
        self, live: _Live, admitted: translate.Admitted, stream: bool, context: grpc.aio.ServicerContext
    ) -> None:
        token_ids: list[int] = []
        end = None
        while end is None:
            piece = await live.outbox.take()
            token_ids.extend(piece.token_ids)
            if stream and piece.token_ids:
                await context.write(
                    translate.chunk(piece.token_ids, admitted.num_prompt_tokens, piece.num_cached_tokens)
                )
            end = piece.end
        if isinstance(end, Failed):
            raise end.error
        assert isinstance(end, Finished)
        if end.error is not None:
            # A status, not the protocol's finish reason "error": that is a fault of the server to a gateway, which
            # would ask for the same output several times more.
            raise ValueError(one_line(end.error, translate.MAX_DETAILS_CHARS))
        await context.write(translate.complete(token_ids, admitted, end))
        context.set_trailing_metadata(translate.statistics(admitted, end))

    def _release(self, live: _Live | None) -> None:
        """The RPC has ended, perhaps because its client has gone. The id stays in use until the loop is done with it:
        a second job of the same id could not be told from the first.
        """
        if live is None:
            return

        def forget() -> None:
            del self._live[live.request_id]

        if not live.submitted:
            forget()
            return
        if not (live.outbox.job_ended or live.is_due() or self._is_cut):
            self.backend.loop.abort(live.request_id)
        live.outbox.when_job_ended(forget)

    def _refused(self, request_id: str, request: pb.GenerateRequest, error: Exception, started: float) -> None:
        """Tells the observer of a request that never reached the loop."""
        if self.backend is None or self.backend.observer is None:
            return
        seconds = time.monotonic() - started
        self.backend.observer.request_finished(
            RequestRecord(
                request_id=request_id[: translate.MAX_REQUEST_ID_CHARS],
                outcome=status_of(error).name,
                algorithm=self.backend.settings.algorithm,
                num_prompt_tokens=len(request.tokenized.input_ids),
                queue_s=seconds,
                total_s=seconds,
                has_grammar=request.sampling_params.WhichOneof("constraint") is not None,
                error=one_line(error),
            )
        )

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        for request_id in request.request_ids:
            live = self._live.get(request_id)
            if live is None:
                continue
            if live.submitted:
                self.backend.loop.abort(request_id)
            else:
                live.outbox.cut(CancelledError("aborted by the client"))
        return pb.AbortResponse()

    # Shutdown

    async def drained(self) -> None:
        """Waits until no Generate runs."""
        await self._idle.wait()

    def cut(self) -> None:
        """Ends every RPC that is still there as UNAVAILABLE. Their jobs end when the loop is stopped."""
        self._is_cut = True
        for live in self._live.values():
            live.outbox.cut(NotReadyError("the server has shut down before the request was finished; ask another one"))

    def close(self) -> None:
        """Gives the admission threads back; nothing may be asked afterwards."""
        for threads in (self._admission, self._grammar_admission):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._guard is not None:
            self._guard.close()

    # What the server says about itself

    def state(self) -> str:
        """loading, ready, draining or stopped."""
        if self.draining:
            return DRAINING
        return LOADING if self.backend is None else self.backend.loop.load().state

    async def HealthCheck(
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        # While it loads this fails: to the `smg` gateway an answer, whatever it says, is a server to be asked about its
        # model, once and for all.
        async with _failing(context, "HealthCheck"):
            if self.backend is None:
                raise NotReadyError("the server is loading its model; ask again later")
        state = self.state()
        return pb.HealthCheckResponse(healthy=state == READY, message=state)

    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with _failing(context, "GetModelInfo"):
            backend = self._ready()
            engine, folder = backend.engine, backend.engine.target.folder
            config = await asyncio.to_thread(_json_file, folder, "config.json")
            defaults = await asyncio.to_thread(_json_file, folder, "generation_config.json")
            defaults = {name: defaults[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in defaults}
            return pb.GetModelInfoResponse(
                model_path=str(folder or engine.name),
                is_generation=True,
                max_context_length=backend.settings.context_length,
                vocab_size=engine.target.config.vocab_size,
                served_model_name=self._served_model_name or engine.name,
                tokenizer_path="" if engine.tokenizer is None else str(folder),
                model_type=config.get("model_type") or "",
                architectures=config.get("architectures") or [],
                eos_token_ids=engine.stop_token_ids,
                pad_token_id=config.get("pad_token_id") or 0,
                bos_token_id=config.get("bos_token_id") or 0,
                max_req_input_len=backend.settings.context_length - 1,
                default_sampling_params_json=json.dumps(defaults, separators=(",", ":")) if defaults else "",
            )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        backend = self.backend
        return pb.GetServerInfoResponse(
            active_requests=self._num_streams,
            is_paused=self.draining,
            last_receive_timestamp=self._last_request,
            uptime_seconds=time.monotonic() - self._started,
            server_type="ddtree-jax-grpc",
            data_parallel_size=1,
            model_dtype="" if backend is None else str(backend.engine.target.dtype),
            max_num_seqs=0 if backend is None else backend.settings.max_running_requests,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        async with _failing(context, "GetLoads"):
            if request.dp_rank:
                raise ValueError(f"dp_rank: got {request.dp_rank}, allowed is 0: there is one")
            entry = pb.SchedulerLoad()  # zeros while loading, so that the server counts as one that answers
            if self.backend is not None:
                load = self.backend.loop.load()
                entry = pb.SchedulerLoad(
                    num_running_reqs=load.running,
                    num_waiting_reqs=load.waiting,
                    num_total_reqs=load.running + load.waiting,
                    num_used_tokens=load.used_tokens,
                    max_total_num_tokens=load.max_tokens,
                    token_usage=load.used_tokens / load.max_tokens if load.max_tokens else 0.0,
                    gen_throughput=load.tokens_per_second,
                    cache_hit_rate=load.cache_hit_rate,
                    utilization=load.running / load.max_running_requests if load.max_running_requests else 0.0,
                    max_running_requests=load.max_running_requests,
                    num_waiting_uncached_tokens=load.waiting_tokens,
                )
            return pb.GetLoadsResponse(
                timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
                version=ddtree_jax.__version__,
                dp_rank_count=1,
                loads=[entry],
            )

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext) -> None:
        async with _failing(context, "GetTokenizer"):
            folder = self._ready().engine.target.folder
            if self._tokenizer is None:  # packed once; all who ask meanwhile wait for the same
                self._tokenizer = asyncio.create_task(asyncio.to_thread(tokenizer_files.archive, folder))
            content, digest = await asyncio.shield(self._tokenizer)
            size = tokenizer_files.CHUNK_BYTES
            for start in range(0, len(content), size):
                is_last = start + size >= len(content)
                await context.write(
                    common_pb2.GetTokenizerChunk(data=content[start : start + size], sha256=digest if is_last else "")
                )

    # The rest of the protocol

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await _fail(context, NotBuiltError("Embed: this server generates; it has no embeddings"), "Embed")

    async def FlushCache(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await _fail(context, NotBuiltError("FlushCache: this server does not have it"), "FlushCache")

    async def StartProfile(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await _fail(context, NotBuiltError("StartProfile: this server does not have it"), "StartProfile")

    async def StopProfile(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await _fail(context, NotBuiltError("StopProfile: this server does not have it"), "StopProfile")

    async def SubscribeKvEvents(self, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
        await _fail(context, NotBuiltError("SubscribeKvEvents: this server does not have it"), "SubscribeKvEvents")


@contextlib.asynccontextmanager
async def _failing(context: grpc.aio.ServicerContext, what: str) -> AsyncIterator[None]:
    """Answers an exception of the body with its status."""
    try:
        yield
    except Exception as error:
        await _fail(context, error, what)


async def _fail(context: grpc.aio.ServicerContext, error: Exception, what: str) -> NoReturn:
    """Ends an RPC with the status of an exception. `what`: the request's id, or the RPC.

    Of a fault of the program the client learns the id under which the log has it, and nothing about the program.
    """
    if context.done():  # the client has gone: nobody to tell
        raise error
    status = status_of(error)
    if status is not grpc.StatusCode.INTERNAL:
        details = one_line(error, translate.MAX_DETAILS_CHARS)
    else:
        if not isinstance(error, InternalError):  # those were logged where they were found
            _log.error("request %s: unexpected %s", what, type(error).__name__, exc_info=error)
        details = f"request {what}: internal error; the server's log has more under this id"
    await context.abort(status, details, translate.as_metadata({"request_id": what}))


def _json_file(folder: Path | None, name: str) -> dict[str, Any]:
    """A config file's object; empty where there is none, or none that can be read: here it only informs."""
    if folder is None:
        return {}
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
