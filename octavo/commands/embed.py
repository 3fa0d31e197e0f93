"""`octavo embed`: the vectors of the lines of a file, as JSON lines or as an array of NumPy."""

import asyncio
import json
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from octavo.client import Client
from octavo.commands.connection import connection_options
from octavo.commands.flag_names import in_flags
from octavo.errors import InvalidRequestError

_NPY = ".npy"

# What the scheduler calls a line.
_INPUT = re.compile(r"inputs\[(\d+)\]")


@click.command()
@click.argument("file", metavar="FILE")
@connection_options
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Where the vectors go: float32 of NumPy if the name ends with .npy, else JSON lines.  [default: stdout]",
)
@click.option("--prompt-name", metavar="NAME", help="Put this prompt of the model before each line, such as query.")
@click.option("--dimensions", type=int, help="Length of the vectors, for models that were trained for it.")
@click.option("--truncate-prompt-tokens", type=int, help="Cut lines with more tokens; -1: more than the model takes.")
@click.option("--priority", type=int, default=0, show_default=True, help="Smaller numbers are served first.")
@click.option("--tenant", default="", metavar="NAME", help="Tenant of the requests.")
def embed(
    file: str,
    client: Client,
    output: Path | None,
    prompt_name: str | None,
    dimensions: int | None,
    truncate_prompt_tokens: int | None,
    priority: int,
    tenant: str,
) -> None:
    """Write the vector of each line of FILE, a text of UTF-8. FILE "-" reads stdin."""
    lines = _lines(file)

    async def run() -> Sequence[Sequence[float]]:
        async with client:
            embeddings = await client.embed(
                lines,
                prompt_name=prompt_name,
                dimensions=dimensions,
                truncate_prompt_tokens=truncate_prompt_tokens,
                priority=priority,
                tenant=tenant,
            )
            return embeddings.embeddings

    try:
        vectors = asyncio.run(run())
    except InvalidRequestError as error:
        sentence = in_flags(_INPUT.sub(_as_line, str(error)), click.get_current_context())
        raise InvalidRequestError(sentence, field=error.field) from error
    if output is not None and output.suffix == _NPY:
        output.write_bytes(_npy(vectors))
    elif output is not None:
        output.write_text("".join(f"{json.dumps(vector)}\n" for vector in vectors), encoding="utf-8")
    else:
        for vector in vectors:
            click.echo(json.dumps(vector))


def _as_line(match: re.Match[str]) -> str:
    return f"line {int(match[1]) + 1}"


def _lines(file: str) -> list[str]:
    """Return the lines of a file; the last one may lack its end."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        lines = content.decode("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise click.ClickException(f"{file!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{'standard input' if file == '-' else repr(file)} is not UTF-8 text") from error
    empty = next((number for number, line in enumerate(lines, 1) if not line.strip()), None)
    if empty is not None:
        raise click.ClickException(f"line {empty} of {file} is empty; every line must have a text")
    return [line.removesuffix("\r") for line in lines]


def _npy(vectors: Sequence[Sequence[float]]) -> bytes:
    """Return a file of NumPy, [num_lines, num_dimensions]. Source: numpy.lib.format, version 1.0."""
    shape = len(vectors), len(vectors[0])
    header = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    rows = b"".join(struct.pack(f"<{len(vector)}f", *vector) for vector in vectors)
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + rows
