"""One run of the simulation: a plan in, what came of it out. The whole of it is a function of the plan."""

import asyncio
import gc
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from unittest import mock

from octavo_shared.step_wire.executor_info import Capability
from scheduler_svc.executors import client
from tests.simulation.abort_checks import AbortChecks
from tests.simulation.adapter_operator import AdapterOperator
from tests.simulation.adapter_watch import AdapterWatch
from tests.simulation.cell_checks import CellChecks, has_used_all, watch_fronts
from tests.simulation.checks import Checks, PromiseBrokenError
from tests.simulation.endless import watching_callbacks
from tests.simulation.faults import FAULT, strike
from tests.simulation.link_checks import left_on_the_link
from tests.simulation.loop import SimulationError, SimulationLoop
from tests.simulation.machines import SchedulerMachine
from tests.simulation.network.client import RECONNECT_BACKOFF_S
from tests.simulation.network.link import SERVER_KEEPALIVE_S
from tests.simulation.operator import look_around
from tests.simulation.plan import FIRST_LAST_NUMBER, LIVENESS, FaultPlan, Plan, RequestPlan
from tests.simulation.processes import SimulatedProcess
from tests.simulation.real_world import fence
from tests.simulation.shapes import POISON, shape
from tests.simulation.sometimes import PREFIX, Sometimes
from tests.simulation.tier_checks import TierChecks, left_of_transfers
from tests.simulation.watching import Watcher
from tests.simulation.world import World

# After all is healed, and after each end of a request, the next one has to end within so many virtual seconds: a lease,
# the longest pause of a circuit breaker and the time until a lost connection is noticed, one after the other, and the
# work itself. Slow executors may have much of it, so there is no bound for all requests together.
LIVENESS_BOUND_S = 240.0

# Between two looks at whether a run has enough steps and faults, in virtual seconds.
_LOOK_INTERVAL_S = 0.25

# Requests that are sent when all is well again, and must be answered.
NUM_LAST_REQUESTS = 4

# So often, and so far apart in virtual seconds, it is looked whether anything is left on a link.
LINK_LOOKS = 20
LINK_LOOK_INTERVAL_S = 0.5

# Then come so many requests that break executors, one at a time, each beside some that must be answered.
NUM_LAST_POISONS = 4

