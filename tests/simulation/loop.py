"""An event loop whose time is virtual and whose order is drawn from a seed.

Everything that runs here belongs to a `SimulatedProcess`, by its context. One draw picks what runs next: a task that
may go on, or the oldest plain callback of a process. So tasks meet in any order, while callbacks of one process keep
theirs: asyncio promises that, and the services rely on it. The clock stands still while something is ready, and then
jumps to the next timer. Threads, sockets and signals do not exist here; whoever wants one gets a `RealWorldError`.
Next: `processes.py`, `real_world.py`.
"""

import asyncio
import contextvars
import gc
import hashlib
import heapq
import itertools
import logging
import random
import struct
import sys
import warnings
from array import array
from asyncio import events
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Never, TypeVar

from scheduler_svc.front.text.text_threads import DaemonThreads
from tests.simulation.handle import SimulatedHandle
from tests.simulation.processes import PROCESS, SimulatedProcess, State

T = TypeVar("T")

# Callbacks without a step of the clock, at most: beyond, they wait for each other and will for ever.
MAX_CALLBACKS_AT_ONCE = 20_000

# What begins the virtual clock; far enough from 0 that nothing seems to have happened "never".
START_S = 1_000.0

# How long a thread takes for what `asyncio.to_thread` gives it, at most, in seconds.
LONGEST_THREAD_CALL_S = 0.01


class SimulationError(Exception):
    """The simulation itself cannot go on."""


class DeadlockError(SimulationError):
    """Nothing is ready, no timer runs, and the end is not reached."""


class LivelockError(SimulationError):
    """Callbacks follow each other for ever while the clock stands still."""


class UnhandledError(SimulationError):
    """A callback or a task raised what nobody takes."""


class RealWorldError(SimulationError):
    """Code in the simulation asked for something that is not simulated."""


class SimulatedTask(asyncio.Task[T]):
    """A task of a process. Its place in a set is that of its number, and does not depend on its address in memory."""

    def __init__(self, coro: Coroutine[Any, Any, T], number: int, process: SimulatedProcess, **keywords: Any) -> None:
        self.number = number
        self.process = process
        super().__init__(coro, **keywords)

    def __hash__(self) -> int:
        return self.number


class SimulatedFuture(asyncio.Future[T]):
    """As `SimulatedTask`; few are ever in a set, so they get their number there."""

    _number = 0

    def __hash__(self) -> int:
        if not self._number:
            self._number = next(self.get_loop()._numbers)  # type: ignore[attr-defined]
        return self._number


