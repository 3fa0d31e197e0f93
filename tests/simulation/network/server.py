"""The server's end: takes the handlers that generated code registers, and the interceptors of the services."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Never

import grpc
import grpc.aio

from tests.simulation.handle import SimulatedHandle
from tests.simulation.network.pipe import Pipe
from tests.simulation.processes import SimulatedProcess

if TYPE_CHECKING:
    from tests.simulation.network.link import Link, Network


@dataclass(frozen=True, slots=True)
class Start:
    """What begins a call; `deadline_s` by the loop's clock."""

    method: str
    metadata: tuple[tuple[str, str | bytes], ...]
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class HalfClose:
    """The client sends nothing more."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client has ended the call."""


@dataclass(frozen=True, slots=True)
class Headers:
    """The server has taken the call, and said so before its first message."""

    metadata: tuple[tuple[str, str | bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended; `is_local`: the client cancelled it."""

    code: grpc.StatusCode
    details: str = ""
    trailers: tuple[tuple[str, str | bytes], ...] = ()
    is_local: bool = False


class SimulatedServer:
    """Serves at an address what generated code adds to it; has those methods of grpc.aio.Server.

    Args:
        process: Runs the handlers.
        address: host:port.
        interceptors: Around every call, the first one outermost.

    Attributes:
        network: Where it listens; None: nowhere yet.
        is_stopping: Whether it takes no more calls.
    """

    def __init__(
        self, process: SimulatedProcess, address: str, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
    ) -> None:
        self.process = process
        self.address = address
        self.network: Network | None = None
        self.is_stopping = False
        self._interceptors = interceptors
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Serve these."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Nothing: they are among the generic ones."""

    async def stop(self, grace: float | None) -> None:
        """Take no more calls; end those that still run after so many seconds, and the connections."""
        self.is_stopping = True
        links = self.network.stop_listening(self) if self.network is not None else []
        for link in links:
            link.go_away()
        tasks = [call.task for link in links for call in link.server_calls if call.task is not None]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for link in links:
            link.close_by_server()

    def incoming(self, link: "Link", down: Pipe[Any]) -> "ServerCall":
        """Return the server's side of a call that is about to arrive."""
        return ServerCall(self, link, down)

    async def handler_of(self, details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call, within its interceptors; None: there is none."""

        async def find(details: grpc.HandlerCallDetails) -> Any:
            return next(filter(None, (handlers.service(details) for handlers in self._handlers)), None)

        continuation: Any = find
        for interceptor in reversed(self._interceptors):
            continuation = _intercepted(interceptor, continuation)
        return await continuation(details)


def _intercepted(interceptor: grpc.aio.ServerInterceptor, inner: Any) -> Callable[[Any], Any]:
    return lambda details: interceptor.intercept_service(inner, details)


class _CallDetails(grpc.HandlerCallDetails):
    def __init__(self, method: str, metadata: Any) -> None:
        self.method = method
        self.invocation_metadata = metadata


class ServerCall:
    """The server's side of a call; the context of its handler.

    Attributes:
        pipe: Brings what the client sends.
        task: Runs the handler; None: the call's deadline is in not arrived yet.
    """

    def __init__(self, server: SimulatedServer, link: "Link", down: Pipe[Any]) -> None:
        self.pipe: Pipe[Any] | None = None
        self._server = server
        self._loop = server.process.loop
        self._link = link
        self._down = down
        self._start: Start | None = None
        self._deadline: SimulatedHandle | None = None
        self._inbox: deque[bytes] = deque()
        self._is_half_closed = False
        self._is_over = False
        self._is_cancelled = False
        self._changed: asyncio.Future[None] | None = None
        self.task: asyncio.Task[None] | None = None
        self._has_aborted = False
        self._serialize: Callable[[Any], bytes] | None = None

    # What arrives ------------------------------------------------------------------------------------

    def arrive(self, item: Any) -> None:
        """Take what the client has sent."""
        process = self._server.process
        if process.is_dead or self._is_over:
            return
        if isinstance(item, Start) and self._server.is_stopping:
            self._end(Status(grpc.StatusCode.UNAVAILABLE, "the server has stopped"))
        elif isinstance(item, Start):
            self._start = item
            self._link.add_server_call(self)
            self.task = process.start(self._serve())
            if item.deadline_s is not None:
                self._deadline = process.loop.call_at(item.deadline_s, self.cancel, context=process.context())
        elif isinstance(item, Cancelled):
            self.cancel()
        else:
            if isinstance(item, HalfClose):
                self._is_half_closed = True
            else:
                self._inbox.append(item)
            if self._changed is not None and not self._changed.done():
                self._changed.set_result(None)

    def cancel(self) -> None:
        """The client is gone, or does not want an answer any more.

        A handler that waits for a message first sees the messages end, as with grpc.aio.
        """
        if self._is_over or self._is_cancelled or self.task is None:
            return
        self._is_cancelled = True
        if self._changed is not None and not self._changed.done():
            self._is_half_closed = True
            self._changed.set_result(None)
        else:
            self.task.cancel()

    def _end(self, status: Status) -> None:
        """The call is over as the server sees it, though its handler may still run."""
        if not self._is_over:
            self._is_over = True
            if self._deadline is not None:
                self._deadline.cancel()
            self._link.remove_server_call(self)
            self._down.send(status)

    # The handler -------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        status = Status(grpc.StatusCode.OK)
        try:
            await self._handle()
        except grpc.aio.AbortError:
            return
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED, "Cancelled on the server side")
            if self.time_remaining() == 0.0:
                status = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        except Exception as error:
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        self._end(status)

    async def _handle(self) -> None:
        assert self._start is not None
        handler = await self._server.handler_of(_CallDetails(self._start.method, self._start.metadata))
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self._serialize = handler.response_serializer
        streams_in, streams_out = handler.request_streaming, handler.response_streaming
        kinds = {
            (False, False): handler.unary_unary,
            (False, True): handler.unary_stream,
            (True, False): handler.stream_unary,
            (True, True): handler.stream_stream,
        }
        request: Any = self._requests(handler.request_deserializer)
        if not streams_in:
            content = await self._next()
            if content is None:
                raise asyncio.CancelledError  # the client left before it came
            request = content if handler.request_deserializer is None else handler.request_deserializer(content)
        answer = kinds[streams_in, streams_out](request, self)
        if isinstance(answer, AsyncGeneratorType):
            async for response in answer:
                await self.write(response)
        elif streams_out:
            await answer
        else:
            await self.write(await answer)

    async def _requests(self, deserialize: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """Yield the client's messages until it half-closes."""
        while (content := await self._next()) is not None:
            yield content if deserialize is None else deserialize(content)

    async def _next(self) -> bytes | None:
        """Return the client's next message; None: it has half-closed."""
        assert self.pipe is not None
        while not self._inbox:
            if self._is_half_closed:
                return None
            self._changed = self._loop.create_future()
            try:
                await self._changed
            finally:
                if self._is_cancelled and self.task is not None:
                    self._loop.call_soon(self.task.cancel)
        content = self._inbox.popleft()
        self.pipe.note_read(len(content))
        return content

    # The context, as handlers know it ------------------------------------------------------------------

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Send the headers of the answer."""
        if not self._is_over:
            self._down.send(Headers(tuple(metadata)))

    async def write(self, message: Any) -> None:
        """Send a message as soon as the client has room for it."""
        if self._has_aborted:
            raise grpc.aio.AbortError("Locally aborted.")
        await self._down.room()
        content = message if self._serialize is None else self._serialize(message)
        self._down.send(content, len(content))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        """End the call with a status."""
        if self._has_aborted:
            raise grpc.aio.UsageError("Abort already called!")
        self._has_aborted = True
        self._end(Status(code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError("Locally aborted.")

    def invocation_metadata(self) -> Any:
        """Return what the client sent with the call."""
        assert self._start is not None
        return self._start.metadata

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None: there is none."""
        assert self._start is not None
        deadline_s = self._start.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - asyncio.get_running_loop().time())

    def peer(self) -> str:
        """Return who calls."""
        return f"ipv4:{self._link.client.name}"

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return what grpc.aio says of a connection without TLS."""
        return {"transport_security_type": [b"insecure"], "security_level": [b"TSI_SECURITY_NONE"]}

    def cancelled(self) -> bool:
        """Return whether the client is gone."""
        return self._is_cancelled

    def done(self) -> bool:
        """Return whether the call is over."""
        return self._is_over
