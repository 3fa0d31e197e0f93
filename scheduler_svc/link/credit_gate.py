"""When the writer of a stream may write: there is something to write, and the reader wants it.

Credits are messages that the reader is ready to take. While it has granted none, what is new waits where it is made and
grows together; a reader that lets it wait for too long is cut. HTTP/2 has windows of its own, but they would let a
slow reader get old small messages in place of a few large ones.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from octavo_shared.errors import SlowCallerError


class CreditGate:
    """Lets one writer through.

    Args:
        num_credits: Granted at the beginning; None: as many as there are messages, and nothing is counted.
        limit_s: How long something may wait for a credit, or in a write, in seconds.
    """

    def __init__(self, num_credits: int | None, limit_s: float) -> None:
        self._num_credits = num_credits
        self._limit_s = limit_s
        self._has_news = False
        self._is_over = False
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._limit: asyncio.Timeout | None = None  # of the write that runs

    @property
    def num_credits(self) -> int | None:
        """Messages that may be written now; None: as many as there are."""
        return self._num_credits

    def grant(self, num_credits: int | None) -> None:
        """The reader takes so many messages more; None: all."""
        if num_credits is None or self._num_credits is None:
            self._num_credits = None
        else:
            self._num_credits += num_credits
        self._changed.set()

    def note_news(self) -> None:
        """There is something to write."""
        self._has_news = True
        self._changed.set()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will come, behind what there is; with an error: at once."""
        self._is_over, self._error = True, self._error or error
        self._changed.set()
        if self._error is not None and self._limit is not None:
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def wait(self) -> bool:
        """Return once a message may be written; False: there will be none. What is new counts as taken.

        Raises: SlowCallerError: the reader wants nothing for too long. The error of `end`.
        """
        await self._until(lambda: self._has_news or self._is_over)
        if not self._has_news:
            return False
        async with self.limit():  # one for all that is new: more of it gives the reader no more time
            await self._until(lambda: self._num_credits != 0)
        self._has_news = False
        if self._num_credits is not None:
            self._num_credits -= 1
        return True

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition holds. Raises: the error of `end`."""
        while self._error is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Bound how long the reader takes to take something.

        Raises: SlowCallerError: it takes longer. The error of `end`, at once.
        """
        try:
            async with asyncio.timeout(self._limit_s) as self._limit:
                yield
        except TimeoutError as error:
            raise self._error or SlowCallerError(self._limit_s) from error
        finally:
            self._limit = None
