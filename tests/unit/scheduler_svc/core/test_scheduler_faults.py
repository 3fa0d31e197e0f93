"""A result that no correct executor sends is refused, and nothing of it is taken."""

import numpy as np
import pytest

from shared.errors import ExecutorFaultError
from shared.step import StepResult
from tests.support.driving import Bench, delivered, small_limits

FAULTS = {
    "an older step": (StepResult(1, 0, np.array([7], np.int32)), "epoch 1 step 0 came instead of 1 1"),
    "a later step": (StepResult(1, 2, np.array([7], np.int32)), "epoch 1 step 2 came instead of 1 1"),
    "another epoch": (StepResult(2, 1, np.array([7], np.int32)), "epoch 2 step 1 came instead of 1 1"),
    "too few tokens": (StepResult(1, 1, np.array([], np.int32)), "0 sampled tokens for 1 rows"),
    "too many tokens": (StepResult(1, 1, np.array([7, 7], np.int32)), "2 sampled tokens for 1 rows"),
    "a negative token": (StepResult(1, 1, np.array([-1], np.int32)), "token ids outside 0 to 99999"),
    "a token beyond the vocabulary": (StepResult(1, 1, np.array([100_000], np.int32)), "outside 0 to 99999"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_result_is_refused_and_the_right_one_still_counts(fault: str) -> None:
    result, message = FAULTS[fault]
    bench = Bench(small_limits())
    bench.add(0, 3)
    bench.schedule()

    with pytest.raises(ExecutorFaultError, match=message):
        bench.scheduler.process(result)

    assert bench.scheduler.last_processed_step_id == 0
    assert delivered(bench.process()) == {"a": 103}


def test_result_without_a_step_in_flight_is_refused() -> None:
    bench = Bench(small_limits())

    with pytest.raises(ExecutorFaultError, match="no step is in flight"):
        bench.scheduler.process(StepResult(1, 1, np.array([7], np.int32)))


def test_result_after_evacuation_is_refused() -> None:
    bench = Bench(small_limits())
    bench.add(0, 3)
    bench.schedule()
    bench.scheduler.evacuate()

    with pytest.raises(ExecutorFaultError, match="no step is in flight"):
        bench.scheduler.process(bench.results[0])
