from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.suspects import LOSSES_OF_A_SUSPECT, Suspects
from tests.support.driving import group
from tests.support.live_requests import live_request


def request(arrival: int, num_losses: int = LOSSES_OF_A_SUSPECT) -> LiveRequest:
    """Return a request that ran on an executor when it was lost so many times."""
    return live_request(group(arrival, 1), num_losses=num_losses)


def test_who_lost_an_executor_once_is_no_suspect() -> None:
    suspects = Suspects()
    assert all(suspects.may_run(request(arrival, LOSSES_OF_A_SUSPECT - 1)) for arrival in range(3))
    assert suspects.current is None
    assert not suspects.parked


def test_losses_that_are_not_clear_yet_make_suspects_and_are_forgotten_with_them() -> None:
    suspects, first, second, third, fourth = Suspects(), *(request(arrival, 1) for arrival in range(4))
    for each in (first, second, third, fourth):
        each.note_loss("a:1", counts=False)
    assert [suspects.may_run(each) for each in (first, second, third, fourth)] == [True, False, False, False]
    third.note_loss("b:1", counts=True)
    for each in (first, second, third, fourth):
        del each.unclear_losses["a:1"]
    assert suspects.absolve() == [second, fourth, third]
    assert suspects.current is third
    assert not suspects.parked


def test_suspects_run_one_at_a_time_and_the_innocent_beside_them() -> None:
    suspects, first, second = Suspects(), request(1), request(2)
    assert suspects.may_run(first)
    assert not suspects.may_run(second)
    assert suspects.may_run(request(3, 0))
    assert suspects.current is first
    assert suspects.parked == [second]


def test_the_suspect_that_runs_may_run_again_after_another_loss() -> None:
    suspects, first = Suspects(), request(1)
    assert suspects.may_run(first)
    first.num_losses += 1
    assert suspects.may_run(first)
    assert not suspects.parked


def test_a_token_of_the_one_that_runs_lets_the_next_one_run_by_arrival() -> None:
    suspects, first = Suspects(), request(5)
    others = [request(arrival) for arrival in (9, 2, 7)]
    suspects.may_run(first)
    for other in others:
        suspects.may_run(other)
    assert [parked.group.arrival for parked in suspects.parked] == [2, 7, 9]
    following = suspects.clear(first)
    assert following is others[1]
    assert suspects.current is following
    assert [parked.group.arrival for parked in suspects.parked] == [7, 9]


def test_after_the_last_one_nobody_is_suspected() -> None:
    suspects, only = Suspects(), request(1)
    suspects.may_run(only)
    assert suspects.clear(only) is None
    assert suspects.current is None


def test_a_token_of_the_innocent_clears_nobody() -> None:
    suspects, first, second = Suspects(), request(1), request(2)
    suspects.may_run(first)
    suspects.may_run(second)
    assert suspects.clear(request(3, 0)) is None
    assert suspects.current is first
    assert suspects.parked == [second]


def test_a_parked_request_that_ends_is_forgotten() -> None:
    suspects, first, second, third = Suspects(), request(1), request(2), request(3)
    for each in (first, second, third):
        suspects.may_run(each)
    assert suspects.clear(second) is None
    assert suspects.clear(first) is third
    assert not suspects.parked
