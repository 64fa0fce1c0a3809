"""A client of the server: text in, pieces of text out, and statistics at the end.

from serving.client import Client

with Client("127.0.0.1:50051") as client:
    generation = client.generate("def main(", max_new_tokens=64)
    for piece in generation:
        print(piece, end="", flush=True)
    print()
    print(generation.result.summary_line())
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import tokenizers
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from ddtree_jax.errors import one_line, shown
from ddtree_jax.tokenizer import StreamDecoder, Tokenizer
from serving import MAX_MESSAGE_BYTES
from serving.stops import StopCutter

if TYPE_CHECKING:
    from ddtree_jax.grammar import Grammar

MAX_TOKENIZER_BYTES = 256 * 2**20  # of tokenizer.json, unpacked, and of the archive with it
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)
SETUP_SECONDS = 60.0  # for the answers that need no model: the tokenizer, information, an abort


class ServerError(Exception):
    """The server refused or failed, or cannot be reached. status: a gRPC one; request_id: empty where there is none."""

    def __init__(self, status: grpc.StatusCode, message: str, request_id: str = "") -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.request_id = request_id


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM texts for a TLS connection. authorities: None for those of the system. key, certificates: of the client."""

    authorities: bytes | None = None
    key: bytes | None = None
    certificates: bytes | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A finished generation.

    Attributes:
      text: without the stop string that ended it; None where it was not detokenised.
      token_ids: all new tokens, those of a stop string included.
      finish_reason: stop, length, or error, with `error` then.
      matched_stop: the stop token of the request or the stop string that ended it, else None.
      num_prompt_tokens, num_cached_tokens: of the prompt, and those of them that were not computed again.
      statistics: what the server adds (mean_acceptance_length, acceptance_histogram, num_spec_steps, ...).
      time_to_first_token_s, total_s: seconds on this side, the way there and back included; the first is None where
        there was no token.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    matched_stop: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    statistics: Mapping[str, Any]
    time_to_first_token_s: float | None
    total_s: float
    error: str | None = None

    def summary_line(self) -> str:
        """The statistics in one line."""
        budget, rounds = self._number("tree_budget"), self._number("num_spec_steps")
        first = "no token" if self.time_to_first_token_s is None else f"first token {self.time_to_first_token_s:.2f} s"
        return (
            f"[server{f', budget {budget}' if budget else ''}] {len(self.token_ids)} tokens in {rounds} rounds"
            f" | acceptance length {self._number('mean_acceptance_length'):.2f}"
            f" | {len(self.token_ids) / max(self.total_s, 1e-9):.1f} tokens/s | {first}"
            f" | prompt {self.num_prompt_tokens} tokens, {self.num_cached_tokens} cached"
        )

    def _number(self, name: str) -> float:
        value = self.statistics.get(name)
        return value if isinstance(value, (int, float)) else 0


