"""Operators' calls through a front: the same answers and errors in one process and over the link; several engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import (
    AdapterNotLoadedError,
    CallerError,
    FencedError,
    InvalidFieldError,
    OctavoServiceError,
    UnavailableError,
    UnknownNameError,
)
from octavo_shared.grpc.grpc_server import GrpcServer
from octavo_shared.step_wire.message_bytes import CheckedAnswers
from scheduler_svc.link.remote_admin import Asked, Call, FailuresInStatus, call_all, call_remote
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.request.engine_client import EngineClient
from tests.contract.test_adapters import Files
from tests.contract.test_cell import cut, front_of
from tests.support.stack import Stack, running_stack, until

JOINABLE: dict[str, Any] = {"fronts": 0, "engine_listen": "127.0.0.1:0", "engine_insecure": True}


def engine_of(stack: Stack) -> EngineClient:
    """Return the engine as the front of a stack has it."""
    return stack.engine if stack.fronts is None else stack.fronts.fronts[0].service.cells[""]


ERRORS = [
    ("LoadAdapter", pb.LoadAdapterRequest(name="poet", source="a"), CallerError),
    ("LoadAdapter", pb.LoadAdapterRequest(name="x", source="none"), AdapterNotLoadedError),
    ("LoadAdapter", pb.LoadAdapterRequest(name="x" * 9000, source="a"), InvalidFieldError),
    ("UnloadAdapter", pb.UnloadAdapterRequest(name="other"), UnknownNameError),
]


async def test_answers_and_errors_are_the_same_in_the_engines_process_and_over_the_link() -> None:
    seen = []
    for fronts in (0, 1):
        async with running_stack(Files().worker(), fronts=fronts) as stack:
            admin = engine_of(stack).admin
            answers: list[object] = [await admin.LoadAdapter(pb.LoadAdapterRequest(name="poet", source="a"))]
            for method, request, kind in ERRORS:
                with pytest.raises(OctavoServiceError) as refused:
                    await getattr(admin, method)(request)
                assert type(refused.value) is kind
                answers.append((str(refused.value)[:900], getattr(refused.value, "field", None)))
            answers.append(await admin.ListAdapters(pb.ListAdaptersRequest()))
            seen.append(answers)
    assert seen[0] == seen[1]


async def test_a_front_of_two_schedulers_asks_both_and_fails_if_one_is_away() -> None:
    async with AsyncExitStack() as opened:
        stacks = [
            await opened.enter_async_context(running_stack(Files().worker(), scheduler_id=name, **JOINABLE))
            for name in ("first", "second")
        ]
        running = await opened.enter_async_context(front_of(*stacks))
        await running.cell.admin.LoadAdapter(pb.LoadAdapterRequest(name="poet", source="a"))
        await until(lambda: running.cell.model is not None and running.cell.model.adapters == ("poet",))
        assert (await running.client.get_model()).adapters == ("poet",)
        assert [[one.name for one in stack.engine.adapters.all] for stack in stacks] == [["poet"], ["poet"]]
        stacks[1].engine.adapters.unload("poet")
        await until(lambda: running.cell.model is not None and not running.cell.model.adapters)
        with pytest.raises(UnknownNameError):
            await running.cell.admin.UnloadAdapter(pb.UnloadAdapterRequest(name="poet"))
        await cut(stacks[1])
        await until(lambda: not all(engine.is_reachable for engine in running.cell.engines))
        with pytest.raises(UnavailableError):
            await running.cell.admin.ListAdapters(pb.ListAdaptersRequest())


@pytest.mark.parametrize("at_front", [False, True])
async def test_a_call_whose_engine_goes_away_fails_and_its_caller_is_not_cancelled(
    at_front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_stack(Files().worker(step_ms=10_000), **JOINABLE) as stack, front_of(stack) as running:
        request = pb.LoadAdapterRequest(name="poet", source="a")
        loading = asyncio.ensure_future(running.cell.admin.LoadAdapter(request))
        await until(lambda: stack.engine.requests)
        if at_front:
            monkeypatch.setattr(RemoteEngine, "take", Mock(side_effect=ValueError("nonsense")))
        else:
            await cut(stack)
        with pytest.raises(UnavailableError):
            await loading


async def numbers(num: int, *, breaks: bool = False) -> AsyncIterator[Message]:
    for number in range(num):
        yield pb.GetStepRequest(step_id=number)
    if breaks:
        raise CallerError("the body broke off")


async def add_up(requests: AsyncIterator[pb.GetStepRequest], context: object) -> pb.GetStepRequest:
    total = 0
    async for request in requests:
        if request.step_id == 7:
            raise InvalidFieldError("step_id", 7, "another one")
        total += request.step_id
    return pb.GetStepRequest(step_id=total)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_a_stream_reaches_all_engines_whole_and_what_fails_is_raised_as_it_is(num_engines: int) -> None:
    port = GrpcServer(listen="127.0.0.1:0", max_message_bytes=2**20, service_names=(), readers=[FailuresInStatus()])
    read, write = pb.GetStepRequest.FromString, pb.GetStepRequest.SerializeToString
    methods = {"AddUp": grpc.stream_unary_rpc_method_handler(add_up, read, write)}
    service = "octavo.admin.v1.AdminService"
    port.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    async with grpc.aio.insecure_channel(await port.start()) as channel:
        checked = CheckedAnswers(channel, "the engine", CallerError)
        method = checked.stream_unary(f"/{service}/AddUp", request_serializer=write, response_deserializer=read)
        calls = [partial(call_remote, method)] * num_engines
        assert await call_all(calls, numbers(5)) == pb.GetStepRequest(step_id=10)
        with pytest.raises(InvalidFieldError, match="step_id is 7; it must be another one"):
            await call_all(calls, numbers(10**9))
        with pytest.raises(CallerError, match="the body broke off"):
            await call_all(calls, numbers(5, breaks=True))
    await port.stop(0)


async def test_an_engine_that_fails_early_keeps_no_other_waiting() -> None:
    async def count(request: Asked) -> Message:
        assert not isinstance(request, Message)
        return pb.GetStepRequest(step_id=len([message async for message in request]))

    async def fail(request: Asked) -> Message:
        raise UnknownNameError("no")

    with pytest.raises(UnknownNameError, match=r"no \(1 of 2 engines did what was asked, and 1 did not; call again\)"):
        await call_all([count, fail], numbers(10))
    with pytest.raises(UnknownNameError, match=r"no$"):
        await call_all([fail, fail], numbers(10))


@pytest.mark.parametrize("is_open", [False, True])
async def test_engines_that_serve_different_weights_have_no_version(is_open: bool) -> None:
    def version(digest: str) -> Call:
        async def answer(request: Asked) -> Message:
            return pb.GetWeightVersionResponse(weights_digest=digest, has_open_update=is_open)

        return answer

    calls = [version("aa"), version("bb")]
    if is_open:
        told = await call_all(calls, pb.GetWeightVersionRequest())
        assert told == pb.GetWeightVersionResponse(has_open_update=True)
        return
    with pytest.raises(FencedError, match="different weights, aa and bb"):
        await call_all(calls, pb.GetWeightVersionRequest())
