"""The machines of the services: on each runs one process at a time. Those of clients are in `world.py`."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from executor_svc.service.servicer import ExecutionServicer
from executor_svc.transfers.pending import Transfer
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.core.waiting.tenant_shares import TenantShare
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.surroundings import PREFIX_KEY_BYTES, Surroundings
from scheduler_svc.engine.tenants import TenantQuota, Tenants
from scheduler_svc.link.cell import Cell
from scheduler_svc.link.engine_servicer import EngineServicer
from scheduler_svc.link.remote_engine import RemoteEngine
from tests.simulation.attach_checks import watch_attachment
from tests.simulation.cell_checks import watch_submissions
from tests.simulation.link_watch import watch_front, watch_link
from tests.simulation.plan import BY_NAME, ExecutorPlan
from tests.simulation.processes import SimulatedProcess
from tests.simulation.services import SimulatedExecutor, SimulatedFront, SimulatedScheduler, wall_clock
from tests.simulation.step_thread import SimulatedStepThread
from tests.simulation.transfer_watch import pending_of, watch_transfers, watch_transfers_of
from tests.simulation.watching import watch
from tests.simulation.weights import watch_versions
from tests.simulation.worker import SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.world import World

EXECUTORS = "dns:///executors:1"

# Of a cell: the name of its schedulers, where their fronts find them by it, and where clients find the fronts.
CORES_NAME = "cores"
CELL = "cell:1"

# Where a name has the cores, so many starts are at a new address. The former one stays in the name at most so long.
_SHARE_OF_MOVES = 0.5
_LONGEST_IN_NAME_S = 5.0
NUMERICS = ("fake-a", "fake-b")

# Until a scheduler is started again that has ended by itself, in seconds.
STARTS_AGAIN_S = 1.0


class Machine(ABC):
    """A place where one process runs at a time: it may end, and be started again.

    Attributes:
        process: The one that runs or ran last.
        is_leaving: Whether it was told to end in order.
    """

    def __init__(self, world: "World", name: str) -> None:
        self.name = name
        self.process: SimulatedProcess | None = None
        self.is_leaving = False
        self._world = world
        self._num_starts = 0
        self._formers: list[SimulatedProcess] = []

    @property
    def is_up(self) -> bool:
        """Whether a process runs there, or is stalled."""
        return self.process is not None and not self.process.is_dead

    def wall_clock(self, whose: str) -> Callable[[], float]:
        """Return the date as a machine or a process has it."""
        return wall_clock(self._world.loop, f"{whose} {self._world.plan.seed}")

    @property
    def is_serving(self) -> bool:
        """Whether its process is ready."""
        return self.is_up

    @abstractmethod
    def start(self) -> None:
        """Start a process, if none is there."""

    def begin(self) -> SimulatedProcess:
        """Return a new process."""
        self._num_starts += 1
        self.is_leaving = False
        self.process = SimulatedProcess(f"{self.name}#{self._num_starts}", self._world.loop, self.name)
        return self.process

    def kill(self, *, is_silent: bool = False) -> None:
        """End the process; `is_silent`: and nobody is told, as if the machine had lost its power."""
        if self.process is None or self.process.is_dead:
            return
        self.process.kill()
        if is_silent:
            self._world.network.darken(self.process)
        else:
            self._world.network.close(self.process)

    def displace(self) -> SimulatedProcess | None:
        """Stop the process and start another one in its place; return the former one, or None if none runs."""
        former = self.process
        if former is None or not former.is_running or self.is_leaving:
            return None
        former.stall()
        self._formers.append(former)
        self.process = None
        self.start()
        return former

    def kill_former(self, former: SimulatedProcess) -> None:
        """End a process that another one has displaced."""
        if former in self._formers:
            self._formers.remove(former)
            former.kill()
            self._world.network.close(former)

    def kill_formers(self) -> None:
        """End all of them."""
        for former in tuple(self._formers):
            self.kill_former(former)

    @property
    def has_formers(self) -> bool:
        """Whether a process is there that another one has displaced."""
        return bool(self._formers)

    def stall(self) -> bool:
        """Stop the process; False: it does not run."""
        if self.process is None or not self.process.is_running:
            return False
        self.process.stall()
        return True

    def resume(self) -> None:
        """Let a stalled process go on."""
        if self.process is not None and not self.process.is_running and not self.process.is_dead:
            self.process.resume()


class ExecutorMachine(Machine):
    """Where an executor runs.

    Attributes:
        plan: What it is like; a restart may find another one.
        numerics_id: Of which arithmetic.
        executor: The process that runs or ran last.
    """

    def __init__(self, world: "World", plan: ExecutorPlan) -> None:
        super().__init__(world, plan.address)
        self.plan = plan
        self.numerics_id = NUMERICS[0]
        self.executor: SimulatedExecutor | None = None
        self._supervisor = SimulatedProcess(f"supervisor of {self.name}", world.loop)

    @property
    def is_reading_weights(self) -> bool:
        """Whether it has begun an update of its weights."""
        return self.servicer is not None and self.servicer._weight_updates._is_busy

    @property
    def worker(self) -> SimulatedWorker | None:
        """What runs its steps; None: the process has none yet, or is gone."""
        if not self.is_up or self.executor is None:
            return None
        return getattr(self.executor, "worker", None)

    @property
    def servicer(self) -> ExecutionServicer | None:
        """What answers its schedulers; None: the process has none yet, or is gone."""
        return None if self.executor is None or self.worker is None else self.executor.servicer

    def transfers(self) -> list[Transfer]:
        """Return the transfers that it has begun, and not told the end of."""
        return [] if self.servicer is None else list(pending_of(self.servicer))

    def start(self) -> None:
        """Start a process."""
        if self.is_up:
            return
        world = self._world
        self.executor = SimulatedExecutor(
            world.network,
            self.plan.address,
            self.begin(),
            self._make_worker,
            self.wall_clock(self.name),
            self._watch,
            self._end,
        )
        self.executor.start(self.plan.load_s)

    def _end(self) -> None:
        """Its device computes nothing any more: the process ends, and is started again."""
        process = self.process
        self.kill()
        self._world.loop.call_later(STARTS_AGAIN_S, self._start_again, process, context=self._supervisor.context())

    def _start_again(self, process: SimulatedProcess) -> None:
        if self.process is process:
            self.start()

    def _watch(self, servicer: ExecutionServicer) -> None:
        watch_attachment(servicer._attachment, self.name, self._world.checks.break_promise)
        watch_transfers_of(servicer, self._world.note_progress)
        watch_versions(servicer)

    async def drain(self) -> None:
        """End the process in order."""
        if self.executor is not None and self.process is not None and self.process.is_running and self.worker:
            self.is_leaving = True
            await asyncio.wait({self.process.start(self.executor.drain())}, timeout=self._world.plan.drain_s)
        self.kill()

    def _make_worker(self, thread: SimulatedStepThread, instance_id: str) -> SimulatedWorker:
        world = self._world
        worker = SimulatedWorker(
            self.plan,
            thread,
            instance_id,
            world.plan.sliding_window_tokens,
            world.plan.has_states,
            world.plan.has_encoder,
            self.numerics_id,
            world.checks.break_promise,
            world.note_step,
            world.contents,
            world.adapters,
            updates_weights=world.plan.updates_weights,
        )
        world.workers.append(worker)
        return worker


class SchedulerMachine(Machine):
    """Where a scheduler runs; with fronts, its core.

    Attributes:
        scheduler: The process that runs or ran last.
        fronts: The machines of its fronts; those of a cell belong to none.
        own_address: Where fronts join, and operators ask: not that of clients, where there are fronts.
    """

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, f"scheduler{number}:1")
        self.scheduler: SimulatedScheduler | None = None
        num_fronts = 0 if world.plan.cell else world.plan.num_fronts
        self.fronts = [FrontMachine(world, self.name, f"front{number}.{index}", [self]) for index in range(num_fronts)]
        self.own_address = f"core{number}:1" if self.has_link else self.name
        self._number = number
        self._supervisor = SimulatedProcess(f"supervisor of {self.name}", world.loop)

    @property
    def has_link(self) -> bool:
        """Whether fronts join it."""
        return self._world.plan.num_fronts > 0

    @property
    def entrances(self) -> list[str]:
        """The machines that clients reach."""
        return [front.name for front in self._world.fronts if self in front.schedulers] or [self.name]

    @property
    def is_serving(self) -> bool:
        """Whether it is ready."""
        return self.scheduler is not None and self.scheduler.is_ready

    def start(self) -> None:
        """Start a process."""
        if self.is_up:
            return
        world, process = self._world, self.begin()
        world.adapters.note_unknown(self.name)
        chance = random.Random(f"{process.name} {world.plan.seed}")
        if world.plan.cell == BY_NAME:
            self._take_address()
        # As of a file: a scheduler that starts again finds what its executors have cached.
        prefix_key = random.Random(f"core{self._number}:1 {world.plan.seed}").randbytes(PREFIX_KEY_BYTES)
        # The next core may run on another host, with another clock.
        surroundings = Surroundings(
            prefix_key, b"transfers of " + process.name.encode(), chance.random, self.wall_clock(process.name)
        )

        def on_engine(engine: Engine) -> None:
            watch(engine, process.name, world.checks.watchers)
            watch_transfers(engine, process.name, world.checks.watchers, world.note_progress)
            if world.plan.is_sending_cheap:
                engine.fleet.dispatcher.transfers._token_s = deque(maxlen=0)
            process.watch = world.checks.watch(engine)

        def on_link(link: EngineServicer, engine: Engine) -> None:
            watch_link(link, engine, process.name, world.checks.watchers, world.checks.break_promise)
            world.checks.watch_link(link, engine)

        self.scheduler = SimulatedScheduler(
            world.network,
            self.own_address,
            process,
            self.config,
            self.tenants,
            world.resolve,
            surroundings,
            on_engine,
            on_link,
            lambda: self._end_superseded(process),
            lambda client: world.ask_for_texts(client, process),
        )
        self.scheduler.start()

    def _take_address(self) -> None:
        """Have a new address or keep the one that there was, as a pod that starts."""
        world, former = self._world, self.own_address
        chance = random.Random(f"address {self._num_starts} of {self.name} {world.plan.seed}")
        if chance.random() < _SHARE_OF_MOVES:
            self.own_address = f"core{self._number}.{self._num_starts}:1"
            gone_in_s = chance.random() * _LONGEST_IN_NAME_S
            forget = world.core_addresses.pop
            world.loop.call_later(gone_in_s, forget, former, None, context=self._supervisor.context())
        world.core_addresses[self.own_address] = None

    def _end_superseded(self, process: SimulatedProcess) -> None:
        """A core has ended, as another one is in its place: where it was the last one, it is started again."""
        if process in self._formers:
            self._formers.remove(process)
        self._world.loop.call_later(STARTS_AGAIN_S, self._start_again, process, context=self._supervisor.context())

    def _start_again(self, process: SimulatedProcess) -> None:
        if self.process is process:
            self.start()

    def drain_executor(self, address: str, *, is_draining: bool) -> bool:
        """Let an executor give its groups to others, or take some again; return False if it is not driven here."""
        scheduler, process = self.scheduler, self.process
        if scheduler is None or process is None or not process.is_running or not scheduler.has_begun:
            return False
        driver = scheduler.engine.drivers.get(address)
        if driver is None or driver.is_draining is is_draining:
            return False
        process.start(scheduler.engine.drain_executor(driver, is_draining=is_draining))
        return True

    @property
    def config(self) -> SchedulerConfig:
        """Its settings, and those of its fronts."""
        return SchedulerConfig.model_validate(
            {
                "executor": (EXECUTORS,),
                "scheduler_id": self.name,
                "fronts": str(self._world.plan.num_fronts),
                **{name: value for name, value in self._world.plan.settings.items() if name != "tenant_weights"},
            }
        )

    @property
    def tenants(self) -> Tenants:
        """Their weights."""
        weights: dict[str, float] = self._world.plan.settings["tenant_weights"]
        return Tenants({name: TenantQuota(TenantShare(weight)) for name, weight in weights.items()})

    async def drain(self) -> None:
        """End the process in order, and then its fronts."""
        if self.scheduler is not None and self.process is not None and self.process.is_running:
            self.is_leaving = True
            drain_s = self._world.plan.drain_s
            end_fronts = [front.drain for front in self.fronts]
            draining = self.process.start(self.scheduler.drain(drain_s, end_fronts))
            await asyncio.wait({draining}, timeout=2 * drain_s)
        self.kill()


class FrontMachine(Machine):
    """Where a front runs.

    Attributes:
        address: Where clients find it, or another front beside it.
        schedulers: Where the cores run that it joins.
        front: The process that runs or ran last.
        engines: All that this process has joined.
    """

    def __init__(self, world: "World", address: str, name: str, schedulers: Sequence[SchedulerMachine]) -> None:
        super().__init__(world, name)
        self.address = address
        self.schedulers = schedulers
        self.front: SimulatedFront | None = None
        self.engines: list[RemoteEngine] = []

    @property
    def cell(self) -> Cell | None:
        """What it has joined; None: no process runs there, or it has not begun."""
        return self.front.cell if self.front is not None and self.is_up else None

    @property
    def is_serving(self) -> bool:
        """Whether it is ready."""
        return self.front is not None and self.front.is_ready

    def start(self) -> None:
        """Start a process."""
        if self.is_up:
            return
        world, process, engines = self._world, self.begin(), list[RemoteEngine]()

        def on_engine(engine: RemoteEngine) -> None:
            engines.append(engine)
            watch_front(engine, process.name, world.checks.watchers)
            watch_submissions(engine, self, world.checks.break_promise)

        self.engines = engines
        links = [scheduler.own_address for scheduler in self.schedulers]
        self.front = SimulatedFront(
            world.network,
            self.address,
            [f"dns:///{CORES_NAME}:1"] if world.plan.cell == BY_NAME else links,
            world.resolve,
            self.name,
            process,
            self.schedulers[0].config,
            self.wall_clock(self.name),
            on_engine,
            lambda client: world.ask_for_texts(client, process),
        )
        world.checks.expect_no_end(process.start(self.front.run()), process)

    async def drain(self) -> None:
        """End the process in order."""
        if self.front is not None and self.process is not None and self.process.is_running:
            self.is_leaving = True
            await asyncio.wait({self.process.start(self.front.drain())}, timeout=self._world.plan.drain_s)
        self.kill()
