"""`octavo explain`: why a request waits, what it did, and how it ended."""

import asyncio
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from octavo.admin_client import AdminClient, NotFoundError
from octavo.commands.connection import admin_connection_options
from octavo.commands.options import Number
from octavo.top.as_json import to_values
from octavo.top.report import Report, UnknownRequestError, ask_report, resolve_id
from octavo.top.report_text import event_lines, explanation_line, report_lines
from octavo.values.wording import json_line


@click.command()
@click.argument("request_id", metavar="REQUEST_ID", required=False)
@admin_connection_options
@click.option("--tenant", metavar="NAME", help="Tenant of the request, if several tenants use this id.")
@click.option("--watch", "is_watching", is_flag=True, help="Print every change until the request finishes.")
@click.option(
    "--interval",
    "interval_s",
    type=Number(min=0.05, max=3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Polling interval of --watch.",
)
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON, with --watch one for each change.")
def explain(
    request_id: str | None, client: AdminClient, tenant: str | None, is_watching: bool, interval_s: float, is_json: bool
) -> None:
    """Say why a request waits, or how it ended.

    It also lists what happened to the request. The first letters of the id are enough. The scheduler remembers the last
    1,000 requests that ended.
    """
    if not request_id:
        raise click.UsageError(
            'give a request id: the first column of "octavo top" lists them', click.get_current_context()
        )

    asyncio.run(
        explain_request(client, request_id, tenant, is_watching=is_watching, interval_s=interval_s, is_json=is_json)
    )


async def explain_request(
    client: AdminClient,
    text: str,
    tenant: str | None = None,
    *,
    is_watching: bool = False,
    interval_s: float = 1.0,
    is_json: bool = False,
) -> None:
    """Print what is known of the request that `text` stands for, its id or the beginning of it.

    Raises: UnknownRequestError: there is none, or several; OctavoError: see AdminClient.
    """
    async with client:
        report = await _ask(client, await resolve_id(client, text, tenant), tenant)
        _print(report, is_json=is_json)
        if is_watching:
            await _watch(client, report, interval_s, is_json=is_json)


async def _watch(client: AdminClient, report: Report, interval_s: float, *, is_json: bool) -> None:
    """Print what changes until the request has ended; then all of it, once more."""
    while not report.has_ended:
        await asyncio.sleep(interval_s)
        before, report = report, await _ask(client, report.request.request_id, report.request.tenant)
        if report.explanation == before.explanation and len(report.request.events) == len(before.request.events):
            continue
        if is_json or report.has_ended:
            if not is_json:
                click.echo()
            _print(report, is_json=is_json)
        else:
            _print_lines([*event_lines(report.request.events, len(before.request.events)), explanation_line(report)])


async def _ask(client: AdminClient, request_id: str, tenant: str | None) -> Report:
    try:
        return await ask_report(client, request_id, tenant)
    except NotFoundError as error:
        raise UnknownRequestError(
            f"{request_id!r} has finished and is no longer kept: only the last 1,000 are"
        ) from error


def _print(report: Report, *, is_json: bool) -> None:
    if not is_json:
        _print_lines(report_lines(report))
        return
    values = {
        "request": to_values(report.request),
        "explanation": to_values(report.explanation),
        "sharing": None if report.sharing is None else asdict(report.sharing),
        "url": report.url,
    }
    click.echo(json_line(values))


def _print_lines(lines: list[Text]) -> None:
    """Print lines with colours if this is a terminal, and never broken: the terminal breaks what is too long."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(line)
