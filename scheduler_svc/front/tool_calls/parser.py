"""Finds tool calls in the text of an output while it arrives, in pieces of any size.

    gap    at the beginning, and behind a call: whitespace waits for what comes
    text   content, up to the next marker
    call   a reader has the text, until the call ends or turns out to be none

Text that turns out to be no call is content, and the search goes on behind it. Only text that may still become a call
or a marker waits. Decisions follow from the characters alone, so any split of the text gives the same joined events.
"""

from collections.abc import Collection, Mapping
from functools import partial

from scheduler_svc.front.tool_calls.call_writer import CallReader, CallWriter, Progress
from scheduler_svc.front.tool_calls.events import ContentDelta, OutputEvent, merged
from scheduler_svc.front.tool_calls.formats import Body, JsonBody, NamedBody, PythonicBody, ToolCallFormat, XmlBody
from scheduler_svc.front.tool_calls.json_calls import JsonCalls
from scheduler_svc.front.tool_calls.marker_search import find_marker, match_marker
from scheduler_svc.front.tool_calls.named_call import NamedCall
from scheduler_svc.front.tool_calls.pythonic_calls import PythonicCalls
from scheduler_svc.front.tool_calls.xml_call import XmlCall

# More whitespace than a template writes between calls is content, so that a model that writes nothing else is seen.
MAX_GAP_CHARS = 32
# Text that is decided at a time: each decision copies the rest of it, and a complete answer needs many.
_PIECE_CHARS = 512
_WHITESPACE = " \t\r\n"
_BARE_STARTS = {JsonBody: ("{", "["), PythonicBody: ("[",)}


class ToolCallParser:
    """Parses one output.

    Args:
        tools: The JSON schema of the arguments of each tool of the request, by name. Calls of other tools are content.
        output_id: The output's; the ids of its calls derive from it.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        tools: Mapping[str, Mapping[str, object]],
        output_id: str,
    ) -> None:
        self._format = call_format
        self._tools = tools
        self._writer = CallWriter(tools, partial(call_format.call_id, output_id))
        self._starts = _starts_of(call_format.body, tools)
        self._bare_starts = _BARE_STARTS.get(type(call_format.body), ()) if call_format.may_be_bare else ()
        self._reader: CallReader | None = None
        self._text = ""  # not decided yet
        self._is_in_gap = True
        self._ends: tuple[str, ...] = ()  # the end markers that may come
        self._has_calls = False
        self._events: list[OutputEvent] = []

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that it makes certain."""
        for start in range(0, len(text), _PIECE_CHARS):
            self._text += text[start : start + _PIECE_CHARS]
            self._decide()
        self._decide()  # the text that `finish` has given up
        events, self._events = self._events, []
        return merged(events)

    def finish(self) -> list[OutputEvent]:
        """Return the remaining events: the output has ended."""
        if self._reader is not None:
            self._reader = None
            self._give_up()
        elif not (self._is_in_gap and self._has_calls and not self._text.strip(_WHITESPACE)):
            self._add_content(self._text)
        self._text = ""
        return self.feed("")

    def _decide(self) -> None:
        while self._text and self._advance():
            pass

    def _advance(self) -> bool:
        """Decide on more of the text; return whether anything was decided."""
        if self._reader is not None:
            self._read(self._reader)
            return True
        return self._pass_gap() if self._is_in_gap else self._pass_text()

    def _pass_text(self) -> bool:
        start, marker = find_marker(self._text, self._format.openings)
        self._add_content(self._text[:start])
        self._text = self._text[start:]
        if marker is None:
            return False
        self._begin_call(len(marker) if marker in self._format.begin else 0)
        return True

    def _pass_gap(self) -> bool:
        between = f"{_WHITESPACE};," if self._format.may_be_bare and self._has_calls else _WHITESPACE
        rest = self._text.lstrip(between)
        num_skipped = len(self._text) - len(rest)
        if num_skipped > MAX_GAP_CHARS:
            self._is_in_gap = False
            return True
        if not rest:
            return False
        starts = self._starts if self._ends else self._bare_starts
        marker, may_come = match_marker(rest, 0, (*self._format.openings, *self._ends, *starts))
        if marker is None:
            self._is_in_gap = may_come
        elif marker in self._ends:
            self._text, self._ends = rest[len(marker) :], self._ends[self._ends.index(marker) + 1 :]
        else:
            self._begin_call(num_skipped + (len(marker) if marker in self._format.begin else 0))
        return not may_come

    def _begin_call(self, num_chars: int) -> None:
        """Give a reader the text behind the next `num_chars` characters, which belong to the call."""
        self._writer.take(self._text[:num_chars])
        self._text = self._text[num_chars:]
        match self._format.body:
            case JsonBody():
                self._reader = JsonCalls(self._writer)
            case NamedBody() as body:
                self._reader = NamedCall(self._writer, body)
            case XmlBody() as body:
                self._reader = XmlCall(self._writer, body, self._tools, (*self._format.openings, *self._format.ends))
            case PythonicBody():
                self._reader = PythonicCalls(self._writer)

    def _read(self, reader: CallReader) -> None:
        """Give the reader text, to the end of the call or of the text."""
        text, position = self._text, 0
        progress = Progress.MORE
        while position < len(text) and progress is Progress.MORE:
            end = max(reader.plain_run(text, position), position + 1)
            piece = text[position:end]
            self._writer.take(piece)
            progress = reader.take(piece)
            position = end
        if progress is not Progress.MORE:
            self._reader = None
            self._is_in_gap = progress is Progress.DONE
            self._ends = self._format.ends if progress is Progress.DONE else ()
            self._has_calls |= progress is Progress.DONE
        self._text = text[position:]
        if progress is Progress.FAILED:
            self._give_up(reader.num_unread)  # text that does not fit may begin a marker
        self._events += self._writer.take_events()

    def _give_up(self, num_unread: int = 0) -> None:
        """Make content of what was read, as it is no call, except for its last characters, which are read again."""
        text = self._writer.give_up()
        self._events += self._writer.take_events()
        end = len(text) - num_unread
        self._add_content(text[:end])
        self._text = text[end:] + self._text

    def _add_content(self, text: str) -> None:
        if text:
            self._events.append(ContentDelta(text))


def _starts_of(body: Body, tool_names: Collection[str]) -> tuple[str, ...]:
    """Return how a call may begin behind another one, before their end marker."""
    match body:
        case JsonBody():
            return ("{", "[")
        case PythonicBody():
            return ("[", *(f"{name}(" for name in tool_names))
        case _:
            return ()
