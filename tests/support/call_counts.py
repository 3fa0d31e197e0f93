"""What a function costs in calls and in instructions: the same on every machine, whatever else runs there."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.collection import no_collection


def num_calls(function: Callable[[], object]) -> int:
    """Return how many functions a function calls, in Python or in C; NumPy's whole arrays are one call."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with no_collection():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return count


def num_instructions(function: Callable[[], object]) -> int:
    """Return how many instructions of Python's bytecode run: a loop over sequences shows even if it calls nothing."""
    count = 0

    def note(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return note

    former = sys.gettrace()
    with no_collection():
        sys.settrace(note)
        try:
            function()
        finally:
            sys.settrace(former)
    return count
