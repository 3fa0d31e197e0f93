"""Both services in this process: the production scheduler against fake executors, over real gRPC."""

import asyncio
import gc
import itertools
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import ExecutionServicer
from executor_svc.worker.interface import Worker
from octavo.admin.v1 import admin_service_pb2_grpc
from octavo.execution.v1 import execution_service_pb2, execution_service_pb2_grpc
from octavo.execution.v1.block_transfer_service_pb2_grpc import (
    add_BlockTransferServiceServicer_to_server as add_transfers,
)
from octavo.generation.v1 import generation_pb2, generation_service_pb2, generation_service_pb2_grpc
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.membership import Membership
from octavo_shared.step_wire.executor_info import TokenizerFile
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.weights import PauseMode
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.session import SessionTimings
from scheduler_svc.front.front import Front
from scheduler_svc.front.grammars import grammar_checks
from scheduler_svc.front.grammars.compiler import CompilerHere
from scheduler_svc.link.engine_servicer import EngineServicer
from scheduler_svc.processes.service import SchedulerService
from tests.support.fronts import NUM_FRONTS, FrontsInProcess, fronts_in_this_process
from tests.support.patience import PATIENCE_S

SERVICE = execution_service_pb2.DESCRIPTOR.services_by_name["ExecutionService"].full_name
MAX_MESSAGE_BYTES = 8 * 2**20
LOST_AFTER_S = 0.1
PATIENT_TURNS = 200


class WithoutTokenizer(FakeWorker):
    """A model directory without tokenizer.json."""

    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        """Return no file."""
        return ()


@dataclass(slots=True)
class ExecutorProcess:
    """An executor service in this process that can be killed and started again on its port."""

    worker: Worker
    listen: str = "127.0.0.1:0"
    weights_dirs: Sequence[Path] = ()
    address: str = ""
    server: GrpcServer = field(init=False)
    servicer: ExecutionServicer = field(init=False)

    async def start(self) -> None:
        """Serve `worker` as a process that has just started; its instance is new only if the worker is."""
        self.servicer = ExecutionServicer(weights_dirs=self.weights_dirs)
        await self.servicer.load(lambda: self.worker)
        await self._serve()

    async def kill(self) -> None:
        """End it as a crash would: every call breaks at once, and its threads run no step more."""
        await self.server.stop(0)
        self.servicer.close()

    def break_connections(self) -> None:
        """Cut every connection to it that this process has; it lives on with all it knows, and still listens."""
        port = int(self.address.rpartition(":")[2])
        for number in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(number).st_mode):
                    continue
                with socket.socket(fileno=os.dup(number)) as connection:
                    if connection.getpeername() == ("127.0.0.1", port):
                        connection.shutdown(socket.SHUT_RDWR)

    async def _serve(self) -> None:
        self.server = GrpcServer(listen=self.listen, max_message_bytes=MAX_MESSAGE_BYTES, service_names=[SERVICE])
        execution_service_pb2_grpc.add_ExecutionServiceServicer_to_server(self.servicer, self.server.server)
        add_transfers(self.servicer.block_transfers, self.server.server)
        self.address = self.listen = self.servicer.transfer_address = await self.server.start()


