"""A gRPC server with health, reflection and a clean end, for every service.

`GrpcServer` owns the server and its health, `StopRequest` the wish that the process ends (SIGTERM,
SIGINT, the end of stdin), `shut_down` the order of the end. Health has two names besides those of the
services: `liveness` (the process answers) and `readiness` (it takes work). The empty name and every
own service follow readiness.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.errors import UnavailableError
from shared.grpc_status import StatusInterceptor

LIVENESS = "liveness"
READINESS = "readiness"

_logger = logging.getLogger(__name__)


class GrpcServer:
    """A grpc.aio server. Add servicers to `server`, then `start`. Not ready until `set_ready`.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        max_message_bytes: Limit of one message, in and out.
        service_names: Full names of the own services, for reflection and health.
    """

    def __init__(self, *, listen: str, max_message_bytes: int, service_names: Sequence[str]) -> None:
        self._listen = listen
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self.server = grpc.aio.server(interceptors=[StatusInterceptor()], options=_options(max_message_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)  # type: ignore[no-untyped-call]
        reflected = [*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(reflected, self.server)  # type: ignore[no-untyped-call]

    async def start(self) -> str:
        """Bind and serve; return the bound address, host:port.

        Raises: UnavailableError: the address cannot be bound.
        """
        host = self._listen.rpartition(":")[0]
        try:
            port = self.server.add_insecure_port(self._listen)
        except RuntimeError as error:
            raise UnavailableError(f"cannot listen on {self._listen}: the address is taken or not ours") from error
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self.server.start()
        return f"{host}:{port}"

    async def set_ready(self, ready: bool) -> None:
        """Say through health whether this service takes work."""
        statuses = health_pb2.HealthCheckResponse
        for name in (READINESS, "", *self._service_names):
            await self._health.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Stop taking calls; end those still running after `grace_s` seconds."""
        await self.server.stop(grace_s)


class StopRequest:
    """The wish that this process ends: SIGTERM, SIGINT or, if asked for, the end of stdin.

    Make it once, early, inside the running loop. A second signal ends the process at once.
    """

    def __init__(self, *, exit_on_stdin_close: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._reason: asyncio.Future[str] = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._stdin_watch = self._loop.create_task(self._watch_stdin()) if exit_on_stdin_close else None

    async def wait(self) -> str:
        """Return the reason once there is one."""
        return await asyncio.shield(self._reason)

    def _on_signal(self, number: signal.Signals) -> None:
        self._end(number.name)
        for handled in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(handled)
            signal.signal(handled, signal.SIG_DFL)

    async def _watch_stdin(self) -> None:
        await stdin_closed()
        self._end("stdin closed")

    def _end(self, reason: str) -> None:
        if not self._reason.done():
            self._reason.set_result(reason)


async def stdin_closed() -> None:
    """Return when standard input reaches its end.

    A parent holds the other end of the pipe; when it dies, even by SIGKILL, the pipe closes. What
    arrives before is thrown away. A thread reads, because an event loop cannot poll a file.
    """
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()

    def read_to_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before stdin
            loop.call_soon_threadsafe(closed.set)

    threading.Thread(target=read_to_end, name="stdin-watch", daemon=True).start()
    await closed.wait()


async def shut_down(server: GrpcServer, reason: str, *, drain: Callable[[], Awaitable[None]], grace_s: float) -> bool:
    """End in order: not ready, drain, stop the server.

    `drain` and the calls that it leaves behind share `grace_s` seconds. Returns whether `drain` ended
    in that time.
    """
    _logger.info("event=stopping reason=%r grace_s=%g", reason, grace_s)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace_s
    await server.set_ready(False)
    drained = True
    try:
        async with asyncio.timeout_at(deadline):
            await drain()
    except TimeoutError:
        drained = False
        _logger.warning("event=drain_timed_out grace_s=%g", grace_s)
    await server.stop(max(0.0, deadline - loop.time()))
    _logger.info("event=stopped")
    return drained


def announce(service: str, address: str) -> None:
    """Print the one line on stdout that a parent process waits for: the service takes calls now."""
    print(f"octavo {service} serving on {address}", flush=True)


def configure_logging(level: str) -> None:
    """Write log lines to stderr: time, level, logger, then key=value pairs."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="time=%(asctime)s.%(msecs)03d level=%(levelname)s logger=%(name)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Without it a second server binds the same port, and the kernel deals calls to either.
        ("grpc.so_reuseport", 0),
        # A long-lived stream through a dead network breaks after 30 s instead of hanging.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Peers may ping an idle stream as often as every 5 s; the default of 5 minutes would cut them off.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
