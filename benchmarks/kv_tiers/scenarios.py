"""What is measured. `benchmarks/costs/harness.py` lets the arms take turns; equal turns have equal requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.costs.harness import Figures, Groups, Scenario, Size
from benchmarks.kv_tiers.arms import BLOCK_SIZE, LOOK_INTERVAL_S, Answer, Arm, Comparison, in_turns, running_arms

TTFT, TTFT_P90, RATE, HITS = "first token, ms", "first token p90, ms", "requests/s", "hit rate"
PAUSE, LONGEST_PAUSE = "pause, median, ms", "pause, longest, ms"
SPREAD, COMPUTED, TAKEN = "largest over mean running", "computations of the prefix", "executors that took it over"
LIGHT = "at load 0.2"
# What keeps the blocks of prompts and outputs apart from those of a full pool.
SPARE_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of a figure of the arm with the flags, or of its ratio to the arm without."""

    bound: float
    is_ratio: bool = True
    is_least: bool = False

    def __str__(self) -> str:
        return f"{'ratio ' if self.is_ratio else ''}{'≥' if self.is_least else '≤'} {self.bound:g}"

    def is_met(self, value: float) -> bool:
        """Return whether a figure, or a ratio, is within the bound."""
        return value >= self.bound if self.is_least else value <= self.bound


# By scenario, by what stands before the arm in the table, and by figure.
TARGETS = {
    ("host", "", HITS): Target(0.9, is_ratio=False, is_least=True),
    ("host", "", TTFT): Target(0.3),
    ("host", "", RATE): Target(1.15, is_least=True),
    ("host", LIGHT, RATE): Target(0.99, is_least=True),
    ("pull", "float32", TTFT): Target(0.6),
    ("pull", "int8", TTFT): Target(0.6),
    ("drain", "", PAUSE): Target(0.3),
    ("spread", "", SPREAD): Target(1.25, is_ratio=False),
    ("spread", "", COMPUTED): Target(1, is_ratio=False),
    ("spread", "", TAKEN): Target(3, is_ratio=False, is_least=True),
}


def scenarios(comparison: Comparison) -> dict[str, Scenario]:
    """Return the scenarios by name."""
    rows = (
        (
            "host",
            "conversations that come back, more than the device pool holds and no more than the host pool",
            host,
            2,
        ),
        ("pull", "first token of a request whose prefix another executor has", pull, 5),
        ("drain", "pause of the streams of an executor that is drained", drain, 3),
        ("spread", "requests with one prefix on four executors", spread, 3),
    )
    return {name: Scenario(name, what, partial(groups, comparison), pairs) for name, what, groups, pairs in rows}


def first_tokens(answers: Sequence[Answer]) -> dict[str, float]:
    median, p90 = np.percentile([answer.ttft_ms for answer in answers], (50, 90))
    return {TTFT: float(median), TTFT_P90: float(p90)}


# Conversations that come back ---------------------------------------------------------------------

TURN_TOKENS, ANSWER_TOKENS = 8, 16
CONCURRENCY = 4
MAX_ROUNDS = 8


