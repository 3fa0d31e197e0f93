"""Long work on the event loop, in slices: other tasks run in between."""

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


async def in_turns(items: Iterable[T], act: Callable[[T], object], num_at_once: int) -> None:
    """Act on items, and let other tasks run after every `num_at_once`; if cancelled, act on the rest at once."""
    rest = iter(items)
    try:
        while turn := list(islice(rest, num_at_once)):
            for item in turn:
                act(item)
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        for item in rest:
            act(item)
        raise
