"""How requests with one prefix spread over a fleet: an open loop on a virtual clock, so each run is the same.

Requests come in even intervals, whatever runs. Each has the prefix and an end of its own. Real cores decide; a step
takes so much time, and so much for each of its tokens. Read next: `benchmarks/costs/scheduler.py`, which prints it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.scheduler_core import BLOCK_SIZE, EOS_TOKEN_ID, FIRST_ORDINARY_ID, VOCAB_SIZE
from octavo_shared.step_wire.step import SamplingRow, StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions

NUM_SLOTS = 64
MAX_NUM_BATCHED_TOKENS = 512
MAX_MODEL_LEN = 2048
END_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What comes, and what a step takes."""

    num_cores: int
    prefix_tokens: int
    requests_per_s: float
    num_requests: int
    output_tokens: int = 100
    base_us: int = 5000
    token_us: int = 100


LOOPS = (
    OpenLoop(2, 444, 4.0, 16, output_tokens=600),
    OpenLoop(4, 300, 30.0, 400),
    OpenLoop(8, 1000, 60.0, 600),
)


@dataclass(frozen=True, slots=True)
class Spreading:
    """What became of an open loop.

    Attributes:
        num_placed: Requests of each core.
        largest_over_mean: Of the sequences that ran on each core, over time.
        num_computed: Tokens of prompts that were computed.
    """

    loop: OpenLoop
    num_placed: list[int]
    largest_over_mean: float
    num_computed: int


class VirtualFleet:
    """Cores whose steps take virtual time, in microseconds."""

    def __init__(self, loop: OpenLoop) -> None:
        self.loop = loop
        policy = FcfsPolicy()
        self.fleet = Fleet(WaitingQueue(policy), policy, prefix_key=b"benchmark")
        limits = CoreLimits(
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_SLOTS * MAX_MODEL_LEN // BLOCK_SIZE,
            eos_token_ids=(EOS_TOKEN_ID,),
        )
        self.cores = [self.fleet.join(limits, epoch=1, name=str(number)) for number in range(loop.num_cores)]
        self.num_computed = 0
        self._ends: list[tuple[int, int]] = []  # of the steps that run: when, of which core
        self._generator = np.random.default_rng(0)
        self._prefix = self._tokens(loop.prefix_tokens)
        self._arrivals = count()

    def add(self, output_tokens: int) -> SequenceGroup:
        """Let a request come."""
        prompt = np.concatenate((self._prefix, self._tokens(END_TOKENS)))
        conditions = StopConditions(max_tokens=output_tokens)
        group = SequenceGroup("", prompt, SamplingRow(), conditions, arrival=next(self._arrivals))
        self.fleet.add(group)
        return group

    def run(self, begin_us: int, end_us: float) -> int:
        """Let the steps run that end before a time; return when the last one did."""
        now_us = begin_us
        self._begin_steps(now_us)
        while self._ends and self._ends[0][0] < end_us:
            now_us, number = heapq.heappop(self._ends)
            core = self.cores[number]
            sent = core.in_flight[0]
            self.num_computed += sent.num_chunk_tokens
            tokens = self._tokens(len(sent.layout.sample_slots))
            duration_us = self._duration_us(core)
            self.fleet.process(core, StepResult(1, sent.step.step_id, tokens, execute_duration_us=duration_us))
            self._begin_steps(now_us)
        return now_us

    def _begin_steps(self, now_us: int) -> None:
        self.fleet.dispatch(now_us * 1e-6)
        for number, core in enumerate(self.cores):
            if not core.in_flight:
                self.fleet.schedule(core, now_us * 1e-6)
                if core.in_flight:
                    heapq.heappush(self._ends, (now_us + self._duration_us(core), number))

    def _duration_us(self, core: ExecutorPlanner) -> int:
        return self.loop.base_us + core.in_flight[0].layout.num_tokens * self.loop.token_us

    def _tokens(self, num_tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, num_tokens, dtype=np.int32)


def spread(loop: OpenLoop) -> Spreading:
    """Play a loop, after one request that computes the prefix."""
    bench = VirtualFleet(loop)
    bench.add(1)
    begin_us = bench.run(0, float("inf"))
    groups, num_running = [], np.zeros(loop.num_cores)
    for arrival_us in _arrivals_us(loop, begin_us):
        bench.run(arrival_us, arrival_us)
        groups.append(bench.add(loop.output_tokens))
        bench.run(arrival_us, arrival_us + 1e6 / loop.requests_per_s)
        num_running += [core.num_rows for core in bench.cores]
    num_placed = [
        sum(group.placed is not None and group.placed.executor == core.name for group in groups) for core in bench.cores
    ]
    return Spreading(loop, num_placed, float(num_running.max() / num_running.mean()), bench.num_computed)


def _arrivals_us(loop: OpenLoop, begin_us: int) -> Iterator[int]:
    return (begin_us + round(number * 1e6 / loop.requests_per_s) for number in range(loop.num_requests))
