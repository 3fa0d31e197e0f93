"""One front and several schedulers: where requests run, what happens when one goes, and which of them are used."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import aiohttp
import grpc.aio
import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.client import Client
from octavo.errors import LostTooOftenError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.generation.v1.generation_service_pb2_grpc import GenerationServiceStub
from octavo.values.outputs import Finished, Output
from octavo.values.sampling_params import SamplingParams
from octavo_shared.errors import DrainingError
from octavo_shared.grpc import grpc_server
from scheduler_svc.config.client_side_config import FrontConfig
from scheduler_svc.executors import circuit_breaker
from scheduler_svc.executors.circuit_breaker import Backoff
from scheduler_svc.link import absence
from scheduler_svc.link.cell import Cell, cell_families
from scheduler_svc.processes.front_process import FrontService
from tests.contract.test_loss_policy import POISON_LENGTH, Mortal
from tests.support.patience import PATIENCE_S
from tests.support.stack import ExecutorProcess, Stack, running_scheduler, running_stack, until

SHORT = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=150, temperature=1.0, ignore_eos=True, logprobs=0)


@dataclass(slots=True)
class Running:
    """A front and what it has joined."""

    stacks: list[Stack]
    front: FrontService
    client: Client
    task: asyncio.Task[None]
    stopping: asyncio.Future[str]

    @property
    def cell(self) -> Cell:
        """Its engines, to look at."""
        return self.front.cells[""]

    @property
    def running(self) -> list[int]:
        """Live requests of each scheduler."""
        return [len(stack.engine.requests) for stack in self.stacks]

    async def ask(self, *numbers: int, params: SamplingParams = LONG) -> list[Output]:
        """Return the answers to prompts that differ from the first token on."""
        asked = (self.client.generate([40 + number, 41, 42], params, seed=number) for number in numbers)
        return [answer.outputs[0] for answer in await asyncio.gather(*asked)]


def engine_port(stack: Stack) -> str:
    """Return where fronts join a scheduler."""
    return stack.service.other_addresses["fronts"]


async def cut(stack: Stack) -> None:
    """End a scheduler for its fronts as a crash would."""
    await stack.service._ports._others["fronts"].stop(0)


@asynccontextmanager
async def front_of(*stacks: Stack, **settings: object) -> AsyncIterator[Running]:
    """Run a front that has joined schedulers, once it takes requests and knows them all."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engines = tuple(engine_port(stack) for stack in stacks)
    given: dict[str, Any] = {"listen": "127.0.0.1:0", "engine": engines, "front_id": "one", "shutdown_grace_s": 1.0}
    front = FrontService(FrontConfig.model_validate(given | settings))
    task = asyncio.create_task(front.run(told))
    try:
        await front.is_ready.wait()
        await until(lambda: sum(engine.model is not None for engine in front.cells[""].engines) >= len(stacks))
        async with Client(front.address, resume_timeout_s=0) as client:  # nobody hides what a front lets through
            yield Running(list(stacks), front, client, task, told)
    finally:
        if not told.done():
            told.set_result("the test ends")
        await task


@dataclass(slots=True)
class Service:
    """An address that leads to another one, as Services of Kubernetes do: a connection stays where it was made."""

    leads_to: str
    address: str = ""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the bytes of a connection both ways."""
        host, _, port = self.leads_to.rpartition(":")
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, other_writer), carry(other_reader, writer), return_exceptions=True)


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes until they end."""
    while part := await reader.read(2**16):
        writer.write(part)
    writer.close()


@asynccontextmanager
async def service_of(address: str) -> AsyncIterator[Service]:
    """Run a Service that leads to an address."""
    service = Service(address)
    server = await asyncio.start_server(service.relay, "127.0.0.1", 0)
    service.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield service


@asynccontextmanager
async def cell_of(*workers: FakeWorker, **settings: object) -> AsyncIterator[Running]:
    """Run a scheduler for each worker, and a front."""
    async with AsyncExitStack() as stack:
        stacks = [
            await stack.enter_async_context(scheduler_with(worker, f"scheduler-{number}"))
            for number, worker in enumerate(workers)
        ]
        yield await stack.enter_async_context(front_of(*stacks, **settings))


def scheduler_with(worker: FakeWorker, scheduler_id: str) -> AbstractAsyncContextManager[Stack]:
    """Return what runs a scheduler that fronts can join."""
    return running_stack(worker, fronts=0, engine_listen="127.0.0.1:0", engine_insecure=True, scheduler_id=scheduler_id)