@dataclass(slots=True)
class Stack:
    """Stubs of a running scheduler, and the objects behind it. Most tests have one executor."""

    executors: list[ExecutorProcess]
    service: SchedulerService
    generation: "generation_service_pb2_grpc.GenerationServiceAsyncStub"
    admin: "admin_service_pb2_grpc.AdminServiceAsyncStub"
    address: str
    fronts: FrontsInProcess | None = None

    @property
    def front(self) -> Front:
        """The front in the scheduler's process."""
        assert self.service.front is not None, "the fronts are processes of their own"
        return self.service.front

    @property
    def engine(self) -> Engine:
        """The scheduler's engine, to look at."""
        return self.service.engine

    @property
    def executor(self) -> ExecutorProcess:
        """The first executor."""
        return self.executors[0]

    @property
    def driver(self) -> ExecutorDriver:
        """What drives the first executor, to look at."""
        return self.driver_of(self.executor)

    def driver_of(self, executor: ExecutorProcess) -> ExecutorDriver:
        """What drives an executor, to look at."""
        return self.engine.drivers[executor.address]

    @property
    def link(self) -> EngineServicer:
        """Where fronts join, to look at."""
        assert self.service.link is not None
        return self.service.link

    async def attached(self) -> None:
        """Return once some executor is attached."""
        await until(lambda: self.engine.fleet.planners)
        if self.fronts is not None:
            await self.link.wait_until_ready(len(self.fronts.fronts))

    @asynccontextmanager
    async def together(self, num_requests: int) -> AsyncIterator[None]:
        """Compute nothing until so many requests that are sent here have come: on a busy machine some come late."""
        await self.engine.weights.pause(PauseMode.KEEP)
        num_before = len(self.engine.requests)
        try:
            yield
            await until(lambda: len(self.engine.requests) - num_before >= num_requests)
        finally:
            await self.engine.weights.resume()

    def num_groups_on(self, executor: ExecutorProcess) -> int:
        """Return how many groups an executor has now."""
        core = self.driver_of(executor).planner
        return 0 if core is None else len(core.groups)


@contextmanager
def losing_soon(*, is_so: bool = True) -> Iterator[None]:
    """Let schedulers wait LOST_AFTER_S in place of 3 s for an executor whose stream broke: it does not come back."""
    with pytest.MonkeyPatch.context() as patch:
        if is_so:
            patch.setattr(
                "scheduler_svc.processes.service.SessionTimings", partial(SessionTimings, resume_timeout_s=LOST_AFTER_S)
            )
        yield


@asynccontextmanager
async def running_stack(
    *workers: Worker | None,
    membership: Membership | None = None,
    ready: bool = True,
    loses_soon: bool = False,
    weights_dirs: Sequence[Path] = (),
    **settings: object,
) -> AsyncIterator[Stack]:
    """Run the scheduler and an executor for each worker; none or None: a fake one.

    Args:
        workers: What executes steps.
        membership: Which executors the scheduler looks for; None: all of these.
        ready: Wait until every executor is attached; with a `membership`, until any is.
        weights_dirs: Where executors find other weights.
        loses_soon: Whether an executor that is killed is lost at once; else it may come back.
        settings: The scheduler's.
    """
    # A stack that has ended is few objects in cycles, which call for no collection, and tens of megabytes.
    gc.collect()
    async with AsyncExitStack() as stack:
        stack.enter_context(losing_soon(is_so=loses_soon))
        executors = [
            ExecutorProcess(worker or FakeWorker(), weights_dirs=weights_dirs) for worker in workers or (None,)
        ]
        for executor in executors:
            await executor.start()
            stack.push_async_callback(executor.kill)
        scheduler = running_scheduler(*executors, membership=membership, ready=ready, **settings)
        yield await stack.enter_async_context(scheduler)


@asynccontextmanager
async def running_scheduler(
    *executors: ExecutorProcess, membership: Membership | None = None, ready: bool = True, **settings: object
) -> AsyncIterator[Stack]:
    """Run a scheduler for executors that run; the arguments are those of `running_stack`."""
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(grammar_checks, "CompilerProcess", CompilerHere)  # our grammars take no time
        addresses = tuple(executor.address for executor in executors)
        config = SchedulerConfig.model_validate(
            {
                "listen": "127.0.0.1:0",
                "admin_listen": "127.0.0.1:0",
                "executor": addresses,
                "shutdown_grace_s": 1.0,
                "fronts": NUM_FRONTS,
                **settings,
            }
        )
        fronts = await stack.enter_async_context(fronts_in_this_process(config))
        service = SchedulerService(config) if fronts is None else SchedulerService(fronts.config, fronts.link)
        if membership is not None:
            service.engine.drivers.membership = membership
        address = await service.start()
        stack.push_async_callback(service.stop, "the test ends")
        if fronts is not None:
            await fronts.wait_until_listening()
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)])
        )
        admin_channel = await stack.enter_async_context(grpc.aio.insecure_channel(service.other_addresses["admin"]))
        running = Stack(
            executors=list(executors),
            service=service,
            generation=generation_service_pb2_grpc.GenerationServiceStub(channel),
            admin=admin_service_pb2_grpc.AdminServiceStub(admin_channel),
            address=address,
            fronts=fronts,
        )
        if ready:
            await running.attached()
        if ready and membership is None:
            await until(lambda: len(running.engine.fleet.planners) >= len(executors))
            for front in () if fronts is None else fronts.fronts:
                await until(lambda front=front: front.knows(running.engine))  # type: ignore[misc]
        yield running