# Until executors have run so many steps, others of them follow.
MIN_STEPS = 300


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run.

    Attributes:
        broken: The promise that was broken, and when; empty: all were kept.
        num_steps: Steps that executors ran.
        num_faults: Faults that struck.
        num_callbacks: How many the loop ran.
        virtual_s: How long it took inside.
        seen: How often things happened, by name.
        digest: Equal for equal plans.
        faults_at_s: When faults began, by number.
    """

    plan: Plan
    broken: str
    num_steps: int
    num_faults: int
    num_callbacks: int
    virtual_s: float
    seen: Counter[str]
    digest: str
    faults_at_s: Mapping[int, float] = field(default_factory=dict)


def simulate(plan: Plan, watchers: tuple[Watcher, ...] = ()) -> Outcome:
    """Run a plan; the watchers see it."""
    loop = SimulationLoop(f"{plan.seed} {plan.mode}", is_fair=plan.is_fair)  # type: ignore[abstract]
    is_collecting = gc.isenabled()
    gc.disable()  # what a collection finalizes would depend on what else the process has done
    try:
        return _simulate(plan, loop, watchers)
    finally:
        loop.close()
        if is_collecting:
            gc.enable()


def _simulate(plan: Plan, loop: SimulationLoop, watchers: tuple[Watcher, ...]) -> Outcome:
    checks, begin_s = Checks(plan, loop), loop.time()
    checks.watchers = (Sometimes(checks.seen, loop), *watchers)
    for watcher in checks.watchers:
        watcher.run_begins(loop.time)
    wanted = mock.patch.object(client, "WANTED", client.WANTED | {Capability.VARIABLE_TOKENS})
    with checks.reading_the_log(), fence(loop, f"{plan.seed}"), wanted:
        world = World(plan, loop, checks)
        checks.watchers = (*checks.watchers, AbortChecks(world), CellChecks(world), TierChecks(world))
        if world.adapters.num_slots:
            checks.watchers = (*checks.watchers, AdapterWatch(world))
        try:
            with watching_callbacks(loop, checks.break_promise):
                loop.run_until_complete(_play(world))
        except PromiseBrokenError:
            pass
        except SimulationError as error:
            checks.break_promise(f"{type(error).__name__}: {error}")
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-2:])
            checks.break_promise(f"the scene failed: {type(error).__name__}: {error}\n{where}")
    for watcher in checks.watchers:
        watcher.run_ended()
    checks.seen["texts answered"] = sum(text.values is not None for text in world.texts)
    checks.seen.update({PREFIX + name: count for name, count in world.network.counts.items()})
    virtual_s = loop.time() - begin_s
    counts = world.num_steps, num_faults(checks.seen), loop.num_callbacks
    return Outcome(plan, checks.broken, *counts, virtual_s, checks.seen, loop.digest(), checks.faults_at_s)


def num_faults(seen: Counter[str]) -> int:
    """Return how many faults struck in a run that saw these."""
    return sum(count for name, count in seen.items() if name.startswith(FAULT))


async def _play(world: World) -> None:
    plan, loop = world.plan, world.loop
    begin_s = loop.time()
    for machine in (*world.executors, *world.schedulers, *world.fronts):
        machine.start()
    faults: list[asyncio.Task[None]] = []
    faults.append(loop.create_task(_strike_all(world, faults)))
    if plan.cell:
        loop.create_task(watch_fronts(world))
    for machine in world.schedulers:
        operator = SimulatedProcess(f"operator of {machine.name}", loop)
        address = machine.own_address
        operator.start(look_around(world.checks, world.network, address, list(world.addresses), f"{plan.seed}"))
    operator_of_adapters = AdapterOperator(world)
    operator_of_adapters.start()
    last_id = ""
    for request in sorted(plan.requests, key=lambda request: request.at_s):
        if not (await _goes_on_until(world, begin_s + request.at_s) and await _has_room(world, begin_s)):
            break
        request_id = last_id if request.is_duplicate and last_id else f"r{request.number}"
        world.clients[request.client].send(request, request_id)
        last_id = request_id
    await _goes_on_until(world, begin_s + plan.quiet_at_s)
    world.look_at_cores()
    if plan.mode != LIVENESS:
        return
    world.is_over = True
    for task in faults:
        task.cancel()
    await asyncio.gather(*faults, return_exceptions=True)
    world.heal()
    await _end_all(world, operator_of_adapters)


async def _goes_on_until(world: World, at_s: float) -> bool:
    """Wait for a time; return False, and at once, when enough has happened."""
    plan, loop, seen = world.plan, world.loop, world.checks.seen
    while True:
        if world.num_steps >= plan.num_steps and num_faults(seen) >= plan.num_faults:
            return False
        if (left_s := at_s - loop.time()) <= 0.0:
            return True
        await asyncio.sleep(min(left_s, _LOOK_INTERVAL_S))


async def _has_room(world: World, begin_s: float) -> bool:
    """Wait until fewer requests are open; return False when enough has happened, or it takes too long."""
    plan, loop = world.plan, world.loop
    while sum(client.num_open for client in world.clients) >= plan.num_open:
        if loop.time() >= begin_s + plan.quiet_at_s or not await _goes_on_until(world, loop.time() + _LOOK_INTERVAL_S):
            return False
    return True


async def _strike_all(world: World, tasks: list[asyncio.Task[None]]) -> None:
    """Begin all faults, each in a task of its own."""
    begin_s = world.loop.time()
    for fault in world.plan.faults:
        while world.num_steps < fault.after_steps and world.loop.time() < begin_s + fault.at_s:
            await world.next_step(begin_s + fault.at_s)
        tasks.append(world.loop.create_task(_strike(world, fault)))


async def _strike(world: World, fault: FaultPlan) -> None:
    await asyncio.sleep(fault.delay_s)
    world.look_at_cores()
    if not world.checks.broken:
        await strike(world, fault)


async def _end_all(world: World, operator_of_adapters: AdapterOperator) -> None:
    """Wait until all requests have ended, send the last ones, and look at what is left."""
    checks, loop = world.checks, world.loop
    deadline_s = loop.time() + LIVENESS_BOUND_S
    await _until(
        world,
        lambda: all(machine.is_serving for machine in (*world.schedulers, *world.fronts)),
        deadline_s,
        "not ready",
    )
    if world.adapters.num_slots:
        settled = operator_of_adapters.settle()
        await _until(world, settled.done, deadline_s, "adapters are not loaded")
    await _until_all_ended(world)
    await _until(world, lambda: not any(text.is_open for text in world.texts), deadline_s, "a text is not answered")
    # Until then a client may seem to be there that has gone: its requests go on.
    await asyncio.sleep(SERVER_KEEPALIVE_S + 2 * RECONNECT_BACKOFF_S)
    checks.is_quiet = True
    asked = [request for request in world.plan.requests if not request.is_duplicate]
    good = [request for request in asked if shape(request.shape).kind != POISON]
    bad = [request for request in asked if shape(request.shape).kind == POISON][:NUM_LAST_POISONS]
    begin, num_requests = 0, checks.num_requests()
    while begin < len(good):
        await _send_last(world, good[begin : begin + NUM_LAST_REQUESTS])
        begin += NUM_LAST_REQUESTS
        if world.num_steps >= min(MIN_STEPS, 2 * world.plan.num_steps) and has_used_all(
            world, num_requests, good[:begin]
        ):
            break
    for request in bad:
        checks.is_poisoned = True
        await _send_last(world, [request, *good[begin : begin + NUM_LAST_REQUESTS]])
        begin += NUM_LAST_REQUESTS
    await asyncio.sleep(SERVER_KEEPALIVE_S + 1.0)  # until then a client may seem to be there that has gone
    for machine in world.schedulers:
        assert machine.scheduler is not None
        checks.check_empty(machine.scheduler.engine)
        if left := left_of_transfers(world, machine.scheduler.engine):
            checks.break_promise(f"all requests have ended, and transfers are pending: {left}")
        await _check_link(world, machine)


async def _check_link(world: World, machine: SchedulerMachine) -> None:
    """Nothing is left between a core and its fronts, as soon as what is on its way has come."""
    assert machine.scheduler is not None
    link = machine.scheduler.link
    if link is None:
        return
    joined = [front for front in world.fronts if machine in front.schedulers]
    cells, left = [front.cell for front in joined if front.cell], ""
    for _ in range(LINK_LOOKS):
        if not (left := left_on_the_link(link, cells, len(joined[0].schedulers))):
            return
        await asyncio.sleep(LINK_LOOK_INTERVAL_S)
    world.checks.break_promise(f"all requests have ended, and on the link there is: {left}")


async def _send_last(world: World, requests: Sequence[RequestPlan]) -> None:
    """Send requests again and wait until they have ended."""
    records = world.checks.records
    num_records = len(records) + len(requests)
    for request in requests:
        last = RequestPlan(
            FIRST_LAST_NUMBER + request.number, world.loop.time(), request.scheduler, request.shape, request.client
        )
        world.clients[last.client].send(last, f"last{request.number}")
    deadline_s = world.loop.time() + LIVENESS_BOUND_S
    await _until(world, lambda: len(records) == num_records, deadline_s, "a request is not sent")
    await _until_all_ended(world)


async def _until_all_ended(world: World) -> None:
    """Wait until no request is live; while some are, one of them ends again and again."""
    records = world.checks.records
    while num_live := sum(not (record.has_ended or record.left) for record in records):
        deadline_s = world.loop.time() + LIVENESS_BOUND_S
        await _until(
            world,
            lambda bound=num_live: sum(not (r.has_ended or r.left) for r in records) < bound,  # type: ignore[misc]
            deadline_s,
            "no request ends",
        )


async def _until(world: World, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    while not condition():
        if world.loop.time() > deadline_s:
            waiting = [r.request_id for r in world.checks.records if not (r.has_ended or r.left)]
            world.checks.break_promise(f"{what} for {LIVENESS_BOUND_S:g} s, and all is healed: {', '.join(waiting)}")
        await asyncio.sleep(0.5)
