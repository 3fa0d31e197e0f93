"""The scheduler, whatever happens to it: outputs never depend on how they were scheduled.

Each example runs one workload three times, with 1, 2 and 3 steps in flight, against the toy executor,
and compares every output with the one that the plainest loop makes of the prompt alone.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.block_manager import AllocStatus
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason, SequenceGroup, SequenceStatus, StopConditions
from shared.step import SamplingRow, StepResult
from tests.support.toy_executor import ToyExecutor, generate_alone, hashed_next_token

VOCAB_SIZE = 13
MAX_ROUNDS = 5000


@dataclass(frozen=True)
class Request:
    """One request of a workload; times in rounds of the driver."""

    prompt: list[int]
    conditions: StopConditions
    arrival_round: int
    finish_round: int | None


@dataclass(frozen=True)
class Workload:
    """Everything that happens in one example."""

    limits: SchedulerLimits
    requests: list[Request]
    evacuate_round: int | None
    drains: list[bool]  # whether round i, modulo its length, takes all results before it decides again


@st.composite
def limits(draw: st.DrawFn) -> SchedulerLimits:
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(2, 24))
    max_num_seqs = draw(st.integers(1, 5))
    return SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 12)),
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 8)),
        eos_token_ids=draw(st.sampled_from([(), (7,), (3, 9)])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    bounds = draw(limits())
    num_requests = draw(st.integers(1, 8))
    requests = [draw(requests_within(bounds)) for _ in range(num_requests)]
    return Workload(
        bounds,
        sorted(requests, key=lambda request: request.arrival_round),
        evacuate_round=draw(st.none() | st.integers(0, 25)),
        drains=draw(st.lists(st.booleans(), min_size=1, max_size=6)),
    )


@st.composite
def requests_within(draw: st.DrawFn, bounds: SchedulerLimits) -> Request:
    token_id = st.integers(0, VOCAB_SIZE - 1)
    return Request(
        prompt=draw(st.lists(token_id, min_size=1, max_size=bounds.max_model_len - 1)),
        conditions=StopConditions(
            max_tokens=draw(st.none() | st.integers(1, 12)),
            stop_token_ids=draw(st.frozensets(token_id, max_size=1)),
            ignore_eos=draw(st.booleans()),
        ),
        arrival_round=draw(st.integers(0, 12)),
        finish_round=draw(st.none() | st.none() | st.integers(0, 25)),
    )


@dataclass
class Driver:
    """Plays a workload, checking after every call; `outputs` and `reasons` are what clients saw."""

    workload: Workload
    num_steps_in_flight: int
    outputs: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    cut_short: set[int] = field(default_factory=set)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.limits = self.workload.limits
        self.groups: dict[int, SequenceGroup] = {}
        self.admitted: set[int] = set()
        self.start_executor(epoch=1)

    def start_executor(self, epoch: int) -> None:
        self.scheduler = Scheduler(self.limits, epoch)
        self.executor = ToyExecutor(self.limits, hashed_next_token(VOCAB_SIZE))
        self.results: list[StepResult] = []

    def run(self) -> None:
        last_arrival = self.workload.requests[-1].arrival_round
        for now in range(MAX_ROUNDS):
            self.let_requests_arrive(now)
            self.let_clients_leave(now)
            if now == self.workload.evacuate_round:
                self.lose_the_executor()
            progressed = self.schedule()
            drains = self.workload.drains[now % len(self.workload.drains)]
            while self.results and (drains or not progressed or len(self.results) >= self.num_steps_in_flight):
                self.process()
                progressed = True
            if not progressed and now >= last_arrival and not self.results:
                assert not self.scheduler.num_unfinished, "the scheduler has nothing to do, and work is left"
                return
        raise AssertionError("the workload does not end")

    def let_requests_arrive(self, now: int) -> None:
        for arrival, request in enumerate(self.workload.requests):
            if request.arrival_round == now:
                prompt = np.array(request.prompt, np.int32)
                group = SequenceGroup(f"r{arrival}", prompt, SamplingRow(), request.conditions, arrival)
                assert self.scheduler.add(group) is AllocStatus.OK
                self.groups[arrival], self.outputs[arrival] = group, []
                self.scheduler.check_integrity()

    def let_clients_leave(self, now: int) -> None:
        for arrival, group in self.groups.items():
            if self.workload.requests[arrival].finish_round == now and arrival not in self.reasons:
                self.scheduler.finish(group.sequence)
                self.cut_short.add(arrival)
                self.scheduler.check_integrity()

    def lose_the_executor(self) -> None:
        groups = self.scheduler.evacuate()
        self.scheduler.check_integrity()
        assert self.scheduler.block_manager.allocator.num_used_blocks == 0
        live = [arrival for arrival in self.groups if arrival not in self.reasons and arrival not in self.cut_short]
        assert [group.arrival for group in groups] == live
        self.num_preemptions += self.scheduler.num_preemptions
        self.start_executor(self.scheduler.epoch + 1)
        for group in groups:
            known = self.workload.requests[group.arrival].prompt + self.outputs[group.arrival]
            assert group.sequence.token_ids.tolist() == known
            assert self.scheduler.add(group) is AllocStatus.OK

    def schedule(self) -> bool:
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            return False
        digest = self.scheduler.table.digest()
        self.results.append(self.executor.execute(step))
        assert self.executor.table.digest() == digest
        self.check_positions()
        admitted = {entry.slot for entry in step.delta.admissions}
        arrivals = [sequence.arrival for sequence in self.scheduler.running if sequence.slot in admitted]
        assert len(arrivals) == len(admitted)
        still_waiting = [sequence.arrival for sequence in self.scheduler.waiting]
        assert not arrivals or not still_waiting or max(arrivals) < min(still_waiting), "somebody jumped the queue"
        return True

    def check_positions(self) -> None:
        """No step feeds a token at which, or after which, its sequence must have ended."""
        table = self.executor.table
        for sequence in self.scheduler.running:
            max_tokens = sequence.group.stop_conditions.max_tokens
            num_prompt_tokens = sequence.group.num_prompt_tokens
            limit = min(self.limits.max_model_len, num_prompt_tokens + (max_tokens or self.limits.max_model_len))
            assert table.num_scheduled_tokens[sequence.slot] < limit
            assert table.num_prompt_tokens[sequence.slot] == num_prompt_tokens

    def process(self) -> None:
        updates = self.scheduler.process(self.results.pop(0))
        self.scheduler.check_integrity()
        for row, (sequence, token_id) in enumerate(zip(updates.sequences, updates.token_ids, strict=True)):
            arrival = sequence.arrival
            assert arrival not in self.cut_short, "a token came after `finish`"
            assert arrival not in self.reasons, "a token came after the end"
            self.outputs[arrival].append(token_id)
            if row in updates.finished:
                assert sequence.status is SequenceStatus.FINISHED
                self.reasons[arrival] = updates.finished[row]


def play(workload: Workload, num_steps_in_flight: int) -> Driver:
    """Run the workload to its end and check everything that must hold there."""
    driver = Driver(workload, num_steps_in_flight)
    driver.run()
    for arrival, request in enumerate(workload.requests):
        alone, reason = generate_alone(
            request.prompt, request.conditions, workload.limits, hashed_next_token(VOCAB_SIZE)
        )
        output = driver.outputs[arrival]
        if arrival in driver.cut_short:
            assert output == alone[: len(output)]
            assert arrival not in driver.reasons
        else:
            assert output == alone
            assert driver.reasons[arrival] is reason
    allocator = driver.scheduler.block_manager.allocator
    assert allocator.num_free_blocks == allocator.num_blocks
    assert not driver.executor.table.live.any()
    driver.num_preemptions += driver.scheduler.num_preemptions
    return driver


def check_outputs_at_every_depth(workload: Workload) -> None:
    """Equal to the output alone at each depth, hence equal among the depths."""
    for num_steps_in_flight in (1, 2, 3):
        play(workload, num_steps_in_flight)


@given(workloads())
def test_every_output_is_the_one_computed_alone_at_every_depth(workload: Workload) -> None:
    check_outputs_at_every_depth(workload)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(settings.get_profile("thorough"))
@given(workloads())
def test_every_output_is_the_one_computed_alone_over_thousands_of_workloads(workload: Workload) -> None:
    check_outputs_at_every_depth(workload)


@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 3])
def test_a_pool_far_too_small_for_all_preempts_and_changes_no_output(num_steps_in_flight: int) -> None:
    bounds = SchedulerLimits(
        max_num_seqs=4,
        max_num_batched_tokens=9,
        max_model_len=20,
        vocab_size=VOCAB_SIZE,
        block_size=2,
        num_blocks=10,
        watermark=0.0,
    )
    requests = [Request([i, i + 1], StopConditions(max_tokens=15), 0, None) for i in range(6)]

    driver = play(Workload(bounds, requests, None, [False]), num_steps_in_flight)

    assert driver.num_preemptions > 6
