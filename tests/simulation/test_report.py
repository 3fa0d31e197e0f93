from collections import Counter

import pytest

from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from tests.simulation import checks
from tests.simulation.draw import draw_plan
from tests.simulation.loop import START_S
from tests.simulation.plan import SAFETY, Plan
from tests.simulation.report import Traced, concerned_core, first_difference, last_fault, report, without
from tests.simulation.run import Outcome, simulate
from tests.simulation.trace import Trace, TraceEvent

PLAN = draw_plan(0, SAFETY)
CORE = "scheduler0:1#1 executor0:1"


def _traced(plan: Plan, broken: str, *events: TraceEvent) -> Traced:
    trace = Trace()
    trace.events = list(events)
    trace.planners = {event.where for event in events if event.what.startswith("step")}
    began = {fault.number: float(fault.number) for fault in plan.faults[:4]}
    return Traced(Outcome(plan, broken, 0, 0, 0, 0.0, Counter(), "", began), trace)


def test_a_report_names_the_first_event_that_differs_and_the_last_steps() -> None:
    last = PLAN.faults[3]
    same = TraceEvent(1.0, CORE, "step 1 of epoch 1", ("  admit    r1 in slot 0, blocks 0",))
    struck = TraceEvent(2.0, "fault", f"{last.kind} {last.number} begins, target 0, for 1 s")
    lost = TraceEvent(2.5, CORE, "step 2 of epoch 1", ("  decode   r1 position 4, samples",))
    fine = TraceEvent(2.5, CORE, "step 2 of epoch 1", ("  decode   r1 position 5, samples",))

    def run(plan: Plan) -> Traced:
        return (
            _traced(plan, "at 3 s: r1 ended twice", same, struck, lost)
            if plan is PLAN
            else _traced(plan, "", same, fine)
        )

    text = "\n".join(report(PLAN, run))

    assert f"Without its last fault, {last.kind} {last.number}" in text
    assert "every promise is kept" in text
    assert "with     2.500000 s, scheduler0:1#1 executor0:1: step 2 of epoch 1; decode   r1 position 4" in text
    assert "without  2.500000 s, scheduler0:1#1 executor0:1: step 2 of epoch 1; decode   r1 position 5" in text
    assert "  admit    r1 in slot 0, blocks 0" in text


def test_the_core_is_found_by_the_request_or_the_executor_that_is_named() -> None:
    one = TraceEvent(1.0, "s#1 executor0:1", "step 1 of epoch 1", ("  decode   r1 position 4",))
    other = TraceEvent(1.0, "s#1 executor1:1", "step 1 of epoch 1", ("  decode   r12 position 4",))
    trace = _traced(PLAN, "", one, other).trace

    assert concerned_core(trace, "at 3 s: r1 ended twice") == "s#1 executor0:1"
    assert concerned_core(trace, "at 3 s: step 1 on executor0:1#2: stale block") == "s#1 executor0:1"
    assert concerned_core(trace, "at 3 s: an invariant") == "s#1 executor1:1"


def test_nothing_differs_before_a_fault_that_is_taken_away() -> None:
    plan = draw_plan(2, SAFETY)
    with_it, without_it = Trace(), Trace()

    failing = simulate(plan, (with_it,))
    last = last_fault(failing)
    assert last is not None
    outcome = simulate(without(plan, last), (without_it,))

    place = first_difference(with_it.events, without_it.events)
    assert place is not None
    assert with_it.events[place].at_s >= failing.faults_at_s[last.number] - START_S - 1e-6
    assert any(fault.is_taken_away for fault in outcome.plan.faults)


def test_what_is_broken_is_told_with_the_state_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(planner: ExecutorPlanner) -> None:
        if planner.groups:
            raise AssertionError("a group is there")

    monkeypatch.setattr(checks, "check_integrity", fails)
    trace = Trace()

    outcome = simulate(draw_plan(3, SAFETY), (trace,))

    assert outcome.broken.endswith("an invariant: a group is there")
    assert trace.events[-1].what == f"BROKEN {outcome.broken}"
    assert any(line.startswith("free ") for lines in trace.states.values() for line in lines)
    assert "Where its sequences were" in "\n".join(report(outcome.plan))


@pytest.mark.slow  # a run that is looked into is above
def test_whoever_watches_changes_nothing() -> None:
    plan = draw_plan(3, SAFETY)
    trace = Trace()

    assert simulate(plan, (trace,)).digest == simulate(plan).digest
    assert any(line.startswith("  admit") for event in trace.events for line in event.lines)
