"""The client's end: a channel that generated stubs work on, and its calls, which behave as those of grpc.aio do.

`tests/simulation/test_network.py` plays the same scenes on grpc.aio and on this one and compares what a client sees.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable
from contextlib import suppress
from typing import Any, Self

import grpc
import grpc.aio

from tests.simulation.network.link import Link, Network
from tests.simulation.network.pipe import Pipe
from tests.simulation.network.server import Cancelled, HalfClose, Headers, Start, Status
from tests.simulation.processes import PROCESS, SimulatedProcess

# gRPC's defaults.
CONNECT_TIMEOUT_S = 20.0
RECONNECT_BACKOFF_S = 1.0

Metadata = Iterable[tuple[str, str | bytes]]


class ConnectError(Exception):
    """A channel has no connection, and why."""


class SimulatedChannel:
    """A channel of a process to an address.

    Args:
        network: Carries it.
        address: Where the server listens, host:port.
        keepalive_s: After so many seconds of silence its calls break; None: never.

    Attributes:
        is_closed: Whether it was closed: it takes no more calls.
    """

    def __init__(self, network: Network, address: str, keepalive_s: float | None = None) -> None:
        self.network = network
        self.process: SimulatedProcess = PROCESS.get()
        self.keepalive_s = keepalive_s
        self._address = address
        self._link: Link | None = None
        self._connecting: asyncio.Task[Link] | None = None
        self._refused_until_s = 0.0
        self._refusal = ""
        self._calls: dict[ClientCall, None] = {}
        self.is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Cancel what runs and close the connection."""
        self.is_closed = True
        for call in list(self._calls):
            call.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        for link in self.network.links_of(self.process):
            if link.channel is self and link.is_open_at_client:
                link.close_by_client()

    def unary_unary(self, method: str, *coders: Any, **keywords: Any) -> "MultiCallable":
        """Return what makes calls of a method."""
        return MultiCallable(self, UnaryCall, method, *coders, **keywords)

    def unary_stream(self, method: str, *coders: Any, **keywords: Any) -> "MultiCallable":
        """Return what makes calls of a method."""
        return MultiCallable(self, StreamCall, method, *coders, **keywords)

    stream_stream = unary_stream

    def stream_unary(self, method: str, *coders: Any, **keywords: Any) -> "MultiCallable":
        """Return what makes calls of a method."""
        return MultiCallable(self, StreamUnaryCall, method, *coders, **keywords)

    @property
    def link(self) -> Link | None:
        """The connection for new calls; None: there is none."""
        link = self._link
        return link if link is not None and link.is_open_at_client and not link.is_going_away else None

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return whether there is a connection."""
        if self.link is not None:
            return grpc.ChannelConnectivity.READY
        if self.network.loop.time() < self._refused_until_s:
            return grpc.ChannelConnectivity.TRANSIENT_FAILURE
        return grpc.ChannelConnectivity.CONNECTING if self._connecting else grpc.ChannelConnectivity.IDLE

    async def connect(self) -> Link:
        """Return a connection. Raises ConnectError: there will be none for now."""
        if self.link is not None:
            return self.link
        loop = self.network.loop
        if loop.time() < self._refused_until_s:
            raise ConnectError(self._refusal)
        if self._connecting is None:
            self._connecting = loop.create_task(self._connect())
            self._connecting.add_done_callback(_take_exception)
        try:
            return await asyncio.shield(self._connecting)
        except ConnectError as error:
            self._refusal = str(error)
            self._refused_until_s = loop.time() + RECONNECT_BACKOFF_S
            raise

    async def _connect(self) -> Link:
        """Shake hands: there and back twice."""
        network, deadline_s = self.network, self.network.loop.time() + CONNECT_TIMEOUT_S
        try:
            await asyncio.sleep(2 * network.delay_s())
            server = network.server_at(self._address)
            if server is None:
                raise ConnectError(_refused(self._address, "Failed to connect to remote host: Connection refused"))
            while not network.reaches(self.process, server.process) or not server.process.is_running:
                if network.loop.time() > deadline_s:
                    raise ConnectError(_refused(self._address, "FD Shutdown: connection attempt timed out"))
                await asyncio.sleep(0.5)
            await asyncio.sleep(2 * network.delay_s())
            if not network.is_listening(server):
                raise ConnectError(_refused(self._address, "recvmsg:Connection reset by peer"))
            self._link = network.connect(self, server)
            return self._link
        finally:
            self._connecting = None

    def add(self, call: "ClientCall") -> None:
        """A call begins."""
        self._calls[call] = None

    def remove(self, call: "ClientCall") -> None:
        """A call has ended."""
        self._calls.pop(call, None)


def _take_exception(task: asyncio.Task[Link]) -> None:
    """Whoever waited for the connection may be gone."""
    if not task.cancelled():
        task.exception()


def _refused(address: str, reason: str) -> str:
    return f"failed to connect to all addresses; last error: UNAVAILABLE: ipv4:{address}: {reason}"


class MultiCallable:
    """Makes calls of one method; see grpc.aio."""

    def __init__(
        self,
        channel: SimulatedChannel,
        kind: "type[UnaryCall | StreamCall | StreamUnaryCall]",
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> None:
        self._channel = channel
        self._kind = kind
        self._method = method
        self._coders = (request_serializer, response_deserializer)

    def __call__(
        self, request: Any = None, *, timeout: float | None = None, metadata: Metadata = (), **_: Any
    ) -> "UnaryCall | StreamCall":
        if self._channel.is_closed:
            raise grpc.aio.UsageError("Channel is closed.")
        call = self._kind(self._channel, self._method, *self._coders, timeout, metadata)
        if isinstance(request, AsyncIterable):
            assert isinstance(call, StreamCall)
            call.send_all(request)
        elif request is not None:
            call.send(request)
            call.half_close()
        return call


class ClientCall:
    """What unary calls and streams have in common.

    Args:
        channel: Carries it.
        method: Its full name.
        serialize: Makes bytes of a request.
        deserialize: Makes a response of bytes.
        timeout_s: Its time limit; None: none.
        metadata: For the server.
    """

    def __init__(
        self,
        channel: SimulatedChannel,
        method: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        timeout_s: float | None,
        metadata: Metadata,
    ) -> None:
        self._channel = channel
        self._loop = channel.network.loop
        self._serialize = serialize
        self._deserialize = deserialize
        self._inbox: deque[bytes] = deque()
        self._status: Status | None = None
        self._has_headers = asyncio.Event()
        self._headers: Metadata = ()
        self._changed: asyncio.Future[None] | None = None
        self._unsent: list[tuple[Any, int]] | None = []  # None: it has begun
        self._has_half_closed = False
        self._link: Link | None = None
        self._up: Pipe[Any] | None = None
        self._down: Pipe[Any] | None = None
        self._deadline = None if timeout_s is None else self._loop.call_later(max(0.0, timeout_s), self._time_out)
        deadline_s = None if timeout_s is None else self._loop.time() + timeout_s
        self._start = Start(method, tuple(metadata or ()), deadline_s)
        channel.add(self)
        self._beginning: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        if channel.link is not None:
            self._begin(channel.link)
        else:
            self._beginning = self._loop.create_task(self._connect())

    # Begin and end -----------------------------------------------------------------------------------

    async def _connect(self) -> None:
        try:
            link = await self._channel.connect()
        except ConnectError as error:
            self._end(Status(grpc.StatusCode.UNAVAILABLE, str(error)))
        else:
            if self._status is None:
                self._begin(link)

    def _begin(self, link: Link) -> None:
        window_bytes = self._channel.network.weather.window_bytes
        self._link = link
        link.add(self)
        self._down = Pipe(link, is_up=False, deliver=self._arrive, window_bytes=window_bytes)
        incoming = link.server.incoming(link, self._down)
        self._up = incoming.pipe = Pipe(link, is_up=True, deliver=incoming.arrive, window_bytes=window_bytes)
        self._up.send(self._start)
        unsent, self._unsent = self._unsent or [], None
        for item, num_bytes in unsent:
            self._up.send(item, num_bytes)

    def _arrive(self, item: bytes | Headers | Status) -> None:
        """Something came from the server."""
        if self._status is not None:
            return
        self._has_headers.set()
        if isinstance(item, Headers):
            self._headers = item.metadata
            return
        if isinstance(item, Status):
            self._end(item)
        else:
            self._inbox.append(item)
            self._wake()

    def _end(self, status: Status) -> None:
        """The call is over; what was not read may still be, unless the connection broke."""
        if self._status is not None:
            return
        self._status = status
        self._has_headers.set()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._beginning is not None and self._beginning is not asyncio.current_task(self._loop):
            self._beginning.cancel()
        if self._sending is not None and self._sending is not asyncio.current_task(self._loop):
            self._sending.cancel()
        self._channel.remove(self)
        if self._link is not None:
            self._link.remove(self)
        if self._up is not None:
            self._up.wake()
        self._wake()

    def _end_from_here(self, status: Status) -> None:
        """The client ends the call: what was not read is dropped, and the server is told."""
        if self._status is None:
            self._inbox.clear()
            self._end(status)
            if self._up is not None:
                self._up.send(Cancelled())

    def connection_lost(self, details: str) -> None:
        """The connection broke."""
        self._inbox.clear()
        self._end(Status(grpc.StatusCode.UNAVAILABLE, details))

    def _time_out(self) -> None:
        self._end_from_here(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def cancel(self) -> bool:
        """End the call; False: it has ended."""
        if self._status is not None:
            return False
        self._end_from_here(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", is_local=True))
        return True

    def done(self) -> bool:
        """Return whether the call's deadline is in ended, and all of it was read."""
        return self._status is not None and not self._inbox

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Return the headers, once they have come or the call has ended."""
        await self._has_headers.wait()
        return grpc.aio.Metadata(*self._headers)

    # Messages ----------------------------------------------------------------------------------------

    def send(self, request: Any) -> int:
        """Send a message, whether or not there is room; return its size."""
        content = self._serialize(request)
        self._put(content, len(content))
        return len(content)

    def half_close(self) -> None:
        """Say that no message follows."""
        self._has_half_closed = True
        self._put(HalfClose(), 0)

    def _put(self, item: Any, num_bytes: int) -> None:
        if self._unsent is not None:
            self._unsent.append((item, num_bytes))
        else:
            assert self._up is not None
            self._up.send(item, num_bytes)

    async def _next(self) -> Any:
        """Return the next message, or EOF. Raises AioRpcError, CancelledError: as the call ended."""
        while not self._inbox:
            if self._status is not None:
                self._raise_for_status(self._status)
                return grpc.aio.EOF
            self._changed = self._loop.create_future()
            try:
                await self._changed
            except asyncio.CancelledError:
                self.cancel()
                raise
        content = self._inbox.popleft()
        assert self._down is not None
        self._down.note_read(len(content))
        return self._deserialize(content)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def _raise_for_status(self, status: Status) -> None:
        if status.is_local:
            raise asyncio.CancelledError
        if status.code is not grpc.StatusCode.OK:
            trailers = grpc.aio.Metadata(*status.trailers)
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailers, details=status.details)


class UnaryCall(ClientCall):
    """A call with one answer."""

    _answer: Any = None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self._answer is None:
            answer = await self._next()
            while await self._next() is not grpc.aio.EOF:
                raise AssertionError("a unary call got two answers")
            self._answer = answer
        return self._answer


class StreamCall(ClientCall):
    """A call whose answer is a stream; its request may be one too."""

    async def read(self) -> Any:
        """Return the next message, or EOF."""
        return await self._next()

    async def write(self, request: Any) -> None:
        """Send a message; return when it is on its way.

        Raises:
            InvalidStateError: The call had ended.
            AioRpcError, CancelledError: It has ended meanwhile.
        """
        if self._status is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        if self._has_half_closed:
            raise asyncio.InvalidStateError('RPC is half closed after calling "done_writing".')
        if self._unsent is not None and self._beginning is not None:
            await asyncio.wait({self._beginning})
        if self._status is None:
            self.send(request)
            assert self._up is not None
            try:
                await self._up.room(lambda: self._status is not None)
            except asyncio.CancelledError:
                self.cancel()
                raise
        self._raise_if_ended()

    def send_all(self, requests: AsyncIterable[Any]) -> None:
        """Send messages as they come, and that none follows."""
        self._sending = self._loop.create_task(self._send_all(requests))

    async def _send_all(self, requests: AsyncIterable[Any]) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async for request in requests:
                await self.write(request)
            await self.done_writing()

    def _raise_if_ended(self) -> None:
        if self._status is not None:
            self._raise_for_status(self._status)

    async def done_writing(self) -> None:
        """Say that no message follows."""
        if self._status is None and not self._has_half_closed:
            self.half_close()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message


class StreamUnaryCall(UnaryCall, StreamCall):
    """A call whose request is a stream, with one answer."""
