"""Keeps the terminal for the screen: textual draws on standard error, where gRPC's C code writes its log, too."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_STDERR = 2


@contextmanager
def own_stderr() -> Iterator[None]:
    """Let `sys.__stderr__` go to where standard error goes, and what C code writes to standard error go nowhere."""
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
