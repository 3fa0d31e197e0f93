"""The fronts of a core, as the core has them: where they join, which have, and how they are."""

import asyncio

from octavo.admin.v1 import admin_pb2
from octavo.core.v1 import core_service_pb2_grpc
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.health import Health
from scheduler_svc.link.core_servicer import CoreServicer
from scheduler_svc.link.front_session import FrontSession

# How long fronts may take to leave at the end, in seconds.
LEAVE_S = 5.0


class JoinedFronts:
    """The fronts that the scheduler starts beside the core.

    Args:
        servicer: Serves it.
        link: The address where fronts join.
        num_fronts: How many there ought to be, named by their numbers from 0.

    Attributes:
        link: As above.
        num_fronts: As above.
    """

    def __init__(self, servicer: CoreServicer, link: str, num_fronts: int) -> None:
        self._servicer = servicer
        self.link = link
        self.num_fronts = num_fronts

    def server(self, health: Health, max_message_bytes: int) -> GrpcServer:
        """Return the port of the link: only processes of the same user reach it."""
        port = GrpcServer(
            listen=self.link,
            max_message_bytes=max_message_bytes,
            service_names=(),
            health=health,
            flag="the link to the fronts",
        )
        core_service_pb2_grpc.add_CoreServiceServicer_to_server(self._servicer, port.server)
        return port

    @property
    def sessions(self) -> list[FrontSession]:
        """Those that have joined."""
        return self._servicer.own_sessions

    def states(self) -> list[admin_pb2.FrontState]:
        """Return how each of them is, by its number."""
        sessions = {session.name: session for session in self.sessions}
        return [self._servicer.state_of(name, sessions.get(name)) for name in map(str, range(self.num_fronts))]

    async def wait_until_listening(self) -> None:
        """Return once all of them have opened their ports."""
        await self._servicer.wait_until_listening(self.num_fronts)

    async def wait_until_ready(self) -> None:
        """Return once all of them take calls: clients do not choose whom they reach."""
        await self._servicer.wait_until_ready(self.num_fronts)

    async def wait_until_left(self) -> None:
        """Return once all have left, which they are told to do, or have not for LEAVE_S."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self._servicer.wait_until_left()
        except TimeoutError:
            return
