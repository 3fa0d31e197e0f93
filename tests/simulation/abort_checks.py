"""The promise on aborts: what nobody waits for any more is computed no further than the word of it takes to come.

- When a call has ended, for whatever reason, its core hears of it after so many delays of the network, unless one on
  the way stands still, is cut off or ended without a word. From then on it computes nothing of that request, wherever
  the word was when a core, a front or a way between them died.
- A core that was asked to abort a request computes nothing of it, also if a front submits it only then.

So such a request costs the steps that are decided until the word comes, and those in flight then.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.link.front_session import FrontSession, _RemoteSink
from tests.simulation.machines import SchedulerMachine
from tests.simulation.processes import SimulatedProcess
from tests.simulation.watching import Watcher

if TYPE_CHECKING:
    from tests.simulation.checks import RequestRecord
    from tests.simulation.world import World

# Messages that are on their way one after the other: the end of a call, what is before it on the link, and the abort.
_MESSAGES = 4

# What the processes take for it, and a writer that waits for its window, in seconds.
_WORK_S = 0.1

# A scheduler that has decided nothing for so long may have stood still, in seconds.
_STANDS_STILL_S = 1.0


@dataclass(slots=True)
class _Call:
    """The call of a request; `word_since_s`: when the word of its end could begin its way, by scheduler process."""

    record: "RequestRecord"
    client: SimulatedProcess | None
    ended_at_s: float | None = None
    word_since_s: dict[SimulatedProcess, float] = field(default_factory=dict)


@dataclass(slots=True)
class AbortChecks(Watcher):
    """Watches all schedulers of a run.

    Args:
        world: Of the run.
    """

    world: "World"
    _calls: dict[str, _Call] = field(default_factory=dict)  # by request id
    _namesakes: set[str] = field(default_factory=set)
    _asked_at_s: dict[tuple[str, str], float] = field(default_factory=dict)  # by process and request id
    _fronts: dict[FrontSession, SimulatedProcess | None] = field(default_factory=dict)
    _decided_at_s: dict[str, float] = field(default_factory=dict)

    def run_ended(self) -> None:
        """See `Watcher`."""
        for kept in (self._calls, self._fronts):
            kept.clear()

    def sent(self, record: "RequestRecord") -> None:
        """See `Watcher`."""
        if record.request_id in self._calls:
            self._namesakes.add(record.request_id)
        self._calls[record.request_id] = _Call(record, self.world.clients[record.plan.client].process)

    def answered(self, record: "RequestRecord") -> None:
        """See `Watcher`."""
        self._calls[record.request_id].ended_at_s = self.world.loop.time()

    def asked_to_abort(self, process: str, request_id: str) -> None:
        """See `Watcher`; an operator, or a client after its request was accepted, asks for it."""
        self._asked_at_s.setdefault((process, request_id), self.world.loop.time())

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        if decision.step is None:
            return
        now_s = self.world.loop.time()
        stood_still = now_s - self._decided_at_s.get(process, now_s) > _STANDS_STILL_S
        self._decided_at_s[process] = now_s
        for group in planner.batch.running:
            call = self._calls.get(group.request_id)
            if call is None or group.request_id in self._namesakes:
                continue
            if call.ended_at_s is not None:
                self._look_at_ended(process, group, call, stood_still=stood_still)
            if (process, group.request_id) in self._asked_at_s and not call.record.goes_on:
                self._look_at_asked(process, group, call)

    def _look_at_ended(self, process: str, group: SequenceGroup, call: _Call, *, stood_still: bool) -> None:
        machine, now_s = self._machine(process), self.world.loop.time()
        if machine is None or machine.process is None or call.ended_at_s is None:
            return
        weather = self.world.network.weather
        word_s = _WORK_S + _MESSAGES * (weather.latency_s + weather.jitter_s + weather.rare_delay_s)
        since_s = call.word_since_s.setdefault(machine.process, now_s)
        if stood_still or not self._passes(machine, group, call):
            call.word_since_s[machine.process] = now_s
        elif now_s - since_s > word_s:
            self.world.checks.break_promise(
                f"{process} computes for {group.request_id}, whose call ended {now_s - call.ended_at_s:.2f} s ago; the "
                f"word of it takes {word_s:.2f} s, and nothing was in its way for {now_s - since_s:.2f} s"
            )

    def _passes(self, machine: SchedulerMachine, group: SequenceGroup, call: _Call) -> bool:
        """Return whether nothing is in the way of the word now."""
        network, client, process = self.world.network, call.client, machine.process
        assert machine.scheduler is not None
        assert process is not None
        if client is None or not client.is_running:
            return False
        sink = machine.scheduler.engine.requests.of(group).sink
        if not isinstance(sink, _RemoteSink):
            return network.reaches(client, process)
        [now] = [front.process for front in self.world.fronts if front.name == sink._session.name]
        front = self._fronts.setdefault(sink._session, now)
        return (
            front is now
            and front is not None
            and front.is_running
            and network.reaches(client, front)
            and network.reaches(front, process)
        )

    def _look_at_asked(self, process: str, group: SequenceGroup, call: _Call) -> None:
        """A request that came after the Abort is another one if it is younger; its way here made that uncertain."""
        machine, asked_at_s = self._machine(process), self._asked_at_s[process, group.request_id]
        if machine is None or machine.scheduler is None or not call.record.events:
            return
        engine = machine.scheduler.engine
        came_at_s = engine.requests.of(group).times.arrived_at_s
        is_older = asked_at_s - call.record.accepted_at_s > came_at_s - engine.started_at_s
        if came_at_s <= asked_at_s or is_older:
            self.world.checks.break_promise(
                f"{process} computes for {group.request_id}, which it was asked to abort "
                f"{self.world.loop.time() - asked_at_s:.2f} s ago"
            )

    def _machine(self, process: str) -> SchedulerMachine | None:
        """Return where a scheduler process runs; None: another one is in its place."""
        for machine in self.world.schedulers:
            if machine.process is not None and machine.process.name == process:
                return machine
        return None
