"""One question to several at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from octavo_shared.errors import UnavailableError


async def any_says_yes(asked: Iterable[Coroutine[Any, Any, bool]]) -> bool:
    """Return whether one of several calls returns true, as soon as one has.

    Raises: UnavailableError: none that answers does, and others do not answer.
    """
    answers = [asyncio.ensure_future(call) for call in asked]
    trouble: UnavailableError | None = None
    for answer in answers:  # they go on, whoever waits for them
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
