"""A value that is read from files, and read again when they change.

For what is renewed while a service runs: certificates, tokens. Whoever mounts such files replaces them at
once, often by a symbolic link (Kubernetes), so what identifies a content is the file behind the name.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from shared.errors import OctavoServiceError
from shared.events import Event

ValueT = TypeVar("ValueT")

# Of each file: device, inode, size, time of change in ns; None: it cannot be looked at.
_Signature: TypeAlias = tuple[tuple[int, int, int, int] | None, ...]

_logger = logging.getLogger(__name__)


class WatchedFiles(Generic[ValueT]):
    """Owns the value. Safe for several threads: gRPC asks for certificates in one of its own.

    New content that cannot be used is reported once in the log, and the last good value stays.

    Args:
        name: What the files hold, for the log.
        paths: The files.
        load: Reads them; raises OctavoServiceError with one sentence if they cannot be used.

    Raises: OctavoServiceError: they cannot be used at the start.
    """

    def __init__(self, name: str, paths: Sequence[Path], load: Callable[[], ValueT]) -> None:
        self._name = name
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._signature = _signature(self._paths)
        self._value = load()

    def current(self) -> ValueT:
        """Return the value of the files as they are, or the last good one."""
        with self._lock:
            signature = _signature(self._paths)  # taken first: what is replaced while it is read is read again
            if signature != self._signature:
                self._signature = signature
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except OctavoServiceError as error:
            _logger.warning(Event("files_not_reloaded", files=self._name, cause=str(error)))
        else:
            _logger.info(Event("files_reloaded", files=self._name))


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(map(_file_signature, paths))


def _file_signature(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
