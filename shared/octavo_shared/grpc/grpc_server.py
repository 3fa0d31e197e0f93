"""The gRPC ports of a process: each a server with health and reflection, all of them stopped together.

`GrpcServer` is one port. `Ports` are all ports of a process: the main one, which takes work, and those beside it
(operators, probes). `shut_down` stops them in order.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from types import MappingProxyType
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1 import health as health_names
from grpc_reflection.v1alpha import reflection

from octavo.discovery.v1.discovery_service_pb2_grpc import add_DiscoveryServiceServicer_to_server
from octavo_shared.errors import AddressError
from octavo_shared.grpc.announce import Announcements
from octavo_shared.grpc.grpc_metrics import CallMetrics
from octavo_shared.grpc.grpc_status import StatusInterceptor
from octavo_shared.process.events import Event

_logger = logging.getLogger(__name__)

# A connection that has not spoken HTTP/2, or TLS, by then is closed.
HANDSHAKE_TIMEOUT_MS = 10_000

# A connection without a call for this long is closed: clients open another when they need it.
_MAX_IDLE_MS = 600_000

# Clients look a name up again when a connection ends. So connections of clients end at this age, and new processes get
# their share of existing clients. Running calls go on to their end.
CLIENT_CONNECTION_AGE_MS = 30_000

# Time after which a start is worth a message, in seconds: the first attempts to connect have been answered.
SILENCE_S = 2.0

# A probe's messages hold a service's name.
_PROBE_MESSAGE_BYTES = 64 * 2**10


class GrpcServer:
    """A grpc.aio server on one port. Add servicers to `server`, then `start`.

    Args:
        listen: Address to bind, host:port, where port 0 takes a free one; or unix:PATH.
        max_message_bytes: Limit of one message, in and out.
        max_request_bytes: Limit of one message from outside; None: the same.
        service_names: Full names of the own services, for reflection; none: there is no reflection.
        health: The health that it reports; by default its own.
        credentials: TLS credentials; None: plaintext.
        interceptors: Around every call, the first one outermost; they end the calls that they refuse with `abort` of
            `octavo_shared/grpc/grpc_status.py`.
        readers: Interceptors inside of all others, where the request is decoded.
        call_metrics: Outside of all others: counts the calls by their final status; None: calls are not counted.
        flag: The setting that has `listen`, for errors.
        is_shared: Whether our other processes bind the port too, so that the kernel deals connections to all.
        max_connection_age_ms: Age at which a connection takes no more calls; None: no limit.
    """

    def __init__(
        self,
        *,
        listen: str,
        max_message_bytes: int,
        max_request_bytes: int | None = None,
        service_names: Sequence[str],
        health: "Health | None" = None,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        readers: Sequence[grpc.aio.ServerInterceptor] = (),
        call_metrics: CallMetrics | None = None,
        flag: str = "--listen",
        is_shared: bool = False,
        max_connection_age_ms: int | None = None,
    ) -> None:
        self._listen = listen
        self._flag = flag
        self._credentials = credentials
        self.health = health or Health(service_names)
        self.server = grpc.aio.server(
            interceptors=[*([call_metrics] if call_metrics else []), *interceptors, StatusInterceptor(), *readers],
            options=[
                *_options(max_request_bytes or max_message_bytes, max_message_bytes, is_shared=is_shared),
                *([] if max_connection_age_ms is None else [("grpc.max_connection_age_ms", max_connection_age_ms)]),
            ],
        )
        self.health.add_to(self.server)
        if service_names:
            reflected = [*service_names, health_names.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(reflected, self.server)  # type: ignore[no-untyped-call]

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port. Raises AddressError: it cannot be bound."""
        try:
            if self._credentials is None:
                port = self.server.add_insecure_port(self._listen)
            else:
                port = self.server.add_secure_port(self._listen, self._credentials)
        except RuntimeError as error:
            raise AddressError(self._flag, self._listen) from error
        await self.set_ready(False)
        await self.server.start()
        is_path = self._listen.startswith("unix:")
        return self._listen if is_path else f"{self._listen.rpartition(':')[0]}:{port}"

    async def set_ready(self, ready: bool) -> None:
        """Set, in health, whether the process takes work."""
        await self.health.set_ready(ready)

    def leave(self) -> None:
        """Do nothing: connections of clients have an age."""

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; end those still running after `grace_s` seconds."""
        await self.server.stop(grace_s)


class Port(Protocol):
    """A port: `GrpcServer`, or `MetricsServer` over HTTP."""

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port. Raises AddressError: it cannot be bound."""

    def leave(self) -> None:
        """Go on serving, and have clients connect elsewhere from now on."""

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; end those still running after `grace_s` seconds."""


class Ports:
    """All ports of a process.

    Args:
        others: The ports beside it, by their names in the log; they answer until the main one has ended.

    Attributes:
        other_addresses: The bound addresses of the others, host:port, by name.
    """

    def __init__(self, main: GrpcServer, others: Mapping[str, Port]) -> None:
        self._main = main
        self._others = others
        self.other_addresses: dict[str, str] = {}

    async def start(self) -> str:
        """Bind and serve, not ready yet; return the main address, host:port.

        Raises: AddressError: an address cannot be bound; then none is.
        """
        async with AsyncExitStack() as at_failure:
            for name, server in self._others.items():
                self.other_addresses[name] = await server.start()
                at_failure.push_async_callback(server.stop, 0)
            address = await self._main.start()
            at_failure.pop_all()
        return address

    async def set_ready(self, ready: bool) -> None:
        """Set, in health, whether the process takes work."""
        await self._main.set_ready(ready)

    async def leave(self) -> None:
        """Go on serving, not ready, and have clients connect elsewhere from now on."""
        await self._main.health.leave()
        for server in self._others.values():
            server.leave()

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; end those still running after `grace_s` seconds, and watches of the health at once."""
        self._main.health.end_watches()
        await self._main.stop(grace_s)
        for server in self._others.values():
            await server.stop(0)


