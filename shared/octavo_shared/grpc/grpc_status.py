"""The one table from the error tree to gRPC status, and the interceptor that applies it.

Servicers raise errors of `octavo_shared/errors.py` and never call `context.abort`. `StatusInterceptor` wraps
every handler of a server, decodes its request and ends the call with the status below. Details that a
program can use travel as `google.rpc.Status` in the trailing metadata `grpc-status-details-bin`.
Read next: `octavo_shared/grpc/grpc_server.py`, which installs the interceptor.
"""

# The stubs of grpc make generic what is not at run time.
from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Never

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from octavo.values.status_details import DETAILS_KEY, DRAINING, ERROR_DOMAIN, LOST_TOO_OFTEN
from octavo_shared.errors import (
    CacheTooSmallError,
    CallerError,
    DeadlineTooShortError,
    DrainingError,
    ExecutorFaultError,
    FencedError,
    InvalidFieldError,
    InvalidStepError,
    LostTooOftenError,
    MalformedMessageError,
    NotFiniteError,
    OctavoServiceError,
    PermissionDeniedError,
    QueueFullError,
    RequestAbortedError,
    RequestExistsError,
    SlowCallerError,
    StepFailedError,
    StepGapError,
    TokenQuotaError,
    TooManyUntakenError,
    UnauthenticatedError,
    UnavailableError,
    UnknownNameError,
    WorldError,
)
from octavo_shared.grpc.interceptor import (
    Context,
    Handler,
    HandlerInterceptor,
    handler_parts,
    peer_address,
    run_handler,
)
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.events import Event
from octavo_shared.step_wire.message_bytes import decode

# gRPC's text when no address of a name took the connection; the reason is at the end.
_NO_CONNECTION = re.compile(
    r"failed to connect to all addresses; last error: (?:[A-Z_]+: \S+: )?"
    r"(?:Failed to connect to remote host: (?:connect: )?)?(?P<reason>.+?)(?: \(\d+\))?"
)

# Status and details travel as HTTP/2 headers, which gRPC limits to 8 KiB; beyond, the status is lost.
_MAX_MESSAGE_CHARS = 1000
_MAX_INTERNAL_MESSAGE_CHARS = 300

# Least time between two log lines about bytes that are no request of a method, in seconds.
_MALFORMED_INTERVAL_S = 10.0

_logger = logging.getLogger(__name__)


def status_code(error: BaseException) -> grpc.StatusCode:
    """Return the status code of an error: that of its nearest class in the table, else INTERNAL."""
    table: dict[type[BaseException], grpc.StatusCode] = {
        CallerError: grpc.StatusCode.INVALID_ARGUMENT,
        InvalidFieldError: grpc.StatusCode.INVALID_ARGUMENT,
        RequestExistsError: grpc.StatusCode.ALREADY_EXISTS,
        UnknownNameError: grpc.StatusCode.NOT_FOUND,
        FencedError: grpc.StatusCode.FAILED_PRECONDITION,
        SlowCallerError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        TooManyUntakenError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
        PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
        WorldError: grpc.StatusCode.UNAVAILABLE,
        QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        TokenQuotaError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        CacheTooSmallError: grpc.StatusCode.RESOURCE_EXHAUSTED,
        DeadlineTooShortError: grpc.StatusCode.DEADLINE_EXCEEDED,
        UnavailableError: grpc.StatusCode.UNAVAILABLE,
        RequestAbortedError: grpc.StatusCode.ABORTED,
        NotFiniteError: grpc.StatusCode.INTERNAL,
        InvalidStepError: grpc.StatusCode.INVALID_ARGUMENT,
        StepGapError: grpc.StatusCode.OUT_OF_RANGE,
        StepFailedError: grpc.StatusCode.INTERNAL,
        ExecutorFaultError: grpc.StatusCode.UNAVAILABLE,
    }
    known = (table[cls] for cls in type(error).__mro__ if cls in table)
    return next(known, grpc.StatusCode.INTERNAL)


