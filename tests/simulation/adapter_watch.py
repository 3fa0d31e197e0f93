"""Rare things with adapters that show in what several executors or engines do."""

from dataclasses import dataclass, field

from octavo_shared.step_wire.step import StepResult
from scheduler_svc.core.fleet.fleet import InboxQueue
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_plan import Decision
from scheduler_svc.core.step.step_updates import StepUpdates
from scheduler_svc.engine.engine import Engine
from scheduler_svc.request.life import EndedRequest, EventKind
from tests.simulation.adapters import AFTER_AN_ENGINE, LOADED_AFTER_A_LOSS, NO_SLOT
from tests.simulation.sometimes import PREFIX
from tests.simulation.watching import Watcher
from tests.simulation.world import World


@dataclass(slots=True)
class AdapterWatch(Watcher):
    """Watches all schedulers of a run that has adapters.

    Args:
        world: Of the run.
    """

    world: World
    _loads: dict[tuple[str, bytes], ExecutorPlanner] = field(default_factory=dict)  # by process and adapter; not ended
    _lost: set[tuple[str, bytes]] = field(default_factory=set)  # whose executor was lost
    _began_at: dict[str, str] = field(default_factory=dict)  # the process, by request id

    def run_ended(self) -> None:
        """See `Watcher`."""
        self._loads.clear()

    def decided(self, process: str, planner: ExecutorPlanner, decision: Decision) -> None:
        """See `Watcher`."""
        if decision.step is None:
            return
        for load in decision.step.delta.adapter_loads:
            key = process, load.adapter.identity
            if (former := self._loads.get(key)) is not None and former is not planner and self._is_lost(former):
                self._lost.add(key)
            self._loads[key] = planner
        for event in decision.events:
            if event.kind is EventKind.ADMITTED and event.group.adapter is not None:
                self._began_at.setdefault(event.group.request_id, process)
        adapters = planner.batch.things.adapters
        if all(adapters.num_followers):
            queue = planner.admissions._queue
            assert isinstance(queue, InboxQueue)
            waiting = (group.adapter for group in queue._dispatcher.queue)
            if any(adapter is not None and adapters.slot_of(adapter) is None for adapter in waiting):
                self._count(NO_SLOT)

    def processed(self, process: str, planner: ExecutorPlanner, result: StepResult, updates: StepUpdates) -> None:
        """See `Watcher`."""
        for loaded in result.adapters_loaded:
            adapter = planner.batch.things.adapters.keys[loaded.slot]
            if adapter is None or self._loads.get((process, adapter.identity)) is not planner:
                continue
            del self._loads[process, adapter.identity]
            if (process, adapter.identity) in self._lost and not loaded.error:
                self._lost.discard((process, adapter.identity))
                self._count(LOADED_AFTER_A_LOSS)

    def ended(self, process: str, engine: Engine, ended: EndedRequest) -> None:
        """See `Watcher`."""
        began_at = self._began_at.get(ended.request_id, process)
        is_dead = all(it.process is None or it.process.name != began_at or not it.is_up for it in self.world.schedulers)
        if ended.num_earlier_tokens and ended.error_code is None and began_at != process and is_dead:
            self._count(AFTER_AN_ENGINE)

    def _is_lost(self, planner: ExecutorPlanner) -> bool:
        engines = [it.scheduler.engine for it in self.world.schedulers if it.scheduler and it.scheduler.has_begun]
        return not any(planner in engine.fleet.planners for engine in engines)

    def _count(self, name: str) -> None:
        self.world.checks.seen[PREFIX + name] += 1
