"""What other ways cost the scheduler beside native calls: CPU time of a streamed message, and of a request.

    python -m benchmarks.front_cost [--pairs 10] [--json FILE]

One scheduler with a fake executor serves all. `octavo bench` sends the same load by each way in turns (a call for each
request, one stream of requests, OpenAI's API): requests of one token, then of many. The first give the cost of a
request; what the others add, by the messages that they add, is the cost of a message, with all that the engine does for
a token; on one stream it is a request's part of a message. The native ways get prompts of token ids, OpenAI's gets
text, as in `octavo bench`: a request has its tokenization too.

A pair is one turn of each way, in the other order than the one before. What counts is the CPU time of the scheduler's
process, all threads, so that other work on the machine shows little; the figures are medians over pairs of the
difference and of the ratio, with the interval that holds the true median with 95 %, whatever the distribution is.
"""

import argparse
import asyncio
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.markdown import Markdown

import octavo
from benchmarks.machine import describe_machine
from tests.support.processes import Service, running_service

NATIVE = "native"
ONE_STREAM = "one stream"
WAYS = (NATIVE, ONE_STREAM, "completions", "chat")
CONCURRENCY = 16
NUM_SHORT, SHORT_TOKENS = 1000, 1
NUM_LONG, LONG_TOKENS = 200, 64
# Tokens come one by one, as from a model, so that there is a message for each that has text.
STEP_MS = 4
# A server in its first requests is not what is measured.
NUM_WARM_UP = 50
# With fewer the interval is wider than all pairs.
MIN_PAIRS = 6
_DOUBT = 0.05


@dataclass(frozen=True, slots=True)
class _Run:
    """What one load cost, in microseconds, and how many messages with text or tokens it brought."""

    cpu_us: float
    num_messages: int
    num_tokens: int


class Turn(BaseModel):
    """What one way cost in one pair, in microseconds of CPU time."""

    model_config = ConfigDict(frozen=True)

    request_us: float
    message_us: float
    messages_per_token: float


class Result(BaseModel):
    """All pairs: turn by way."""

    machine: str
    pairs: list[dict[str, Turn]]


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % interval by the order of the values (binomial)."""
    ordered, number = sorted(values), len(values)
    below = 0
    while sum(math.comb(number, count) for count in range(below + 1)) / 2**number <= _DOUBT / 2:
        below += 1
    first = max(0, below - 1)
    return statistics.median(ordered), ordered[first], ordered[number - 1 - first]


async def measure(
    num_pairs: int, num_short: int = NUM_SHORT, num_long: int = NUM_LONG, say: Callable[[str], None] = print
) -> Result:
    """Start the services and let the ways take turns."""
    executor_flags = ("--step-ms", str(STEP_MS), "--max-num-seqs", str(CONCURRENCY), "--log-level", "warning")
    async with running_service("executor_svc.fake", *executor_flags) as executor:
        flags = ("--executor", executor.address, "--openai-listen", "127.0.0.1:0", "--log-level", "warning")
        async with running_service("scheduler_svc", *flags) as scheduler:
            async with octavo.Client(scheduler.address) as client:
                await client.wait_until_ready()
            for way in WAYS:
                await _run(scheduler, way, SHORT_TOKENS, NUM_WARM_UP)
            pairs: list[dict[str, Turn]] = []
            for number in range(num_pairs):
                order = WAYS if number % 2 else WAYS[::-1]
                turns = {way: await _turn(scheduler, way, num_short, num_long) for way in order}
                pairs.append(turns)
                costs = (f"{way} {turns[way].message_us:.0f} µs, {turns[way].request_us:.0f} µs" for way in WAYS)
                say(f"pair {number + 1}, a message and a request: {'; '.join(costs)}")
    return Result(machine=describe_machine(), pairs=pairs)


async def _turn(scheduler: Service, way: str, num_short: int, num_long: int) -> Turn:
    short = await _run(scheduler, way, SHORT_TOKENS, num_short)
    long = await _run(scheduler, way, LONG_TOKENS, num_long)
    share = num_long / num_short
    num_messages = long.num_messages - share * short.num_messages
    return Turn(
        request_us=short.cpu_us / num_short,
        message_us=(long.cpu_us - share * short.cpu_us) / num_messages,
        messages_per_token=num_messages / (long.num_tokens - share * short.num_tokens),
    )


async def _run(scheduler: Service, way: str, num_tokens: int, num_requests: int) -> _Run:
    """Send a load. Raises RuntimeError: not all of it was answered."""
    if way in (NATIVE, ONE_STREAM):
        target = ["--address", scheduler.address, *(["--one-stream"] if way == ONE_STREAM else [])]
    else:
        target = ["--openai", f"http://{scheduler.other_addresses['openai']}/v1", "--openai-api", way]
    load = {"concurrency": CONCURRENCY, "num-requests": num_requests, "input-len": 4, "output-len": num_tokens}
    flags = [part for name, value in load.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-P", "-m", "octavo.cli", "bench", *target, *flags]
        before_us = cpu_us(scheduler.process.pid)
        bench = await asyncio.create_subprocess_exec(
            *command, "--json", str(path), "--samples", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await bench.communicate()
        spent_us = cpu_us(scheduler.process.pid) - before_us
        if bench.returncode:
            raise RuntimeError(f"octavo bench failed: {output.decode(errors='replace')}")
        samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
    if any(sample["outcome"] != "completed" for sample in samples):
        raise RuntimeError("a request failed, so that nothing can be compared")
    num_messages = sum(len(sample["event_times_s"]) for sample in samples)
    return _Run(spent_us, num_messages, sum(sample["num_output_tokens"] for sample in samples))


def cpu_us(pid: int) -> float:
    """Return the CPU time of the threads of a process, from Linux's scheduler."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text(encoding="ascii").split()[0]) for path in paths) / 1000


