"""Scenarios of the planner and its fleet: decode steps, admission, the dispatcher, requests with one prefix.

No model, no executor, no RPC. Times are CPU time of the calling thread, so other load shows little; results of steps
are made up outside of the timed parts.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ParamSpec, TypeVar

import numpy as np

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, median_and_p99, scenario
from octavo_shared.step_wire.step import Int32Array, SamplingRow, StepResult
from scheduler_svc.core.fleet.dispatcher import MAX_DISPATCHED_GROUPS
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.request.parameters import StopConditions

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
EOS_TOKEN_ID = 2
FIRST_ORDINARY_ID = 3  # no sampled token ends a sequence

P = ParamSpec("P")
T = TypeVar("T")


def timed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """Return what a call returns, and its CPU microseconds in this thread."""
    started_ns = time.thread_time_ns()
    returned = function(*args, **kwargs)
    return returned, (time.thread_time_ns() - started_ns) / 1000


def limits_for(num_slots: int, num_blocks: int, num_blocks_each: int, budget: int) -> CoreLimits:
    """Return limits of so many sequences, each of at most `num_blocks_each`."""
    return CoreLimits(
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(budget, num_slots),
        max_model_len=num_blocks_each * BLOCK_SIZE,
        vocab_size=VOCAB_SIZE,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        eos_token_ids=(EOS_TOKEN_ID,),
        watermark=0.0,
    )


class Planners:
    """Equal planners of one fleet, their queue, and made-up results for their steps."""

    def __init__(self, num_planners: int, limits: CoreLimits) -> None:
        policy = FcfsPolicy()
        self.queue = WaitingQueue(policy)
        self.fleet = Fleet(self.queue, policy, prefix_key=b"benchmark")
        self.all = [self.fleet.join(limits, epoch=1, name=str(number)) for number in range(num_planners)]
        self._generator = np.random.default_rng(0)
        self._arrivals = count()

    def tokens(self, num_tokens: int) -> Int32Array:
        return self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def group(self, prompt: Int32Array, max_tokens: int | None = None, num_outputs: int = 1) -> SequenceGroup:
        """Return a request that comes now."""
        conditions, arrival = StopConditions(max_tokens), next(self._arrivals)
        return SequenceGroup("", prompt, SamplingRow(), conditions, arrival, num_sequences=num_outputs)

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        for group in groups:
            self.queue.add(group)

    def result(self, planner: ExecutorPlanner, duration_us: int = 0) -> StepResult:
        """Return a result of a planner's oldest step."""
        sent = planner.in_flight[0]
        tokens = self.tokens(len(sent.layout.sample_slots))
        return StepResult(planner.epoch, sent.step.step_id, tokens, execute_duration_us=duration_us)

    def run_until_idle(self) -> None:
        for planner in self.all:
            while planner.schedule(0.0).step is not None:
                planner.process(self.result(planner))

    def run_until_decoding(self, *, is_full: bool) -> None:
        """Run until all sequences, or one in every slot, decode; one step of each planner is in flight then."""
        while any(planner.batch.num_free_slots if is_full else len(self.queue) for planner in self.all) or any(
            planner.prefills.running for planner in self.all
        ):
            for planner in self.all:
                planner.schedule(0.0)
                planner.process(self.result(planner))
        for planner in self.all:
            planner.schedule(0.0)


# One planner ------------------------------------------------------------------------------------

CONTEXT_TOKENS = 500  # in the middle of the measured steps
NUM_WARM_UP_STEPS = 16
PROMPT_TOKENS = 512
MAX_NUM_BATCHED_TOKENS = 16_384


@scenario(
    "core", "CPU of the planner alone: a steady decode step, one step ahead, and the admission of prompts", pairs=1
)
async def core(size: Size) -> Groups:
    """Decode: contexts around 500 tokens, once with free blocks at hand, and once with a cached prefix in every free
    block, so that each new block evicts one. Admission: from the queue to the first token, which is the last one, with
    the hashes of the prefix cache; warm: the same prompts again.
    """
    num_steps = size.of(200, 4)
    for evicts in (False, True):
        for number in size.of((32, 256, 1024, 4096), (16,)):
            name = f"{number:,} sequences{', each new block evicts a cached one' if evicts else ''}"
            yield [Way(name, in_turn(decode_turn, number, num_steps, evicts))]
    num_prompts = size.of(1000, 2)
    yield [Way(f"{num_prompts:,} prompts of {PROMPT_TOKENS}", in_turn(admission_turn, num_prompts, PROMPT_TOKENS))]


