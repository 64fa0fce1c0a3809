"""The gRPC server: port, TLS, health and reflection, loading behind an open port, and an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2_grpc

from ddtree_jax.errors import CheckpointError, UnsupportedRequestError, one_line
from serving.decode_guard import DecodeGuard
from serving.servicer import SERVICE, Backend, Servicer

MAX_MESSAGE_BYTES = 256 * 2**20  # both ways
LAST_WORDS_S = 1.0  # after the grace period: for statuses that have been decided to reach their clients

_log = logging.getLogger(__name__)
_NOT_SERVING, _SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where and how the server listens.

    port: 0 takes a free one.
    ssl_certfile, ssl_keyfile: PEM, both or neither; neither: plaintext.
    ssl_ca_certs: PEM; clients must then show a certificate that it vouches for.
    shutdown_grace_s: seconds that running requests get to finish when the server is told to stop.
    served_model_name: what clients see; None: the engine's name.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
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
        # A daemon: a load that is under way cannot be interrupted, and must not keep a stopped process alive.
        self._loading = threading.Thread(target=self._load, args=(self._loaded.get_loop(),), name="load", daemon=True)
        self._servicer = Servicer(served_model_name=options.served_model_name)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Binds the port, answers from then on (UNAVAILABLE until the model is there), and begins to load.

        Raises ValueError, with nothing left behind: a port that cannot be bound, a certificate that cannot be used.
        """
        credentials = _credentials(self._options)
        server = grpc.aio.server(
            interceptors=[DecodeGuard()],
            options=[
                ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second server on it
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                # Clients may ping as often as they like, also while a long prefill sends nothing.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
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
        self._loading.start()

    def _load(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the loading thread."""
        backend, error = None, None
        try:
            backend = self._factory()
        except Exception as caught:  # handed to whoever waits for the server
            error = caught
        try:
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._take(backend, error)))
        except RuntimeError:  # the event loop has ended meanwhile
            if backend is not None:
                backend.stop()

    async def _take(self, backend: Backend | None, error: Exception | None) -> None:
        if error is not None:
            self._loaded.set_exception(error)
            self._loaded.exception()  # looked at: nobody need wait for it
            return
        self._servicer.backend = backend
        if not self._servicer.draining:
            for name in ("", SERVICE):
                await self._health.set(name, _SERVING)
        _log.info("ready")
        self._loaded.set_result(None)

    async def loaded(self) -> None:
        """Waits until requests are served. Raises what the factory raised."""
        await asyncio.shield(self._loaded)

    def is_loading(self) -> bool:
        """Whether the factory runs, which it may also do after a `stop`."""
        return self._loading.is_alive()

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
        await self._health.enter_graceful_shutdown()
        _log.info("shutting down: running requests have %g s", grace_s)
        await self._first_of(self._servicer.drained(), self._hurry.wait(), timeout=grace_s)
        self._servicer.cut()
        await self._first_of(self._servicer.drained(), timeout=LAST_WORDS_S)
        await self._server.stop(LAST_WORDS_S)
        self._servicer.close()
        await self._first_of(self._wait_for_load(), self._hurry.wait(), timeout=grace_s)
        if self._servicer.backend is not None:
            await asyncio.to_thread(self._servicer.backend.stop)
        _log.info("stopped")

    async def _wait_for_load(self) -> None:
        await asyncio.wait([self._loaded])

    async def _first_of(self, *waits, timeout: float) -> None:
        """Waits for the first of some coroutines, or for `timeout` seconds."""
        tasks = [asyncio.ensure_future(one) for one in waits]
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve(
    factory: Callable[[], Backend], options: ListenOptions, *, on_start: Callable[[Server], None] | None = None
) -> int:
    """Serves until SIGTERM or SIGINT; a second signal ends the grace period. Call it in the main thread.

    `on_start` is called with the server once its port is bound.

    Returns:
      The exit status: 0 after a signal, 1 where the model could not be loaded (the log says why).

    Raises ValueError as `Server.start`.
    """
    server, told = Server(factory, options), asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            server.hurry()
        told.set()

    loop = asyncio.get_running_loop()
    await server.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        if on_start is not None:
            on_start(server)
        status, wait = 0, asyncio.ensure_future(told.wait())
        loading = asyncio.ensure_future(server.loaded())
        await asyncio.wait([wait, loading], return_when=asyncio.FIRST_COMPLETED)
        if loading.done() and (error := loading.exception()) is not None:
            status = 1
            _report(error)
        else:
            await wait
        await server.stop()
        for task in (wait, loading):
            task.cancel()
        await asyncio.gather(wait, loading, return_exceptions=True)
        return status
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _report(error: BaseException) -> None:
    expected = isinstance(error, (CheckpointError, UnsupportedRequestError, ValueError))
    _log.error("the model could not be loaded: %s", one_line(error), exc_info=None if expected else error)


def _credentials(options: ListenOptions) -> grpc.ServerCredentials | None:
    """None for plaintext. Raises ValueError for files that the library would only trip over at the first client."""
    cert, key, authority = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if not cert and not key:
        if authority:
            raise ValueError(
                f"ssl_ca_certs: got {authority!r} without ssl_certfile and ssl_keyfile, allowed is all three"
            )
        return None
    if not cert or not key:
        raise ValueError(
            f"ssl_certfile, ssl_keyfile: got {cert!r} and {key!r}, allowed are both, or neither for plaintext"
        )
    pems = {name: _pem(name, path) for name, path in (("ssl_certfile", cert), ("ssl_keyfile", key))}
    # An empty password: without one OpenSSL asks for it at the terminal.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ValueError(
            f"ssl_certfile, ssl_keyfile: got {cert!r} and {key!r}, which do not work together ({one_line(error)}); "
            "allowed are a PEM certificate and its PEM key without a password"
        ) from None
    roots = None
    if authority:
        roots = _pem("ssl_ca_certs", authority)
        try:
            context.load_verify_locations(cafile=authority)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"ssl_ca_certs: got {authority!r}, which holds no certificates ({one_line(error)}); allowed is PEM"
            ) from None
    return grpc.ssl_server_credentials(
        [(pems["ssl_keyfile"], pems["ssl_certfile"])],
        root_certificates=roots,
        require_client_auth=roots is not None,
    )


def _pem(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: got {path!r}, which cannot be read ({one_line(error)}); allowed is a file") from None