async def host(comparison: Comparison, size: Size) -> Groups:
    """The conversations go on one after another, round by round, so the device pool has none of the next one left."""
    num_conversations, on_device, num_tokens = size.of((48, 16, 2000), (12, 4, 500))
    num_full, num_light = size.of((24, 6), (12, 4))
    blocks_each = -(-(num_tokens + MAX_ROUNDS * (TURN_TOKENS + ANSWER_TOKENS)) // BLOCK_SIZE)
    blocks = (
        *("--num-device-blocks", str(on_device * blocks_each)),
        *("--num-host-blocks", str(num_conversations * blocks_each)),
    )
    async with running_arms(comparison, size, 1, *blocks) as arms:
        talks = {
            arm.name: Conversations(arm, [arm.tokens(num_tokens, 1, i) for i in range(num_conversations)])
            for arm in arms
        }
        for talk in talks.values():
            await closed_loop(talk.go_on, num_conversations)
        rates: list[float] = []

        async def full_turn(arm: Arm) -> Figures:
            figures = await conversations_turn(talks[arm.name], num_full, None)
            if arm is arms[0]:
                rates.append(figures[RATE])
            return figures

        async def light_turn(arm: Arm) -> Figures:
            return await conversations_turn(talks[arm.name], num_light, 0.2 * sum(rates) / len(rates))

        yield in_turns(arms, full_turn)
        yield in_turns(arms, light_turn, LIGHT)


@dataclass(slots=True)
class Conversations:
    """Conversations with an arm, which go on one after another, round by round."""

    arm: Arm
    histories: list[list[int]]
    num_requests: int = 0
    num_prefix_tokens: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def go_on(self) -> None:
        """Let the next conversation go on by a turn and its answer."""
        turn, number = divmod(self.num_requests, len(self.histories))
        self.num_requests += 1
        history = self.histories[number]
        self.num_prefix_tokens += len(history)
        prompt = history + self.arm.tokens(TURN_TOKENS, 2, number, turn)
        answer = await self.arm.ask(("host", number, turn), prompt, ANSWER_TOKENS)
        self.histories[number] = [*prompt, *answer.token_ids]
        self.answers.append(answer)


async def conversations_turn(talk: Conversations, num_requests: int, rate: float | None) -> Figures:
    """Send requests, so many a second; None: in a closed loop."""
    talk.answers, talk.num_prefix_tokens = [], 0
    begin_s = time.perf_counter()
    await (closed_loop(talk.go_on, num_requests) if rate is None else open_loop(talk.go_on, num_requests, rate))
    took_s = time.perf_counter() - begin_s
    return {
        HITS: sum(answer.num_cached_tokens for answer in talk.answers) / talk.num_prefix_tokens,
        **first_tokens(talk.answers),
        RATE: num_requests / took_s,
    }


async def closed_loop(send: Callable[[], Awaitable[object]], num_requests: int) -> None:
    """Send a request as soon as one of CONCURRENCY clients is free."""
    requests = iter(range(num_requests))

    async def client() -> None:
        for _ in requests:
            await send()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client())


async def open_loop(send: Callable[[], Awaitable[object]], num_requests: int, rate: float) -> None:
    """Send requests in even intervals, `rate` a second."""
    begin_s = time.perf_counter()

    async def sent_at(time_s: float) -> None:
        await asyncio.sleep(max(0.0, time_s - time.perf_counter()))
        await send()

    async with asyncio.TaskGroup() as group:
        for number in range(num_requests):
            group.create_task(sent_at(begin_s + number / rate))


# A prefix that another executor has ---------------------------------------------------------------


async def pull(comparison: Comparison, size: Size) -> Groups:
    """Each executor has one slot. A request computes the prefix and goes on decoding, so the next request with the same
    prefix is placed at the other executor.
    """
    num_tokens = size.of(2048, 512)
    num_blocks = 4 * num_tokens // BLOCK_SIZE + 4 * SPARE_BLOCKS
    for dtype in ("float32", "int8"):
        flags = ("--kv-cache-dtype", dtype, "--max-num-seqs", "1", "--num-device-blocks", str(num_blocks))
        async with running_arms(comparison, size, 2, *flags) as arms:
            yield in_turns(arms, partial(pull_turn, dtype, num_tokens), dtype)


async def pull_turn(dtype: str, num_tokens: int, arm: Arm) -> Figures:
    prefix = arm.tokens(num_tokens, 3, arm.num_turns)
    first, second = (f"{number}-{arm.num_turns}" for number in ("first", "second"))
    async with arm.running([*prefix, *arm.tokens(8, 4)], first, num_tokens=4000):
        prompt = [*prefix, *arm.tokens(8, 5)]
        answer = await arm.ask(("pull", dtype, arm.num_turns), prompt, ANSWER_TOKENS, request_id=second)
        places = [await arm.place_of(request_id) for request_id in (first, second)]
        assert places[0] != places[1], "the request was to be placed at the other executor"
    await arm.until(lambda states: not any(state.num_running_requests for state in states))
    return {TTFT: answer.ttft_ms, HITS: answer.num_cached_tokens / num_tokens}


# Streams of an executor that is drained -----------------------------------------------------------


