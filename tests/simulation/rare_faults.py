"""Rare things in what a fault meets: what its target was doing when it struck."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.driver import ExecutorDriver
from tests.simulation.machines import ExecutorMachine, FrontMachine, SchedulerMachine
from tests.simulation.plan import ENGINE_FAULTS, EXECUTOR_FAULTS, FRONT_FAULTS, SCHEDULER_FAULTS, FaultPlan
from tests.simulation.rare import Rare
from tests.simulation.world import World

_ENDING = ("kill_executor", "power_off_executor", "shrink_executor", "change_numerics")


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that is about to strike."""

    world: World
    fault: FaultPlan

    @property
    def executor(self) -> ExecutorMachine:
        """The executor that it strikes, if it is one of executors or links."""
        return self.world.executors[self.fault.target % len(self.world.executors)]

    @property
    def scheduler(self) -> SchedulerMachine:
        """As `executor`."""
        return self.world.schedulers[self.fault.target % len(self.world.schedulers)]

    @property
    def front(self) -> FrontMachine | None:
        """The front that it strikes, if it is one of fronts; None: there is none."""
        fronts = self.world.fronts
        return fronts[self.fault.target % len(fronts)] if self.fault.kind in FRONT_FAULTS and fronts else None

    @property
    def engine(self) -> Engine | None:
        """The engine of the scheduler; None: it is down."""
        return _engine(self.scheduler)

    def drivers(self) -> Iterator[ExecutorDriver]:
        """Yield who drives the executor."""
        for machine in self.world.schedulers:
            engine = _engine(machine)
            if engine is not None and self.executor.name in engine.drivers:
                yield engine.drivers[self.executor.name]

    def planners(self) -> Iterator[ExecutorPlanner]:
        """Yield the core that decides for the executor."""
        for driver in self.drivers():
            if driver.planner is not None:
                yield driver.planner


def _engine(machine: SchedulerMachine) -> Engine | None:
    if not machine.is_up or machine.scheduler is None or not machine.scheduler.has_begun:
        return None
    return machine.scheduler.engine


def _meets(kinds: tuple[str, ...], sees: Callable[[ExecutorPlanner], object]) -> Callable[[Strike], bool]:
    return lambda strike: strike.fault.kind in kinds and any(sees(planner) for planner in strike.planners())


def _is_resuming(strike: Strike) -> bool:
    return strike.fault.kind in (*EXECUTOR_FAULTS, "cut_link", "reset_link") and any(
        driver.session is not None and driver.session.is_resuming for driver in strike.drivers()
    )


def _is_probed(strike: Strike) -> bool:
    return strike.fault.kind in EXECUTOR_FAULTS and any(
        not driver._breaker.is_closed and driver.holds_instance for driver in strike.drivers()
    )


def _queues(strike: Strike) -> bool:
    """Return whether a front ends that has sent requests of which its core has not said that it took them."""
    machine = strike.front
    if machine is None or not machine.is_up or strike.fault.kind not in ("kill_front", "power_off_front"):
        return False
    cell = None if machine.front is None else machine.front.cell
    engines = [] if cell is None else cell.engines
    return any(not request.queued.done() for engine in engines for request in engine._requests.values())


RARE_STRIKES: tuple[Rare[Strike], ...] = (
    Rare(
        "killed with blocks in the host cache",
        "an executor ended",
        _meets(_ENDING, lambda planner: len(planner.swapped)),
    ),
    Rare(
        "struck while it sent",
        "a fault met an executor that sent blocks",
        lambda it: it.fault.kind in EXECUTOR_FAULTS and any(planner.transfers.sending for planner in it.planners()),
    ),
    Rare(
        "struck while it received",
        "a fault met an executor that blocks were sent to",
        lambda it: it.fault.kind in EXECUTOR_FAULTS and any(planner.transfers.receiving for planner in it.planners()),
    ),
    Rare(
        "scheduler struck during a transfer",
        "a fault met a scheduler that had begun a transfer",
        lambda it: (
            it.fault.kind in (*ENGINE_FAULTS, *SCHEDULER_FAULTS)
            and it.engine is not None
            and len(it.engine.fleet.dispatcher.transfers) > 0
        ),
    ),
    Rare(
        "hung with steps behind",
        "a step never ended, and others were under way behind it",
        _meets(("hang_step",), lambda planner: len(planner.in_flight) > 1),
    ),
    Rare("struck during a resume", "a fault met the resume of a stream", _is_resuming),
    Rare("struck during a probe", "a fault met an executor in doubt", _is_probed),
    Rare(
        "executor struck while it was drained",
        "a fault met the end in order",
        lambda it: it.fault.kind in EXECUTOR_FAULTS and it.executor.is_up and it.executor.is_leaving,
    ),
    Rare("front ended with submissions", "a front ended, and its core had not said that it took a request", _queues),
)
