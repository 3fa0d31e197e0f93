"""CPU time of functions and of processes."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Clock:
    """Adds up the CPU time of the calls of functions, each in the thread that calls it; they may not call each other.

    Attributes:
        calls: By name of the function.
        elapsed_ns: The same.
        cost_ns: What timing a call adds to its caller.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.elapsed_ns: Counter[str] = Counter()
        self._inside_ns = 0
        empty = self.timed("", lambda: None)
        inside, around = [], []
        for _ in range(1000):
            began_ns = time.thread_time_ns()
            empty()
            around.append(time.thread_time_ns() - began_ns)
            inside.append(self.elapsed_ns.pop(""))
        self.cost_ns = round(statistics.median(around))
        self._inside_ns = round(statistics.median(inside))
        self.calls.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time taken."""

        @wraps(function, assigned=(), updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.elapsed_ns[name] += time.thread_time_ns() - began_ns - self._inside_ns
                self.calls[name] += 1

        return run


@contextmanager
def timed_functions(clock: Clock, functions: Iterable[tuple[object, str]]) -> Iterator[None]:
    """Time functions, each given by its owner and its name there."""
    with ExitStack() as stack:
        for owner, name in functions:
            stack.enter_context(patch.object(owner, name, clock.timed(name, vars(owner)[name])))
        yield


def cpu_us(*pids: int) -> float:
    """Return the CPU time of the threads of processes in microseconds, from Linux's scheduler."""
    paths = (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text(encoding="ascii").split()[0]) for path in paths) / 1000