async def alone(*numbers: int) -> list[Output]:
    """Return what one scheduler answers that nobody disturbs."""
    async with cell_of(FakeWorker()) as running:
        return await running.ask(*numbers)


@pytest.mark.parametrize("prefixes", ["one", "many"])
async def test_requests_spread_over_the_schedulers(prefixes: str) -> None:
    async with cell_of(FakeWorker(step_ms=1), FakeWorker(step_ms=1)) as running:
        tasks = [asyncio.create_task(running.ask(number if prefixes == "many" else 7)) for number in range(40)]
        await until(lambda: sum(running.running) == 40)
        assert max(running.running) <= 25
        await asyncio.gather(*tasks)


async def test_what_has_one_prefix_goes_to_one_scheduler_while_that_one_is_not_busier_than_others() -> None:
    async with cell_of(FakeWorker(step_ms=1), FakeWorker(step_ms=1)) as running:
        for number in range(3):
            places = set()
            for _ in range(4):
                task = asyncio.create_task(running.ask(number, params=SHORT))
                await until(lambda: sum(running.running))
                places.add(running.running.index(1))
                await task
                # Its scheduler says within 50 ms that it is free again; until then it is the busier one.
                await until(lambda: not any(engine.num_taken for engine in running.cell.engines))
            assert len(places) == 1


async def test_requests_of_a_scheduler_that_is_gone_go_on_at_another_one_with_the_same_bits() -> None:
    expected = await alone(*range(12))
    async with cell_of(FakeWorker(step_ms=2), FakeWorker(step_ms=2)) as running:
        answers = asyncio.create_task(running.ask(*range(12)))
        await until(lambda: min(running.running) >= 4)
        await asyncio.sleep(0.05)
        await cut(running.stacks[0])
        await until(lambda: running.running == [0, 12])
        assert await answers == expected
        assert await running.ask(3) == expected[3:4], "new ones find the one that is left"


async def test_requests_of_a_scheduler_without_executors_go_on_at_another_one() -> None:
    expected = await alone(*range(12))
    async with cell_of(FakeWorker(step_ms=2), FakeWorker(step_ms=2)) as running:
        answers = asyncio.create_task(running.ask(*range(12)))
        await until(lambda: min(running.running) >= 4)
        await running.stacks[0].executor.kill()
        await until(lambda: running.running == [0, 12])
        assert await answers == expected


async def test_a_request_that_breaks_executors_ends_although_it_leaves_a_scheduler_after_each_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(circuit_breaker, "BACKOFF", Backoff(0.02, 0.2))
    async with cell_of(Mortal(), Mortal()) as running, asyncio.timeout(20.0):
        with pytest.raises(LostTooOftenError, match="4 times in a row"):
            await running.client.generate([5] * POISON_LENGTH, SHORT)
        losses = [stack.driver_of(stack.executor).num_losses for stack in running.stacks]
        assert min(losses) >= 1
        assert sum(losses) <= 4 + len(losses)  # it is not known whether the first of each executor counts
        await until(lambda: all(stack.engine.fleet.planners for stack in running.stacks))
        assert len((await running.ask(1, params=SHORT))[0].token_ids) == 10


async def test_requests_of_a_scheduler_whose_grace_ends_go_on_at_another_one() -> None:
    expected = await alone(*range(12))
    async with cell_of(FakeWorker(step_ms=20), FakeWorker(step_ms=2)) as running:
        answers = asyncio.create_task(running.ask(*range(12)))
        await until(lambda: min(running.running) >= 4)
        await running.stacks[0].service.stop("it is replaced")
        assert await answers == expected


async def test_they_wait_for_theirs_if_the_other_one_computes_other_bits() -> None:
    async with cell_of(FakeWorker(step_ms=2), FakeWorker(step_ms=2, numerics_id="another")) as running:
        answers = asyncio.create_task(running.ask(*range(6)))
        await until(lambda: sum(running.running) == 6)
        here, there = running.running
        session = next(iter(running.stacks[0].link.sessions))
        session.close()  # it is back at once
        await until(lambda: sum(running.running) == 6)
        assert running.running == [here, there]
        assert [len(answer.token_ids) for answer in await answers] == 6 * [150]


