"""What is counted of tokens, steps and ends."""

from dataclasses import replace

import pytest

from octavo_shared.errors import RequestAbortedError, UnavailableError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Step, StepResult, TableDelta, no_slots
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.recent_steps import RecentStep
from tests.support.each_row import each_row
from tests.support.live_requests import ended_request


def processed_step(execute_us: int) -> RecentStep:
    """A step that was decided at second 10, sent at 11, answered at 15 and done with at 18."""
    layout = BatchTable(1, 4, 4, 1).apply(TableDelta())
    result = StepResult(1, 1, no_slots(), execute_duration_us=execute_us)
    return RecentStep(
        Step(1, 1, TableDelta()),
        layout,
        result=result,
        decided_at_s=10.0,
        logged_at_s=11.0,
        answered_at_s=15.0,
        processed_at_s=18.0,
    )


def test_the_phases_of_a_step_add_up_to_all_of_it() -> None:
    meter = Meter()
    meter.step_processed(processed_step(execute_us=2_500_000))
    sums = {phase: counts.sum for phase, counts in meter.step_durations.items()}
    assert sums == {"schedule": 1.0, "wait": 1.5, "execute": 2.5, "process": 3.0}


def test_an_executor_whose_clock_runs_fast_makes_no_negative_wait() -> None:
    meter = Meter()
    meter.step_processed(processed_step(execute_us=4_500_000))
    assert meter.step_durations["wait"].sum == 0.0


@each_row(
    ([], 0, 0.0),
    ([9.0, 9.0, 9.0], 3, 3.0),
    ([9.0, 9.0, 4.0], 3, 8.0),
    ([9.0, 10.0, 10.0], 1, 1.0),  # further outputs of one request, in the same step
)
def test_the_gaps_of_a_step_are_counted(last_tokens_at_s: list[float], num_gaps: int, total_s: float) -> None:
    meter = Meter()
    meter.tokens_delivered(5, last_tokens_at_s, now_s=10.0)
    assert meter.num_output_tokens == 5
    assert meter.inter_token_latency.num_observed == num_gaps
    assert meter.inter_token_latency.sum == pytest.approx(total_s)


def test_a_finished_request_counts_with_its_reason_and_its_duration() -> None:
    meter = Meter()
    meter.request_ended(ended_request())
    assert meter.num_finished == {"length": 1}
    assert meter.request_duration.sum == 2.0
    assert (meter.num_errors.total(), meter.num_recovered) == (0, 0)


def test_a_failed_request_counts_with_its_code_and_has_no_duration() -> None:
    meter = Meter()
    meter.request_ended(ended_request(error=UnavailableError("gone"), num_losses=1))
    assert meter.num_errors == {"UNAVAILABLE": 1}
    assert meter.request_duration.num_observed == 0
    assert (meter.num_finished.total(), meter.num_recovered) == (0, 0)


def test_a_request_that_finished_after_a_loss_is_recovered() -> None:
    meter = Meter()
    meter.request_ended(ended_request(num_losses=1))
    assert meter.num_recovered == 1


def test_the_wait_of_a_request_that_never_got_a_token_counts_as_well() -> None:
    meter, ended = Meter(), ended_request(error=RequestAbortedError("aborted"))
    ended.times.first_scheduled_at_s = 3.0
    meter.request_ended(ended)
    assert meter.queue_time.sum == 3.0


def test_a_tenant_has_its_requests_and_the_tokens_that_were_made_here() -> None:
    meter = Meter()
    for tenant, num_tokens, num_earlier in (("ml", 5, 0), ("ml", 30, 20), ("web", 7, 0)):
        ended = replace(ended_request(num_tokens=num_tokens), tenant=tenant, num_earlier_tokens=num_earlier)
        meter.request_ended(ended)
    meter.request_ended(replace(ended_request(error=UnavailableError("it was lost"), num_tokens=2), tenant="web"))
    assert meter.num_requests_of == {"ml": 2, "web": 2}
    assert meter.num_output_tokens_of == {"ml": 15, "web": 9}
