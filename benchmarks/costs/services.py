"""Scenarios of whole services, started as processes: ways to ask, start times, the time between two steps."""

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import octavo
from benchmarks.costs.clock import cpu_us
from benchmarks.costs.harness import Figures, Groups, Size, Way, median_and_p99, scenario
from benchmarks.costs.sleeping_executor import open_record
from octavo.bench.load import Load
from octavo.bench.octavo_target import OctavoTarget, OneStreamTarget
from octavo.bench.openai_target import OpenAIApi, OpenAITarget
from octavo.bench.plan import Plan, Prompts
from octavo.bench.record import Outcome
from octavo.values.outputs import Delta
from scheduler_svc.processes.supervisor import LONGEST_PAUSE_S
from tests.support.processes import Service, children_of, running_service, start_service

QUIET = ("--log-level", "warning")
PATIENCE_S = 60.0
PROMPT_TOKENS = 4

# What ways to ask cost --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asking:
    """A way to ask, how many at once, and how many requests of one token and of many."""

    way: str
    concurrency: int
    num_short: int
    num_long: int
    long_tokens: int


@scenario("front", "CPU of the scheduler for a request and a message: native calls, one stream, OpenAI's API", pairs=10)
async def front(size: Size) -> Groups:
    """A fake executor makes the tokens. Requests of one token give the cost of a request; requests of many tokens cost
    more by their messages and tokens, with all that the engine does for them.
    """
    many = size.of(1024, 8)
    seqs = ("--max-num-seqs", str(many), *QUIET)
    # Tokens come one by one, as from a model, so that there is a message for each that has text.
    fake_flags = ("--step-ms", "4", "--num-device-blocks", str(20 * many), *seqs)
    async with running_service("executor_svc.fake", *fake_flags) as executor:
        flags = ("--executor", executor.address, "--openai-listen", "127.0.0.1:0", "--max-waiting-requests", "4096")
        async with running_service("scheduler_svc", *flags, *seqs) as scheduler:
            await until_ready(scheduler)
            few = size.of((16, 1000, 200, 64), (4, 4, 4, 4))
            asked = [Asking(way, *few) for way in ("native", "one stream", "completions", "chat", "responses")]
            asked.append(Asking(f"one stream of {many:,}", many, many, many, size.of(257, 4)))
            for one in asked:
                await load(
                    scheduler, one.way, one.concurrency, size.of(50, 1), 1
                )  # a server's first requests are not what is measured
            yield [
                Way(one.way, partial(asking_turn, scheduler, one), "native" if one.way != "native" else "")
                for one in asked
            ]


async def asking_turn(scheduler: Service, asking: Asking) -> Figures:
    """Return what a request and a message cost."""
    way, concurrency = asking.way, asking.concurrency
    short_us, short_messages, _ = await load(scheduler, way, concurrency, asking.num_short, 1)
    long_us, long_messages, num_tokens = await load(scheduler, way, concurrency, asking.num_long, asking.long_tokens)
    share = asking.num_long / asking.num_short
    added_us = long_us - share * short_us
    return {
        "a request, ms": short_us / asking.num_short / 1000,
        "a message, µs": added_us / (long_messages - share * short_messages),
        "a token, µs": added_us / (num_tokens - asking.num_long),
    }


async def load(
    scheduler: Service, way: str, concurrency: int, num_requests: int, num_tokens: int
) -> tuple[float, int, int]:
    """Send requests; return the scheduler's CPU microseconds, and how many messages and tokens came."""
    if way == "responses":
        return await load_events(scheduler, concurrency, num_requests, num_tokens)
    common: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "timeout_s": PATIENCE_S}
    opened: OctavoTarget | OneStreamTarget | OpenAITarget
    if way in ("completions", "chat"):
        url = f"http://{scheduler.other_addresses['openai']}/v1"
        opened = OpenAITarget(url, api=OpenAIApi(way), api_key=None, model=None, **common)
    else:
        kind = OctavoTarget if way == "native" else OneStreamTarget
        opened = kind(octavo.Client(scheduler.address), account={}, **common)
    before_us = cpu_us(scheduler.process.pid)
    async with opened as target:
        prompts = Prompts(await target.describe(), seed=0)
        plan = Plan(
            [num_tokens] * num_requests,
            [PROMPT_TOKENS] * num_requests,
            lambda index: prompts.make(index, PROMPT_TOKENS),
            concurrency=concurrency,
        )
        records = (await Load(target, plan, asyncio.Event()).run()).records
    spent_us = cpu_us(scheduler.process.pid) - before_us
    assert all(record.outcome is Outcome.COMPLETED for record in records), "a request failed: nothing can be compared"
    num_messages = sum(len(record.event_times_s) for record in records)
    return spent_us, num_messages, sum(record.num_output_tokens for record in records)


