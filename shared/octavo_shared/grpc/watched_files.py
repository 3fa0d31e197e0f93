"""A value that is read from files, and read again when they change.

For files that are renewed while a service runs: certificates, tokens. Such files are replaced in one step,
often by a symbolic link (Kubernetes), so what identifies a content is the file behind the name.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event

ValueT = TypeVar("ValueT")

# For each file: device, inode, size, and when its content and its permissions changed, in ns; None: it is not
# accessible.
_Signature: TypeAlias = tuple[tuple[int, int, int, int, int] | None, ...]

# Unusable content may become usable as it is: a certificate that is not valid yet.
RETRY_INTERVAL_S = 1.0

_logger = logging.getLogger(__name__)


class WatchedFiles(Generic[ValueT]):
    """Owns the value. Safe for several threads: gRPC asks for certificates in a thread of its own.

    Unusable new content is logged once, and tried again; the last good value stays.

    Args:
        name: What the files hold, for the log.
        load: Reads them; raises OctavoServiceError with one sentence if they cannot be used.
        clock: Monotonic time in seconds.

    Raises: OctavoServiceError: they cannot be used at the start.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        load: Callable[[], ValueT],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._paths = tuple(paths)
        self._load = load
        self._clock = clock
        self._lock = threading.Lock()
        self._signature = _signature(self._paths)
        self._trouble = ""
        self._retry_at_s = 0.0
        self._value = load()

    def current(self) -> ValueT:
        """Return the value of the files as they are, or the last good one."""
        with self._lock:
            signature = _signature(self._paths)  # taken first: a file that is replaced during the read is read again
            if signature != self._signature or (self._trouble and self._clock() >= self._retry_at_s):
                self._signature = signature
                self._reload()
            return self._value

    def _reload(self) -> None:
        try:
            self._value = self._load()
        except OctavoServiceError as error:
            if str(error) != self._trouble:
                _logger.warning(Event("files_not_reloaded", files=self._name, cause=str(error)))
            self._trouble, self._retry_at_s = str(error), self._clock() + RETRY_INTERVAL_S
        else:
            self._trouble = ""
            _logger.info(Event("files_reloaded", files=self._name))


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(map(_file_signature, paths))


def _file_signature(path: Path) -> tuple[int, int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
