"""The processes that `make chaos` starts, kills, stops and starts again."""

import asyncio
import atexit
import contextlib
import random
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.admin_client import AdminClient
from octavo.errors import UnavailableError
from octavo.models.store import find_model
from tests.chaos.doomed_scheduler import ENGINE, FRONT
from tests.support.processes import Service, children_of, resident_mib, start_service

SCHEDULER = "scheduler_svc"
DOOMED_SCHEDULER = "tests.chaos.doomed_scheduler"
PATIENCE_S = 120.0

# Below those that machines give to outgoing connections: nobody takes the port while its process is away.
_PORTS = range(20_000, 32_000)


def fake_executor(*flags: str) -> tuple[str, ...]:
    """Return module and flags of a fake executor."""
    return ("executor_svc.fake", *flags)


def demo_executor(*flags: str) -> tuple[str, ...]:
    """Return module and flags of an executor with the demo model."""
    model = find_model("smollm2")
    assert model is not None, "the demo model is not prepared: run `octavo model prepare smollm2`"
    return ("executor_svc", "--model", str(model), "--num-device-blocks", "400", *flags)


def hybrid_executor(*flags: str) -> tuple[str, ...]:
    """Return module and flags of an executor with a tiny hybrid, whose states are saved at every 16 tokens."""
    return ("executor_svc", "--model", _tiny_hybrid(), "--num-device-blocks", "200", "--block-size-tokens", "4", *flags)


@cache
def _tiny_hybrid() -> str:
    """Make a tiny model with gated delta nets and random weights, until this process ends."""
    from tests.numerics.architectures import save_tiny_architecture  # torch takes seconds to import
    from tests.numerics.family_architectures import FAMILY_ARCHITECTURES

    directory = tempfile.TemporaryDirectory(prefix="octavo-hybrid-")
    atexit.register(directory.cleanup)
    settings = {**FAMILY_ARCHITECTURES["Qwen3_5ForCausalLM"], "vocab_size": 128}  # prompts are printable bytes
    save_tiny_architecture(Path(directory.name), "Qwen3_5ForCausalLM", settings)
    return directory.name


def free_port() -> int:
    """Return a port that nobody has, and that no outgoing connection gets."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")


class Executor:
    """An executor at one address, whichever process it is just now.

    Args:
        command: Its module, and its flags.

    Attributes:
        address: Where it is dialled.
        listen: Where it listens; a proxy may stand between.
        service: Its process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.listen = self.address = f"127.0.0.1:{free_port()}"
        self._module, *self._flags = command
        self.service: Service | None = None

    @property
    def pid(self) -> int:
        """The process."""
        assert self.service is not None
        return self.service.process.pid

    async def start(self, *flags: str) -> None:
        """Start a process and return once it serves."""
        quiet = ("--log-level", "error", "--listen", self.listen)
        self.service = await start_service(self._module, *self._flags, *flags, *quiet)

    async def kill(self) -> None:
        """Send SIGKILL; return once the process is gone."""
        self.send_signal(signal.SIGKILL)
        if self.service is not None:
            await self.service.process.wait()

    async def drain(self) -> float:
        """Send SIGTERM; return after how many seconds the process has ended."""
        assert self.service is not None
        begin_s = time.monotonic()
        code = await self.service.terminate()
        assert code == 0, f"the executor ended with exit code {code}"
        return time.monotonic() - begin_s

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.service is not None and self.service.process.returncode is None:
            self.service.process.send_signal(number)


@asynccontextmanager
async def running_executors(num: int, command: Sequence[str]) -> AsyncIterator[list[Executor]]:
    """Run executors until the end of the block."""
    executors = [Executor(command) for _ in range(num)]
    try:
        await asyncio.gather(*(executor.start() for executor in executors))
        yield executors
    finally:
        for executor in executors:
            await executor.kill()


@asynccontextmanager
async def running_scheduler(
    addresses: Sequence[str],
    *flags: str,
    module: str = SCHEDULER,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator["Scheduler"]:
    """Run a scheduler with all of these executors until the end of the block; `environment` is added to ours."""
    flags = ("--executor", ",".join(addresses), "--log-level", "error", "--admin-listen", "127.0.0.1:0", *flags)
    service = await start_service(module, *flags, environment=environment)
    try:
        async with AdminClient(service.other_addresses["admin"]) as admin:
            scheduler = Scheduler(service, admin)
            await scheduler.until(lambda state: num_attached(state) == len(addresses))
            yield scheduler
    finally:
        if service.process.returncode is None:
            await service.kill()


class Scheduler:
    """A scheduler process.

    Attributes:
        service: The process.
        admin: What it tells operators.
    """

    def __init__(self, service: Service, admin: AdminClient) -> None:
        self.service = service
        self.admin = admin

    @property
    def address(self) -> str:
        """Where clients call it."""
        return self.service.address

    async def until(self, condition: Callable[[pb.GetSchedulerStateResponse], bool]) -> pb.GetSchedulerStateResponse:
        """Return the first state for which a condition holds; there is none while the core is away."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(UnavailableError):
                    if condition(state := await self.admin.get_state()):
                        return state
                await asyncio.sleep(0.01)

    async def until_whole(self, num_executors: int) -> pb.GetSchedulerStateResponse:
        """Return the first state with so many executors attached, in which all fronts that run now take calls."""

        def is_whole(state: pb.GetSchedulerStateResponse) -> bool:
            ready = sorted(front.pid for front in state.fronts if front.is_ready)
            return num_attached(state) == num_executors and ready == self.fronts() and len(ready) == len(state.fronts)

        return await self.until(is_whole)

    def cores(self) -> list[int]:
        """The process of its core, if it has fronts and the core runs."""
        return self._children("scheduler_svc.processes.engine_process", ENGINE)

    def fronts(self) -> list[int]:
        """The processes of its fronts."""
        return self._children("scheduler_svc.processes.front_process", FRONT)

    def _children(self, *modules: str) -> list[int]:
        pid = self.service.process.pid
        return sorted(child for module in modules for child in children_of(pid, module))

    def resident_mib(self) -> float:
        """Resident memory of its processes now, in MiB."""
        return sum(map(resident_mib, (self.service.process.pid, *self.cores(), *self.fronts())))

    async def executors(self) -> dict[str, admin_pb2.ExecutorState]:
        """Return its executors by address."""
        return {state.address: state for state in (await self.admin.get_state()).executors}

    async def leftovers(self) -> list[str]:
        """Return what is left although no request is live, in words."""
        state = await self.admin.get_state()
        left = [f"{state.num_waiting_requests} requests wait"] if state.num_waiting_requests else []
        for executor in state.executors:
            counts = {
                "running requests": executor.num_running_requests,
                "swapped requests": executor.num_swapped_requests,
                "preempted requests": executor.num_preempted_requests,
                "used blocks": executor.num_used_blocks,
                "used host blocks": executor.num_used_host_blocks,
                "blocks that are neither free, cached nor used": executor.num_blocks
                - executor.num_free_blocks
                - executor.num_used_blocks,
                "used slots": executor.num_slots - executor.num_free_slots,
            }
            left += [f"{executor.address} has {count} {name}" for name, count in counts.items() if count]
        return left


def num_attached(state: pb.GetSchedulerStateResponse) -> int:
    """Return how many executors are attached."""
    return sum(each.status == admin_pb2.EXECUTOR_STATUS_ATTACHED for each in state.executors)
