"""Requests as they arrive: bytes that are not decoded yet.

A generated handler decodes on the event loop, and Python's interpreter stays locked meanwhile: a large message would
stop every stream. So the methods that take prompts get a `RequestBody`. It is counted (`message_scan.py`), then
decoded; both in a thread, unless it is small.
"""

from collections.abc import Mapping
from typing import Generic, TypeVar

from google.protobuf.message import Message

from octavo_shared.grpc.interceptor import Handler, HandlerInterceptor, handler_parts
from octavo_shared.step_wire.message_bytes import decode
from scheduler_svc.front.api.message_scan import CountLimit, MessageScan

# A body of this size is counted and decoded in a few milliseconds, whatever it holds.
SMALL_BODY_BYTES = 16 * 2**10

M = TypeVar("M", bound=Message)


class RequestBody(Generic[M]):
    """The encoded request of one call.

    Attributes:
        content: The bytes.
        request_id: The request's id, for the log, once it is decoded; empty: it has none.
    """

    __slots__ = ("content", "message_class", "request_id")

    def __init__(self, content: bytes, message_class: type[M]) -> None:
        self.content = content
        self.message_class = message_class
        self.request_id = ""

    @property
    def is_small(self) -> bool:
        """Whether it may be decoded on the event loop."""
        return len(self.content) <= SMALL_BODY_BYTES

    def decode(self, limits: Mapping[str, CountLimit]) -> M:
        """Return the request, unless a field has more elements than `limits` allows.

        Raises: InvalidFieldError, MalformedMessageError: see `MessageScan.check`.
        """
        MessageScan(limits).check(self.content, self.message_class)
        message = decode(self.message_class.FromString, self.content)
        self.request_id = getattr(message, "request_id", "")
        return message


class KeepBodies(HandlerInterceptor):
    """Gives some methods the body in place of the decoded request. Stands inside all other interceptors.

    Args:
        methods: Full names of the methods, such as `/octavo.generation.v1.GenerationService/Generate`, with the
            class of their request.
    """

    def __init__(self, methods: Mapping[str, type[Message]]) -> None:
        self._methods = dict(methods)

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler with the body in place of the request."""
        message_class = self._methods.get(method)
        if message_class is None:
            return handler
        behavior, rebuild = handler_parts(handler)
        return rebuild(behavior, lambda content: RequestBody(content, message_class), handler.response_serializer)
