"""Scenarios of the scheduler: metrics and log lines, and the step log."""

import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial

from benchmarks.costs.harness import Figures, Groups, Size, Way, scenario
from benchmarks.costs.services import QUIET, load, until_ready
from tests.support.processes import running_service

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
                service_us, _, _ = await load(scheduler, "native", num_sequences, num_sequences, num_tokens)
                assert await scheduler.terminate() == 0
        times = json.load(file)
    return times["calls"], times["us"], service_us - times["cost_us"]
