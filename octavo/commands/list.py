"""`octavo list`: the models of this machine, those that can be made, and the one that is served now."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.filesize import decimal

from octavo.client import Client
from octavo.commands.options import address_option
from octavo.errors import OctavoError
from octavo.models.local_models import LocalModel, ModelState, list_local_models
from octavo.values.wording import printable

# A scheduler of this machine answers in milliseconds; nobody waits for one that is elsewhere and down.
_LONGEST_WAIT_S = 1.0

_HEADINGS = ("NAME", "SIZE", "WEIGHTS", "ARCHITECTURE", "WHERE")


@click.command("list")
@address_option
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON, with sizes in bytes.")
def list_models(address: tuple[str, ...], is_json: bool) -> None:
    """List the models on this machine.

    These are the demo model, and the models in the Hugging Face cache. If a scheduler answers at --address, its model
    is named too.
    """
    models = list_local_models()
    served, where = asyncio.run(_served_model(address))
    if is_json:
        values = [{**asdict(model), "directory": model.directory and str(model.directory)} for model in models]
        click.echo(json.dumps({"models": values, "served": served and {"model_id": served, "address": where}}))
        return
    click.echo(_table([_HEADINGS, *map(_row, models)]))
    if served is not None:
        click.echo(f"\nserved at {where}: {printable(served)}")


async def _served_model(addresses: Sequence[str]) -> tuple[str | None, str]:
    """Return the model that is served, and where."""
    client = Client(addresses)
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S), client:
            return (await client.get_model()).model_id, client.address
    except (OctavoError, TimeoutError):
        return None, client.address


def _row(model: LocalModel) -> tuple[str, ...]:
    if model.state is ModelState.NOT_PULLED:
        return model.name, "", "", "", f"not downloaded yet ({decimal(model.num_bytes)}): octavo pull {model.name}"
    size, weights = decimal(model.num_bytes), decimal(model.num_weight_bytes)
    if model.state is ModelState.PARTLY_PULLED:
        return model.name, size, "", printable(model.architecture), f"partly downloaded: octavo pull {model.name}"
    return printable(model.name), size, weights, printable(model.architecture), _shorten(model.directory)


def _shorten(directory: Path | None) -> str:
    """Return a directory with ~ for the user's own; of a model of the hub's cache, that of the cache."""
    assert directory is not None, "a model that is ready has a directory"
    if directory.parent.name == "snapshots":
        directory = directory.parents[2]
    try:
        return f"~/{directory.relative_to(Path.home())}"
    except (RuntimeError, ValueError):  # there is no home, or it lies elsewhere
        return str(directory)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
