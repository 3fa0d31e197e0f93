"""An operator of adapters, who does to their names and sources what may be done, at any moment of a run."""

import asyncio
import random

from octavo.admin_client import NotFoundError
from octavo.errors import OctavoError, OverloadedError, UnavailableError
from tests.simulation.adapters import MISSING, NAMES, NUM_VERSIONS, RELOADED
from tests.simulation.machines import SchedulerMachine
from tests.simulation.operator import SimulatedAdminClient
from tests.simulation.processes import SimulatedProcess
from tests.simulation.sometimes import PREFIX
from tests.simulation.world import World

LONGEST_PAUSE_S = 0.5
PATIENCE_S = 10.0

# Until a load is tried again, when all is well, in seconds.
TRIES_AGAIN_S = 1.0

# What may become of a load, beside that nobody is there.
_MAY_BE_TOLD = (
    "the fleet is paused",
    "paused the fleet, and aborted all",
    "was lost; load it again",
    "is being loaded; wait",
)

_DEEDS = ("load", "load", "load", "change", "change", "change", "move", "unload", "remove")


class AdapterOperator:
    """Owns what is done to the adapters of a run.

    Args:
        world: Of the run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._adapters = world.adapters
        self._draw = random.Random(f"operator of adapters {world.plan.seed}")
        self._process = SimulatedProcess("operator of adapters", world.loop)
        self._at_work: list[asyncio.Task[None]] = []
        self._doubtful: set[tuple[SimulatedProcess | None, str]] = set()  # what may yet be unloaded

    def start(self) -> None:
        """Begin at all schedulers, in a run that has adapters."""
        if self._adapters.num_slots:
            self._at_work = [self._process.start(self._operate(machine)) for machine in self._world.schedulers]

    def settle(self) -> asyncio.Task[None]:
        """Let every scheduler know all names, from their own sources; return the task that sees to it."""
        return self._process.start(self._settle())

    async def _operate(self, machine: SchedulerMachine) -> None:
        """Do one thing after the other at a scheduler, until all is to be well."""
        while True:
            await asyncio.sleep(self._draw.random() * LONGEST_PAUSE_S)
            if self._world.is_over:
                return
            name, deed = self._draw.choice(NAMES), self._draw.choice(_DEEDS)
            source = self._draw.choice(NAMES) if deed == "move" else name
            if deed == "remove":
                self._adapters.put(name, MISSING)
            if deed == "change" or (self._adapters.version_of(source) == MISSING and self._draw.random() < 0.5):
                self._adapters.put(source, self._draw.randrange(NUM_VERSIONS))
            if deed == "unload":
                await self._unload(machine, name)
            else:
                await self._load(machine, name, source)

    async def _settle(self) -> None:
        await asyncio.gather(*self._at_work)
        for name in NAMES:
            if self._adapters.version_of(name) == MISSING:
                self._adapters.put(name, 0)
        for machine in self._world.schedulers:
            for name in NAMES:
                while not await self._load(machine, name, name):
                    await asyncio.sleep(TRIES_AGAIN_S)

    async def _load(self, machine: SchedulerMachine, name: str, source: str) -> bool:
        adapters, process, since_s = self._adapters, machine.process, self._world.loop.time()
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                SimulatedAdminClient(self._world.network, machine.own_address) as client,
            ):
                loaded = await client.load_adapter(name, source, in_place=True)
        except (TimeoutError, UnavailableError, OverloadedError):  # it may have given way to a request in the queue
            return False
        except OctavoError as error:
            is_missing = f"{source} is not there" in str(error) and "" in adapters.had(source, since_s)
            if not (is_missing or any(words in str(error) for words in _MAY_BE_TOLD)):
                self._accuse(f"the load of {source} ended with {type(error).__name__}: {error}")
            return False
        if loaded.digest not in adapters.had(source, since_s):
            self._accuse(f"{source} was loaded as {loaded.digest}, which it has not had since then")
        self._world.checks.seen["adapters: loaded"] += 1
        if machine.process is process:
            if not (machine.has_formers or (process, name) in self._doubtful):
                adapters.note_known(machine.name, name)
            self._note_users(machine, name, bytes.fromhex(loaded.digest))
        return True

    async def _unload(self, machine: SchedulerMachine, name: str) -> None:
        self._adapters.note_unknown(machine.name, name)
        process = machine.process
        try:
            async with (
                asyncio.timeout(PATIENCE_S),
                SimulatedAdminClient(self._world.network, machine.own_address) as client,
            ):
                await client.unload_adapter(name)
        except (TimeoutError, UnavailableError):
            self._doubtful.add((process, name))
            return
        except NotFoundError:
            return
        except OctavoError as error:
            self._accuse(f"{name} was not unloaded: {type(error).__name__}: {error}")
        self._world.checks.seen["adapters: unloaded"] += 1

    def _note_users(self, machine: SchedulerMachine, name: str, digest: bytes) -> None:
        """Count that a name has another content, and requests run that have the former one."""
        assert machine.scheduler is not None
        for request in machine.scheduler.engine.requests.values():
            adapter = request.group.adapter
            if request.lora_adapter == name and adapter is not None and adapter.digest != digest:
                self._world.checks.seen[PREFIX + RELOADED] += 1
                return

    def _accuse(self, what: str) -> None:
        self._world.checks.break_promise(what)
