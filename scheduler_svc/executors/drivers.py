"""The drivers of the fleet: one for each expected executor.

    Membership ── addresses ──> Drivers ── start, retire, wake ──> ExecutorDriver, one an address

A driver whose address is gone is retired: it takes no new groups, and is forgotten when its groups have ended.
All drivers run on one event loop. Read next: `membership.py`, `driver.py`.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Iterator, Mapping

from octavo_shared.grpc.membership import Membership
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.executors.circuit_breaker import CircuitBreaker
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.driver_interface import DriverOwner, DriverSettings
from scheduler_svc.executors.transfer_keys import TransferKeys, reachable
from scheduler_svc.telemetry.meter import Meter


class Drivers(Mapping[str, ExecutorDriver]):
    """The drivers by address.

    `draw` returns a random number from 0 to 1, for the pauses of the circuit breakers; `transfer_key` is a secret.
    """

    def __init__(
        self,
        membership: Membership,
        connect: Callable[[str], ExecutorClient],
        owner: DriverOwner,
        settings: DriverSettings,
        meter: Meter,
        draw: Callable[[], float] = random.random,
        *,
        transfer_key: bytes,
    ) -> None:
        self.transfer_keys = TransferKeys(transfer_key)
        self.membership = membership
        self._connect = connect
        self._owner = owner
        self._settings = settings
        self._meter = meter
        self._draw = draw
        self._drivers: dict[str, ExecutorDriver] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __getitem__(self, address: str) -> ExecutorDriver:
        return self._drivers[address]

    def __iter__(self) -> Iterator[str]:
        return iter(self._drivers)

    def __len__(self) -> int:
        return len(self._drivers)

    @property
    def last_trouble(self) -> str:
        """Why executors are not attached, in one line; empty: no trouble is known."""
        missing = [driver for driver in self.values() if driver.planner is None and driver.last_trouble]
        troubles = [f"{driver.address}: {driver.last_trouble}" for driver in missing]
        return "; ".join([*troubles, *filter(None, self.membership.troubles.values())])

    @property
    def is_complete(self) -> bool:
        """Whether no executor is expected: each address has its executor attached, there or by another address."""
        attached = {driver.instance_id for driver in self.values() if driver.planner is not None}
        return all(
            driver.planner is not None or (driver.instance_id and driver.instance_id in attached) or driver.is_spare
            for driver in self.values()
        )

    @property
    def has_room(self) -> bool:
        """Whether another executor may be attached."""
        limit = self._settings.max_executors
        return limit is None or sum(driver.holds_instance for driver in self.values()) < limit

    def holder_of(self, instance_id: str) -> ExecutorDriver | None:
        """Return the driver that has the executor process with this id, or is about to; None: none has."""
        return next((d for d in self.values() if d.holds_instance and d.instance_id == instance_id), None)

    def transfer_place(self, address: str) -> tuple[str, str]:
        """Return where the executor at an address takes blocks of others, host:port, and its instance id."""
        driver = self[address]
        info = None if driver.session is None else driver.session.info
        return reachable("" if info is None else info.transfer_address, address), driver.instance_id

    # Executors come and go -----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a running driver for each address of the membership; until cancelled."""
        try:
            await self.membership.watch(self._follow, self._is_attached)
            await asyncio.Event().wait()  # the addresses never change
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def add(self, address: str) -> ExecutorDriver:
        """Make and return the driver of an address; it does not run yet."""
        driver = ExecutorDriver(
            self._connect(address), self._owner, self, self._settings, self._meter, CircuitBreaker(self._draw)
        )
        self._drivers[address] = driver
        return driver

    async def _follow(self, addresses: list[str]) -> None:
        """Retire drivers of addresses that are gone, and start one for each new address."""
        for address, driver in self.items():
            driver.retire(is_retired=address not in addresses)
        for address in addresses:
            if address not in self:
                self._start(address)
        await self._owner.on_addresses_changed()

    def _is_attached(self, address: str) -> bool:
        return address in self and self[address].planner is not None

    def _start(self, address: str) -> None:
        driver = self.add(address)
        task = asyncio.create_task(driver.run(), name=f"executor {address}")
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._forget(address, ended))

    def _forget(self, address: str, ended: asyncio.Task[None]) -> None:
        """Forget a retired driver that has ended; start a new one if its address is back meanwhile."""
        self._tasks.remove(ended)
        del self._drivers[address]
        if not ended.cancelled() and address in self.membership.addresses:
            self._start(address)

    # Work ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let all planners decide: some may have new work."""
        for driver in self.values():
            driver.work.set()

    def wake_those_of(self, planners: Collection[ExecutorPlanner]) -> None:
        """Let these planners decide."""
        if planners:
            for driver in self.values():
                if driver.planner in planners:
                    driver.work.set()
