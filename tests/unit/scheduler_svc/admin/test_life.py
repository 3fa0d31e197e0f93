"""A request's life in words: the order of its events, their times, and how it ended."""

from dataclasses import replace

from octavo.admin.v1 import admin_pb2
from scheduler_svc.admin.explanation import duration_text, explain_ended
from scheduler_svc.admin.life import EVENT_KIND, ended_state, event_states
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes
from scheduler_svc.request.outputs import FinishReason
from tests.support.each_row import each_row

TIMES = RequestTimes(100.0, 100.25, 100.5, 102.0, 102.0)
ENDED = EndedRequest(
    request_id="a",
    tenant="ml",
    priority=3,
    num_prompt_tokens=12,
    num_output_tokens=7,
    num_cached_tokens=8,
    num_preemptions=1,
    num_losses=0,
    times=TIMES,
    events=(
        LifeEvent(EventKind.ADMITTED, 100.25, "e1", 4, 12, 8),
        LifeEvent(EventKind.PREEMPTED, 101.0, "e1", 9, 15),
        LifeEvent(EventKind.ADMITTED, 101.5, "e2", 2, 15),
    ),
    ended_at_unix_s=1_800_000_000.0,
    finish_reason=FinishReason.LENGTH,
    error_code=None,
    error_message="",
)


def test_every_kind_of_event_has_a_name_on_the_wire_and_words() -> None:
    assert set(EVENT_KIND) == set(EventKind)
    assert len(set(EVENT_KIND.values())) == len(EVENT_KIND)
    texts = [event_states(TIMES, 1, [LifeEvent(kind, 101.0)])[-1].text for kind in EventKind]
    assert all(texts)
    assert len(set(texts)) == len(texts)


def test_events_come_in_the_order_of_time_with_the_arrival_first_and_the_end_last() -> None:
    events = ended_state(ENDED, 110.0).events
    told = [(event.since_arrival_us, event.executor, event.text) for event in events]
    assert told == [
        (0, "", "arrived with 12 prompt tokens"),
        (250_000, "e1", "admitted; of 12 tokens, 8 came from the prefix cache"),
        (500_000, "", "first token"),
        (1_000_000, "e1", "preempted; 15 tokens will be recomputed"),
        (1_500_000, "e2", "admitted; of 15 tokens, 0 came from the prefix cache"),
        (2_000_000, "", "finished with 7 output tokens: length"),
    ]
    assert [event.step_id for event in events if event.HasField("step_id")] == [4, 9, 2]
    assert events[0].HasField("since_arrival_us"), "0 is a time, and shown"


def test_an_ended_request_has_its_counts_and_times() -> None:
    state = ended_state(ENDED, 110.0)
    assert state.status == admin_pb2.REQUEST_STATUS_ENDED
    assert (state.queue_ms, state.time_to_first_token_ms, state.age_ms, state.ended_ago_ms) == (250, 500, 2000, 8000)
    assert (state.num_prompt_tokens, state.num_output_tokens, state.num_cached_tokens) == (12, 7, 8)
    assert (state.tenant, state.priority, state.outcome) == ("ml", 3, "length")
    failed = replace(ENDED, finish_reason=None, error_code="INTERNAL")
    texts = [ended_state(each, 110.0).status_text for each in (ENDED, failed, replace(failed, error_code="ABORTED"))]
    assert texts == ["finished", "failed", "aborted"]
    assert not state.HasField("last_token_age_ms")
    assert not ended_state(ENDED, 110.0, shows_events=False).events


def test_one_that_never_ran_has_no_times_that_never_came() -> None:
    never_ran = replace(
        ENDED,
        times=RequestTimes(100.0, ended_at_s=101.0),
        events=(),
        num_output_tokens=0,
        num_preemptions=0,
        finish_reason=None,
        error_code="ABORTED",
        error_message="request 'a' was aborted",
    )
    state = ended_state(never_ran, 110.0)
    assert not state.HasField("queue_ms")
    assert not state.HasField("time_to_first_token_ms")
    assert [event.text for event in state.events][1:] == [
        "failed after 0 output tokens: ABORTED: request 'a' was aborted"
    ]
    assert explain_ended(never_ran, 110.0).explanation == (
        "9.0 s ago it failed after 0 output tokens: ABORTED: request 'a' was aborted"
    )


def test_the_end_is_explained_without_the_times_that_the_state_has() -> None:
    explained = explain_ended(ENDED, 110.0)
    assert explained.status == admin_pb2.REQUEST_STATUS_ENDED
    assert explained.explanation == "8.0 s ago it finished with 7 output tokens: length"


@each_row((0, "0.000 s"), (42, "0.042 s"), (999, "0.999 s"), (59_940, "59.9 s"), (185_300, "3 min 5 s"))
def test_spans_of_time_are_said_as_people_say_them(milliseconds: int, text: str) -> None:
    assert duration_text(milliseconds) == text
