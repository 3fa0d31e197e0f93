"""The ports where fronts join, and the check that a caller is a front."""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Any

from grpc_health.v1 import health as health_names

from octavo.admin.v1 import admin_service_pb2_grpc
from octavo.core.v1 import core_service_pb2_grpc
from octavo_shared.errors import MalformedMessageError, PermissionDeniedError
from octavo_shared.grpc.certificates import PemFile
from octavo_shared.grpc.grpc_server import GrpcServer, Health
from octavo_shared.grpc.grpc_status import abort
from octavo_shared.grpc.interceptor import (
    Context,
    Handler,
    HandlerInterceptor,
    certificate_names,
    handler_parts,
    peer_address,
    run_handler,
)
from octavo_shared.grpc.tls import ServerTls
from octavo_shared.process.events import Event
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.link.engine_servicer import EngineServicer
from scheduler_svc.link.remote_admin import FailuresInStatus

log = logging.getLogger(__name__)

# How long a caller that is refused may take for its first word, in seconds.
FIRST_WORD_S = 5.0


class FrontAccess(HandlerInterceptor):
    """Lets only calls of fronts through. Health stays open.

    Args:
        trusted_fronts: Names in their certificates.
    """

    def __init__(self, trusted_fronts: Collection[str]) -> None:
        self._trusted_fronts = frozenset(trusted_fronts)

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler with its callers checked."""
        if method.rpartition("/")[0].lstrip("/") == health_names.SERVICE_NAME:
            return handler
        behavior, rebuild = handler_parts(handler)

        async def guarded(request: Any, context: Context) -> Any:
            names = certificate_names(context)
            if self._trusted_fronts.isdisjoint(names):
                error = PermissionDeniedError(
                    f"the certificate of {', '.join(sorted(names)) or 'nobody'} is not a trusted front's; add its name "
                    "to the scheduler's --trusted-fronts"
                )
                log.warning(Event("call_refused", method=method, peer=peer_address(context), cause=str(error)))
                if handler.request_streaming:  # gRPC would tell a caller that its write failed, and not why
                    with contextlib.suppress(TimeoutError, MalformedMessageError):
                        async with asyncio.timeout(FIRST_WORD_S):
                            await anext(request, None)
                await abort(context, error)
            return await run_handler(behavior, request, context)

        return rebuild(guarded, handler.request_deserializer, handler.response_serializer)


def engine_port(
    config: SchedulerConfig,
    listen: str,
    servicer: EngineServicer,
    admin: admin_service_pb2_grpc.AdminServiceServicer,
    health: Health,
) -> GrpcServer:
    """Return the port.

    Args:
        config: Of the scheduler.
        listen: Its --engine-listen; or unix:PATH, for the fronts that it starts: only its own user reaches that.
        servicer: The engine's side of the link.
        admin: What fronts may ask for operators.
        health: What the port says of the process.

    Raises: TlsFileError: a file cannot be used.
    """
    is_local = listen.startswith("unix:")
    tls = None if is_local else front_tls(config)
    port = GrpcServer(
        listen=listen,
        max_message_bytes=config.max_message_bytes,
        service_names=(),
        health=health,
        credentials=None if tls is None else tls.credentials(),
        interceptors=[FrontAccess(config.trusted_fronts)] if config.trusted_fronts and not is_local else [],
        readers=[FailuresInStatus()],
        flag="the link to the fronts" if is_local else "--engine-listen",
    )
    admin_service_pb2_grpc.add_AdminServiceServicer_to_server(admin, port.server)
    core_service_pb2_grpc.add_CoreServiceServicer_to_server(servicer, port.server)
    return port


def front_tls(config: SchedulerConfig) -> ServerTls | None:
    """Return the TLS of the port; None: it speaks plaintext. Raises TlsFileError: a file cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    authorities = None if config.front_tls_ca is None else PemFile("--front-tls-ca", config.front_tls_ca)
    return ServerTls(PemFile("--tls-cert", config.tls_cert), PemFile("--tls-key", config.tls_key), authorities)
