"""The longest lag of the event loop, and for how long it is told."""

import asyncio
import time

from scheduler_svc.processes.process import WINDOW_S, LoopLag


def test_the_longest_lag_is_told_for_a_minute_and_at_most_two() -> None:
    now_s = 0.0
    lag = LoopLag(lambda: now_s)
    lag.note(0.25)
    lag.note(0.01)
    assert lag.longest_s == 0.25
    now_s = WINDOW_S + 1
    lag.note(0.125)
    assert lag.longest_s == 0.25
    now_s = 2 * WINDOW_S + 1
    assert lag.longest_s == 0.125
    now_s = 10 * WINDOW_S
    assert lag.longest_s == 0.0


async def test_a_loop_that_is_kept_busy_is_noticed() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - what nobody should do
    await asyncio.sleep(0.001)
    watching.cancel()
    assert lag.longest_s >= 0.05
