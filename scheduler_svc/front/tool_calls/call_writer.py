"""Turns what a reader finds in the text of calls into events, and keeps text that may still be content."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import Enum

from scheduler_svc.front.tool_calls.events import OutputEvent, ToolCallArguments, ToolCallBegin, ToolCallBroken
from scheduler_svc.front.tool_calls.json_scanner import unreadable_end


class CallWriter:
    """Writes the calls of one output.

    A reader tells it of each piece of text that it takes (`take`), then what that piece means. If the text turns
    out to be no call, `give_up` returns all of it.

    Args:
        make_id: Makes the id of a call from its index.
    """

    def __init__(self, tool_names: Collection[str], make_id: Callable[[int], str]) -> None:
        self._tool_names = frozenset(tool_names)
        self._make_id = make_id
        self._num_calls = 0  # the calls in events
        self._call_ids: set[str] = set()
        self._text: list[str] = []  # taken, and not part of a whole call
        self._call: ToolCallBegin | None = None  # the call that has begun
        self._is_shown = False  # whether events report the call before its end
        self._arguments: list[str] = []  # the call's, not in an event yet
        self._told: list[str] = []  # the call's, in events
        self._ready: list[OutputEvent] = []

    def is_tool(self, name: str) -> bool:
        """Return whether the request has this tool."""
        return name in self._tool_names

    def may_become_tool(self, beginning: str) -> bool:
        """Return whether a tool's name begins with this."""
        return any(name.startswith(beginning) for name in self._tool_names)

    def take(self, text: str) -> None:
        """Take the next piece of text, which may belong to a call."""
        self._text.append(text)

    def begin(self, name: str, call_id: str = "") -> None:
        """Begin a call: what was taken so far is its head; the model has given it an id, or none."""
        if not call_id or call_id in self._call_ids:
            call_id = self._make_id(self._num_calls)
        self._call_ids.add(call_id)
        self._call = ToolCallBegin(self._num_calls, call_id, name)

    def add_arguments(self, delta: str) -> None:
        """Add to the arguments; their end may come only with the call's end."""
        self._arguments.append(delta)

    def show(self) -> None:
        """The first argument is certain: from now on events report the call as it comes."""
        self._is_shown = True

    def complete(self) -> None:
        """Note that what was taken so far is a whole call, or stands between calls."""
        self._tell()
        self._close()

    def give_up(self) -> str:
        """Return all of the text as content: it is no call."""
        text = "".join(self._text)
        if self._call is not None:
            index = None
            if self._is_shown:
                self._tell()
                index = self._call.index
                self._ready.append(ToolCallArguments(index, unreadable_end("".join(self._told))))
            else:
                self._call_ids.discard(self._call.id)  # nobody was told
            self._ready.append(ToolCallBroken(index))
        self._close()
        return text

    def take_events(self) -> list[OutputEvent]:
        """Return the events that are ready."""
        if self._is_shown:
            self._tell()
        ready, self._ready = self._ready, []
        return ready

    def _tell(self) -> None:
        """Make events of all that is known of the call."""
        if self._call is None or not self._arguments:
            return
        if not self._told:
            self._ready.append(self._call)
            self._num_calls += 1
        delta = "".join(self._arguments)
        self._arguments.clear()
        self._told.append(delta)
        self._ready.append(ToolCallArguments(self._call.index, delta))

    def _close(self) -> None:
        self._call, self._is_shown = None, False
        for pieces in (self._text, self._arguments, self._told):
            pieces.clear()


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
