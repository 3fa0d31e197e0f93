"""The directory of the sockets behind the port: this user's alone, and gone when the process is.

A process that is killed leaves its directory behind. Each holds a lock on a file in its own, which the kernel
releases at any end (flock(2)), so the next one knows what nobody needs any more, and removes it.
"""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octavo_shared.errors import UnavailableError

_PREFIX = "octavo-sockets-"
_LOCK = "lock"

# One that has just been made may not be locked yet; in seconds.
_MIN_AGE_S = 60.0

# The address of a unix socket has at most 107 bytes (unix(7)).
_MAX_PARENT_BYTES = 72
_SHORT_PARENT = "/tmp"


@contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory that only this user may enter, by a path that is short enough for sockets; remove it at the end.

    Raises: UnavailableError: it cannot be made.
    """
    try:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
            parent = Path(_SHORT_PARENT)
        _remove_leftovers(parent)
        directory = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise UnavailableError(
            f"cannot make a directory for sockets ({error}); set TMPDIR to a directory where this user may write"
        ) from error
    with directory as path, (Path(path) / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(path)


def _remove_leftovers(parent: Path) -> None:
    for directory in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is not ours, or in use, or gone already
            status = directory.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if time.time() - status.st_mtime < _MIN_AGE_S:
                continue
            with (directory / _LOCK).open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
