"""Several things at once on the event loop: long work in slices, and one question to several peers."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

from octavo_shared.errors import UnavailableError

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


async def any_says_yes(asked: Iterable[Coroutine[Any, Any, bool]]) -> bool:
    """Return whether one of several calls returns true, as soon as one has.

    Raises: UnavailableError: no call that returns does, and others fail to answer.
    """
    answers = [asyncio.ensure_future(call) for call in asked]
    trouble: UnavailableError | None = None
    for answer in answers:  # the other calls go on, awaited or not
        answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    for next_answer in asyncio.as_completed(answers):
        try:
            if await next_answer:
                return True
        except UnavailableError as error:
            trouble = error
    if trouble is not None:
        raise trouble
    return False
