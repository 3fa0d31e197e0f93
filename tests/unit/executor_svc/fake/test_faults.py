"""The fake executor's faults, at the steps that its flags name."""

from collections.abc import Sequence

import pytest

from executor_svc.config import FakeConfig
from executor_svc.fake.__main__ import make_worker
from executor_svc.fake.faults import FakeFaults, FaultPlan, parse_slow_step_every
from octavo_shared.errors import StepFailedError
from octavo_shared.process.config import ConfigError, load_config
from tests.support.each_row import each_row
from tests.support.fake_runs import Run, admission


def faults_of(plan: FaultPlan, num_steps: int) -> list[str]:
    """Return what happens in each of so many steps."""
    happened: list[str] = []

    def note(what: str) -> None:
        happened[-1] += what

    faults = FakeFaults(
        plan,
        sleep=lambda seconds: note(f"slow {seconds:g} "),
        hang=lambda: note("hang "),
        end_process=lambda code: note(f"exit {code} "),
    )
    for _ in range(num_steps):
        happened.append("")
        try:
            faults.begin_step()
        except StepFailedError:
            note("fail ")
    return [what.strip() for what in happened]


@each_row(
    (FaultPlan(), ["", "", "", ""]),
    (FaultPlan(fail_step_every=1), ["fail"] * 4),
    (FaultPlan(fail_step_every=2), ["", "fail", "", "fail"]),
    (FaultPlan(hang_step_every=3), ["", "", "hang", ""]),
    (FaultPlan(exit_after_steps=3), ["", "", "", "exit 1"]),
    (FaultPlan(slow_step_every=2, slow_step_ms=250.0), ["", "slow 0.25", "", "slow 0.25"]),
    (FaultPlan(slow_step_every=2, slow_step_ms=1.0, fail_step_every=2), ["", "slow 0.001 fail"] * 2),
)
def test_faults_come_at_the_steps_that_were_named(plan: FaultPlan, expected: Sequence[str]) -> None:
    assert faults_of(plan, 4) == expected


def test_the_flags_reach_the_worker_and_steps_are_counted_over_attachments() -> None:
    config = load_config(FakeConfig, ["--fail-step-every", "3", "--slow-step-every", "2:0.5"], {})
    assert parse_slow_step_every(config.slow_step_every) == (2, 0.5)
    run = Run(make_worker(config))
    run.prefill(admission("abc", (0,)))
    run.worker.reset()
    run.prefill(admission("abc", (0,)))
    with pytest.raises(StepFailedError, match="--fail-step-every"):
        run.decode()


@each_row("5", "0:10", "2:", "2:-1", ":3")
def test_a_slow_step_every_that_is_no_number_and_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slow-step-every"):
        load_config(FakeConfig, ["--slow-step-every", text], {})
