"""HTTP/1.1 on accepted connections: aiohttp's server, which closes clients that are silent or read nothing.

It uses public names of aiohttp, and a private one, without which it only frees memory later: see `_Handler`.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web

from octavo_shared.process.events import Event
from scheduler_svc.http.http_tls import HttpTls

# Beyond this number of connections without a request, the oldest one is closed.
MAX_SILENT = 512

# How TLS begins (RFC 8446, section 5.1): no method of HTTP does.
_HANDSHAKE_RECORD = b"\x16"
_HANDSHAKE_TIMEOUT_S = 10.0
_TLS_GOODBYE_TIMEOUT_S = 1.0

# Unread bytes kept for each client, in this process and in the kernel: thousands of clients may read nothing.
_UNSENT_BYTES = 16 * 2**10

# Least grace period for running requests when the port is closed, in seconds.
_MIN_GRACE_S = 1.0

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionTimes:
    """Time limits of a connection, in seconds.

    Attributes:
        first_request_s: Until the head of its first request has come.
        idle_s: Between two requests.
        linger_s: How long a client with its answer may go on sending what it has begun.
        stall_s: How long a client may read nothing before it is cut off.
    """

    first_request_s: float
    idle_s: float
    linger_s: float
    stall_s: float


class HttpConnections:
    """Serves connections that speak HTTP/1.1.

    Args:
        answer: Answers a request; cancelled when its client leaves.
        tls: What connections have to speak; None: plaintext.
        refuse: Answers what is not a request, given a status and what is wrong.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        tls: HttpTls | None,
        times: ConnectionTimes,
        refuse: Callable[[int, str], web.Response],
    ) -> None:
        self._tls = tls
        self._times = times
        # Connections without a first request, the oldest first.
        self._silent: dict[asyncio.Task[None], None] = {}
        self._server = _Server(answer, times, refuse)

    def serve(self, connection: socket.socket, peer: str) -> None:
        """Serve a connection and own it; beyond MAX_SILENT without a request the oldest one is closed.

        Args:
            connection: Accepted, not blocking.
            peer: The client's address, for the log.
        """
        task = asyncio.create_task(self._await_request(connection, peer))
        self._silent[task] = None
        task.add_done_callback(lambda task: self._settle(task, connection))
        if len(self._silent) > MAX_SILENT:
            next(iter(self._silent)).cancel()

    def leave(self) -> None:
        """Close each connection after its next answer, which says so."""
        self._server.is_leaving = True

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, end requests that run after `grace_s` seconds, then close the rest."""
        silent = list(self._silent)
        for task in silent:
            task.cancel()
        await asyncio.gather(*silent, return_exceptions=True)
        transports = [handler.transport for handler in self._server.connections if handler.transport is not None]
        self._server.pre_shutdown()
        await self._server.shutdown(max(grace_s, _MIN_GRACE_S))
        for transport in transports:
            transport.abort()  # do not wait for a client that does not answer the goodbye of TLS
        await asyncio.sleep(0)

    async def _await_request(self, connection: socket.socket, peer: str) -> None:
        """Return once the first request of a connection has come, or it is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._times.first_request_s):
                try:
                    transport, handler = await self._connect(connection)
                except OSError as error:
                    _logger.info(Event("http_handshake_failed", peer=peer, cause=str(error)))
                    return
                try:
                    await handler.has_request
                except asyncio.CancelledError:  # it took too long, or newer connections came
                    transport.abort()
                    raise

    async def _connect(self, connection: socket.socket) -> tuple[asyncio.Transport, "_Handler"]:
        """Return what reads and answers a connection, after its handshake. Raises OSError: the handshake has failed."""
        context = None
        try:
            _limit_unsent(connection, self._times.stall_s)
            if self._tls is not None and await _begins_handshake(connection):
                context = self._tls.context()
        except BaseException:
            connection.close()
            raise
        transport, handler = await asyncio.get_running_loop().connect_accepted_socket(
            self._server,
            connection,
            ssl=context,
            ssl_handshake_timeout=None if context is None else _HANDSHAKE_TIMEOUT_S,
            ssl_shutdown_timeout=None if context is None else _TLS_GOODBYE_TIMEOUT_S,
        )
        transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        return transport, cast("_Handler", handler)

    def _settle(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        del self._silent[task]
        if task.cancelled():
            connection.close()  # the handshake may not have begun
        elif (error := task.exception()) is not None:
            _logger.error(Event("connection_failed", cause=repr(error)), exc_info=error)


async def _begins_handshake(connection: socket.socket) -> bool:
    """Return whether a client speaks TLS; if not, the routes tell it so in plaintext."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    return connection.recv(1, socket.MSG_PEEK) == _HANDSHAKE_RECORD


class _Server(web.Server):
    """Makes the handler of each connection."""

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        times: ConnectionTimes,
        refuse: Callable[[int, str], web.Response],
    ) -> None:
        super().__init__(answer, request_factory=self.receive, handler_cancellation=True)
        self.times = times
        self.refuse = refuse
        self.is_leaving = False

    def __call__(self) -> web.RequestHandler:
        """Return the handler of a connection."""
        return _Handler(self)

    def receive(
        self, message: Any, content: Any, handler: web.RequestHandler, writer: Any, task: "asyncio.Task[None]"
    ) -> web.BaseRequest:
        """Return a request as its handler begins to answer it."""
        cast("_Handler", handler).stop_waiting()
        kind = _LastRequest if self.is_leaving else web.BaseRequest
        return kind(message, content, handler, writer, task, asyncio.get_running_loop())


class _LastRequest(web.BaseRequest):
    """A request whose connection is closed after its answer, which says so."""

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow."""
        return False


class _Handler(web.RequestHandler):
    """One connection; errors are in the words of its port."""

    __slots__ = ("has_request", "refuse")

    def __init__(self, server: _Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # which aiohttp takes
            auto_decompress=False,
            keepalive_timeout=server.times.idle_s,
            lingering_time=server.times.linger_s,
            logger=_logger,
        )
        self.refuse = server.refuse
        # Done once the head of the first request has come, or the connection is lost.
        self.has_request: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop_waiting(self) -> None:
        """Wake what waits for the first request."""
        if not self.has_request.done():
            self.has_request.set_result(None)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Wake what waits for the first request, too."""
        self.stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes in.

        If a request is malformed, a frame in the error's traceback has the error and the bytes as local variables:
        only the garbage collector would free them, maybe minutes later. Not every error reaches `handle_error`, so it
        is taken from where aiohttp keeps it.
        """
        super().data_received(data)
        messages = getattr(self, "_messages", None)
        if messages and (error := getattr(messages[-1][0], "exc", None)) is not None:
            error.__traceback__ = None

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a malformed request, or a failure of the port; the connection is closed."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        response = self.refuse(status, _what_is_wrong(message or ""))
        response.force_close()
        return response


def _what_is_wrong(message: str) -> str:
    """Return what aiohttp found wrong with a request, without the sender's own text."""
    what = message.partition("\n")[0].partition(": ")[0].rstrip(":")
    return what if " " in what else "its path is no path of a URL"  # such a path comes alone


def _limit_unsent(connection: socket.socket, stall_s: float) -> None:
    """Let the kernel keep little for a peer that does not read, and in the end break the connection (tcp(7)).

    aiohttp would wait for it for ever.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux only, like the other option
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(stall_s * 1000))
