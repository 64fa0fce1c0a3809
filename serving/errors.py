"""How a request can fail, and the one table from exceptions to gRPC statuses."""

from __future__ import annotations

import grpc

from ddtree_jax.errors import UnsupportedRequestError


class QueueFullError(Exception):
    """As many requests wait as may."""


class NotReadyError(Exception):
    """The server loads its model, shuts down, or has stopped."""


class NotBuiltError(Exception):
    """A feature of the protocol that this server does not have."""


class CancelledError(Exception):
    """The client has gone, or asked for an end."""


class DeadlineError(Exception):
    """The client's deadline has passed."""


class InternalError(Exception):
    """A fault of the program; the message names the request, the log has the traceback."""


# The first row whose exception matches counts; anything else is INTERNAL.
STATUS_BY_EXCEPTION: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NotBuiltError, grpc.StatusCode.UNIMPLEMENTED),
    (UnsupportedRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (QueueFullError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (CancelledError, grpc.StatusCode.CANCELLED),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)


def status_of(error: Exception) -> grpc.StatusCode:
    """The status that tells a client of an exception."""
    for kind, status in STATUS_BY_EXCEPTION:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL
