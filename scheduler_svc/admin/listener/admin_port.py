"""Listens for operators, and dispatches each connection to the server that speaks its protocol.

    TCP ──> Acceptor ──┬── gRPC, with TLS or without ── TcpProxy ──> unix socket ──> gRPC server
                       └── HTTP/1.1, with TLS or without ── HttpServer ──> unix socket ──┘

The gRPC server speaks TLS itself, so that it sees the certificates of its clients. The HTTP server comes in by a
socket of its own, in plaintext. Both are in a directory that only this user may enter.
"""

import asyncio
import functools
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from octavo_shared.grpc.grpc_server import GrpcServer
from scheduler_svc.admin.http.forwarded_client_cert import ForwardedClientCert
from scheduler_svc.admin.http.json_transcoder import JsonTranscoder
from scheduler_svc.admin.listener.socket_directory import socket_directory
from scheduler_svc.admin.listener.tcp_proxy import TcpProxy, connect_upstream
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.http.acceptor import Acceptor
from scheduler_svc.http.http_tls import HttpTls, http_tls
from scheduler_svc.http.listeners import open_listeners
from scheduler_svc.http.protocol_detection import Protocol

if TYPE_CHECKING:  # imports aiohttp
    from scheduler_svc.admin.http.http_server import HttpServer

FLAG = "--admin-listen"

# gRPC tells clients that it ends; they get so long to take it, in seconds.
_GOODBYE_S = 1.0

# Names of the sockets: for clients of gRPC, and for the HTTP server where those have to speak TLS.
_GRPC = "grpc"
_INNER = "inner"


class AdminPort:
    """A gRPC server and a page on one address.

    Args:
        config: Of the scheduler.
        service: What can be called with JSON as well.
        make_grpc_server: Returns the server for an address, servicers and credentials included. What it is given wraps
            the interceptors that ask who calls.

    Raises: TlsFileError: a file cannot be used.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        service: ServiceDescriptor,
        make_grpc_server: Callable[[str, ForwardedClientCert], GrpcServer],
    ) -> None:
        self._config = config
        self._service = service
        self._make_grpc_server = make_grpc_server
        self._tls = http_tls(config)
        self._forwarded_cert = ForwardedClientCert(config.trusted_clients)
        self._exits = AsyncExitStack()
        self._grace_s = 0.0

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port.

        Raises:
            AddressError: it cannot be bound.
            UnavailableError: there is no place for the sockets behind it.
        """
        config = self._config
        async with AsyncExitStack() as exits:
            listeners = open_listeners(config.admin_listen, FLAG)
            for listener in listeners:
                exits.callback(listener.close)
            directory = exits.enter_context(socket_directory())
            proxy = TcpProxy()
            exits.push_async_callback(proxy.stop, _GOODBYE_S)
            http = await self._http_side(await self._start_grpc(directory, exits), exits)

            async def dispatch(connection: socket.socket, protocol: Protocol, peer: str) -> None:
                if protocol is Protocol.GRPC:
                    await proxy.forward(connection, await _connected(connection, directory / _GRPC, peer))
                else:
                    await http.serve(connection, peer, over_tls=protocol is Protocol.HTTPS)

            acceptor = Acceptor(listeners, dispatch, speaks_tls=self._tls is not None)
            acceptor.start()
            exits.push_async_callback(acceptor.stop)
            self._exits = exits.pop_all()
        return f"{config.admin_listen.rpartition(':')[0]}:{listeners[0].getsockname()[1]}"

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; end those still running after `grace_s` seconds."""
        self._grace_s = grace_s
        await self._exits.aclose()

    async def _start_grpc(self, directory: Path, exits: AsyncExitStack) -> str:
        """Start the gRPC server; return where the HTTP server calls it."""
        address = inner_address = f"unix:{directory / _GRPC}"
        server = self._make_grpc_server(address, self._forwarded_cert)
        if self._tls is not None:
            inner_address = f"unix:{directory / _INNER}"
            server.server.add_insecure_port(inner_address)
        await server.start()
        exits.push_async_callback(lambda: server.stop(self._grace_s))
        return inner_address

    async def _http_side(self, inner_address: str, exits: AsyncExitStack) -> "_HttpSide":
        options = [("grpc.max_receive_message_length", self._config.max_message_bytes)]
        channel = await exits.enter_async_context(grpc.aio.insecure_channel(inner_address, options=options))
        http = _HttpSide(
            JsonTranscoder(self._service, channel),
            f"/{self._service.full_name}/",
            self._forwarded_cert,
            self._tls,
            asks_for_tokens=self._config.tokens_file is not None,
        )
        exits.push_async_callback(lambda: http.stop(self._grace_s))
        return http


class _HttpSide:
    """The HTTP server, made when somebody comes: what it imports takes as long as all else that a core starts with."""

    def __init__(
        self,
        calls: JsonTranscoder,
        path: str,
        forwarded_cert: ForwardedClientCert,
        tls: HttpTls | None,
        *,
        asks_for_tokens: bool,
    ) -> None:
        self._calls = calls
        self._path = path
        self._forwarded_cert = forwarded_cert
        self._tls = tls
        self._asks_for_tokens = asks_for_tokens
        self._server: HttpServer | None = None

    async def serve(self, connection: socket.socket, peer: str, *, over_tls: bool) -> None:
        """See `HttpServer.serve`."""
        try:
            server = self._server or await self._make_server()
        except BaseException:  # nobody else closes it, should the port stop meanwhile
            connection.close()
            raise
        await server.serve(connection, peer, over_tls=over_tls)

    async def _make_server(self) -> "HttpServer":
        make = await asyncio.to_thread(_http_server)  # the event loop has more urgent things to do
        if self._server is None:  # another connection may have come meanwhile
            self._server = make(
                self._calls, self._path, self._forwarded_cert, self._tls, asks_for_tokens=self._asks_for_tokens
            )
        return self._server

    async def stop(self, grace_s: float) -> None:
        """See `HttpServer.stop`."""
        if self._server is not None:
            await self._server.stop(grace_s)


@functools.cache
def _http_server() -> "type[HttpServer]":
    """Return the class; the first time that takes long."""
    from scheduler_svc.admin.http.http_server import HttpServer

    return HttpServer


async def _connected(client: socket.socket, grpc_path: Path, peer: str) -> socket.socket:
    """Return a connection to the gRPC server for a client, which is closed if there is none."""
    try:
        return await connect_upstream(grpc_path, peer)
    except BaseException:
        client.close()
        raise
