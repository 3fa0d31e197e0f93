"""The driver of random workloads (tests/support/workloads.py) notices what it is there to notice."""

from dataclasses import replace

import pytest

from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.request.parameters import StopConditions
from tests.support.driving import small_limits
from tests.support.workloads import Request, Workload, play

# Two outputs whose first tokens fit into the pool, and whose last ones do not.
GROWS_TOO_LARGE = Workload(
    small_limits(vocab_size=13, blocks=3, max_model_len=12, block_size=4),
    [Request([1, 2, 3, 4], StopConditions(max_tokens=8), num_sequences=2)],
)


def test_a_failure_that_is_told_once_is_fine() -> None:
    assert play(GROWS_TOO_LARGE, 1).failed == [0]


def test_a_failure_that_is_told_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = ExecutorPlanner.schedule

    def tell_twice(planner: ExecutorPlanner, now_s: float) -> Decision:
        decision = schedule(planner, now_s)
        return replace(decision, failures=2 * decision.failures)

    monkeypatch.setattr(ExecutorPlanner, "schedule", tell_twice)
    with pytest.raises(AssertionError, match="a group failed twice"):
        play(GROWS_TOO_LARGE, 1)
