"""Accepts connections, asks what each speaks, and passes it on."""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from scheduler_svc.admin.port.recognition import Protocol, recognise
from shared.events import Event

# A connection that does not say what it speaks for so long is closed, in seconds.
RECOGNITION_TIMEOUT_S = 10.0

# Beyond so many connections that have not said it, the one that has been silent longest is closed.
MAX_UNRECOGNISED = 512

# After the process had no file left for a new connection, in seconds.
_PAUSE_S = 1.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_logger = logging.getLogger(__name__)


class Reception:
    """Owns the listening sockets, and each connection until it is passed on.

    Args:
        listeners: They listen and do not block.
        pass_on: Owns the connection that it gets from then on, also if it raises; gets with it what it speaks, and
            the address of the peer as gRPC writes it.
        speaks_tls: Whether the port wants TLS.
        timeout_s: How long a connection may take to say what it speaks, in seconds.
        max_unrecognised: How many may be silent at once.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        pass_on: Callable[[socket.socket, Protocol, str], Awaitable[None]],
        *,
        speaks_tls: bool,
        timeout_s: float = RECOGNITION_TIMEOUT_S,
        max_unrecognised: int = MAX_UNRECOGNISED,
    ) -> None:
        self._listeners = listeners
        self._pass_on = pass_on
        self._speaks_tls = speaks_tls
        self._timeout_s = timeout_s
        self._max_unrecognised = max_unrecognised
        self._accepting: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # In order of arrival. A connection leaves it when it is passed on, and before that it is ours to close.
        self._unrecognised: dict[socket.socket, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Accept connections from now on."""
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]

    async def stop(self) -> None:
        """Accept no more, and close the connections that are not passed on."""
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
            self._unrecognised[connection] = task
            task.add_done_callback(lambda task, connection=connection: self._settle(task, connection))  # type: ignore[misc]
            if len(self._unrecognised) > self._max_unrecognised:
                next(iter(self._unrecognised.values())).cancel()
            await asyncio.sleep(0)  # a burst is looked at as it comes in, and waits in the kernel meanwhile

    async def _receive(self, connection: socket.socket, peer: str) -> None:
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._timeout_s):
                protocol = await recognise(connection, speaks_tls=self._speaks_tls)
            if protocol is not None:
                del self._unrecognised[connection]
                await self._pass_on(connection, protocol, peer)

    def _settle(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._tasks.discard(task)
        if self._unrecognised.pop(connection, None) is not None:
            connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error(Event("connection_failed", cause=repr(error)), exc_info=error)


def peer_name(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the address of a peer as gRPC writes it, but without percent signs for brackets."""
    host, port = address[:2]
    if host.startswith("::ffff:") and "." in host:  # IPv4, on a socket of both families
        host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
