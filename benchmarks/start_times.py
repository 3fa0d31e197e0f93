"""How long processes take to start, and how long streams rest when the core is killed.

    python -m benchmarks.start_times [--streams 200] [--fronts 2] [--rounds 5] [--model DIR] [--json FILE]

Times are seconds from the start of a process until it serves: an executor says so, and a scheduler is ready for
requests then, with its fronts and an executor. Then streams run through the fronts, and the core is killed under them:
each has a gap up to its first token behind that. A new core is there when its process is; the gap from then on is what
its start costs. With `--model`, an executor with that model as well, and beside it how long `import torch` takes.
Figures are medians over rounds.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console

import octavo
from benchmarks.machine import describe_machine
from octavo.outputs import Delta
from scheduler_svc.kept_process import LONGEST_PAUSE_S
from tests.support.processes import Service, children_of, running_service, start_service

NUM_WARM_UP_TOKENS = 20
BLOCK_TOKENS = 16  # of the fake executor
NUM_TOKENS = 2_000  # of a stream: more than it has time for
LOOK_INTERVAL_S = 0.002
REST_S = 0.1  # without a token: the last ones of the core that is gone have come
PATIENCE_S = 60.0


class Gaps(BaseModel):
    """What streams saw of a killed core, in seconds.

    Attributes:
        until_process_s: From SIGKILL to the process of the next core.
        longest_s: From SIGKILL to the first token of the last stream to have one.
        after_start_s: From the next core's process to there.
    """

    model_config = ConfigDict(frozen=True)

    until_process_s: float
    longest_s: float
    after_start_s: float


class Result(BaseModel):
    """All figures; start times by what is started."""

    machine: str
    num_streams: int
    num_fronts: int
    starts_s: dict[str, list[float]]
    gaps: list[Gaps]


async def measure(
    num_streams: int, num_fronts: int, num_rounds: int, model: str | None, say: Callable[[str], None] = print
) -> Result:
    """Start everything, and kill cores."""
    starts = {}

    async def note(name: str, start: Callable[[], Awaitable[float]]) -> None:
        starts[name] = [await start() for _ in range(num_rounds)]
        say(f"{name}: {statistics.median(starts[name]):.2f} s")

    seqs = ("--max-num-seqs", str(num_streams), "--log-level", "warning")
    blocks = ("--num-device-blocks", str(num_streams * (NUM_TOKENS // BLOCK_TOKENS + 2)))
    await note("fake executor", lambda: seconds_to_serve("executor_svc.fake"))
    async with running_service("executor_svc.fake", "--step-ms", "10", *blocks, *seqs) as executor:
        flags = ("--executor", executor.address, *seqs)
        await note("scheduler", lambda: seconds_to_serve("scheduler_svc", *flags))
        fronts = ("--fronts", str(num_fronts))
        await note(f"scheduler with {num_fronts} fronts", lambda: seconds_to_serve("scheduler_svc", *flags, *fronts))
        async with running_service("scheduler_svc", *flags, *fronts) as scheduler:
            gaps = await gaps_of(scheduler, num_streams, num_rounds)
    if model is not None:
        await note("import torch", seconds_to_import_torch)
        await note("executor with the model", lambda: seconds_to_serve("executor_svc", "--model", model))
    return Result(
        machine=describe_machine(), num_streams=num_streams, num_fronts=num_fronts, starts_s=starts, gaps=gaps
    )


async def seconds_to_serve(module: str, *flags: str) -> float:
    """Start a service and end it; return how long it took to serve."""
    began_s = time.monotonic()
    service = await start_service(module, *flags, "--log-level", "warning")
    if module == "scheduler_svc":
        async with octavo.Client(service.address) as client:
            await client.wait_until_ready(PATIENCE_S)
    elif module == "executor_svc":
        assert service.process.stdout is not None
        while b"serving on" not in await service.process.stdout.readline():  # it has listened before
            pass
    took_s = time.monotonic() - began_s
    await service.terminate()
    return took_s


async def seconds_to_import_torch() -> float:
    """Return how long a process takes that does nothing else."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", "import torch")
    assert await process.wait() == 0
    return time.monotonic() - began_s


