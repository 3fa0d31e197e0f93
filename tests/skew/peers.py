"""Processes that run the code of a release, the current code, or the current code with another wire range."""

import ast
import asyncio
import os
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_pb2, admin_service_pb2, admin_service_pb2_grpc
from tests.support.processes import PORT_LINE, Service
from tests.support.stack import ExecutorProcess

FAKE = "executor_svc.fake"
SCHEDULER = "scheduler_svc"
FRONT = "scheduler_svc.processes.front_process"
# Where releases up to 0.1.0 had it.
FORMER_MODULES = {FRONT: "scheduler_svc.own_front"}
# Their names in releases up to 0.2.0.dev0.
FORMER_FLAGS = {"--engine": "--core", "--engine-listen": "--core-listen", "--engine-insecure": "--core-insecure"}
CAPABILITIES = (
    *(f"shared/octavo_shared/step_wire/{name}.py" for name in ("executor_info", "capability")),
    "shared/capability.py",
)
CONFIG = ("scheduler_svc/config/scheduler_config.py", "scheduler_svc/config.py")

WORKING_TREE = Path(__file__).parents[2]
RELEASE_ARCHIVES = sorted(Path(__file__).parent.glob("octavo-*.zip"))

State = admin_service_pb2.GetSchedulerStateResponse

# Runs a module after it has given the wire another range.
WITH_WIRE_RANGE = """
import runpy
from octavo_shared.step_wire import wire
wire.MIN_WIRE_VERSION, wire.MAX_WIRE_VERSION = {lowest}, {highest}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Code:
    """What a process runs.

    Attributes:
        name: For the names of tests.
        archive: Whose code is imported; None: that of the working tree.
        wire_range: The lowest and the highest wire version that it pretends to speak; None: its own.
    """

    name: str
    archive: Path | None = None
    wire_range: tuple[int, int] | None = None

    @property
    def has_admin_port(self) -> bool:
        """Whether the scheduler serves operators on a port of their own; that of 0.1.0 does it on its main port."""
        return self._has("admin_listen", CONFIG)

    @property
    def has_fronts(self) -> bool:
        """Whether standalone fronts can join the scheduler."""
        return self._has("engine_listen", CONFIG) or self._has("core_listen", CONFIG)

    @property
    def has_engine_flags(self) -> bool:
        """Whether fronts join what flags call an engine; before, it was a core."""
        return self._has("engine_listen", CONFIG)

    @property
    def keeps_names(self) -> bool:
        """Whether a scheduler that starts again finds what executors have cached."""
        return self._has("prefix_key_file", CONFIG)

    @property
    def has_row_flags(self) -> bool:
        """Whether an executor says which outputs cannot go on."""
        return self._has("ROW_FLAGS", CAPABILITIES)

    @property
    def has_grammars(self) -> bool:
        """Whether an executor can follow grammars."""
        return self._has("num_grammar_slots", ("shared/octavo_shared/step_wire/executor_info.py",))

    @property
    def tells_loads(self) -> bool:
        """Whether an executor loads grammars beside the steps."""
        return self._has("GRAMMARS_READY", CAPABILITIES)

    @property
    def has_transfers(self) -> bool:
        """Whether an executor sends blocks to others."""
        return self._has("max_transfers", ("shared/octavo_shared/step_wire/executor_info.py",))

    @property
    def has_pooling(self) -> bool:
        """Whether an executor can compute vectors and scores."""
        return self._has("pooling_tasks", ("shared/octavo_shared/step_wire/executor_info.py",))

    @property
    def has_continuations(self) -> bool:
        """Whether a client goes on elsewhere with an answer that was cut."""
        return bool(self._read(("octavo/calls/resumption.py", "octavo/resumption.py")))

    @property
    def wire_versions(self) -> tuple[int, int]:
        """The lowest and the highest version of octavo.execution.v1 that it speaks."""
        found = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in ast.parse(self._read(("shared/octavo_shared/step_wire/wire.py", "shared/wire.py"))).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("MIN_WIRE_VERSION", "MAX_WIRE_VERSION")
        }
        return found["MIN_WIRE_VERSION"], found["MAX_WIRE_VERSION"]

    def _has(self, word: str, paths: tuple[str, ...]) -> bool:
        return word in self._read(paths)

    def _read(self, paths: tuple[str, ...]) -> str:
        """Return a file that is at one of these paths, of which the first is that of the working tree; "": at none."""
        if self.archive is None:
            return (WORKING_TREE / paths[0]).read_text(encoding="utf-8")
        with zipfile.ZipFile(self.archive) as archive:
            installed = [path.removeprefix("shared/") if "octavo_shared" in path else path for path in paths]
            return next((archive.read(path).decode() for path in installed if path in archive.namelist()), "")

    def environment(self) -> dict[str, str]:
        """Return the environment in which Python imports this code, whatever is installed."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join(self._homes)}

    def environment_of_tests(self) -> dict[str, str]:
        """Return the environment in which Python imports this code, and the tests of the working tree."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*self._homes, str(WORKING_TREE)])}

    @property
    def _homes(self) -> list[str]:
        return [str(WORKING_TREE), str(WORKING_TREE / "shared")] if self.archive is None else [str(self.archive)]

    def command(self, module: str) -> list[str]:
        """Return the command that runs a module of this code."""
        python = [sys.executable, "-P"]
        if self.archive is not None and not self._read((f"{module.replace('.', '/')}.py",)):
            module = FORMER_MODULES.get(module, module)
        if self.wire_range is None:
            return [*python, "-m", module]
        lowest, highest = self.wire_range
        return [*python, "-c", WITH_WIRE_RANGE.format(lowest=lowest, highest=highest, module=module)]


CURRENT = Code("current")
RELEASES = [Code(archive.stem.removeprefix("octavo-"), archive) for archive in RELEASE_ARCHIVES]
WITH_CONTINUATIONS = [release for release in RELEASES if release.has_continuations]
WITH_FRONTS = [release for release in RELEASES if release.has_fronts]


def each(releases: Sequence[Code]) -> pytest.MarkDecorator:
    """Run a test beside each of some releases, which it gets as `release`."""
    return pytest.mark.parametrize("release", releases, ids=lambda release: release.name)


async def start(code: Code, module: str, *flags: str) -> Service:
    """Start a service and return it once it serves."""
    arguments = ["--exit-on-stdin-close", *flags]
    if "--listen" not in flags:
        arguments += ["--listen", "127.0.0.1:0"]
    if module == SCHEDULER and code.has_admin_port:
        arguments += ["--admin-listen", "127.0.0.1:0"]
    if code.archive is not None and not code.has_engine_flags:
        arguments = [FORMER_FLAGS.get(argument, argument) for argument in arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *code.command(module), *arguments, stdin=pipe, stdout=pipe, env=code.environment()
    )
    assert process.stdout is not None
    other_addresses: dict[str, str] = {}
    while True:
        match = PORT_LINE.fullmatch((await process.stdout.readline()).decode().strip())
        assert match, f"{module} of {code.name} ended before it served"
        if match["port"] is None:
            return Service(process, match["address"], other_addresses)
        other_addresses[match["port"]] = match["address"]


@asynccontextmanager
async def running(code: Code, module: str, *flags: str) -> AsyncIterator[Service]:
    """Run a service for the length of a block."""
    service = await start(code, module, *flags)
    try:
        yield service
    finally:
        if service.process.returncode is None:
            await service.kill()


async def until_serving(service: Service) -> None:
    """Wait until a service says that it is ready: an executor prints its port before its model is loaded."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        async for answer in health.Watch(health_pb2.HealthCheckRequest()):
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


