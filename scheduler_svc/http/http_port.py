"""A port that speaks HTTP/1.1: opens its address, and accepts connections."""

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from octavo_shared.process.events import Event
from scheduler_svc.http.connections import ConnectionTimes, HttpConnections
from scheduler_svc.http.http_tls import HttpTls
from scheduler_svc.http.listeners import open_listeners

# Pause after the process had no file left for a new connection, in seconds.
_PAUSE_S = 1.0
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_logger = logging.getLogger(__name__)


class HttpPort:
    """Serves on one address.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        flag: The setting that has the address, for errors.
        answer: Answers a request; cancelled when its client leaves.
        tls: The port's; None: it speaks plaintext.
        refuse: See `HttpConnections`.
    """

    def __init__(
        self,
        listen: str,
        flag: str,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        tls: HttpTls | None,
        times: ConnectionTimes,
        refuse: Callable[[int, str], web.Response],
        *,
        is_shared: bool = False,
    ) -> None:
        self._listen = listen
        self._flag = flag
        self._is_shared = is_shared
        self._connections = HttpConnections(answer, tls, times, refuse)
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port. Raises AddressError: it cannot be bound."""
        self._listeners = open_listeners(self._listen, self._flag, is_shared=self._is_shared)
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]
        return f"{self._listen.rpartition(':')[0]}:{self._listeners[0].getsockname()[1]}"

    def leave(self) -> None:
        """Go on serving, but close each connection after its next answer."""
        self._connections.leave()

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections; end requests that still run after `grace_s` seconds."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        await self._connections.stop(grace_s)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # of the connection, which has closed again, or of the process
                if error.errno in _OUT_OF_FILES:
                    _logger.error(Event("cannot_accept", cause=str(error)))
                    await asyncio.sleep(_PAUSE_S)
                continue
            self._connections.serve(connection, address[0])
            await asyncio.sleep(0)  # let other tasks run during a burst, which waits in the kernel