def probe_server(listen: str, health: "Health", announcements: Announcements | None = None) -> GrpcServer:
    """Return a plaintext server with health, which also takes announcements: probes of Kubernetes speak no TLS."""
    server = GrpcServer(
        listen=listen, max_message_bytes=_PROBE_MESSAGE_BYTES, service_names=(), health=health, flag="--health-listen"
    )
    if announcements is not None:
        add_DiscoveryServiceServicer_to_server(announcements, server.server)
    return server


async def leave(ports: Ports, reason: str, delay_s: float, until: Awaitable[object] | None = None) -> None:
    """Go on working for a while, or until something, while clients are told to go elsewhere (`shutdown_delay_s`)."""
    if delay_s:
        _logger.info(Event("leaving", reason=reason, delay_s=delay_s))
        await ports.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await (until or asyncio.Event().wait())


async def shut_down(ports: Ports, reason: str, *, drain: Callable[[], Awaitable[None]], grace_s: float) -> bool:
    """Stop in order: not ready, drain, stop the servers.

    `drain` and the calls that remain after it share `grace_s` seconds. Returns whether `drain` ended
    in that time.
    """
    _logger.info(Event("stopping", reason=reason, grace_s=grace_s))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    await ports.set_ready(False)
    drained = True
    try:
        async with asyncio.timeout_at(deadline):
            await drain()
    except TimeoutError:
        drained = False
        _logger.warning(Event("drain_timed_out", grace_s=grace_s))
    await ports.stop(max(0.0, deadline - loop.time()))
    _logger.info(Event("stopped"))
    return drained


def announce_listening(
    service: str, address: str, other_addresses: Mapping[str, str] = MappingProxyType({}), *, awaits: str
) -> None:
    """Print on stdout where a service takes calls: a line for each port beside the main one, whose line is last.

    The main one does not serve yet: its line says what it waits for. A parent process reads the address there.
    """
    for name, port in other_addresses.items():
        print(f"octavo {service} serving {name} on {port}", flush=True)
    print(f"octavo {service} listening on {address}, waiting for {awaits}", flush=True)


async def announce_when_ready(
    service: str, address: str, wait_until_ready: Callable[[], Awaitable[object]], why_not: Callable[[], str]
) -> None:
    """Print on stdout that a service takes work, once it does; if that takes long, print the reason."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await wait_until_ready()
    except TimeoutError:
        print(f"octavo {service} not serving yet: {why_not()}", flush=True)
        await wait_until_ready()
    announce_serving(service, address)


def announce_serving(service: str, address: str) -> None:
    """Print on stdout that a service takes work now. A parent process waits for this line."""
    print(f"octavo {service} serving on {address}", flush=True)


def _options(max_request_bytes: int, max_message_bytes: int, *, is_shared: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Unless it is wanted: a second server would bind the same port, and the kernel deal calls to either.
        ("grpc.so_reuseport", int(is_shared)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _MAX_IDLE_MS),
        # A long-lived stream through a dead network breaks after 30 s instead of hanging.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Peers may ping an idle stream as often as every 5 s; the default of 5 minutes would cut them off.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


LIVENESS = "liveness"
READINESS = "readiness"


class Health:
    """The health of one process. Alive from the start, not ready until `set_ready`.

    Args:
        service_names: Full names of the process's services.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._ready_names = ("", READINESS, *service_names)
        self._servicer = _Servicer()
        self._is_leaving = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer for this process."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    async def leave(self) -> None:
        """Stop being ready, whatever is set later: the process ends."""
        self._is_leaving = True
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Set whether the process takes work."""
        ready &= not self._is_leaving
        statuses = health_pb2.HealthCheckResponse
        await self._servicer.set(LIVENESS, statuses.SERVING)
        for name in self._ready_names:
            await self._servicer.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)

    def end_watches(self) -> None:
        """End all calls of Watch, which never end by themselves: a server that stops would wait for them."""
        self._servicer.is_over.set()


class _Servicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.is_over = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802
        watching = asyncio.create_task(super().Watch(request, context))
        ending = asyncio.create_task(self.is_over.wait())
        try:
            await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            ending.cancel()
            await asyncio.gather(watching, ending, return_exceptions=True)
