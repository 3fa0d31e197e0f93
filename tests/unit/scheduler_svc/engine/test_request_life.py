"""How much of a request's life is remembered, and for how long after its end."""

from octavo_shared.errors import UnavailableError
from scheduler_svc.engine.ended_requests import EndedRequests
from scheduler_svc.engine.live_request import MAX_EVENTS, RequestLife
from scheduler_svc.request.life import EventKind, LifeEvent
from tests.support.live_requests import ended_request


def test_a_long_life_keeps_its_beginning_and_its_end() -> None:
    life = RequestLife()
    for second in range(10 * MAX_EVENTS):
        life.add(LifeEvent(EventKind.PREEMPTED, float(second)))
    times = [event.at_s for event in life.events]
    assert len(times) == MAX_EVENTS
    assert times == sorted(times)
    half = MAX_EVENTS // 2
    assert times[:half] == [float(second) for second in range(half)]
    assert times[half:] == [float(second) for second in range(10 * MAX_EVENTS - half, 10 * MAX_EVENTS)]


def test_the_last_ones_are_kept_and_the_newest_comes_first() -> None:
    ended = EndedRequests(capacity=3)
    for request_id in "abcde":
        ended.add(ended_request(request_id))
    assert [request.request_id for request in ended.newest(2)] == ["e", "d"]
    assert [request.request_id for request in ended.newest(99)] == ["e", "d", "c"]
    assert ended.get(("", "a")) is None
    assert ended["", "c"].outcome == "length"


def test_of_two_with_the_same_id_the_later_one_is_kept() -> None:
    ended = EndedRequests(capacity=3)
    for request_id, fails in (("a", False), ("b", False), ("a", True)):
        ended.add(ended_request(request_id, error=UnavailableError("the executor is gone") if fails else None))
    assert [request.request_id for request in ended.newest(9)] == ["a", "b"]
    assert ended["", "a"].outcome == "UNAVAILABLE: the executor is gone"
    assert ended["", "a"].has_failed
