"""Scenarios of the scheduler's core and its fleet: decode steps, admission, the dispatcher, requests with one prefix.

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

from benchmarks.costs.harness import Figures, Groups, Size, Way, in_turn, scenario
from octavo_shared.step_wire.step import Int32Array, SamplingRow, StepResult
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


class Cores:
    """Equal cores of one fleet, their queue, and made-up results for their steps."""

    def __init__(self, num_cores: int, limits: CoreLimits) -> None:
        policy = FcfsPolicy()
        self.queue = WaitingQueue(policy)
        self.fleet = Fleet(self.queue, policy, prefix_key=b"benchmark")
        self.all = [self.fleet.join(limits, epoch=1, name=str(number)) for number in range(num_cores)]
        self._generator = np.random.default_rng(0)
        self._arrivals = count()

    def tokens(self, num_tokens: int) -> Int32Array:
        """Return random tokens that end nothing."""
        return self._generator.integers(FIRST_ORDINARY_ID, VOCAB_SIZE, num_tokens, dtype=np.int32)

    def group(self, prompt: Int32Array, max_tokens: int | None = None, num_outputs: int = 1) -> SequenceGroup:
        """Return a request that comes now."""
        conditions, arrival = StopConditions(max_tokens), next(self._arrivals)
        return SequenceGroup("", prompt, SamplingRow(), conditions, arrival, num_sequences=num_outputs)

    def add(self, groups: Sequence[SequenceGroup]) -> None:
        """Queue requests."""
        for group in groups:
            self.queue.add(group)

    def result(self, core: ExecutorPlanner, duration_us: int = 0) -> StepResult:
        """Return a result of a core's oldest step."""
        sent = core.in_flight[0]
        tokens = self.tokens(len(sent.layout.sample_slots))
        return StepResult(core.epoch, sent.step.step_id, tokens, execute_duration_us=duration_us)

    def run_until_idle(self) -> None:
        """Run all requests to their end."""
        for core in self.all:
            while core.schedule(0.0).step is not None:
                core.process(self.result(core))

    def run_until_decoding(self, *, is_full: bool) -> None:
        """Run until all sequences, or one in every slot, decode; one step of each core is in flight then."""
        while any(core.batch.num_free_slots if is_full else len(self.queue) for core in self.all) or any(
            core.prefills.running for core in self.all
        ):
            for core in self.all:
                core.schedule(0.0)
                core.process(self.result(core))
        for core in self.all:
            core.schedule(0.0)


# One core ---------------------------------------------------------------------------------------

CONTEXT_TOKENS = 500  # in the middle of the measured steps
NUM_WARM_UP_STEPS = 16
PROMPT_TOKENS = 512
MAX_NUM_BATCHED_TOKENS = 16_384


