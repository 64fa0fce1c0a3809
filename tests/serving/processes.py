"""Processes on loopback: the server with the shipped pair, the published gateway in front of it, and an HTTP client."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import jax
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from ddtree_jax.engine import demo_folder
from tests.conftest import compilation_as_here

START_S = 600  # a first start compiles its programs
WAIT_S = 60  # for what must come
ROOT = Path(__file__).parents[2]


def wait_for(condition: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """The first true value of a condition that only another process can make true."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not so after {seconds} s"
        time.sleep(0.05)
    return value


@dataclasses.dataclass(frozen=True)
class ServerProcess:
    """`python -m serving`. log: the file that its stderr goes to."""

    process: subprocess.Popen
    address: str
    log: Path
    stub: pb_grpc.VllmEngineStub

    def is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            return self.stub.HealthCheck(pb.HealthCheckRequest()).healthy
        except grpc.RpcError:
            return False

    def load(self) -> pb.SchedulerLoad:
        return self.stub.GetLoads(pb.GetLoadsRequest()).loads[0]

    def requests(self) -> list[dict[str, Any]]:
        """The log's line of each finished request, in the order of their ends."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if line["logger"] == "serving.requests"]

    def request(self, request_id: str) -> dict[str, Any]:
        """The line of one request, once it is written."""
        return wait_for(lambda: [line for line in self.requests() if line["request_id"] == request_id])[0]


@contextlib.contextmanager
def server_process(*arguments: str, wait: bool = True) -> Iterator[ServerProcess]:
    """A server on a free port, with the compiled programs of earlier tests; it takes requests if `wait`."""
    command = [sys.executable, "-m", "serving", "--port", "0", *arguments]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        **compilation_as_here(),
    }
    if jax.config.jax_compilation_cache_dir:
        command += ["--compilation-cache-dir", jax.config.jax_compilation_cache_dir]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with (
            log.open("wb") as stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, env=environment
            ) as process,
        ):
            try:
                found = re.search(r" at (\S+:\d+), loading", process.stdout.readline())
                assert found, log.read_text()[-4000:]
                with grpc.insecure_channel(found[1]) as channel:
                    server = ServerProcess(process, found[1], log, pb_grpc.VllmEngineStub(channel))
                    if wait:
                        wait_for(server.is_healthy, START_S)
                    yield server
            finally:
                process.terminate()
                try:
                    process.communicate(timeout=WAIT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise


@dataclasses.dataclass(frozen=True)
class Gateway:
    """The gateway's HTTP port at 127.0.0.1, and a client of it that asks for greedy decoding."""

    process: subprocess.Popen
    port: int
    log: Path
    model: str

    @contextlib.contextmanager
    def sent(self, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPConnection]:
        """The connection on which a request was sent; leaving the block closes it."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)) as connection:
            if body is None:
                connection.request("GET", path)
            else:
                text = json.dumps({"model": self.model, "temperature": 0} | body)
                connection.request("POST", path, text, {"Content-Type": "application/json"})
            yield connection

    @contextlib.contextmanager
    def opened(self, path: str, body: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """The response, whose body has not been read; leaving the block closes the connection."""
        with self.sent(path, body) as connection, connection.getresponse() as response:
            yield response

    def get(self, path: str) -> tuple[int, Any]:
        with self.opened(path) as response:
            return response.status, json.loads(response.read())

    def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and body of a request that is not streamed."""
        with self.opened(path, body) as response:
            return response.status, json.loads(response.read())

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a request that is streamed, which has to end as streams do."""
        with self.opened(path, body | {"stream": True}) as response:
            assert response.status == 200, response.read()
            *events, done = list(events_of(response))
        assert done == "[DONE]"
        return [json.loads(event) for event in events]

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        try:
            with self.opened("/liveness") as response:
                return response.status == 200
        except ConnectionRefusedError:
            return False

    def num_healthy(self) -> int:
        """How many workers take requests."""
        status, answer = self.get("/readiness")
        return answer["healthy_workers"] if status == 200 else 0


def events_of(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event, as soon as it is there."""
    assert response.headers["Content-Type"].startswith("text/event-stream")
    for line in response:
        kind, _, data = line.decode().rstrip("\n").partition(": ")
        if kind == "data":
            yield data


@contextlib.contextmanager
def gateway_process(*addresses: str, model: str = "demo", wait: bool = True) -> Iterator[Gateway]:
    """`smg launch` in front of servers; all of them take requests if `wait`."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = one.getsockname()[1], other.getsockname()[1]
    command = [str(Path(sys.executable).with_name("smg")), "launch", "--backend", "vllm"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", *(f"grpc://{address}" for address in addresses)]
    command += ["--model-path", str(demo_folder() / "target")]
    # Whatever follows only makes tests quick, or their order known.
    command += ["--worker-startup-check-interval", "1", "--health-check-interval-secs", "2"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--log-level", "warn"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with (
            log.open("wb") as output,
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as process,
        ):
            try:
                gateway = Gateway(process, port, log, model)
                wait_for(gateway.is_up)
                if wait:
                    wait_for(lambda: gateway.num_healthy() == len(addresses))
                yield gateway
            finally:
                process.kill()  # told to stop, it would keep its port open for seconds
