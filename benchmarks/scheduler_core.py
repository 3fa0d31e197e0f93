"""CPU time of the scheduler's core alone: no model, no executor, no RPC.

    python -m benchmarks.scheduler_core [--sequences 32,256,1024,4096] [--steps 200] [--json FILE]

Steady decode: so many sequences with contexts around 500 tokens, one step ahead, so that `schedule`
sees one step in flight, as in service. Once with free blocks at hand, and once with a pool in which
every free block holds a cached prefix, so that each new block evicts one.

Admission: prompts that are queued, admitted, computed and ended after their first token, with the
hashes of the prefix cache. Cold: nothing is cached. Warm: the same prompts again.

All figures are CPU time of the calling thread, so other load shows little. Results are made up
outside of the timed parts.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from octavo_shared.step_wire.step import SamplingRow, Step, StepResult
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions

NUM_SEQUENCES = (32, 256, 1024, 4096)
BLOCK_SIZE = 16
CONTEXT_TOKENS = 500  # in the middle of the measured steps
NUM_STEPS = 200
NUM_WARM_UP_STEPS = 16
NUM_PROMPTS = 1000
PROMPT_TOKENS = 512
MAX_NUM_BATCHED_TOKENS = 16_384
VOCAB_SIZE = 32_000
EOS_TOKEN_ID = 2
FIRST_ORDINARY_ID = 3  # no sampled token ends a sequence

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """CPU microseconds of a call over the measured steps."""

    median: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(float(np.median(values)), float(np.percentile(values, 99)))

    def __str__(self) -> str:
        return f"{self.median:,.0f} ({self.p99:,.0f})"


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """What a step costs in which all sequences decode."""

    num_sequences: int
    evicts: bool
    schedule_us: Spread
    process_us: Spread
    total_us: Spread


@dataclass(frozen=True, slots=True)
class AdmissionCost:
    """What prompts cost from the queue to their first token."""

    wave: str
    num_prompts: int
    us_per_prompt_token: float
    us_per_prompt: float


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return what a call returns, and its CPU microseconds in this thread."""
    started = time.thread_time_ns()
    returned = function(*args, **kwargs)
    return returned, (time.thread_time_ns() - started) / 1000


