"""How fast steps are: the shortest of the recent ones, and none that may have compiled."""

from scheduler_svc.core.step.step_pace import StepPace
from tests.unit.scheduler_svc.core.step.test_step_cost import step


def test_the_first_step_of_a_kind_says_nothing() -> None:
    pace = StepPace(16)
    pace.learn(step(1), 10.0)
    pace.learn(step(0, 4), 10.0)
    pace.learn(step(0, 16), 10.0)
    assert (pace.step_s, pace.large_step_s) == (None, None)


def test_the_shortest_of_the_recent_steps_counts() -> None:
    pace = StepPace(16)
    for duration_s in (9.0, 0.01, 0.03):
        pace.learn(step(1), duration_s)
    assert (pace.step_s, pace.large_step_s) == (0.01, 0.01)
    for duration_s in (9.0, 0.5, 0.4):
        pace.learn(step(2, 8), duration_s)
    assert (pace.step_s, pace.large_step_s) == (0.01, 0.4)
    for _ in range(16):
        pace.learn(step(4), 0.02)
    assert pace.step_s == 0.02
