"""Scenarios of the scheduler: metrics and log lines, the step log, grammars."""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import octavo
from benchmarks.costs.clock import cpu_us
from benchmarks.costs.harness import Figures, Groups, Size, Way, scenario
from benchmarks.costs.services import QUIET, until_ready
from octavo.errors import InvalidRequestError
from octavo.values.outputs import Delta
from tests.support.processes import Service, running_service

PER_END = ("summary", "request_ended", "log_end")


@scenario("metrics", "CPU of the scheduler for metrics and log lines, of a step with gRPC and a stream each", pairs=3)
async def metrics(size: Size) -> Groups:
    """Requests of 200 tokens: each ends with a log line."""
    yield [
        Way(f"{number} sequences", partial(metrics_turn, number, size.of(200, 20)))
        for number in size.of((32, 256), (4,))
    ]


async def metrics_turn(num_sequences: int, num_tokens: int) -> Figures:
    """Return what metrics add."""
    calls, us, service_us = await timed_load("metrics", num_sequences, num_tokens)
    num_steps = calls["set_result"]
    end_us = sum(us[name] for name in PER_END)
    step_us = sum(us.values()) - end_us
    return {
        "a step, µs": step_us / num_steps,
        "the end of a request, µs": end_us / calls["log_end"],
        "added to a step, both, µs": (step_us + end_us) / num_steps,
        "the service, a step, µs": service_us / num_steps,
        "share, %": 100 * (step_us + end_us) / service_us,
    }


@scenario("step-log", "CPU of the scheduler and bytes for --step-log, and how long a new file takes its loop", pairs=3)
async def step_log(size: Size) -> Groups:
    """The second way has files so small that a new one begins ten times a second."""
    number, num_tokens = size.of((256, 400), (4, 100))
    ways = {"one file": (), "new files": ("--num-files", "2048", "--step-log-max-mb", "8")}
    yield [
        Way(f"{number} sequences, {name}", partial(step_log_turn, number, num_tokens, flags))
        for name, flags in ways.items()
    ]


async def step_log_turn(num_sequences: int, num_tokens: int, flags: Sequence[str]) -> Figures:
    """Return what the log takes."""
    with tempfile.TemporaryDirectory() as folder:
        calls, us, service_us = await timed_load("step-log", num_sequences, num_tokens, "--step-log", folder, *flags)
        num_bytes = sum(entry.stat().st_size for entry in os.scandir(folder))
    if calls.get("_begin_file"):
        return {"the loop rests for a new file, ms": us["_begin_file"] / calls["_begin_file"] / 1000}
    added_us = us["_note"] + us["_write_pending"]
    return {
        "on the loop, a step, µs": us["_note"] / num_tokens,
        "with the writer's thread, a step, µs": added_us / num_tokens,
        "share of the service, %": 100 * added_us / service_us,
        "a step, bytes": num_bytes / num_tokens,
    }