class Client:
    """A connection to one server. Threads may share it.

    Args:
      address: HOST:PORT, as gRPC takes it.
      tls: None for plaintext.
    """

    def __init__(self, address: str, *, tls: Tls | None = None) -> None:
        self.address = address
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificates)
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._tokenizer: Tokenizer | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and with it every generation that still runs."""
        self._channel.close()

    def tokenizer(self) -> Tokenizer:
        """The server's tokenizer, asked for once. Raises `ServerError`, UNIMPLEMENTED where it has none."""
        if self._tokenizer is None:
            with _errors(""):
                content, digest = self._archive()
            self._tokenizer = tokenizer_from_zip(content, digest)
        return self._tokenizer

    def _archive(self) -> tuple[bytes, str]:
        content, digest = bytearray(), ""
        call = self._stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=SETUP_SECONDS)
        for chunk in call:
            content += chunk.data
            digest = chunk.sha256
            if len(content) > MAX_TOKENIZER_BYTES:
                call.cancel()
                text = f"tokenizer: its archive is longer than {MAX_TOKENIZER_BYTES} bytes"
                raise ServerError(grpc.StatusCode.DATA_LOSS, text)
        return bytes(content), digest

    def model_info(self) -> pb.GetModelInfoResponse:
        with _errors(""):
            return self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=SETUP_SECONDS)

    def server_info(self) -> pb.GetServerInfoResponse:
        with _errors(""):
            return self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SETUP_SECONDS)

    def loads(self) -> pb.GetLoadsResponse:
        with _errors(""):
            return self._stub.GetLoads(pb.GetLoadsRequest(), timeout=SETUP_SECONDS)

    def health(self) -> pb.HealthCheckResponse:
        with _errors(""):
            return self._stub.HealthCheck(pb.HealthCheckRequest(), timeout=SETUP_SECONDS)

    def abort(self, *request_ids: str) -> None:
        """Ends requests as cancelled; ids that the server does not know are fine."""
        with _errors(""):
            self._stub.Abort(pb.AbortRequest(request_ids=request_ids), timeout=SETUP_SECONDS)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = 0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        grammar: Grammar | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        detokenise: bool = True,
    ) -> Generation:
        """Starts a generation. Its text comes by iterating over what this returns.

        Args:
          prompt: text, which the server tokenises, or token ids.
          max_new_tokens: None for what the server's context leaves.
          temperature, top_k, top_p, min_p, stop_token_ids: as for `ddtree_jax.generate`.
          seed: as there, in 32 bits; None lets the server choose one.
          stop: texts that end the output, of which no part is ever shown.
          grammar: a `ddtree_jax.Grammar`.
          request_id: by which the server's log and `abort` know it; empty makes one up.
          timeout_s: seconds until the server ends it as DEADLINE_EXCEEDED.
          detokenise: False asks for no tokenizer; the pieces are then empty and tokens come in the result alone.

        Raises:
          ValueError: what the protocol cannot carry; the server checks the rest.
          ServerError: no tokenizer. What the server says of the request comes with the first piece.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        request_id = request_id or uuid.uuid4().hex
        request = generate_request(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stops,
            stop_token_ids=stop_token_ids,
            grammar=grammar,
            request_id=request_id,
        )
        decoder = StreamDecoder(self.tokenizer()) if detokenise else None
        started = time.perf_counter()
        call = self._stub.Generate(request, timeout=timeout_s)
        return Generation(call, decoder, StopCutter(stops), request_id, started)


class Generation:
    """A running generation: iterate over it for its text, piece by piece. Leaving it early cancels it on the server.

    Attributes:
      request_id: by which the server knows it.
      token_ids: those that have come so far.
    """

    def __init__(
        self,
        call: Any,
        decoder: StreamDecoder | None,
        cutter: StopCutter,
        request_id: str,
        started: float,
    ) -> None:
        self._call = call
        self._decoder = decoder
        self._cutter = cutter
        self.request_id = request_id
        self._started = started
        self._result: Completion | None = None
        self._error: ServerError | None = None
        self.token_ids: list[int] = []
        self._pieces = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends it on the server, unless it has ended."""
        self._call.cancel()

    @property
    def result(self) -> Completion:
        """The whole, once it has ended; waits for that. Raises `ServerError`."""
        for _ in self._pieces:
            pass
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise ServerError(grpc.StatusCode.CANCELLED, "the generation was left early", self.request_id)
        return self._result

    def _read(self) -> Iterator[str]:
        shown_text: list[str] = []
        first_token_s = None
        end = None
        try:
            with _errors(self.request_id):
                for response in self._call:
                    new = response.chunk.token_ids
                    if response.WhichOneof("response") == "complete":
                        end = response.complete
                        new = end.output_ids[len(self.token_ids) :]  # those that no chunk brought
                    if new and first_token_s is None:
                        first_token_s = time.perf_counter() - self._started
                    self.token_ids.extend(new)
                    if piece := self._text_of(new):
                        shown_text.append(piece)
                        yield piece
                trailing = self._call.trailing_metadata()
            if end is None:
                raise ServerError(grpc.StatusCode.INTERNAL, "the stream ended without its end", self.request_id)
            if self._decoder is not None and (piece := self._cutter.push(self._decoder.flush()) + self._cutter.flush()):
                shown_text.append(piece)
                yield piece
            self._result = self._completion(end, _statistics(trailing), shown_text, first_token_s)
        except ServerError as error:
            self._error = error
            raise
        finally:
            self.cancel()  # nothing on one that has ended

    def _text_of(self, token_ids: Sequence[int]) -> str:
        if self._decoder is None:
            return ""
        # Token by token, as the server looks for stop strings.
        return "".join(self._cutter.push(self._decoder.push([token_id])) for token_id in token_ids)

    def _completion(
        self, end: pb.GenerateComplete, statistics: dict[str, Any], pieces: list[str], first_token_s: float | None
    ) -> Completion:
        matched: int | str | None = self._cutter.matched
        kind = end.WhichOneof("matched_stop")
        if matched is None and kind is not None:
            matched = getattr(end, kind)
        error = None
        if end.finish_reason not in ("stop", "length"):
            error = f"the server ended it: {one_line(end.finish_reason)}"
        return Completion(
            text=None if self._decoder is None else "".join(pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=end.finish_reason,
            matched_stop=matched,
            num_prompt_tokens=end.prompt_tokens,
            num_cached_tokens=end.cached_tokens,
            statistics=statistics,
            time_to_first_token_s=first_token_s,
            total_s=time.perf_counter() - self._started,
            error=error,
        )


class _errors:
    """Turns what gRPC raises into `ServerError`."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
            told = _statistics(error.trailing_metadata()).get("request_id", self._request_id)
            raise ServerError(error.code(), one_line(error.details() or "no details", 2000), str(told)) from None


def _statistics(metadata: Any) -> dict[str, Any]:
    """The trailing metadata that are JSON; others, of a proxy on the way, are none of the server's."""
    values = {}
    for name, text in metadata or ():
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            continue
    return values


def tokenizer_from_zip(content: bytes, sha256: str) -> Tokenizer:
    """The tokenizer of the archive that GetTokenizer sends. Raises `ServerError`, DATA_LOSS, where it is none."""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ServerError(grpc.StatusCode.DATA_LOSS, f"tokenizer: its {len(content)} bytes are not those of {sha256!r}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive, archive.open("tokenizer.json") as file:
            text = file.read(MAX_TOKENIZER_BYTES + 1)
        if len(text) > MAX_TOKENIZER_BYTES:
            raise ValueError(f"longer than {MAX_TOKENIZER_BYTES} bytes")
        return Tokenizer(tokenizers.Tokenizer.from_str(text.decode("utf-8")))
    except Exception as error:  # zipfile and tokenizers raise many kinds
        raise ServerError(grpc.StatusCode.DATA_LOSS, f"tokenizer: cannot be used: {one_line(error)}") from None


def generate_request(
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int | None,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: Sequence[str],
    stop_token_ids: Sequence[int] | None,
    grammar: Grammar | None,
    request_id: str,
) -> pb.GenerateRequest:
    """The message of `Client.generate`; ValueError, with the argument's name, for what it cannot carry."""
    request = pb.GenerateRequest(stream=True)
    params = request.sampling_params
    params.n = 1
    params.repetition_penalty = 1.0
    params.skip_special_tokens = True
    # In these the protocol's zero means that there is no filter, which is not what somebody means who writes it.
    for name, value in (("top_k", top_k), ("top_p", top_p)):
        if value is not None and value == 0:
            raise ValueError(f"{name}: got {value}, allowed is a number > 0, or None for no filter")
    plain = (
        ("request_id", request, "request_id", request_id),
        ("max_new_tokens", params, "max_tokens", max_new_tokens),
        ("temperature", params, "temperature", temperature),
        ("top_k", params, "top_k", top_k),
        ("top_p", params, "top_p", top_p),
        ("min_p", params, "min_p", min_p),
        ("seed", params, "seed", seed),
    )
    for name, message, field, value in plain:
        if value is not None:
            _set(name, value, lambda m=message, f=field, v=value: setattr(m, f, v))
    _set("stop", stop, lambda: params.stop.extend(stop))
    if stop_token_ids is not None:
        params.ignore_eos = True
        _set("stop_token_ids", stop_token_ids, lambda: params.stop_token_ids.extend(stop_token_ids))
    if isinstance(prompt, str):
        _set("prompt", prompt, lambda: setattr(request, "text", prompt))
    else:
        request.tokenized.SetInParent()
        _set("prompt", prompt, lambda: request.tokenized.input_ids.extend(prompt))
    if grammar is not None:
        _set_grammar(params, grammar)
    return request


def _set(name: str, value: Any, assign: Any) -> None:
    try:
        assign()
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: got {shown(value)}, which the protocol cannot carry ({one_line(error)})") from None


def _set_grammar(params: pb.SamplingParams, grammar: Grammar) -> None:
    if grammar.kind == "json_schema" and grammar.compact:
        # The protocol has no field for it, and a schema of the protocol no key; Lark has one.
        schema = {**json.loads(grammar.text), "x-guidance": {"whitespace_flexible": False}}
        params.grammar = f"start: %json {json.dumps(schema)}"
    elif grammar.kind == "json_schema":
        params.json_schema = grammar.text
    elif grammar.kind == "choices":
        params.choice.choices.extend(json.loads(grammar.text))
    elif grammar.kind == "lark":
        params.grammar = grammar.text
    else:
        params.regex = grammar.text
