"""Turns messages that no scheduler should send into an OctavoError with a sentence, instead of a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from octavo.errors import InternalError

_Message = TypeVar("_Message")

# What reading such a message raises.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def reading_answers() -> Iterator[None]:
    """Raise InternalError if a message cannot be read in this context."""
    try:
        yield
    except _UNREADABLE as error:
        words = " ".join(f"{type(error).__name__} {error}".split())
        raise InternalError(f"the scheduler sent an invalid message: {words[:200]}") from error


def message_of(answer: _Message | None) -> _Message:
    """Return an answer. Raises InternalError: it is None, because gRPC could not parse it."""
    if answer is None:
        raise InternalError("the scheduler sent a message that cannot be decoded")
    return answer
