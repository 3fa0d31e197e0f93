"""When what happened to a request, and who is told of its end."""

import numpy as np
import pytest

from octavo_shared.errors import RequestAbortedError
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.integrity import check_integrity
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.request.life import EndedRequest, RequestTimes
from scheduler_svc.request.losses import NO_LOSSES, Losses
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.telemetry.meter import Meter
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.live_requests import RecordingSink, live_request, sink_of


class Stage:
    """A core whose clock is set by hand, and the requests that it computes."""

    def __init__(self, max_allowance: int = 1) -> None:
        self.now_s = 0.0
        self.ended: list[EndedRequest] = []
        self.bench = Bench(small_limits(max_allowance=max_allowance, blocks=32))
        self.meter = Meter()
        fleet = Fleet(self.bench.queue, self.bench.policy)
        fleet.planners.append(self.bench.planner)
        self.live = LiveRequests(
            fleet,
            lambda: None,
            self.meter,
            [self.ended.append, self._check_end],
            lambda: self.now_s,
        )

    def add(self, added: SequenceGroup, *, stop_after: int | None = None) -> LiveRequest:
        """Take a request that arrives now."""
        request = live_request(added, self.now_s, stop_after=stop_after)
        self.live.add(request)
        return request

    @property
    def ended_ids(self) -> list[str]:
        """The requests that observers were told of, in order."""
        return [ended.request_id for ended in self.ended]

    def step(self, scheduled_at_s: float, delivered_at_s: float) -> None:
        """Decide a step at a time, and deliver its result at another."""
        step = self.bench.planner.schedule(scheduled_at_s).step
        assert step is not None
        updates = self.bench.planner.process(self.bench.executor.execute(step))
        self.now_s = delivered_at_s
        self.live.deliver(self.bench.planner, updates)

    def _check_end(self, ended: EndedRequest) -> None:
        assert ended.times.ended_at_s == self.now_s
        assert (ended.tenant, ended.request_id) not in self.live


@pytest.fixture
def stage() -> Stage:
    return Stage()


def prompt(num_tokens: int) -> list[int]:
    return np.arange(10, 10 + num_tokens).tolist()


def test_the_times_of_a_request_from_arrival_to_end(stage: Stage) -> None:
    stage.now_s = 1.0
    request = stage.add(group(0, prompt(4), max_tokens(3)))
    assert request.times == RequestTimes(1.0)
    stage.step(scheduled_at_s=2.0, delivered_at_s=4.0)
    assert request.times == RequestTimes(1.0, 2.0, 4.0, 4.0)
    stage.step(scheduled_at_s=5.0, delivered_at_s=6.0)
    assert request.times == RequestTimes(1.0, 2.0, 4.0, 6.0)
    stage.step(scheduled_at_s=7.0, delivered_at_s=9.0)
    assert request.times == RequestTimes(1.0, 2.0, 4.0, 9.0, 9.0)
    assert (request.times.queue_s, request.times.time_to_first_token_s, request.times.duration_s) == (1.0, 3.0, 8.0)
    assert stage.ended_ids == [request.request_id]
    assert sink_of(request).ended is stage.ended[0]
    assert (stage.meter.inter_token_latency.num_observed, stage.meter.inter_token_latency.sum) == (2, 5.0)


def test_who_fails_before_it_is_scheduled_has_no_more_times_than_its_end(stage: Stage) -> None:
    request = stage.add(group(0, prompt(4), max_tokens(3)))
    stage.now_s = 2.0
    stage.live.fail(request, RequestAbortedError("aborted"))
    assert request.times == RequestTimes(0.0, ended_at_s=2.0)
    assert (request.times.queue_s, request.times.time_to_first_token_s, request.times.duration_s) == (None, None, 2.0)
    assert stage.ended_ids == [request.request_id]
    assert sink_of(request).ended is stage.ended[0]


