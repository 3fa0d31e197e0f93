"""Streams rest while the loop is late, a bounded time, and no longer than that."""

from scheduler_svc.front.delta_pace import LONGEST_REST_S, SHORTEST_REST_S, DeltaPace


def test_streams_do_not_rest_while_the_loop_has_time() -> None:
    pace = DeltaPace()
    for lag_s in (0.0, 0.004, 0.019):
        pace.note(lag_s)
        assert pace.rest_s == 0.0


def test_a_late_loop_lets_them_rest_longer_and_longer_up_to_a_bound_and_back() -> None:
    pace, rests = DeltaPace(), []
    for _ in range(8):
        pace.note(0.05)
        rests.append(pace.rest_s)
    assert rests[0] == SHORTEST_REST_S
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST_S
    pace.note(0.01)
    assert pace.rest_s == LONGEST_REST_S, "neither late nor early"
    for _ in range(20):
        pace.note(0.0)
    assert pace.rest_s == 0.0
