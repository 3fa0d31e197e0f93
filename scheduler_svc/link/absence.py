"""The time in which a front has no engine that can go on: its requests wait, and new ones with them, up to a limit.

It has two parts: no engine answers, which is short, and one answers that has no executor yet. Then requests wait as
long as orphans in an engine: a model may take minutes to load.
"""

import asyncio
from collections.abc import Callable

# How long requests wait for an engine, in seconds: longer than one takes to start, and no client waits for ever.
LIMIT_S = 30.0


class Absence:
    """Whether an engine that was there is away, or has no executor yet.

    Args:
        on_limit: Called when the wait for an engine or an executor was too long and is given up, with its seconds.
    """

    def __init__(self, on_limit: Callable[[float], None]) -> None:
        self._on_limit = on_limit
        self._timer: asyncio.TimerHandle | None = None
        self._is_engine_back = False
        self._is_over = asyncio.Event()
        self._is_over.set()

    @property
    def is_on(self) -> bool:
        """Whether it is away, and waited for."""
        return not self._is_over.is_set()

    def begin(self) -> None:
        """It has gone; nothing changes while it is waited for."""
        if not self.is_on or self._is_engine_back:
            self._is_engine_back = False
            self._wait_for(LIMIT_S)

    def wait_for_executor(self, orphan_timeout_s: float) -> None:
        """An engine answers, and has no executor yet; nothing changes while that is waited for."""
        if self.is_on and not self._is_engine_back:
            self._is_engine_back = True
            self._wait_for(orphan_timeout_s)

    def end(self) -> None:
        """It is back, and has what it was asked for."""
        self._stop_timer()
        self._is_engine_back = False
        self._is_over.set()

    async def wait(self) -> None:
        """Return once it is back, or the wait is given up."""
        await self._is_over.wait()

    def _wait_for(self, limit_s: float) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up, limit_s)
        self._is_over.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, limit_s: float) -> None:
        self._on_limit(limit_s)
        self.end()
