"""Wherever an autoscaler of schedulers comes to rest, every executor has one."""

import math

from tests.k8s.policies_autoscaling import resting_places
from tests.support.each_row import each_row

EXECUTORS = range(1, 65)


@each_row(*EXECUTORS)
def test_the_number_of_schedulers_is_the_one_that_is_needed(executors: int) -> None:
    needed = math.ceil(executors / 8)

    assert resting_places(needed, 1.0, 1, 8) == {needed}


def test_a_threshold_of_max_executors_leaves_executors_without_a_scheduler() -> None:
    # Thirteen executors, two for each scheduler: 13 / (2 * 6) is within 10 % of 1.
    assert resting_places(13, 2.0, 1, 8) == {6, 7}
    assert any(min(resting_places(n, 8.0, 1, 8)) < math.ceil(n / 8) for n in EXECUTORS)


def test_beyond_ten_schedulers_the_tolerance_is_a_whole_one() -> None:
    assert resting_places(10, 1.0, 1, 32) == {10, 11}
    assert resting_places(12, 1.0, 1, 32) == {11, 12, 13}
