"""The arms of a comparison: the services of each, how it is asked, and the check that all give the same outputs."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from benchmarks.costs.harness import Figures, Size, Way
from octavo.admin.v1 import admin_pb2
from octavo.admin_client import AdminClient
from octavo.bench.plan import ordinary_token_ids
from octavo.client import Client
from octavo.values.outputs import Delta, Finished, ModelInfo
from tests.support.processes import running_service

WITHOUT, WITH = "without", "with"
BLOCK_SIZE = 16
QUIET = ("--log-level", "error")
PATIENCE_S = 120.0
LOOK_INTERVAL_S = 0.05


class DifferentOutputError(Exception):
    """Two arms gave different outputs for one request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its times, in seconds of `time.perf_counter`."""

    sent_s: float
    token_times_s: Sequence[float]
    token_ids: tuple[int, ...]
    num_cached_tokens: int

    @property
    def ttft_ms(self) -> float:
        """From sending to the first token."""
        return 1000 * (self.token_times_s[0] - self.sent_s)

    def longest_gap_ms(self, since_s: float) -> float:
        """Return the longest time between two messages with tokens, of those that ended after a moment."""
        return 1000 * max(late - early for early, late in pairwise(self.token_times_s) if late > since_s)


@dataclass(slots=True)
class Comparison:
    """Flags of the scheduler by arm, and the outputs of the arm that gave each first."""

    flags: Mapping[str, Sequence[str]]
    num_equal: int = 0
    _outputs: dict[Hashable, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)

    def check(self, key: Hashable, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """Compare an output with the other arm's.

        Raises: DifferentOutputError: they differ.
        """
        output = token_ids, logprobs
        first = self._outputs.get(key)
        if first is None:
            self._outputs[key] = output
        elif first == output:
            self.num_equal += 1
        else:
            raise DifferentOutputError(f"request {key} got {output}, and from the other arm {first}")


@dataclass(slots=True)
class Arm:
    """A scheduler with its executors."""

    name: str
    client: Client
    admin: AdminClient
    model: ModelInfo
    comparison: Comparison
    num_turns: int = 0  # equal turns of two arms have equal requests

    def tokens(self, num_tokens: int, *seed: int) -> list[int]:
        """Return random token ids."""
        allowed = ordinary_token_ids(self.model.vocab_size)
        drawn: list[int] = np.random.default_rng(seed).integers(allowed.start, allowed.stop, num_tokens).tolist()
        return drawn

    async def ask(
        self,
        key: Hashable,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        request_id: str | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Run a request to its end; its output must be that of the other arm's request with this key."""
        sent_s, times_s = time.perf_counter(), list[float]()
        stream = self.client.stream(
            prompt, request_id=request_id, temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    times_s.append(time.perf_counter())
                    on_token()
                elif isinstance(event, Finished):
                    [output], num_cached_tokens = event.outputs, event.usage.num_cached_tokens
        self.comparison.check(key, output.token_ids, output.logprobs)
        return Answer(sent_s, times_s, output.token_ids, num_cached_tokens)

    @asynccontextmanager
    async def running(self, prompt: Sequence[int], request_id: str, num_tokens: int) -> AsyncIterator[None]:
        """Keep a request decoding for the length of a block, which begins with its first token."""
        has_begun = asyncio.Event()

        async def run() -> None:
            async for event in self.client.stream(
                prompt, request_id=request_id, temperature=0.0, max_tokens=num_tokens, ignore_eos=True
            ):
                if isinstance(event, Delta):
                    has_begun.set()
            raise AssertionError("the request that keeps an executor busy has ended too early")

        request = asyncio.create_task(run())
        waiting = asyncio.create_task(has_begun.wait())
        try:
            await asyncio.wait((request, waiting), return_when=asyncio.FIRST_COMPLETED)
            assert has_begun.is_set(), f"the request has no token: {request}"
            yield
        finally:
            request.cancel()
            waiting.cancel()
            await asyncio.gather(request, waiting, return_exceptions=True)

    async def place_of(self, request_id: str) -> str:
        """Return the executor that a request ran on last, also after its end."""
        events = (await self.admin.get_request(request_id)).events
        return next(event.executor for event in reversed(events) if event.executor)

    async def until(self, holds: Callable[[Sequence[admin_pb2.ExecutorState]], bool]) -> None:
        """Return once something holds for the executors."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds((await self.admin.get_state()).executors):  # noqa: ASYNC110 - of what a service says
                await asyncio.sleep(LOOK_INTERVAL_S)


@asynccontextmanager
async def running_arms(
    comparison: Comparison, size: Size, num_executors: int, *executor_flags: str
) -> AsyncIterator[list[Arm]]:
    """Run all arms at once, warmed up; the executors of an arm share the cores."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_executors)
    flags = (
        *("--model", str(size.directory()), "--num-threads", str(num_threads)),
        *("--block-size-tokens", str(BLOCK_SIZE), *executor_flags, *QUIET),
    )
    async with AsyncExitStack() as stack:
        arms = []
        for name, scheduler_flags in comparison.flags.items():
            executors = [
                await stack.enter_async_context(running_service("executor_svc", *flags)) for _ in range(num_executors)
            ]
            addresses = ",".join(executor.address for executor in executors)
            scheduler = await stack.enter_async_context(
                running_service("scheduler_svc", "--executor", addresses, *scheduler_flags, *QUIET)
            )
            client = await stack.enter_async_context(Client(scheduler.address))
            admin = await stack.enter_async_context(AdminClient(scheduler.other_addresses["admin"]))
            await client.wait_until_ready(PATIENCE_S)
            arm = Arm(name, client, admin, await client.get_model(), comparison)
            await arm.until(lambda states: all(state.status == admin_pb2.EXECUTOR_STATUS_ATTACHED for state in states))
            warm_up = [client.generate(arm.tokens(40, 0, i), max_tokens=4) for i in range(2 * num_executors)]
            await asyncio.gather(*warm_up)
            arms.append(arm)
        yield arms


def in_turns(arms: Sequence[Arm], turn: Callable[[Arm], Awaitable[Figures]], what: str = "") -> list[Way]:
    """Return a turn of each arm, the second one compared with the first."""
    title = f"{what}, " if what else ""

    async def take(arm: Arm) -> Figures:
        figures = await turn(arm)
        arm.num_turns += 1
        return figures

    return [
        Way(f"{title}{arm.name}", partial(take, arm), f"{title}{WITHOUT}" if arm.name == WITH else "") for arm in arms
    ]
