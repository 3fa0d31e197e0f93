"""Drivers come and go with the addresses; the executors here refuse whoever comes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import NoReturn, cast

from octavo_shared.grpc.membership import Membership
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.driver import ExecutorDriver
from scheduler_svc.executors.driver_interface import DriverOwner, DriverSettings
from scheduler_svc.executors.drivers import Drivers
from scheduler_svc.executors.session import SessionTimings
from scheduler_svc.telemetry.meter import Meter
from tests.simulation.loop import SimulationLoop


class ToldMembership(Membership):
    """Has the addresses that the test tells."""

    def __init__(self, *addresses: str) -> None:
        super().__init__((), interval_s=1.0)
        self._told = list(addresses)

    @property
    def addresses(self) -> list[str]:
        return self._told

    async def watch(
        self, on_change: Callable[[list[str]], Awaitable[None]], answers: Callable[[str], bool] = lambda _: False
    ) -> None:
        self._on_change = on_change
        await on_change(self._told)

    async def tell(self, *addresses: str) -> None:
        self._told = list(addresses)
        await self._on_change(self._told)


class RefusingClient(ExecutorClient):
    def __init__(self, address: str) -> None:
        super().__init__(address, "the test", SessionTimings(), 2**20)

    def attach(self, claim: Callable[[str], None], *, keeps_blocks: bool = True) -> NoReturn:
        raise ExecutorRefusedError(f"{self.address} loads")


class Owner:
    """Stands in for the engine, which drivers without a core tell nothing else; they wait at the gate."""

    has_room = True

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.when_told: Callable[[], None] = lambda: None

    async def on_addresses_changed(self) -> None:
        """Nothing here depends on it."""

    async def on_detached(self, driver: ExecutorDriver) -> None:
        await self.gate.wait()
        self.when_told()


class Stage:
    """Drivers, running or not, and all around them."""

    def __init__(self, *addresses: str) -> None:
        self.membership = ToldMembership(*addresses)
        self.owner = Owner()
        settings = DriverSettings(retry_interval_s=0.0)
        self.drivers = Drivers(
            self.membership, RefusingClient, cast("DriverOwner", self.owner), settings, Meter(), transfer_key=b"key"
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.drivers.run())
        await settle()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_in_the_owner(self) -> None:
        """Let every driver come to where it tells the owner that it has no core, and stay there."""
        self.owner.gate.clear()
        await settle()


async def settle() -> None:
    """Let everything happen that can happen by itself."""
    for _ in range(20):
        await asyncio.sleep(0)


def executor_tasks() -> set[str]:
    return {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("executor ")}


async def test_every_address_has_a_running_driver() -> None:
    stage = Stage("b:1", "a:1")
    async with stage.running():
        assert list(stage.drivers) == ["b:1", "a:1"]
        assert len(stage.drivers) == 2
        assert [driver.address for driver in stage.drivers.values()] == ["b:1", "a:1"]
        assert executor_tasks() == {"executor a:1", "executor b:1"}
        assert stage.drivers["b:1"].last_trouble == "b:1 loads"


async def test_a_new_address_gets_a_driver_and_that_of_a_gone_one_is_retired_and_forgotten() -> None:
    stage = Stage("a:1", "b:1")
    async with stage.running():
        staying, leaving = stage.drivers["a:1"], stage.drivers["b:1"]
        await stage.membership.tell("a:1", "c:1")
        assert leaving.is_retired
        await settle()
        assert list(stage.drivers) == ["a:1", "c:1"]
        assert stage.drivers["a:1"] is staying
        assert not staying.is_retired
        assert executor_tasks() == {"executor a:1", "executor c:1"}


async def test_an_address_that_comes_back_before_its_driver_has_ended_keeps_it() -> None:
    stage = Stage("a:1")
    async with stage.running():
        driver = stage.drivers["a:1"]
        await stage.wait_in_the_owner()
        was_retired: list[bool] = []
        for addresses in ([], ["a:1"]):
            await stage.membership.tell(*addresses)
            was_retired.append(driver.is_retired)
        stage.owner.gate.set()
        await settle()
        assert was_retired == [True, False]
        assert stage.drivers["a:1"] is driver
        assert executor_tasks() == {"executor a:1"}


async def test_an_address_that_comes_back_in_the_moment_its_driver_ends_gets_a_new_one() -> None:
    stage = Stage("a:1")
    came_back: list[ExecutorDriver] = []
    tasks: list[asyncio.Task[None]] = []

    async def come_back() -> None:
        came_back.append(stage.drivers["a:1"])
        await stage.membership.tell("a:1")

    def come_back_after_the_end() -> None:
        if not tasks:
            tasks.append(asyncio.create_task(come_back()))

    async with stage.running():
        ended = stage.drivers["a:1"]
        await stage.wait_in_the_owner()
        stage.owner.when_told = come_back_after_the_end
        await stage.membership.tell()
        stage.owner.gate.set()
        await settle()
        assert came_back == [ended]
        assert stage.drivers["a:1"] is not ended
        assert executor_tasks() == {"executor a:1"}


async def test_when_all_ends_no_driver_is_left_or_begins_anew() -> None:
    stage = Stage("a:1", "b:1")
    async with stage.running():
        pass
    await settle()
    assert not executor_tasks()
    assert not stage.drivers


async def test_the_last_trouble_is_that_of_executors_which_are_not_attached_and_of_names() -> None:
    stage = Stage()
    attached, first, second, untried = (stage.drivers.add(address) for address in ("a:1", "b:1", "c:1", "d:1"))
    assert stage.drivers.last_trouble == ""
    attached.planner = cast("ExecutorPlanner", object())
    for driver in (attached, first, second):
        driver.last_trouble = "it is gone"
    assert stage.drivers.last_trouble == "b:1: it is gone; c:1: it is gone"
    stage.membership.troubles["pods:1"] = "pods:1 cannot be looked up"
    assert stage.drivers.last_trouble == "b:1: it is gone; c:1: it is gone; pods:1 cannot be looked up"
    assert untried.last_trouble == ""


def test_an_executor_that_is_attached_through_another_address_is_not_expected() -> None:
    stage = Stage()
    first, alias, other = (stage.drivers.add(address) for address in ("a:1", "alias:1", "b:1"))
    planner = cast("ExecutorPlanner", object())
    was_complete: list[bool] = []
    for first.planner, first.instance_id, alias.instance_id in (
        (None, "", ""),
        (planner, "", ""),
        (planner, "one", "one"),
        (planner, "one", "another one"),
        (None, "one", "one"),
    ):
        other.planner = first.planner
        was_complete.append(stage.drivers.is_complete)
    assert was_complete == [False, False, True, False, False]


def test_an_executor_belongs_to_the_driver_that_claimed_it() -> None:
    stage = Stage()
    first, alias = (stage.drivers.add(address) for address in ("a:1", "alias:1"))
    first.instance_id = alias.instance_id = "one"
    assert stage.drivers.holder_of("one") is None
    alias.holds_instance = True
    assert stage.drivers.holder_of("one") is alias
    assert stage.drivers.holder_of("another one") is None


def test_an_executor_that_starts_is_attached_soon_after_it_is_ready() -> None:
    """Within a tenth of the time that it was looked for, and within the interval at last."""
    tried_at_s = []

    class SlowClient(RefusingClient):
        def attach(self, claim: Callable[[str], None], *, keeps_blocks: bool = True) -> NoReturn:
            tried_at_s.append(loop.time())
            super().attach(claim, keeps_blocks=keeps_blocks)

    async def look() -> None:
        driver = ExecutorDriver(SlowClient("a:1"), cast("DriverOwner", Owner()), stage.drivers, interval, Meter())
        looking = asyncio.create_task(driver.run())
        await asyncio.sleep(20)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    stage, interval = Stage(), DriverSettings(retry_interval_s=0.5)
    loop = SimulationLoop("0")  # type: ignore[abstract]
    try:
        loop.run_until_complete(look())
    finally:
        loop.close()

    begin_s = tried_at_s[0]
    for before_s, after_s in pairwise(tried_at_s):
        waited_s = after_s - before_s
        assert 0.045 < waited_s < min(0.55, max(0.055, 0.11 * (after_s - begin_s))), (before_s, after_s)
    assert len(tried_at_s) < 85, "ten seconds of looking cost too much"
