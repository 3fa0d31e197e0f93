"""The queue of the grammar compiler: tenants take turns, so that no tenant waits behind all grammars of another.

Equal grammars that wait for one tenant are compiled once, and so is one that runs, whichever tenants ask. A full queue
still takes grammars within the fair share of their tenant, as the waiting queue does (engine/waiting_limits.py): it
drops the newest grammar of the tenant that is furthest above its own share.
"""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from octavo_shared.errors import QueueFullError

_T = TypeVar("_T")

RETRY_AFTER_S = 1.0
NAME = "the queue of grammars to compile"


@dataclass(eq=False, slots=True)
class _Work(Generic[_T]):
    """A call that waits or runs, with the number of callers that want its result."""

    call: Callable[[], _T]
    result: "asyncio.Future[_T]"
    num_wanting: int = 0


class CompileQueue(Generic[_T]):
    """Runs one call at a time. For one event loop.

    Attributes:
        most: How many calls may wait; None: any number.
    """

    def __init__(self, threads: Executor) -> None:
        self.most: int | None = None
        self._threads = threads
        self._waiting: dict[str, dict[Hashable, _Work[_T]]] = {}  # by tenant in the order of turns, oldest call first
        self._running: dict[Hashable, _Work[_T]] = {}  # at most one

    async def run(self, tenant: str, key: Hashable, call: Callable[[], _T]) -> _T:
        """Return the result of a call, or of the equal one that waits or runs.

        Args:
            tenant: The tenant whose turn it takes.
            key: Equal for equal calls.
            call: Runs in a thread.

        Raises: QueueFullError: there is no room for it, or another tenant took its place.
        """
        work = self._running.get(key) or self._waiting.get(tenant, {}).get(key)
        if work is None:
            self._make_room(tenant)
            work = _Work(call, asyncio.get_running_loop().create_future())
            self._waiting.setdefault(tenant, {})[key] = work
            self._start()
        work.num_wanting += 1
        try:
            return await asyncio.shield(work.result)
        finally:
            work.num_wanting -= 1
            if not work.num_wanting and self._waiting.get(tenant, {}).get(key) is work:
                self._take_out(tenant, key)

    def _make_room(self, tenant: str) -> None:
        """Make room for one more call of a tenant. Raises QueueFullError: there is none."""
        num_of = {name: len(works) for name, works in self._waiting.items()}
        num_waiting = sum(num_of.values())
        if self.most is None or num_waiting < self.most:
            return
        share = self.most / len({*num_of, tenant})
        furthest = max(num_of, key=num_of.__getitem__)
        num_own = num_of.get(tenant, 0)
        if (num_own and num_own + 1 > share) or num_of[furthest] <= max(1, share):
            raise QueueFullError(num_waiting, RETRY_AFTER_S, queue=NAME)
        displaced = self._take_out(furthest, next(reversed(self._waiting[furthest])))
        displaced.result.set_exception(
            QueueFullError(num_of[furthest] - 1, RETRY_AFTER_S, furthest, queue=NAME, gives_way=True)
        )

    def _take_out(self, tenant: str, key: Hashable) -> _Work[_T]:
        work = self._waiting[tenant].pop(key)
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return work

    def _start(self) -> None:
        """Run what is next, if nothing runs."""
        if self._running or not self._waiting:
            return
        tenant = next(iter(self._waiting))
        key = next(iter(self._waiting[tenant]))
        self._running[key] = work = self._take_out(tenant, key)
        if others := self._waiting.pop(tenant, None):
            self._waiting[tenant] = others  # behind all other tenants
        running = asyncio.get_running_loop().run_in_executor(self._threads, work.call)
        running.add_done_callback(partial(self._end, work))

    def _end(self, work: _Work[_T], ran: "asyncio.Future[_T]") -> None:
        self._running.clear()
        if ran.cancelled():  # the loop ends
            return
        error = ran.exception()
        if not work.num_wanting:
            work.result.cancel()
        elif error is not None:
            work.result.set_exception(error)
        else:
            work.result.set_result(ran.result())
        self._start()
