"""The metrics that every service has: its gRPC calls, and its certificate.

The metrics of calls have the names of gRPC's own middleware for Go and Java. `CallMetrics` stands outside everything
else, including the mapping of errors to statuses, so it counts the code that the client gets. It keeps
plain numbers by method and code; a message of a stream costs one addition. Unknown methods get no label:
clients could make up any number of them.
"""

# The stubs of grpc make generic what is not at run time.
from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc

from octavo_shared.grpc.interceptor import Context, Handler, HandlerInterceptor, handler_parts
from octavo_shared.grpc.tls import ServerTls
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, LabelValues, Metric

_METHOD = ("grpc_type", "grpc_service", "grpc_method")

STARTED = Metric("grpc_server_started_total", "counter", "RPCs started, on every port except the health port.", _METHOD)
HANDLED = Metric(
    "grpc_server_handled_total",
    "counter",
    "RPCs completed, by status code; CANCELLED: the client disconnected.",
    (*_METHOD, "grpc_code"),
)
RECEIVED = Metric("grpc_server_msg_received_total", "counter", "Messages received in completed RPCs.", _METHOD)
SENT = Metric("grpc_server_msg_sent_total", "counter", "Messages sent in completed RPCs.", _METHOD)
HANDLING = Metric("grpc_server_handling_seconds", "histogram", "Duration of an RPC, in seconds.", _METHOD)

CERTIFICATE_EXPIRY = Metric(
    "octavo_tls_certificate_expiry_seconds",
    "gauge",
    "Expiry time of the --tls-cert certificate, as a Unix timestamp; absent without TLS.",
)

METRICS = (STARTED, HANDLED, RECEIVED, SENT, HANDLING, CERTIFICATE_EXPIRY)

# From a unary call on the same machine to a long answer: doubling from 1 ms to 131 s.
_HANDLING_BOUNDS = tuple(0.001 * 2**power for power in range(18))

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class CallMetrics(HandlerInterceptor):
    """Counts the calls of all ports that use it.

    Args:
        clock: Monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._methods: dict[LabelValues, _Method] = {}

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler with its calls counted."""
        counts = self._counts_of(method, handler)
        behavior, rebuild = handler_parts(handler)

        async def counted(request: Any, context: Context) -> Any:
            begin_s = self._clock()
            counts.num_started += 1
            received = _CountedRequests(request) if handler.request_streaming else None
            sent = _CountingContext(context)
            code = grpc.StatusCode.UNKNOWN
            try:
                answer = await behavior(received or request, sent)
                code = _code_of(context)
                return answer
            except asyncio.CancelledError:
                code = _code_of_cancelled(context)
                raise
            except BaseException:
                code = _code_of(context, otherwise=code)
                raise
            finally:
                counts.num_received += received.num_messages if received is not None else 1
                counts.num_sent += sent.num_messages if handler.response_streaming else int(code is grpc.StatusCode.OK)
                counts.num_handled[code.name] += 1
                counts.handling.observe(self._clock() - begin_s)

        return rebuild(counted, handler.request_deserializer, handler.response_serializer)

    def families(self) -> Iterator[Family]:
        """Yield the metrics as they are now."""
        methods = self._methods
        yield STARTED.family({labels: method.num_started for labels, method in methods.items()})
        yield HANDLED.family(
            {(*labels, code): num for labels, method in methods.items() for code, num in method.num_handled.items()}
        )
        yield RECEIVED.family({labels: method.num_received for labels, method in methods.items()})
        yield SENT.family({labels: method.num_sent for labels, method in methods.items()})
        yield HANDLING.histogram_family({labels: method.handling for labels, method in methods.items()})

    def _counts_of(self, full_name: str, handler: Handler) -> _Method:
        """Return the numbers of a method that is served."""
        _, service, name = full_name.split("/", 2)
        labels = (_type_of(handler), service, name)
        if labels not in self._methods:
            self._methods[labels] = _Method()
        return self._methods[labels]


def service_families(calls: CallMetrics, tls: ServerTls | None) -> Iterator[Family]:
    """Yield the metrics of a service as they are now; `tls` None: it speaks plaintext."""
    yield from calls.families()
    yield CERTIFICATE_EXPIRY.family({} if tls is None else {(): tls.not_after_s})


class _Method:
    """The counts of one method."""

    __slots__ = ("handling", "num_handled", "num_received", "num_sent", "num_started")

    def __init__(self) -> None:
        self.num_started = 0
        self.num_received = 0
        self.num_sent = 0
        self.num_handled: Counter[str] = Counter()
        self.handling = Histogram(_HANDLING_BOUNDS)


class _CountingContext:
    """A call's context that counts the messages written."""

    __slots__ = ("_context", "num_messages")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.num_messages = 0

    def write(self, message: Any) -> Awaitable[None]:
        self.num_messages += 1
        return self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _CountedRequests:
    """The requests of a stream, counted as they are read."""

    __slots__ = ("_iterator", "_requests", "num_messages")

    def __init__(self, requests: AsyncIterable[Any]) -> None:
        self._requests = requests
        self._iterator: AsyncIterator[Any] | None = None
        self.num_messages = 0

    def __aiter__(self) -> _CountedRequests:
        return self

    async def __anext__(self) -> Any:
        if self._iterator is None:  # a refused call must not begin to read: gRPC complains
            self._iterator = aiter(self._requests)
        message = await anext(self._iterator)
        self.num_messages += 1
        return message


def _type_of(handler: Handler) -> str:
    if handler.request_streaming:
        return "bidi_stream" if handler.response_streaming else "client_stream"
    return "server_stream" if handler.response_streaming else "unary"


def _code_of(context: Context, otherwise: grpc.StatusCode = grpc.StatusCode.OK) -> grpc.StatusCode:
    """Return the code that the call was ended with; `otherwise`: none was set."""
    said: grpc.StatusCode | int | None = context.code()  # the type stub is too narrow
    code = _CODES.get(said, grpc.StatusCode.UNKNOWN) if isinstance(said, int) else said
    return otherwise if code in (None, grpc.StatusCode.OK) else code


def _code_of_cancelled(context: Context) -> grpc.StatusCode:
    """Return the code that the client of a cancelled call saw: its deadline has passed, or it left."""
    remaining_s = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
