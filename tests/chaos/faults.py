"""What strikes executors under streams: each fault begins, lasts, and is undone. Read next: `endless.py`."""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.proxy import Proxy
from tests.chaos.services import Executor, Scheduler

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


async def kill(target: Target) -> None:
    """SIGKILL of an executor; a new one comes after a second."""
    victim = target.any()
    await victim.kill()
    await asyncio.sleep(1.0)
    await victim.start()


async def stop_for_a_moment(target: Target) -> None:
    """SIGSTOP of an executor, and SIGCONT before it is lost."""
    await _stop(target, LEASE_S / 4)


async def stop_for_long(target: Target) -> None:
    """SIGSTOP of an executor, and SIGCONT when it has been lost."""
    await _stop(target, 2 * LEASE_S)


async def _stop(target: Target, seconds: float) -> None:
    victim = target.any()
    victim.send_signal(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    victim.send_signal(signal.SIGCONT)


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


FAULTS: Mapping[str, Callable[[Target], Awaitable[None]]] = {
    "SIGKILL": kill,
    "short SIGSTOP": stop_for_a_moment,
    "long SIGSTOP": stop_for_long,
    "cut": cut,
    "delay": delay,
    "failing": fail,
    "drain": drain,
}
