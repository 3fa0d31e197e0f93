"""Clients that send one request after another, while one of two executors is killed, or the only one."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai

from octavo import Client
from scheduler_svc.link.absence import LIMIT_S
from tests.chaos.asking import Ask, Send, answer_to, answers_to, by_grpc, by_openai, compare
from tests.chaos.doomed_scheduler import ABSENCE_LIMIT_S
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import (
    DOOMED_SCHEDULER,
    Executor,
    Scheduler,
    fake_executor,
    running_executors,
    running_scheduler,
)

NUM_CLIENTS = 8
NUM_REQUESTS = 100
# Requests of a client that differ.
NUM_DIFFERENT = 10
# The only executor is away for so long, in seconds.
AWAY_S = 3.0
# Or for so many times what fronts wait for a core: 45 s.
LONG_AWAY = 1.5
# A core starts in so many times the time of an executor, at most.
SLOW_START = 4
APIS = ("grpc", "openai")
NUM_FRONTS = 2


@dataclass(frozen=True, slots=True)
class Scene:
    """What is killed.

    Attributes:
        num_executors: How many there are, one of which may be killed.
        kills_executor: Whether it is.
        kills_engine: Whether the core is.
        is_long_away: Whether the executor is away for longer than fronts wait for a core.
    """

    num_executors: int
    kills_executor: bool = True
    kills_engine: bool = False
    is_long_away: bool = False


SCENES = {
    "one of two": Scene(2),
    "the only one": Scene(1),
    "the core": Scene(1, kills_executor=False, kills_engine=True),
    "core and executor": Scene(1, kills_engine=True),
    "core and executor for long": Scene(1, kills_engine=True, is_long_away=True),
}


@dataclass(frozen=True, slots=True)
class ManyClients:
    """The row."""

    name: str = "clients"
    what: str = (
        "8 clients x 100 requests through two fronts, by gRPC and with OpenAI's client; SIGKILL of one executor of "
        "two, of the only one (a new one after 3 s), of the core, of core and executor together (a new one after 3 s, "
        "or after 45 s)"
    )
    target: str = "800 of 800 complete and equal, each time"

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: the API and the scene."""
        pieces = [f"{api}, {scene}" for scene in SCENES for api in APIS]
        return pieces if scale.divisor == 1 else [pieces[0], pieces[-1]]

    async def play(self, pieces: Sequence[str], scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        for piece in pieces:
            api, name = piece.split(", ")
            scene = SCENES[name]
            flags = ("--openai-listen", "127.0.0.1:0", "--fronts", str(NUM_FRONTS))
            begin_s = time.monotonic()
            async with AsyncExitStack() as stack:
                executors = await stack.enter_async_context(
                    running_executors(scene.num_executors, fake_executor("--step-ms", "2"))
                )
                limit_s, changed = absence_limit(scene, scale, time.monotonic() - begin_s)
                scheduler = await stack.enter_async_context(
                    running_scheduler([one.address for one in executors], *flags, **changed)
                )
                sends = [await stack.enter_async_context(sender(api, scheduler)) for _ in range(NUM_CLIENTS)]
                result = Result(self.name, piece)
                away_s = LONG_AWAY * limit_s if scene.is_long_away else AWAY_S
                load = _Load(scene, away_s, scheduler, executors, sends, result)
                await load.run(scale.part_of(NUM_REQUESTS))
                yield result


def absence_limit(scene: Scene, scale: Scale, start_s: float) -> tuple[float, dict[str, Any]]:
    """Return how long fronts wait for a core, in seconds, and the arguments of `running_scheduler` that say so.

    Args:
        scene: In which that matters, or not.
        scale: Says how long.
        start_s: How long an executor took to start: where that is slow, a core takes longer, and may be waited for.
    """
    if scale.absence_limit_s is None or not scene.is_long_away:
        return LIMIT_S, {}
    limit_s = max(scale.absence_limit_s, SLOW_START * start_s)
    return limit_s, {"module": DOOMED_SCHEDULER, "environment": {ABSENCE_LIMIT_S: str(limit_s)}}


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
    def __init__(
        self,
        scene: Scene,
        away_s: float,
        scheduler: Scheduler,
        executors: Sequence[Executor],
        sends: Sequence[Send],
        result: Result,
    ) -> None:
        self._scene = scene
        self._away_s = away_s  # the only executor, once it is killed
        self._scheduler = scheduler
        self._executors = executors
        self._sends = sends  # of each client, which has a connection of its own
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
        undisturbed = await answers_to([ask for each in asks for ask in each], self._sends[0], NUM_CLIENTS)

        async def one_client(own: list[Ask], send: Send) -> None:
            for number in range(num_requests):
                ask = own[number % len(own)]
                compare(self._result, ask, await answer_to(ask, send), undisturbed[ask])
                if self._result.num_asked >= NUM_CLIENTS * num_requests // 4:
                    self._is_time.set()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kill())
            for own, send in zip(asks, self._sends, strict=True):
                tasks.create_task(one_client(own, send))
        self._result.seconds = time.monotonic() - begin_s

    async def _kill(self) -> None:
        await self._is_time.wait()
        await self._scheduler.until(lambda state: state.num_running_requests > NUM_CLIENTS // 2)
        states = await self._scheduler.executors()
        victim = max(self._executors, key=lambda each: states[each.address].num_running_requests)
        if self._scene.kills_engine:
            [core] = self._scheduler.cores()
            os.kill(core, signal.SIGKILL)
            self._result.note_fault("SIGKILL")
        if not self._scene.kills_executor:
            return
        await victim.kill()
        self._result.note_fault("SIGKILL")
        if len(self._executors) == 1:
            await asyncio.sleep(self._away_s)
            await victim.start()
