"""What a scheduler sends that no scheduler sends becomes an error of ours with a sentence, not a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from octavo.errors import InternalError

_Message = TypeVar("_Message")

# What reading a message raises then.
_UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@contextmanager
def reading_answers() -> Iterator[None]:
    """Raise InternalError if what is read here cannot be read."""
    try:
        yield
    except _UNREADABLE as error:
        words = " ".join(f"{type(error).__name__} {error}".split())
        raise InternalError(f"the scheduler sent an invalid message: {words[:200]}") from error


def message_of(answer: _Message | None) -> _Message:
    """Return an answer. Raises InternalError: gRPC has none, because the bytes are no message."""
    if answer is None:
        raise InternalError("the scheduler sent a message that cannot be decoded")
    return answer
