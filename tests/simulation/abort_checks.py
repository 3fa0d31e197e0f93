"""The promise on aborts: what nobody waits for any more is computed no further than the word of it takes to come.

- From when a call has ended, for whatever reason, and its machines and the ways between them are undisturbed, the core
  has the word after so many delays of the network. It computes nothing of that request from then on, wherever the word
  was when a core, a front or a way between them died.
- A core that was asked to abort a request, also before a front submits it, computes nothing of it from then on.

So such a request costs the steps that are decided until the word comes, and those in flight then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.step.step_plan import Decision
from tests.simulation.network.client import RECONNECT_BACKOFF_S
from tests.simulation.network.link import SERVER_KEEPALIVE_S
from tests.simulation.plan import (
    CLIENT_FAULTS,
    CORE_FAULTS,
    FRONT_FAULTS,
    SCHEDULER_FAULTS,
    FaultPlan,
    Plan,
)
from tests.simulation.watching import Watcher

if TYPE_CHECKING:
    from tests.simulation.checks import RequestRecord
    from tests.simulation.world import World

# Faults of whoever carries the word.
_DISTURBING = frozenset((*CLIENT_FAULTS, *CORE_FAULTS, *FRONT_FAULTS, *SCHEDULER_FAULTS, "cut_client", "bad_weather"))

# Of some of them the others learn only when their keepalive fails.
_SILENT = frozenset(
    ("power_off_core", "power_off_front", "power_off_scheduler", "kill_client", "cut_client", "cut_front")
)
_NOTICED_S = SERVER_KEEPALIVE_S + 2 * RECONNECT_BACKOFF_S

# Messages that are on their way one after the other: the end of a call, what is before it on the link, and the abort.
_MESSAGES = 4

# What the processes take for it, and a writer that waits for its window, in seconds.
_WORK_S = 0.1


@dataclass(slots=True)
class AbortChecks(Watcher):
    """Watches all schedulers of a run.

    Args:
        plan: Of the run.
        time: Returns the time in seconds.
        accuse: Told of a broken promise.
    """

    plan: Plan
    time: Callable[[], float]
    accuse: Callable[[str], None]
    _ended_at_s: dict[str, float] = field(default_factory=dict)  # by request id
    _records: dict[str, "RequestRecord"] = field(default_factory=dict)
    _namesakes: set[str] = field(default_factory=set)
    _asked: dict[tuple[str, str], float] = field(default_factory=dict)  # by process and request id
    _num_faults: int = 0
    _quiet_since_s: float = 0.0

    @property
    def word_s(self) -> float:
        """How long a word takes at most where nothing is disturbed, in seconds."""
        weather = self.plan.weather
        return _WORK_S + _MESSAGES * (weather.latency_s + weather.jitter_s + weather.rare_delay_s)

    def fault_begins(self, world: "World", fault: FaultPlan) -> None:
        """See `Watcher`."""
        self._num_faults += fault.kind in _DISTURBING

    def fault_ended(self, fault: FaultPlan) -> None:
        """See `Watcher`."""
        if fault.kind in _DISTURBING:
            self._num_faults -= 1
            noticed_s = _NOTICED_S if fault.kind in _SILENT else 0.0
            self._quiet_since_s = max(self._quiet_since_s, self.time() + noticed_s)

    def sent(self, record: "RequestRecord") -> None:
        """See `Watcher`."""
        if record.request_id in self._records:
            self._namesakes.add(record.request_id)
        self._records[record.request_id] = record

    def answered(self, record: "RequestRecord") -> None:
        """See `Watcher`."""
        self._ended_at_s[record.request_id] = self.time()

    def asked_to_abort(self, process: str, request_id: str) -> None:
        """See `Watcher`; what its client had not seen accepted a while ago may be younger than the abort."""
        record = self._records.get(request_id)
        if record is None or record.goes_on or not record.events:
            return
        if self.time() - record.accepted_at_s > self.word_s:
            self._asked.setdefault((process, request_id), self.time())

    def decided(self, process: str, core: ExecutorCore, decision: Decision) -> None:
        """See `Watcher`."""
        if decision.step is None or self._num_faults:
            return
        now_s = self.time()
        for group in core.batch.running:
            request_id = group.request_id
            if request_id in self._namesakes:
                continue
            ended_at_s = self._ended_at_s.get(request_id)
            if ended_at_s is not None and now_s > (since_s := max(ended_at_s, self._quiet_since_s)) + self.word_s:
                self.accuse(
                    f"{core.name} computes for {request_id}, whose call has ended {now_s - ended_at_s:.2f} s ago; the "
                    f"word of it takes {self.word_s:.2f} s, and nothing disturbed it for {now_s - since_s:.2f} s"
                )
            asked_at_s = self._asked.get((process, request_id))
            if asked_at_s is not None and asked_at_s > self._quiet_since_s:
                self.accuse(
                    f"{core.name} computes for {request_id}, which {process} was asked to abort "
                    f"{now_s - asked_at_s:.2f} s ago"
                )
