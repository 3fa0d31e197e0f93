"""The time in which a front has no core: its requests wait for the next one, and new ones with them, up to a limit."""

import asyncio
from collections.abc import Callable

# How long requests wait for a core, in seconds: longer than one takes to start, and no client waits for ever.
LIMIT_S = 30.0


class Absence:
    """Whether a core that was there is away.

    Args:
        on_limit: Called with how long it is away, when that is too long: nobody waits for it any more.
    """

    def __init__(self, on_limit: Callable[[float], None]) -> None:
        self._on_limit = on_limit
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = asyncio.Event()
        self._is_over.set()

    @property
    def is_on(self) -> bool:
        """Whether it is away, and waited for."""
        return not self._is_over.is_set()

    def begin(self) -> None:
        """It has gone; nothing changes while it is waited for."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LIMIT_S, self._give_up)
            self._is_over.clear()

    def end(self) -> None:
        """It is back, and has what it was asked for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_over.set()

    async def wait(self) -> None:
        """Return once it is back, or nobody waits any more."""
        await self._is_over.wait()

    def _give_up(self) -> None:
        self._timer = None  # one that comes later may go, too
        self._on_limit(LIMIT_S)
        self._is_over.set()
