"""The files of a step log: their names, and the form of a record. `step_log.proto` has what is in them.

    scheduler-20261122T160250Z-1f0c9a2e-000001.steps
              begun at         log      file

A scheduler that starts again begins another log in the same folder. The names of files sort by time.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from octavo.values.wording import counted

MAGIC = b"octavo step log\n"
FORMAT_VERSION = 3
# Length and CRC-32 of what follows.
FRAME = Struct("<II")

_NAME = re.compile(r"scheduler-(\d{8}T\d{6}Z)-([0-9a-f]{8})-(\d{6,})\.steps")


class FileName(NamedTuple):
    """The parts of a name, in the order in which files sort."""

    begun: str
    log: str
    number: int

    @classmethod
    def of(cls, path: Path) -> "FileName | None":
        """Return the parts of the name of a file; None: it is none of a step log."""
        found = _NAME.fullmatch(path.name)
        return None if found is None else cls(found[1], found[2], int(found[3]))

    def __str__(self) -> str:
        return f"scheduler-{self.begun}-{self.log}-{self.number:06}.steps"


def files_in(directory: Path) -> list[Path]:
    """Return the files of all step logs in a folder, oldest first."""
    named = [(name, path) for path in directory.iterdir() if (name := FileName.of(path)) is not None]
    return [path for _, path in sorted(named)]


def frame(content: bytes) -> bytes:
    """Return a record as it stands in a file."""
    return FRAME.pack(len(content), zlib.crc32(content)) + content


@dataclass(frozen=True, slots=True)
class Framed:
    """A record of a file: its number, from 0 for the header, the byte at which it begins, and its content."""

    number: int
    offset: int
    content: bytes


class BrokenFileError(Exception):
    """A file is broken at a place; the message says how. What comes before is whole."""


def read_records(path: Path) -> Iterator[Framed]:
    """Yield the records of a file.

    Raises: BrokenFileError: what comes next is no record.
    """
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
        if not magic:
            raise BrokenFileError(f"{path.name} is empty")
        if magic != MAGIC:
            raise BrokenFileError(f"{path.name} is not a step log, or its header is corrupt")
        offset, number, end = len(MAGIC), 0, path.stat().st_size
        while head := file.read(FRAME.size):
            where = f"{path.name} at record {number}, byte {offset}"
            if len(head) < FRAME.size:
                left = counted(len(head), "byte")
                raise BrokenFileError(
                    f"{where}: the file was truncated or modified here; {left} follow, too few for a record"
                )
            length, checksum = FRAME.unpack(head)
            content = file.read(length) if offset + FRAME.size + length <= end else b""
            if len(content) < length or not length:  # bytes that were never written are zeros
                raise BrokenFileError(f"{where}: the file was truncated or modified here; no whole record follows")
            if zlib.crc32(content) != checksum:
                raise BrokenFileError(f"{where}: the record is corrupt: wrong checksum")
            yield Framed(number, offset, content)
            offset, number = offset + FRAME.size + length, number + 1
