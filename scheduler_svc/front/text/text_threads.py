"""The threads in which texts are tokenized. A call of the library cannot be stopped; if it hangs, its thread is lost.

They are not the event loop's threads: whatever hangs here, requests with token ids go on, and the process can end.
"""

import asyncio
import contextvars
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from octavo.values.wording import counted
from octavo_shared.errors import TokenizerFailedError, UnavailableError
from octavo_shared.process.clock import monotonic_s
from octavo_shared.process.metric import Metric

# How long a call may take, in seconds: the longest prompt takes a few.
LIMIT_S = 10.0

# As many threads as the event loop has.
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)

LOST_THREADS = Metric(
    "octavo_tokenizer_threads_lost",
    "gauge",
    "Tokenizer threads that have hung for 10 s; once half of them are lost, requests with text are rejected.",
)
METRICS = (LOST_THREADS,)

T = TypeVar("T")

_Work: TypeAlias = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads(Executor):
    """A pool of threads that nothing waits for, not even the end of the process."""

    def __init__(self, num_threads: int) -> None:
        self._max_threads = num_threads
        self._num_threads = 0
        self._idle = threading.Semaphore(0)
        self._works: SimpleQueue[_Work | None] = SimpleQueue()
        weakref.finalize(self, self._works.put, None)

    def submit(self, call: Callable[..., T], /, *arguments: Any, **keywords: Any) -> "Future[T]":
        """See `Executor`; for the thread of the event loop only."""
        future: Future[T] = Future()
        self._works.put((future, partial(call, *arguments, **keywords)))
        if not self._idle.acquire(blocking=False) and self._num_threads < self._max_threads:
            self._num_threads += 1
            threading.Thread(target=_serve, args=(self._works, self._idle), name="text", daemon=True).start()
        return future


def _serve(works: "SimpleQueue[_Work | None]", idle: threading.Semaphore) -> None:
    while (work := works.get()) is not None:
        future, call = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        del future, call, work  # free what they hold before the next call
        idle.release()
    works.put(None)  # for the next thread


class TextThreads:
    """Runs calls that may use the tokenizer.

    Args:
        num_threads: How many calls may run at once.
    """

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._threads = DaemonThreads(num_threads)
        self._numbers = count()
        self._begun_at_s: dict[int, float] = {}  # of calls that run

    @property
    def num_lost(self) -> int:
        """Threads whose call has exceeded its time; a thread that comes back no longer counts."""
        overdue_s = monotonic_s() - LIMIT_S
        return sum(begun_at_s <= overdue_s for begun_at_s in list(self._begun_at_s.values()))

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a call, run in a thread.

        Raises: TokenizerFailedError: the call does not return. UnavailableError: too many others hang.
        """
        self._require_threads()
        number = next(self._numbers)
        call = partial(contextvars.copy_context().run, work, *arguments)
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._timed, number, call)
        try:
            while not (await asyncio.wait((future,), timeout=self._time_left_s(number)))[0]:
                if number not in self._begun_at_s:  # the call waits for a thread
                    self._require_threads()
                elif self._time_left_s(number) <= 0:
                    raise TokenizerFailedError(f"the tokenizer did not finish within {LIMIT_S:g} s")
            return future.result()
        finally:
            future.cancel()

    def _timed(self, number: int, call: Callable[[], T]) -> T:
        self._begun_at_s[number] = monotonic_s()
        try:
            return call()
        finally:
            del self._begun_at_s[number]

    def _time_left_s(self, number: int) -> float:
        begun_at_s = self._begun_at_s.get(number)
        return LIMIT_S if begun_at_s is None else max(0.0, begun_at_s + LIMIT_S - monotonic_s())

    def _require_threads(self) -> None:
        num_lost = self.num_lost
        if 2 * num_lost >= self._num_threads:
            raise UnavailableError(
                f"the tokenizer hangs in {counted(num_lost, 'call')} and accepts no more text; send token ids, or use "
                "another scheduler"
            )
