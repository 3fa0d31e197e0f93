"""Everything that is there in a run: machines with their processes, the network, the clients."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace

from octavo.calls.resumption import DEFAULT_RESUME_TIMEOUT_S
from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.values.outputs import Event, Finished
from scheduler_svc.request.engine_client import EngineClient
from tests.simulation.adapters import Adapters
from tests.simulation.checks import Checks, RequestRecord
from tests.simulation.loop import SimulationLoop
from tests.simulation.machines import CELL, CORES_NAME, ExecutorMachine, FrontMachine, Machine, SchedulerMachine
from tests.simulation.network.link import Network
from tests.simulation.plan import Plan, RequestPlan
from tests.simulation.processes import SimulatedProcess
from tests.simulation.services import SimulatedClient
from tests.simulation.shared_stream import SharedStream
from tests.simulation.texts import Text, ask_for_texts, has_texts
from tests.simulation.weights import end_those_apart
from tests.simulation.worker import SimulatedWorker

RETRY_S, LONGEST_RETRY_S = 1.0, 16.0

# For what a client has a channel of its own: requests with which it goes on, and Aborts.
_GOES_ON, _ABORTS = "goes on", "aborts"


class ClientMachine(Machine):
    """Where clients run, with a channel to each scheduler.

    Attributes:
        num_open: Requests that it has sent, or will send again.
    """

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, f"client{number}")
        self._chance = random.Random(f"{self.name} {world.plan.seed}").random
        self._channels: dict[tuple[str, str], SimulatedClient] = {}
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
        client = await self._channel(self._world.entrance(plan.scheduler), _GOES_ON if record.goes_on else "")
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
            lora_adapter=record.lora_adapter,
            include_provenance=bool(record.lora_adapter),
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
                    asyncio.get_running_loop().create_task(self._abort(record))
                if plan.reads_every_s:
                    await asyncio.sleep(plan.reads_every_s)

    def _way(self, plan: RequestPlan, client: SimulatedClient) -> Callable[..., AsyncGenerator[Event, None]]:
        """Return what runs a request: each by a call of its own, or some on a stream that they share."""
        if not plan.is_streamed:
            return client.stream
        if client not in self._streams:
            self._streams[client] = SharedStream(client)
        return self._streams[client].events

    async def _abort(self, record: RequestRecord) -> None:
        """Abort a request; where a scheduler has fronts, over a connection of its own, which may be to another one."""
        address = self._world.entrance(record.plan.scheduler)
        client = await self._channel(address, _ABORTS if self._world.plan.num_fronts else "")
        with suppress(OctavoError):
            await client.abort(record.request_id)

    async def _channel(self, address: str, purpose: str = "") -> SimulatedClient:
        key = address, purpose
        if key not in self._channels:
            resume_timeout_s = DEFAULT_RESUME_TIMEOUT_S if purpose == _GOES_ON else 0.0
            self._channels[key] = client = SimulatedClient(self._world.network, address, resume_timeout_s, self._chance)
            await client.__aenter__()
        return self._channels[key]


@dataclass(slots=True)
class World:
    """One run.

    Attributes:
        addresses: The executors that the schedulers are told of.
        core_addresses: The schedulers that the fronts of a cell are told of, where they find them by a name.
        fronts: The machines of all fronts.
        workers: Of all executor processes so far.
        texts: All that were asked for.
        contents: What each name of a block stands for, by `content_key`.
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
    core_addresses: dict[str, None] = field(default_factory=dict)
    fronts: list[FrontMachine] = field(init=False)
    is_over: bool = False
    workers: list[SimulatedWorker] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    contents: dict[bytes, bytes] = field(default_factory=dict)
    _awaiting_step: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.network = Network(self.loop, f"{plan.seed}", plan.weather)
        self.executors = [ExecutorMachine(self, executor) for executor in plan.executors]
        self.schedulers = [SchedulerMachine(self, number) for number in range(plan.num_schedulers)]
        self.fronts = [front for scheduler in self.schedulers for front in scheduler.fronts]
        if plan.cell:
            self.fronts = [
                FrontMachine(self, CELL, f"front{number}", self.schedulers) for number in range(plan.num_fronts)
            ]
        self.clients = [ClientMachine(self, number) for number in range(plan.num_clients)]
        self.addresses = dict.fromkeys(executor.address for executor in plan.executors)

    @property
    def adapters(self) -> Adapters:
        """See there."""
        return self.checks.adapters

    async def resolve(self, name: str, port: int) -> set[str]:
        """Return the addresses that a name has now. Raises OSError: it has none."""
        addresses = self.core_addresses if name == CORES_NAME else self.addresses
        if not addresses:
            raise OSError("no address is associated with the name")
        return set(addresses)

    def ask_for_texts(self, client: EngineClient, process: SimulatedProcess) -> None:
        """Let a process ask its engine for texts, in seeds that have some."""
        seed, accuse = self.plan.seed, self.checks.break_promise
        if has_texts(seed):
            process.start(ask_for_texts(client, process, seed, self.texts, accuse, lambda: self.is_over))

    def entrance(self, scheduler: int) -> str:
        """Return where clients call a scheduler, or the cell that it is of."""
        return CELL if self.plan.cell else f"scheduler{scheduler}:1"

    @property
    def num_steps(self) -> int:
        """How many steps the executors have run."""
        return sum(worker.num_steps for worker in self.workers)

    def note_step(self) -> None:
        """An executor has run a step."""
        self.note_progress()

    def note_progress(self) -> None:
        """A step has run, or a transfer goes on."""
        awaiting, self._awaiting_step = self._awaiting_step, []
        for future in awaiting:
            if not future.done():
                future.set_result(None)

    async def next_step(self, until_s: float) -> None:
        """Return after the next step of any executor, or at a time, or earlier; nobody need look in between."""
        if until_s <= self.loop.time():
            return
        future: asyncio.Future[None] = self.loop.create_future()
        self._awaiting_step.append(future)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await future

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
        for machine in (*self.schedulers, *self.fronts, *self.clients, *self.executors):
            machine.resume()
            machine.kill_formers()
            if machine.is_leaving:
                machine.kill()
        end_those_apart(self)
        for executor, plan in zip(self.executors, self.plan.executors, strict=True):
            if executor.plan != plan or (executor.worker is not None and executor.worker.is_hung):
                executor.kill()
            executor.plan = plan
            if executor.worker is not None:
                executor.worker.heal()
            executor.start()
            self.addresses[plan.address] = None
        for machine in (*self.schedulers, *self.fronts, *self.clients):
            machine.start()
        for scheduler in self.schedulers:
            self.core_addresses[scheduler.own_address] = None
            for executor in self.executors:
                scheduler.drain_executor(executor.name, is_draining=False)
