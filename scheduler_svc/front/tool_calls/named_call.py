"""Reads Mistral's calls: `get_weather[ARGS]{...}`, without `[ARGS]` in some versions, or a list as in json_calls.py."""

import string

from scheduler_svc.front.tool_calls.call_reader import CallReader, Progress
from scheduler_svc.front.tool_calls.call_writer import CallWriter
from scheduler_svc.front.tool_calls.json_calls import JsonCalls
from scheduler_svc.front.tool_calls.json_scanner import END, JsonScanner

# What may stand between the name and the arguments. The id is passed over: the server gives calls ids of its own.
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
ID_CHARACTERS = string.ascii_letters + string.digits


class NamedCall(CallReader):
    """Reads one call."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer)
        self._list: JsonCalls | None = None
        self._name = ""
        self._marker = ""  # what has come of one behind the name
        self._arguments: JsonScanner | None = None

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        reader = self._list or self._arguments
        return position if reader is None else reader.plain_run(text, position)

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        if self._list is not None:
            return self._list.take(piece)
        if self._arguments is not None:
            return self._take_arguments(piece)
        if self._marker:
            return self._take_marker(piece)
        return self._take_name(piece)

    def _take_name(self, character: str) -> Progress:
        if character.isspace():
            # Before the name it is passed over; behind it, it belongs to the name, which no tool has.
            return Progress.FAILED if self._name else Progress.MORE
        if not self._name and character == "[":
            self._list = JsonCalls(self._writer)
            return self._list.take(character)
        if character in "[{":
            return self._end_name(character)
        self._name += character
        return Progress.MORE if self._writer.may_become_tool(self._name) else Progress.FAILED

    def _end_name(self, character: str) -> Progress:
        if not self._writer.is_tool(self._name):
            return Progress.FAILED
        if character == "{":
            return self._begin_arguments(character)
        self._marker = character
        return Progress.MORE

    def _take_marker(self, character: str) -> Progress:
        """Read on behind the name: `[ARGS]`, or `[CALL_ID]`, the id and `[ARGS]`; then the arguments."""
        if self._marker.endswith(ARGS):
            if character.isspace():
                return Progress.MORE
            return self._begin_arguments(character) if character == "{" else Progress.FAILED
        self._marker += character
        is_id = self._marker.startswith(CALL_ID)
        rest = self._marker[len(CALL_ID) :].lstrip(ID_CHARACTERS) if is_id else self._marker
        fits = ARGS.startswith(rest) or (not is_id and CALL_ID.startswith(rest))
        return Progress.MORE if fits else Progress.FAILED

    def _begin_arguments(self, character: str) -> Progress:
        self._arguments = JsonScanner()
        self._writer.begin(self._name)
        return self._take_arguments(character)

    def _take_arguments(self, piece: str) -> Progress:
        assert self._arguments is not None, "the name is behind us"
        if not self._arguments.take(piece[0]):  # in a plain run all characters are alike
            return Progress.FAILED
        self._writer.add_arguments(piece)
        if self._arguments.state is not END:
            return Progress.MORE
        self._writer.complete()
        return Progress.DONE
