"""A cell of real processes: schedulers, fake executors that they share by name, and fronts that join all schedulers.

Each process has a host of its own in 127.0.0.0/8, all of one tier have one port, and a name stands for them.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from octavo import Client
from octavo.admin.v1 import admin_pb2
from octavo.admin_client import AdminClient
from octavo.errors import OctavoError
from tests.chaos.services import free_port
from tests.support.named_hosts import NamedHosts
from tests.support.patience import PATIENCE_S
from tests.support.processes import Service, start_service

EXECUTOR, SCHEDULER, FRONT = "executor", "scheduler", "front"
TIERS = (EXECUTOR, SCHEDULER, FRONT)

_MODULES = {
    EXECUTOR: "executor_svc.fake",
    SCHEDULER: "scheduler_svc",
    FRONT: "scheduler_svc.processes.front_process",
}

LEASE_S = 2.0
RESOLVE_INTERVAL_S = 0.5


@dataclass(slots=True, eq=False)
class Member:
    """A process of a cell, or what is left of it.

    Attributes:
        tier: What it is.
        host: Where it listens.
        flags: What it is started with, beside those of its tier.
        scheduler_id: Of a scheduler.
        fleet: Of a scheduler whose executors it has, of an executor of which it is one; "": of the only one.
        service: The process; None: it has not been started.
        operator: What a scheduler tells operators.
    """

    tier: str
    host: str
    flags: tuple[str, ...] = ()
    scheduler_id: str = ""
    fleet: str = ""
    service: Service | None = None
    operator: AdminClient | None = None

    @property
    def runs(self) -> bool:
        """Whether it runs; it may be about to end."""
        return self.service is not None and self.service.process.returncode is None

    @property
    def address(self) -> str:
        """Where it serves."""
        assert self.service is not None
        return self.service.address

    async def terminate(self) -> None:
        """Send SIGTERM and wait. Raises AssertionError: it does not end in order."""
        assert self.service is not None
        code = await self.service.terminate()
        assert code == 0, f"the {self.tier} at {self.host} ended with exit code {code}"

    async def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self.runs:
            assert self.service is not None
            await self.service.kill()

    async def attached(self) -> list[str]:
        """Return the executors that a scheduler has attached; none if it does not answer."""
        assert self.operator is not None
        with contextlib.suppress(OctavoError):
            executors = (await self.operator.get_state()).executors
            return [each.address for each in executors if each.status == admin_pb2.EXECUTOR_STATUS_ATTACHED]
        return []

    async def ran(self, request_ids: Collection[str]) -> dict[str, str]:
        """Return the executors that requests had which ended at a scheduler; nothing of others, or if it is away."""
        operator = self.operator
        assert operator is not None

        async def place(request_id: str) -> str:
            events = (await operator.get_request(request_id)).events
            return [event.executor for event in events if event.kind == admin_pb2.REQUEST_EVENT_KIND_ADMITTED][-1]

        with contextlib.suppress(OctavoError):
            ended = [one.request_id for one in await operator.list_ended_requests(1000)]
            own = [request_id for request_id in ended if request_id in request_ids]
            return dict(zip(own, await asyncio.gather(*map(place, own)), strict=True))
        return {}


@dataclass(slots=True)
class Cell:
    """A cell.

    Attributes:
        names: Which addresses its names have.
        executor_flags: What its executors are started with.
        max_executors: How many a scheduler attaches at most.
        members: Its processes by tier; those that were removed are not among them.
    """

    names: NamedHosts
    executor_flags: Sequence[str] = ()
    max_executors: int = 2
    members: dict[str, list[Member]] = field(default_factory=lambda: {tier: [] for tier in TIERS})
    _ports: dict[str, int] = field(default_factory=lambda: {tier: free_port() for tier in TIERS})
    _num_begun: Counter[str] = field(default_factory=Counter)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    def running(self, tier: str) -> list[Member]:
        """Return the processes of a tier that run."""
        return [each for each in self.members[tier] if each.runs]

    async def add(self, tier: str, *flags: str, scheduler_id: str = "", fleet: str = "") -> Member:
        """Start a process at an address that none had before; it is a member once it listens."""
        self._num_begun[tier] += 1
        number = self._num_begun[tier]
        name = (scheduler_id or f"{tier}-{number}") if tier == SCHEDULER else ""
        host = self.address_of(tier, number).partition(":")[0]
        member = Member(tier, host, flags, name, fleet)
        self._stack.push_async_callback(member.kill)
        await self.start(member)
        self.members[tier].append(member)
        self._publish(member)
        return member

    def address_of(self, tier: str, number: int) -> str:
        """Return where the process listens that is added as this one of its tier, from 1."""
        return f"127.{1 + TIERS.index(tier)}.0.{number}:{self._ports[tier]}"

    async def start(self, member: Member) -> None:
        """Start a process of a member, which has none, and return once it listens."""
        environment = self.names.environment(_MODULES[member.tier])
        flags = (*self._flags(member), *member.flags, "--log-level", "error")
        member.service = await start_service("tests.support.named_hosts", *flags, environment=environment)
        if member.tier == SCHEDULER:
            if member.operator is not None:
                await member.operator.close()
            member.operator = AdminClient(member.service.other_addresses["admin"])
            await self._stack.enter_async_context(member.operator)

    async def remove(self, member: Member) -> None:
        """Take a process out of its name and send SIGTERM; return once it has ended."""
        self.members[member.tier].remove(member)
        self._publish(member)
        await member.terminate()

    def _publish(self, changed: Member) -> None:
        tier, fleet = changed.tier, changed.fleet if changed.tier == EXECUTOR else None
        hosts = [member.host for member in self.members[tier] if fleet in (None, member.fleet)]
        self.names.give(_name(tier, fleet or ""), hosts)

    def _flags(self, member: Member) -> tuple[str, ...]:
        listen = f"{member.host}:{self._ports[member.tier]}"
        interval = ("--resolve-interval-s", str(RESOLVE_INTERVAL_S))
        if member.tier == EXECUTOR:
            return ("--listen", listen, *self.executor_flags)
        if member.tier == FRONT:
            return ("--listen", listen, "--engine", self._target(SCHEDULER), *interval)
        return (
            *("--engine-listen", listen, "--engine-insecure"),
            *("--admin-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"),
            *("--executor", self._target(EXECUTOR, member.fleet), "--max-executors", str(self.max_executors)),
            *("--scheduler-id", member.scheduler_id, "--lease-s", str(LEASE_S), *interval),
        )

    def _target(self, tier: str, fleet: str = "") -> str:
        return f"dns:///{_name(tier, fleet)}:{self._ports[tier]}"

    async def attached(self) -> dict[str, list[str]]:
        """Return the addresses of the executors that each scheduler has, by scheduler id."""
        schedulers = self.running(SCHEDULER)
        attached = await asyncio.gather(*(scheduler.attached() for scheduler in schedulers))
        return {one.scheduler_id: executors for one, executors in zip(schedulers, attached, strict=True)}

    async def until_whole(self) -> None:
        """Return once each executor is attached for which a scheduler has a place, and every front takes requests."""
        async with asyncio.timeout(PATIENCE_S):
            while not await self.is_whole():
                await asyncio.sleep(0.02)
            for front in self.running(FRONT):
                async with Client(front.address) as client:
                    await client.wait_until_ready(PATIENCE_S)

    async def is_whole(self) -> bool:
        """Return whether each executor is attached for which a scheduler has a place."""
        num_places = self.max_executors * len(self.running(SCHEDULER))
        num_attached = sum(map(len, (await self.attached()).values()))
        return num_attached == min(len(self.running(EXECUTOR)), num_places)


@asynccontextmanager
async def running_cell(
    num_schedulers: int,
    num_executors: int,
    num_fronts: int,
    *executor_flags: str,
    max_executors: int = 2,
    stale_s: float = 0.0,
) -> AsyncIterator[Cell]:
    """Run a cell until the end of the block; it is whole. `num_executors` are those of all schedulers."""
    with TemporaryDirectory() as folder:
        cell = Cell(NamedHosts(Path(folder) / "names.json"), executor_flags, max_executors)
        async with cell._stack:
            numbers = {EXECUTOR: num_executors, SCHEDULER: num_schedulers, FRONT: num_fronts}
            await asyncio.gather(*(cell.add(tier) for tier, number in numbers.items() for _ in range(number)))
            await cell.until_whole()
            cell.names.stale_s = stale_s
            yield cell


def _name(tier: str, fleet: str) -> str:
    return f"{tier}s{fleet}.cell"
