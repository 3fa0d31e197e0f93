"""`octavo drain`: empty an executor, so that it can be ended and no request pauses for it."""

import asyncio

import click
from rich.console import Console

from octavo.admin.v1 import admin_pb2
from octavo.admin_client import AdminClient
from octavo.commands.connection import admin_connection_options
from octavo.errors import OctavoError
from octavo.values.wording import counted, printable

LOOK_INTERVAL_S = 0.25


class NotDrainingError(OctavoError):
    """The executor takes requests again before it was empty."""


@click.command()
@click.argument("executor", metavar="ADDRESS")
@admin_connection_options
@click.option("--undo", is_flag=True, help="Undo: let the executor take requests again.")
@click.option("--no-wait", is_flag=True, help="Return immediately; octavo top shows how many requests are left.")
def drain(executor: str, client: AdminClient, undo: bool, no_wait: bool) -> None:
    """Empty the executor at ADDRESS, and say when it can be ended.

    It gets no new requests. Those that it has go to other executors as soon as these have room; until then they run on.
    No token is lost. Once it is started again, it takes requests again.
    """
    asyncio.run(drain_executor(client, executor, undo=undo, waits=not no_wait))


async def drain_executor(client: AdminClient, executor: str, *, undo: bool = False, waits: bool = True) -> None:
    """Tell the scheduler, and wait until the executor is empty, unless not to.

    Raises: NotDrainingError: it was told to take requests again, or another process has come to its address;
        OctavoError: see AdminClient.
    """
    name = printable(executor)
    async with client:
        answer = await client.drain_executor(executor, undo=undo)
        if undo:
            click.echo(f"{name} takes requests")
        elif not waits:
            click.echo(f"{name} is draining: {counted(answer.num_requests, 'request')} left")
        else:
            await _wait_until_empty(client, executor)
            click.echo(f"{name} is empty; it is safe to stop")


async def _wait_until_empty(client: AdminClient, executor: str) -> None:
    """Show in one line what is left, until nothing is."""
    name = printable(executor)
    with Console(stderr=True, highlight=False).status(f"draining {name}") as status:
        while True:
            executors = (await client.get_state()).executors
            state = next((state for state in executors if state.address == executor), None)
            if state is None or state.status != admin_pb2.EXECUTOR_STATUS_ATTACHED:
                return  # what it had is with others
            if not state.is_draining:
                raise NotDrainingError(f"{name} takes requests again: it was restarted, or the drain was undone")
            num_left = state.num_running_requests + state.num_swapped_requests + state.num_preempted_requests
            if not (num_left or state.num_steps_in_flight):
                return
            goes_on = any(map(_takes_requests, executors))
            where = (
                "until others have capacity for them"
                if goes_on
                else "no other executor takes them, so they finish here"
            )
            status.update(f"draining {name}: {counted(num_left, 'request')} left, {where}")
            await asyncio.sleep(LOOK_INTERVAL_S)


def _takes_requests(state: admin_pb2.ExecutorState) -> bool:
    is_attached = state.status == admin_pb2.EXECUTOR_STATUS_ATTACHED
    return is_attached and not (state.is_draining or state.is_retired)
