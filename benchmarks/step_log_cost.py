"""What the step log costs the scheduler: CPU time of recording a step, beside what a step costs the process.

    python -m benchmarks.step_log_cost [--sequences 256] [--steps 400]

Two fleets decide and process the same steps in turns, one of them with a log whose records are made and written in the
same thread; the difference of a pair is what the log adds. Its share is of the CPU time that a step costs a scheduler
process with gRPC, a fake executor and as many streams of a client (`benchmarks.metrics_cost`).

A snapshot begins each file of a log: its time is spent on the event loop. The fleets cache prefixes: their blocks have
names, and those that nobody uses have too.
"""

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.machine import describe_machine
from benchmarks.metrics_cost import measure_service
from benchmarks.scheduler_core import BLOCK_SIZE, CONTEXT_TOKENS, limits_for
from scheduler_svc.core.dispatch.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.step_log.recording_fleet import RecordingFleet
from scheduler_svc.step_log.snapshot import Snapshot, dump
from scheduler_svc.step_log.writer import StepLogSettings, StepLogWriter
from shared.step import SamplingRow
from tests.support.toy_executor import NextToken, ToyExecutor


def count_up_in(vocab_size: int) -> NextToken:
    """Return the rule by which the next token is the last one and one more."""
    return lambda token_ids, output_index: (token_ids[-1] + 1) % vocab_size


class Side:
    """A fleet whose sequences decode; `writer` None: nobody records it."""

    def __init__(self, num_sequences: int, num_steps: int, writer: StepLogWriter | None) -> None:
        num_blocks_each = -(-(CONTEXT_TOKENS + num_steps + 2 * BLOCK_SIZE) // BLOCK_SIZE)
        limits = limits_for(num_sequences, 2 * num_blocks_each * num_sequences, num_blocks_each, budget=2**20)
        limits = dataclasses.replace(limits, prefix_caching=True, names_blocks=True)
        policy, queue = FcfsPolicy(), WaitingQueue(FcfsPolicy())
        self.writer = writer
        self.fleet = (
            Fleet(queue, policy, b"key")
            if writer is None
            else RecordingFleet(queue, policy, b"key", lambda: True, writer)
        )
        self.core = self.fleet.join(limits, 1)
        self.executor = ToyExecutor(limits, count_up_in(limits.vocab_size))
        for number in range(2 * num_sequences):  # the first ones end, and leave cached blocks behind
            prompt = ((number + np.arange(CONTEXT_TOKENS)) % limits.vocab_size).astype(np.int32)
            conditions = StopConditions(1 if number < num_sequences else None, ignore_eos=True)
            self.fleet.add(SequenceGroup(str(number), prompt, SamplingRow(), conditions, number))
        self.step_us()
        self.step_us()

    def step_us(self) -> float:
        """Decide and process a step; return the CPU microseconds of that, and of its records."""
        begin_ns = time.thread_time_ns()
        step = self.fleet.schedule(self.core, 0.0)[0].step
        decided_ns = time.thread_time_ns()
        assert step is not None
        result = self.executor.execute(step)
        executed_ns = time.thread_time_ns()
        self.fleet.process(self.core, result)
        if self.writer is not None:
            self.writer._write_pending()
        return (time.thread_time_ns() - executed_ns + decided_ns - begin_ns) / 1000


def measure_added(num_sequences: int, num_steps: int) -> tuple[float, float]:
    """Return the CPU microseconds that the log adds to a step, and its bytes a step."""
    with tempfile.TemporaryDirectory() as folder:
        writer = StepLogWriter(StepLogSettings(Path(folder), 2**30))
        writer._is_closing.set()  # its thread ends; records are made here
        writer._thread.join()
        writer._begin_file(writer.header(0.0))
        sides = [Side(num_sequences, 2 * num_steps, None), Side(num_sequences, 2 * num_steps, writer)]
        pairs = np.empty((num_steps, 2))
        num_bytes = writer._num_bytes
        for number in range(num_steps):
            for index in (0, 1) if number % 2 else (1, 0):
                pairs[number, index] = sides[index].step_us()
        assert writer.is_recording
        num_bytes = writer._num_bytes - num_bytes
    return float(np.median(pairs[:, 1] - pairs[:, 0])), num_bytes / num_steps


def measure_snapshot(num_sequences: int) -> tuple[float, int]:
    """Return the milliseconds of a snapshot of a fleet whose sequences decode, and its bytes."""
    side = Side(num_sequences, 8, None)
    times = []
    for _ in range(20):
        begin_s = time.thread_time()
        content = dump(Snapshot(side.fleet, (1,), {}))
        times.append(time.thread_time() - begin_s)
    return 1000 * statistics.median(times), content.ByteSize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of the step log in the scheduler.")
    parser.add_argument("--sequences", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="measured steps (default: %(default)s)")
    arguments = parser.parse_args()
    num_sequences = arguments.sequences
    console = Console()
    milliseconds, num_bytes = measure_snapshot(num_sequences)
    console.print(f"a snapshot takes {milliseconds:.1f} ms and has {num_bytes / 2**20:.2f} MiB before compression")
    added_us, step_bytes = measure_added(num_sequences, arguments.steps)
    service_us = asyncio.run(measure_service(num_sequences, arguments.steps))
    console.print(
        f"at {num_sequences} sequences the log adds {added_us:.0f} µs to a step of {service_us:,.0f} µs: "
        f"{added_us / service_us:.2%}, and {step_bytes:,.0f} bytes"
    )
    console.print(describe_machine())


if __name__ == "__main__":
    main()