class SimulationLoop(asyncio.AbstractEventLoop):  # what it lacks is refused, at the end of this file
    """Runs simulated processes.

    Args:
        seed: Of the order in which things happen, and of nothing else.
        is_fair: Whether what has been ready for longest runs next, in place of the draw.

    Attributes:
        outside: The process of whoever watches all others.
        num_callbacks: How many have run.
    """

    def __init__(self, seed: str, *, is_fair: bool = False) -> None:
        self._random = random.Random(f"schedule {seed}")
        self._threads = random.Random(f"threads {seed}")
        self._is_fair = is_fair
        self._now_s = START_S
        self._numbers = itertools.count(1)
        self._ready: list[SimulatedHandle | SimulatedProcess] = []
        self._timers: list[tuple[float, int, SimulatedHandle]] = []
        self._is_over = False
        self._processes: list[SimulatedProcess] = []
        self._is_running = False
        self._picks = array("I")
        self._jumps = array("d")
        self._digest = hashlib.sha256()
        self.outside = SimulatedProcess("outside", self)
        self.num_callbacks = 0
        self._end: Exception | None = None

    # What processes and the trace need ------------------------------------------------------------

    def add(self, process: SimulatedProcess) -> None:
        """A process begins."""
        self._processes.append(process)

    def tasks_of(self, process: SimulatedProcess) -> list[asyncio.Task[Any]]:
        """Return the tasks of a process that have not ended, the oldest one first."""
        tasks = asyncio.all_tasks(self)
        return sorted((task for task in tasks if isinstance(task, SimulatedTask) and task.process is process), key=hash)

    def note(self, words: str) -> None:
        """Let something that happened be part of the digest."""
        self._digest.update(words.encode())

    def digest(self) -> str:
        """Return a hash of all that has happened so far, in its order; equal seeds have equal ones."""
        for values in (self._picks, self._jumps):
            self._digest.update(values.tobytes())
            del values[:]
        self._digest.update(struct.pack("d", self._now_s))
        return self._digest.copy().hexdigest()

    def end(self, error: Exception) -> None:
        """Let the run end with an error, after the callback that runs."""
        self._end = self._end or error

    def hold(self, process: SimulatedProcess) -> None:
        """A process is stalled: keep what is ready of it until it goes on."""
        process.held = [item for item in self._ready if _process_of(item) is process]
        self.drop(process)

    def make_ready(self, process: SimulatedProcess) -> None:
        """Let a process go on that was stalled."""
        held, process.held = process.held, []
        self._ready.extend(held)

    def drop(self, process: SimulatedProcess) -> None:
        """Nothing of a process runs any more."""
        self._ready = [item for item in self._ready if _process_of(item) is not process]

    # The loop --------------------------------------------------------------------------------------

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        """Run until a coroutine ends, which belongs to `outside`, and return what it returns."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        events._set_running_loop(self)
        self._is_running = True
        try:
            main = self.outside.start(future)
            while not main.done():
                self._run_once(main)
            return main.result()
        finally:
            self._is_running = False
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _run_once(self, main: asyncio.Task[T]) -> None:
        num_at_once = 0
        ready, picks, draw, is_fair = self._ready, self._picks, self._random.random, self._is_fair
        while ready:
            if is_fair or len(ready) == 1:
                item = ready.pop(0)
            else:
                index = int(draw() * len(ready))
                picks.append(index)
                item, ready[index] = ready[index], ready[-1]
                ready.pop()
            if isinstance(item, SimulatedHandle):
                handle = item
            else:
                handle = item.callbacks.popleft()
                if item.callbacks:
                    ready.append(item)
            callback = handle.callback
            if callback is not None:
                try:
                    handle.context.run(callback, *handle.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"exception in {handle!r}", "exception": error})
                self.num_callbacks += 1
                num_at_once += 1
                watch = handle.process.watch
                if watch is not None:
                    watch()
                if self._end is not None:
                    raise self._end
                if num_at_once > MAX_CALLBACKS_AT_ONCE:
                    raise LivelockError(f"{num_at_once} callbacks ran at {self._now_s:.6f} s, at last {handle!r}")
                if main.done():
                    break
            ready = self._ready
        if not main.done():
            self._jump()

    def _jump(self) -> None:
        """Set the clock to the next timer, and make all ready that are due then."""
        timers = self._timers
        while timers:
            when_s, _, handle = timers[0]
            if handle.callback is not None and handle.process.state is not State.DEAD:
                break
            heapq.heappop(timers)
        else:
            raise DeadlockError(f"nothing can happen any more at {self._now_s:.6f} s")
        self._now_s = now_s = max(self._now_s, when_s)
        self._jumps.append(now_s)
        while timers and timers[0][0] <= now_s:
            handle = heapq.heappop(timers)[2]
            if handle.callback is not None:
                self._add(handle)

    def _add(self, handle: SimulatedHandle) -> None:
        """Make a callback ready, unless its process is dead; one of a stalled process is held."""
        process = handle.process
        item: SimulatedHandle | SimulatedProcess = handle
        if type(getattr(handle.callback, "__self__", None)) is not SimulatedTask:
            if process.state is State.DEAD:
                return
            process.callbacks.append(handle)
            if len(process.callbacks) > 1:
                return
            item = process
        if process.state is State.RUNNING:
            self._ready.append(item)
        elif process.state is State.STALLED:
            process.held.append(item)

    def close(self) -> None:
        """Forget everything. What is left of tasks ends here, as garbage, and nobody hears of it."""
        self._is_over = True
        hook, level = sys.unraisablehook, logging.root.manager.disable
        sys.unraisablehook = lambda unraisable: None
        logging.disable()
        try:
            with warnings.catch_warnings(action="ignore"):
                self._forget_processes()
                for left in (self._processes, self._ready, self._timers):
                    left.clear()
                self._end = None
                gc.collect()
        finally:
            sys.unraisablehook = hook
            logging.disable(level)

    def _forget_processes(self) -> None:
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for process in self._processes:
            process.forget()

    # What asyncio asks of a loop -------------------------------------------------------------------

    def time(self) -> float:
        return self._now_s

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> SimulatedHandle:
        handle = SimulatedHandle(callback, args, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> SimulatedHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> SimulatedHandle:
        handle = SimulatedHandle(callback, args, context, when)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        number, process = next(self._numbers), PROCESS.get() if context is None else context[PROCESS]
        task = SimulatedTask(coro, number, process, loop=self, name=name or f"task {number}", context=context)
        if process.is_dead:
            process.unfinished.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Call it here, some time later, as a thread of the default pool would."""
        if executor is not None and not isinstance(executor, DaemonThreads):
            _refuse("a pool of threads")
        called: asyncio.Future[T] = self.create_future()

        def call() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not called.done():
                    called.set_exception(error)
            else:
                if not called.done():
                    called.set_result(result)

        self.call_later(self._threads.random() * LONGEST_THREAD_CALL_S, call)
        return called

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run: nobody takes what was raised."""
        error = context.get("exception")
        self.end(UnhandledError(f"nobody took {type(error).__name__}: {error} ({context.get('message')})"))

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def _close_generator(self, generator: AsyncGenerator[Any, None]) -> None:
        if not self._is_over:
            self.create_task(generator.aclose())


def _refuse(what: str) -> Never:
    raise RealWorldError(f"{what} does not exist in a simulation")


# What AbstractEventLoop declares beyond this: sockets, signals, processes.
for _name in vars(asyncio.AbstractEventLoop).keys() - vars(SimulationLoop).keys():
    if not _name.startswith("_"):
        setattr(SimulationLoop, _name, lambda *_, name=_name, **__: _refuse(f"asyncio's {name}"))


def _process_of(item: SimulatedHandle | SimulatedProcess) -> SimulatedProcess:
    return item if isinstance(item, SimulatedProcess) else item.process
