"""What `octavo top` needs of the terminal: room enough, and standard error for itself."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MIN_COLUMNS = 80
MIN_LINES = 20

_STDERR = 2


def size_trouble(num_columns: int, num_lines: int) -> str | None:
    """Return one sentence for a terminal that is too small; None: it is large enough."""
    if num_columns >= MIN_COLUMNS and num_lines >= MIN_LINES:
        return None
    return (
        f"octavo top needs a terminal of {MIN_COLUMNS} columns and {MIN_LINES} lines; this one has {num_columns} and "
        f'{num_lines}: enlarge it, or print a snapshot with "octavo top --once"'
    )


@contextmanager
def own_stderr() -> Iterator[None]:
    """Let `sys.__stderr__` go to where standard error goes, and what C code writes to standard error go nowhere.

    Textual draws on standard error, where gRPC's C code writes its log, too.
    """
    python_stderr = sys.__stderr__
    kept = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    os.close(nowhere)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="replace") as sys.__stderr__:
            yield
    finally:
        sys.__stderr__ = python_stderr  # type: ignore[misc]
        os.dup2(kept, _STDERR)
        os.close(kept)
