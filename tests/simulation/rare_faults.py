"""Rare things in what a fault meets: what its target was doing when it struck."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.engine.engine import Engine
from scheduler_svc.executors.driver import ExecutorDriver
from tests.simulation.machines import ExecutorMachine, FrontMachine, SchedulerMachine
from tests.simulation.plan import (
    CLIENT_FAULTS,
    CORE_FAULTS,
    EXECUTOR_FAULTS,
    FRONT_FAULTS,
    LINK_FAULTS,
    SCHEDULER_FAULTS,
    FaultPlan,
)
from tests.simulation.rare import Rare
from tests.simulation.world import World

_ENDING = ("kill_executor", "power_off_executor", "shrink_executor", "change_numerics")


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that is about to strike, while `num_faults` last, itself included."""

    world: World
    fault: FaultPlan
    num_faults: int

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

    def cores(self) -> Iterator[ExecutorCore]:
        """Yield the core that decides for the executor."""
        for driver in self.drivers():
            if driver.core is not None:
                yield driver.core


def _engine(machine: SchedulerMachine) -> Engine | None:
    if not machine.is_up or machine.scheduler is None or not machine.scheduler.has_begun:
        return None
    return machine.scheduler.engine


def _meets(kinds: tuple[str, ...], sees: Callable[[ExecutorCore], object]) -> Callable[[Strike], bool]:
    return lambda strike: strike.fault.kind in kinds and any(sees(core) for core in strike.cores())


def _searches(core: ExecutorCore) -> bool:
    return any(group.beams is not None for group in core.batch.running)


def _is_resuming(strike: Strike) -> bool:
    return strike.fault.kind in (*EXECUTOR_FAULTS, "cut_link", "reset_link") and any(
        driver.session is not None and driver.session.is_resuming for driver in strike.drivers()
    )


def _is_probed(strike: Strike) -> bool:
    return strike.fault.kind in EXECUTOR_FAULTS and any(
        not driver._breaker.is_closed and driver.holds_instance for driver in strike.drivers()
    )


def _scheduler_has(strike: Strike, sees: Callable[[Engine], object]) -> bool:
    return (
        strike.fault.kind in (*CORE_FAULTS, *SCHEDULER_FAULTS)
        and strike.engine is not None
        and bool(sees(strike.engine))
    )


def _is_loading(strike: Strike) -> bool:
    machine = strike.executor
    return strike.fault.kind in _ENDING and machine.is_up and not any(strike.cores()) and not _has_loaded(machine)


def _has_loaded(machine: ExecutorMachine) -> bool:
    assert machine.executor is not None
    servicer = getattr(machine.executor, "servicer", None)
    return servicer is not None and servicer._runner._worker is not None


def _is_cut_too(strike: Strike) -> bool:
    return strike.fault.kind in _ENDING and bool(strike.world.network.cuts_at(strike.executor.name))


def _queues(strike: Strike) -> bool:
    """Return whether a front ends that has sent requests of which its core has not said that it took them."""
    machine = strike.front
    if machine is None or not machine.is_up or strike.fault.kind not in ("kill_front", "power_off_front"):
        return False
    core = getattr(machine.front, "core", None)
    return core is not None and any(not request.queued.done() for request in core._requests.values())


def _has_requests(strike: Strike) -> bool:
    machine = strike.front
    core = getattr(machine.front, "core", None) if machine is not None and machine.is_up else None
    return core is not None and core.num_requests > 0


RARE_STRIKES: tuple[Rare[Strike], ...] = (
    Rare("beams killed", "an executor ended in a beam search", _meets(_ENDING, _searches)),
    Rare("killed with blocks in the host pool", "an executor ended", _meets(_ENDING, lambda core: len(core.swapped))),
    Rare(
        "drained with blocks in the host pool",
        "an executor left in order",
        _meets(("drain_executor",), lambda core: len(core.swapped)),
    ),
    Rare("killed with steps in flight", "two or more", _meets(_ENDING, lambda core: len(core.in_flight) > 1)),
    Rare(
        "killed while preempted groups waited",
        "an executor ended, and groups waited to be computed again there",
        _meets(_ENDING, lambda core: bool(core.preempted.groups)),
    ),
    Rare(
        "hung with steps behind",
        "a step never ended, and others were under way behind it",
        _meets(("hang_step",), lambda core: len(core.in_flight) > 1),
    ),
    Rare("nonsense for beams", "candidates were cut short", _meets(("answer_nonsense",), _searches)),
    Rare("stalled in a beam search", "an executor stood still while beams ran", _meets(("stall_executor",), _searches)),
    Rare("struck during a resume", "a fault met the resume of a stream", _is_resuming),
    Rare("struck during a probe", "a fault met an executor in doubt", _is_probed),
    Rare("killed while it loaded", "an executor ended before it served", _is_loading),
    Rare("killed behind a cut", "an executor ended that was cut off", _is_cut_too),
    Rare(
        "scheduler struck with parked requests",
        "it was struck while suspects waited",
        lambda it: _scheduler_has(it, lambda engine: engine.requests.suspects.parked),
    ),
    Rare(
        "scheduler struck with a queue",
        "it was struck while requests waited",
        lambda it: _scheduler_has(it, lambda engine: len(engine.queue)),
    ),
    Rare(
        "scheduler struck with swapped requests",
        "it was struck while blocks were in a host pool",
        lambda it: _scheduler_has(it, lambda engine: any(len(core.swapped) for core in engine.fleet.cores)),
    ),
    Rare(
        "scheduler struck while it was drained",
        "a fault met the end in order",
        lambda it: it.fault.kind in SCHEDULER_FAULTS and it.scheduler.is_up and it.scheduler.is_leaving,
    ),
    Rare(
        "executor struck while it was drained",
        "a fault met the end in order",
        lambda it: it.fault.kind in EXECUTOR_FAULTS and it.executor.is_up and it.executor.is_leaving,
    ),
    Rare("front struck with requests", "a fault met a front that had live requests", _has_requests),
    Rare("front ended with submissions", "a front ended, and its core had not said that it took a request", _queues),
    Rare("three faults at once", "and maybe more", lambda it: it.num_faults >= 3),
    Rare(
        "all executors gone",
        "a fault struck while none was up",
        lambda it: not any(machine.is_up for machine in it.world.executors),
    ),
    Rare(
        "client gone with a stalled scheduler",
        "a client went, and its scheduler could not see it",
        lambda it: (
            it.fault.kind in (*CLIENT_FAULTS, *LINK_FAULTS)
            and any(machine.is_up and not _runs(machine) for machine in it.world.schedulers)
        ),
    ),
)


def _runs(machine: SchedulerMachine) -> bool:
    return machine.process is not None and machine.process.is_running
