"""Everything that is there in a run: machines with their processes, the network, the clients."""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.outputs import Event, Finished
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.surroundings import PREFIX_KEY_BYTES, Surroundings
from tests.simulation.checks import Checks, RequestRecord
from tests.simulation.loop import SimulationLoop
from tests.simulation.network.link import Network
from tests.simulation.plan import ExecutorPlan, Plan, RequestPlan
from tests.simulation.processes import SimulatedProcess
from tests.simulation.services import SimulatedClient, SimulatedExecutor, SimulatedScheduler, virtual_unix_s
from tests.simulation.shared_stream import SharedStream
from tests.simulation.step_thread import SimulatedStepThread
from tests.simulation.watching import watch
from tests.simulation.worker import SimulatedWorker

EXECUTORS = "dns:///executors:1"
NUMERICS = ("fake-a", "fake-b")
RETRY_S, LONGEST_RETRY_S = 1.0, 16.0
REQUESTS_PER_STREAMED = 3  # one of so many is sent on a stream that it shares with others


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

    @property
    def is_up(self) -> bool:
        """Whether a process runs there, or is stalled."""
        return self.process is not None and not self.process.is_dead

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

    @property
    def worker(self) -> SimulatedWorker | None:
        """What runs its steps; None: the process has none yet, or is gone."""
        if not self.is_up or self.executor is None:
            return None
        return getattr(self.executor, "worker", None)

    def start(self) -> None:
        """Start a process."""
        if self.is_up:
            return
        world = self._world
        self.executor = SimulatedExecutor(world.network, self.plan.address, self.begin(), self._make_worker)
        self.executor.start(self.plan.load_s)

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
            self.numerics_id,
            world.checks.break_promise,
        )
        world.workers.append(worker)
        return worker


class SchedulerMachine(Machine):
    """Where a scheduler runs.

    Attributes:
        scheduler: The process that runs or ran last.
    """

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, f"scheduler{number}:1")
        self.scheduler: SimulatedScheduler | None = None
        self._number = number

    def start(self) -> None:
        """Start a process."""
        if self.is_up:
            return
        world, process = self._world, self.begin()
        chance = random.Random(f"{process.name} {world.plan.seed}")
        config = SchedulerConfig.model_validate(
            {"executor": (EXECUTORS,), "scheduler_id": self.name, **world.plan.settings}
        )
        surroundings = Surroundings(
            chance.randbytes(PREFIX_KEY_BYTES), chance.random, lambda: virtual_unix_s(world.loop)
        )

        def on_engine(engine: Engine) -> None:
            watch(engine, process.name, world.checks.watchers)
            process.watch = world.checks.watch(engine)

        self.scheduler = SimulatedScheduler(
            world.network, self.name, process, config, world.resolve, surroundings, on_engine
        )
        self.scheduler.start()

    async def drain(self) -> None:
        """End the process in order."""
        if self.scheduler is not None and self.process is not None and self.process.is_running:
            self.is_leaving = True
            drain_s = self._world.plan.drain_s
            await asyncio.wait({self.process.start(self.scheduler.drain(drain_s))}, timeout=2 * drain_s)
        self.kill()


