"""Somebody who looks at everything, all the time: an operator's calls change nothing, and do not fail by a bug."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from octavo.admin_client import AdminClient, NotFoundError
from octavo.errors import OctavoError, UnavailableError
from tests.simulation.checks import Checks
from tests.simulation.network.client import SimulatedChannel
from tests.simulation.network.link import Network
from tests.simulation.services import CLIENT_KEEPALIVE_S

LONGEST_PAUSE_S = 2.0
PATIENCE_S = 5.0


class SimulatedAdminClient(AdminClient):
    """octavo.AdminClient on the simulated network."""

    def __init__(self, network: Network, address: str) -> None:
        super().__init__(address)
        self._network = network

    def _dial(self, address: str) -> Any:
        return SimulatedChannel(self._network, address, CLIENT_KEEPALIVE_S)


async def look_around(checks: Checks, network: Network, address: str, executors: Sequence[str], seed: str) -> None:
    """Ask a scheduler one thing after the other, until cancelled."""
    draw = random.Random(f"operator {seed}")
    async with SimulatedAdminClient(network, address) as client:
        while True:
            await asyncio.sleep(draw.random() * LONGEST_PAUSE_S)
            ids = [record.request_id for record in checks.records] or ["nobody"]
            question = draw.choice(_questions(client, draw.choice(ids), draw.choice(executors)))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await question()
            except (TimeoutError, UnavailableError, NotFoundError):
                continue  # nobody is there, or there is nothing of that name (any more)
            except OctavoError as error:
                if "each has a request" in str(error):
                    continue  # several tenants have one of this id
                checks.break_promise(f"an operator's question was answered with {type(error).__name__}: {error}")
            else:
                checks.seen["operator: answered"] += 1


def _questions(client: AdminClient, request_id: str, executor: str) -> list[Callable[[], Awaitable[Any]]]:
    return [
        client.get_state,
        lambda: client.list_requests(100),
        lambda: client.list_ended_requests(20),
        lambda: client.list_queue(20),
        lambda: client.get_request(request_id),
        lambda: client.explain_request(request_id),
        lambda: client.get_block_map(executor),
        lambda: client.get_block(executor, 1),
    ]
