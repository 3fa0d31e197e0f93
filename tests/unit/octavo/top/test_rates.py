"""Rates are differences of totals over monotonic time; what cannot be compared has none."""

import pytest

from octavo.admin.v1 import admin_pb2
from octavo.top.overview import overview_lines
from octavo.top.polling import Answers, Poller
from octavo.top.rates import RateMeter
from tests.unit.octavo.top.scripted import Scripted, executor, lost_executor, running, state, waiting


def answers(at_s: float, *live: admin_pb2.RequestState, num_tokens: int = 0, **values: object) -> Answers:
    scheduler = state(
        executor(num_output_tokens=num_tokens), num_output_tokens=num_tokens, uptime_ms=round(at_s * 1000), **values
    )
    return Answers(at_s=at_s, state=scheduler, live_at_s=at_s + 0.01, live=live)


def test_the_first_answers_have_no_rates() -> None:
    picture = RateMeter().add(answers(10.0, running("a"), num_tokens=500))
    assert picture.rates.output_tokens is None
    assert not picture.rates.executor_output_tokens
    assert not picture.rates.request_output_tokens
    assert picture.output_history == ()


def test_rates_are_differences_over_the_time_between_answers() -> None:
    meter = RateMeter()
    meter.add(answers(10.0, running("a", 1000, num_output_tokens=10), num_tokens=500, num_finished_requests=3))
    picture = meter.add(
        answers(
            12.0,
            running("a", 3000, num_output_tokens=50),
            num_tokens=900,
            num_finished_requests=4,
            num_failed_requests=2,
            num_prompt_tokens=64,
            num_preemptions=6,
            num_refused_requests=5,
        )
    )
    rates = picture.rates
    assert (rates.output_tokens, rates.prompt_tokens) == (200.0, 32.0)
    assert (rates.finished_requests, rates.failed_requests, rates.preemptions) == (0.5, 1.0, 3.0)
    assert rates.refused_requests == 2.5
    assert rates.executor_output_tokens == {"127.0.0.1:50061": 200.0}
    assert rates.request_output_tokens == pytest.approx({"a": 20.0})
    assert (picture.output_history, picture.prompt_history) == ((200.0,), (32.0,))


def test_a_scheduler_that_started_anew_is_not_compared_with_the_one_before() -> None:
    meter = RateMeter()
    for at_s in (10.0, 11.0):
        meter.add(answers(at_s, num_tokens=5000))
    restarted = Answers(at_s=20.0, state=state(uptime_ms=2000, num_output_tokens=6000))
    picture = meter.add(restarted)
    assert picture.rates.output_tokens is None
    assert picture.output_history == ()


def test_the_model_stays_while_executors_are_away_and_not_over_a_restart() -> None:
    meter = RateMeter()
    not_ready = "not ready: no executor is attached"
    away = [
        Answers(at_s=at_s, state=state(lost_executor(), uptime_ms=round(at_s * 1000), status_text=not_ready))
        for at_s in (9.0, 11.0)
    ]
    assert meter.add(away[0]).model_ids == ()
    assert meter.add(answers(10.0)).model_ids == ("smollm2",)
    kept = meter.add(away[1])
    assert kept.model_ids == ("smollm2",)
    assert f"   smollm2   {not_ready}" in overview_lines(kept, "a:1", 120)[0].plain
    assert meter.add(Answers(at_s=20.0, state=state(lost_executor(), uptime_ms=2000))).model_ids == ()


def test_an_id_that_is_used_again_is_another_request() -> None:
    meter = RateMeter()
    meter.add(answers(10.0, running("a", 5000, num_output_tokens=10)))
    picture = meter.add(answers(11.0, running("a", 300, num_output_tokens=90)))
    assert not picture.rates.request_output_tokens


def test_a_beam_search_that_dropped_beams_has_no_negative_rate() -> None:
    meter = RateMeter()
    meter.add(answers(10.0, running("a", 1000, num_output_tokens=40)))
    picture = meter.add(answers(11.0, running("a", 2000, num_output_tokens=30)))
    assert picture.rates.request_output_tokens == {"a": 0.0}


# What is asked for -------------------------------------------------------------------------------


async def test_a_bounded_number_of_requests_is_asked_for() -> None:
    source = Scripted(state=state(num_waiting_requests=5000), live=[waiting(f"w{i}") for i in range(5000)])
    source.queue = [admin_pb2.QueuedRequest(request_id="w0", reason="needs 12 blocks, 8 free")]
    poller = Poller(source, clock=lambda: 7.0)
    taken = await poller.take()
    assert (len(taken.live), taken.num_live_requests, taken.ended) == (200, 5000, None)
    assert (taken.at_s, taken.reasons) == (7.0, {"w0": "needs 12 blocks, 8 free"})
    await poller.take(wants_ended=True, is_searching=True)
    assert source.limits == [200, 200, 1000, 1000, 1000]


async def test_an_empty_queue_is_not_asked_for() -> None:
    source = Scripted(state=state(executor(), lost_executor()))
    await Poller(source).take()
    assert source.limits == [200]
