"""An event loop in a thread of its own, for callers that are not async.

It works where a loop runs already, as in Jupyter.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class EventLoopThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, since the interpreter waits for other threads before it runs exit handlers, and the
        # exit handlers of our users need this one.
        self._thread = threading.Thread(target=self._run_loop, name="octavo-event-loop", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], Coroutine[None, None, _Result]]) -> _Result:
        """Run the coroutine of `work` in the loop and return its result.

        Ctrl-C in the calling thread cancels the work and waits until it has cleaned up.
        """
        running = _Running(self._loop, work)
        try:
            self._loop.call_soon_threadsafe(running.start)
            running.done.wait()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(running.cancel)
            running.done.wait()
            raise
        return running.result()

    def close(self, last_work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run the coroutine of `last_work`, then end the thread.

        In the loop's own thread, where garbage collection may bring a caller, it returns at once and the
        work is done soon after.
        """
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(last_work())
            task.add_done_callback(lambda _: self._loop.stop())
            return
        try:
            self.run(last_work)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


class _Running(Generic[_Result]):
    """Work on its way through the loop. Ctrl-C may come at any point, also before `start` was queued.

    The coroutine is made when it starts: Python would complain about one that is never awaited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[None, None, _Result]]) -> None:
        self.done = threading.Event()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[_Result] | None = None

    def start(self) -> None:
        """Start the work; runs in the loop."""
        self._task = self._loop.create_task(self._work())
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        """Cancel the work; runs in the loop, behind `start` if that was queued."""
        if self._task is None:
            self.done.set()
        else:
            self._task.cancel()

    def result(self) -> _Result:
        """Return the result of the work, once it is done, or raise its error."""
        assert self._task is not None, "start() comes first"
        return self._task.result()

    def _end(self, task: asyncio.Task[_Result]) -> None:
        if not task.cancelled():
            task.exception()  # else asyncio logs it: after Ctrl-C it is not asked for
        self.done.set()