async def load_events(
    scheduler: Service, concurrency: int, num_requests: int, num_tokens: int
) -> tuple[float, int, int]:
    """Do as `load` by the Responses API, which `octavo bench` does not speak."""
    url = f"http://{scheduler.other_addresses['openai']}/v1/responses"
    body = {"model": "fake", "temperature": 0.0, "ignore_eos": True, "max_output_tokens": num_tokens, "stream": True}
    places, counts = asyncio.Semaphore(concurrency), [0]

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        async with places, session.post(url, json={**body, "input": f"what are {number} words"}) as response:
            async for line in response.content:
                counts[0] += line.startswith(b"event: response.output_text.delta")
                assert not line.startswith(b"event: response.failed"), "a request failed: nothing can be compared"

    before_us = cpu_us(scheduler.process.pid)
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(ask(session, number) for number in range(num_requests)))
    return cpu_us(scheduler.process.pid) - before_us, counts[0], num_requests * num_tokens


async def until_ready(scheduler: Service) -> None:
    """Return once a scheduler has an executor."""
    async with octavo.Client(scheduler.address) as client:
        await client.wait_until_ready(PATIENCE_S)


# How long processes take to start ---------------------------------------------------------------


@scenario("start", "seconds until processes serve, and until streams go on after their engine was killed", pairs=5)
async def start(size: Size) -> Groups:
    """Streams run through fronts while the engine is killed; each has a gap until its next token."""
    num_streams, num_fronts, block = size.of(200, 4), size.of(2, 1), 16
    seqs = ("--max-num-seqs", str(num_streams), *QUIET)
    blocks = ("--num-device-blocks", str(num_streams * (NUM_TOKENS // block + 2)))
    async with running_service("executor_svc.fake", "--step-ms", "10", *blocks, *seqs) as executor:
        flags = ("--executor", executor.address, *QUIET)
        fronts = (*flags, "--fronts", str(num_fronts))
        ways = [
            Way("fake executor", partial(seconds_to_serve, "executor_svc.fake", *QUIET)),
            Way("scheduler", partial(seconds_to_serve, "scheduler_svc", *flags)),
        ]
        if not size.is_smallest:
            model_flags = ("executor_svc", "--model", str(size.directory()), *QUIET)
            ways += [
                Way(f"scheduler, {num_fronts} fronts", partial(seconds_to_serve, "scheduler_svc", *fronts)),
                Way("import torch", seconds_to_import_torch),
                Way("executor with the model", partial(seconds_to_serve, *model_flags)),
            ]
        yield ways
        async with running_service("scheduler_svc", *fronts) as scheduler:
            killed = partial(killed_engine, scheduler, num_streams, size.of(LONGEST_PAUSE_S, 0.0))
            yield [Way(f"engine killed under {num_streams} streams", killed)]


NUM_TOKENS = 2_000  # of a stream: more than it has time for
NUM_WARM_UP_TOKENS = 20
REST_S = 0.1  # without a token: the last ones of the lost engine have come


async def seconds_to_serve(module: str, *flags: str) -> Figures:
    """Start a service and end it; return how long it took to serve."""
    began_s = time.monotonic()
    service = await start_service(module, *flags)
    if module == "scheduler_svc":
        await until_ready(service)
    elif module == "executor_svc":
        assert service.process.stdout is not None
        while b"serving on" not in await service.process.stdout.readline():  # it has listened before
            pass
    took_s = time.monotonic() - began_s
    await service.terminate()
    return {"until it serves, s": took_s}


async def seconds_to_import_torch() -> Figures:
    """Return how long a process takes that does nothing else."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", "import torch")
    assert await process.wait() == 0
    return {"until it ends, s": time.monotonic() - began_s}


async def killed_engine(scheduler: Service, num_streams: int, pause_s: float) -> Figures:
    """Kill the engine under streams; return how long they rest."""
    await asyncio.sleep(pause_s)  # an engine that is killed again and again is started later
    last_token_s: dict[int, float] = {}
    num_tokens = dict.fromkeys(range(num_streams), 0)

    async def read(client: octavo.Client, number: int) -> None:
        prompt = [33 + number % 94, 33 + number // 94 % 94, 40, 41]  # the fake cannot tell equal histories apart
        async for event in client.stream(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True):
            if isinstance(event, Delta):
                last_token_s[number] = time.monotonic()
                num_tokens[number] += 1

    def engines() -> list[int]:
        return children_of(scheduler.process.pid, "scheduler_svc.processes.engine_process")

    async with octavo.Client(scheduler.address) as one, octavo.Client(scheduler.address) as two:
        await one.wait_until_ready(PATIENCE_S)
        reading = [asyncio.create_task(read((one, two)[number % 2], number)) for number in range(num_streams)]
        try:
            await until(lambda: min(num_tokens.values()) >= NUM_WARM_UP_TOKENS)
            [engine] = engines()
            os.kill(engine, signal.SIGKILL)
            killed_s = time.monotonic()
            await until(lambda: engines() not in ([], [engine]))
            started_s = time.monotonic()
            await until(lambda: time.monotonic() - max(last_token_s.values()) > REST_S)
            last_token_s.clear()
            await until(lambda: len(last_token_s) == num_streams)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    resumed_s = max(last_token_s.values())
    return {
        "until all have a token, s": resumed_s - killed_s,
        "the same from the next engine's process, s": resumed_s - started_s,
    }


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - of what a process or a clock says
            await asyncio.sleep(0.002)


# How long an executor waits between two steps ---------------------------------------------------

OUTPUTS_PER_REQUEST = 16  # best_of; one is returned, so that nothing is sent to a client before the end
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A step's length, the round trip that is added, sequences, and fronts for their streams; None: no streams."""

    step_ms: float
    num_sequences: int
    round_trip_ms: float = 0.0
    num_fronts: int | None = None

    @property
    def name(self) -> str:
        """How the table calls it."""
        if self.num_fronts is None:
            return f"{self.step_ms:g} ms, {self.num_sequences:,} sequences, round trip {self.round_trip_ms:g} ms"
        return f"{self.step_ms:g} ms, {self.num_sequences:,} streams, {self.num_fronts} fronts"


GAPS = (
    *(Case(step, number, trip) for step in (10, 3) for number in (32, 256, 1024) for trip in (0, 1, 5)),
    *(Case(step, number, num_fronts=0) for step, number in ((10, 32), (10, 256), (3, 32), (3, 64))),
    *(Case(step, number, num_fronts=fronts) for step, number in ((20, 256), (10, 64)) for fronts in (0, 2)),
)


@scenario("gap", "the executor's time between two steps, over gRPC, with a round trip or with streams", pairs=1)
async def gap(size: Size) -> Groups:
    """The worker sleeps for the length of a step; a proxy adds the round trip, half of it each way. Times are of the
    executor's own clock. The clients are in this process, spread over four connections for each front.
    """
    for case in size.of(GAPS, (Case(3, 16, 1.0, num_fronts=1),)):
        yield [Way(case.name, partial(gap_turn, case, size.of(4.0, 0.3)))]


async def gap_turn(case: Case, seconds: float) -> Figures:
    """Start the services, let all sequences decode for a while, and stop them."""
    num_outputs = OUTPUTS_PER_REQUEST if case.num_fronts is None else 1
    warm_up_s = seconds / 4
    num_tokens = min(MAX_MODEL_LEN - 64, int(1.5 * (seconds + warm_up_s) * 1000 / case.step_ms) + 200)
    params = octavo.SamplingParams(best_of=num_outputs, n=1, max_tokens=num_tokens, ignore_eos=True)
    async with AsyncExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "steps")
        sizes = {
            "max-num-seqs": case.num_sequences,
            "max-model-len": MAX_MODEL_LEN,
            "block-size-tokens": BLOCK_SIZE,
            "num-device-blocks": case.num_sequences * MAX_MODEL_LEN // BLOCK_SIZE,
            "step-ms": case.step_ms,
        }
        flags = ("--record", str(path), *(f"--{name}={value}" for name, value in sizes.items()), *QUIET)
        executor = await stack.enter_async_context(running_service("benchmarks.costs.sleeping_executor", *flags))
        address = executor.address
        if case.round_trip_ms:
            flags = ("--target", address, "--round-trip-ms", str(case.round_trip_ms))
            address = (await stack.enter_async_context(running_service("benchmarks.costs.delay_proxy", *flags))).address
        flags = ("--executor", address, "--fronts", str(case.num_fronts or 0), *QUIET)
        scheduler = await stack.enter_async_context(running_service("scheduler_svc", *flags))
        await until_ready(scheduler)
        clients = [
            await stack.enter_async_context(octavo.Client(scheduler.address))
            for _ in range(4 * (case.num_fronts or 0) or 1)
        ]
        requests = [
            asyncio.create_task(clients[number % len(clients)].generate([33 + number % 90, 33 + number // 90], params))
            for number in range(case.num_sequences // num_outputs)
        ]
        record = open_record(path, is_new=False)
        engine, fronts = engine_and_fronts(scheduler)
        try:
            await until(lambda: bool((record["num_active"] == case.num_sequences).any()))
            await asyncio.sleep(warm_up_s)
            first, engine_us, fronts_us = np.count_nonzero(record["end_ns"]), cpu_us(engine), cpu_us(*fronts)
            await asyncio.sleep(seconds)
            last, engine_us, fronts_us = (
                np.count_nonzero(record["end_ns"]),
                cpu_us(engine) - engine_us,
                cpu_us(*fronts) - fronts_us,
            )
            steps = np.array(record[first:last])
            assert (steps["num_active"] == case.num_sequences).all(), "a sequence ended before the measurement did"
        finally:
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
    gaps_us = (steps["begin_ns"][1:] - steps["end_ns"][:-1]) / 1000
    return {
        "idle, %": 100_000 * gaps_us.sum() / (steps["end_ns"][-1] - steps["end_ns"][0]),
        **median_and_p99("gap", gaps_us),
        "CPU of the engine a step, µs": engine_us / len(steps),
        **({"CPU of the fronts a step, µs": fronts_us / len(steps)} if fronts else {}),
    }


def engine_and_fronts(scheduler: Service) -> tuple[int, list[int]]:
    """Return the engine's process, and the fronts' processes, if these are others (Linux)."""
    pid = scheduler.process.pid
    engines, fronts = (
        children_of(pid, f"scheduler_svc.processes.{module}") for module in ("engine_process", "front_process")
    )
    return (engines[0] if engines else pid), fronts