@scenario("core", "CPU of the core alone: a steady decode step, one step ahead, and the admission of prompts", pairs=1)
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
    """Measure steps of sequences whose lengths are spread over a block, so that each step opens 1 block in 16."""
    first_tokens = max(BLOCK_SIZE, CONTEXT_TOKENS - num_steps // 2 - NUM_WARM_UP_STEPS)
    num_blocks_each = -(-(first_tokens + 2 * BLOCK_SIZE + NUM_WARM_UP_STEPS + num_steps) // BLOCK_SIZE)
    # All prompts are computed in one step, so that the lengths stay spread.
    cores = Cores(1, limits_for(num_sequences, num_blocks_each * num_sequences, num_blocks_each, budget=2**31 - 1))
    [core] = cores.all
    if evicts:
        fill_with_cached_blocks(cores, num_sequences, num_blocks_each)
    cores.add([cores.group(cores.tokens(first_tokens + index % BLOCK_SIZE)) for index in range(num_sequences)])
    cores.run_until_decoding(is_full=False)
    num_opened = {num_sequences // BLOCK_SIZE, -(-num_sequences // BLOCK_SIZE)}
    times_us = []
    for _ in range(NUM_WARM_UP_STEPS + num_steps):
        decision, schedule_us = timed(core.schedule, 0.0)
        assert decision.step is not None, "there is nothing to do"
        assert len(decision.step.delta.appended_blocks) in num_opened
        updates, process_us = timed(core.process, cores.result(core))
        assert len(updates.sequences) == num_sequences
        times_us.append((schedule_us, process_us, schedule_us + process_us))
    assert not any(core.preemption.num_preemptions.values())
    measured = np.array(times_us[NUM_WARM_UP_STEPS:])
    schedule_us, process_us, both_us = np.median(measured, axis=0).tolist()
    return {
        "schedule, µs": schedule_us,
        "process, µs": process_us,
        "both, µs": both_us,
        "both p99, µs": float(np.percentile(measured[:, 2], 99)),
        "a sequence, µs": both_us / num_sequences,
    }


def fill_with_cached_blocks(cores: Cores, num_groups: int, num_blocks_each: int) -> None:
    """Run groups to their end that leave every block of the one core's pool free, with a prefix in it."""
    allocator = cores.all[0].blocks.allocator
    cores.add([cores.group(cores.tokens(num_blocks_each * BLOCK_SIZE - 1), 1) for _ in range(num_groups)])
    cores.run_until_idle()
    while allocator.num_cached_blocks < allocator.num_blocks:
        num_blocks = min(num_blocks_each - 1, allocator.num_blocks - allocator.num_cached_blocks)
        cores.add([cores.group(cores.tokens(num_blocks * BLOCK_SIZE), 1)])
        cores.run_until_idle()


def admission_turn(num_prompts: int, num_prompt_tokens: int) -> Figures:
    """Measure a wave of prompts that nobody has seen, and the same wave again."""
    num_blocks_each = -(-(num_prompt_tokens + 1) // BLOCK_SIZE)
    limits = limits_for(num_prompts, 2 * num_blocks_each * num_prompts, num_blocks_each, MAX_NUM_BATCHED_TOKENS)
    cores, figures = Cores(1, limits), {}
    [core] = cores.all
    prompts = [cores.tokens(num_prompt_tokens) for _ in range(num_prompts)]
    for wave in ("cold", "warm"):
        groups = [cores.group(prompt, 1) for prompt in prompts]
        total_us, num_finished = timed(cores.add, groups)[1], 0
        while num_finished < len(groups):
            _, schedule_us = timed(core.schedule, 0.0)
            updates, process_us = timed(core.process, cores.result(core))
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


@scenario("fleet", "CPU of placing requests on many cores: a burst, and one schedule when all slots are taken", pairs=3)
async def fleet(size: Size) -> Groups:
    """Burst: prompts that arrive at once are dispatched, and each core decides one step. Full: every slot decodes and
    others wait; one `schedule` of one core, one step ahead as in service.
    """
    num_prompts, nums_cores = size.of(8000, 10), size.of((1, 4, 16, 64), (1, 2))
    for number in nums_cores:
        yield [Way(f"a burst on {number} cores", in_turn(burst_turn, number, num_prompts))]
    slots = size.of(NUM_SLOTS, 4)
    full = [(f"{n} cores", n, slots, num_prompts, 1, 1) for n in nums_cores]
    many, few = size.of((16, (1_000, 10_000, 100_000)), (2, (3,)))
    full += [(f"{number:,} wait on {many} cores", many, slots, number, 1, 1) for number in few]
    full += [
        (f"{number:,} tenants wait", 1, slots, size.of(10_000, 2), number, 1)
        for number in size.of((1, 1_000, 10_000), (2,))
    ]
    wide = size.of(NUM_WIDE_SLOTS, 8)
    full += [(f"{n} outputs each, {wide:,} slots", 1, wide, 100, 1, n) for n in (1, 4)]
    for name, *numbers in full:
        yield [Way(f"full, {name}", in_turn(full_turn, *numbers, size.of(50, 3)))]


def fleet_of(num_cores: int, num_slots: int) -> Cores:
    """Return cores with that many slots each."""
    return Cores(
        num_cores, limits_for(num_slots, num_slots * FLEET_BLOCKS_EACH, FLEET_BLOCKS_EACH, FLEET_BATCHED_TOKENS)
    )


def burst_turn(num_cores: int, num_prompts: int) -> Figures:
    """Dispatch a burst as far as there is room, then let each core decide a step."""
    cores = fleet_of(num_cores, NUM_SLOTS)
    cores.add([cores.group(cores.tokens(FLEET_PROMPT_TOKENS)) for _ in range(num_prompts)])
    dispatch_us, num_left = 0.0, -1
    while num_left != cores.queue.num_in_line:
        num_left = cores.queue.num_in_line
        dispatch_us += timed(cores.fleet.dispatcher.dispatch, 0.0)[1]
    both_us = dispatch_us + sum(timed(core.schedule, 0.0)[1] for core in cores.all)
    num_dispatched, num_admitted = num_prompts - num_left, num_prompts - len(cores.queue)
    return {
        "dispatched": num_dispatched,
        "to dispatch one, µs": dispatch_us / num_dispatched,
        "admitted": num_admitted,
        "to dispatch and admit one, µs": both_us / num_admitted,
    }


def full_fleet(num_cores: int, num_slots: int, num_waiting: int, num_tenants: int, num_outputs: int) -> Cores:
    """Return a fleet whose slots all decode, with so many requests that wait."""
    cores = fleet_of(num_cores, num_slots)
    groups = [
        cores.group(cores.tokens(FLEET_PROMPT_TOKENS), num_outputs=num_outputs)
        for _ in range(num_cores * num_slots // num_outputs + num_waiting)
    ]
    for index, group in enumerate(groups[-num_waiting:]):
        group.tenant = str(index % num_tenants)
    cores.add(groups)
    cores.run_until_decoding(is_full=True)
    return cores


def full_turn(
    num_cores: int, num_slots: int, num_waiting: int, num_tenants: int, num_outputs: int, num_steps: int
) -> Figures:
    """Measure `schedule` of the first core of a full fleet."""
    cores = full_fleet(num_cores, num_slots, num_waiting, num_tenants, num_outputs)
    first, times_us = cores.all[0], []
    for _ in range(num_steps):
        times_us.append(timed(first.schedule, 0.0)[1])
        first.process(cores.result(first))
    return {"schedule, µs": float(np.median(times_us)), "schedule p99, µs": float(np.percentile(times_us, 99))}


# Requests with one prefix -----------------------------------------------------------------------

PREFIX_SLOTS = 64
PREFIX_BATCHED_TOKENS = 512
PREFIX_BLOCKS_EACH = 128
END_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What comes, in even intervals, and what a step takes, in virtual time."""

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


@scenario("prefix", "how requests with one prefix spread over a fleet, in virtual time: each run is the same", pairs=1)
async def prefix(size: Size) -> Groups:
    """Requests come in even intervals, whatever runs; each has the prefix and an end of its own."""
    yield [
        Way(f"{loop.num_cores} executors, a prefix of {loop.prefix_tokens:,}", in_turn(prefix_turn, loop))
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

    Returns: requests of each core; the most that ran on one over the mean, over time; computed tokens of prompts.
    """
    cores = VirtualCores(loop)
    cores.come(1)
    begin_us = cores.run(0, float("inf"))
    groups, num_running = [], np.zeros(loop.num_cores)
    for number in range(loop.num_requests):
        arrival_us = begin_us + round(number * 1e6 / loop.requests_per_s)
        cores.run(arrival_us, arrival_us)
        groups.append(cores.come(loop.output_tokens))
        cores.run(arrival_us, arrival_us + 1e6 / loop.requests_per_s)
        num_running += [core.batch.num_rows for core in cores.all]
    names = [group.placed.executor for group in groups if group.placed is not None]
    num_placed = [names.count(core.name) for core in cores.all]
    return num_placed, float(num_running.max() / num_running.mean()), cores.num_computed


class VirtualCores(Cores):
    """Cores whose steps take virtual time, in microseconds."""

    def __init__(self, loop: OpenLoop) -> None:
        num_blocks = PREFIX_SLOTS * PREFIX_BLOCKS_EACH
        limits = limits_for(PREFIX_SLOTS, num_blocks, PREFIX_BLOCKS_EACH, PREFIX_BATCHED_TOKENS)
        super().__init__(loop.num_cores, limits)
        self.num_computed = 0
        self._loop = loop
        self._ends: list[tuple[int, int]] = []  # of the steps that run: when, of which core
        self._prefix = self.tokens(loop.prefix_tokens)

    def come(self, output_tokens: int) -> SequenceGroup:
        """Let a request come."""
        group = self.group(np.concatenate((self._prefix, self.tokens(END_TOKENS))), output_tokens)
        self.fleet.add(group)
        return group

    def run(self, begin_us: int, end_us: float) -> int:
        """Let the steps run that end before a time; return when the last one did."""
        now_us = begin_us
        self._begin_steps(now_us)
        while self._ends and self._ends[0][0] < end_us:
            now_us, number = heapq.heappop(self._ends)
            core = self.all[number]
            self.num_computed += core.in_flight[0].num_chunk_tokens
            self.fleet.process(core, self.result(core, self._duration_us(core)))
            self._begin_steps(now_us)
        return now_us

    def _begin_steps(self, now_us: int) -> None:
        self.fleet.dispatch(now_us * 1e-6)
        for number, core in enumerate(self.all):
            if not core.in_flight:
                self.fleet.schedule(core, now_us * 1e-6)
                if core.in_flight:
                    heapq.heappush(self._ends, (now_us + self._duration_us(core), number))

    def _duration_us(self, core: ExecutorPlanner) -> int:
        return self._loop.base_us + core.in_flight[0].layout.num_tokens * self._loop.token_us
