"""A front of its own: `octavo-front --core HOST:PORT`. It joins a scheduler elsewhere, over TCP.

Its ports are open from the start on, so that probes and clients hear that it is not ready while it finds no core.
"""

import asyncio
import os
import secrets
import socket
import sys
from functools import partial

import grpc.aio

from octavo.calls.tls import TlsOptions, handshake_trouble
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.exposure import warn_if_exposed
from octavo_shared.grpc.grpc_server import announce_listening, announce_serving, probe_server
from octavo_shared.grpc.grpc_status import failure_text
from octavo_shared.process.config import load_config_or_exit
from octavo_shared.process.events import configure_logging
from octavo_shared.process.garbage_collection import settle
from octavo_shared.process.metrics_server import MetricsServer
from octavo_shared.process.stop_request import StopRequest
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.config.dial_tls import read_credentials
from scheduler_svc.processes.file_limit import raise_file_limit
from scheduler_svc.processes.front_service import FrontService, MakePort, link_options

# What the names of the settings of TLS to the core begin with.
FLAGS = "--core-tls"

# Time after which a start is worth a word, in seconds: the first attempts to join have had their answers.
SILENCE_S = 2.0

# A core that a network has cut off is noticed after both of these, in milliseconds.
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    config = load_config_or_exit(FrontConfig, sys.argv[1:], os.environ)
    configure_logging(config.log_level, config.log_format)
    raise_file_limit()
    settle()
    try:
        asyncio.run(serve(config))
    except OctavoServiceError as error:
        print(f"octavo front: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(config: FrontConfig) -> None:
    """Run the front until somebody wants it to stop.

    Raises: OctavoServiceError: it cannot start.
    """
    stopping = asyncio.ensure_future(StopRequest(exit_on_stdin_close=config.exit_on_stdin_close).wait())
    tls = core_tls(config)
    if tls is not None:
        read_credentials(tls, FLAGS)  # what cannot be used ends the start, and not only every connection
    service = FrontService(
        config,
        front_id(config),
        partial(open_channel, config, tls),
        partial(join_trouble, tls),
        other_ports=other_ports(config),
    )
    warn_if_exposed(
        "front",
        {
            "--listen": config.listen,
            **({} if config.openai_listen is None else {"--openai-listen": config.openai_listen}),
        },
        is_encrypted=service.front.tls is not None,
        knows_clients=bool(config.tokens_file or config.tls_client_ca),
        how_to_know_clients="set --tokens-file to ask for tokens, or --tls-client-ca to demand client certificates",
    )
    announcing: list[asyncio.Task[None]] = []

    async def open_ports() -> None:
        address = await service.ports.start()
        awaits = f"the scheduler at {config.core}"
        announce_listening("front", address, service.ports.other_addresses, awaits=awaits)
        announcing.append(asyncio.create_task(announce_when_ready(service, config.core, address)))

    try:
        await service.run(open_ports, stopping)
    finally:
        for task in announcing:
            task.cancel()


async def announce_when_ready(service: FrontService, core: str, address: str) -> None:
    """Say on stdout that the front serves, once it does; if that takes long, what keeps it."""
    try:
        async with asyncio.timeout(SILENCE_S):
            await service.is_ready.wait()
    except TimeoutError:
        print(f"octavo front not serving yet: the scheduler at {core}: {service.core.last_trouble}", flush=True)
        await service.is_ready.wait()
    announce_serving("front", address)


def other_ports(config: FrontConfig) -> dict[str, MakePort]:
    """Return what makes the ports of probes and of metrics, by name."""
    ports: dict[str, MakePort] = {}
    if (health_listen := config.health_listen) is not None:
        ports["health"] = lambda health, _: probe_server(health_listen, health)
    if (metrics_listen := config.metrics_listen) is not None:
        ports["metrics"] = lambda _, collect: MetricsServer(metrics_listen, collect)
    return ports


def core_tls(config: FrontConfig) -> TlsOptions | None:
    """Return how to speak TLS with the core; None: plaintext."""
    if config.core_tls_ca is None:
        return None
    return TlsOptions(
        ca=config.core_tls_ca,
        cert=config.core_tls_cert,
        key=config.core_tls_key,
        server_name=config.core_tls_server_name,
    )


def open_channel(config: FrontConfig, tls: TlsOptions | None) -> grpc.aio.Channel:
    """Open a channel to the core; the files of TLS are read as they are now. Raises TlsFileError: one is unusable."""
    options = [
        *link_options(config.max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(config.core, options=options)
    return grpc.aio.secure_channel(config.core, read_credentials(tls, FLAGS), options=[*options, *tls.channel_options])


def join_trouble(tls: TlsOptions | None, error: grpc.aio.AioRpcError) -> str:
    """Say why a front could not join, or was cut."""
    return handshake_trouble(error.details() or "", tls, FLAGS, "--front-tls-ca") or failure_text(error)


def front_id(config: FrontConfig) -> str:
    """Return the name by which the core knows this front.

    By default host and port, which a restart keeps. With port 0 that would be the same for every front of the host.
    """
    if config.front_id is not None:
        return config.front_id
    host, port = socket.gethostname(), config.listen.rpartition(":")[2]
    return f"{host}/{secrets.token_hex(8)}" if int(port) == 0 else f"{host}/{config.listen}"


if __name__ == "__main__":
    sys.exit(main())
