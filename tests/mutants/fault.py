"""A text of a file and what replaces it, and the copy of the tree that faults are planted in."""

import contextlib
import itertools
import os
import queue
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

P = TypeVar("P", bound="Plantable")
R = TypeVar("R")

REPOSITORY = Path(__file__).parents[2]


class StaleError(Exception):
    """A row of the table does not fit the code any more; says which and why."""


class Plantable(Protocol):
    """What can be planted: a `Change` or a `Mutant`."""

    @property
    def path(self) -> str:
        """The file, from the root of the repository."""

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises: StaleError: it does not fit the text.
        """


@dataclass(frozen=True, slots=True)
class Change:
    """A few lines of a file that are wrong.

    Attributes:
        name: The fault in words: what the code does wrong with it.
        path: The file, from the root of the repository.
        old: A text that the file has exactly once.
        new: What stands in its place with the fault.
    """

    name: str
    path: str
    old: str
    new: str

    def plant(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises: StaleError: the old text is not there exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise StaleError(f"{self.path} has the old text {count} times; it must be there once")
        return text.replace(self.old, self.new)


class TreeCopy:
    """A copy of the files that git tracks or would track. Faults are planted here, never in the tree itself.

    Args:
        root: A folder for it, which is made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._process: subprocess.Popen[str] | None = None
        # Python takes a compiled module for current by its source's size and second: each write has its own second.
        self._seconds = itertools.count(int(time.time()))
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (REPOSITORY / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPOSITORY / name, root / name)

    @contextlib.contextmanager
    def with_fault(self, fault: Plantable) -> Iterator[None]:
        """Have the fault in the copy for a while.

        Raises: StaleError: the row does not fit the file.
        """
        path = self.root / fault.path
        if not path.is_file():
            raise StaleError(f"there is no {fault.path}")
        sound = path.read_text(encoding="utf-8")
        self._write(path, fault.plant(sound))
        try:
            yield
        finally:
            self._write(path, sound)

    def start(self, command: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a command in the copy: it, and every process that it starts, uses the code of this copy."""
        self._process = subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self.root), str(self.root / "shared")])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        return self._process

    def stop(self) -> None:
        """Kill the command that runs here, with every process that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        second = next(self._seconds)
        os.utime(path, (second, second))


def try_in_copies(copies: Sequence[TreeCopy], faults: Sequence[P], try_one: Callable[[TreeCopy, P], R]) -> Iterator[R]:
    """Try faults, as many at once as there are copies; yield each outcome when it is known."""
    free: queue.SimpleQueue[TreeCopy] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)

    def try_somewhere(fault: P) -> R:
        copy = free.get()
        try:
            return try_one(copy, fault)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as executor:
        try:
            for future in as_completed([executor.submit(try_somewhere, fault) for fault in faults]):
                yield future.result()
        except BaseException:  # Ctrl-C: no other fault is tried
            executor.shutdown(wait=False, cancel_futures=True)
            for copy in copies:
                copy.stop()
            raise
