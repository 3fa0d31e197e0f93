"""The answers of grpc.health.v1 for a process, on each of its ports.

Health has two names besides those of the services: `liveness` (the process answers) and `readiness` (it
takes work). The empty name and every own service follow readiness.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

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
