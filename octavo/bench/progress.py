"""How far a load is, on a terminal."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.bench.load import Load

_INTERVAL_S = 0.25  # rare, since drawing takes the sender's time


@contextmanager
def shown(console: Console, load: Load, title: str) -> Iterator[None]:
    """Draw a bar while the context is open; nothing if the console is no terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        updates = asyncio.create_task(_update(progress, load, title))
        try:
            yield
        finally:
            updates.cancel()


async def _update(progress: Progress, load: Load, title: str) -> None:
    task = progress.add_task(title, total=1.0, counts="")
    while True:
        progress.update(task, completed=_share(load), counts=_counts(load))
        progress.refresh()
        await asyncio.sleep(_INTERVAL_S)


def _share(load: Load) -> float:
    """Return how much of the load is done, 0 to 1: by requests, or by time if that comes first."""
    share = load.num_ended / max(1, len(load.plan))
    if load.plan.duration_s is not None and load.plan.arrivals_s is None:
        share = max(share, (time.perf_counter() - load.begin_s) / load.plan.duration_s)
    return min(1.0, share)


def _counts(load: Load) -> str:
    failed = f", {load.num_failed} failed" if load.num_failed else ""
    return f"{load.num_ended} answered, {len(load.records) - load.num_ended} running{failed}"
