"""Many runs: seed by seed, on several processes. `tests/support/run_file.py` puts pieces of them together again."""

import contextlib
import gc
import multiprocessing
import queue
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.simulation.draw import SEEDS_OF_A_GROUP, draw_plan
from tests.simulation.run import Outcome, simulate

# A worker looks so often whether it is to stop, in seconds, while it waits.
_LOOK_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Run:
    """Which run: its seed and its mode."""

    seed: int
    mode: str


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """What is kept of a run; see `Outcome`. `cpu_s`: seconds that a processor was at work for it."""

    seed: int
    mode: str
    broken: str
    digest: str
    num_steps: int
    num_faults: int
    virtual_s: float
    cpu_s: float
    seen: Mapping[str, int]

    @property
    def run(self) -> Run:
        """Which run it was."""
        return Run(self.seed, self.mode)

    @classmethod
    def of(cls, outcome: Outcome, cpu_s: float) -> "FinishedRun":
        """Return what is kept of an outcome."""
        plan = outcome.plan
        counts = outcome.num_steps, outcome.num_faults, outcome.virtual_s, cpu_s
        return cls(plan.seed, plan.mode, outcome.broken, outcome.digest, *counts, dict(outcome.seen))


def run_one(run: Run) -> FinishedRun:
    """Run a seed."""
    begin_s = time.process_time()
    outcome = simulate(draw_plan(run.seed, run.mode))
    return FinishedRun.of(outcome, time.process_time() - begin_s)


@dataclass(slots=True)
class Limits:
    """When a campaign stops before its end.

    Attributes:
        ends_at_s: At this monotonic time; None: at no time.
        stops_at_first: After the first run in which a promise was broken.
    """

    ends_at_s: float | None = None
    stops_at_first: bool = False

    def is_over(self, finished: FinishedRun | None) -> bool:
        """Return whether to stop, after a run or before the first one."""
        is_late = self.ends_at_s is not None and time.monotonic() >= self.ends_at_s
        return is_late or (self.stops_at_first and finished is not None and bool(finished.broken))


def run_all(
    runs: Sequence[Run], num_jobs: int, limits: Limits, run: Callable[[Run], FinishedRun] = run_one
) -> Iterator[FinishedRun]:
    """Run all, on so many processes, and yield them as they finish."""
    gc.collect()
    gc.freeze()  # what the modules made is not looked at again after each run
    if num_jobs > 1:
        yield from _run_beside(runs, num_jobs, limits, run)
        return
    finished: FinishedRun | None = None
    for each in runs:
        if limits.is_over(finished):
            return
        finished = run(each)
        yield finished


def _run_beside(
    runs: Sequence[Run], num_jobs: int, limits: Limits, run: Callable[[Run], FinishedRun]
) -> Iterator[FinishedRun]:
    """Give groups of seeds that share answers to processes: what is computed alone is computed in one of them."""
    context = multiprocessing.get_context("fork")
    todo: multiprocessing.Queue[list[Run]] = context.Queue()
    done: multiprocessing.Queue[FinishedRun | Exception | None] = context.Queue()
    is_over = context.Event()
    for group in _groups(runs):
        todo.put(group)
    workers = [context.Process(target=_work, args=(todo, done, is_over, run), daemon=True) for _ in range(num_jobs)]
    try:
        for worker in workers:
            worker.start()
        num_working = num_jobs
        while num_working:
            try:
                finished = done.get(timeout=_LOOK_INTERVAL_S)
            except queue.Empty:
                if all(not worker.is_alive() for worker in workers):
                    raise RuntimeError("a process of the campaign ended before its runs") from None
                if limits.is_over(None):
                    is_over.set()
                continue
            if isinstance(finished, Exception):
                raise finished
            if finished is None:
                num_working -= 1
                continue
            if limits.is_over(finished):
                is_over.set()
            yield finished
    finally:
        is_over.set()
        for worker in workers:
            worker.terminate()
            worker.join()


def _work(todo: Any, done: Any, is_over: Any, run: Callable[[Run], FinishedRun]) -> None:
    """Run groups until none is left; the last word is None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    try:
        with contextlib.suppress(queue.Empty):
            while not is_over.is_set():
                for each in todo.get(timeout=_LOOK_INTERVAL_S):
                    if is_over.is_set():
                        break
                    done.put(run(each))
    except Exception as error:
        done.put(error)
    done.put(None)


def _groups(runs: Iterable[Run]) -> list[list[Run]]:
    groups: dict[int, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.seed // SEEDS_OF_A_GROUP, []).append(run)
    return list(groups.values())
