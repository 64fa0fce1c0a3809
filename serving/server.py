"""The gRPC server: port, TLS, health and reflection, loading behind an open port, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import threading
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from ddtree_jax.errors import CheckpointError, UnsupportedRequestError, one_line
from serving import MAX_MESSAGE_BYTES
from serving.decode_guard import DecodeGuard
from serving.servicer import SERVICE, Backend, Servicer
from serving.tls import TlsFiles

LAST_WORDS_S = 1.0  # after the grace period: for statuses that have been decided to reach their clients

_log = logging.getLogger(__name__)
_NOT_SERVING, _SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where and how the server listens.

    port: 0 takes a free one.
    tls: without a certificate, plaintext; with authorities, clients must show a certificate that they vouch for.
    shutdown_grace_s: seconds that running requests get to finish when the server is told to stop.
    served_model_name: what clients see; None: the engine's name.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tls: TlsFiles = TlsFiles()
    shutdown_grace_s: float = 30.0
    served_model_name: str | None = None

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Server:
    """A server in this process, on the running event loop. Use it once: `start`, then `stop`."""

    def __init__(self, factory: Callable[[], Backend], options: ListenOptions):
        """`factory` loads everything and returns when the loop is ready; it runs in a thread of its own."""
        self.port = 0  # the real one, from `start` on
        self._factory, self._options = factory, options
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._ended = asyncio.Event()
        self._servicer = Servicer(served_model_name=options.served_model_name)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._loading: threading.Thread | None = None
        # Between the loading thread and `stop`, under the lock: whoever comes second ends what was loaded.
        self._handover = threading.Lock()
        self._is_over = False
        self._backend: Backend | None = None

    async def start(self) -> None:
        """Binds the port, answers from then on (UNAVAILABLE until the model is there), and begins to load.

        Raises ValueError, with nothing left behind: a port that cannot be bound, a certificate that cannot be used.
        """
        credentials = self._options.tls.credentials()
        server = grpc.aio.server(
            interceptors=[DecodeGuard()],
            options=[
                ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second server on it
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Clients may ping as often as they like, also while a long prefill sends nothing.
                ("grpc.http2.max_ping_strikes", 0),
            ],
        )
        for name in ("", SERVICE):
            await self._health.set(name, _NOT_SERVING)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(self._options.address)
            else:
                self.port = server.add_secure_port(self._options.address, credentials)
        except RuntimeError as error:
            self._servicer.close()
            raise ValueError(
                f"port: got {self._options.address}, which cannot be bound ({one_line(error)}); allowed is a free port "
                "of an address of this machine"
            ) from None
        await server.start()
        self._server = server
        _log.info("listening on %s port %d; loading", self._options.host, self.port)
        # A daemon: a load that is under way cannot be interrupted, and must not keep a stopped process alive.
        self._loading = threading.Thread(target=self._load, args=[asyncio.get_running_loop()], name="load", daemon=True)
        self._loading.start()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loading thread."""
        backend, error = None, None
        try:
            backend = self._factory()
        except Exception as caught:  # handed to whoever waits for the server
            error = caught
        with self._handover:
            is_over, self._backend = self._is_over, backend
        if is_over:
            if backend is not None:
                backend.loop.stop()
            return
        try:
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._take(backend, error)))
        except RuntimeError:  # the event loop was closed without a `stop`
            if backend is not None:
                backend.loop.stop()

    async def _take(self, backend: Backend | None, error: Exception | None) -> None:
        if error is not None:
            self._loaded.set_exception(error)
            self._loaded.exception()  # looked at: nobody need wait for it
            return
        if self._servicer.draining:
            return
        self._servicer.backend = backend
        for name in ("", SERVICE):
            await self._health.set(name, _SERVING)
        backend.loop.watch(functools.partial(_set_from_thread, asyncio.get_running_loop(), self._ended))
        _log.info("ready")
        self._loaded.set_result(None)

    @property
    def is_loading(self) -> bool:
        """Whether the factory still runs, also after `stop`, which does not wait for it: what it then returns is
        stopped at once.
        """
        return self._loading is not None and self._loading.is_alive()

    async def ended(self) -> None:
        """Waits until the loop has ended by a fault of its own, and nothing more can be served."""
        await self._ended.wait()

    async def loaded(self) -> None:
        """Waits until requests are served. Raises what the factory raised."""
        await asyncio.shield(self._loaded)

    async def stop(self, grace_s: float | None = None) -> None:
        """Ends the server: not serving; running requests finish, for `grace_s` seconds (None: as the options say);
        what is left ends as UNAVAILABLE; then the loop and the port. Every call waits for the same end.
        """
        if self._stopped is None:
            grace_s = self._options.shutdown_grace_s if grace_s is None else grace_s
            self._stopped = asyncio.create_task(self._stop(grace_s))
        await asyncio.shield(self._stopped)

    def hurry(self) -> None:
        """Ends the grace period of a `stop` that is under way."""
        self._hurry.set()

    async def _stop(self, grace_s: float) -> None:
        if self._server is None:
            self._servicer.close()
            return
        self._servicer.draining = True
        if self._servicer.backend is not None:
            self._servicer.backend.loop.drain()
        await self._health.enter_graceful_shutdown()
        _log.info("shutting down: running requests have %g s", grace_s)
        await self._first_of(self._servicer.drained(), self._hurry.wait(), timeout=grace_s)
        self._servicer.cut()
        await self._first_of(self._servicer.drained(), timeout=LAST_WORDS_S)
        await self._server.stop(LAST_WORDS_S)
        self._servicer.close()
        with self._handover:
            self._is_over, backend = True, self._backend
        if backend is not None:
            await asyncio.to_thread(backend.loop.stop)
        _log.info("stopped")

    async def _first_of(self, *waits, timeout: float) -> None:
        """Waits for the first of some coroutines, or for `timeout` seconds."""
        tasks = [asyncio.ensure_future(one) for one in waits]
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    factory: Callable[[], Backend],
    options: ListenOptions,
    *,
    on_start: Callable[[Server], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT; a second signal ends the grace period. Call it in the main thread.

    Where the signal comes while the model loads, it still does so at the end (`Server.is_loading`).

    Args:
      factory, options: as for `Server`.
      on_start: called with the server once its port is bound.

    Returns:
      The exit status: 0 after a signal, 1 where the model could not be loaded or the device thread ended by a fault
      (the log says why).

    Raises ValueError as `Server.start`.
    """
    server, told = Server(factory, options), asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            server.hurry()
        told.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await server.start()
        if on_start is not None:
            on_start(server)
        status, wait = 0, asyncio.ensure_future(told.wait())
        loading, ended = asyncio.ensure_future(server.loaded()), asyncio.ensure_future(server.ended())
        await asyncio.wait([wait, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and (error := loading.exception()) is not None:
            status = 1
            _report(error)
        else:
            await asyncio.wait([wait, ended], return_when=asyncio.FIRST_COMPLETED)
            status = 0 if wait.done() else 1
        await server.stop()
        for task in (wait, loading, ended):
            task.cancel()
        await asyncio.gather(wait, loading, ended, return_exceptions=True)
        return status
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _set_from_thread(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has ended meanwhile
        loop.call_soon_threadsafe(event.set)


def _report(error: BaseException) -> None:
    expected = isinstance(error, (CheckpointError, UnsupportedRequestError, ValueError))
    _log.error("the model could not be loaded: %s", one_line(error), exc_info=None if expected else error)
