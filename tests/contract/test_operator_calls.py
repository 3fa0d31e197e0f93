"""Operators' calls through a front: the same answers and errors in one process and over the link; several engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import Mock

import pytest
from google.protobuf.message import Message

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import (
    AdapterNotLoadedError,
    CallerError,
    InvalidFieldError,
    OctavoServiceError,
    UnavailableError,
    UnknownNameError,
)
from scheduler_svc.link.remote_admin import Asked, call_all
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


async def _numbers(num: int) -> AsyncIterator[Message]:
    for number in range(num):
        yield pb.GetStepRequest(step_id=number)


async def test_a_stream_reaches_all_engines_whole_and_one_that_fails_early_keeps_none_waiting() -> None:
    async def count(request: Asked) -> Message:
        assert not isinstance(request, Message)
        return pb.GetStepRequest(step_id=sum([message.step_id async for message in request]))  # type: ignore[attr-defined]

    async def fail(request: Asked) -> Message:
        raise UnknownNameError("no")

    answer = await call_all([count, count], _numbers(10))
    assert answer == pb.GetStepRequest(step_id=45)
    with pytest.raises(UnknownNameError):
        await call_all([count, fail], _numbers(10))
