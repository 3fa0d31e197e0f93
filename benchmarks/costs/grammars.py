"""What grammars cost: streams that follow one beside plain ones, and plain ones beside a grammar made to harm them."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import octavo
from benchmarks.costs.clock import cpu_us
from benchmarks.costs.harness import Figures, Groups, Size, Way, scenario
from octavo.errors import InvalidRequestError
from octavo.values.outputs import Delta
from tests.support.processes import Service, running_service

QUIET = ("--log-level", "warning")
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
    """The demo model, float32, all cores. Gaps are those between two tokens of a plain stream, seen by its client."""
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
    """Runs streams on an executor that nobody else uses."""

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