async def drain(comparison: Comparison, size: Size) -> Groups:
    """Two executors share the streams; one is drained once all decode. Either could run all of them."""
    num_streams, num_prompt_tokens, num_tokens = size.of((32, 500, 96), (8, 200, 64))
    num_blocks = num_streams * -(-(num_prompt_tokens + num_tokens) // BLOCK_SIZE) + SPARE_BLOCKS
    flags = ("--max-num-seqs", str(num_streams), "--num-device-blocks", str(num_blocks))
    async with running_arms(comparison, size, 2, *flags) as arms:
        yield in_turns(arms, partial(drain_turn, num_streams, num_prompt_tokens, num_tokens))


async def drain_turn(num_streams: int, num_prompt_tokens: int, num_tokens: int, arm: Arm) -> Figures:
    """Return the longest time without a token of each stream that was moved, from the drain on."""
    decoding: set[int] = set()
    all_decode = asyncio.Event()

    def note(number: int) -> None:
        decoding.add(number)
        if len(decoding) == num_streams:
            all_decode.set()

    ids = [f"stream-{arm.num_turns}-{number}" for number in range(num_streams)]
    async with asyncio.TaskGroup() as group:
        streams = [
            group.create_task(
                arm.ask(
                    ("drain", arm.num_turns, number),
                    arm.tokens(num_prompt_tokens, 6, arm.num_turns, number),
                    num_tokens,
                    request_id=request_id,
                    on_token=partial(note, number),
                )
            )
            for number, request_id in enumerate(ids)
        ]
        await all_decode.wait()
        places = {request.request_id: request.executor for request in await arm.admin.list_requests(num_streams)}
        drained = min(places.values())
        drained_s = time.perf_counter()
        await arm.admin.drain_executor(drained)
        await arm.until(
            lambda states: not any(state.num_running_requests for state in states if state.address == drained)
        )
        empty_s = time.perf_counter()
    await arm.admin.drain_executor(drained, undo=True)
    moved = [stream.result() for stream, name in zip(streams, ids, strict=True) if places.get(name) == drained]
    pauses_ms = [answer.longest_gap_ms(drained_s) for answer in moved]
    return {
        PAUSE: float(np.median(pauses_ms)),
        LONGEST_PAUSE: max(pauses_ms),
        "until it is empty, s": empty_s - drained_s,
        "streams moved": len(moved),
    }


# One prefix on many executors ---------------------------------------------------------------------


async def spread(comparison: Comparison, size: Size) -> Groups:
    """After one request has computed the prefix, requests with it come in even intervals."""
    num_executors, num_prefix_tokens, num_requests, rate = 4, 1000, size.of(240, 60), 10.0
    flags = ("--max-num-seqs", "64", "--num-device-blocks", str(8 * num_prefix_tokens // BLOCK_SIZE + 4 * num_requests))
    async with running_arms(comparison, size, num_executors, *flags) as arms:
        yield in_turns(arms, partial(spread_turn, num_prefix_tokens, num_requests, rate))


async def spread_turn(num_prefix_tokens: int, num_requests: int, rate: float, arm: Arm) -> Figures:
    """Return how even the work is, and where the prefix was computed.

    An executor took the prefix over if it ran requests with it and computed it for none of them.
    """
    prefix = arm.tokens(num_prefix_tokens, 7, arm.num_turns)
    answers: dict[str, Answer] = {}

    async def ask() -> None:
        number = len(sent)
        sent.append(f"spread-{arm.num_turns}-{number}")
        key = "spread", arm.num_turns, number
        prompt = [*prefix, *arm.tokens(8, 8, arm.num_turns, number)]
        answers[sent[number]] = await arm.ask(key, prompt, 2 * ANSWER_TOKENS, request_id=sent[number])

    sent: list[str] = []
    await ask()
    num_running: dict[str, int] = {}
    watching = asyncio.create_task(add_running(arm, num_running))
    begin_s = time.perf_counter()
    try:
        await open_loop(ask, num_requests, rate)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    took_s = time.perf_counter() - begin_s
    places = [await arm.place_of(request_id) for request_id in sent]
    computed_at = [
        place
        for place, request_id in zip(places, sent, strict=True)
        if answers[request_id].num_cached_tokens < num_prefix_tokens // 2
    ]
    return {
        SPREAD: max(num_running.values()) / (sum(num_running.values()) / len(num_running)),
        COMPUTED: len(computed_at),
        TAKEN: len(set(places) - set(computed_at)),
        **first_tokens([answers[request_id] for request_id in sent[1:]]),
        RATE: num_requests / took_s,
    }


async def add_running(arm: Arm, num_running: dict[str, int]) -> None:
    """Add up the requests that run on each executor, look by look, until cancelled."""
    while True:
        for state in (await arm.admin.get_state()).executors:
            num_running[state.address] = num_running.get(state.address, 0) + state.num_running_requests
        await asyncio.sleep(LOOK_INTERVAL_S)
