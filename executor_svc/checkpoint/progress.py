"""A progress bar for the loading of weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_bar(total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how many bytes are loaded, and how fast; yield the function that advances the bar."""
    console = Console(stderr=True)
    columns = (
        TextColumn("loading weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("loading weights", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)
