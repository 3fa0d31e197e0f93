"""The services and the client as simulated processes: what production runs, on the simulated network.

Left out are ports, health checks and the HTTP servers: sockets, which a simulation has not.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import ExecutionServicer
from octavo.admin.v1 import admin_service_pb2_grpc
from octavo.client import Client
from octavo.core.v1 import core_service_pb2_grpc
from octavo.execution.v1 import execution_service_pb2_grpc
from octavo.execution.v1.block_transfer_service_pb2_grpc import (
    add_BlockTransferServiceServicer_to_server as add_transfers,
)
from octavo.generation.v1 import generation_service_pb2_grpc
from octavo_shared.grpc.grpc_status import StatusInterceptor
from octavo_shared.grpc.membership import Membership, Resolve
from octavo_shared.process.metric import Metric
from scheduler_svc.admin.servicer import AdminServicer
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.surroundings import Surroundings
from scheduler_svc.engine.tenants import Tenants
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.session import SessionTimings
from scheduler_svc.front.api.generation import Generation
from scheduler_svc.front.api.models import UNNAMED, Models
from scheduler_svc.front.api.request_body import KeepBodies
from scheduler_svc.front.api.servicer import GenerationServicer
from scheduler_svc.front.front import PROMPT_METHODS, front_settings
from scheduler_svc.front.grammars.compiler import CompilerHere
from scheduler_svc.front.grammars.grammar_checks import GrammarChecks
from scheduler_svc.front.text.text_model import ModelTokenizer
from scheduler_svc.link.cell import Cell
from scheduler_svc.link.engine_servicer import EngineServicer, TokenizerFiles
from scheduler_svc.link.engine_stream import Incarnations
from scheduler_svc.link.remote_engine import ReadTokenizer, RemoteEngine
from scheduler_svc.processes.front_process import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS
from scheduler_svc.processes.incarnation import Incarnation
from scheduler_svc.processes.service import HEARTBEATS_PER_LEASE, engine_settings
from scheduler_svc.request.engine_client import EngineClient
from tests.simulation.loop import SimulationLoop
from tests.simulation.network.client import SimulatedChannel
from tests.simulation.network.link import Network
from tests.simulation.network.server import SimulatedServer
from tests.simulation.processes import SimulatedProcess
from tests.simulation.step_thread import SimulatedStepThread
from tests.simulation.weights import FOLDER, SlowUpdates

MAX_MESSAGE_BYTES = 64 * 2**20
CLIENT_KEEPALIVE_S = 50.0  # as octavo.Client asks for it
LINK_KEEPALIVE_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000
# Short beside how long the name of a peer may be missing, so that both happen: it stays, and it is left.
FORGET_AFTER_S = 2.0

# How often a core looks whether its fronts have to be told how it is: less often than in production, as each look
# costs a simulation time even where nothing happens, and fronts that know old things meet more.
STATE_INTERVAL_S = 0.25

# How far wall clocks are beside the right time at most, in seconds, and how much faster or slower they run.
CLOCKS_DIFFER_S = 6 * 3600.0
CLOCKS_DRIFT = 1e-3

# What a front has to tell of itself.
METRIC = Metric("simulated_fronts_total", "counter", "Processes of fronts.")

MakeWorker = Callable[[SimulatedStepThread, str], FakeWorker]


@dataclass(slots=True)
class SimulatedExecutor:
    """An executor process; `start` once. `make_worker` is given the thread of its steps and its instance id."""

    network: Network
    address: str
    process: SimulatedProcess
    make_worker: MakeWorker
    unix_s: Callable[[], float]
    on_servicer: Callable[[ExecutionServicer], None] = lambda _: None
    on_device_lost: Callable[[], None] = lambda: None
    worker: FakeWorker = field(init=False)
    thread: SimulatedStepThread = field(init=False)
    servicer: ExecutionServicer = field(init=False)
    server: SimulatedServer = field(init=False)

    def start(self, load_s: float) -> None:
        """Let it load for so many seconds, and then serve."""
        self.process.start(self._run(load_s))

    async def _run(self, load_s: float) -> None:
        self.thread = SimulatedStepThread(self.process.loop)
        self.worker = self.make_worker(self.thread, self.process.name)
        self.servicer = ExecutionServicer(thread=self.thread, unix_s=self.unix_s, dial=self._dial)
        self.servicer._weight_updates = SlowUpdates([FOLDER])
        self.servicer.transfer_address = self.address
        self.on_servicer(self.servicer)
        self.server = SimulatedServer(self.process, self.address, [StatusInterceptor()])
        added_to: Any = self.server
        execution_service_pb2_grpc.add_ExecutionServiceServicer_to_server(self.servicer, added_to)
        add_transfers(self.servicer.block_transfers, added_to)
        self.network.listen(self.server)
        await asyncio.sleep(load_s)
        await self.servicer.load(lambda: self.worker)
        if self.worker.info.updates_weights:
            await self.servicer.device_lost()
            self.on_device_lost()

    def _dial(self, address: str) -> Any:
        return SimulatedChannel(self.network, address)

    async def drain(self) -> None:
        """End in order, as after SIGTERM."""
        await self.servicer.drain()
        await self.server.stop(self.network.delay_s() * 4)
        self.process.kill()
        self.network.close(self.process)


@dataclass(slots=True)
class SimulatedScheduler:
    """A scheduler process; `start` once. With fronts it has `link`, and without them `generation`."""

    network: Network
    address: str
    process: SimulatedProcess
    config: SchedulerConfig
    tenants: Tenants
    resolve: Resolve
    surroundings: Surroundings
    on_engine: Callable[[Engine], None] = lambda _: None
    on_link: Callable[[EngineServicer, Engine], None] = lambda *_: None
    on_superseded: Callable[[], None] = lambda: None
    on_client: Callable[[EngineClient], None] = lambda _: None
    engine: Engine = field(init=False)
    incarnation: Incarnation = field(init=False)
    generation: GenerationServicer | None = None
    link: EngineServicer | None = None
    is_ready: bool = False
    has_begun: bool = False

    def start(self) -> None:
        """Let it look for its executors and serve."""
        self.process.start(self._run())

    async def _run(self) -> None:
        config = self.config
        tokenizer = TokenizerFiles() if config.num_fronts else ModelTokenizer()
        self.incarnation = Incarnation(config.scheduler_id or self.address, self.surroundings.unix_s)
        self.engine = Engine(
            Membership(config.executor, config.resolve_interval_s, self.resolve, FORGET_AFTER_S),
            self._connect,
            engine_settings(config, self.tenants),
            tokenizer.load,
            self._set_ready,
            surroundings=self.surroundings,
        )
        self.on_engine(self.engine)
        server: Any = SimulatedServer(self.process, self.address, [StatusInterceptor(), KeepBodies(PROMPT_METHODS)])
        if isinstance(tokenizer, TokenizerFiles):
            self.link = EngineServicer(self.engine, tokenizer, self.incarnation, STATE_INTERVAL_S)
            self.on_link(self.link, self.engine)
            core_service_pb2_grpc.add_CoreServiceServicer_to_server(self.link, server)
        else:
            self.generation = generation_servicer(self.engine, tokenizer, config)
            generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, server)
            self.on_client(self.engine)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.engine), server)
        self.network.listen(server)
        self.has_begun = True
        running = asyncio.create_task(self.engine.run(), name="engine")
        superseded = asyncio.create_task(self.incarnation.wait_until_superseded())
        await asyncio.wait({running, superseded}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self.process.kill()
        self.network.close(self.process)
        self.on_superseded()

    async def drain(self, timeout_s: float, end_fronts: Sequence[Callable[[], Awaitable[None]]] = ()) -> None:
        """End in order, as after SIGTERM; whoever has not begun ends at once."""
        if not self.has_begun:
            return
        await self.engine.drain(timeout_s)
        await asyncio.gather(*(end() for end in end_fronts))
        if self.generation is not None:
            self.generation.shut_down()
        for task in self.process.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(self.network.delay_s() * 4)
        self.process.kill()
        self.network.close(self.process)

    def _connect(self, address: str) -> ExecutorClient:
        lease_s = self.config.lease_s
        timings = SessionTimings(
            lease_s=lease_s,
            heartbeat_interval_s=lease_s / HEARTBEATS_PER_LEASE,
            step_timeout_s=self.config.step_timeout_s,
        )
        own_id = self.incarnation.scheduler_id
        return ExecutorClient(
            address, own_id, timings, MAX_MESSAGE_BYTES, open_channel=self._dial, incarnation=self.incarnation
        )

    def _dial(self, address: str) -> Any:
        return SimulatedChannel(self.network, address)

    async def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready
        for session in () if self.link is None else self.link.sessions:
            session.tell_state()


@dataclass(slots=True)
class SimulatedFront:
    """A front process; `run` once.

    Attributes:
        address: Where clients find it, or another front beside it.
        links: Where the engines are that it joins, as `--engine` has them.
        resolve: Looks a name among them up.
        name: Its id, which a restart keeps.
        unix_s: Returns the date.
    """

    network: Network
    address: str
    links: Sequence[str]
    resolve: Resolve
    name: str
    process: SimulatedProcess
    config: SchedulerConfig
    unix_s: Callable[[], float]
    on_engine: Callable[[RemoteEngine], None] = lambda _: None
    on_client: Callable[[EngineClient], None] = lambda _: None
    cell: Cell | None = None
    incarnations: Incarnations = field(default_factory=Incarnations)
    generation: GenerationServicer = field(init=False)
    server: SimulatedServer = field(init=False)
    is_ready: bool = False

    async def run(self) -> None:
        """Join the core, and serve once that one has said how it is."""
        tokenizer = ModelTokenizer()
        cell = self.cell = Cell(
            Membership(self.links, self.config.resolve_interval_s, self.resolve, FORGET_AFTER_S),
            self._open_engine,
            tokenizer.load,
            self._set_ready,
        )
        self.generation = generation_servicer(cell, tokenizer, self.config)
        self.server = SimulatedServer(self.process, self.address, [StatusInterceptor(), KeepBodies(PROMPT_METHODS)])
        added_to: Any = self.server
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, added_to)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._serve(cell))
            group.create_task(cell.run())

    def _open_engine(self, address: str, read_tokenizer: ReadTokenizer, on_change: Callable[[], None]) -> RemoteEngine:
        def dial() -> Any:
            return SimulatedChannel(self.network, address, LINK_KEEPALIVE_S)

        engine = RemoteEngine(
            dial,
            self.name,
            read_tokenizer,
            on_change,
            lambda: [METRIC.single(1.0)],
            unix_s=self.unix_s,
            incarnations=self.incarnations,
        )
        self.on_engine(engine)
        return engine

    async def _serve(self, cell: Cell) -> None:
        await cell.wait_until_told()
        self.on_client(cell)
        self.network.listen(self.server, is_shared=True)
        cell.take_calls()

    async def drain(self) -> None:
        """End in order, as after SIGTERM; whoever has not begun ends at once."""
        if self.cell is None or self.server.network is None:
            return
        await self.cell.leave()
        self.generation.shut_down()
        await self.server.stop(self.network.delay_s() * 4)

    async def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready


class SimulatedClient(Client):
    """octavo.Client on the simulated network; of the process in whose context it is opened."""

    def __init__(self, network: Network, address: str, resume_timeout_s: float, chance: Callable[[], float]) -> None:
        super().__init__(address, resume_timeout_s=resume_timeout_s)
        self._random = chance  # that of the process is also drawn from by what is computed once for many runs
        self._network = network

    def _dial(self, address: str) -> Any:
        return SimulatedChannel(self._network, address, CLIENT_KEEPALIVE_S)


def wall_clock(loop: SimulationLoop, whose: str) -> Callable[[], float]:
    """Return a date that follows the virtual clock, hours beside those of others and a little faster or slower."""
    chance = random.Random(f"the clock of {whose}")
    ahead_s, drift = chance.uniform(-CLOCKS_DIFFER_S, CLOCKS_DIFFER_S), chance.uniform(-CLOCKS_DRIFT, CLOCKS_DRIFT)
    return lambda: 1.7e9 + ahead_s + (1.0 + drift) * loop.time()


def generation_servicer(engine: EngineClient, tokenizer: ModelTokenizer, config: SchedulerConfig) -> GenerationServicer:
    """Return what answers clients."""
    generation = Generation(engine, tokenizer, front_settings(config), grammars=GrammarChecks(CompilerHere))
    return GenerationServicer(Models({UNNAMED: generation}))
