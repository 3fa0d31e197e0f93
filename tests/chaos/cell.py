"""A cell of two schedulers, four executors and three fronts: any process is killed, started again, added or removed.

After each fault new requests have to spread evenly again over all schedulers and executors that are there.
"""

import asyncio
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from octavo import Client
from tests.chaos.asking import Answer, Ask, Send, answer_to, answers_to, by_grpc, compare
from tests.chaos.result import Result
from tests.chaos.scale import Scale
from tests.chaos.services import fake_executor, running_executors, running_scheduler
from tests.support.cells import EXECUTOR, FRONT, SCHEDULER, TIERS, Cell, Member, running_cell

NUM_FAULTS = 20
FEWEST_FAULTS = 3
# Requests that run when a fault strikes, and those that are judged after it.
NUM_STRUCK = 64
NUM_NEW = 200
NUM_SHARED_TOKENS = 64

# Most that a scheduler or an executor has, as a multiple of the mean, and how soon after a fault.
MOST_LOAD = 1.25
SOON_S = 5.0

# How many processes of a tier run, at least and at most.
BOUNDS = {EXECUTOR: (3, 6), SCHEDULER: (1, 3), FRONT: (1, 4)}


@dataclass(frozen=True, slots=True)
class CellAsk(Ask):
    """A request of a cell. All prompts are equally long.

    Attributes:
        batch: Which batch it is of; those of two batches have nothing in common.
        shares_prefix: Whether all of the batch begin alike.
    """

    batch: str = ""
    shares_prefix: bool = False

    @property
    def request_id(self) -> str:
        """Its name, by which a scheduler tells where it ran."""
        return f"{self.batch}-{self.stream}"

    @property
    def prompt(self) -> list[int]:
        """Its token ids, printable bytes."""
        name = self.batch if self.shares_prefix else self.request_id
        prefix = random.Random(name).choices(range(33, 127), k=NUM_SHARED_TOKENS)
        return [*prefix, 33 + self.stream % 94, 33 + self.stream // 94, *range(33, 39)]


@dataclass(slots=True)
class Faults:
    """Draws faults and lets them strike.

    Attributes:
        cell: What they strike.
        draws: Chooses.
    """

    cell: Cell
    draws: random.Random
    _deck: list[tuple[str, str]] = field(default_factory=list)
    _endings: list[asyncio.Task[None]] = field(default_factory=list)

    async def strike(self) -> str:
        """Let the next fault strike that leaves enough processes, and not too many; return its name.

        Each kind strikes every tier once before it does so again. What is removed may still be ending.
        """
        while not (fits := [fault for fault in self._deck if self._fits(*fault)]):
            kinds = list(itertools.product(("kill", "restart", "add", "remove"), TIERS))
            self._deck += self.draws.sample(kinds, len(kinds))
        kind, tier = fits[0]
        self._deck.remove(fits[0])
        if kind == "add":
            await self.cell.add(tier)
        elif kind == "restart":
            await self._restart(tier)
        elif kind == "kill":
            await self._draw(tier).kill()
        else:
            self._endings.append(asyncio.create_task(self.cell.remove(self._draw(tier))))
            await asyncio.sleep(0)  # the signal is sent
        return f"{kind} {tier}"

    async def wait(self) -> None:
        """Return once all have ended that were removed. Raises AssertionError: one did not end in order."""
        await asyncio.gather(*self._endings)

    def _fits(self, kind: str, tier: str) -> bool:
        fewest, most = BOUNDS[tier]
        if kind == "add":
            return len(self.cell.members[tier]) < most
        return kind == "restart" or len(self.cell.running(tier)) > fewest

    async def _restart(self, tier: str) -> None:
        """Start one that was killed, or else end one and start it again."""
        dead = [member for member in self.cell.members[tier] if not member.runs]
        member = dead[0] if dead else self._draw(tier)
        if not dead:
            await member.terminate()
        await self.cell.start(member)

    def _draw(self, tier: str) -> Member:
        return self.draws.choice(self.cell.running(tier))


@dataclass(frozen=True, slots=True)
class CellFaults:
    """The row."""

    name: str = "cell"
    what: str = (
        "3 fronts, 2 schedulers and 4 fake executors under 64 streams; SIGKILL, restart, a process more, or one less "
        "of any tier"
    )
    target: str = (
        "0 lost, all equal; 5 s after each fault no scheduler and no executor has more than 1.25 times its share of "
        "200 new requests, which have different prefixes and one by turns"
    )

    def pieces(self, scale: Scale) -> list[str]:
        """Return its only piece."""
        return [f"{max(FEWEST_FAULTS, scale.part_of(NUM_FAULTS))} faults"]

    async def play(self, pieces: Sequence[str], _scale: Scale) -> AsyncIterator[Result]:
        """Run pieces and yield their results."""
        for piece in pieces:
            result, begin_s = Result(self.name, piece), time.monotonic()
            async with running_cell(2, 4, 3, "--step-ms", "40") as cell:
                await strike(cell, int(piece.split()[0]), random.Random(piece), result)
            result.seconds = time.monotonic() - begin_s
            yield result


async def strike(cell: Cell, num_faults: int, draws: random.Random, result: Result) -> None:
    """Let so many faults strike a cell, and judge it after each."""
    faults, answers = Faults(cell, draws), dict[Ask, Answer]()
    for number in range(num_faults):
        asks = [CellAsk(stream, number, 40, batch=f"struck-{number}") for stream in range(NUM_STRUCK)]
        begun = set[int]()
        async with dealt_to_fronts(cell, begun) as send:
            struck = [asyncio.create_task(answer_to(ask, send)) for ask in asks]
            while len(begun) < NUM_STRUCK * 3 // 4:
                await asyncio.sleep(0.01)
            name, begin_s = await faults.strike(), time.monotonic()
            result.note_fault(name)
            words = ("different prefixes", "one prefix")[number % 2]
            answers |= await judge(cell, f"{number}: {name}, {words}", begin_s, result)
            answers.update(zip(asks, await asyncio.gather(*struck), strict=True))
    await faults.wait()
    undisturbed = await answers_without_faults(list(answers))
    for ask, answer in answers.items():
        compare(result, ask, answer, undisturbed[ask])


async def answers_without_faults(asks: Sequence[Ask]) -> Mapping[Ask, Answer]:
    """Return what the same requests get from another scheduler, whose executor is faster."""
    async with (
        running_executors(1, fake_executor()) as executors,
        running_scheduler([executors[0].address]) as scheduler,
        Client(scheduler.address) as client,
    ):
        return await answers_to(asks, by_grpc(client), NUM_STRUCK)


@asynccontextmanager
async def dealt_to_fronts(cell: Cell, begun: set[int] | None = None) -> AsyncIterator[Send]:
    """Give what deals requests to all fronts that run; each client knows all of them, and begins with another one.

    Args:
        cell: Theirs.
        begun: Gets the ids of answers that have begun.
    """
    addresses = [front.address for front in cell.running(FRONT)]
    async with AsyncExitStack() as stack:
        sends = []
        for first in range(len(addresses)):
            client = await stack.enter_async_context(Client(addresses[first:] + addresses[:first]))
            sends.append(by_grpc(client, lambda answer: None if begun is None else begun.add(id(answer))))

        async def send(ask: Ask, answer: Answer) -> None:
            await sends[ask.stream % len(sends)](ask, answer)

        yield send


async def judge(cell: Cell, what: str, begin_s: float, result: Result) -> Mapping[Ask, Answer]:
    """Send batches of new requests until one is spread evenly, or it is too late; return all answers."""
    answers: dict[Ask, Answer] = {}
    load = math.inf
    for attempt in itertools.count():
        after_s = time.monotonic() - begin_s
        if after_s > SOON_S and attempt:
            result.missed.append(f"{what}: the load is {load:.2f} times the mean after {after_s:.1f} s")
            return answers
        asks = [
            CellAsk(stream, attempt, 40, f"{what}, {attempt}", what.endswith("one prefix")) for stream in range(NUM_NEW)
        ]
        async with dealt_to_fronts(cell) as send:
            answers |= await answers_to(asks, send, NUM_NEW)
        load = await largest_load(cell, asks)
        if load <= MOST_LOAD:
            break
    result.note("even_after_s", after_s)
    result.note("load_of_mean", load)
    return answers


async def largest_load(cell: Cell, asks: Sequence[CellAsk]) -> float:
    """Return how many requests ran where most did, as a multiple of the mean of schedulers and of executors.

    A scheduler ought to have as many shares as executors. Infinite: an executor is idle that could be attached, or a
    request ran where none should.
    """
    attached = await cell.attached()
    if not await cell.is_whole():
        return math.inf
    ran: Counter[tuple[str, str]] = Counter()
    for scheduler in cell.running(SCHEDULER):
        executors = await scheduler.ran({ask.request_id for ask in asks})
        ran.update((scheduler.scheduler_id, executor) for executor in executors.values())
    shares = {one: [ran[one, executor] for executor in executors] for one, executors in attached.items() if executors}
    if sum(map(sum, shares.values())) != len(asks):
        return math.inf
    mean = len(asks) / sum(map(len, shares.values()))
    return max(max(max(share), sum(share) / len(share)) for share in shares.values()) / mean
