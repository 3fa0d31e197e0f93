"""The finished parts of a long run, one a line, so that it is done in pieces.

A later piece leaves out what it finds in the file. The first line has a hash of the code, since runs of other code say
nothing of this one.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TextIO, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_ROOT = Path(__file__).parents[2]
_CODE = ("scheduler_svc", "executor_svc", "octavo", "shared")


class OtherCodeError(Exception):
    """A file has runs of other code."""


class RunFile(Generic[T]):
    """What has finished.

    Args:
        path: Of the file; None: nothing is kept.
        read: Makes one of the fields that a line has.
        folder: With the tests: what is kept depends on its code too.

    Attributes:
        finished: What earlier pieces left there, and what was added.

    Raises: OtherCodeError: it was begun with other code. OSError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, read: Callable[..., T], folder: str) -> None:
        self.finished: list[T] = []
        self._file: TextIO | None = None
        if path is None:
            return
        code = code_hash((*_CODE, folder))
        if path.exists() and path.stat().st_size:
            first, *lines = path.read_text().splitlines()
            if (begun_with := json.loads(first)["code"]) != code:
                raise OtherCodeError(f"{path} has runs of the code {begun_with}, and this is {code}: take another file")
            self.finished = [read(**json.loads(line)) for line in lines]
        self._file = path.open("a")
        if not path.stat().st_size:
            self._write(json.dumps({"code": code}))

    def add(self, finished: T) -> None:
        """Keep one."""
        self.finished.append(finished)
        self._write(json.dumps(asdict(finished), sort_keys=True))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def code_hash(folders: Sequence[str]) -> str:
    """Return a hash of all code of some folders."""
    digest = hashlib.sha256()
    for path in sorted(path for name in folders for path in (_ROOT / name).rglob("*.py")):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
