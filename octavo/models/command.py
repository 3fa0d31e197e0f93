"""`octavo model prepare` and `octavo model path`; `octavo.commands.command_line` registers the group `model`.

The file goes to standard output, so that a script can use it; bars and errors go to standard error.
"""

from types import TracebackType
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from octavo.models.progress import ModelPrepareError
from octavo.models.store import find_model, prepare_model


@click.group()
def model() -> None:
    """Fetch the demo model, and print where it is."""


@model.command()
@click.argument("name")
def prepare(name: str) -> None:
    """Fetch the demo model NAME (smollm2) if it is not there, and print its GGUF file."""
    try:
        with StageBars() as bars:
            file = prepare_model(name, progress=bars)
    except ModelPrepareError as error:
        raise click.ClickException(str(error)) from error
    click.echo(file)


@model.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the GGUF file of the demo model NAME."""
    try:
        file = find_model(name)
    except ModelPrepareError as error:
        raise click.ClickException(str(error)) from error
    if file is None:
        raise click.ClickException(f"the model {name} has not been prepared yet: run `octavo model prepare {name}`")
    click.echo(file)


class StageBars:
    """A `ProgressCallback` that draws one bar a stage on standard error, while its context is open.

    Args:
        more_columns: What stands between the share and the time.
    """

    def __init__(self, *more_columns: ProgressColumn) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TaskProgressColumn(),
            *more_columns,
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._stage = ""
        self._total: int | None = None
        self._task_id: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task_id is None:
            return
        if error is None:
            self._finish_stage()
        self._progress.stop()

    def __call__(self, stage: str, completed: int, total: int | None) -> None:
        """Move the bar of `stage`, after filling that of the stage before."""
        if self._task_id is None or stage != self._stage:
            self._finish_stage()
            self._stage = stage
            self._progress.start()  # at the first stage: a model that lies ready needs no bar
            self._task_id = self._progress.add_task(stage, total=total)
        self._total = total
        self._progress.update(self._task_id, completed=completed)

    def _finish_stage(self) -> None:
        """Fill the bar: a stage of unknown length pulses until the next one begins."""
        if self._task_id is not None:
            total = self._total or 1
            self._progress.update(self._task_id, total=total, completed=total)
            self._progress.stop_task(self._task_id)