class CoreBench:
    """A core with its queue, and made-up results for its steps."""

    def __init__(self, limits: CoreLimits) -> None:
        policy = FcfsPolicy()
        self.queue = WaitingQueue(policy)
        self.planner = ExecutorPlanner(limits, self.queue, policy, prefix_key=b"benchmark")
        self._generator = np.random.default_rng(0)
        self._arrivals = count()

    def random_tokens(self, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def group(self, num_prompt_tokens: int, max_tokens: int | None) -> SequenceGroup:
        """Return a group with a random prompt."""
        return SequenceGroup(
            request_id="",
            prompt_token_ids=self.random_tokens(num_prompt_tokens),
            sampling=SamplingRow(),
            stop_conditions=StopConditions(max_tokens),
            arrival=next(self._arrivals),
        )

    def again(self, group: SequenceGroup) -> SequenceGroup:
        """Return a new group with the same prompt."""
        return dataclasses.replace(group, arrival=next(self._arrivals), has_run=False, beams=None)

    def add(self, groups: list[SequenceGroup]) -> None:
        for group in groups:
            self.queue.add(group)

    def schedule(self) -> Step:
        step = self.planner.schedule(0.0).step
        assert step is not None, "there is nothing to do"
        return step

    def next_result(self) -> StepResult:
        """Return a result for the oldest step in flight."""
        sent = self.planner.in_flight[0]
        return StepResult(self.planner.epoch, sent.step.step_id, self.random_tokens(len(sent.layout.sample_slots)))

    def run_until_idle(self) -> None:
        """Run all groups to their end."""
        while self.planner.schedule(0.0).step is not None:
            self.planner.process(self.next_result())

    def run_until_decoding(self) -> None:
        """Run until every sequence of the queue decodes; one step is in flight then."""
        while len(self.queue) or self.planner.prefills.running:
            self.schedule()
            self.planner.process(self.next_result())
        self.schedule()


def measure_decode(num_sequences: int, num_steps: int, *, evicts: bool) -> DecodeCost:
    """Measure steps of sequences whose lengths are spread over a block, so that each step opens 1 block in 16."""
    first_tokens = max(BLOCK_SIZE, CONTEXT_TOKENS - num_steps // 2 - NUM_WARM_UP_STEPS)
    num_blocks_each = -(-(first_tokens + 2 * BLOCK_SIZE + NUM_WARM_UP_STEPS + num_steps) // BLOCK_SIZE)
    # All prompts are computed in one step, so that the lengths stay spread.
    bench = CoreBench(limits_for(num_sequences, num_blocks_each * num_sequences, num_blocks_each, budget=2**31 - 1))
    if evicts:
        fill_with_cached_blocks(bench, num_sequences, num_blocks_each)
    bench.add([bench.group(first_tokens + index % BLOCK_SIZE, max_tokens=None) for index in range(num_sequences)])
    bench.run_until_decoding()
    num_opened = {num_sequences // BLOCK_SIZE, -(-num_sequences // BLOCK_SIZE)}
    times: list[tuple[float, float]] = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        step, schedule_us = timed(bench.schedule)
        assert len(step.delta.appended_blocks) in num_opened
        result = bench.next_result()
        updates, process_us = timed(bench.planner.process, result)
        assert len(updates.sequences) == num_sequences
        times.append((schedule_us, process_us))
    assert not any(bench.planner.preemption.num_preemptions.values())
    measured = times[NUM_WARM_UP_STEPS:]
    return DecodeCost(
        num_sequences,
        evicts,
        schedule_us=Spread.of([schedule_us for schedule_us, _ in measured]),
        process_us=Spread.of([process_us for _, process_us in measured]),
        total_us=Spread.of([schedule_us + process_us for schedule_us, process_us in measured]),
    )


def limits_for(num_sequences: int, num_blocks: int, num_blocks_each: int, budget: int) -> CoreLimits:
    """Return limits of so many sequences, each of at most `num_blocks_each`."""
    return CoreLimits(
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(budget, num_sequences),
        max_model_len=num_blocks_each * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        eos_token_ids=(EOS_TOKEN_ID,),
        watermark=0.0,
    )


def fill_with_cached_blocks(bench: CoreBench, num_groups: int, num_blocks_each: int) -> None:
    """Run groups to their end that leave every block of the pool free, with a prefix in it."""
    allocator = bench.planner.blocks.allocator
    bench.add([bench.group(num_blocks_each * BLOCK_SIZE - 1, max_tokens=1) for _ in range(num_groups)])
    bench.run_until_idle()
    while allocator.num_cached_blocks < allocator.num_blocks:
        num_blocks = min(num_blocks_each - 1, allocator.num_blocks - allocator.num_cached_blocks)
        bench.add([bench.group(num_blocks * BLOCK_SIZE, max_tokens=1)])
        bench.run_until_idle()


def measure_admission(num_prompts: int, num_prompt_tokens: int) -> list[AdmissionCost]:
    """Measure a wave of prompts that nobody has seen, and the same wave again."""
    num_blocks_each = -(-(num_prompt_tokens + 1) // BLOCK_SIZE)
    bench = CoreBench(
        limits_for(num_prompts, 2 * num_blocks_each * num_prompts, num_blocks_each, MAX_NUM_BATCHED_TOKENS)
    )
    cold = [bench.group(num_prompt_tokens, max_tokens=1) for _ in range(num_prompts)]
    warm = [bench.again(group) for group in cold]
    return [measure_wave(bench, "cold", cold), measure_wave(bench, "warm", warm)]


def measure_wave(bench: CoreBench, wave: str, groups: list[SequenceGroup]) -> AdmissionCost:
    """Measure groups from the queue to the end, which is their first token."""
    _, total_us = timed(bench.add, groups)
    num_finished = 0
    while num_finished < len(groups):
        _, schedule_us = timed(bench.schedule)
        result = bench.next_result()
        updates, process_us = timed(bench.planner.process, result)
        total_us += schedule_us + process_us
        num_finished += len(updates.finished)
    num_found = sum(group.num_cached_tokens // BLOCK_SIZE for group in groups)
    assert num_found == (0 if wave == "cold" else sum((g.num_prompt_tokens - 1) // BLOCK_SIZE for g in groups))
    num_tokens = sum(group.num_prompt_tokens for group in groups)
    return AdmissionCost(wave, len(groups), total_us / num_tokens, total_us / len(groups))


def decode_table(costs: list[DecodeCost], *, evicts: bool) -> Table:
    pool = "every new block evicts a cached one" if evicts else "free blocks at hand"
    table = Table(title=f"Decode step, CPU µs, median (p99): contexts around {CONTEXT_TOKENS}, {pool}")
    for heading in ("sequences", "schedule", "process", "together", "per sequence"):
        table.add_column(heading, justify="right")
    for cost in costs:
        if cost.evicts is evicts:
            spreads = [str(spread) for spread in (cost.schedule_us, cost.process_us, cost.total_us)]
            table.add_row(str(cost.num_sequences), *spreads, f"{cost.total_us.median / cost.num_sequences:.2f}")
    return table


def admission_table(costs: list[AdmissionCost]) -> Table:
    title = f"Admission, CPU µs: {costs[0].num_prompts} prompts, {MAX_NUM_BATCHED_TOKENS:,} tokens a step"
    table = Table(title=title)
    for heading in ("prefix cache", "per prompt token", "per prompt"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(cost.wave, f"{cost.us_per_prompt_token:.3f}", f"{cost.us_per_prompt:.0f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of the scheduler's core: decode steps and admission.")
    parser.add_argument("--sequences", default=",".join(map(str, NUM_SEQUENCES)), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="measured decode steps (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="admitted prompts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    console = Console()
    decodes = [
        measure_decode(int(num_sequences), arguments.steps, evicts=evicts)
        for evicts in (False, True)
        for num_sequences in arguments.sequences.split(",")
    ]
    admissions = measure_admission(arguments.prompts, PROMPT_TOKENS)
    console.print(decode_table(decodes, evicts=False))
    console.print(decode_table(decodes, evicts=True))
    console.print(admission_table(admissions))
    console.print(describe_machine())
    if arguments.json is not None:
        figures = {
            "machine": describe_machine(),
            "decode": [dataclasses.asdict(cost) for cost in decodes],
            "admission": [dataclasses.asdict(cost) for cost in admissions],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