async def until(condition: Callable[[], object]) -> None:
    """Return once a condition of objects in this process holds, which it must within PATIENCE_S.

    It looks after every turn of the event loop, and less often when it has waited for long: then another process, a
    thread or a timer has work to do.
    """
    async with asyncio.timeout(PATIENCE_S):
        for turn in itertools.count():
            if condition():
                return
            await asyncio.sleep(0 if turn < PATIENT_TURNS else 0.001)


def token_request(
    num_prompt_tokens: int, max_tokens: int, *, request_id: str = "", first_id: int = 93, **params: object
) -> generation_service_pb2.GenerateRequest:
    """Return a request with a prompt of token ids; greedy by default.

    Of the 94 prompts that `first_id` (modulo 94) chooses no two share a prefix. Requests that run
    together need different ones: the fake executor cannot tell equal histories apart.
    """
    ids = [33 + (first_id + i) % 94 for i in range(num_prompt_tokens)]
    values = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    return generation_service_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=generation_service_pb2.TokenIds(ids=ids),
        sampling_params=generation_pb2.SamplingParams(**values),  # type: ignore[arg-type]
    )


async def readiness(stack: Stack) -> int:
    """Return what health says under the name that Kubernetes probes."""
    async with grpc.aio.insecure_channel(stack.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await health.Check(health_pb2.HealthCheckRequest(service="readiness"))
    status: int = answer.status
    return status


@dataclass(slots=True)
class Answer:
    """All that one call brought."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternative_token_ids: list[int] = field(default_factory=list)
    alternative_logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_alternative_token_ids: list[int] = field(default_factory=list)
    finished: generation_service_pb2.RequestFinished | None = None

    @property
    def output(self) -> generation_pb2.Output:
        """The finished output."""
        assert self.finished is not None, "the stream has no last event"
        return self.finished.outputs[0]


async def collect(stack: Stack, request: generation_service_pb2.GenerateRequest) -> Answer:
    """Run a request and add up its deltas, checking the order of events."""
    answer = Answer()
    async for event in stack.generation.Generate(request):
        kind = event.WhichOneof("event")
        assert answer.finished is None, "an event came after the last one"
        if kind == "accepted":
            assert not answer.request_id, "accepted twice"
            answer.request_id = event.accepted.request_id
        elif kind == "delta":
            assert answer.request_id, "a delta came before accepted"
            answer.text += event.delta.text
            answer.token_ids += event.delta.token_ids
            answer.logprobs += event.delta.logprobs
            answer.alternative_token_ids += event.delta.alternative_token_ids
            answer.alternative_logprobs += event.delta.alternative_logprobs
        elif kind == "prompt_logprobs":
            assert not answer.token_ids, "the prompt's come first"
            answer.prompt_logprobs += event.prompt_logprobs.logprobs
            answer.prompt_alternative_token_ids += event.prompt_logprobs.alternative_token_ids
        else:
            answer.finished = event.finished
    assert list(answer.output.token_ids) == answer.token_ids, "the deltas do not add up to the output"
    assert answer.finished is not None
    assert list(answer.finished.prompt_logprobs.logprobs) == answer.prompt_logprobs
    assert answer.output.text == answer.text
    return answer
