"""Peers announce themselves to those who look for them by name; look-ups alone would find none of them here."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from executor_svc.fake.worker import FakeWorker
from octavo.discovery.v1 import discovery_service_pb2 as pb
from octavo_shared.grpc.announce import MAX_HOSTS, MAX_LOOK_UPS, UNUSED_INTERVAL_S, Announcements, Announcer
from octavo_shared.grpc.membership import Membership
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.processes.front_process import FrontService
from tests.chaos.services import free_port
from tests.support.processes import running_service
from tests.support.stack import ExecutorProcess, collect, running_scheduler, running_stack, token_request, until

NEVER_S = 3600.0


class Names:
    """A name server whose caches say for ever that `peers` has no address, and that knows the names of endpoints."""

    def __init__(self, *endpoints: str) -> None:
        self.endpoints = endpoints
        self.asked: list[str] = []

    async def resolve(self, name: str, port: int) -> set[str]:
        self.asked.append(name)
        endpoint = name.rpartition(".")[0]
        if not endpoint:
            return set()
        if endpoint not in self.endpoints:
            raise OSError(f"{name} is not known")
        return {f"{endpoint.replace('-', '.')}:{port}"}


@asynccontextmanager
async def announcing(address: str, *, is_used: bool = False) -> AsyncIterator[None]:
    """Announce this process to an address."""
    task = asyncio.create_task(Announcer([address], lambda: is_used).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running_executor() -> AsyncIterator[ExecutorProcess]:
    executor = ExecutorProcess(FakeWorker())
    await executor.start()
    try:
        yield executor
    finally:
        await executor.kill()


def members(names: Names, port: str) -> Membership:
    return Membership([f"dns:///peers:{port}"], NEVER_S, names.resolve)


async def test_an_executor_that_announces_itself_is_attached_although_a_cache_does_not_know_it() -> None:
    names = Names("127-0-0-1")
    async with running_executor() as executor:
        port = executor.address.rpartition(":")[2]
        scheduler = running_scheduler(
            executor, membership=members(names, port), ready=False, health_listen="127.0.0.1:0"
        )
        async with scheduler as stack:
            await until(lambda: names.asked == ["peers"])
            assert not stack.engine.drivers
            begin_s = asyncio.get_running_loop().time()
            async with announcing(stack.service.other_addresses["health"]):
                await stack.attached()
                assert asyncio.get_running_loop().time() - begin_s < UNUSED_INTERVAL_S
            assert names.asked == ["peers", "127-0-0-1.peers"]
            assert len((await collect(stack, token_request(5, 5))).token_ids) == 5


async def test_an_executor_process_announces_itself_once_it_is_ready() -> None:
    names, port = Names("127-0-0-1"), str(free_port())
    scheduler = running_scheduler(
        membership=members(names, port), ready=False, health_listen="127.0.0.1:0", executor=("127.0.0.1:1",)
    )
    async with scheduler as stack:
        await until(lambda: names.asked == ["peers"])
        flags = ("--listen", f"127.0.0.1:{port}", "--announce-to", stack.service.other_addresses["health"])
        async with running_service("executor_svc.fake", *flags):
            await stack.attached()


async def test_a_peer_that_no_name_confirms_is_never_dialled() -> None:
    names = Names("127-0-0-2")
    async with running_executor() as executor:
        port = executor.address.rpartition(":")[2]
        scheduler = running_scheduler(
            executor, membership=members(names, port), ready=False, health_listen="127.0.0.1:0"
        )
        async with scheduler as stack, announcing(stack.service.other_addresses["health"]):
            await until(lambda: names.asked[-3:] == ["peers", "127-0-0-1.peers", "peers"])
            assert not stack.engine.drivers.membership.addresses
            assert not stack.engine.drivers


async def test_a_scheduler_that_announces_itself_is_joined() -> None:
    names, port = Names("127-0-0-1"), free_port()
    config = {"listen": "127.0.0.1:0", "health_listen": "127.0.0.1:0", "engine": (f"dns:///peers:{port}",)}
    front = FrontService(FrontConfig.model_validate({**config, "shutdown_grace_s": 1.0}))
    front.cells[""].membership = members(names, str(port))
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(front.run(told))
    try:
        await front.is_listening.wait()
        await until(lambda: names.asked == ["peers"])
        health = front.ports.other_addresses["health"]
        listen = f"127.0.0.1:{port}"
        async with running_stack(
            FakeWorker(), fronts=0, engine_listen=listen, engine_insecure=True, announce_to=(health,)
        ):
            await until(front.is_ready.is_set)
    finally:
        told.set_result("the test ends")
        await task


async def test_ten_thousand_announcements_cost_a_bounded_number_of_look_ups() -> None:
    gate, running, most = asyncio.Event(), 0, 0

    async def resolve(name: str, port: int) -> set[str]:
        nonlocal running, most
        names.asked.append(name)
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        raise OSError("there is no such name")

    async def announce(host: str) -> None:
        context: Any = SimpleNamespace(peer=lambda: f"ipv4:{host}:50000")
        await taking.Announce(pb.AnnounceRequest(), context)
        await asyncio.sleep(0)

    names, loop = Names(), asyncio.get_running_loop()
    taking = Announcements(lambda: [Membership(["dns:///peers:1"], NEVER_S, resolve)])
    for number in range(10_000):
        await announce(f"10.0.{number // 256}.{number % 256}")
    assert most == len(names.asked) == MAX_LOOK_UPS

    gate.set()
    names.asked.clear()
    begin_s = loop.time()
    for number in range(10_000):
        await announce(f"10.1.{number // 256}.{number % 256}")
    hosts = {name for name in names.asked if name != "peers"}
    assert len(hosts) <= MAX_HOSTS * (1 + (loop.time() - begin_s) / 1.0) + MAX_LOOK_UPS

    names.asked.clear()
    begin_s = loop.time()
    for _ in range(10_000):
        await announce("10.2.0.1")
    assert names.asked.count("10-2-0-1.peers") <= 2 + loop.time() - begin_s


async def test_who_is_not_used_any_more_says_so_again_soon() -> None:
    num_calls, is_used = 0, True

    async def resolve(name: str, port: int) -> set[str]:
        nonlocal num_calls
        num_calls += 1
        return set()

    task = asyncio.create_task(Announcer(["dns:///peers:1"], lambda: is_used, resolve).run())
    await until(lambda: num_calls == 1)
    is_used = False
    begin_s = asyncio.get_running_loop().time()
    await until(lambda: num_calls == 2)
    assert asyncio.get_running_loop().time() - begin_s < UNUSED_INTERVAL_S
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
