"""Whether new requests find an executor: for new requests, the health service and the log."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from octavo_shared.process.events import Event
from scheduler_svc.core.fleet.fleet import Fleet

log = logging.getLogger(__name__)


class Readiness:
    """Ready while any executor takes groups and the scheduler does not drain.

    Args:
        fleet: The attached executors.
        last_trouble: Says why other executors are not attached, in one line; empty: no trouble is known.
        set_ready: Called with whether it is ready, whenever that may have changed.

    Attributes:
        is_draining: Whether admission was stopped.
    """

    def __init__(
        self, fleet: Fleet, last_trouble: Callable[[], str], set_ready: Callable[[bool], Awaitable[None]]
    ) -> None:
        self.is_draining = False
        self._fleet = fleet
        self._last_trouble = last_trouble
        self._set_ready = set_ready
        self._was_ready = False
        self._first_ready = asyncio.Event()

    async def wait(self) -> None:
        """Return once it has been ready."""
        await self._first_ready.wait()

    def report(self) -> str:
        """Log why it is not ready, and return this."""
        log.warning(Event("not_ready", cause=self.why_not))
        return self.why_not

    @property
    def why_not(self) -> str:
        """Why new requests find no executor, in words; empty: they find one."""
        if self.is_draining:
            return "the scheduler is draining"
        if not self._fleet.planners:
            trouble = self._last_trouble()
            return f"no executor is attached ({trouble})" if trouble else "no executor is attached"
        if any(planner.takes_groups for planner in self._fleet.planners):
            return ""
        is_draining = any(planner.is_draining for planner in self._fleet.planners)
        return "every executor is draining" if is_draining else "every executor is leaving the fleet"

    async def tell(self) -> None:
        """Tell the health service, and the log if it has changed."""
        why_not = self.why_not
        if why_not and self._was_ready:
            log.info(Event("not_ready", cause=why_not))
        elif not why_not and not self._was_ready:
            log.info(Event("ready"))
            self._first_ready.set()
        self._was_ready = not why_not
        await self._set_ready(self._was_ready)
