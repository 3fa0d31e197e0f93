"""Python's garbage collection, put off while a test counts what runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Let nothing be collected: finalizers of earlier tests, and Hypothesis' hook, would be counted too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