def comparison(result: Result) -> str:
    """Return the table as Markdown."""
    lines = ["| | native | other | difference (95 %) | ratio (95 %) |", "|---|---:|---:|---:|---:|"]
    for way in WAYS[1:]:
        lines.append(_line(f"a streamed message, {way}", "µs", result, way, lambda turn: turn.message_us))
        lines.append(_line(f"a request, {way}", "ms", result, way, lambda turn: turn.request_us / 1000))
    per_token = {
        way: statistics.median(pair[way].messages_per_token for pair in result.pairs) for way in result.pairs[0]
    }
    messages = ", ".join(f"{way} {per_token[way]:.2f}" for way in WAYS)
    return "\n".join(lines) + f"\n\nMessages per token: {messages}. {len(result.pairs)} pairs. {result.machine}."


def _line(name: str, unit: str, result: Result, way: str, cost: Callable[[Turn], float]) -> str:
    natives = [cost(pair[NATIVE]) for pair in result.pairs]
    others = [cost(pair[way]) for pair in result.pairs]
    differences = median_interval([other - native for other, native in zip(others, natives, strict=True)])
    ratios = median_interval([other / native for other, native in zip(others, natives, strict=True)])
    digits = 0 if unit == "µs" else 2
    shown = [f"{statistics.median(values):.{digits}f} {unit}" for values in (natives, others)]
    difference = "{:+.{d}f} {u} ({:+.{d}f} to {:+.{d}f})".format(*differences, d=digits, u=unit)
    return f"| {name} | {shown[0]} | {shown[1]} | {difference} | {{:.2f}} ({{:.2f}} to {{:.2f}}) |".format(*ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of other ways in the scheduler, beside native calls.")
    parser.add_argument("--pairs", type=int, default=10, help=f"at least {MIN_PAIRS} (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs is {options.pairs}; it must be at least {MIN_PAIRS}")
    console = Console(highlight=False, markup=False, soft_wrap=True)
    result = asyncio.run(measure(options.pairs, say=console.print))
    console.print(Markdown(comparison(result)))
    if options.json is not None:
        options.json.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
