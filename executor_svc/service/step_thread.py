"""Three threads: one runs steps, one answers them, and one waits for the device.

    event loop ── submit ──> step thread ── answer ──> answering thread ──> event loop

Between two steps the step thread does what it must: it takes the next step, which is decoded already. What becomes of
the last one (its message, counters, the event loop) is the other thread's work. Above all the step thread does
not wake the event loop: that is a system call, during which a thread lets go of the interpreter; the loop takes it and
writes the answer, and the next step waits for that. To put something into a queue lets go of nothing. The others
get the interpreter as soon as the next step computes outside of Python.

A fake executor with steps of 3 and 10 ms lost 0.15 and 0.35 ms between two steps without this, and loses 0.06 and
0.13 ms (2 cores of an AMD EPYC, `python -m benchmarks.costs gap`, 2026-11-22).
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

from octavo_shared.process.events import Event

T = TypeVar("T")

Call = Callable[[], None]

_logger = logging.getLogger(__name__)


class StepThread:
    """Three threads that make calls, each one after the other.

    The first two are daemons: a step that hangs does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        self._answers: SimpleQueue[Call | None] = SimpleQueue()
        self._steps: threading.Thread | None = None
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._is_closed = False

    def start(self) -> None:
        """Start the threads."""
        self._steps = threading.Thread(target=self._make_steps, name="steps", daemon=True)
        self._steps.start()
        threading.Thread(target=self._make_answers, name="answers", daemon=True).start()

    @property
    def cpu_time_us(self) -> int | None:
        """Processor time that the step thread has used, in microseconds; None: there is no such thread."""
        if self._steps is None or self._steps.ident is None or not self._steps.is_alive():
            return None
        return time.clock_gettime_ns(time.pthread_getcpuclockid(self._steps.ident)) // 1000

    def submit(self, call: Call) -> None:
        """Make a call on the step thread, behind earlier ones; for any thread."""
        self._calls.put(call)

    def answer(self, call: Call) -> None:
        """Make a call on the answering thread, behind earlier ones; for the step thread."""
        self._answers.put(call)

    def wait(self, call: Call) -> None:
        """Make a call that waits for the device, on the thread for that, behind earlier ones; for the step thread."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._waiting.submit(call)

    def wait_for_answers(self) -> None:
        """Return when all calls of `answer` so far were made; for the step thread."""
        all_made = threading.Event()
        self._answers.put(all_made.set)
        all_made.wait()

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call on the step thread; return what it returns, or raise what it raises, behind all answers."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if answered.done():
                return  # no caller waits any more
            if error is not None:
                answered.set_exception(error)
            else:
                answered.set_result(value)  # type: ignore[arg-type]

        def call_and_answer() -> None:
            value, error = None, None
            try:
                value = call()
            except Exception as raised:
                error = raised
            self.answer(lambda: wake(loop, settle, value, error))

        self.submit(call_and_answer)
        return await answered

    def close(self) -> None:
        """Let the threads end after the step that runs and its answers; do not wait. What else is queued is dropped."""
        self._is_closed = True
        self._calls.put(None)
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _make_steps(self) -> None:
        while (call := self._calls.get()) is not None and not self._is_closed:
            _make(call)
        self._answers.put(None)  # not before: the step thread may wait for its answers

    def _make_answers(self) -> None:
        while (call := self._answers.get()) is not None:
            _make(call)


def _make(call: Call) -> None:
    try:
        call()
    except Exception:
        # A bug of ours. The caller that waits for this call hangs; later calls are made.
        _logger.exception(Event("step_thread_failed"))


def wake(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call `callback` on an event loop, unless that was closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *args)
