"""Clients that send one request after another, while one of two executors is killed, or the only one."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import openai

from octavo import Client
from tests.chaos.asking import Ask, Send, answer_to, answers_to, by_grpc, by_openai, compare
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import Executor, Scheduler, fake_executor, running_executors, running_scheduler

NUM_CLIENTS = 8
NUM_REQUESTS = 100
# Requests of a client that differ.
NUM_DIFFERENT = 10
# The only executor is away for so long, in seconds.
AWAY_S = 3.0
APIS = ("grpc", "openai")
# How many executors there are, one of which is killed.
SCENES = {"one of two": 2, "the only one": 1}


@dataclass(frozen=True, slots=True)
class ManyClients:
    """The row."""

    name: str = "clients"
    what: str = (
        "8 clients x 100 requests, by gRPC and with OpenAI's client; SIGKILL of one executor of two, and of the only "
        "one (a new one after 3 s)"
    )
    target: str = "800 of 800 complete and equal, each time"

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: the API and the scene."""
        pieces = [f"{api}, {scene}" for scene in SCENES for api in APIS]
        return pieces if scale.divisor == 1 else [pieces[0], pieces[-1]]

    async def play(self, pieces: Sequence[str], scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        for piece in pieces:
            api, scene = piece.split(", ")
            async with (
                running_executors(SCENES[scene], fake_executor("--step-ms", "2")) as executors,
                running_scheduler([one.address for one in executors], "--openai-listen", "127.0.0.1:0") as scheduler,
                sender(api, scheduler) as send,
            ):
                result = Result(self.name, piece)
                await _Load(scheduler, executors, send, result).run(scale.part_of(NUM_REQUESTS))
                yield result


@asynccontextmanager
async def sender(api: str, scheduler: Scheduler) -> AsyncIterator[Send]:
    """Give what sends requests over an API until the end of the block."""
    if api == "grpc":
        async with Client(scheduler.address) as client:
            yield by_grpc(client)
        return
    url = f"http://{scheduler.service.other_addresses['openai']}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=8) as client:
        yield by_openai(client, "fake")


class _Load:
    def __init__(self, scheduler: Scheduler, executors: Sequence[Executor], send: Send, result: Result) -> None:
        self._scheduler = scheduler
        self._executors = executors
        self._send = send
        self._result = result
        self._is_time = asyncio.Event()

    async def run(self, num_requests: int) -> None:
        """Let each client send so many requests; after a quarter of all an executor is killed."""
        begin_s = time.monotonic()
        # Of many lengths: clients in step with each other would all be between two requests at the moment of the kill.
        asks = [
            [Ask(stream, turn, 40 + (11 * stream + 17 * turn) % 64) for turn in range(NUM_DIFFERENT)]
            for stream in range(NUM_CLIENTS)
        ]
        undisturbed = await answers_to([ask for each in asks for ask in each], self._send, NUM_CLIENTS)

        async def one_client(own: list[Ask]) -> None:
            for number in range(num_requests):
                ask = own[number % len(own)]
                compare(self._result, ask, await answer_to(ask, self._send), undisturbed[ask])
                if self._result.num_asked >= NUM_CLIENTS * num_requests // 4:
                    self._is_time.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill())
            for own in asks:
                tasks.create_task(one_client(own))
        self._result.seconds = time.monotonic() - begin_s

    async def _kill(self) -> None:
        await self._is_time.wait()
        await self._scheduler.until(lambda state: state.num_running_requests > NUM_CLIENTS // 2)
        states = await self._scheduler.executors()
        victim = max(self._executors, key=lambda each: states[each.address].num_running_requests)
        await victim.kill()
        self._result.note_fault("SIGKILL")
        if len(self._executors) == 1:
            await asyncio.sleep(AWAY_S)
            await victim.start()
