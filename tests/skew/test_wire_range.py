"""Attach agrees on the highest wire version that both sides speak, or refuses with both ranges."""

import logging

import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.servicer import Context, ExecutionServicer
from octavo import Client
from octavo.errors import UnavailableError
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.process.events import Event
from octavo_shared.step_wire import wire
from octavo_shared.step_wire.step import Step, TableDelta
from scheduler_svc.executors import client as executor_client
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.session import SessionTimings
from tests.skew.peers import (
    CURRENT,
    FAKE,
    RELEASES,
    SCHEDULER,
    Code,
    attached_executors,
    each,
    executor_here,
    running,
    state_when,
)
from tests.skew.requests import REQUESTS, prompt_of
from tests.support.processes import Service
from tests.support.stack import MAX_MESSAGE_BYTES, ExecutorProcess

pytestmark = pytest.mark.timeout(120)

# Beyond all that was ever spoken.
NEXT_RANGE = (3, 4)
NEXT = Code("next", wire_range=NEXT_RANGE)


def client_of(executor: ExecutorProcess) -> ExecutorClient:
    """Return what a scheduler dials the executor with."""
    return ExecutorClient(executor.address, "one", SessionTimings(), MAX_MESSAGE_BYTES)


async def last_error(scheduler: Service) -> str:
    """Return why the one executor is not attached, once a reason is known."""
    state = await state_when(scheduler, lambda state: any(executor.last_error for executor in state.executors))
    return state.executors[0].last_error


@pytest.mark.parametrize(
    ("scheduler_range", "executor_range", "version"),
    [((1, 1), (1, 3), 1), ((1, 2), (1, 3), 2), ((1, 3), (2, 2), 2), ((2, 5), (1, 3), 3)],
)
async def test_both_sides_go_on_with_the_highest_version_that_both_speak(
    scheduler_range: tuple[int, int],
    executor_range: tuple[int, int],
    version: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    speak(monkeypatch, scheduler_range, executor_range)
    caplog.set_level(logging.INFO)
    async with executor_here(FakeWorker()) as executor, client_of(executor).attach(lambda _: None) as session:
        await session.send(Step(epoch=session.epoch, step_id=1, delta=TableDelta()))
        assert (await session.receive()).step_id == 1
    assert agreed_versions(caplog) == {"attached": version, "wire_version_agreed": version}


async def test_what_was_agreed_on_is_logged_once_however_often_an_executor_is_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with executor_here(FakeWorker()) as executor:
        client = client_of(executor)
        for _ in range(3):
            async with client.attach(lambda _: None):
                pass
    assert sum("event=wire_version_agreed" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("scheduler_range", "executor_range"), [((1, 1), (2, 3)), ((4, 5), (2, 3))])
async def test_ranges_that_do_not_meet_are_refused_with_both_of_them_and_change_nothing(
    scheduler_range: tuple[int, int], executor_range: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    speak(monkeypatch, scheduler_range, executor_range)
    async with executor_here(FakeWorker()) as executor:
        with pytest.raises(ExecutorRefusedError) as refused:
            async with client_of(executor).attach(lambda _: None):
                pass
        assert_names_both(str(refused.value), scheduler_range, executor_range)
        speak(monkeypatch, executor_range, executor_range)
        async with client_of(executor).attach(lambda _: None) as session:
            assert session.epoch == 1


@pytest.mark.parametrize("version", [0, 3])
async def test_a_version_that_the_scheduler_does_not_speak_is_refused_whatever_the_executor_thinks(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = ExecutionServicer.Attach

    async def answer(self: ExecutionServicer, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        attached = await attach(self, request, context)
        attached.wire_version = version
        return attached

    monkeypatch.setattr(ExecutionServicer, "Attach", answer)
    async with executor_here(FakeWorker()) as executor:
        with pytest.raises(ExecutorRefusedError) as refused:
            async with client_of(executor).attach(lambda _: None):
                pass
    words = f"it supports wire versions 1 to 2 and chose {version}; this scheduler supports 1 to 2"
    assert str(refused.value) == words


@pytest.mark.parametrize("scheduler_code", [CURRENT, *RELEASES], ids=lambda code: code.name)
async def test_an_executor_of_another_range_is_refused_by_every_scheduler_until_it_is_replaced(
    scheduler_code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler_range = scheduler_code.wire_versions
    monkeypatch.setattr(wire, "MIN_WIRE_VERSION", 3)
    monkeypatch.setattr(wire, "MAX_WIRE_VERSION", 4)
    async with (
        executor_here(FakeWorker()) as executor,
        running(scheduler_code, SCHEDULER, "--executor", executor.address) as scheduler,
        Client(scheduler.address) as client,
    ):
        assert_names_both(await last_error(scheduler), scheduler_range, (3, 4))
        with pytest.raises(UnavailableError) as unavailable:
            await client.generate(prompt_of(0), REQUESTS[0])
        assert_names_both(str(unavailable.value), scheduler_range, (3, 4))
        monkeypatch.undo()
        assert list(await attached_executors(scheduler, 1)) == [executor.address]
        await client.generate(prompt_of(0), REQUESTS[0])
        assert await scheduler.terminate() == 0


@each(RELEASES)
async def test_an_executor_of_a_release_refuses_a_scheduler_of_another_range_and_nothing_hangs(release: Code) -> None:
    async with (
        running(release, FAKE) as executor,
        running(NEXT, SCHEDULER, "--executor", executor.address) as scheduler,
        Client(scheduler.address) as client,
    ):
        assert_names_both(await last_error(scheduler), NEXT_RANGE, release.wire_versions)
        with pytest.raises(UnavailableError) as unavailable:
            await client.generate(prompt_of(0), REQUESTS[0])
        assert_names_both(str(unavailable.value), NEXT_RANGE, release.wire_versions)
        assert await scheduler.terminate() == 0
        assert await executor.terminate() == 0


def speak(monkeypatch: pytest.MonkeyPatch, scheduler_range: tuple[int, int], executor_range: tuple[int, int]) -> None:
    """Give each side of this process a range."""
    for module, (lowest, highest) in ((executor_client, scheduler_range), (wire, executor_range)):
        monkeypatch.setattr(module, "MIN_WIRE_VERSION", lowest)
        monkeypatch.setattr(module, "MAX_WIRE_VERSION", highest)


def agreed_versions(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    """Return the wire version that each side has in its log, by the name of the line."""
    events = [record.msg for record in caplog.records if isinstance(record.msg, Event)]
    return {event.name: event.fields["wire_version"] for event in events if "wire_version" in event.fields}


def assert_names_both(message: str, scheduler_range: tuple[int, int], executor_range: tuple[int, int]) -> None:
    """Check that a refusal is one sentence with both ranges."""
    assert "\n" not in message
    offered, spoken = ("{} to {}".format(*one) for one in (scheduler_range, executor_range))
    # Releases up to 0.2.0.dev0 say "meets".
    assert f"max_wire_version is {offered} (the range); it must be a range that overlaps {spoken}" in message.replace(
        "a range that meets", "a range that overlaps"
    )
