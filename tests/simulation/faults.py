"""The faults of a run: each begins, lasts, and is undone. Next: `plan.py`, which draws them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tests.simulation.machines import NUMERICS, ExecutorMachine, FrontMachine, Machine, SchedulerMachine
from tests.simulation.moments import wait_for_moment
from tests.simulation.plan import BROKEN_AT_LEAST_S, FAULTS, FaultPlan
from tests.simulation.weights import change_fleet
from tests.simulation.world import World

# Before the name of a fault, where it is counted.
FAULT = "fault: "

# A front that is slow stands still, and runs, for so long each time, in seconds.
SLOW_FRONT_RESTS_S = 0.3
SLOW_FRONT_RUNS_S = 0.02

# How long two processes of one name run at the same time, in seconds.
TWINS_S = 0.5

Fault = Callable[[World, FaultPlan], Awaitable[bool]]


async def strike(world: World, plan: FaultPlan) -> None:
    """Let a fault happen, and note it if there was something that it could strike."""
    await wait_for_moment(world, plan)
    if plan.is_taken_away:
        return
    checks, watchers = world.checks, world.checks.watchers
    checks.faults_at_s[plan.number] = world.loop.time()
    for watcher in watchers:
        watcher.fault_begins(world, plan)
    name = FAULT + plan.kind
    checks.seen[name] += 1  # those that strike nothing say so at once, the others may last beyond the end of the run
    if not await _TABLE[plan.kind](world, plan):
        checks.seen[name] -= 1
    for watcher in watchers:
        watcher.fault_ended(plan)


def _executor(world: World, plan: FaultPlan) -> ExecutorMachine:
    return world.executors[plan.target % len(world.executors)]


def _scheduler(world: World, plan: FaultPlan) -> SchedulerMachine:
    return world.schedulers[plan.target % len(world.schedulers)]


def _front(world: World, plan: FaultPlan) -> FrontMachine | None:
    return world.fronts[plan.target % len(world.fronts)] if world.fronts else None


async def _kill(machine: Machine, plan: FaultPlan, *, is_silent: bool) -> bool:
    if not machine.is_up:
        return False
    machine.kill(is_silent=is_silent)
    await asyncio.sleep(plan.duration_s)
    machine.start()
    return True


async def _stall(machine: Machine, plan: FaultPlan) -> bool:
    if not machine.stall():
        return False
    await asyncio.sleep(plan.duration_s)
    machine.resume()
    return True


async def _drain(machine: ExecutorMachine | SchedulerMachine | FrontMachine, plan: FaultPlan) -> bool:
    if not machine.is_up:
        return False
    await machine.drain()
    await asyncio.sleep(plan.duration_s)
    machine.start()
    return True


async def _kill_all(scheduler: SchedulerMachine, plan: FaultPlan, *, is_silent: bool) -> bool:
    """The whole scheduler ends: the core, and its fronts with it."""
    if not scheduler.is_up:
        return False
    for front in scheduler.fronts:
        front.kill(is_silent=is_silent)
    await _kill(scheduler, plan, is_silent=is_silent)
    for front in scheduler.fronts:
        front.start()
    return True


async def _twin(machine: Machine, plan: FaultPlan) -> bool:
    """Another process of the name is there while this one stands still; then both run, and at last the former ends."""
    former = machine.displace()
    if former is None:
        return False
    await asyncio.sleep(plan.duration_s)
    if not former.is_dead:
        former.resume()
        await asyncio.sleep(TWINS_S)
        machine.kill_former(former)
    return True


async def _kill_executor(world: World, plan: FaultPlan) -> bool:
    return await _kill(_executor(world, plan), plan, is_silent=False)


async def _power_off_executor(world: World, plan: FaultPlan) -> bool:
    return await _kill(_executor(world, plan), plan, is_silent=True)


async def _stall_executor(world: World, plan: FaultPlan) -> bool:
    return await _stall(_executor(world, plan), plan)


async def _drain_executor(world: World, plan: FaultPlan) -> bool:
    return await _drain(_executor(world, plan), plan)


async def _kill_scheduler(world: World, plan: FaultPlan) -> bool:
    return await _kill_all(_scheduler(world, plan), plan, is_silent=False)


async def _power_off_scheduler(world: World, plan: FaultPlan) -> bool:
    return await _kill_all(_scheduler(world, plan), plan, is_silent=True)


async def _stall_scheduler(world: World, plan: FaultPlan) -> bool:
    return await _stall(_scheduler(world, plan), plan)


async def _drain_scheduler(world: World, plan: FaultPlan) -> bool:
    scheduler = _scheduler(world, plan)
    has_struck = await _drain(scheduler, plan)
    for front in scheduler.fronts if has_struck else ():
        front.start()
    return has_struck


async def _shrink_executor(world: World, plan: FaultPlan) -> bool:
    """The executor comes back with half its cache and slots."""
    machine = _executor(world, plan)
    machine.plan = replace(
        machine.plan,
        num_device_blocks=max(2, machine.plan.num_device_blocks // 2),
        cache_groups=tuple((window, max(2, num_blocks // 2)) for window, num_blocks in machine.plan.cache_groups),
        num_device_states=machine.plan.num_device_states // 2,
        num_encoder_blocks=max(1, machine.plan.num_encoder_blocks // 2),
        max_num_seqs=max(1, machine.plan.max_num_seqs // 2),
        num_host_blocks=0,
        num_host_states=0,
    )
    return await _kill(machine, plan, is_silent=False)


async def _change_numerics(world: World, plan: FaultPlan) -> bool:
    """The executor comes back as one that says that it computes otherwise."""
    machine = _executor(world, plan)
    machine.numerics_id = NUMERICS[machine.numerics_id == NUMERICS[0]]
    return await _kill(machine, plan, is_silent=False)


async def _break_executor(world: World, plan: FaultPlan) -> bool:
    """The executor answers, and fails every step."""
    worker = _executor(world, plan).worker
    if worker is None:
        return False
    worker.is_broken = True
    await asyncio.sleep(plan.duration_s + BROKEN_AT_LEAST_S)
    worker.is_broken = False
    return True


async def _fail_step(world: World, plan: FaultPlan) -> bool:
    worker = _executor(world, plan).worker
    if worker is not None:
        worker.num_failing += 1
    return worker is not None


async def _hang_step(world: World, plan: FaultPlan) -> bool:
    """The next step never ends; the process is restarted after a while."""
    machine = _executor(world, plan)
    if machine.worker is None:
        return False
    machine.worker.num_hanging += 1
    await asyncio.sleep(plan.duration_s + 5.0)
    await _kill(machine, plan, is_silent=False)
    return True


async def _slow_steps(world: World, plan: FaultPlan) -> bool:
    worker = _executor(world, plan).worker
    if worker is None:
        return False
    worker.slowness = 10.0
    await asyncio.sleep(plan.duration_s)
    worker.slowness = 1.0
    return True


async def _answer_nonsense(world: World, plan: FaultPlan) -> bool:
    worker = _executor(world, plan).worker
    if worker is not None:
        worker.num_nonsense += 1
    return worker is not None


async def _forget_address(world: World, plan: FaultPlan) -> bool:
    address = _executor(world, plan).name
    if address not in world.addresses:
        return False
    del world.addresses[address]
    await asyncio.sleep(plan.duration_s)
    world.addresses[address] = None
    return True


async def _reset_link(world: World, plan: FaultPlan) -> bool:
    world.network.reset(_scheduler(world, plan).name, _executor(world, plan).name)
    return True


async def _cut(world: World, plan: FaultPlan, one: str, other: str) -> bool:
    world.network.cut(one, other)
    await asyncio.sleep(plan.duration_s)
    world.network.heal(one, other)
    return True


async def _cut_link(world: World, plan: FaultPlan) -> bool:
    return await _cut(world, plan, _scheduler(world, plan).name, _executor(world, plan).name)


async def _cut_client(world: World, plan: FaultPlan) -> bool:
    client = world.clients[plan.target % len(world.clients)]
    entrances = _scheduler(world, plan).entrances
    return await _cut(world, plan, client.name, entrances[plan.number % len(entrances)])


async def _bad_weather(world: World, plan: FaultPlan) -> bool:
    """Every message takes longer."""
    weather = world.network.weather
    world.network.weather = replace(weather, latency_s=weather.latency_s + 0.05, jitter_s=weather.jitter_s + 0.2)
    await asyncio.sleep(plan.duration_s)
    world.network.weather = world.plan.weather
    return True


async def _kill_client(world: World, plan: FaultPlan) -> bool:
    client = world.clients[plan.target % len(world.clients)]
    client.kill(is_silent=plan.number % 2 == 0)
    await asyncio.sleep(plan.duration_s)
    client.start()
    return True


async def _stall_client(world: World, plan: FaultPlan) -> bool:
    return await _stall(world.clients[plan.target % len(world.clients)], plan)


async def _kill_engine(world: World, plan: FaultPlan) -> bool:
    """The core ends and its fronts do not: they go on with their requests at the next one."""
    scheduler = _scheduler(world, plan)
    return scheduler.has_link and await _kill(scheduler, plan, is_silent=False)


async def _power_off_engine(world: World, plan: FaultPlan) -> bool:
    """As `_kill_engine`, and the fronts are on other machines, and hear nothing."""
    scheduler = _scheduler(world, plan)
    return scheduler.has_link and await _kill(scheduler, plan, is_silent=True)


async def _twin_engine(world: World, plan: FaultPlan) -> bool:
    scheduler = _scheduler(world, plan)
    return scheduler.has_link and await _twin(scheduler, plan)


async def _twin_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    return front is not None and await _twin(front, plan)


async def _kill_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    return front is not None and await _kill(front, plan, is_silent=False)


async def _power_off_front(world: World, plan: FaultPlan) -> bool:
    """The core does not learn of it: the front's next session is there before the former one has ended."""
    front = _front(world, plan)
    return front is not None and await _kill(front, plan, is_silent=True)


