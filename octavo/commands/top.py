"""`octavo top`: the scheduler, its executors and its requests, as they are now."""

import asyncio
import os
import shutil
import signal
import sys

import click

from octavo.admin_client import AdminClient
from octavo.commands.connection import admin_connection_options
from octavo.commands.options import Number
from octavo.top.polling import Poller
from octavo.top.rates import Picture, RateMeter
from octavo.top.snapshot import snapshot_json, snapshot_text
from octavo.top.terminal import MIN_COLUMNS, size_trouble

# Width of a snapshot that goes to a file or a pipe, in cells, unless COLUMNS says otherwise.
_PLAIN_WIDTH = 160


@click.command()
@admin_connection_options
@click.option(
    "--interval",
    "interval_s",
    type=Number(min=0.1, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Refresh interval; rates are averages over it.",
)
@click.option(
    "--once",
    "is_once",
    is_flag=True,
    help="Print one snapshot as text and exit. This is the default without a terminal.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one snapshot as a line of JSON and exit.")
def top(client: AdminClient, interval_s: float, is_once: bool, is_json: bool) -> None:
    """Watch the executors and requests of a scheduler.

    Press "?" for the keys. --once and --json take one interval, because rates need two answers.
    """
    has_terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if is_json or is_once or not has_terminal:
        picture = asyncio.run(_one_picture(client, interval_s))
        width = max(MIN_COLUMNS, shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns)
        click.echo(snapshot_json(picture, client.address) if is_json else snapshot_text(picture, client.address, width))
        return
    if os.environ.get("TERM", "dumb") in ("dumb", ""):
        raise click.ClickException(
            'this terminal (TERM=dumb) cannot show a live view; print a snapshot with "octavo top --once"'
        )
    if trouble := size_trouble(*os.get_terminal_size(sys.stdout.fileno())):
        raise click.ClickException(trouble)
    asyncio.run(_run_app(client, interval_s))


async def _one_picture(client: AdminClient, interval_s: float) -> Picture:
    """Ask twice, an interval apart: rates are differences."""
    async with client:
        poller, meter = Poller(client), RateMeter()
        meter.add(await poller.take())
        await asyncio.sleep(interval_s)
        return meter.add(await poller.take())


async def _run_app(client: AdminClient, interval_s: float) -> None:
    """Show the screen until the user quits; a scheduler that does not answer at the start is an error."""
    # textual takes a while to load, and pictures as text do not need it.
    from octavo.top.app import TopApp
    from octavo.top.terminal import own_stderr

    async with client:
        await client.get_state()
        app = TopApp(Poller(client), interval_s)
        # Left to itself, SIGTERM would leave the terminal as the screen needs it.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, app.exit)
        # Without the mouse, the terminal itself selects and copies ids.
        with own_stderr():
            await app.run_async(mouse=False)
    if app.return_code:
        raise click.exceptions.Exit(app.return_code)
