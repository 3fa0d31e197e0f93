"""What strikes services under streams: each fault begins, lasts, and is undone. Read next: `endless.py`."""

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tests.chaos.proxy import Proxy
from tests.chaos.services import Executor, Scheduler, num_attached
from tests.support.processes import command_of

# How long a scheduler takes an executor for alive that says nothing.
LEASE_S = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """What faults strike.

    Attributes:
        executors: The executors.
        proxies: Those that stand before some of them.
        scheduler: Whose executors they are.
        draws: Chooses.
    """

    executors: Sequence[Executor]
    proxies: Sequence[Proxy]
    scheduler: Scheduler
    draws: random.Random

    def any(self) -> Executor:
        """Return one of the executors."""
        return self.draws.choice(self.executors)

    def core(self) -> int:
        """Return the process of the core."""
        [core] = self.scheduler.cores()
        return core

    async def fronts(self) -> list[int]:
        """Return the processes of the fronts; the last one has the most calls, which may be all of them."""
        state = await self.scheduler.admin.get_state()
        return [front.pid for front in sorted(state.fronts, key=lambda front: front.num_requests)]


async def kill(target: Target) -> None:
    """SIGKILL of an executor; a new one comes after a second."""
    victim = target.any()
    await victim.kill()
    await asyncio.sleep(1.0)
    await victim.start()


async def stop_for_a_moment(target: Target) -> None:
    """SIGSTOP of an executor, and SIGCONT before it is lost."""
    await _stop(target.any().pid, LEASE_S / 4)


async def stop_for_long(target: Target) -> None:
    """SIGSTOP of an executor, and SIGCONT when it has been lost."""
    await _stop(target.any().pid, 2 * LEASE_S)


async def _stop(pid: int, seconds: float) -> None:
    with stopped(pid):
        await asyncio.sleep(seconds)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP of a process, and SIGCONT at the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def cut(target: Target) -> None:
    """All connections of an executor are reset."""
    if not target.draws.choice(target.proxies).cut():
        raise AssertionError("there was no connection to cut")


async def delay(target: Target) -> None:
    """What an executor sends and gets is late for a while."""
    proxy = target.draws.choice(target.proxies)
    proxy.delay_s = 0.1
    await asyncio.sleep(1.5)
    proxy.delay_s = 0.0


async def fail(target: Target) -> None:
    """An executor is replaced by one with a step that fails every so often, and then by a sound one."""
    victim = target.any()
    await victim.drain()
    await victim.start("--fail-step-every", "15")
    await asyncio.sleep(3.0)
    await victim.kill()
    await victim.start()


async def drain(target: Target) -> None:
    """SIGTERM of an executor; a new one comes."""
    victim = target.any()
    await victim.drain()
    await victim.start()


async def kill_engine(target: Target) -> None:
    """SIGKILL of the core, which its supervisor starts again."""
    await _kill(target.core())


async def kill_front(target: Target) -> None:
    """SIGKILL of a front, which the supervisor starts again."""
    *_, busiest = await target.fronts()
    await _kill(busiest)


async def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    while command_of(pid):
        await asyncio.sleep(0.01)


async def stop_engine(target: Target) -> None:
    """SIGSTOP of the core, and SIGCONT when its executors have left it."""
    await _stop(target.core(), 2 * LEASE_S)


async def stop_front(target: Target) -> None:
    """SIGSTOP of a front, and SIGCONT."""
    *_, busiest = await target.fronts()
    await _stop(busiest, 2 * LEASE_S)


async def kill_engine_beside_stopped_front(target: Target) -> None:
    """SIGKILL of the core while a front stands still; the next core serves the other fronts before that goes on."""
    quietest, *_ = await target.fronts()
    with stopped(quietest):
        await _kill(target.core())
        await target.scheduler.until(
            lambda state: num_attached(state) == len(target.executors) and any(one.is_ready for one in state.fronts)
        )


Faults = Mapping[str, Callable[[Target], Awaitable[None]]]

EXECUTOR_FAULTS: Faults = {
    "SIGKILL": kill,
    "short SIGSTOP": stop_for_a_moment,
    "long SIGSTOP": stop_for_long,
    "cut": cut,
    "delay": delay,
    "failing": fail,
    "drain": drain,
}

# For a scheduler with fronts.
SCHEDULER_FAULTS: Faults = {
    "SIGKILL of the core": kill_engine,
    "SIGKILL of a front": kill_front,
    "SIGSTOP of the core": stop_engine,
    "SIGSTOP of a front": stop_front,
    "SIGKILL of the core beside a stopped front": kill_engine_beside_stopped_front,
}
