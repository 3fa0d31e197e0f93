from scheduler_svc.executors.circuit_breaker import BACKOFF, Backoff, CircuitBreaker
from tests.support.each_row import each_row


@each_row((1, 1.0, 0.5), (1, 0.0, 0.25), (2, 1.0, 1.0), (4, 0.5, 3.0), (7, 1.0, 30.0), (1000, 0.0, 15.0))
def test_pauses_double_up_to_the_longest_and_a_random_part_of_half_is_left_out(
    num_failures: int, share: float, pause_s: float
) -> None:
    assert BACKOFF.pause_s(num_failures, share) == pause_s


def test_a_process_that_failed_waits_and_a_new_one_does_not() -> None:
    breaker = CircuitBreaker(lambda: 1.0, Backoff(4.0, 60.0))
    assert breaker.is_closed
    breaker.fail("old", "it broke", 100.0)
    assert [breaker.wait_s("old", now_s) for now_s in (100.0, 103.0, 104.0, 200.0)] == [4.0, 1.0, 0.0, 0.0]
    assert breaker.wait_s("new", 100.0) == 0.0
    assert not breaker.is_closed


def test_failures_in_a_row_wait_longer_until_a_step_has_finished() -> None:
    breaker = CircuitBreaker(lambda: 1.0, Backoff(1.0, 60.0))
    for _ in range(3):
        breaker.fail("a", "it broke", 0.0)
    assert breaker.wait_s("a", 0.0) == 4.0
    breaker.close()
    assert breaker.is_closed
    assert breaker.wait_s("a", 0.0) == 0.0
    breaker.fail("a", "it broke", 0.0)
    assert breaker.wait_s("a", 0.0) == 1.0
