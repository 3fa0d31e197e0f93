"""Bytes that are no message: whoever sent them is at fault, on every method of every port, and hears so."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from executor_svc.fake.worker import FakeWorker
from octavo.admin.v1 import admin_service_pb2
from octavo.core.v1 import core_service_pb2
from octavo.execution.v1 import execution_service_pb2
from octavo.generation.v1 import generation_service_pb2
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.grpc.interceptor import Handler, HandlerInterceptor, handler_parts
from scheduler_svc.link import engine_port
from scheduler_svc.processes.process import GENERATION_SERVICE
from tests.support import stack as stack_support
from tests.support.fronts import NUM_FRONTS
from tests.support.stack import Stack, collect, running_stack, token_request, until

Spoil: TypeAlias = Callable[[Any], bytes | None]

NONSENSE = b"\xff"
SERVICE, REFLECTED = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"
LOADED = (
    admin_service_pb2,
    core_service_pb2,
    execution_service_pb2,
    generation_service_pb2,
    health_pb2,
    reflection_pb2,
)


def methods_of(service: str) -> Iterator[MethodDescriptor]:
    yield from Default().FindServiceByName(service).methods


def call_with(channel: grpc.aio.Channel, method: MethodDescriptor, content: bytes) -> Any:
    """Call a method with bytes; what is awaited is its first answer."""
    kind = "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
    calling = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    if method.client_streaming:

        async def contents() -> Any:
            yield content

        call = calling(contents())
        return call.__aiter__().__anext__() if method.server_streaming else call
    return calling(content).read() if method.server_streaming else calling(content)


async def code_of(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.StatusCode:
    try:
        await call_with(channel, method, NONSENSE)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def ports_of(stack: Stack) -> dict[str, list[str]]:
    """Return the services of each port."""
    executor, admin = stack.executor.address, stack.service.other_addresses["admin"]
    both = [SERVICE, REFLECTED]
    ports = {
        stack.address: [GENERATION_SERVICE, *both],
        admin: ["octavo.admin.v1.AdminService", *both],
        executor: ["octavo.execution.v1.ExecutionService", *both],
    }
    if stack.fronts is not None:
        ports[stack.fronts.link] = ["octavo.core.v1.CoreService", "octavo.admin.v1.AdminService", SERVICE]
    return ports


async def test_bytes_that_are_no_request_are_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    wrong, num_methods = {}, 0
    async with running_stack(fronts=NUM_FRONTS or 1) as stack:
        for address, services in ports_of(stack).items():
            async with grpc.aio.insecure_channel(address) as channel:
                for method in (method for service in services for method in methods_of(service)):
                    num_methods += 1
                    code = await code_of(channel, method)
                    if code is not grpc.StatusCode.INVALID_ARGUMENT:
                        wrong[address, method.full_name] = code
        assert wrong == {}
        assert num_methods > 30
        assert [record.getMessage() for record in caplog.records if record.exc_info] == []
        told = [record.getMessage() for record in caplog.records if "malformed_request" in record.getMessage()]
        assert len(told) == num_methods, "a line for each method of a port"


class Answering(HandlerInterceptor):
    """Spoils the answers of one method.

    Attributes:
        method: Which.
        spoil: Makes the bytes of an answer; None: they are as they were.
    """

    def __init__(self, method: str = "", spoil: Spoil = lambda _: NONSENSE) -> None:
        self.method = method
        self.spoil = spoil

    def wrap(self, method: str, handler: Handler) -> Handler:
        behavior, rebuild = handler_parts(handler)
        whole: Any = handler.response_serializer

        def serialize(message: Any) -> bytes:
            content = self.spoil(message) if method.endswith(f"/{self.method}") else None
            return whole(message) if content is None else content

        return rebuild(behavior, handler.request_deserializer, serialize)


@pytest.mark.parametrize("method", ["GetExecutorInfo", "Attach", "GetTokenizer", "StreamSteps", "Heartbeat"])
async def test_answers_that_are_none_are_the_executors_fault(
    method: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering = Answering()
    monkeypatch.setattr(stack_support, "GrpcServer", partial(GrpcServer, readers=[answering]))
    monkeypatch.setattr("scheduler_svc.processes.service.HEARTBEATS_PER_LEASE", 1000)
    async with running_stack(ready=False) as stack:
        answering.method = method
        await until(lambda: stack.engine.drivers)
        await until(lambda: "cannot be decoded" in stack.driver.last_trouble)
        assert method in stack.driver.last_trouble or method == "StreamSteps"
        answering.method = ""
        await stack.attached()
        await collect(stack, token_request(3, 4))
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def add_row(message: core_service_pb2.JoinResponse, **fields: int) -> None:
    """Add a token behind those of a message, of the same request."""
    tokens = message.tokens
    row = {"numbers": tokens.numbers[0], "positions": tokens.positions[-1] + 1, "token_ids": 65, **fields}
    for name, value in row.items():
        getattr(tokens, name).append(value)


SPOILED: dict[str, tuple[str, Callable[[core_service_pb2.JoinResponse], object]]] = {
    "another output": (
        "tokens",
        lambda message: message.tokens.output_indexes.extend(9 for _ in message.tokens.numbers),
    ),
    "an output that is not there ends": ("tokens", lambda message: message.output_ends.add(number=1, output_index=9)),
    "a reason that is none": ("output_ends", lambda message: setattr(message.output_ends[0], "reason", 77)),
    "columns of several lengths": ("tokens", lambda message: message.tokens.numbers.append(1)),
    "alternatives that nobody counted": ("tokens", lambda message: message.tokens.alternative_token_ids.append(1)),
    "a token that is none": ("tokens", lambda message: add_row(message, token_ids=-5)),
    "an end without a reason": (
        "ended",
        lambda message: message.ended[0].ClearField("ended"),
    ),
    "an event that is none": ("ended", lambda message: message.ended[0].ended.events.add(kind="bake")),
}


@pytest.mark.parametrize("name", ["bytes", *SPOILED])
async def test_what_no_core_sends_ends_the_session_and_the_front_goes_on(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, change = SPOILED.get(name, ("tokens", None))
    num_spoiled = 0

    def spoil(message: core_service_pb2.JoinResponse) -> bytes | None:
        nonlocal num_spoiled
        if num_spoiled or wanted not in {field.name for field, _ in message.ListFields()}:
            return None
        num_spoiled += 1
        if change is None:
            return NONSENSE
        change(message)
        return message.SerializeToString()

    monkeypatch.setattr(engine_port, "FailuresInStatus", partial(Answering, "Join", spoil))
    async with running_stack(FakeWorker(step_ms=1), fronts=1) as stack:
        assert len((await collect(stack, token_request(3, 30, ignore_eos=True))).token_ids) == 30
        assert num_spoiled == 1
        assert stack.fronts is not None
        assert not stack.fronts.fronts[0].task.done()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    [lost] = [record.getMessage() for record in caplog.records if "engine_lost" in record.getMessage()][:1]
    assert "cannot be decoded" in lost or "sent an invalid message" in lost
