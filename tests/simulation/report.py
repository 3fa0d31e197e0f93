"""What a failing plan tells: the first event that differs without its last fault, and the last steps.

The steps are those of the core that the broken promise is about, in the words of the trace files.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from tests.simulation.plan import FaultPlan, Plan
from tests.simulation.run import Outcome, simulate
from tests.simulation.trace import Trace, TraceEvent

NUM_LAST_STEPS = 10
NUM_EVENTS_AROUND = 4


@dataclass(frozen=True, slots=True)
class Traced:
    """A run with its trace."""

    outcome: Outcome
    trace: Trace


def traced(plan: Plan) -> Traced:
    """Run a plan and keep all that happens."""
    trace = Trace()
    return Traced(simulate(plan, (trace,)), trace)


def report(plan: Plan, run: Callable[[Plan], Traced] = traced) -> Iterator[str]:
    """Yield the lines of a report on a plan that breaks a promise."""
    failing = run(plan)
    yield f"seed {plan.seed}, {plan.mode}: {failing.outcome.broken or 'every promise was kept'}"
    yield ""
    last = last_fault(failing.outcome)
    if last is None:
        yield "No fault is left: it is broken without any."
    else:
        yield from _difference(last, failing, run(without(plan, last)))
    yield ""
    yield from _last_steps(failing)


def last_fault(outcome: Outcome) -> FaultPlan | None:
    """Return the fault that struck last; None: none did."""
    at_s = outcome.faults_at_s
    began = [fault for fault in outcome.plan.faults if fault.number in at_s]
    return max(began, key=lambda fault: at_s[fault.number], default=None)


def without(plan: Plan, fault: FaultPlan) -> Plan:
    """Return a plan in which nothing happens in place of a fault, so that all is as it was until then."""
    faults = tuple(replace(other, is_taken_away=True) if other is fault else other for other in plan.faults)
    return replace(plan, faults=faults)


def first_difference(ours: Sequence[TraceEvent], theirs: Sequence[TraceEvent]) -> int | None:
    """Return the place of the first event that differs; None: all are equal."""
    pairs = enumerate(zip_longest(ours, theirs))
    return next((place for place, (one, other) in pairs if one != other), None)


def _difference(last: FaultPlan, failing: Traced, other: Traced) -> Iterator[str]:
    what = other.outcome.broken or "every promise is kept"
    at_s = failing.outcome.faults_at_s[last.number]
    yield f"Without its last fault, {last.kind} {last.number} at {at_s:.6f} s: {what}"
    ours, theirs = (_without_fault(side.trace.events, last) for side in (failing, other))
    place = first_difference(ours, theirs)
    if place is None:
        yield "Nothing else differs."
        return
    yield "The first event that differs, and what came before:"
    yield from (f"    both     {_line(event)}" for event in ours[max(0, place - NUM_EVENTS_AROUND) : place])
    for name, side in (("with", ours), ("without", theirs)):
        yield f"    {name:<8} {_line(side[place]) if place < len(side) else 'the run is over'}"


def _without_fault(events: Sequence[TraceEvent], fault: FaultPlan) -> list[TraceEvent]:
    """Return events but for those that only say that a fault is there."""
    own = f"{fault.kind} {fault.number} "
    return [event for event in events if not (event.where == "fault" and event.what.startswith(own))]


def _last_steps(failing: Traced) -> Iterator[str]:
    trace = failing.trace
    planner = concerned_core(trace, failing.outcome.broken)
    if planner is None:
        yield "No core has decided anything."
        return
    places = [place for place, event in enumerate(trace.events) if event.where == planner and "step" in event.what]
    begin = places[-2 * NUM_LAST_STEPS :][0]  # a step has a decision and a result
    process, address = planner.split()
    names = {planner, "fault", "promise", process, address}
    yield f"The last {NUM_LAST_STEPS} steps of {planner}, and what happened around them:"
    for event in trace.events[begin:]:
        if event.where in names or event.where.split("#")[0] == address:
            yield str(event)
    if planner in trace.states:
        yield f"Where its sequences were when the promise was broken ({planner}):"
        yield from (f"    {line}" for line in trace.states[planner])


def concerned_core(trace: Trace, broken: str) -> str | None:
    """Return the core that a broken promise is about: by an executor or a request that it names; or the last one."""
    executor = re.search(r"\bexecutor\d+:\d+", broken)
    request = re.search(r"\b(?:r|last)\d+(?:\.\d+)?\b", broken)
    last = None
    for event in reversed(trace.events):
        if event.where not in trace.planners:
            continue
        last = last or event.where
        if executor is not None and event.where.endswith(executor[0]):
            return event.where
        if executor is None and request is not None and any(_names(line, request[0]) for line in event.lines):
            return event.where
    return last


def _names(line: str, request_id: str) -> bool:
    return re.search(rf"\b{re.escape(request_id)}(?![\w]|\.\d+\.)", line) is not None


def _line(event: TraceEvent) -> str:
    return f"{event.at_s:.6f} s, {event.where}: {'; '.join([event.what, *(line.strip() for line in event.lines)])}"
