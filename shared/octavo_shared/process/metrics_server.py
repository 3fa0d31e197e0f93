"""The port that Prometheus reads: HTTP, /metrics, answered from the start of the process to its end.

Metrics are collected on the event loop, where everything that a service counts lives. So a scrape
sees the state between two callbacks, never half a step, and counters need no lock. The
threads that speak HTTP only wait for it.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from octavo_shared.errors import AddressError
from octavo_shared.process.events import Event
from octavo_shared.process.metric import Family

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_logger = logging.getLogger(__name__)

# An event loop that does not answer within this time is stuck; below the 10 s that Prometheus waits by default.
COLLECT_TIMEOUT_S = 5.0

# A connection that sends nothing for this long is closed, in seconds.
_IDLE_CONNECTION_S = 30.0

# Each connection has a thread. Prometheus has one or two; beyond the limit, the oldest connection ends.
MAX_CONNECTIONS = 32

# How long the oldest connection may finish an answer, in seconds; then the new one is closed.
_EVICTION_S = 1.0

_POLL_INTERVAL_S = 0.1

_LINK = b"<!doctype html><title>Octavo</title><a href='/metrics'>metrics</a>\n"


class MetricsServer:
    """Serves metrics at /metrics.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        collect: Returns the metrics; called on the event loop at every scrape, so it must be quick.
        collect_timeout_s: How long a scrape waits for the event loop, in seconds.
    """

    def __init__(
        self, listen: str, collect: Callable[[], Iterable[Family]], collect_timeout_s: float = COLLECT_TIMEOUT_S
    ) -> None:
        self._listen = listen
        self._collect = collect
        self._collect_timeout_s = collect_timeout_s
        self._server: _HttpServer | None = None

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port. Raises AddressError: it cannot be bound."""
        host, _, port = self._listen.rpartition(":")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_OnEventLoop(asyncio.get_running_loop(), self._collect, self._collect_timeout_s))
        try:
            self._server = _HttpServer(host.strip("[]"), int(port))
        except OSError as error:
            raise AddressError("--metrics-listen", self._listen) from error
        self._server.set_app(_routed(make_wsgi_app(registry)))
        serve = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_INTERVAL_S,), name="metrics", daemon=True
        )
        serve.start()
        return f"{host}:{self._server.server_port}"

    def leave(self) -> None:
        """Do nothing: scrapes go on until the end."""

    async def stop(self, grace_s: float) -> None:
        """Take no more scrapes. Running ones are not waited for: they take milliseconds."""
        server, self._server = self._server, None
        if server is not None:
            await asyncio.to_thread(server.shutdown)
            server.server_close()


class _OnEventLoop(Collector):
    """Collects on the event loop, for the thread that asks. Raises TimeoutError: the event loop does not answer."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, collect: Callable[[], Iterable[Family]], timeout_s: float
    ) -> None:
        self._loop = loop
        self._collect = collect
        self._timeout_s = timeout_s

    def collect(self) -> Iterator[Family]:
        """Return the metrics as they are between two callbacks of the loop."""

        async def picture() -> list[Family]:
            return list(self._collect())

        collecting = asyncio.run_coroutine_threadsafe(picture(), self._loop)
        try:
            return iter(collecting.result(self._timeout_s))
        finally:
            collecting.cancel()


def _routed(metrics: "WSGIApplication") -> "WSGIApplication":
    """Return an application that has the metrics at /metrics, a link to them at /, and nothing else."""

    def answer(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            try:
                return metrics(environ, start_response)
            except TimeoutError:
                _logger.warning(Event("scrape_timed_out"))
                return _text(start_response, HTTPStatus.SERVICE_UNAVAILABLE, b"the event loop does not answer\n")
        if path == "/":
            return _text(start_response, HTTPStatus.OK, _LINK, "text/html; charset=utf-8")
        return _text(start_response, HTTPStatus.NOT_FOUND, b"there are metrics at /metrics, and nothing else\n")

    return answer


def _text(
    start_response: "StartResponse", status: HTTPStatus, body: bytes, content_type: str = "text/plain; charset=utf-8"
) -> Sequence[bytes]:
    start_response(f"{status.value} {status.phrase}", [("Content-Type", content_type)])
    return [body]


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_CONNECTION_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the library's name)
        """Log nothing: a scrape is no change of state."""


class _HttpServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, at most `MAX_CONNECTIONS`; none is waited for at the end.

    Raises: OSError: the address cannot be bound.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self._open: dict[socket.socket, None] = {}  # in the order of their beginning
        super().__init__(address, _Handler)  # type: ignore[arg-type]  # IPv6 addresses have four parts

    def server_bind(self) -> None:
        """Bind, without asking DNS for our own name as the library would."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection; if there are too many, end the oldest one first."""
        if not self._free.acquire(blocking=False):
            for oldest in list(self._open)[:1]:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            if not self._free.acquire(timeout=_EVICTION_S):
                self.shutdown_request(request)
                return
        self._open[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        del self._open[request]
        self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a broken scrape, mostly of a client that has gone."""
        _logger.debug(Event("scrape_broke"), exc_info=True)
