"""The port of OpenAI's API: listens, and gives each connection that speaks HTTP/1.1 to `routes.py`."""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http import HTTPStatus

from aiohttp import web

from octavo_shared.process.metric import Family
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.routes import Routes, refuse
from scheduler_svc.http.acceptor import Acceptor
from scheduler_svc.http.connections import ConnectionTimes, HttpConnections
from scheduler_svc.http.http_tls import HttpTls
from scheduler_svc.http.listeners import open_listeners
from scheduler_svc.http.protocol_detection import Protocol

FLAG = "--openai-listen"

# Clients and proxies keep connections for the next request; nginx does so for 60 s.
TIMES = ConnectionTimes(first_request_s=15.0, idle_s=75.0, linger_s=2.0, stall_s=60.0)


class OpenAIServer:
    """Serves OpenAI's API on one address.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        routes: Answers the requests.
        tls: Of the port; None: it speaks plaintext.
        is_shared: Whether other processes serve there too.
    """

    def __init__(self, listen: str, routes: Routes, tls: HttpTls | None, *, is_shared: bool = False) -> None:
        self._listen = listen
        self._is_shared = is_shared
        self._routes = routes
        self._tls = tls
        self._exits = AsyncExitStack()
        self._grace_s = 0.0

    def families(self) -> Iterator[Family]:
        """Yield the metrics of the port."""
        return self._routes.families()

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port.

        Raises: AddressError: it cannot be bound.
        """
        async with AsyncExitStack() as exits:
            listeners = open_listeners(self._listen, FLAG, is_shared=self._is_shared)
            for listener in listeners:
                exits.callback(listener.close)
            connections = HttpConnections(self._routes.answer, self._tls, TIMES, _refuse)
            exits.push_async_callback(lambda: connections.stop(self._grace_s))

            async def dispatch(connection: socket.socket, protocol: Protocol, peer: str) -> None:
                if protocol is Protocol.GRPC:  # or nothing that is known
                    connection.close()
                else:
                    await connections.serve(connection, peer, over_tls=protocol is Protocol.HTTPS)

            acceptor = Acceptor(listeners, dispatch, speaks_tls=self._tls is not None)
            acceptor.start()
            exits.push_async_callback(acceptor.stop)
            self._exits = exits.pop_all()
        return f"{self._listen.rpartition(':')[0]}:{listeners[0].getsockname()[1]}"

    async def stop(self, grace_s: float) -> None:
        """Take no more connections; end requests that run after `grace_s` seconds."""
        self._grace_s = grace_s
        await self._exits.aclose()


def _refuse(status: int, what: str) -> web.Response:
    """Answer what is no request of HTTP."""
    message = f"malformed request: {what}" if what else "malformed request"
    return refuse(ApiError(status or HTTPStatus.BAD_REQUEST, message), {"Server": "octavo"})
