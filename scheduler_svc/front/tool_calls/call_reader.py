"""The readers of the calls behind a marker; there is one class for each `body` of `formats.py`."""

from abc import ABC, abstractmethod
from enum import Enum

from scheduler_svc.front.tool_calls.call_writer import CallWriter

# The longest argument name, where it is not JSON.
MAX_KEY_CHARS = 256


class Progress(Enum):
    """A reader's verdict on the piece of text that it was given."""

    MORE = "it belongs to the call"
    DONE = "the call ends with it"
    FAILED = "it does not fit: there is no call, or it ended before"


class CallReader(ABC):
    """Reads one call, or one list of calls. Its memory is the state of the call, so any split of the text does.

    Attributes:
        num_unread: How many of the last characters are not part of a call that FAILED, and may begin another one.
    """

    num_unread = 1

    def __init__(self, writer: CallWriter) -> None:
        self._writer = writer

    def plain_run(self, text: str, position: int) -> int:
        """Return the end of the characters from `position` on that may be taken at once; often there are none."""
        return position

    @abstractmethod
    def take(self, piece: str) -> Progress:
        """Read a plain run, or one character; the writer has taken it already.

        FAILED is for single characters only, and nothing was written for them.
        """
