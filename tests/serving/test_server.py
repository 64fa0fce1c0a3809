"""The server around the RPCs: port, TLS, health, reflection, loading, shutdown, and what is no request at all."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from ddtree_jax.errors import CheckpointError
from serving.errors import NotReadyError
from serving.server import ListenOptions, Server, serve
from serving.servicer import SERVICE, Backend
from serving.tls import TlsFiles
from tests.serving.harness import TIMEOUT_S, FakeLoop, Running, client, outline, run, serving, settings
from tests.serving.tls_files import PEMS, certificate

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def ask(request_id: str = "a") -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
        stream=True,
        sampling_params=pb.SamplingParams(max_tokens=4),
    )


async def health(up: Running, service: str = SERVICE) -> int:
    stub = health_pb2_grpc.HealthStub(up.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def statuses(up: Running) -> AsyncIterator[int]:
    """Each health status as it is announced, until it is closed: a watch that is left open delays the end."""
    call = health_pb2_grpc.HealthStub(up.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    try:
        async for answer in call:
            yield answer.status
    finally:
        call.cancel()


class TestHealth:
    def test_names(self) -> None:
        async def test() -> None:
            async with serving() as up:
                assert SERVICE == "vllm.grpc.engine.VllmEngine"
                assert await health(up, "") == await health(up, SERVICE) == SERVING
                for name in ("VllmEngine", "grpc.health.v1.Health", "x"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await health(up, name)
                    assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        run(test())

    def test_loading_then_ready_then_stopping(self) -> None:
        async def test() -> None:
            gate = threading.Event()
            async with serving(manual=True, gate=gate) as up:
                watch = statuses(up)
                assert await anext(watch) == await health(up, "") == NOT_SERVING
                status, details = await up.refusal(ask())
                assert status is UNAVAILABLE and "loading" in details
                for call in (
                    up.stub.HealthCheck(pb.HealthCheckRequest()),  # an answer would be taken for one about the model
                    up.stub.GetModelInfo(pb.GetModelInfoRequest()),
                    up.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
                ):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await call
                    assert caught.value.code() is UNAVAILABLE
                assert await up.stub.Abort(pb.AbortRequest(request_ids=["a"])) == pb.AbortResponse()
                (load,) = (await up.stub.GetLoads(pb.GetLoadsRequest())).loads
                assert load == pb.SchedulerLoad()
                assert (await up.stub.GetServerInfo(pb.GetServerInfoRequest())).max_num_seqs == 0
                gate.set()
                assert await anext(watch) == SERVING
                call = up.stub.Generate(ask())
                assert await up.loop.next_seen() == "a"
                stopping = asyncio.ensure_future(up.server.stop(TIMEOUT_S))
                assert await anext(watch) == NOT_SERVING
                await watch.aclose()
                up.loop.finish("a")
                assert [response async for response in call]
                await stopping

        run(test())


class TestShutdown:
    def test_running_requests_finish_and_new_ones_are_refused(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                watch = statuses(up)
                assert await anext(watch) == SERVING
                stopping = asyncio.ensure_future(up.server.stop(TIMEOUT_S))
                assert await anext(watch) == NOT_SERVING
                await watch.aclose()
                status, details = await up.refusal(ask("late"))
                assert status is UNAVAILABLE and "shutting down" in details
                assert up.loop.load().state == "draining"
                state = await up.stub.HealthCheck(pb.HealthCheckRequest())
                assert not state.healthy and state.message == "draining"
                assert (await up.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
                up.loop.emit("a", 1, 2, 3, 4)
                up.loop.finish("a")
                assert list([r async for r in call][-1].complete.output_ids) == [1, 2, 3, 4]
                await stopping
                await up.server.stop()
                assert up.loop.stopped.is_set()
                assert (await up.refusal(ask("too late")))[0] is UNAVAILABLE

        run(test())

    def test_after_the_grace_period_requests_are_cut(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                up.loop.emit("a", 1, 2)
                assert list((await call.read()).chunk.token_ids) == [1, 2]
                stopping = asyncio.ensure_future(up.server.stop(0.0))
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is UNAVAILABLE and "has shut down" in caught.value.details()
                await stopping
                assert up.loop.stopped.is_set() and up.loop.aborted.empty()
                name, end = await up.loop.next_ended()
                assert name == "a" and isinstance(end.error, NotReadyError)

        run(test())

    def test_a_stop_can_be_hurried(self) -> None:
        async def test() -> None:
            async with serving(manual=True) as up:
                call = up.stub.Generate(ask())
                await up.loop.next_seen()
                stopping = asyncio.ensure_future(up.server.stop(1e6))
                up.server.hurry()
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is UNAVAILABLE
                await stopping

        run(test())

    def test_a_stop_while_loading_does_not_wait_and_ends_what_was_loaded(self) -> None:
        async def test() -> None:
            gate = threading.Event()
            async with serving(gate=gate) as up:
                await up.server.stop(TIMEOUT_S)
                assert up.server.is_loading and not up.loop.stopped.is_set()
                gate.set()
                assert await asyncio.to_thread(up.loop.stopped.wait, TIMEOUT_S)

        run(test())

    def test_a_signal_while_loading_leaves_at_once(self) -> None:
        gate, started = threading.Event(), []
        loop = FakeLoop(settings())

        def factory() -> Backend:
            os.kill(os.getpid(), signal.SIGTERM)
            assert gate.wait(TIMEOUT_S)
            return Backend(engine=outline(), settings=settings(), loop=loop)

        assert run(serve(factory, ListenOptions(port=0), on_start=started.append)) == 0
        assert started[0].is_loading
        gate.set()
        assert loop.stopped.wait(TIMEOUT_S)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_serve_with_status_0(self, number: signal.Signals) -> None:
        async def test() -> None:
            loop, started = FakeLoop(settings(), manual=True), asyncio.get_running_loop().create_future()
            serving_task = asyncio.ensure_future(
                serve(
                    lambda: Backend(engine=outline(), settings=settings(), loop=loop),
                    ListenOptions(port=0, shutdown_grace_s=TIMEOUT_S),
                    on_start=started.set_result,
                )
            )
            server = await started
            await server.loaded()
            async with client(f"127.0.0.1:{server.port}") as channel:
                call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(ask())
                assert await asyncio.to_thread(loop.seen.get, timeout=TIMEOUT_S) == "a"
                os.kill(os.getpid(), number)
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
                while (await watch.read()).status == SERVING:
                    pass
                watch.cancel()
                loop.finish("a")
                assert [response async for response in call][-1].complete.finish_reason == "length"
            assert await serving_task == 0
            assert loop.stopped.is_set()

        before = signal.getsignal(number)
        run(test())
        assert signal.getsignal(number) is before

    def test_a_loop_that_ends_by_a_fault_ends_serve_with_status_1(self) -> None:
        async def test() -> None:
            loop, started = FakeLoop(settings()), asyncio.get_running_loop().create_future()
            backend = Backend(engine=outline(), settings=settings(), loop=loop)
            task = asyncio.ensure_future(serve(lambda: backend, ListenOptions(port=0), on_start=started.set_result))
            await (await started).loaded()
            await asyncio.to_thread(loop.watchers.pop())
            assert await task == 1
            assert loop.stopped.is_set()

        run(test())

    @pytest.mark.parametrize("error", [CheckpointError("no such folder"), KeyError("a bug")], ids=["expected", "bug"])
    def test_a_load_that_fails_ends_serve_with_status_1(self, error: Exception, caplog) -> None:
        def factory() -> Backend:
            raise error

        assert run(serve(factory, ListenOptions(port=0))) == 1
        assert "the model could not be loaded: " in caplog.text
        assert ("Traceback" in caplog.text) is isinstance(error, KeyError)


class TestPort:
    def test_a_port_that_is_taken(self) -> None:
        async def test() -> None:
            async with serving() as up:
                second = Server(lambda: pytest.fail("loaded without a port"), ListenOptions(port=up.server.port))
                with pytest.raises(ValueError, match=rf"^port: got 127\.0\.0\.1:{up.server.port}, which cannot be"):
                    await second.start()
                await second.stop()
                assert await up.collect(ask())

        run(test())

    def test_an_address_of_another_machine(self) -> None:
        async def test() -> None:
            server = Server(lambda: pytest.fail("loaded without a port"), ListenOptions(host="192.0.2.1", port=0))
            with pytest.raises(ValueError, match="^port: got 192.0.2.1:0, which cannot be bound"):
                await server.start()

        run(test())

    def test_the_default_is_this_machine_alone(self) -> None:
        assert ListenOptions().host == "127.0.0.1" and ListenOptions().tls == TlsFiles()
        assert ListenOptions(host="::1", port=1).address == "[::1]:1"

    @pytest.mark.parametrize(
        "data",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            bytes(range(256)) * 64,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99,
            b"",
        ],
        ids=["HTTP/1", "garbage", "broken HTTP/2", "nothing"],
    )
    def test_garbage_on_the_port(self, data: bytes) -> None:
        async def test() -> None:
            async with serving() as up:
                reader, writer = await asyncio.open_connection("127.0.0.1", up.server.port)
                writer.write(data)
                if data:
                    await writer.drain()
                    try:
                        await reader.read()  # to the end: the server hangs up
                    except ConnectionError:
                        pass
                writer.close()
                try:
                    await writer.wait_closed()
                except ConnectionError:
                    pass
                assert await up.collect(ask())

        run(test())

    @pytest.mark.parametrize("size", [16, pytest.param(250, marks=pytest.mark.slow)])
    def test_messages_below_256_MiB(self, size: int) -> None:
        async def test() -> None:
            async with serving() as up:
                status, details = await up.refusal(pb.GenerateRequest(text="x" * (size * 2**20)))
                assert status is grpc.StatusCode.INVALID_ARGUMENT
                assert details.startswith(f"prompt: got {size * 2**20} characters")

        run(test())

    def test_a_message_of_300_MiB(self) -> None:
        async def test() -> None:
            async with serving() as up:
                raw = up.channel.unary_stream(f"/{SERVICE}/Generate")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await raw(bytes(300 * 2**20)).read()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert str(256 * 2**20) in caught.value.details()
                assert await up.collect(ask())

        run(test())

    def test_frequent_pings_are_tolerated(self) -> None:
        async def test() -> None:
            async with serving() as up:
                reader, writer = await asyncio.open_connection("127.0.0.1", up.server.port)
                settings_frame = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
                ping, answer, goodbye = 6, (6, 1), 7
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame)
                # A strict server says goodbye (ENHANCE_YOUR_CALM) at the third ping without a request.
                for i in range(20):  # each after the answer to the one before: a goodbye may follow on the answers
                    writer.write(bytes([0, 0, 8, ping, 0, 0, 0, 0, 0]) + i.to_bytes(8))
                    head = b""
                    while (*head[3:5],) != answer:
                        head = await reader.readexactly(9)
                        body = await reader.readexactly(int.from_bytes(head[:3]))
                        assert head[3] != goodbye, body
                writer.close()
                await writer.wait_closed()
                assert await up.collect(ask())

        run(test())


class TestReflection:
    def test_the_service_can_be_found_and_read(self) -> None:
        async def test() -> None:
            async with serving() as up:
                port = up.server.port

                def look() -> None:
                    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
                        database = ProtoReflectionDescriptorDatabase(channel)
                        names = set(database.get_services())
                        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
                        service = DescriptorPool(database).FindServiceByName(SERVICE)
                        assert "Generate" in service.methods_by_name
                        request = service.methods_by_name["Generate"].input_type
                        assert request.fields_by_name["sampling_params"].number == 4

                await asyncio.to_thread(look)
                stub = reflection_pb2_grpc.ServerReflectionStub(up.channel)
                asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
                (answer,) = [one async for one in stub.ServerReflectionInfo(iter([asked]))]
                files = [
                    FileDescriptorProto.FromString(data)
                    for data in answer.file_descriptor_response.file_descriptor_proto
                ]
                assert any(file.package == "vllm.grpc.engine" for file in files)

        run(test())


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the certificates of the server and of a client, each its own authority, and nonsense."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "client"):
        certificate(folder, name)
    (folder / "locked.key").write_bytes(PEMS["locked.key"])
    (folder / "nonsense.pem").write_text("no certificate\n")
    return folder


def tls(folder: Path, **changes: str | None) -> ListenOptions:
    files = {"certfile": str(folder / "server.crt"), "keyfile": str(folder / "server.key")}
    return ListenOptions(port=0, tls=TlsFiles(**files | {k: v and str(folder / v) for k, v in changes.items()}))


class TestTls:
    async def asks(self, up: Running, folder: Path, who: str | None) -> list[pb.GenerateResponse]:
        """What a client gets that trusts the server and shows the certificate of `who`."""
        pair = [(folder / f"{who}.{end}").read_bytes() for end in ("key", "crt")] if who else [None, None]
        credentials = grpc.ssl_channel_credentials((folder / "server.crt").read_bytes(), *pair)
        async with client(f"127.0.0.1:{up.server.port}", credentials) as channel:
            return [one async for one in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(ask())]

    def test_a_server_certificate(self, certificates: Path) -> None:
        async def test() -> None:
            async with serving(options=tls(certificates)) as up:
                assert (await self.asks(up, certificates, None))[-1].complete.finish_reason == "length"
                assert (await up.refusal(ask()))[0] is UNAVAILABLE  # plaintext

        run(test())

    def test_client_certificates(self, certificates: Path) -> None:
        async def test() -> None:
            async with serving(options=tls(certificates, ca_certs="client.crt")) as up:
                assert (await self.asks(up, certificates, "client"))[-1].complete.finish_reason == "length"
                for who in (None, "server"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await self.asks(up, certificates, who)
                    assert caught.value.code() is UNAVAILABLE
                assert up.loop.seen.get_nowait() and up.loop.seen.empty()

        run(test())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"keyfile": None}, "^ssl-certfile: got .* without its key"),
            ({"certfile": None}, "^ssl-keyfile: got .* there is no ssl-certfile"),
            ({"certfile": None, "keyfile": None, "ca_certs": "client.crt"}, "^ssl-ca-certs: got .* no ssl-certfile"),
            ({"certfile": "none.pem"}, "^ssl-certfile: got .*none.pem', which cannot be read"),
            ({"keyfile": "client.key"}, "which do not work together"),
            ({"keyfile": "locked.key"}, "the key has a password"),
            ({"certfile": "nonsense.pem"}, "which do not work together"),
            ({"ca_certs": "nonsense.pem"}, "^ssl-ca-certs: got .* which holds no certificates"),
            ({"ca_certs": "."}, "^ssl-ca-certs: got .* which cannot be read"),
        ],
    )
    def test_files_that_cannot_be_used(self, certificates: Path, changes: dict, message: str) -> None:
        async def test() -> None:
            with pytest.raises(ValueError, match=message):
                await Server(lambda: pytest.fail("loaded without a port"), tls(certificates, **changes)).start()

        run(test())
