"""Turns what a reader finds in the text of calls into events, and keeps the text that no event stands for yet."""

from collections.abc import Callable, Collection

from scheduler_svc.front.tool_calls.events import OutputEvent, ToolCallArguments, ToolCallBegin


class CallWriter:
    """Writes the calls of one output.

    A reader tells it of each piece of text that it takes (`take`), and then what that piece means. If the text turns
    out to be no call, `give_up` returns all of it that no event stands for.

    Args:
        tool_names: The tools of the request.
        new_call_id: Makes the id of a call.
        streams_arguments: Whether to report a call as it comes. Otherwise it is reported once it is complete.
    """

    def __init__(self, tool_names: Collection[str], new_call_id: Callable[[], str], *, streams_arguments: bool) -> None:
        self._tool_names = frozenset(tool_names)
        self._new_call_id = new_call_id
        self._streams_arguments = streams_arguments
        self._num_calls = 0
        self._call_ids: set[str] = set()
        self._text: list[str] = []  # taken, and no event that is ready stands for it
        self._arguments: list[str] = []  # of the last call, and in no event
        self._waiting: list[OutputEvent] = []  # for the end of the call
        self._ready: list[OutputEvent] = []

    def is_tool(self, name: str) -> bool:
        """Return whether the request has this tool."""
        return name in self._tool_names

    def may_become_tool(self, beginning: str) -> bool:
        """Return whether a tool's name begins like this."""
        return any(name.startswith(beginning) for name in self._tool_names)

    def take(self, text: str) -> None:
        """The next piece of text belongs to a call, as far as one can know."""
        self._text.append(text)

    def begin(self, name: str, call_id: str = "") -> None:
        """What was taken so far is the beginning of a call of this tool; the model has given it an id, or none."""
        if not call_id or call_id in self._call_ids:
            call_id = self._new_call_id()
        self._call_ids.add(call_id)
        self._waiting.append(ToolCallBegin(self._num_calls, call_id, name))
        self._num_calls += 1
        if self._streams_arguments:
            self._text.clear()

    def add_arguments(self, delta: str, undecided: str = "") -> None:
        """What was taken so far, but for its `undecided` end, has brought more of the arguments."""
        self._arguments.append(delta)
        if self._streams_arguments:
            self._text[:] = [undecided]

    def complete(self) -> None:
        """What was taken so far is a whole call, or stands between calls."""
        self._make_ready()
        self._text.clear()

    def give_up(self) -> str:
        """The text is no call; return the part of it that no event stands for, which is content."""
        text = "".join(self._text)
        self._text.clear()
        if self._streams_arguments:
            self._make_ready()
        elif self._waiting:
            self._num_calls -= 1
            self._waiting.clear()
            self._arguments.clear()
        return text

    def take_events(self) -> list[OutputEvent]:
        """Return the events that are ready."""
        if self._streams_arguments:
            self._make_ready()
        ready, self._ready = self._ready, []
        return ready

    def _make_ready(self) -> None:
        if self._arguments:
            self._waiting.append(ToolCallArguments(self._num_calls - 1, "".join(self._arguments)))
            self._arguments.clear()
        self._ready += self._waiting
        self._waiting.clear()