class ClientMachine(Machine):
    """Where clients run, with a channel to each scheduler.

    Attributes:
        num_open: Requests that it has sent, or will send again.
    """

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, f"client{number}")
        self._channels: dict[str, SimulatedClient] = {}
        self._streams: dict[SimulatedClient, SharedStream] = {}
        self._records: list[RequestRecord] = []
        self.num_open = 0
        self.start()

    def start(self) -> None:
        """Start a process, without channels yet."""
        if not self.is_up:
            self._channels, self._streams = {}, {}
            self.begin()

    def kill(self, *, is_silent: bool = False) -> None:
        """See `Machine`; its requests have nobody any more who could get an answer."""
        super().kill(is_silent=is_silent)
        for record in self._records:
            record.left = True
        self._records.clear()
        self.num_open = 0

    def send(self, plan: RequestPlan, request_id: str) -> None:
        """Send a request, unless nobody is there who would."""
        if self.process is not None and not self.process.is_dead:
            self.process.start(self._send(plan, request_id))

    async def _send(self, plan: RequestPlan, request_id: str) -> None:
        """Send a request, and send it again while nobody computes it."""
        self.num_open += 1
        for number in range(plan.max_retries + 1):
            record = await self._send_once(plan, f"{request_id}.{number}" if number else request_id)
            if not isinstance(record.error, UnavailableError | OverloadedError) or self._world.is_over:
                break
            await asyncio.sleep(min(RETRY_S * 2**number, LONGEST_RETRY_S))
        self.num_open -= 1

    async def _send_once(self, plan: RequestPlan, request_id: str) -> RequestRecord:
        checks = self._world.checks
        record = checks.begin(plan, request_id)
        self._records.append(record)
        client = await self._channel(f"scheduler{plan.scheduler}:1")
        try:
            await self._receive(client, plan, record)
        except OctavoError as error:
            record.error = error
        self._records.remove(record)
        checks.end(record)
        return record

    async def _receive(self, client: SimulatedClient, plan: RequestPlan, record: RequestRecord) -> None:
        checks = self._world.checks
        stream = self._way(plan, client)(
            list(record.shape.prompt),
            request_id=record.request_id,
            priority=plan.priority if self._world.plan.settings["policy"] == "priority" else 0,
            timeout_s=plan.timeout_s,
            **record.shape.options,
        )
        async with aclosing(stream) as events:
            async for event in events:
                checks.note_event(record, event)
                if isinstance(event, Finished):
                    continue
                if record.events == plan.leaves_after:
                    record.left = True
                    return
                if record.events == plan.aborts_after:
                    record.was_aborted = True
                    asyncio.get_running_loop().create_task(self._abort(client, record))
                if plan.reads_every_s:
                    await asyncio.sleep(plan.reads_every_s)

    def _way(self, plan: RequestPlan, client: SimulatedClient) -> Callable[..., AsyncGenerator[Event, None]]:
        """Return what runs a request: each by a call of its own, or some on a stream that they share."""
        if plan.number % REQUESTS_PER_STREAMED != 0:
            return client.stream
        if client not in self._streams:
            self._streams[client] = SharedStream(client)
        return self._streams[client].events

    async def _abort(self, client: SimulatedClient, record: RequestRecord) -> None:
        with suppress(OctavoError):
            await client.abort(record.request_id)

    async def _channel(self, address: str) -> SimulatedClient:
        if address not in self._channels:
            self._channels[address] = client = SimulatedClient(self._world.network, address)
            await client.__aenter__()
        return self._channels[address]


@dataclass(slots=True)
class World:
    """One run.

    Attributes:
        addresses: The executors that the schedulers are told of.
        workers: Of all executor processes so far.
        is_over: Whether no client tries again any more.
    """

    plan: Plan
    loop: SimulationLoop
    checks: Checks
    network: Network = field(init=False)
    executors: list[ExecutorMachine] = field(init=False)
    schedulers: list[SchedulerMachine] = field(init=False)
    clients: list[ClientMachine] = field(init=False)
    addresses: dict[str, None] = field(init=False)
    is_over: bool = False
    workers: list[SimulatedWorker] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.network = Network(self.loop, f"{plan.seed}", plan.weather)
        self.executors = [ExecutorMachine(self, executor) for executor in plan.executors]
        self.schedulers = [SchedulerMachine(self, number) for number in range(plan.num_schedulers)]
        self.clients = [ClientMachine(self, number) for number in range(plan.num_clients)]
        self.addresses = dict.fromkeys(executor.address for executor in plan.executors)

    async def resolve(self, name: str, port: int) -> set[str]:
        """Return the addresses that the name of the executors has now. Raises OSError: it has none."""
        if not self.addresses:
            raise OSError("no address is associated with the name")
        return set(self.addresses)

    @property
    def num_steps(self) -> int:
        """How many steps the executors have run."""
        return sum(worker.num_steps for worker in self.workers)

    def look_at_cores(self) -> None:
        """Look at the cores of all schedulers that run; their last callback has ended."""
        for machine in self.schedulers:
            if machine.process is not None and machine.process.is_running and machine.process.watch is not None:
                assert machine.scheduler is not None
                self.checks.look_at_cores(machine.scheduler.engine)

    def heal(self) -> None:
        """End every fault: all processes run, and nothing is slow, small or cut off any more."""
        self.network.heal_all()
        self.network.weather = replace(self.plan.weather, rare_one_in=0)
        for machine in (*self.schedulers, *self.clients, *self.executors):
            machine.resume()
            if machine.is_leaving:
                machine.kill()
        for executor, plan in zip(self.executors, self.plan.executors, strict=True):
            if executor.plan != plan or (executor.worker is not None and executor.worker.is_hung):
                executor.kill()
            executor.plan = plan
            if executor.worker is not None:
                executor.worker.heal()
            executor.start()
            self.addresses[plan.address] = None
        for machine in (*self.schedulers, *self.clients):
            machine.start()
