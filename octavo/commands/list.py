"""`octavo list`: the models of this machine, the models that can be made, and the one that is served now."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.filesize import decimal

from executor_svc.device.host_memory import available_memory_bytes
from octavo.client import Client
from octavo.commands.options import address_option
from octavo.errors import OctavoError
from octavo.models.local_models import LocalModel, ModelState, list_local_models
from octavo.values.outputs import ModelInfo
from octavo.values.wording import printable

# A scheduler of this machine answers in milliseconds; a distant one that is down is not waited for.
_LONGEST_WAIT_S = 1.0

_HEADINGS = ("NAME", "SIZE", "FORMAT", "ARCHITECTURE", "NEEDS", "WHERE")


@click.command("list")
@address_option
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON, with sizes in bytes.")
def list_models(address: tuple[str, ...], is_json: bool) -> None:
    """List the models on this machine.

    These are the demo model, and the models in the Hugging Face cache and in the folders of Ollama and LM Studio. NEEDS
    is the memory for the weights as they are, a KV cache of 4,096 tokens, and the programs. If a scheduler answers at
    --address, its model and its adapters are named too.
    """
    models = list_local_models()
    model, where = asyncio.run(_served_model(address))
    served = None if model is None else {"model_id": model.model_id, "address": where, "adapters": model.adapters}
    if is_json:
        values = [{**asdict(model), "directory": model.directory and str(model.directory)} for model in models]
        click.echo(json.dumps({"models": values, "served": served}))
        return
    click.echo(_table([_HEADINGS, *map(_row, models)]))
    available = available_memory_bytes()
    if available is not None:
        click.echo(f"\n{decimal(available)} of memory are free")
    if model is not None:
        click.echo(f"\nserved at {where}: {printable(model.model_id)}")
        if model.adapters:
            click.echo(f"with adapters: {', '.join(map(printable, model.adapters))}")


async def _served_model(addresses: Sequence[str]) -> tuple[ModelInfo | None, str]:
    client = Client(addresses)
    try:
        async with asyncio.timeout(_LONGEST_WAIT_S), client:
            return await client.get_model(), client.address
    except (OctavoError, TimeoutError):
        return None, client.address


def _row(model: LocalModel) -> tuple[str, ...]:
    if model.state is ModelState.NOT_PULLED:
        return model.name, "", "", "", "", f"not downloaded yet ({decimal(model.num_bytes)}): octavo pull {model.name}"
    size, architecture = decimal(model.num_bytes), printable(model.architecture)
    if model.state is ModelState.PARTLY_PULLED:
        return model.name, size, "", architecture, "", f"partly downloaded: octavo pull {model.name}"
    if model.state is ModelState.REFUSED:
        return printable(model.name), size, "", "", "", f"cannot be served: {printable(model.trouble)}"
    assert model.needed_bytes is not None, "of a model that is ready it is known"
    needs = decimal(model.needed_bytes)
    return printable(model.name), size, printable(model.format), architecture, needs, _shorten(model.directory)


def _shorten(directory: Path | None) -> str:
    """Return a place with ~ for the user's own; of a model of the hub's cache, the directory of the cache."""
    assert directory is not None, "a model that is ready has a directory"
    if "snapshots" in directory.parts:
        while directory.name != "snapshots":
            directory = directory.parent
        directory = directory.parents[1]
    elif directory.is_file():
        directory = directory.parent
    try:
        return f"~/{directory.relative_to(Path.home())}"
    except (RuntimeError, ValueError):  # there is no home, or it lies elsewhere
        return str(directory)


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
