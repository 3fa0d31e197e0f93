"""How long an executor waits between two steps, over gRPC.

    python -m benchmarks.step_gap [--step-ms 10,3] [--round-trip-ms 0,1,5] [--sequences 32,256,1024]
                                  [--steps-in-flight auto] [--streamed] [--fronts 0] [--seconds 4] [--json FILE]

Scheduler and executor are the real services in two processes; the worker sleeps for the length of a step. All
sequences decode. They are outputs of requests with best_of = 16, so that nothing is sent to a client before the end;
with --streamed each is a stream of its own, which this process reads. A proxy in a third process adds the round trip,
half of it each way. With --fronts the clients' calls are held by so many processes beside the scheduler's core; the
streams are spread over four connections for each.

A gap is the time between the end of a step and the begin of the next one by the executor's own clock; idle is
the sum of the gaps as a share of the whole time. "result to step" is the scheduler's own time from the arrival of a
result to the begin of the write of the next step: the upper end of the bucket of its histogram that holds 99 % of them.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import track
from rich.table import Table

import octavo
from benchmarks.front_cost import cpu_us
from benchmarks.machine import describe_machine
from benchmarks.step_gap.executor import open_record
from tests.support.processes import Service, children_of, running_service

OUTPUTS_PER_REQUEST = 16  # best_of; one is returned
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
WARM_UP_S = 1.0
POLL_S = 0.1
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: length of a step, round trip, sequences, the value of --steps-in-flight, streams or not."""

    step_ms: float
    round_trip_ms: float
    num_sequences: int
    steps_in_flight: str
    is_streamed: bool = False
    num_fronts: int = 0


@dataclass(frozen=True, slots=True)
class Gaps:
    """What came out of a case.

    Attributes:
        idle_share: Of the executor's time, 0 to 1.
        gap_us: Median of the gaps.
        gap_p99_us: Their 99th percentile.
        measured_step_ms: What a step took, median.
        num_steps: How many were measured.
        scheduler_us: CPU time for a step of the process that decides it; with fronts it is their core.
        fronts_us: CPU time of the fronts for a step.
        turnaround_p99_ms: From a result to the next step, 99th percentile, rounded up to the end of a bucket.
        executor_us: CPU time of the executor's process for a step.
    """

    case: Case
    idle_share: float
    gap_us: float
    gap_p99_us: float
    measured_step_ms: float
    num_steps: int
    scheduler_us: float
    fronts_us: float
    turnaround_p99_ms: float
    executor_us: float


async def measure(case: Case, seconds: float) -> Gaps:
    """Start the services, let all sequences decode for a while, and stop them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps"
        async with contextlib.AsyncExitStack() as stack:
            scheduler, executor = await stack.enter_async_context(running_stack(case, path))
            clients = [
                await stack.enter_async_context(octavo.Client(scheduler.address))
                for _ in range(max(1, 4 * case.num_fronts))
            ]
            await clients[0].wait_until_ready()
            num_tokens = min(MAX_MODEL_LEN - 64, int(1.5 * (seconds + WARM_UP_S) * 1000 / case.step_ms) + 200)
            with requests(clients, case, num_tokens):
                record = open_record(path, is_new=False)
                await _all_decode(record, case.num_sequences)
                await asyncio.sleep(WARM_UP_S)
                first, before = _num_steps(record), await _used(scheduler, executor)
                await asyncio.sleep(seconds)
                last, after = _num_steps(record), await _used(scheduler, executor)
                steps = np.array(record[first:last])
    assert (steps["num_active"] == case.num_sequences).all(), "a sequence ended before the measurement did"
    return gaps_of(case, steps, before, after)


@dataclass(frozen=True, slots=True)
class Used:
    """What had been used up to a moment: CPU seconds of processes, and steps by how soon they followed a result."""

    scheduler_s: float
    fronts_s: float
    executor_s: float
    turnarounds: dict[float, float]


def gaps_of(case: Case, steps: npt.NDArray[np.void], before: Used, after: Used) -> Gaps:
    """Return the figures of recorded steps, [n] of `STEP_TIMES`, and of what they used."""
    gaps_us = (steps["begin_ns"][1:] - steps["end_ns"][:-1]) / 1000
    return Gaps(
        case,
        idle_share=float(gaps_us.sum() * 1000 / (steps["end_ns"][-1] - steps["end_ns"][0])),
        gap_us=float(np.median(gaps_us)),
        gap_p99_us=float(np.percentile(gaps_us, 99)),
        measured_step_ms=float(np.median(steps["end_ns"] - steps["begin_ns"])) / 1e6,
        num_steps=len(steps),
        scheduler_us=(after.scheduler_s - before.scheduler_s) * 1e6 / len(steps),
        fronts_us=(after.fronts_s - before.fronts_s) * 1e6 / len(steps),
        turnaround_p99_ms=_p99_ms(before.turnarounds, after.turnarounds),
        executor_us=(after.executor_s - before.executor_s) * 1e6 / len(steps),
    )


def _p99_ms(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return the upper bound of the bucket that holds 99 %, of cumulative counts by bound in seconds."""
    counts = {bound: after[bound] - before.get(bound, 0) for bound in sorted(after)}
    num_all = counts[math.inf]
    return next((bound * 1000 for bound, count in counts.items() if count >= 0.99 * num_all), math.inf)


