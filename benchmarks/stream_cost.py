"""What a token and a request cost the scheduler on one StreamRequests call, in CPU time of its process.

    python -m benchmarks.stream_cost [--requests 1024] [--tokens 257] [--rounds 5] [--step-ms 20] [--json FILE]

A fake executor makes the tokens; the caller takes token ids only. A round runs all requests at once for one token each,
and then for many: the first gives the cost of a request, and what the second adds, by the tokens that it adds, is the
cost of a token with all that the scheduler does for it: deciding the step, sending it, reading its result, delivering
it. Wall time has no part in it, so that other work on the machine shows little. Figures are medians over rounds.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console

import octavo
from benchmarks.front_cost import cpu_us
from benchmarks.machine import describe_machine
from octavo.outputs import Delta, FailedRequest
from tests.support.processes import running_service

MIN_TOKENS = 2
BLOCK_TOKENS = 16  # of the fake executor


class Round(BaseModel):
    """CPU time of the scheduler in one round, in microseconds; and how many messages the tokens came in."""

    model_config = ConfigDict(frozen=True)

    request_us: float
    token_us: float
    tokens_per_delta: float


class Result(BaseModel):
    """All rounds."""

    machine: str
    num_requests: int
    num_tokens: int
    step_ms: float
    rounds: list[Round]


async def measure(
    num_requests: int, num_tokens: int, num_rounds: int, step_ms: float, say: Callable[[str], None] = print
) -> Result:
    """Start the services and run the rounds."""
    seqs = ("--max-num-seqs", str(num_requests), "--log-level", "warning")
    blocks = ("--num-device-blocks", str(num_requests * (2 + num_tokens // BLOCK_TOKENS)))  # none is preempted
    async with running_service("executor_svc.fake", "--step-ms", str(step_ms), *blocks, *seqs) as executor:
        flags = ("--executor", executor.address, "--max-waiting-requests", str(2 * num_requests))
        async with (
            running_service("scheduler_svc", *flags, *seqs) as scheduler,
            octavo.Client(scheduler.address) as client,
        ):
            await client.wait_until_ready()
            pid = scheduler.process.pid
            await _run(client, pid, num_requests, MIN_TOKENS)  # a server's first requests are not what is measured
            rounds = []
            for number in range(num_rounds):
                short_us, _ = await _run(client, pid, num_requests, 1)
                long_us, num_deltas = await _run(client, pid, num_requests, num_tokens)
                rounds.append(
                    Round(
                        request_us=short_us / num_requests,
                        token_us=(long_us - short_us) / (num_requests * (num_tokens - 1)),
                        tokens_per_delta=num_requests * num_tokens / num_deltas,
                    )
                )
                token_us, request_us = rounds[-1].token_us, rounds[-1].request_us
                say(f"round {number + 1}: a token {token_us:.2f} µs, a request {request_us:.0f} µs")
    return Result(
        machine=describe_machine(), num_requests=num_requests, num_tokens=num_tokens, step_ms=step_ms, rounds=rounds
    )


async def _run(client: octavo.Client, pid: int, num_requests: int, num_tokens: int) -> tuple[float, int]:
    """Run requests; return the scheduler's CPU time in microseconds, and the number of deltas.

    Raises: RuntimeError: a request failed, so that nothing can be compared.
    """
    # Different beginnings: the fake executor cannot tell equal histories apart.
    prompts = [[33 + number % 94, 33 + number // 94 % 94, 40, 41] for number in range(num_requests)]
    before_us, num_deltas = cpu_us(pid), 0
    events = client.stream_many(
        prompts, temperature=0, max_tokens=num_tokens, ignore_eos=True, include_text=False, max_in_flight=num_requests
    )
    async for _, event in events:
        num_deltas += isinstance(event, Delta)
        if isinstance(event, FailedRequest):
            raise RuntimeError(f"a request failed: {event.error}")
    return cpu_us(pid) - before_us, num_deltas


def summary(result: Result) -> str:
    """Return the figures in a sentence."""
    token, request, grown = (
        statistics.median(values)
        for values in zip(
            *((each.token_us, each.request_us, each.tokens_per_delta) for each in result.rounds), strict=True
        )
    )
    return (
        f"{result.num_requests} requests on one stream: {token:.2f} µs of the scheduler's CPU a token, "
        f"{request:.0f} µs a request, {grown:.2f} tokens a delta; median of {len(result.rounds)} rounds. "
        f"{result.machine}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of the scheduler for tokens and requests of one stream.")
    parser.add_argument("--requests", type=int, default=1024, help="how many run at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=257, help="of each request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the fake executor (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    if options.tokens < MIN_TOKENS:
        parser.error(f"--tokens is {options.tokens}; it must be at least {MIN_TOKENS}")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    result = asyncio.run(measure(options.requests, options.tokens, options.rounds, options.step_ms, say=console.print))
    console.print(summary(result))
    if options.json is not None:
        options.json.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
