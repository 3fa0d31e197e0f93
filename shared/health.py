"""What grpc.health.v1 says of a process, on each of its ports.

Health has two names besides those of the services: `liveness` (the process answers) and `readiness` (it
takes work). The empty name and every own service follow readiness.
"""

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

LIVENESS = "liveness"
READINESS = "readiness"


class Health:
    """The health of one process. Alive from the start, not ready until `set_ready`.

    Args:
        service_names: Full names of the own services.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._ready_names = ("", READINESS, *service_names)
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer for this process."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)  # type: ignore[no-untyped-call]

    async def set_ready(self, ready: bool) -> None:
        """Say whether the process takes work."""
        statuses = health_pb2.HealthCheckResponse
        await self._servicer.set(LIVENESS, statuses.SERVING)
        for name in self._ready_names:
            await self._servicer.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)
