"""What is kept of the last steps, and how long they took."""

import itertools

import numpy as np

from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Admission, SamplingRow, Step, StepResult, TableDelta, no_slots
from scheduler_svc.telemetry.recent_steps import MIN_KEPT_STEPS, NUM_KEPT_STEPS, RecentStep, RecentSteps


def logged_step(step_id: int, delta: TableDelta | None = None) -> RecentStep:
    layout = BatchTable(1, 4, 4, 1).apply(TableDelta())
    return RecentStep(Step(1, step_id, delta or TableDelta()), layout)


def log_of(num_steps: int, capacity: int = 3) -> RecentSteps:
    log = RecentSteps(capacity)
    for step_id in range(1, num_steps + 1):
        log.add(logged_step(step_id))
    return log


def ids(steps: list[RecentStep]) -> list[int]:
    return [logged.step.step_id for logged in steps]


def test_only_the_last_steps_are_kept() -> None:
    log = log_of(5)
    assert log.kept_ids == (3, 5)
    assert log.get(2) is None
    assert log.get(3) is not None


def test_large_steps_push_out_more_but_never_the_last_ones() -> None:
    log = RecentSteps(max_bytes=10 * 2**20)
    admission = Admission(0, 1, np.zeros(2**18, np.int32), 2**18, 0, no_slots(), SamplingRow())  # a MiB
    for step_id in range(1, 41):
        log.add(logged_step(step_id, TableDelta(admissions=(admission,))))
    assert log.kept_ids == (40 - MIN_KEPT_STEPS + 1, 40)
    log.clear()
    for step_id in range(1, 101):
        log.add(logged_step(step_id))
    assert log.kept_ids == (1, 100)
    log.set_result(StepResult(1, 100, np.zeros(20 * 2**18, np.int32)), answered_at_s=0.0)
    assert log.kept_ids == (100 - MIN_KEPT_STEPS + 1, 100)
    for step_id in range(101, 201):  # the large one goes in time, and frees its share
        log.add(logged_step(step_id))
    assert log.kept_ids == (101, 200)
    for step_id in range(201, 501):
        log.add(logged_step(step_id))
    assert log.kept_ids == (500 - NUM_KEPT_STEPS + 1, 500)


def test_the_last_steps_come_oldest_first_and_as_many_as_there_are() -> None:
    log = log_of(5)
    assert ids(log.last(2)) == [4, 5]
    assert ids(log.last(100)) == [3, 4, 5]


def test_step_0_is_the_last_one() -> None:
    last = log_of(2).get(0)
    assert last is not None
    assert last.step.step_id == 2
    assert log_of(0).get(0) is None


def test_a_new_epoch_begins_empty() -> None:
    log = log_of(2)
    log.clear()
    assert log.kept_ids == (0, 0)
    assert log.last(10) == []


def test_the_round_trip_is_the_time_from_the_decision_to_the_result() -> None:
    log = RecentSteps(clock=itertools.count(10.0, 0.25).__next__)
    first, second = logged_step(1), logged_step(2)
    first.decided_at_s = 9.75
    log.add(first)
    log.add(second)
    log.set_result(StepResult(1, 1, no_slots()), answered_at_s=10.25)
    assert first.result is not None
    assert first.round_trip_us == 500_000
    assert second.result is None


def test_who_observes_is_told_of_a_step_once_all_its_times_are_known() -> None:
    observed: list[RecentStep] = []
    log = RecentSteps(clock=itertools.count(10.0, 0.25).__next__, observe=observed.append)
    step = logged_step(1)
    log.add(step)
    assert not observed
    log.set_result(StepResult(1, 1, no_slots()), answered_at_s=10.125)
    assert observed == [step]
    assert (step.logged_at_s, step.answered_at_s, step.processed_at_s) == (10.0, 10.125, 10.25)


def test_a_result_of_a_step_that_is_not_kept_is_dropped() -> None:
    log = log_of(5)
    log.set_result(StepResult(1, 1, no_slots()), answered_at_s=0.0)
    assert all(logged.result is None for logged in log.last(3))
