"""Calls methods of a servicer with JSON: the unary half of the Connect protocol (connectrpc.com/docs/protocol).

Generic over the service's descriptor. The servicer is called as the gRPC server calls it, in this process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.grpc_status import rpc_status, status_code
from octavo_shared.process.events import Event

# Timeout of a call, in seconds, unless the client wants less (Connect-Timeout-Ms).
CALL_TIMEOUT_S = 10.0

# Names of methods that only read begin with one of these (AIP-130 has the first two).
_VERBS_THAT_LOOK = ("Get", "List", "Explain")

# Status names of the protocol that are not gRPC's in small letters.
_CONNECT_NAMES = {grpc.StatusCode.CANCELLED: "canceled"}

# HTTP statuses of the protocol. 499 is in no standard but widely used: the client went away.
_HTTP_STATUSES = {
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
}

_logger = logging.getLogger(__name__)


class CallError(Exception):
    """A failed call.

    Args:
        code: Its status.
        message: Why, in a sentence.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def connect_code(self) -> str:
        """The name of the status in the Connect protocol."""
        return _CONNECT_NAMES.get(self.code, self.code.name.lower())

    @property
    def http_status(self) -> int:
        """The status of the HTTP response."""
        return int(_HTTP_STATUSES.get(self.code, HTTPStatus.INTERNAL_SERVER_ERROR))


class JsonTranscoder:
    """Calls the unary methods of a service that change nothing.

    Args:
        servicer: Answers its calls, without asking for their context.
    """

    def __init__(self, service: ServiceDescriptor, servicer: object) -> None:
        self._service = service
        self._servicer = servicer

    def has(self, name: str) -> bool:
        """Return whether the service has a method of this name."""
        return name in self._service.methods_by_name

    async def call(self, name: str, body: bytes, timeout_s: float) -> str:
        """Call a method that `has` knows; return its answer as JSON, without fields that are zero.

        Args:
            name: The method's.
            body: The request as JSON, in the mapping of protobuf.
            timeout_s: How long the call may take, in seconds.

        Raises: CallError: the call is refused, or fails.
        """
        method: MethodDescriptor = self._service.methods_by_name[name]
        if not is_offered(method):
            raise CallError(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{name} is not available over HTTP, which only reads; call it over gRPC",
            )
        request = _read(body, GetMessageClass(method.input_type)())
        answer: Callable[[Message, None], Awaitable[Message]] = getattr(self._servicer, name)
        try:
            async with asyncio.timeout(timeout_s):
                response = await answer(request, None)
        except TimeoutError:
            message = f"the call took longer than {timeout_s:g} s"
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
        except Exception as error:
            if not isinstance(error, OctavoServiceError):
                _logger.exception(Event("http_call_failed", path=f"/{self._service.full_name}/{name}"))
            raise call_error(error) from error
        # In a thread: a long list takes longer than a step may wait for the event loop.
        return await asyncio.to_thread(json_format.MessageToJson, response, indent=None)


def call_error(error: Exception) -> CallError:
    """Return a servicer's error as a gRPC client would get it."""
    return CallError(status_code(error), rpc_status(error).message)


def is_offered(method: MethodDescriptor) -> bool:
    """Return whether a method can be called with JSON: it answers once, and only reads."""
    return not (method.client_streaming or method.server_streaming) and method.name.startswith(_VERBS_THAT_LOOK)


def _read(body: bytes, request: Message) -> Message:
    try:
        if not body.lstrip().startswith(b"{"):
            raise ValueError("it is not an object")  # the parser fails at null, and takes [] for {}
        return json_format.Parse(body, request)
    except (json_format.ParseError, ValueError, RecursionError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CallError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the body is not a {request.DESCRIPTOR.full_name} as JSON, such as {{}}: {why}",
        ) from error