def rpc_status(error: Exception) -> status_pb2.Status:
    """Return the code, message and details of an error as `google.rpc.Status`.

    The message of an error outside our tree is its class and first line: the rest may be
    internals or a user's text.
    """
    code: int = status_code(error).value[0]
    status = status_pb2.Status(code=code, message=_message(error))
    for detail in _details(error):
        status.details.add().Pack(detail)
    # Tells this status from a status that gRPC makes up when a connection breaks.
    reasons = {LostTooOftenError: LOST_TOO_OFTEN, DrainingError: DRAINING}
    reason = reasons.get(type(error), status_code(error).name)
    origin = error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    status.details.add().Pack(origin)
    return status


async def abort(context: Context, error: Exception) -> Never:
    """End the call with the status of `error`.

    A handler that breaks off its own writes sends the initial metadata first: gRPC sends no status while a message
    that takes the metadata along is on its way, and the caller would wait for ever.

    Raises: grpc.aio.AbortError, always.
    """
    status = rpc_status(error)
    await context.abort(status_code(error), status.message, ((DETAILS_KEY, status.SerializeToString()),))


class StatusInterceptor(HandlerInterceptor):
    """Ends every call that raised with the status of the error; logs unexpected errors.

    Requests are decoded here, after the caller was checked: malformed bytes end the call in the same way.
    """

    def __init__(self) -> None:
        self._malformed: dict[str, _Malformed] = defaultdict(_Malformed)

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler with its errors turned into statuses."""
        behavior, rebuild = handler_parts(handler)
        deserialize = handler.request_deserializer
        read = None if deserialize is None else partial(decode, deserialize)

        async def guarded(request: Any, context: Context) -> Any:
            try:
                if read is not None and not handler.request_streaming:
                    request = read(request)
                return await run_handler(behavior, request, context)
            except grpc.aio.BaseError:
                # The call has its status already, or is broken.
                raise
            except Exception as error:
                if isinstance(error, MalformedMessageError):
                    self._malformed[method].tell(method, peer_address(context))
                elif not isinstance(error, OctavoServiceError):
                    _logger.exception(Event("rpc_failed", method=method, request_id=_request_id(request)))
                await abort(context, error)

        return rebuild(guarded, read if handler.request_streaming else None, handler.response_serializer)


class _Malformed:
    """Logs, in few lines, calls of one method with malformed requests: any client can make any number of them."""

    def __init__(self) -> None:
        self._num_calls = 0  # since the last line
        self._told_at_s = -math.inf

    def tell(self, method: str, peer: str) -> None:
        """Count one call."""
        self._num_calls += 1
        now_s = monotonic_s()
        if now_s - self._told_at_s >= _MALFORMED_INTERVAL_S:
            _logger.warning(Event("malformed_request", method=method, peer=peer, calls=self._num_calls))
            self._num_calls, self._told_at_s = 0, now_s


def _request_id(message: object) -> str | None:
    """Return the id in the message of a call, if it has one."""
    return getattr(message, "request_id", None) or None


def _message(error: Exception) -> str:
    if isinstance(error, OctavoServiceError):
        return str(error)[:_MAX_MESSAGE_CHARS]
    first_line = (str(error).splitlines() or [""])[0]
    return f"internal error: {type(error).__name__}: {first_line}"[:_MAX_INTERNAL_MESSAGE_CHARS]


def _details(error: Exception) -> Sequence[Message]:
    if isinstance(error, InvalidFieldError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_message(error))
        return [error_details_pb2.BadRequest(field_violations=[violation])]
    if isinstance(error, QueueFullError | TokenQuotaError) and error.retry_after_s is not None:
        delay = Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]
    return []


def is_refused(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a call found no connection because no process listens there; gRPC says it in words only."""
    match = _NO_CONNECTION.fullmatch(error.details() or "")
    return match is not None and match["reason"] == "Connection refused"


def failure_text(error: grpc.aio.AioRpcError) -> str:
    """Return why a call failed, for people: its status, and the reason without gRPC's list of attempts."""
    details = error.details() or "no message was given"
    match = _NO_CONNECTION.fullmatch(details)
    if match is not None:
        reason = match["reason"]
        details = reason[0].lower() + reason[1:] if reason[1:2].islower() else reason
    return f"{error.code().name}: {details}"
