"""An event loop in a thread of its own, for callers that are not async.

It works where a loop runs already, as in Jupyter, whose cells are inside one.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import TypeVar

_Result = TypeVar("_Result")


class EventLoopThread:
    """Runs coroutines for other threads until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, since the interpreter waits for other threads before it runs exit handlers, and the
        # exit handlers of our users need this one.
        self._thread = threading.Thread(target=self._run_loop, name="octavo-event-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[None, None, _Result]) -> _Result:
        """Run `work` in the loop and return its result.

        Ctrl-C in the calling thread cancels the work and waits until it has cleaned up.
        """
        task = asyncio.run_coroutine_threadsafe(_create_task(work), self._loop).result()
        future = asyncio.run_coroutine_threadsafe(_await_task(task), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(task.cancel)
            concurrent.futures.wait([future])
            raise

    def close(self, last_work: Coroutine[None, None, None]) -> None:
        """Run `last_work`, then end the thread.

        In the loop's own thread, where garbage collection may bring a caller, it returns at once and the
        work is done soon after.
        """
        if threading.current_thread() is self._thread:
            task = self._loop.create_task(last_work)
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


async def _create_task(work: Coroutine[None, None, _Result]) -> asyncio.Task[_Result]:
    return asyncio.create_task(work)


async def _await_task(task: asyncio.Task[_Result]) -> _Result:
    return await task
