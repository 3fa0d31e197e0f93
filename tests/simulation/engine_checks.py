"""What is looked at inside a scheduler, beside the invariants of its cores: promises that no client can see broken.

- All executors of a fleet compute with the weights that are served, and none while it is paused.
- A core computes for live requests alone: whoever was aborted costs nothing any more.
- Every token that is computed is charged to a tenant.
- A request that no attached executor can hold waits `orphan_timeout_s` at most.
- An executor that answers no heartbeat for a lease is given up.
- Whoever lost its executor too often has ended.
- No group waits for a transfer beyond the deadline of that.
- Nobody is counted out but requests that break executors.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.life import EndedRequest
from tests.simulation.loop import SimulationLoop
from tests.simulation.shapes import POISON_TOKEN

# What an orphan waits beyond its time: until somebody looks, and until we do.
LATEST_LOOK_S = 3.0

# Losses that end a request: `EngineSettings.max_losses` and one.
LOSSES_TO_END = 4

# What a request is told that seems to break executors.
COUNTED_OUT = "while running this request"


@dataclass(slots=True)
class EngineChecks:
    """Watches one engine.

    Args:
        engine: From before its first step on.
        loop: Has the time.
        accuse: Told of a broken promise.

    Attributes:
        num_callbacks: How many of its callbacks have run.
        num_requests: How many requests it was given.
    """

    engine: Engine
    loop: SimulationLoop
    accuse: Callable[[str], None]
    num_callbacks: int = 0
    num_requests: int = 0
    _num_computed_tokens: int = 0
    _last_callback_s: float = 0.0
    _awake_since_s: float = 0.0
    _decides_since_s: float = 0.0  # when it was last seen in a pause
    _poisoned: set[tuple[str, str]] = field(default_factory=set)
    _takers: list[ExecutorPlanner] = field(default_factory=list)
    _orphans_since_s: dict[SequenceGroup, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.engine.schedule

        def count(*arguments: object) -> StepInFlight | None:
            sent = schedule(*arguments)  # type: ignore[arg-type]
            if sent is not None:
                self._look_at_weights(str(arguments[1]))
                layout = sent.layout
                num_drafts = int(layout.lengths[: layout.num_decodes].sum()) - layout.num_decodes
                self._num_computed_tokens += sent.workload.num_tokens - num_drafts
            return sent

        process = self.engine.fleet.process

        def count_proved(*arguments: object) -> StepUpdates:
            updates = process(*arguments)  # type: ignore[arg-type]
            self._num_computed_tokens += sum(updates.counts or ()) - len(updates.counts or ())
            return updates

        self.engine.schedule = count  # type: ignore[method-assign, assignment]
        self.engine.fleet.process = count_proved  # type: ignore[method-assign, assignment]
        add = self.engine.requests.add

        def note_poison(request: LiveRequest) -> None:
            is_poisoned = request.group.prompt_token_ids[0] == POISON_TOKEN
            (self._poisoned.add if is_poisoned else self._poisoned.discard)((request.group.tenant, request.request_id))
            self.num_requests += 1
            add(request)

        self.engine.requests.add = note_poison  # type: ignore[method-assign]
        self.engine.requests._observers += (self._look_at_end,)

    def note_callback(self) -> None:
        """A callback of the scheduler has run."""
        self.num_callbacks += 1
        now_s = self.loop.time()
        if now_s - self._last_callback_s > LATEST_LOOK_S:  # it was stalled, and could end nothing
            self._orphans_since_s.clear()
            self._awake_since_s = now_s
        self._last_callback_s = now_s
        takers = self.engine.fleet._takers
        if takers != self._takers:  # each change is seen, however soon the next one comes
            self._takers = takers
            self._look_at_orphans()

    def look(self) -> None:
        """Look at everything between two callbacks."""
        self._look_at_groups()
        self._look_at_losses()
        self._look_at_shares()
        self._look_at_orphans()
        self._look_at_leases()
        self._look_at_transfers()

    def _look_at_weights(self, address: str) -> None:
        session, weights = self.engine.drivers[address].session, self.engine.weights
        if session is not None and session.info.weights_digest != weights.version:
            self.accuse(f"{address} is sent a step, and has other weights than those that are served")
        if weights.is_paused:
            self.accuse(f"{address} is sent a step, and the fleet is paused")

    def _look_at_groups(self) -> None:
        requests = self.engine.requests
        for planner in self.engine.fleet.planners:
            for group in (*planner.batch.running, *planner.groups.returning):
                if requests._live(group) is None:
                    self.accuse(f"{planner.name} computes for {group.request_id}, which has ended")

    def _look_at_losses(self) -> None:
        for request in self.engine.requests.values():
            if request.num_lone_losses >= LOSSES_TO_END:
                self.accuse(f"{request.request_id} lives, and {request.num_lone_losses} losses count against it")

    def _look_at_shares(self) -> None:
        tenants = self.engine.queue._fair_share._tenants.values()
        num_charged = sum(tenant.served * tenant.weight for tenant in tenants)
        if abs(num_charged - self._num_computed_tokens) > 0.01:
            self.accuse(f"{self._num_computed_tokens} tokens were computed, and {num_charged:.1f} charged to tenants")

    def _look_at_orphans(self) -> None:
        now_s, engine = self.loop.time(), self.engine
        former, self._orphans_since_s = self._orphans_since_s, {}
        for request in engine._waiting_requests():
            if engine.fleet.can_ever_take(request.group):
                continue
            since_s = self._orphans_since_s[request.group] = former.get(request.group, now_s)
            if now_s - since_s > engine.orphans.timeout_s + LATEST_LOOK_S:
                self.accuse(f"{request.request_id} has found no executor that can hold it for {now_s - since_s:.1f} s")

    def _look_at_leases(self) -> None:
        for driver in self.engine.drivers.values():
            if driver.session is None:
                continue
            silent_since_s = max(driver.session._heartbeat_answered_at_s, self._awake_since_s)
            timings = driver.session._timings
            longest_s = timings.lease_s + 2 * timings.heartbeat_interval_s + timings.resume_timeout_s + LATEST_LOOK_S
            if (silent_s := self.loop.time() - silent_since_s) > longest_s:
                self.accuse(f"{driver.address} has answered no heartbeat for {silent_s:.1f} s, and is not given up")

    def _look_at_transfers(self) -> None:
        if self.engine.weights.holds_steps:  # in a pause nobody goes on, and nothing is lost
            self._decides_since_s = self.loop.time()
            return
        for group, transfer in self.engine.fleet.dispatcher.transfers.of_group.items():
            late_s = self.loop.time() - max(transfer.deadline_s, self._awake_since_s, self._decides_since_s)
            if late_s > LATEST_LOOK_S:
                self.accuse(f"{group.request_id} waits for a transfer, {late_s:.1f} s beyond its deadline")

    def _look_at_end(self, ended: EndedRequest) -> None:
        if COUNTED_OUT in ended.error_message and (ended.tenant, ended.request_id) not in self._poisoned:
            self.accuse(f"{ended.request_id} was counted out, and breaks no executor")