@contextlib.asynccontextmanager
async def running_stack(case: Case, record: Path) -> AsyncIterator[tuple[Service, Service]]:
    """Run scheduler and executor, with a proxy between them if there is a round trip to add."""
    executor_flags = {
        "--record": record,
        "--step-ms": case.step_ms,
        "--max-num-seqs": case.num_sequences,
        "--max-model-len": MAX_MODEL_LEN,
        "--block-size-tokens": BLOCK_SIZE,
        "--num-device-blocks": case.num_sequences * MAX_MODEL_LEN // BLOCK_SIZE,
        "--log-level": "warning",
    }
    async with contextlib.AsyncExitStack() as stack:
        executor = await stack.enter_async_context(
            running_service("benchmarks.step_gap.executor", *_words(executor_flags))
        )
        address = executor.address
        if case.round_trip_ms:
            proxy_flags = {"--target": address, "--round-trip-ms": case.round_trip_ms}
            proxy = running_service("benchmarks.step_gap.delay_proxy", *_words(proxy_flags))
            address = (await stack.enter_async_context(proxy)).address
        scheduler_flags = {
            "--executor": address,
            "--steps-in-flight": case.steps_in_flight,
            "--fronts": case.num_fronts,
            "--metrics-listen": "127.0.0.1:0",
            "--log-level": "warning",
        }
        scheduler = await stack.enter_async_context(running_service("scheduler_svc", *_words(scheduler_flags)))
        yield scheduler, executor


@contextlib.contextmanager
def requests(clients: Sequence[octavo.Client], case: Case, num_tokens: int) -> Iterator[None]:
    """Have the sequences of a case generated, each so many tokens; give up what is not done at the end."""
    num_outputs = 1 if case.is_streamed else OUTPUTS_PER_REQUEST
    params = octavo.SamplingParams(best_of=num_outputs, n=1, max_tokens=num_tokens, ignore_eos=True)
    tasks = [
        asyncio.create_task(clients[number % len(clients)].generate([33 + number % 90, 33 + number // 90], params))
        for number in range(case.num_sequences // num_outputs)
    ]
    try:
        yield
        assert not any(task.done() for task in tasks), "a request ended before the measurement did"
    finally:
        for task in tasks:
            task.cancel()


async def _all_decode(record: npt.NDArray[np.void], num_sequences: int) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not (record["num_active"] == num_sequences).any():  # noqa: ASYNC110  # another process writes it
            await asyncio.sleep(POLL_S)


def _num_steps(record: npt.NDArray[np.void]) -> int:
    return int(np.count_nonzero(record["end_ns"]))


async def _used(scheduler: Service, executor: Service) -> Used:
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"http://{scheduler.other_addresses['metrics']}/metrics")
        families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    turnarounds = {
        float(sample.labels["le"]): sample.value
        for sample in families["octavo_step_turnaround_seconds"].samples
        if "le" in sample.labels
    }
    core, fronts = core_and_fronts(scheduler)
    return Used(cpu_us(core) / 1e6, sum(map(cpu_us, fronts)) / 1e6, cpu_us(executor.process.pid) / 1e6, turnarounds)


def core_and_fronts(scheduler: Service) -> tuple[int, list[int]]:
    """Return the process that decides steps, and those that hold the streams, if these are others (Linux)."""
    pid = scheduler.process.pid
    cores, fronts = (children_of(pid, f"scheduler_svc.{module}") for module in ("core_process", "front_process"))
    return (cores[0] if cores else pid), fronts


def _words(flags: Mapping[str, object]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


def gap_table(gaps: list[Gaps]) -> Table:
    """Return the table that is printed."""
    what = "every sequence streamed" if gaps[0].case.is_streamed else "nothing streamed"
    table = Table(title=f"Executor between two steps, {what}")
    headings: tuple[str, ...] = (
        "step",
        "round trip",
        "sequences",
        "in flight",
        "fronts",
        "idle",
        "gap µs",
        "p99",
        "result to step",
    )
    headings += ("scheduler µs", "fronts µs", "executor µs")
    for heading in headings:
        table.add_column(heading, justify="right")
    for found in gaps:
        case = found.case
        table.add_row(
            f"{case.step_ms:g} ms",
            f"{case.round_trip_ms:g} ms",
            f"{case.num_sequences:,}",
            case.steps_in_flight,
            str(case.num_fronts),
            f"{found.idle_share:.1%}",
            f"{found.gap_us:,.0f}",
            f"{found.gap_p99_us:,.0f}",
            f"{found.turnaround_p99_ms:g} ms",
            f"{found.scheduler_us:,.0f}",
            f"{found.fronts_us:,.0f}",
            f"{found.executor_us:,.0f}",
        )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time between two steps of an executor, over gRPC.")
    parser.add_argument("--step-ms", default="10,3", help="length of a step (default: %(default)s)")
    parser.add_argument("--round-trip-ms", default="0,1,5", help="added to the connection (default: %(default)s)")
    parser.add_argument("--sequences", default="32,256,1024", help="multiples of 16 (default: %(default)s)")
    parser.add_argument("--steps-in-flight", default="auto", help="of the scheduler (default: %(default)s)")
    parser.add_argument("--streamed", action="store_true", help="each sequence is a stream of its own")
    parser.add_argument("--fronts", default="0", help="processes that hold the streams (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured for each case (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    cases = [
        Case(
            float(step_ms),
            float(round_trip_ms),
            int(num_sequences),
            steps_in_flight,
            arguments.streamed,
            int(num_fronts),
        )
        for num_fronts, steps_in_flight, step_ms, num_sequences, round_trip_ms in itertools.product(
            arguments.fronts.split(","),
            arguments.steps_in_flight.split(","),
            arguments.step_ms.split(","),
            arguments.sequences.split(","),
            arguments.round_trip_ms.split(","),
        )
    ]
    console = Console()
    gaps = [
        asyncio.run(measure(case, arguments.seconds))
        for case in track(cases, "measuring", console=console, transient=True)
    ]
    console.print(gap_table(gaps))
    console.print(describe_machine())
    if arguments.json is not None:
        figures = {"machine": describe_machine(), "gaps": [dataclasses.asdict(found) for found in gaps]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
