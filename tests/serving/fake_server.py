"""A server without a model: what it is asked is recorded, what it answers is chosen."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from ddtree_jax.engine import demo_folder
from ddtree_jax.tokenizer import Tokenizer

STATISTICS = {
    "mean_acceptance_length": 2.5,
    "acceptance_histogram": {"2": 1, "3": 1},
    "num_spec_steps": 2,
    "tree_budget": 8,
}
SECONDS = 20  # for anything that a test waits for


def zipped(**files: bytes) -> bytes:
    """A zip of files, their names with a `_` for the dot."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(name.replace("_json", ".json"), content)
    return out.getvalue()


def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_folder(demo_folder() / "target")
    assert tokenizer is not None
    return tokenizer


@dataclasses.dataclass
class FakeServer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """The service, with answers that a test sets.

    Attributes:
      requests: of Generate, as they came.
      chunks: token ids of each chunk.
      last: token ids that come with the end alone.
      end: fields of the end besides its tokens.
      failure: status and details after the chunks, in place of the end.
      hold: waits after the chunks until the client has gone.
      cancelled: set once a client has gone before the end.
      trailing: trailing metadata.
      archive, digest: what GetTokenizer sends; None refuses it with `tokenizer_status`.
    """

    requests: list[pb.GenerateRequest] = dataclasses.field(default_factory=list)
    chunks: list[list[int]] = dataclasses.field(default_factory=list)
    last: list[int] = dataclasses.field(default_factory=list)
    end: dict[str, Any] | None = dataclasses.field(default_factory=lambda: {"finish_reason": "length"})
    failure: tuple[grpc.StatusCode, str] | None = None
    hold: bool = False
    cancelled: threading.Event = dataclasses.field(default_factory=threading.Event)
    trailing: dict[str, str] = dataclasses.field(
        default_factory=lambda: {name: json.dumps(value) for name, value in STATISTICS.items()}
    )
    archive: bytes | None = dataclasses.field(
        default_factory=lambda: zipped(tokenizer_json=demo_tokenizer().to_json().encode())
    )
    digest: str | None = None
    tokenizer_status: grpc.StatusCode = grpc.StatusCode.UNIMPLEMENTED
    tokenizer_calls: int = 0
    aborted: list[str] = dataclasses.field(default_factory=list)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.set_trailing_metadata(tuple(self.trailing.items()))
        ended = False
        try:
            for token_ids in self.chunks:
                yield pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=token_ids, prompt_tokens=3))
            deadline = time.monotonic() + SECONDS
            while self.hold and context.is_active() and time.monotonic() < deadline:
                self.cancelled.wait(0.01)  # a pause: nobody sets it meanwhile
            ended = time.monotonic() >= deadline or not self.hold
            if self.failure is not None:
                context.abort(*self.failure)
            if self.end is not None and not self.hold:
                ids = [*(i for chunk in self.chunks for i in chunk), *self.last]
                yield pb.GenerateResponse(
                    complete=pb.GenerateComplete(output_ids=ids, prompt_tokens=3, cached_tokens=1, **self.end)
                )
        finally:  # also where the server finds the client gone while it sends, and drops this
            if not ended:
                self.cancelled.set()

    def GetTokenizer(self, request: Any, context: grpc.ServicerContext) -> Iterator[common_pb2.GetTokenizerChunk]:
        self.tokenizer_calls += 1
        if self.archive is None:
            context.abort(self.tokenizer_status, "tokenizer: none here")
        half = len(self.archive) // 2
        digest = hashlib.sha256(self.archive).hexdigest() if self.digest is None else self.digest
        yield common_pb2.GetTokenizerChunk(data=self.archive[:half])
        yield common_pb2.GetTokenizerChunk(data=self.archive[half:], sha256=digest)

    def HealthCheck(self, request: Any, context: grpc.ServicerContext) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=True, message="ready")

    def GetModelInfo(self, request: Any, context: grpc.ServicerContext) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(served_model_name="fake")

    def GetServerInfo(self, request: Any, context: grpc.ServicerContext) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(server_type="fake")

    def GetLoads(self, request: Any, context: grpc.ServicerContext) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(version="1")

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self.aborted.extend(request.request_ids)
        return pb.AbortResponse()


@contextlib.contextmanager
def running(
    fake: FakeServer, add_port: Callable[[grpc.Server], int] = lambda server: server.add_insecure_port("127.0.0.1:0")
) -> Iterator[str]:
    """Serves on a free port; yields HOST:PORT."""
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(fake, server)
    port = add_port(server)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(SECONDS)