def test_outputs_that_come_in_one_step_have_one_time_and_make_one_gap(stage: Stage) -> None:
    request = stage.add(group(0, prompt(4), max_tokens(2), num_sequences=3))
    stage.step(scheduled_at_s=1.0, delivered_at_s=2.0)
    stage.step(scheduled_at_s=3.0, delivered_at_s=5.0)
    assert request.times == RequestTimes(0.0, 1.0, 2.0, 5.0, 5.0)
    assert stage.meter.num_output_tokens == 6
    assert stage.meter.time_to_first_token.num_observed == 1
    # Each output's second token; which output is told of first does not matter.
    assert stage.meter.inter_token_latency.sum == 3.0 * stage.meter.inter_token_latency.num_observed


def test_every_request_is_told_of_once(stage: Stage) -> None:
    requests = [stage.add(group(arrival, prompt(4), max_tokens(1 + arrival))) for arrival in range(3)]
    for step in range(3):
        stage.step(scheduled_at_s=step, delivered_at_s=step + 0.5)
    assert stage.ended_ids == [request.request_id for request in requests]
    assert stage.meter.num_finished == {"length": 3}
    assert len(stage.live) == 0


def test_who_ended_between_the_result_and_its_delivery_gets_nothing_and_harms_nobody(stage: Stage) -> None:
    """The next step may be decided in between, and a client may leave."""
    gone, stays = (stage.add(group(arrival, prompt(4), max_tokens(3))) for arrival in (0, 1))
    planner = stage.bench.planner
    step = planner.schedule(0.0).step
    assert step is not None
    updates = planner.process(stage.bench.executor.execute(step))
    stage.live.fail(gone, RequestAbortedError("aborted"))
    planner.abort(gone.group)
    namesake = group(0, prompt(5), max_tokens(3))
    namesake.request_id = gone.request_id
    comes = stage.add(namesake)

    stage.live.deliver(planner, updates)

    assert (gone.num_output_tokens, stays.num_output_tokens, comes.num_output_tokens) == (0, 1, 0)
    assert stage.ended_ids == [gone.request_id]
    check_integrity(planner)


def test_a_stop_string_found_after_the_next_decision_ends_the_sequence_and_drops_the_surplus_token(
    stage: Stage,
) -> None:
    planner, executor = stage.bench.planner, stage.bench.executor
    request = stage.add(group(0, prompt(4), max_tokens(9)), stop_after=1)
    step = planner.schedule(0.0).step
    assert step is not None
    updates = planner.process(executor.execute(step))
    surplus = planner.schedule(1.0).step
    assert surplus is not None

    stage.live.deliver(planner, updates)
    assert request.has_ended
    assert planner.process(executor.execute(surplus)).sequences == []

    assert request.num_output_tokens == 1
    assert stage.ended[0].finish_reason is FinishReason.STOP
    assert len(planner.groups) == 0
    check_integrity(planner)


@each_row((9, None, 5, 5), (5, FinishReason.LENGTH, 5, 5), (9, FinishReason.STOP, 3, 5), (5, FinishReason.STOP, 3, 5))
def test_a_stop_string_inside_a_span_cuts_the_rest_also_where_the_planner_has_ended_the_output(
    length: int, reason: FinishReason | None, num_tokens: int, num_of_other: int
) -> None:
    stage = Stage(max_allowance=4)
    request = stage.add(group(0, prompt(4), max_tokens(length)), stop_after=3 if reason is FinishReason.STOP else None)
    other = stage.add(group(1, prompt(3), max_tokens(9)))
    planner = stage.bench.planner
    stage.step(scheduled_at_s=0.0, delivered_at_s=0.5)
    assert planner.schedule(1.0).step is not None

    counts, token_ids = np.array([4, 4], np.uint8), np.arange(20, 28, dtype=np.int32)
    stage.live.deliver(planner, planner.process(StepResult(1, 2, token_ids, token_counts=counts)))

    assert (request.num_output_tokens, other.num_output_tokens) == (num_tokens, num_of_other)
    assert sink_of(request).token_ids[0][1:] == list(range(20, 20 + num_tokens - 1))
    assert [ended.finish_reason for ended in stage.ended] == ([] if reason is None else [reason])
    assert not stage.ended or stage.ended[0].num_output_tokens == num_tokens
    check_integrity(planner)


# The front finds stop strings, at once or later --------------------------------------------------------


