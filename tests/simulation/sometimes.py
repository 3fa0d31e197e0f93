"""Rare things that must have happened sometime in a long run: what never happens is not tested.

`RARE` has all of them. A run counts them; `python -m tests.simulation` shows those that never were.
"""

from collections import Counter, defaultdict

from octavo_shared.process.events import Event
from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.sequence import Sequence as TokenSequence
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.engine import Engine
from scheduler_svc.request.life import EndedRequest
from tests.simulation.adapters import RARE_WITH_ADAPTERS
from tests.simulation.checks import RequestRecord
from tests.simulation.link_watch import RARE_ON_THE_LINK
from tests.simulation.loop import SimulationLoop
from tests.simulation.plan import FaultPlan
from tests.simulation.rare import Rare
from tests.simulation.rare_faults import RARE_STRIKES, Strike
from tests.simulation.rare_lives import LOAD, RARE_LIVES, TEXT, Life, word_of
from tests.simulation.rare_steps import (
    RARE_ANSWERS,
    RARE_DECISIONS,
    RARE_LINES,
    RARE_RESULTS,
    Decided,
    Processed,
)
from tests.simulation.transfer_watch import RARE_TRANSFERS
from tests.simulation.watching import Watcher
from tests.simulation.weights import RARE_CHANGES
from tests.simulation.world import World

PREFIX = "sometimes: "

# Of a deadline and the end that it makes, in seconds: the end is told to the scheduler a little later.
_NEARLY_S = 0.02

# What needs more than one look.
_OTHERS = {
    "stop string behind a surplus token": "a text had its stop string, and a later token was under way",
    "taken over as its lease ran out": "another scheduler has an executor that nobody had given back",
    "window full": "a writer waited for its reader",
    "keepalive failed": "silence ended a connection",
}

_LINES = tuple(rare for _, rare in RARE_LINES)

RARE: dict[str, str] = (
    {
        rare.name: rare.sentence
        for table in (RARE_LIVES, RARE_DECISIONS, RARE_RESULTS, _LINES, RARE_ANSWERS, RARE_STRIKES)
        for rare in table
    }
    | _OTHERS
    | RARE_ON_THE_LINK
    | RARE_TRANSFERS
    | RARE_CHANGES
    | RARE_WITH_ADAPTERS
)


class Sometimes(Watcher):
    """Counts the rare things of a run.

    Args:
        seen: Where they are counted, with `PREFIX`.
        loop: Has the time.
    """

    def __init__(self, seen: Counter[str], loop: SimulationLoop) -> None:
        self._seen = seen
        self._loop = loop
        self._records: dict[str, tuple[RequestRecord, float]] = {}
        self._lines: defaultdict[str, list[Rare[Event]]] = defaultdict(list)
        for name, rare in RARE_LINES:
            self._lines[name].append(rare)
        self._holders: dict[str, str] = {}

    def count(self, name: str) -> None:
        """Something rare was seen."""
        self._seen[PREFIX + name] += 1

    def run_ended(self) -> None:
        """See `Watcher`; what is left of tasks ends as garbage, and is not counted."""
        self._seen = Counter()

    def fault_begins(self, world: World, fault: FaultPlan) -> None:
        """See `Watcher`."""
        strike = Strike(world, fault)
        for rare in RARE_STRIKES:
            if rare.is_seen(strike):
                self.count(rare.name)

    def logged(self, process: str, event: Event) -> None:
        """See `Watcher`."""
        for rare in self._lines.get(event.name, ()):
            if rare.is_seen(event):
                self.count(rare.name)
        if event.name == "attached" and "scheduler_id" in event.fields:
            self._note_holder(process, str(event.fields["scheduler_id"]))
        elif event.name == "detached":
            self._holders[process] = ""

    def _note_holder(self, executor: str, scheduler: str) -> None:
        """An executor has a scheduler now."""
        former, self._holders[executor] = self._holders.get(executor), scheduler
        if former and former != scheduler:
            self.count("taken over as its lease ran out")

    def sent(self, record: RequestRecord) -> None:
        """See `Watcher`."""
        self._records[record.request_id] = record, self._loop.time()

    def answered(self, record: RequestRecord) -> None:
        """See `Watcher`."""
        for rare in RARE_ANSWERS:
            if rare.is_seen(record):
                self.count(rare.name)

    def ended(self, process: str, engine: Engine, ended: EndedRequest) -> None:
        """See `Watcher`."""
        if ended.request_id not in self._records:  # nobody's call
            kind = LOAD if ended.request_id.startswith("load-adapter-") else TEXT
            self._note_life(Life(ended, kind, word_of(ended, has_left=False, is_late=False)))
            return
        record, sent_at_s = self._records[ended.request_id]
        timeout_s, now_s = record.plan.timeout_s, self._loop.time()
        is_late = timeout_s is not None and now_s >= sent_at_s + timeout_s - _NEARLY_S
        word = word_of(ended, has_left=record.left, is_late=is_late)
        self._note_life(Life(ended, record.shape.kind, word))

    def _note_life(self, life: Life) -> None:
        for rare in RARE_LIVES:
            if rare.is_seen(life):
                self.count(rare.name)

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        if decision.step is None:
            return
        decided = Decided(planner, decision, decision.step)
        for rare in RARE_DECISIONS:
            if rare.is_seen(decided):
                self.count(rare.name)

    def processed(self, process: str, planner: ExecutorPlanner, result: StepResult, updates: StepUpdates) -> None:
        """See `Watcher`."""
        processed = Processed(planner, updates)
        for rare in RARE_RESULTS:
            if rare.is_seen(processed):
                self.count(rare.name)

    def stopped(self, process: str, planner: ExecutorPlanner | None, sequence: TokenSequence) -> None:
        """See `Watcher`."""
        if (
            planner is not None
            and sequence.slot >= 0
            and any(sequence.slot in sent.layout.slots for sent in planner.in_flight)
        ):
            self.count("stop string behind a surplus token")

    def changed_weights(self, process: str, name: str) -> None:
        """See `Watcher`."""
        self.count(name)

    def linked(self, process: str, name: str) -> None:
        """See `Watcher`."""
        self.count(name)

    def transferred(self, process: str, name: str) -> None:
        """See `Watcher`."""
        self.count(name)
