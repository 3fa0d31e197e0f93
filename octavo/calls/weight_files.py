"""Safetensors files as the messages of an update of weights: in pieces, so that no file is held as a whole."""

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.errors import InvalidRequestError

PIECE_BYTES = 2**20

# A path, the bytes of a file as `safetensors.torch.save` returns them, or those bytes in parts of any size.
WeightFile: TypeAlias = "str | os.PathLike[str] | bytes | Iterable[bytes]"


async def update_messages(
    files: Sequence[WeightFile] | str | os.PathLike[str] | bytes, weights_digest: str
) -> AsyncGenerator[pb.UpdateWeightsRequest, None]:
    """Yield the messages of an update, the last one marked.

    Raises: InvalidRequestError: a file cannot be read, or is none.
    """
    if weights_digest:
        yield pb.UpdateWeightsRequest(weights_digest=weights_digest)
    for number, file in enumerate(_listed(files)):
        pieces = _pieces(file, f"files[{number}]")
        begins_file = True
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield pb.UpdateWeightsRequest(content=piece, begins_file=begins_file)
            begins_file = False
    yield pb.UpdateWeightsRequest(is_last=True)


def _listed(value: Any) -> Iterable[Any]:
    """Return several values as they are, and one as a tuple."""
    is_one = isinstance(value, str | os.PathLike | bytes | bytearray | memoryview) or not isinstance(value, Iterable)
    return (value,) if is_one else value


def _pieces(file: WeightFile, name: str) -> Iterator[bytes]:
    """Yield the bytes of a file, at least one piece, none larger than PIECE_BYTES."""
    if isinstance(file, str | os.PathLike):
        try:
            with Path(file).open("rb") as opened:
                yield opened.read(PIECE_BYTES)
                while piece := opened.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise InvalidRequestError(f"{name} is {file}, which cannot be read: {error.strerror}") from error
        return
    yield b""
    for part in _listed(file):
        if not isinstance(part, bytes | bytearray | memoryview):
            raise InvalidRequestError(
                f"{name} has a {type(part).__name__}; it must be a path, bytes, or parts of bytes"
            )
        for begin in range(0, len(part), PIECE_BYTES):
            yield bytes(part[begin : begin + PIECE_BYTES])