@asynccontextmanager
async def executor_here(worker: FakeWorker) -> AsyncIterator[ExecutorProcess]:
    """Run the current fake executor in this process for the length of a block."""
    executor = ExecutorProcess(worker)
    await executor.start()
    try:
        yield executor
    finally:
        await executor.kill()
        executor.servicer.close()


@asynccontextmanager
async def operator_of(scheduler: Service) -> AsyncIterator["admin_service_pb2_grpc.AdminServiceAsyncStub"]:
    """Connect to the AdminService of a scheduler of any release."""
    async with grpc.aio.insecure_channel(scheduler.other_addresses.get("admin", scheduler.address)) as channel:
        yield admin_service_pb2_grpc.AdminServiceStub(channel)


async def scheduler_state(scheduler: Service) -> State:
    """Return what an operator sees."""
    return await state_when(scheduler, lambda _: True)


async def state_when(scheduler: Service, is_reached: Callable[[State], bool]) -> State:
    """Return what an operator sees once it is as wanted."""
    async with operator_of(scheduler) as operator:
        while not is_reached(state := await operator.GetSchedulerState(admin_service_pb2.GetSchedulerStateRequest())):
            await asyncio.sleep(0.02)
        return state


async def attached_executors(scheduler: Service, num_executors: int) -> dict[str, admin_pb2.ExecutorState]:
    """Return the attached executors by address once there are so many."""
    return attached_in(await state_when(scheduler, lambda state: len(attached_in(state)) == num_executors))


def attached_in(state: State) -> dict[str, admin_pb2.ExecutorState]:
    """Return the attached executors by address."""
    attached = admin_pb2.EXECUTOR_STATUS_ATTACHED
    return {executor.address: executor for executor in state.executors if executor.status == attached}
