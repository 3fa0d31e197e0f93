"""Passes the bytes of gRPC clients on to the gRPC server behind the port, and back. It does not look at them.

The client's connection is the downstream one, that to the gRPC server the upstream one. What waits to be sent is
bounded in each direction: while one side does not read, the proxy does not read from the other side.
"""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path
from typing import cast

# Of each direction, in bytes. On top comes what one read brings, at most 256 KiB.
MAX_UNSENT_BYTES = 256 * 2**10

# Clients at once; each costs three files. Beyond, the one that has sent nothing for the longest time is closed.
MAX_CLIENTS = 256

# A unix socket whose queue of new connections is full is asked again so soon, in seconds.
_RETRY_INTERVAL_S = 0.01

# A side that takes nothing for so long, while the other one is not read because of it, is cut off, in seconds. gRPC
# itself gives up after 30.
_STALL_S = 60.0

# The same for a client after the gRPC server has closed its connection.
_LINGER_S = 10.0


class TcpProxy:
    """Owns pairs of connections, downstream and upstream."""

    def __init__(self) -> None:
        self._live: set[_Side] = set()
        self._clients: dict[_Downstream, None] = {}  # who has sent something last is last
        self._all_ended = asyncio.Event()
        self._all_ended.set()

    @property
    def num_connections(self) -> int:
        """How many connections are open, those of clients and those to the gRPC server together."""
        return len(self._live)

    async def forward(self, client: socket.socket, server: socket.socket) -> None:
        """Own two sockets, connected and not blocking; pass bytes between them until one closes.

        Returns as soon as bytes pass. If it raises, both sockets are closed.
        """
        loop = asyncio.get_running_loop()
        downstream, upstream = _Downstream(self), _Upstream(self)
        downstream.other, upstream.other = upstream, downstream
        try:
            await loop.connect_accepted_socket(lambda: downstream, client)
        except BaseException:
            server.close()
            raise
        try:
            await loop.create_unix_connection(lambda: upstream, sock=server)
        except BaseException:
            downstream.transport.abort()
            raise
        if downstream.transport.is_closing():  # it was the most silent one, before there was an upstream one to close
            upstream.transport.abort()
        downstream.transport.resume_reading()
        upstream.transport.resume_reading()

    def heard_from(self, client: "_Downstream") -> None:
        """A client came, or has sent something."""
        self._clients.pop(client, None)
        self._clients[client] = None
        if len(self._clients) > MAX_CLIENTS:
            silent = next(iter(self._clients))
            del self._clients[silent]
            silent.transport.abort()

    async def stop(self, grace_s: float) -> None:
        """Wait until all have ended; after `grace_s` seconds end them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._all_ended.wait()
        for side in list(self._live):
            side.transport.abort()
        await self._all_ended.wait()

    def add(self, side: "_Side") -> None:
        """Keep a connection that has been made."""
        self._live.add(side)
        self._all_ended.clear()

    def discard(self, side: "_Side") -> None:
        """Forget a connection that is closed."""
        self._live.discard(side)
        self._clients.pop(side, None)  # type: ignore[call-overload]  # the other kind is not there
        if not self._live:
            self._all_ended.set()


async def connect_upstream(path: Path, name: str) -> socket.socket:
    """Return a connection to the unix socket at `path`, not blocking, whose own address ends with `name`.

    The gRPC server logs that address, so its log shows who called. It has none if it would be too long.

    Raises: OSError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        own = path.with_name(name)
        with suppress(OSError):
            connection.bind(str(own))
            own.unlink()  # the connection keeps the address
        while True:
            try:
                connection.connect(str(path))
            except BlockingIOError:  # the queue is full, and nothing tells when it is not
                await asyncio.sleep(_RETRY_INTERVAL_S)
            else:
                return connection
    except BaseException:
        connection.close()
        raise


class _Side(asyncio.Protocol):
    """One connection of a pair. It is not read before both are there."""

    transport: asyncio.Transport
    other: "_Side"

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.pause_reading()
        self.transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._proxy.add(self)

    def data_received(self, data: bytes) -> None:
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.other.transport.pause_reading()  # so it is not seen any more whether that one closes
        self._stalled = asyncio.get_running_loop().call_later(_STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._forget_stall()
        self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_stall()
        self._proxy.discard(self)

    def _forget_stall(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Downstream(_Side):
    """The connection of a client."""

    other: "_Upstream"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._proxy.heard_from(self)

    def data_received(self, data: bytes) -> None:
        self._proxy.heard_from(self)
        super().data_received(data)

    def eof_received(self) -> bool:
        """Tell the gRPC server that the client sends no more; it may still answer."""
        self.other.transport.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if hasattr(self.other, "transport"):
            self.other.transport.abort()


class _Upstream(_Side):
    """The connection to the gRPC server. It never closes one direction alone."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Send the client what is left, then close its connection too."""
        super().connection_lost(exc)
        client = self.other.transport
        client.close()
        if client.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_LINGER_S, client.abort)
