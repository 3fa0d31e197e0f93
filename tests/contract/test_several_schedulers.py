"""Schedulers that share executors: each takes as many as it may, and what one leaves another one takes."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.values.sampling_params import SamplingParams
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.client import ExecutorClient
from scheduler_svc.executors.session import ExecutorSession
from scheduler_svc.processes.service import SchedulerService
from tests.support.stack import ExecutorProcess, losing_soon, until


@dataclass(frozen=True, slots=True)
class Running:
    service: SchedulerService
    address: str

    @property
    def engine(self) -> Engine:
        return self.service.engine


@asynccontextmanager
async def fake_executors(num: int) -> AsyncIterator[list[ExecutorProcess]]:
    async with AsyncExitStack() as stack:
        executors = [ExecutorProcess(FakeWorker()) for _ in range(num)]
        for executor in executors:
            await executor.start()
            stack.push_async_callback(executor.kill)
        yield executors


@asynccontextmanager
async def scheduler_of(executors: list[ExecutorProcess], name: str, **settings: object) -> AsyncIterator[Running]:
    config = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "executor": tuple(executor.address for executor in executors),
        "scheduler_id": name,
        "shutdown_grace_s": 1.0,
        "lease_s": 60.0,
        **settings,
    }
    service = SchedulerService(SchedulerConfig.model_validate(config))
    address = await service.start()
    try:
        yield Running(service, address)
    finally:
        await service.stop("the test ends")


def attached(scheduler: Running) -> set[str]:
    return {address for address, driver in scheduler.engine.drivers.items() if driver.planner is not None}


async def test_two_schedulers_share_executors_by_their_limits() -> None:
    async with (
        fake_executors(3) as executors,
        scheduler_of(executors, "first", max_executors=2) as first,
        scheduler_of(executors, "second", max_executors=2) as second,
    ):
        await until(lambda: len(attached(first) | attached(second)) == 3)
        assert not attached(first) & attached(second)
        assert max(len(attached(first)), len(attached(second))) == 2


async def test_a_scheduler_takes_no_more_executors_than_it_may_and_is_complete_with_them() -> None:
    async with fake_executors(3) as executors, scheduler_of(executors, "only", max_executors=2) as only:
        await until(lambda: len(attached(only)) == 2)
        await until(lambda: "maximum of --max-executors, 2" in only.engine.last_trouble)
        assert only.engine.drivers.is_complete
        assert not only.engine.readiness.why_not


@pytest.mark.parametrize("limit", [None, 1])
async def test_a_standby_takes_over_at_once_when_the_first_scheduler_ends(limit: int | None) -> None:
    async with fake_executors(1) as executors:
        async with scheduler_of(executors, "first", max_executors=limit) as first:
            await until(lambda: len(attached(first)) == 1)
            async with AsyncExitStack() as stack:
                standby = await stack.enter_async_context(scheduler_of(executors, "standby", max_executors=limit))
                await until(lambda: "'first' holds the lease" in standby.engine.last_trouble)
                assert standby.engine.readiness.why_not
                kept = stack.pop_all()
        async with kept:
            await until(lambda: len(attached(standby)) == 1)
            assert not standby.engine.readiness.why_not


async def test_a_spare_executor_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    dialled: list[str] = []
    attach = ExecutorClient.attach

    def noting(client: ExecutorClient, claim: Callable[[str], None]) -> AbstractAsyncContextManager[ExecutorSession]:
        dialled.append(client.address)
        return attach(client, claim)

    async with fake_executors(3) as executors, scheduler_of(executors, "only", max_executors=1) as only:
        await until(lambda: len(attached(only)) == 1)
        await until(lambda: sum(driver.is_spare for driver in only.engine.drivers.values()) == 2)
        monkeypatch.setattr(ExecutorClient, "attach", noting)
        spare = [driver for driver in only.engine.drivers.values() if driver.is_spare]
        for driver in spare:
            driver.last_trouble = ""
        await until(lambda: all("--max-executors" in driver.last_trouble for driver in spare))
        assert dialled == []


def test_schedulers_on_free_ports_have_names_of_their_own() -> None:
    first, second = (SchedulerConfig(listen="127.0.0.1:0").own_name for _ in range(2))
    assert first != second
    assert SchedulerConfig(listen="127.0.0.1:7").own_name == SchedulerConfig(listen="127.0.0.1:7").own_name


async def test_a_lost_executor_makes_room_for_another_one() -> None:
    with losing_soon():
        async with fake_executors(2) as executors, scheduler_of(executors, "only", max_executors=1) as only:
            await until(lambda: len(attached(only)) == 1)
            [used] = attached(only)
            [lost] = [executor for executor in executors if executor.address == used]
            await lost.kill()
            await until(lambda: attached(only) == {e.address for e in executors if e is not lost})


async def test_clients_of_both_schedulers_are_served() -> None:
    async with (
        fake_executors(2) as executors,
        scheduler_of(executors, "first", max_executors=1) as first,
        scheduler_of(executors, "second", max_executors=1) as second,
    ):
        await until(lambda: len(attached(first) | attached(second)) == 2)
        for scheduler in (first, second):
            async with Client(scheduler.address) as client:
                output = await client.generate([65, 66], SamplingParams(max_tokens=3))
            assert len(output.outputs[0].token_ids) == 3
