"""Accepts connections, detects the protocol of each, and dispatches it."""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from octavo_shared.process.events import Event
from scheduler_svc.http.protocol_detection import Protocol, detect_protocol

# A connection whose protocol is not known after so long is closed, in seconds.
DETECTION_TIMEOUT_S = 10.0

# Beyond so many connections whose protocol is not known yet, the oldest one is closed.
MAX_PENDING = 512

# After the process had no file left for a new connection, in seconds.
_PAUSE_S = 1.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_logger = logging.getLogger(__name__)


class Acceptor:
    """Owns the listening sockets, and each connection until it is dispatched.

    Args:
        listeners: They listen and do not block.
        dispatch: Owns the connection that it gets from then on, also if it raises. It gets the protocol, and the
            address of the peer as gRPC writes it.
        speaks_tls: Whether the port wants TLS.
        timeout_s: How long a connection may take to show its protocol, in seconds.
        max_pending: How many connections may be undetected at once.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        dispatch: Callable[[socket.socket, Protocol, str], Awaitable[None]],
        *,
        speaks_tls: bool,
        timeout_s: float = DETECTION_TIMEOUT_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._listeners = listeners
        self._dispatch = dispatch
        self._speaks_tls = speaks_tls
        self._timeout_s = timeout_s
        self._max_pending = max_pending
        self._accepting: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # In order of arrival. A connection leaves it when it is dispatched, and before that it is ours to close.
        self._pending: dict[socket.socket, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Accept connections from now on."""
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]

    async def stop(self) -> None:
        """Accept no more, and close the connections that are not dispatched."""
        tasks = [*self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # of the connection, which is gone again, or of the process
                if error.errno in _OUT_OF_FILES:
                    _logger.error(Event("cannot_accept", cause=str(error)))
                    await asyncio.sleep(_PAUSE_S)
                continue
            task = asyncio.create_task(self._receive(connection, peer_name(address)))
            self._tasks.add(task)
            self._pending[connection] = task
            task.add_done_callback(lambda task, connection=connection: self._settle(task, connection))  # type: ignore[misc]
            if len(self._pending) > self._max_pending:
                next(iter(self._pending.values())).cancel()
            await asyncio.sleep(0)  # a burst is looked at as it comes in, and waits in the kernel meanwhile

    async def _receive(self, connection: socket.socket, peer: str) -> None:
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._timeout_s):
                protocol = await detect_protocol(connection, speaks_tls=self._speaks_tls)
            if protocol is not None:
                del self._pending[connection]
                await self._dispatch(connection, protocol, peer)

    def _settle(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._tasks.discard(task)
        if self._pending.pop(connection, None) is not None:
            connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error(Event("connection_failed", cause=repr(error)), exc_info=error)


def peer_name(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the address of a peer as gRPC writes it, but without percent signs for brackets."""
    host, port = address[:2]
    if host.startswith("::ffff:") and "." in host:  # IPv4, on a socket of both families
        host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
