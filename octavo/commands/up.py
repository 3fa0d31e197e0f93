"""`octavo up`: a scheduler and an executor on this machine, until Ctrl-C or SIGTERM."""

import asyncio
import signal
from typing import Any

import click
from rich.console import Console

from octavo.client import DEFAULT_ADDRESS
from octavo.commands.options import service_options, to_local_options
from octavo.local import LocalOptions, LocalServices


@click.command()
@click.option("--listen", default=DEFAULT_ADDRESS, show_default=True, metavar="HOST:PORT", help="Of the scheduler.")
@service_options
def up(model: str, verbose: bool, **flags: Any) -> None:
    """Start a scheduler and an executor on this machine; Ctrl-C stops both."""
    asyncio.run(_run_until_stopped(model, to_local_options(model, **flags), is_verbose=verbose))


async def _run_until_stopped(model: str, options: LocalOptions, *, is_verbose: bool) -> None:
    console = Console(stderr=True)
    stop_wanted = _catch_stop_signals()
    with console.status("starting") as status:
        services = LocalServices.from_options(options, on_status=status.update, is_verbose=is_verbose)
        start = asyncio.create_task(services.start())
        stop = asyncio.create_task(stop_wanted.wait())
        await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            await asyncio.wait([start])
            return
        stop.cancel()
        start.result()
    try:
        click.echo(f"serving {model} on {services.address}; Ctrl-C stops")
        at = "" if services.address == DEFAULT_ADDRESS else f" --address {services.address}"
        click.echo(f'try: octavo generate "Why is the sky blue?"{at}')
        await services.run_beside(_wait_for(stop_wanted))
        click.echo("stopping, when the streams have ended or after 20 s; Ctrl-C again stops at once", err=True)
    finally:
        await services.stop()


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def _catch_stop_signals() -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets; the second has its usual effect."""
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        event.set()
        for signal_number in signals:
            loop.remove_signal_handler(signal_number)

    for signal_number in signals:
        loop.add_signal_handler(signal_number, on_signal)
    return event
