"""How busy an executor was, and what its steps computed."""

import numpy as np
import pytest

from executor_svc.service.step_meter import StepMeter, StepTokens
from octavo_shared.step_wire.step import TableDelta

TOKENS = StepTokens(num_prefill=7, num_decode=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.25

    def __call__(self) -> float:
        return self.now_s


def run_step(meter: StepMeter, clock: Clock, duration_s: float) -> None:
    with meter.launching():
        pass
    clock.now_s += duration_s
    meter.finished(duration_s, TOKENS)


def test_steps_tokens_and_times_add_up() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    run_step(meter, clock, 0.5)
    run_step(meter, clock, 1.5)
    assert (meter.num_steps, meter.busy_s) == (2, 2.0)
    assert (meter.num_prefill_tokens, meter.num_decode_tokens) == (14, 4)
    assert (meter.durations.num_observed, meter.durations.sum) == (2, 2.0)


def test_who_never_ran_a_step_is_idle() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    assert meter.idle_ratio() == 1.0
    clock.now_s += 500
    assert meter.idle_ratio() == 1.0


def test_at_first_the_ratio_is_of_the_time_since_the_start() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    run_step(meter, clock, 3.0)
    clock.now_s += 1.0
    assert meter.idle_ratio() == pytest.approx(0.25)


def test_later_it_is_of_the_last_minute() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    for _ in range(100):
        run_step(meter, clock, 0.25)
        clock.now_s += 0.75
    assert meter.idle_ratio() == pytest.approx(0.75, abs=0.02)
    clock.now_s += 30.0
    assert meter.idle_ratio() == pytest.approx(0.875, abs=0.02)
    clock.now_s += 30.0
    assert meter.idle_ratio() == 1.0


def test_a_step_that_runs_counts_before_its_end_and_once() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    clock.now_s += 10.0
    with meter.launching():
        pass
    clock.now_s += 10.0
    assert meter.idle_ratio() == pytest.approx(0.5)
    meter.finished(10.0, TOKENS)
    assert meter.idle_ratio() == pytest.approx(0.5)


def test_a_step_longer_than_the_window_makes_it_busy() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    with meter.launching():
        pass
    clock.now_s += 200.0
    assert meter.idle_ratio() == 0.0
    meter.finished(200.0, TOKENS)
    assert meter.idle_ratio() == pytest.approx(0.0)


def test_of_two_steps_in_flight_one_runs_at_a_time() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    clock.now_s += 2.0
    for _ in range(2):
        with meter.launching():
            pass
    clock.now_s += 1.0
    meter.finished(1.0, TOKENS)
    clock.now_s += 1.0
    assert meter.idle_ratio() == pytest.approx(0.5)
    meter.finished(1.0, TOKENS)
    assert meter.busy_s == 2.0
    assert meter.idle_ratio() == pytest.approx(0.5)


def test_a_step_that_failed_runs_no_more() -> None:
    clock = Clock()
    meter = StepMeter(clock)
    with pytest.raises(ZeroDivisionError), meter.launching():
        raise ZeroDivisionError
    with meter.launching():
        pass
    meter.failed()
    clock.now_s += 10.0
    assert (meter.num_steps, meter.idle_ratio()) == (0, 1.0)


def test_decodes_are_the_active_slots_of_the_step() -> None:
    was_active = np.array([True, True, True, False, False])
    slots = np.array([[0], [1], [3]], np.int32)
    delta = TableDelta(
        released_slots=slots[0],
        deactivated_slots=slots[1],
        activated_slots=slots[2],
        prefill_chunks=np.array([[4, 9], [0, 3]], np.int32),
    )
    assert StepTokens.of(delta, was_active) == StepTokens(num_prefill=12, num_decode=2)