def decode_turn(num_sequences: int, num_steps: int, evicts: bool) -> Figures:
    """Measure steps of sequences with lengths spread over a block, so that each step opens 1 block in 16."""
    first_tokens = max(BLOCK_SIZE, CONTEXT_TOKENS - num_steps // 2 - NUM_WARM_UP_STEPS)
    num_before = num_sequences // MAX_DISPATCHED_GROUPS  # steps of the first ones until the last ones are computed
    num_tokens = first_tokens + 2 * BLOCK_SIZE + num_before + NUM_WARM_UP_STEPS + num_steps
    num_blocks_each = -(-num_tokens // BLOCK_SIZE)
    # Each prompt is computed in one step, so that the lengths stay spread.
    planners = Planners(
        1, limits_for(num_sequences, num_blocks_each * num_sequences, num_blocks_each, budget=2**31 - 1)
    )
    [planner] = planners.all
    if evicts:
        fill_with_cached_blocks(planners, num_sequences, num_blocks_each)
    planners.add([planners.group(planners.tokens(first_tokens + index % BLOCK_SIZE)) for index in range(num_sequences)])
    planners.run_until_decoding(is_full=False)
    num_opened = {num_sequences // BLOCK_SIZE, -(-num_sequences // BLOCK_SIZE)}
    times_us = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        decision, schedule_us = timed(planner.schedule, 0.0)
        assert decision.step is not None, "there is nothing to do"
        assert len(decision.step.delta.appended_blocks) in num_opened
        updates, process_us = timed(planner.process, planners.result(planner))
        assert len(updates.sequences) == num_sequences
        times_us.append((schedule_us, process_us, schedule_us + process_us))
    assert not any(planner.preemption.num_preemptions.values())
    measured = np.array(times_us[NUM_WARM_UP_STEPS:]).T
    figures: dict[str, float] = {}
    for name, values in zip(("schedule", "process", "both"), measured, strict=True):
        figures |= median_and_p99(name, values)
    return {**figures, "a sequence, µs": figures["both, µs"] / num_sequences}


def fill_with_cached_blocks(planners: Planners, num_groups: int, num_blocks_each: int) -> None:
    """Run groups to their end that leave every block of the one planner's pool free, with a prefix in it."""
    allocator = planners.all[0].blocks.allocator
    planners.add([planners.group(planners.tokens(num_blocks_each * BLOCK_SIZE - 1), 1) for _ in range(num_groups)])
    planners.run_until_idle()
    while allocator.num_cached_blocks < allocator.num_blocks:
        num_blocks = min(num_blocks_each - 1, allocator.num_blocks - allocator.num_cached_blocks)
        planners.add([planners.group(planners.tokens(num_blocks * BLOCK_SIZE), 1)])
        planners.run_until_idle()


def admission_turn(num_prompts: int, num_prompt_tokens: int) -> Figures:
    """Measure a wave of new prompts, and the same wave again."""
    num_blocks_each = -(-(num_prompt_tokens + 1) // BLOCK_SIZE)
    limits = limits_for(num_prompts, 2 * num_blocks_each * num_prompts, num_blocks_each, MAX_NUM_BATCHED_TOKENS)
    planners, figures = Planners(1, limits), {}
    [planner] = planners.all
    prompts = [planners.tokens(num_prompt_tokens) for _ in range(num_prompts)]
    for wave in ("cold", "warm"):
        groups = [planners.group(prompt, 1) for prompt in prompts]
        total_us, num_finished = timed(planners.add, groups)[1], 0
        while num_finished < len(groups):
            _, schedule_us = timed(planner.schedule, 0.0)
            updates, process_us = timed(planner.process, planners.result(planner))
            total_us += schedule_us + process_us
            num_finished += len(updates.finished)
        num_found = 0 if wave == "cold" else num_prompts * ((num_prompt_tokens - 1) // BLOCK_SIZE)
        assert sum(group.num_cached_tokens // BLOCK_SIZE for group in groups) == num_found
        figures[f"{wave}, a prompt, µs"] = total_us / num_prompts
        figures[f"{wave}, a token, µs"] = total_us / num_prompts / num_prompt_tokens
    return figures


# A fleet ----------------------------------------------------------------------------------------

NUM_SLOTS = 256
NUM_WIDE_SLOTS = 4096
FLEET_PROMPT_TOKENS = 64
FLEET_BATCHED_TOKENS = 2048
FLEET_BLOCKS_EACH = 64


@scenario(
    "fleet", "CPU of placing requests on many planners: a burst, and one schedule when all slots are taken", pairs=3
)
async def fleet(size: Size) -> Groups:
    """Burst: prompts that arrive at once are dispatched, and each planner decides one step. Full: every slot decodes
    and more requests wait; one `schedule` of one planner, one step ahead as in service.
    """
    num_prompts, nums_planners = size.of(8000, 10), size.of((1, 4, 16, 64), (1, 2))
    for number in nums_planners:
        yield [Way(f"a burst on {number} planners", in_turn(burst_turn, number, num_prompts))]
    slots = size.of(NUM_SLOTS, 4)
    full = [(f"{n} planners", n, slots, num_prompts, 1, 1) for n in nums_planners]
    many, few = size.of((16, (1_000, 10_000, 100_000)), (2, (3,)))
    full += [(f"{number:,} wait on {many} planners", many, slots, number, 1, 1) for number in few]
    full += [
        (f"{number:,} tenants wait", 1, slots, size.of(10_000, 2), number, 1)
        for number in size.of((1, 1_000, 10_000), (2,))
    ]
    wide = size.of(NUM_WIDE_SLOTS, 8)
    full += [(f"{n} outputs each, {wide:,} slots", 1, wide, 100, 1, n) for n in (1, 4)]
    for name, *numbers in full:
        yield [Way(f"full, {name}", in_turn(full_turn, *numbers, size.of(50, 3)))]


def fleet_of(num_planners: int, num_slots: int) -> Planners:
    return Planners(
        num_planners, limits_for(num_slots, num_slots * FLEET_BLOCKS_EACH, FLEET_BLOCKS_EACH, FLEET_BATCHED_TOKENS)
    )


def burst_turn(num_planners: int, num_prompts: int) -> Figures:
    """Dispatch a burst as far as there is room, then let each planner decide a step."""
    planners = fleet_of(num_planners, NUM_SLOTS)
    planners.add([planners.group(planners.tokens(FLEET_PROMPT_TOKENS)) for _ in range(num_prompts)])
    dispatch_us, num_left = 0.0, -1
    while num_left != planners.queue.num_in_line:
        num_left = planners.queue.num_in_line
        dispatch_us += timed(planners.fleet.dispatcher.dispatch, 0.0)[1]
    both_us = dispatch_us + sum(timed(planner.schedule, 0.0)[1] for planner in planners.all)
    num_dispatched, num_admitted = num_prompts - num_left, num_prompts - len(planners.queue)
    return {
        "dispatched": num_dispatched,
        "to dispatch one, µs": dispatch_us / num_dispatched,
        "admitted": num_admitted,
        "to dispatch and admit one, µs": both_us / num_admitted,
    }


def full_fleet(num_planners: int, num_slots: int, num_waiting: int, num_tenants: int, num_outputs: int) -> Planners:
    """Return a fleet in which all slots decode, with so many requests that wait."""
    planners = fleet_of(num_planners, num_slots)
    groups = [
        planners.group(planners.tokens(FLEET_PROMPT_TOKENS), num_outputs=num_outputs)
        for _ in range(num_planners * num_slots // num_outputs + num_waiting)
    ]
    for index, group in enumerate(groups[-num_waiting:]):
        group.tenant = str(index % num_tenants)
    planners.add(groups)
    planners.run_until_decoding(is_full=True)
    return planners


def full_turn(
    num_planners: int, num_slots: int, num_waiting: int, num_tenants: int, num_outputs: int, num_steps: int
) -> Figures:
    """Measure `schedule` of the first planner of a full fleet."""
    planners = full_fleet(num_planners, num_slots, num_waiting, num_tenants, num_outputs)
    first, times_us = planners.all[0], []
    for _ in range(num_steps):
        times_us.append(timed(first.schedule, 0.0)[1])
        first.process(planners.result(first))
    return median_and_p99("schedule", times_us)


# Requests with one prefix -----------------------------------------------------------------------

PREFIX_SLOTS = 64
PREFIX_BATCHED_TOKENS = 512
PREFIX_BLOCKS_EACH = 128
END_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What comes, in even intervals, and what a step takes, in virtual time."""

    num_planners: int
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


@scenario("prefix", "how requests with one prefix spread over a fleet, in virtual time: each run is the same", pairs=1)
async def prefix(size: Size) -> Groups:
    """Requests come in even intervals, whatever runs; each has the prefix and an end of its own."""
    yield [
        Way(f"{loop.num_planners} executors, a prefix of {loop.prefix_tokens:,}", in_turn(prefix_turn, loop))
        for loop in size.of(LOOPS, LOOPS[:1])
    ]


def prefix_turn(loop: OpenLoop) -> Figures:
    """Return how even the executors' work is, and how much is computed."""
    num_placed, largest_over_mean, num_computed = spread(loop)
    return {
        "largest over mean running": largest_over_mean,
        "fewest placed on one": min(num_placed),
        "tokens of prompts computed": num_computed,
    }


def spread(loop: OpenLoop) -> tuple[list[int], float, int]:
    """Play a loop, after one request that computes the prefix.

    Returns: requests of each planner; the most that ran on one over the mean, over time; computed tokens of prompts.
    """
    planners = VirtualPlanners(loop)
    planners.come(1)
    begin_us = planners.run(0, float("inf"))
    groups, num_running = [], np.zeros(loop.num_planners)
    for number in range(loop.num_requests):
        arrival_us = begin_us + round(number * 1e6 / loop.requests_per_s)
        planners.run(arrival_us, arrival_us)
        groups.append(planners.come(loop.output_tokens))
        planners.run(arrival_us, arrival_us + 1e6 / loop.requests_per_s)
        num_running += [planner.batch.num_rows for planner in planners.all]
    names = [group.placed.executor for group in groups if group.placed is not None]
    num_placed = [names.count(planner.name) for planner in planners.all]
    return num_placed, float(num_running.max() / num_running.mean()), planners.num_computed


class VirtualPlanners(Planners):
    """Planners with steps that take virtual time, in microseconds."""

    def __init__(self, loop: OpenLoop) -> None:
        num_blocks = PREFIX_SLOTS * PREFIX_BLOCKS_EACH
        limits = limits_for(PREFIX_SLOTS, num_blocks, PREFIX_BLOCKS_EACH, PREFIX_BATCHED_TOKENS)
        super().__init__(loop.num_planners, limits)
        self.num_computed = 0
        self._loop = loop
        self._ends: list[tuple[int, int]] = []  # of the steps that run: when, of which planner
        self._prefix = self.tokens(loop.prefix_tokens)

    def come(self, output_tokens: int) -> SequenceGroup:
        group = self.group(np.concatenate((self._prefix, self.tokens(END_TOKENS))), output_tokens)
        self.fleet.add(group)
        return group

    def run(self, begin_us: int, end_us: float) -> int:
        """Let the steps run that end before a time; return when the last one did."""
        now_us = begin_us
        self._begin_steps(now_us)
        while self._ends and self._ends[0][0] < end_us:
            now_us, number = heapq.heappop(self._ends)
            planner = self.all[number]
            self.num_computed += planner.in_flight[0].num_chunk_tokens
            self.fleet.process(planner, self.result(planner, self._duration_us(planner)))
            self._begin_steps(now_us)
        return now_us

    def _begin_steps(self, now_us: int) -> None:
        self.fleet.dispatch(now_us * 1e-6)
        for number, planner in enumerate(self.all):
            if not planner.in_flight:
                self.fleet.schedule(planner, now_us * 1e-6)
                if planner.in_flight:
                    heapq.heappush(self._ends, (now_us + self._duration_us(planner), number))

    def _duration_us(self, planner: ExecutorPlanner) -> int:
        return self._loop.base_us + planner.in_flight[0].layout.num_tokens * self._loop.token_us
