"""Schedulers of one id: which of them has the executors, and which core fronts believe, whatever their clocks say."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from octavo.client import Client
from octavo.core.v1 import core_service_pb2 as core
from octavo.core.v1 import core_service_pb2_grpc as core_grpc
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo.values.outputs import Delta
from scheduler_svc.link.remote_engine import RemoteEngine
from scheduler_svc.processes.incarnation import SupersededError
from tests.contract.test_several_schedulers import Running, attached, fake_executors, scheduler_of
from tests.support.stack import ExecutorProcess, until

LARGEST = 2**64 - 1
FRONTS = {"engine_listen": "127.0.0.1:0", "engine_insecure": True}


def ahead_ms(hours: float = 0.0) -> int:
    """Return the number of a core whose clock is so many hours ahead."""
    return int(1000 * (time.time() + 3600 * hours))


class Holder:
    """A core in the hands of a test: it attaches to an executor, and has a stream."""

    def __init__(self, channel: grpc.aio.Channel, incarnation: int) -> None:
        self.stub = pb_grpc.ExecutionServiceStub(channel)
        self.incarnation = incarnation

    async def attach(self, **fields: Any) -> pb.AttachResponse:
        request = pb.AttachRequest(
            scheduler_id="one", lease_ms=60_000, min_wire_version=1, max_wire_version=1, incarnation=self.incarnation
        )
        request.MergeFrom(pb.AttachRequest(**fields))
        response = await self.stub.Attach(request)
        assert isinstance(response, pb.AttachResponse)
        self.epoch = response.epoch
        return response

    async def open_stream(self) -> None:
        self.stream = self.stub.StreamSteps()
        await self.stream.write(pb.StreamStepsRequest(start=pb.StreamStart(epoch=self.epoch)))
        await self.stream.read()

    async def detach(self) -> None:
        await self.stub.Detach(pb.DetachRequest(epoch=self.epoch))


@asynccontextmanager
async def holding(executor: ExecutorProcess, incarnation: int) -> AsyncIterator[Holder]:
    """Attach to an executor and open a stream; at the end all connections are cut, as if the process was killed."""
    async with grpc.aio.insecure_channel(executor.address) as channel:
        holder = Holder(channel, incarnation)
        await holder.attach()
        await holder.open_stream()
        yield holder


def number_of(scheduler: Running) -> int:
    return scheduler.service._incarnation.granted


def num_refusals(standby: Running) -> int:
    """Return how many executors have said that another scheduler of the id has them."""
    text = "another scheduler of the id 'one' holds the lease"
    return sum(text in driver.last_trouble for driver in standby.engine.drivers.values())


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


@asynccontextmanager
async def joined(scheduler: Running, **fields: Any) -> AsyncIterator[Any]:
    """Join a core as a front that knows so much."""
    async with grpc.aio.insecure_channel(scheduler.service.other_addresses["fronts"]) as channel:
        call: Any = core_grpc.CoreServiceStub(channel).Join()
        hello = core.FrontHello(min_version=1, max_version=1, session=time.time_ns(), **{"front_id": "raw", **fields})
        await call.write(core.JoinRequest(hello=hello, credits=100))
        yield call
        call.cancel()


async def welcome_of(call: Any) -> core.CoreWelcome:
    """Return the next word of welcome."""
    while not (message := await call.read()).HasField("welcome"):
        pass
    assert isinstance(message, core.JoinResponse)
    return message.welcome


# Who has the executors -------------------------------------------------------------------------------------------


async def test_a_core_with_a_slow_clock_is_later_than_the_one_that_an_executor_remembers() -> None:
    former = ahead_ms(hours=5)
    async with fake_executors(1) as executors:
        async with holding(executors[0], former) as holder:
            await holder.detach()
        async with scheduler_of(executors, "one") as slow:
            await until(lambda: attached(slow))
            assert number_of(slow) == former + 1


async def test_a_scheduler_takes_over_from_one_that_was_killed_whatever_its_clock_says() -> None:
    async with fake_executors(1) as executors:
        async with holding(executors[0], former := ahead_ms(hours=5)):
            pass
        async with scheduler_of(executors, "one") as restarted:
            await until(lambda: attached(restarted))
            assert number_of(restarted) == former + 1


async def test_of_two_schedulers_with_one_id_the_second_one_stands_by_says_so_and_takes_over_at_the_end() -> None:
    async with fake_executors(2) as executors, scheduler_of(executors, "one") as first:
        await until(lambda: len(attached(first)) == 2)
        epochs = [executor.servicer._attachment.epoch for executor in executors]
        async with scheduler_of(executors, "one") as second:
            for _ in range(2):  # it goes on asking
                for driver in second.engine.drivers.values():
                    driver.last_trouble = ""
                await until(lambda: num_refusals(second) == 2)
            assert "this one is its standby" in second.engine.readiness.why_not
            assert [executor.servicer._attachment.epoch for executor in executors] == epochs
            assert not sum(driver.num_losses for driver in first.engine.drivers.values())
            await first.service.stop("the test ends it")
            await until(lambda: len(attached(second)) == 2)
            assert not second.engine.readiness.why_not


async def test_a_core_ends_that_finds_a_larger_incarnation_in_its_place() -> None:
    async with fake_executors(1) as executors, scheduler_of(executors, "one") as first:
        await until(lambda: attached(first))
        failing = asyncio.create_task(first.service.wait_for_failure())
        attachment = executors[0].servicer._attachment
        attachment.note_stream(is_open=False, now=0.0)  # as if it had been gone for long
        async with holding(executors[0], later := ahead_ms(hours=1)):
            await until(failing.done)
            with pytest.raises(
                SupersededError, match=f"knows an engine of scheduler 'one' with the incarnation {later}"
            ):
                failing.result()
            assert attachment.epoch == 2
            assert "with the incarnation" in first.engine.last_trouble


async def test_an_executor_refuses_a_number_that_no_core_can_have() -> None:
    async with fake_executors(1) as executors, holding(executors[0], ahead_ms()) as holder:
        code, text = await status_of(holder.attach(incarnation=LARGEST))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text.startswith(f"incarnation is {LARGEST}; it must be at most ")
        code, text = await status_of(
            holder.stub.Detach(pb.DetachRequest(epoch=holder.epoch, largest_incarnation=LARGEST))
        )
        assert text.startswith(f"largest_incarnation is {LARGEST}; it must be at most ")
        info = await holder.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())
        [known] = info.incarnations
        assert (known.scheduler_id, known.incarnation, known.is_attached) == ("one", holder.incarnation, True)


async def test_a_core_does_not_attach_to_an_executor_that_knows_absurd_numbers() -> None:
    async with fake_executors(1) as executors:
        executors[0].servicer._attachment.incarnations["one"] = LARGEST
        async with scheduler_of(executors, "one") as scheduler:
            await until(lambda: "it sent an invalid incarnation: incarnation is" in scheduler.engine.last_trouble)
            executors[0].servicer._attachment.incarnations.clear()
            await until(lambda: attached(scheduler))


async def test_a_scheduler_of_a_release_without_numbers_takes_over_at_once_and_is_taken_over_at_once() -> None:
    async with fake_executors(1) as executors, holding(executors[0], ahead_ms()) as holder:
        holder.incarnation = 0
        assert (await holder.attach()).epoch == 2
        await holder.open_stream()
        holder.incarnation = ahead_ms(hours=1)
        assert (await holder.attach()).epoch == 3


# Whom fronts believe ---------------------------------------------------------------------------------------------


async def test_a_core_that_was_granted_nothing_is_later_than_what_fronts_tell_and_says_so_once_it_is_granted() -> None:
    former = ahead_ms(hours=5)
    async with (
        fake_executors(1) as executors,
        holding(executors[0], ahead_ms(hours=-1)) as holder,
        scheduler_of(executors, "one", **FRONTS) as slow,
        joined(slow, scheduler_id="one", incarnation=former) as front,
    ):
        welcome = await welcome_of(front)
        assert (welcome.scheduler_id, welcome.incarnation) == ("one", 0)
        await holder.detach()
        assert (await welcome_of(front)).incarnation == number_of(slow) == former + 1


async def test_one_hello_of_a_front_ends_neither_the_core_nor_a_stream_and_executors_notice_nothing() -> None:
    """As after a restart of all executors, with a slow clock: only the front remembers. Or the front invents it."""
    told = ahead_ms(hours=23)
    async with fake_executors(2) as executors, scheduler_of(executors, "one", **FRONTS) as scheduler:
        await until(lambda: len(attached(scheduler)) == 2)
        former = number_of(scheduler)
        attachments = [executor.servicer._attachment for executor in executors]
        async with Client(scheduler.address) as client, joined(scheduler, front_id="other") as other:
            await welcome_of(other)
            num_tokens = 0
            async for event in client.stream([40, 41], max_tokens=200, temperature=0.0, ignore_eos=True):
                if isinstance(event, Delta):
                    if not num_tokens:
                        async with joined(scheduler, scheduler_id="one", incarnation=told) as front:
                            assert (await welcome_of(front)).incarnation == told + 1
                        assert (await welcome_of(other)).incarnation == told + 1  # who has joined before hears of it
                    num_tokens += len(event.token_ids)
        assert num_tokens == 200
        async with joined(scheduler, scheduler_id="one", incarnation=told + 2) as front:
            assert await front.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert f"this one has {told + 1}, and follows it in " in await front.details()
        scheduler.service._incarnation.require_current()
        assert not sum(driver.num_losses for driver in scheduler.engine.drivers.values())
        assert [(one.epoch, one.incarnations["one"]) for one in attachments] == [(1, former)] * 2


async def test_a_core_whose_place_another_one_has_ends_when_a_front_that_joined_that_one_makes_it_ask() -> None:
    later = ahead_ms(hours=1)
    async with fake_executors(2) as executors, scheduler_of(executors, "one", **FRONTS) as former:
        await until(lambda: len(attached(former)) == 2)
        executors[1].servicer._attachment.note_incarnation("one", later)
        failing = asyncio.create_task(former.service.wait_for_failure())
        async with joined(former, scheduler_id="one", incarnation=later) as front:
            assert await front.code() is grpc.StatusCode.FAILED_PRECONDITION
        await until(failing.done)
        with pytest.raises(SupersededError, match=f"executor {executors[1].address} knows .* {later}"):
            failing.result()


async def test_a_core_that_no_executor_answers_follows_no_front_and_stays() -> None:
    async with fake_executors(1) as executors, scheduler_of(executors, "one", **FRONTS) as scheduler:
        await until(lambda: attached(scheduler))
        number = number_of(scheduler)
        await executors[0].kill()
        async with joined(scheduler, scheduler_id="one", incarnation=ahead_ms(hours=1)) as front:
            assert await front.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert "no executor answers whether it is in the place of this one" in await front.details()
        scheduler.service._incarnation.require_current()
        assert number_of(scheduler) == number


@pytest.mark.parametrize(
    ("scheduler_id", "hours", "code"),
    [
        ("another", 1, None),  # it counts for the other one only
        ("one", 24 * 365, grpc.StatusCode.INVALID_ARGUMENT),
        ("one", 25, grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["of another scheduler", "a year ahead", "more than a day ahead"],
)
async def test_what_a_front_tells_does_not_raise_a_core_that_it_is_not_about_or_beyond_a_day(
    scheduler_id: str, hours: int, code: grpc.StatusCode | None
) -> None:
    async with fake_executors(1) as executors, scheduler_of(executors, "one", **FRONTS) as scheduler:
        await until(lambda: attached(scheduler))
        number = number_of(scheduler)
        async with joined(scheduler, scheduler_id=scheduler_id, incarnation=ahead_ms(hours)) as front:
            if code is None:
                assert (await welcome_of(front)).incarnation == number
            else:
                assert await front.code() is code
        scheduler.service._incarnation.require_current()
        assert number_of(scheduler) == number


async def test_a_front_keeps_a_number_for_each_scheduler_and_believes_no_older_core_and_nothing_absurd() -> None:
    hellos: list[core.FrontHello] = []
    now_ms = ahead_ms()
    welcomes = [
        core.CoreWelcome(scheduler_id="one", incarnation=now_ms),
        core.CoreWelcome(scheduler_id="two", incarnation=now_ms - 5),
        core.CoreWelcome(scheduler_id="one", incarnation=now_ms - 1),
        core.CoreWelcome(scheduler_id="two", incarnation=LARGEST),
        core.CoreWelcome(scheduler_id="two", incarnation=0),
        core.CoreWelcome(incarnation=now_ms - 9),  # of the release before
        core.CoreWelcome(scheduler_id="one", incarnation=now_ms + 1),
        core.CoreWelcome(scheduler_id="end"),
    ]
    troubles: list[str] = []

    class Cores(core_grpc.CoreServiceServicer):
        async def Join(self, requests: Any, context: Any) -> AsyncIterator[Message]:  # type: ignore[override]  # noqa: N802
            hellos.append((await anext(requests)).hello)
            troubles.append(front.engine_trouble)
            yield core.JoinResponse(welcome=welcomes[len(hellos) - 1])

    async def nothing(*_: object) -> None:
        pass

    server = grpc.aio.server()
    core_grpc.add_CoreServiceServicer_to_server(Cores(), server)  # type: ignore[abstract]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    front = RemoteEngine(lambda: grpc.aio.insecure_channel(address), "raw", nothing, lambda: None)
    running = asyncio.create_task(front.run())
    await until(lambda: len(hellos) == len(welcomes))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop(0)
    assert [(hello.scheduler_id, hello.incarnation) for hello in hellos] == [
        ("", 0),
        ("one", now_ms),
        ("two", now_ms - 5),
        ("one", now_ms),
        ("two", now_ms - 5),
        ("two", now_ms - 5),
        ("", now_ms - 9),
        ("one", now_ms + 1),
    ]
    assert f"has the incarnation {now_ms - 1}; this front has joined a later one, {now_ms}" in troubles[3]
    assert f"the engine of scheduler 'two' sent an invalid incarnation: incarnation is {LARGEST}" in troubles[4]