async def gaps_of(scheduler: Service, num_streams: int, num_rounds: int) -> list[Gaps]:
    """Kill the core under new streams, once a round."""
    gaps = []
    async with octavo.Client(scheduler.address) as one, octavo.Client(scheduler.address) as two:
        await one.wait_until_ready()
        for _ in range(num_rounds):
            await asyncio.sleep(LONGEST_PAUSE_S)  # who is killed again and again is started later
            async with asyncio.timeout(PATIENCE_S):
                gaps.append(await gap_of(scheduler, [(one, two)[number % 2] for number in range(num_streams)]))
    return gaps


async def gap_of(scheduler: Service, clients: Sequence[octavo.Client]) -> Gaps:
    """Kill the core under a stream of each client; return what they saw."""
    last_token_s: dict[int, float] = {}
    num_tokens = dict.fromkeys(range(len(clients)), 0)

    async def read(client: octavo.Client, number: int) -> None:
        prompt = [33 + number % 94, 33 + number // 94 % 94, 40, 41]  # the fake cannot tell equal histories apart
        async for event in client.stream(prompt, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True):
            if isinstance(event, Delta):
                last_token_s[number] = time.monotonic()
                num_tokens[number] += 1

    reading = [asyncio.create_task(read(client, number)) for number, client in enumerate(clients)]
    try:
        await until(lambda: min(num_tokens.values()) >= NUM_WARM_UP_TOKENS)
        return await gap_of_kill(scheduler, last_token_s, len(clients))
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def gap_of_kill(scheduler: Service, last_token_s: dict[int, float], num_streams: int) -> Gaps:
    """Kill the core; return what the streams saw."""
    [core] = children_of(scheduler.process.pid, "scheduler_svc.core_process")
    os.kill(core, signal.SIGKILL)
    killed_s = time.monotonic()
    await until(lambda: children_of(scheduler.process.pid, "scheduler_svc.core_process") not in ([], [core]))
    started_s = time.monotonic()
    await until(lambda: time.monotonic() - max(last_token_s.values()) > REST_S)
    last_token_s.clear()
    await until(lambda: len(last_token_s) == num_streams)
    longest_s = max(last_token_s.values()) - killed_s
    return Gaps(
        until_process_s=started_s - killed_s, longest_s=longest_s, after_start_s=killed_s + longest_s - started_s
    )


async def until(holds: Callable[[], bool]) -> None:
    """Return once something holds."""
    while not holds():  # noqa: ASYNC110 - of what a process or a clock says
        await asyncio.sleep(LOOK_INTERVAL_S)


def summary(result: Result) -> str:
    """Return the figures in sentences."""
    starts = ", ".join(f"{name} {statistics.median(times):.2f} s" for name, times in result.starts_s.items())
    longest = statistics.median(gaps.longest_s for gaps in result.gaps)
    after_start = statistics.median(gaps.after_start_s for gaps in result.gaps)
    return (
        f"{starts}. A killed core under {result.num_streams} streams through {result.num_fronts} fronts: all have a "
        f"token {longest:.2f} s after it, {after_start:.2f} s after the start of the next one; medians of "
        f"{len(result.gaps)} rounds. {result.machine}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Start times, and the gap of streams when the core is killed.")
    parser.add_argument("--streams", type=int, default=200, help="while the core is killed (default: %(default)s)")
    parser.add_argument("--fronts", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--model", metavar="DIR", help="start an executor with it as well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    running = measure(options.streams, options.fronts, options.rounds, options.model, say=console.print)
    result = asyncio.run(running)
    console.print(summary(result))
    if options.json is not None:
        options.json.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
