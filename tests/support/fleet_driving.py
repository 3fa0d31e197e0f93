"""Drive a fleet by hand in tests: several cores, each with a toy executor."""

from collections import defaultdict, deque
from collections.abc import Mapping

from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.limits import SchedulerLimits
from scheduler_svc.core.policy import FcfsPolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting_queue import WaitingQueue
from shared.step import Step, StepResult
from tests.support.driving import delivered, small_limits
from tests.support.toy_executor import ToyExecutor, count_up


class FleetBench:
    """A fleet in which each core has a toy executor."""

    def __init__(self, *all_limits: SchedulerLimits, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.fleet = Fleet(WaitingQueue(FcfsPolicy(), tenant_weights), FcfsPolicy(), prefix_key=b"key")
        self.executors: dict[Scheduler, ToyExecutor] = {}
        self.results: dict[Scheduler, deque[StepResult]] = defaultdict(deque)
        self.outputs: dict[str, list[int]] = defaultdict(list)
        for limits in all_limits:
            self.join(limits)

    def join(self, limits: SchedulerLimits) -> Scheduler:
        core = self.fleet.join(limits, epoch=len(self.executors) + 1)
        self.executors[core] = ToyExecutor(limits, count_up)
        return core

    def add(self, added: SequenceGroup) -> SequenceGroup:
        self.fleet.queue.add(added)
        return added

    def schedule(self, core: Scheduler, now_s: float = 0.0) -> Step | None:
        step = core.schedule(now_s)
        core.check_integrity()
        if step is not None:
            self.results[core].append(self.executors[core].execute(step))
        return step

    def process(self, core: Scheduler) -> None:
        updates = core.process(self.results[core].popleft())
        core.check_integrity()
        for name, token_id in delivered(updates).items():
            self.outputs[name].append(token_id)

    def run(self) -> None:
        """Let all cores go on, in turn, until there is nothing left to do."""
        is_busy = True
        while is_busy:
            is_busy = False
            for core in self.fleet.cores:
                is_busy |= self.schedule(core) is not None
                while self.results[core]:
                    self.process(core)


def two_cores(*, prefix_caching: bool = False) -> tuple[FleetBench, Scheduler, Scheduler]:
    limits = small_limits(prefix_caching=prefix_caching)
    bench = FleetBench(limits, limits)
    first, second = bench.fleet.cores
    return bench, first, second
