"""What happened in a run: faults, lines of the log, requests, and steps in the words of the trace files."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.engine import Engine
from scheduler_svc.request.life import EndedRequest, EventKind
from tests.simulation.checks import RequestRecord
from tests.simulation.loop import START_S
from tests.simulation.plan import FaultPlan
from tests.simulation.watching import Watcher
from tests.simulation.world import World
from tests.support.step_words import decision_lines, state_lines, token_lines

_LEAVES = {EventKind.PREEMPTED: "preempt", EventKind.SWAPPED_OUT: "swapped", EventKind.DROPPED: "drop"}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that happened.

    Attributes:
        at_s: Virtual seconds since the run began.
        where: The process, or the core, that it happened in.
        what: In a line.
        lines: More of it: of a step, what it does.
    """

    at_s: float
    where: str
    what: str
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.at_s:10.6f}  {self.where:<28}  {self.what}", *(" " * 12 + line for line in self.lines)]
        )


class Trace(Watcher):
    """Keeps everything.

    Attributes:
        events: What happened.
        states: Of each core, where its sequences were when a promise was broken.
        cores: The names of all cores that have decided something.
    """

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []
        self.states: dict[str, list[str]] = {}
        self.planners: set[str] = set()
        self._clock: Callable[[], float] = lambda: START_S
        self._is_over = False
        self._cores: dict[str, ExecutorPlanner] = {}

    def run_begins(self, clock: Callable[[], float]) -> None:
        """See `Watcher`."""
        self._clock = clock

    def fault_begins(self, world: World, fault: FaultPlan) -> None:
        """See `Watcher`."""
        self._note("fault", f"{fault.kind} {fault.number} begins, target {fault.target}, for {fault.duration_s:g} s")

    def fault_ended(self, fault: FaultPlan) -> None:
        """See `Watcher`."""
        self._note("fault", f"{fault.kind} {fault.number} is over")

    def logged(self, process: str, event: Event) -> None:
        """See `Watcher`."""
        self._note(process, f"logs {event}")

    def sent(self, record: RequestRecord) -> None:
        """See `Watcher`."""
        options = {name: value for name, value in record.shape.options.items() if value}
        self._note(
            f"client{record.plan.client}",
            f"sends {record.request_id} to scheduler{record.plan.scheduler}: {record.shape.kind}, "
            f"{record.shape.num_prompt_tokens} tokens, {options}",
        )

    def answered(self, record: RequestRecord) -> None:
        """See `Watcher`."""
        if record.error is not None:
            how = f"{type(record.error).__name__}: {record.error}"
        elif record.finished is not None:
            how = f"{[len(output.token_ids) for output in record.finished.outputs]} tokens"
        else:
            how = "its client left"
        self._note(f"client{record.plan.client}", f"{record.request_id} ended after {record.events} events: {how}")

    def ended(self, process: str, engine: Engine, ended: EndedRequest) -> None:
        """See `Watcher`."""
        life = ", ".join(event.kind.value for event in ended.events)
        self._note(process, f"{ended.request_id} ended: {ended.outcome}; {life or 'it never ran'}")

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        where = _name(process, planner)
        self.planners.add(where)
        self._cores[where] = planner
        gone = [
            f"  {_LEAVES[event.kind]:<8} {event.group.request_id}" for event in decision.events if event.kind in _LEAVES
        ]
        gone += [f"  give up  {failure.group.request_id}: {failure.message}" for failure in decision.failures]
        if decision.in_flight is None:
            self._note(where, "decides no step", gone)
        else:
            step = decision.in_flight.step
            lines = [*gone, *decision_lines(planner, decision.in_flight, ())]
            self._note(where, f"step {step.step_id} of epoch {step.epoch}", lines)

    def processed(self, process: str, planner: ExecutorPlanner, result: StepResult, updates: StepUpdates) -> None:
        """See `Watcher`."""
        void = [f"  void     {updates.num_void_rows} rows"] if updates.num_void_rows else []
        self._note(_name(process, planner), f"result of step {result.step_id}", [*token_lines(updates), *void])

    def probed(self, process: str, address: str, *, works: bool) -> None:
        """See `Watcher`."""
        self._note(process, f"tried {address}: it {'works' if works else 'does not work'}")

    def linked(self, process: str, name: str) -> None:
        """See `Watcher`."""
        self._note(process, f"link: {name}")

    def broken(self, what: str) -> None:
        """See `Watcher`."""
        self._note("promise", f"BROKEN {what}")
        for name, planner in self._cores.items():
            try:
                self.states[name] = state_lines(planner, ())
            except Exception as error:  # what is broken may be what would be said
                self.states[name] = [f"its state cannot be told: {type(error).__name__}: {error}"]

    def run_ended(self) -> None:
        """See `Watcher`."""
        self._cores.clear()
        self._is_over = True  # what is left of tasks ends as garbage, and may still tell of it

    def _note(self, where: str, what: str, lines: Iterable[str] = ()) -> None:
        if self._is_over:
            return
        self.events.append(TraceEvent(round(self._clock() - START_S, 9), where, what, tuple(lines)))


def _name(process: str, planner: ExecutorPlanner) -> str:
    return f"{process} {planner.name}"