async def timed_load(
    of: str, num_sequences: int, num_tokens: int, *flags: str
) -> tuple[dict[str, int], dict[str, float], float]:
    """Read streams from a scheduler with timed functions.

    Returns: calls and CPU microseconds of each function, and the same of the whole process for the load.
    """
    seqs = ("--max-num-seqs", str(num_sequences))
    with tempfile.NamedTemporaryFile() as file:
        blocks = ("--num-device-blocks", str(num_sequences * (num_tokens // 16 + 2)))
        async with running_service("executor_svc.fake", *blocks, *seqs, *QUIET) as executor:
            flags = ("--of", of, "--times", file.name, "--executor", executor.address, *flags)
            listen = ("--admin-listen", "127.0.0.1:0")
            async with running_service("benchmarks.costs.timed_scheduler", *flags, *listen) as scheduler:
                await until_ready(scheduler)
                params = octavo.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                prompts = [[33 + number % 90, 33 + number // 90] for number in range(num_sequences)]
                async with octavo.Client(scheduler.address) as client:
                    before_us = cpu_us(scheduler.process.pid)
                    await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
                    service_us = cpu_us(scheduler.process.pid) - before_us
                assert await scheduler.terminate() == 0
        times = json.load(file)
    return times["calls"], times["us"], service_us - times["cost_us"]


PATIENCE_S = 120.0
NUM_TOKENS = 96  # of a stream; the list of the grammar is longer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLAIN = octavo.SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
GUIDED = octavo.SamplingParams(
    temperature=1.0,
    max_tokens=NUM_TOKENS,
    json_schema=json.dumps({"type": "array", "minItems": NUM_TOKENS, "items": PERSON}),
)
# The first takes longer to compile than any may; the second compiles, and its masks cost milliseconds.
ENDLESS_REGEX = "a?" * 40_000
COSTLY_REGEX = r"(\p{L}|\p{N}|\s)*a(\p{L}|\s){40}"


@scenario("grammars", "tokens a second with grammars and without, and what hostile ones cost plain streams", pairs=6)
async def grammars(size: Size) -> Groups:
    """The demo model, float32, all cores. Gaps are between two tokens of a plain stream, seen by its client."""
    model_flags = ("executor_svc", "--model", str(size.directory()), "--kv-cache-gib", "0.5")
    many, few, num_tokens = size.of((32, 8, NUM_TOKENS), (2, 2, 4))
    plain, alone = f"{many} plain", f"{few} plain"
    async with (
        running_service(*size.of(model_flags, ("executor_svc.fake",)), *QUIET) as executor,
        running_service("scheduler_svc", "--executor", executor.address, *QUIET) as scheduler,
        octavo.Client(scheduler.address) as client,
    ):
        await client.wait_until_ready(PATIENCE_S)
        streams = Streams(client, executor, num_tokens)
        for params in (PLAIN, GUIDED):
            await streams.run(2, params)
        yield [
            Way(plain, partial(streams.rate, many, PLAIN)),
            Way(f"{many} with a JSON schema", partial(streams.rate, many, GUIDED), plain),
        ]
        yield [
            Way(alone, partial(streams.gaps, few)),
            Way(f"{few} plain beside a refused grammar", partial(streams.gaps, few, ENDLESS_REGEX), alone),
            Way(f"{few} plain beside a costly one", partial(streams.gaps, few, COSTLY_REGEX), alone),
        ]


class Streams:
    """Runs streams on an executor of its own."""

    def __init__(self, client: octavo.Client, executor: Service, num_tokens: int) -> None:
        self._client = client
        self._executor = executor
        self._num_tokens = num_tokens

    async def run(self, num: int, params: octavo.SamplingParams) -> list[list[float]]:
        """Run so many to their end; return when the tokens of each came."""
        return await asyncio.gather(*(self._stream(number, params) for number in range(num)))

    async def rate(self, num: int, params: octavo.SamplingParams) -> Figures:
        """Return how fast streams are, and what they cost the executor."""
        before_us, began_s = cpu_us(self._executor.process.pid), time.monotonic()
        times = await self.run(num, params)
        took_s, spent_us = time.monotonic() - began_s, cpu_us(self._executor.process.pid) - before_us
        num_tokens = sum(map(len, times))
        assert num_tokens == num * self._num_tokens, "a stream ended before: nothing can be compared"
        return {"tokens/s": num_tokens / took_s, "CPU of the executor, ms a token": spent_us / num_tokens / 1000}

    async def gaps(self, num: int, regex: str = "") -> Figures:
        """Return the gaps of plain streams, and how long hostile requests took that came one behind the other."""
        taken_s: list[float] = []
        hostile = asyncio.create_task(self._send(regex, taken_s.append)) if regex else None
        times = await self.run(num, PLAIN)
        if hostile is not None:
            hostile.cancel()
            with suppress(asyncio.CancelledError):
                await hostile
        gaps_ms = [1000 * (after - before) for one in times for before, after in pairwise(one)]
        return {
            "gap, ms": statistics.median(gaps_ms),
            "longest gap, ms": max(gaps_ms),
            **({"until its answer, s": statistics.median(taken_s)} if taken_s else {}),
        }

    async def _send(self, regex: str, took: Callable[[float], None]) -> None:
        """Send requests with a grammar until cancelled; note how long each takes to be refused, or to a token."""
        while True:
            began_s, is_answered = time.monotonic(), False
            params = octavo.SamplingParams(temperature=1.0, max_tokens=self._num_tokens, regex=regex)
            regex = f"{regex}b?"  # another one, so that nothing is remembered
            try:
                async for event in self._client.stream("Once", params):
                    if isinstance(event, Delta) and not is_answered:
                        is_answered = True
                        took(time.monotonic() - began_s)
            except InvalidRequestError:
                took(time.monotonic() - began_s)

    async def _stream(self, number: int, params: octavo.SamplingParams) -> list[float]:
        times: list[float] = []
        params = replace(params, max_tokens=self._num_tokens, seed=number)
        async for event in self._client.stream(f"{number} Once upon a time", params):
            if isinstance(event, Delta):
                times += [time.monotonic()] * len(event.token_ids)
        return times
