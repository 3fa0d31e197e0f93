"""One question to several peers at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from octavo_shared.errors import UnavailableError


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