@pytest.mark.parametrize("scheduler_id", ["scheduler-0", "other"])
async def test_a_request_that_waits_goes_on_where_its_scheduler_is_back(
    scheduler_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whatever address, as a pod has a new one; with equal bits any other will do."""
    expected = await alone(1)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(scheduler_with(FakeWorker(step_ms=2), "scheduler-0"))
        addresses = {engine_port(first)}

        async def resolve(name: str, port: int) -> set[str]:
            return addresses

        stack.enter_context(pytest.MonkeyPatch.context()).setattr(
            "octavo_shared.grpc.membership.Membership.__init__.__defaults__", (resolve, 0.0)
        )
        running = await stack.enter_async_context(
            front_of(first, engine=("dns:///octavo-engine:1",), resolve_interval_s=0.02)
        )
        answer = asyncio.create_task(running.ask(1))
        await until(lambda: first.engine.requests)
        await cut(first)
        second = await stack.enter_async_context(scheduler_with(FakeWorker(step_ms=2), scheduler_id))
        addresses.clear()
        addresses.add(engine_port(second))
        await until(lambda: second.engine.requests)
        assert await answer == expected
        await until(lambda: len(running.cell.engines) == 1)


async def test_an_engine_that_has_two_addresses_is_joined_once() -> None:
    """A name may have both kinds of IP addresses; a second session of a front ends the first one."""
    async with scheduler_with(FakeWorker(step_ms=2), "scheduler-0") as stack:
        port = engine_port(stack).rpartition(":")[2]
        async with front_of(stack, engine=(f"127.0.0.1:{port}", f"localhost:{port}")) as running:
            assert len(await running.ask(*range(6))) == 6
            await asyncio.sleep(1.0)
            assert sum(past.num_sessions for past in stack.link._past.values()) <= 3
            [_, used] = cell_families([running.cell])
            assert [(sample.labels, sample.value) for sample in used.samples] == [
                ({"model": "", "scheduler": "scheduler-0"}, 1)
            ]


async def test_an_abort_reaches_every_scheduler() -> None:
    async with cell_of(FakeWorker(step_ms=5), FakeWorker(step_ms=5)) as running:
        tasks = [asyncio.create_task(running.ask(number)) for number in range(8)]
        await until(lambda: sum(running.running) == 8)
        for stack in running.stacks:
            for _, request_id in list(stack.engine.requests):
                assert await running.client.abort(request_id)
        assert running.running == [0, 0]
        assert not await running.client.abort("unknown")
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_scheduler_of_another_model_is_not_used_until_the_others_are_drained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = FakeWorker(weights_digest="old"), FakeWorker(weights_digest="new")
    async with cell_of(old, FakeWorker(weights_digest="old"), new) as running:
        await until(lambda: "it serves other weights than the engines in use" in caplog.text)
        await running.ask(*range(8), params=SHORT)
        assert running.cell.model is not None
        assert running.cell.model.reproducibility.weights_digest == "old"
        for stack in running.stacks[:2]:
            await stack.engine.drain(0.1)
        await until(lambda: running.cell.model.reproducibility.weights_digest == "new")  # type: ignore[union-attr]
        assert len(await running.ask(1)) == 1


@dataclass(slots=True)
class Moving:
    """A front, two schedulers of which one has the only executor, and how to have the other one take it."""

    running: Running
    http_port: str
    serving: Stack
    standby: Stack

    async def move(self) -> None:
        """Restart the scheduler that has the executor as Kubernetes does: its streams take all of the drain."""
        await self.serving.service.stop("it is replaced")
        await until(lambda: self.standby.engine.fleet.planners)


@asynccontextmanager
async def two_schedulers_of_one_executor() -> AsyncIterator[Moving]:
    """Run them, and a front that has joined both."""
    link: dict[str, Any] = {"fronts": 0, "engine_listen": "127.0.0.1:0", "engine_insecure": True}
    async with AsyncExitStack() as stack:
        executor = ExecutorProcess(FakeWorker(step_ms=5))
        await executor.start()
        stack.push_async_callback(executor.kill)
        first = await stack.enter_async_context(running_scheduler(executor, scheduler_id="first", **link))
        second = await stack.enter_async_context(
            running_scheduler(executor, ready=False, scheduler_id="second", **link)
        )
        await until(lambda: "holds the lease" in second.engine.last_trouble)
        engines = engine_port(first), engine_port(second)
        running = await stack.enter_async_context(front_of(first, openai_listen="127.0.0.1:0", engine=engines))
        yield Moving(running, running.front.ports.other_addresses["openai"], first, second)


async def test_new_requests_and_those_that_run_wait_while_an_executor_changes_schedulers() -> None:
    """At every door: neither scheduler takes requests meanwhile, and both are there."""
    async with two_schedulers_of_one_executor() as moving, aiohttp.ClientSession() as http:
        running, is_over = moving.running, asyncio.Event()

        async def generate(number: int) -> int:
            [output] = await running.ask(number, params=SHORT)
            return len(output.token_ids)

        async def stream(number: int) -> int:
            last = [event async for _, event in running.client.stream_many([[40 + number]], SHORT)][-1]
            assert isinstance(last, Finished), last
            return len(last.outputs[0].token_ids)

        async def post(number: int) -> int:
            body = {"model": "fake", "prompt": [40 + number], "max_tokens": 10, "ignore_eos": True}
            async with http.post(f"http://{moving.http_port}/v1/completions", json=body) as answer:
                assert answer.status == HTTPStatus.OK, await answer.text()
                return int((await answer.json())["usage"]["completion_tokens"])

        async def again_and_again(ask: Callable[[int], Awaitable[int]]) -> list[int]:
            answers = []
            for number in itertools.count():
                answers.append(await ask(number % 20))
                if is_over.is_set():
                    return answers
            raise AssertionError

        long = asyncio.create_task(running.ask(*range(4), params=replace(LONG, max_tokens=300)))
        doors = [asyncio.create_task(again_and_again(ask)) for ask in (generate, stream, post)]
        await until(lambda: len(moving.serving.engine.requests) >= 4)
        await moving.move()
        is_over.set()
        assert [len(answer.token_ids) for answer in await long] == 4 * [300]
        for answers in await asyncio.gather(*doors):
            assert set(answers) == {10}


async def test_they_wait_for_a_limited_time_and_where_no_executor_ever_was_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(absence, "LIMIT_S", 0.3)
    async with cell_of(FakeWorker()) as running:
        await running.stacks[0].executor.kill()
        await until(lambda: not running.cell._used)
        for least_s in (0.05, 0.0):
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(UnavailableError, match="no executor is attached"):
                await running.ask(1, params=SHORT)
            assert least_s <= asyncio.get_running_loop().time() - began_s <= PATIENCE_S / 20
            monkeypatch.setattr(absence, "LIMIT_S", PATIENCE_S)  # to wait once more would take so long


async def test_what_an_engine_does_not_go_on_with_as_it_stops_goes_on_at_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DrainingError("it has stopped just now, and the front has not heard of it")

    expected = await alone(*range(12))
    async with cell_of(*(FakeWorker(step_ms=2) for _ in range(3))) as running:
        answers = asyncio.create_task(running.ask(*range(12)))
        await until(lambda: min(running.running) >= 3)
        monkeypatch.setattr(running.stacks[1].engine, "_admitting_model", refuse)
        await cut(running.stacks[0])
        assert await answers == expected


async def test_while_a_front_leaves_it_serves_and_its_clients_connect_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "CLIENT_CONNECTION_AGE_MS", 300)
    settings = {"shutdown_delay_s": 2.0, "openai_listen": "127.0.0.1:0"}
    async with (
        scheduler_with(FakeWorker(step_ms=1), "scheduler-0") as stack,
        front_of(stack, **settings) as leaving,
        front_of(stack, **settings) as staying,
        service_of(leaving.front.address) as service,
        grpc.aio.insecure_channel(service.address) as channel,
        aiohttp.ClientSession() as session,
    ):
        stub: Any = GenerationServiceStub(channel)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[40, 41]))
        url = f"http://{leaving.front.ports.other_addresses['openai']}/v1/models"
        answered = Counter[str | None]()

        async def ask() -> None:
            await stub.Generate(request).read()
            if not leaving.stopping.done() or not answered["close"]:
                async with session.get(url) as answer:
                    assert answer.status == HTTPStatus.OK
                    answered[answer.headers.get("Connection")] += 1

        await ask()
        assert answered == {None: 1}
        service.leads_to = staying.front.address  # as Kubernetes does with a pod that ends
        leaving.stopping.set_result("the test says so")
        while not leaving.task.done():
            await ask()  # no error
        assert answered["close"] == 1
        await ask()
