"""`octavo replay`: decide the steps of a step log again, run them again, look at one of them."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from octavo.errors import OctavoError
from octavo.top.formatting import span_text
from octavo.top.overview import BLOCK_CELLS, legend
from octavo.top.polling import Answers
from octavo.top.rates import RateMeter
from octavo.top.report_text import event_lines
from octavo.top.snapshot import snapshot_text
from octavo.top.terminal import MIN_COLUMNS
from octavo.values.address import port_trouble
from octavo.values.wording import counted, how_to_install, printable

if TYPE_CHECKING:  # needs the packages of the scheduler
    from scheduler_svc.replay.difference import DifferenceError
    from scheduler_svc.replay.picture import StepPicture
    from scheduler_svc.replay.run import ReplayRun

_PLAIN_WIDTH = 160
_BLOCKS_IN_LINE = 64


class ReplayError(OctavoError):
    """The log cannot be replayed; the message says why."""


def _check_executor(ctx: click.Context, param: click.Parameter, address: str | None) -> str | None:
    del ctx, param
    if address is not None and (trouble := port_trouble(address, least_port=1)):
        raise click.BadParameter(trouble)
    return address


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--executor",
    callback=_check_executor,
    metavar="HOST:PORT",
    help=(
        "Also run the steps on this executor, and compare every token and log-probability bit for bit. No scheduler "
        "may be attached to it."
    ),
)
@click.option(
    "--at",
    metavar="STEP",
    help=(
        "Show blocks, queue and decisions right after this step: its number, such as 57, or 2:57 for step 57 of "
        "attachment 2."
    ),
)
@click.option("--follow", metavar="REQUEST_ID", help="Show what happened to this request.")
def replay(directory: Path, executor: str | None, at: str | None, follow: str | None) -> None:
    """Decide again every step of a step log.

    DIR is the folder of --step-log of the scheduler. The exit status is 0 if each step is decided as it was, to the
    byte, and the whole log could be read.
    """
    if sum(option is not None for option in (executor, at, follow)) > 1:
        raise click.UsageError("choose one of --executor, --at and --follow", click.get_current_context())
    try:
        from octavo_shared.errors import OctavoServiceError
        from scheduler_svc.replay.run import ReplayRun
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ReplayError(f"octavo replay needs the package {package}: {how_to_install('scheduler')}") from error
    try:
        run = ReplayRun(directory)
        if at is not None:
            _show_step(run, at)
        elif follow is not None:
            _follow(run, follow)
        else:
            _check(run, executor)
    except OctavoServiceError as error:
        raise ReplayError(str(error)) from error


# The whole log --------------------------------------------------------------------------------------


def _check(run: "ReplayRun", executor: str | None) -> None:
    for _ in run.play():
        pass
    _print_counts(run)
    if run.difference is not None:
        _print_difference(run.difference)
    elif not run.counts.num_steps:
        click.echo("the log has no steps")
    elif run.counts.troubles:
        click.echo(f"the {counted(run.counts.num_steps, 'step')} that could be read match the recording, byte for byte")
    else:
        click.echo("every step matches the recording, byte for byte")
    has_failed = run.difference is not None or bool(run.counts.troubles) or not run.counts.num_steps
    if executor is not None:
        has_failed |= _run_again(run, executor)
    if has_failed:
        raise click.exceptions.Exit(1)


def _run_again(run: "ReplayRun", executor: str) -> bool:
    """Run the steps on an executor, with a bar on a terminal; return whether anything differs."""
    from scheduler_svc.replay.executor_replay import ExecutorReport, replay_on_executor

    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("attaching", total=None)
        report = ExecutorReport(
            say=lambda line: console.print(Text(printable(line))),
            begin=lambda name, num_steps: progress.reset(task, description=printable(name), total=num_steps),
            advance=lambda: progress.advance(task),
        )
        replay_on_executor(run, executor, report)
    return report.has_failed


def _print_counts(run: "ReplayRun") -> None:
    counts = run.counts
    click.echo(
        f"{counted(counts.num_files, 'file')}, {counts.num_bytes / 2**20:.1f} MiB, "
        f"{span_text(round(counts.span_s * 1000))} of {counted(counts.num_logs, 'run')} of a scheduler: "
        f"{counted(counts.num_calls, 'call')}, {counted(counts.num_steps, 'step')}"
    )
    for trouble in counts.troubles:
        click.echo(f"not all of the log can be read: {printable(trouble)}")


def _print_difference(difference: "DifferenceError") -> None:
    click.echo(f"{difference.where} differs from the recording ({difference.place}):")
    for place in difference.places:
        click.echo(f"  {printable(str(place))}")
    if difference.hint:
        click.echo(f"  {difference.hint}")


# One step, one request ------------------------------------------------------------------------------


def _show_step(run: "ReplayRun", at: str) -> None:
    from scheduler_svc.replay.picture import StepChoice, picture_at

    picture = picture_at(run, StepChoice.parse(at))
    click.echo(f"{picture.name}, {picture.since_begin_s:.3f} s after its file began")
    click.echo(f"decided: {picture.text}")
    for event in picture.events:
        click.echo(f"  {printable(event)}")
    width = max(MIN_COLUMNS, shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns)
    answers = Answers(at_s=0.0, state=picture.state, live=tuple(picture.live), reasons=picture.reasons)
    click.echo()
    click.echo(snapshot_text(RateMeter().add(answers), os.path.basename(run.directory.resolve()), width))
    if picture.reasons:
        click.echo()
        click.echo(f"queue: {counted(len(picture.reasons), 'request')}, in the order of admission")
        for place, (request_id, reason) in enumerate(picture.reasons.items(), 1):
            click.echo(f"{place:>6}  {printable(request_id)}  {printable(reason)}")
    for line in _block_lines(picture):
        click.echo(line)


def _block_lines(picture: "StepPicture") -> list[str]:
    """Return each block as a character, by executor; rows of free blocks are left out."""
    from octavo.admin.v1 import admin_pb2

    shared, used, cached, free = (cell for cell, _ in BLOCK_CELLS)
    cells = {
        admin_pb2.BLOCK_STATE_SHARED: shared,
        admin_pb2.BLOCK_STATE_USED: used,
        admin_pb2.BLOCK_STATE_CACHED: cached,
        admin_pb2.BLOCK_STATE_FREE: free,
    }
    lines = []
    maps = [
        (executor, what, pools[executor])
        for executor in picture.block_maps
        for what, pools in (("", picture.block_maps), ("the encoder of ", picture.encoder_maps))
        if pools[executor]
    ]
    for executor, what, states in maps:
        size, name = picture.block_sizes[executor], f"{what}{printable(executor)}"
        lines += ["", f"{counted(len(states), 'block')} of {size} tokens of {name}   {legend().plain}"]
        num_left_out = 0
        for first in range(0, len(states), _BLOCKS_IN_LINE):
            row = "".join(cells[state] for state in states[first : first + _BLOCKS_IN_LINE])  # type: ignore[index]
            if row.strip(free):
                lines.append(f"{first:>8}  {row}")
            else:
                num_left_out += len(row)
        if num_left_out:
            lines.append(f"{'':>8}  {counted(num_left_out, 'free block')} in rows without any other")
    return lines


def _follow(run: "ReplayRun", request_id: str) -> None:
    from scheduler_svc.replay.requests import follow

    lives = list(follow(run, request_id))
    console = Console(highlight=False, soft_wrap=True)
    for number, life in enumerate(lives):
        if number:
            click.echo()
        if len(lives) > 1:
            click.echo(f"{printable(request_id)}, {life.arrived}")
        _print_events(console, life.events)
    if run.difference is not None:
        _print_difference(run.difference)
    for trouble in run.counts.troubles:
        click.echo(f"not all of the log can be read: {printable(trouble)}")
    if not lives:
        raise ReplayError(f"the log has no request {printable(request_id)!r}")


def _print_events(console: Console, events: Sequence[object]) -> None:
    for line in event_lines(events):  # type: ignore[arg-type]
        console.print(line)
