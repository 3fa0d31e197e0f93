"""CPU time of the dispatcher: what a fleet of many cores costs its one scheduler. No model, no executor, no RPC.

    python -m benchmarks.fleet [--cores 1,4,16,64] [--prompts 8000] [--json FILE]

Burst: prompts that arrive at once are dispatched, and each core decides one step. Full: every core has all its slots
taken by sequences that decode, and the rest of the burst waits; one `schedule` of one core, one step ahead as in
service. Then the same on 16 cores with ever more waiting, with ever more tenants that wait, and on one core with
requests of four outputs. These figures are CPU time of the calling thread, so other load shows little, but not nothing.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe_machine
from benchmarks.scheduler_core import BLOCK_SIZE, EOS_TOKEN_ID, FIRST_ORDINARY_ID, VOCAB_SIZE, Spread, timed
from octavo_shared.step_wire.step import SamplingRow, StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions

NUM_CORES = (1, 4, 16, 64)
NUM_PROMPTS = 8000
PROMPT_TOKENS = 64
NUM_SLOTS = 256
MAX_NUM_BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 1024
NUM_STEPS = 50
NUM_REPEATS = 3
NUM_CORES_OF_SIZES = 16
NUMS_WAITING = (1_000, 10_000, 100_000)
NUMS_TENANTS = (1, 1_000, 10_000)
NUM_WIDE_SLOTS = 4096


@dataclass(frozen=True, slots=True)
class BurstCost:
    """What a burst costs on so many cores: of the best of some repeats."""

    num_planners: int
    num_dispatched: int
    us_per_dispatch: float
    num_admitted: int
    us_per_admission: float


@dataclass(frozen=True, slots=True)
class FullCost:
    """What one `schedule` costs in a fleet that is full."""

    what: str
    number: int
    schedule_us: Spread


class BenchmarkFleet:
    """A fleet with its queue, and made-up results for its steps.

    Args:
        num_planners: Equal ones.
        num_slots: Of each; None: `NUM_SLOTS`.
    """

    def __init__(self, num_planners: int, num_slots: int | None = None) -> None:
        num_slots = num_slots or NUM_SLOTS
        policy = FcfsPolicy()
        self.queue = WaitingQueue(policy)
        self.fleet = Fleet(self.queue, policy, prefix_key=b"benchmark")
        limits = CoreLimits(
            max_num_seqs=num_slots,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, num_slots),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
            num_blocks=num_slots * MAX_MODEL_LEN // BLOCK_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.planners = [self.fleet.join(limits, epoch=1) for _ in range(num_planners)]
        self._generator = np.random.default_rng(0)
        self._arrivals = count()

    def add(self, num_prompts: int, num_sequences: int = 1, num_tenants: int = 1) -> None:
        """Queue random prompts."""
        tokens = self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, (num_prompts, PROMPT_TOKENS), dtype=np.int32)
        for prompt in tokens:
            arrival = next(self._arrivals)
            self.queue.add(
                SequenceGroup(
                    request_id="",
                    prompt_token_ids=prompt,
                    sampling=SamplingRow(),
                    stop_conditions=StopConditions(),
                    arrival=arrival,
                    num_sequences=num_sequences,
                    tenant=str(arrival % num_tenants),
                )
            )

    def process(self, planner: ExecutorPlanner) -> None:
        """Take a made-up result for the oldest step of a core."""
        sent = planner.in_flight[0]
        tokens = self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, len(sent.layout.sample_slots), dtype=np.int32)
        planner.process(StepResult(planner.epoch, sent.step.step_id, tokens))

    def fill(self) -> None:
        """Run until every slot is taken by a sequence that decodes, one step ahead."""
        while any(planner.batch.num_free_slots or planner.prefills.running for planner in self.planners):
            for planner in self.planners:
                planner.schedule(0.0)
                self.process(planner)
        for planner in self.planners:
            planner.schedule(0.0)


def measure_burst(num_planners: int, num_prompts: int) -> BurstCost:
    """Dispatch a burst as far as there is room, then let each core decide a step."""
    costs = []
    for _ in range(NUM_REPEATS):
        bench = BenchmarkFleet(num_planners)
        bench.add(num_prompts)
        dispatcher, dispatch_us, num_left = bench.fleet.dispatcher, 0.0, -1
        while num_left != bench.queue.num_in_line:
            num_left = bench.queue.num_in_line
            dispatch_us += timed(dispatcher.dispatch, 0.0)[1]
        num_dispatched = num_prompts - num_left
        admission_us = sum(timed(planner.schedule, 0.0)[1] for planner in bench.planners)
        num_admitted = num_prompts - len(bench.queue)
        costs.append(
            BurstCost(
                num_planners,
                num_dispatched,
                dispatch_us / num_dispatched,
                num_admitted,
                (dispatch_us + admission_us) / num_admitted,
            )
        )
    return min(costs, key=lambda cost: cost.us_per_dispatch)


def measure_full(what: str, number: int, make: Callable[[], BenchmarkFleet]) -> FullCost:
    """Measure `schedule` of the first core of a fleet, full and with groups that wait."""
    bench = make()
    bench.fill()
    first, times = bench.planners[0], []
    for _ in range(NUM_STEPS):
        _, schedule_us = timed(first.schedule, 0.0)
        times.append(schedule_us)
        bench.process(first)
    return FullCost(what, number, Spread.of(times))


def full_fleet(num_planners: int, num_waiting: int, num_tenants: int = 1) -> BenchmarkFleet:
    """Return a fleet that will be full, with so many waiting then."""
    bench = BenchmarkFleet(num_planners)
    bench.add(num_planners * NUM_SLOTS)
    bench.add(num_waiting, num_tenants=num_tenants)
    return bench


def wide_core(num_sequences: int) -> BenchmarkFleet:
    """Return one core whose slots are taken by requests of so many outputs."""
    bench = BenchmarkFleet(1, NUM_WIDE_SLOTS)
    bench.add(NUM_WIDE_SLOTS // num_sequences + 100, num_sequences)
    return bench


def burst_table(costs: list[BurstCost]) -> Table:
    table = Table(title=f"A burst of prompts of {PROMPT_TOKENS} tokens, {NUM_SLOTS} slots a core, CPU µs a group")
    for heading in ("cores", "dispatched", "to dispatch", "admitted", "to dispatch and to admit"):
        table.add_column(heading, justify="right")
    for cost in costs:
        numbers = (
            cost.num_dispatched,
            f"{cost.us_per_dispatch:.1f}",
            cost.num_admitted,
            f"{cost.us_per_admission:.1f}",
        )
        table.add_row(str(cost.num_planners), *map(str, numbers))
    return table


def full_table(costs: list[FullCost]) -> Table:
    table = Table(title="One schedule of a core in a full fleet, CPU µs, median (p99)")
    for heading in ("what grows", "to", "schedule"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(cost.what, f"{cost.number:,}", str(cost.schedule_us))
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of the dispatcher of a fleet.")
    parser.add_argument("--cores", default=",".join(map(str, NUM_CORES)), help="(default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="of the burst (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    console, nums_cores = Console(), [int(number) for number in arguments.cores.split(",")]
    bursts = [measure_burst(num_planners, arguments.prompts) for num_planners in nums_cores]
    full = [measure_full("cores", n, lambda n=n: full_fleet(n, arguments.prompts)) for n in nums_cores]  # type: ignore[misc]
    full += [
        measure_full(f"waiting, on {NUM_CORES_OF_SIZES} cores", n, lambda n=n: full_fleet(NUM_CORES_OF_SIZES, n))  # type: ignore[misc]
        for n in NUMS_WAITING
    ]
    full += [
        measure_full("tenants that wait", n, lambda n=n: full_fleet(1, max(NUMS_TENANTS), n))  # type: ignore[misc]
        for n in NUMS_TENANTS
    ]
    full += [measure_full(f"outputs, {NUM_WIDE_SLOTS} slots", n, lambda n=n: wide_core(n)) for n in (1, 4)]  # type: ignore[misc]
    console.print(burst_table(bursts))
    console.print(full_table(full))
    console.print(describe_machine())
    if arguments.json is not None:
        figures = {
            "machine": describe_machine(),
            "burst": [dataclasses.asdict(cost) for cost in bursts],
            "full": [dataclasses.asdict(cost) for cost in full],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
