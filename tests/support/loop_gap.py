"""How long the event loop of this process is kept from its other tasks."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TURN_S = 0.002


@asynccontextmanager
async def loop_gaps() -> AsyncIterator[list[float]]:
    """Add to a list what this process computes between two turns of a task that is always ready, in CPU seconds.

    Whatever blocks the loop, or keeps the interpreter's lock in a thread, is in one of them. Time in which other
    processes have the cores is in none.
    """
    gaps_s: list[float] = []

    async def tick() -> None:
        while True:
            began_s = time.process_time()
            await asyncio.sleep(_TURN_S)
            gaps_s.append(time.process_time() - began_s)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)  # it has begun
    try:
        yield gaps_s
        await asyncio.sleep(2 * _TURN_S)  # the last one is complete
    finally:
        ticking.cancel()