async def _stall_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    return front is not None and await _stall(front, plan)


async def _slow_front(world: World, plan: FaultPlan) -> bool:
    """The front gets little processor time: its core has much for it each time."""
    front = _front(world, plan)
    if front is None or not front.is_up:
        return False
    until_s = world.loop.time() + plan.duration_s
    while world.loop.time() < until_s:
        has_stalled = front.stall()
        await asyncio.sleep(SLOW_FRONT_RESTS_S)
        if has_stalled:
            front.resume()
        await asyncio.sleep(SLOW_FRONT_RUNS_S)
    return True


async def _drain_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    return front is not None and await _drain(front, plan)


def _joined(front: FrontMachine, plan: FaultPlan) -> SchedulerMachine:
    """Return one of the schedulers that a front joins."""
    return front.schedulers[plan.number % len(front.schedulers)]


async def _cut_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    return front is not None and await _cut(world, plan, front.name, _joined(front, plan).name)


async def _reset_front(world: World, plan: FaultPlan) -> bool:
    front = _front(world, plan)
    if front is not None:
        world.network.reset(front.name, _joined(front, plan).name)
    return front is not None


async def _empty_executor(world: World, plan: FaultPlan) -> bool:
    """An operator lets an executor give its groups to others, and lets it take some again."""
    executor = _executor(world, plan).name
    drained = [scheduler for scheduler in world.schedulers if scheduler.drain_executor(executor, is_draining=True)]
    await asyncio.sleep(plan.duration_s)
    for scheduler in drained:
        scheduler.drain_executor(executor, is_draining=False)
    return bool(drained)


def _two_executors(world: World, plan: FaultPlan) -> tuple[str, str] | None:
    """Return an executor and another one; None: there is none."""
    one, others = _executor(world, plan), [it for it in world.executors if it is not _executor(world, plan)]
    return (one.name, others[plan.number % len(others)].name) if others else None


async def _cut_executors(world: World, plan: FaultPlan) -> bool:
    ends = _two_executors(world, plan)
    return ends is not None and await _cut(world, plan, *ends)


async def _reset_executors(world: World, plan: FaultPlan) -> bool:
    ends = _two_executors(world, plan)
    if ends is not None:
        world.network.reset(*ends)
    return ends is not None


async def _forget_engine(world: World, plan: FaultPlan) -> bool:
    """The name of the schedulers of a cell has not the address of one of them."""
    address = _scheduler(world, plan).own_address
    if address not in world.core_addresses:
        return False
    del world.core_addresses[address]
    await asyncio.sleep(plan.duration_s)
    if address == _scheduler(world, plan).own_address:
        world.core_addresses[address] = None
    return True


_update_weights = _pause_fleet = _sleep_fleet = change_fleet

_TABLE: dict[str, Fault] = {kind: globals()[f"_{kind}"] for kind in FAULTS}