def test_a_stop_string_that_is_found_late_takes_the_tokens_behind_it_back(stage: Stage) -> None:
    request = stage.add(group(0, prompt(4), max_tokens(9)), stop_after=100)
    for step in range(3):
        stage.step(scheduled_at_s=step, delivered_at_s=step + 0.5)
    assert request.num_output_tokens == 3
    sink_of(request).handle.finish_output(0, 2, FinishReason.STOP)
    assert [(ended.num_output_tokens, ended.finish_reason) for ended in stage.ended] == [(2, FinishReason.STOP)]
    assert not stage.bench.planner.batch.running, "its blocks are free"
    sink_of(request).handle.finish_output(0, 1, FinishReason.STOP)  # it has ended
    sink_of(request).handle.abort(RequestAbortedError("late"))
    assert len(stage.ended) == 1


@pytest.mark.parametrize(("num_tokens", "reason"), [(3, FinishReason.LENGTH), (2, FinishReason.STOP)])
def test_a_request_with_stop_strings_ends_when_its_front_has_said_how_many_tokens_count(
    stage: Stage, num_tokens: int, reason: FinishReason
) -> None:
    request = stage.add(group(0, prompt(4), max_tokens(3)), stop_after=100)
    for step in range(3):
        stage.step(scheduled_at_s=step, delivered_at_s=step + 0.5)
    assert sink_of(request).reasons == {0: FinishReason.LENGTH}
    assert not stage.ended
    stage.now_s = 7.0
    sink_of(request).handle.finish_output(0, num_tokens, reason)
    assert [(ended.num_output_tokens, ended.finish_reason) for ended in stage.ended] == [(num_tokens, reason)]


def test_an_output_that_ends_while_its_request_waits_for_a_core_costs_a_token_and_ends(stage: Stage) -> None:
    planner = stage.bench.planner
    request = stage.add(group(0, prompt(4), max_tokens(9), num_sequences=2), stop_after=100)
    for step in range(2):
        stage.step(scheduled_at_s=step, delivered_at_s=step + 0.5)
    [evacuated] = planner.evacuate()
    sink_of(request).handle.finish_output(0, 2, FinishReason.STOP)
    assert not request.has_ended
    stage.bench.queue.add(evacuated)
    stage.step(scheduled_at_s=3.0, delivered_at_s=3.5)
    stage.step(scheduled_at_s=4.0, delivered_at_s=4.5)
    assert request.ends[0].num_tokens == 2, "what comes behind the stop string does not count"
    assert len(evacuated.live_sequences) == 1
    sink_of(request).handle.finish_output(1, request.ends[1].num_tokens, FinishReason.STOP)
    assert [ended.finish_reason for ended in stage.ended] == [FinishReason.STOP]
    assert not planner.batch.running


def test_suspects_are_queued_again_when_their_executor_is_found_to_be_broken(stage: Stage) -> None:
    queue = stage.bench.queue
    requests = [live_request(group(arrival, prompt(4))) for arrival in range(3)]
    for request in requests:
        for address in ("a:1", "b:1"):
            request.note_loss(address, counts=False)
        stage.live.add(request)
    assert list(queue) == [requests[0].group]

    stage.live.forget_losses("a:1")

    assert list(queue) == [request.group for request in requests]
    assert stage.live.suspects.current is None


def test_a_suspect_of_another_engine_runs_alone_until_its_token_and_its_front_hears_of_each_change() -> None:
    stage, told = Stage(), list[Losses]()
    losses = [Losses(2, 1, "a"), Losses(3, 0, "b")]
    requests = [
        LiveRequest(group(i, 4), RecordingSink(), 0.0, losses=before, on_losses=told.append)
        for i, before in enumerate(losses)
    ]
    for request in requests:
        stage.live.add(request)
    assert [request.group.lost_on for request in requests] == ["a", "b"]
    assert stage.live.suspects.parked == requests[1:]
    assert list(stage.live._fleet.queue) == [requests[0].group]
    requests[0].note_loss("c", counts=True, was_alone=True)
    requests[0].tell_losses()
    stage.step(0.0, 1.0)
    assert told == [Losses(3, 2, "a"), NO_LOSSES]
    assert not requests[0].group.runs_alone
    assert list(stage.live._fleet.queue) == [requests[1].group], "the next suspect may run"
