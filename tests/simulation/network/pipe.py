"""One direction of a call: messages arrive later, in their order, and only while the way is open.

A pipe holds a few bytes, as a window of HTTP/2 does. Whoever writes into a full one waits until the other side reads.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from tests.simulation.network.link import Link

T = TypeVar("T")


class Pipe(Generic[T]):
    """Carries what one side of a call sends.

    Args:
        link: The connection that it is part of.
        is_up: Whether it leads to the server.
        deliver: Called with each message when it has arrived.
        window_bytes: How much may be under way and unread.
    """

    def __init__(self, link: "Link", *, is_up: bool, deliver: Callable[[T], None], window_bytes: int) -> None:
        self._link = link
        self._loop = link.loop
        self._is_up = is_up
        self._deliver = deliver
        self._pass = partial(link.pass_on, self._arrive, is_up)
        self._free_bytes = window_bytes
        self._sent_at_s = self._last_arrival_s = 0.0
        self._under_way: deque[list[T]] = deque()
        self._room: asyncio.Future[None] | None = None

    def send(self, item: T, num_bytes: int = 0) -> None:
        """Send something; it arrives, unless the connection breaks before.

        What is sent at the same time mostly comes at the same time.
        """
        self._free_bytes -= num_bytes
        now_s = self._loop.time()
        if self._under_way and now_s == self._sent_at_s and self._link.joins_packets():
            self._under_way[-1].append(item)
            return
        self._sent_at_s = now_s
        self._under_way.append([item])
        arrival_s = self._link.arrival_s()
        if arrival_s > self._last_arrival_s:
            self._last_arrival_s = arrival_s
        self._link.at(self._last_arrival_s, self._pass, is_up=self._is_up)

    async def room(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Return once the window is open, or the call is over."""
        while self._free_bytes <= 0 and not is_over():
            self._link.note_full_window()
            if self._room is None or self._room.done():
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._room)

    def note_read(self, num_bytes: int) -> None:
        """The other side has taken so many bytes: the window opens again."""
        self._free_bytes += num_bytes
        if self._free_bytes > 0:
            self.wake()

    def wake(self) -> None:
        """Let whoever waits for room look again."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _arrive(self) -> None:
        for item in self._under_way.popleft():
            self._deliver(item)
