"""Messages that are no protobuf: refused as the client's mistake, not reported as a fault of the server."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError


class _Undecodable:
    """What stands for a message that could not be decoded, until the handler can answer."""


class DecodeGuard(grpc.aio.ServerInterceptor):
    """For methods with one request message; a stream of requests is left alone."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        wrap, call = (
            (grpc.unary_stream_rpc_method_handler, handler.unary_stream)
            if handler.response_streaming
            else (grpc.unary_unary_rpc_method_handler, handler.unary_unary)
        )

        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            if isinstance(request, _Undecodable):
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "message: got bytes that are no message of this method, allowed is protobuf with UTF-8 text",
                )
            return await call(request, context)

        deserialize = functools.partial(_decode, handler.request_deserializer)
        return wrap(guarded, request_deserializer=deserialize, response_serializer=handler.response_serializer)


def _decode(deserializer: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserializer(data)
    except DecodeError:
        return _Undecodable()
