"""Many requests, half of which are cancelled at random moments: nothing of them may be left."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.asking import Ask, Send, answer_to, answers_to, compare, dealt
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import fake_executor, running_executors, running_scheduler

NUM_REQUESTS = 10_000
NUM_PIECES = 4
NUM_CLIENTS = 100
FEWEST_CLIENTS = 20
NUM_TOKENS = 16
# Requests of a client that differ: one may begin before the last one, which was cancelled, has ended.
NUM_DIFFERENT = 6
# A cancelled request is cancelled within so many seconds: before it is sent, in the queue, or in the middle.
LONGEST_LIFE_S = 0.2
CHANCE = 0.5


@dataclass(frozen=True, slots=True)
class CancelStorm:
    """The row.

    Attributes:
        name: Of the row.
        what: What happens, in words.
        target: What must come of it, in words.
        num_fronts: Of the scheduler.
    """

    name: str = "cancel"
    what: str = "10,000 requests of 100 clients, half of them cancelled at random moments; two fake executors"
    target: str = "all counts back to zero, the others equal"
    num_fronts: int = 0

    def pieces(self, scale: Scale) -> list[str]:
        """Return its pieces: a part of the requests each."""
        return [f"part {number}" for number in range(1, min(NUM_PIECES, scale.part_of(NUM_PIECES)) + 1)]

    async def play(self, pieces: Sequence[str], scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        num_requests = scale.part_of(NUM_REQUESTS) // len(self.pieces(scale))
        num_clients = max(FEWEST_CLIENTS, scale.part_of(NUM_CLIENTS))
        flags = ("--step-ms", "5", "--max-num-seqs", str(num_clients // 3))  # many wait in the queue
        async with (
            running_executors(2, fake_executor(*flags)) as executors,
            running_scheduler([one.address for one in executors], "--fronts", str(self.num_fronts)) as scheduler,
            dealt(scheduler.address, self.num_fronts) as send,
        ):
            for piece in pieces:
                result, begin_s = Result(self.name, piece), time.monotonic()
                await storm(send, num_clients, num_requests, random.Random(piece), result)
                waiting_s = time.monotonic()
                await scheduler.until(lambda state: not state.num_running_requests + state.num_waiting_requests)
                await scheduler.until(lambda state: not state.num_used_blocks)
                result.note("zero_after_s", time.monotonic() - waiting_s)
                result.wrong += await scheduler.leftovers()
                result.seconds = time.monotonic() - begin_s
                yield result


async def storm(send: Send, num_clients: int, num_requests: int, draws: random.Random, result: Result) -> None:
    """Let clients send so many requests, and cancel half of them; compare the others."""
    asks = [[Ask(stream, turn, NUM_TOKENS) for turn in range(NUM_DIFFERENT)] for stream in range(num_clients)]
    undisturbed = await answers_to([ask for each in asks for ask in each], send, num_clients)
    numbers: Iterator[int] = iter(range(num_requests))

    async def one_client(own: list[Ask]) -> None:
        for number in numbers:
            ask = own[number % len(own)]
            if draws.random() >= CHANCE:
                compare(result, ask, await answer_to(ask, send), undisturbed[ask])
                continue
            sending = asyncio.create_task(answer_to(ask, send))
            await asyncio.wait([sending], timeout=draws.uniform(0, LONGEST_LIFE_S))
            if sending.cancel():
                result.note_fault("cancelled")
            await asyncio.gather(sending, return_exceptions=True)

    await asyncio.gather(*map(one_client, asks))
