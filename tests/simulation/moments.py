"""Moments in which a target is busy with something rare: a fault may wait for one, so that both meet more often."""

import asyncio
from collections.abc import Callable

from executor_svc.transfers.pending import Outcome, Transfer
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from tests.simulation.plan import (
    ENGINE_FAULTS,
    MOMENTS,
    NO_MOMENT,
    SCHEDULER_FAULTS,
    WHILE_DRAINED,
    WHILE_RESUMED,
    FaultPlan,
)
from tests.simulation.rare_faults import Strike
from tests.simulation.world import World

# A fault waits so long at most, in seconds.
LONGEST_WAIT_S = 3.0

# For what does not come and go with steps it looks so often, in seconds.
LOOK_INTERVAL_S = 0.005
_WITHOUT_STEPS = (WHILE_DRAINED, WHILE_RESUMED)


async def wait_for_moment(world: World, plan: FaultPlan) -> None:
    """Return when the moment of a fault has come, or none came."""
    if plan.moment == NO_MOMENT:
        return
    has_come, strike = _TABLE[plan.moment], Strike(world, plan)
    until_s = world.loop.time() + LONGEST_WAIT_S
    while not has_come(strike) and world.loop.time() < until_s:
        if plan.moment in _WITHOUT_STEPS:
            await asyncio.sleep(LOOK_INTERVAL_S)
        else:
            await world.next_step(until_s)


def _cores(strike: Strike) -> list[ExecutorPlanner]:
    """Return those of the target: that of an executor, or all of a scheduler."""
    if strike.fault.kind not in (*ENGINE_FAULTS, *SCHEDULER_FAULTS):
        return list(strike.planners())
    return [] if strike.engine is None else list(strike.engine.fleet.planners)


def _any_core(sees: Callable[[ExecutorPlanner], object]) -> Callable[[Strike], bool]:
    return lambda strike: any(sees(planner) for planner in _cores(strike))


def _is_drained(strike: Strike) -> bool:
    machine = strike.scheduler if strike.fault.kind in (*ENGINE_FAULTS, *SCHEDULER_FAULTS) else strike.executor
    return machine.is_up and machine.is_leaving


def _is_resumed(strike: Strike) -> bool:
    return any(driver.session is not None and driver.session.is_resuming for driver in strike.drivers())


def _has_parked(strike: Strike) -> bool:
    return strike.engine is not None and bool(strike.engine.requests.suspects.parked)


def _has_transfer(state: Callable[[Transfer], object]) -> Callable[[Strike], bool]:
    """Return whether the target takes part in a transfer that is in a state at one of its ends."""

    def sees(strike: Strike) -> bool:
        ends = {machine: machine.transfers() for machine in strike.world.executors}
        ids = {each.transfer_id for transfers in ends.values() for each in transfers if state(each)}
        if strike.fault.kind in (*ENGINE_FAULTS, *SCHEDULER_FAULTS):
            return bool(ids)
        return any(each.transfer_id in ids for each in ends[strike.executor])

    return sees


_TABLE: dict[str, Callable[[Strike], bool]] = dict(
    zip(
        MOMENTS,
        (
            _any_core(lambda planner: len(planner.swapped)),
            _any_core(lambda planner: planner.preempted.groups),
            _any_core(lambda planner: len(planner.in_flight) > 1),
            _is_drained,
            _is_resumed,
            _has_parked,
            _any_core(lambda planner: len(planner.transfers)),
            _has_transfer(lambda transfer: transfer.is_claimed and transfer.outcome is None),
            _has_transfer(lambda transfer: transfer.outcome is Outcome.ARRIVED),
        ),
        strict=True,
    )
)
