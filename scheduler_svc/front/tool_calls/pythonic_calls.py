"""Reads calls as in Python: `[get_weather(city="Paris", days=3), now()]`, or one call without the list.

Arguments have names, and values in JSON or as in Python. An argument is reported once it is complete.
"""

import json
import re
from enum import Enum

from scheduler_svc.front.tool_calls.call_writer import MAX_KEY_CHARS, CallReader, CallWriter, Progress
from scheduler_svc.front.tool_calls.json_scanner import MAX_DEPTH
from scheduler_svc.front.tool_calls.python_values import value_of

_IN_STRING = re.compile(r"""[^"'\\]*""")
_KEY = re.compile(r"\w+\s*")


class _Place(Enum):
    CALL = "in front of a call"
    NAME = "in the name of a tool"
    KEY = "in front of or in the name of an argument"
    VALUE = "in the value of an argument"
    BEHIND = "behind a call"


class PythonicCalls(CallReader):
    """Reads one call, or a list of them."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer)
        self._place = _Place.CALL
        self._is_list = False
        self._text = ""  # of a name, or of an argument's name
        self._key = ""
        self._value: list[str] = []
        self._quote = ""  # around the string that is open
        self._is_escaped = False
        self._depth = 0
        self._num_arguments = 0

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        if not self._quote or self._is_escaped:
            return position
        match = _IN_STRING.match(text, position)
        return position if match is None else match.end()

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        match self._place:
            case _Place.CALL:
                return self._take_beginning(piece)
            case _Place.NAME:
                return self._take_name(piece)
            case _Place.KEY:
                return self._take_key(piece)
            case _Place.VALUE:
                return self._take_value(piece)
            case _Place.BEHIND:
                return self._take_behind(piece)

    def _take_beginning(self, character: str) -> Progress:
        if character.isspace():
            return Progress.MORE
        if character == "[" and not self._is_list:
            self._is_list = True
            return Progress.MORE
        self._place = _Place.NAME
        return self._take_name(character)

    def _take_name(self, character: str) -> Progress:
        if character != "(":
            self._text += character
            return Progress.MORE if self._writer.may_become_tool(self._text) else Progress.FAILED
        if not self._writer.is_tool(self._text):
            return Progress.FAILED
        self._writer.begin(self._text)
        self._text, self._place, self._num_arguments = "", _Place.KEY, 0
        return Progress.MORE

    def _take_key(self, character: str) -> Progress:
        if not self._text:
            if character.isspace():
                return Progress.MORE
            if character == ")":
                return self._end_call()
        if character == "=" and self._text:
            self._key, self._text, self._place = self._text.rstrip(), "", _Place.VALUE
            if self._num_arguments:
                self._writer.show()
            return Progress.MORE
        self._text += character
        fits = _KEY.fullmatch(self._text) and len(self._text) <= MAX_KEY_CHARS
        return Progress.MORE if fits else Progress.FAILED

    def _take_value(self, piece: str) -> Progress:
        if self._is_escaped:
            self._is_escaped = False
        elif self._quote:
            self._is_escaped = piece == "\\"
            if piece == self._quote:
                self._quote = ""
        elif self._depth == 0 and piece in ",)":
            return self._end_value(piece)
        elif piece in "\"'":
            self._quote = piece
        else:
            self._depth += (piece in "([{") - (piece in ")]}")
            if not 0 <= self._depth <= MAX_DEPTH:
                return Progress.FAILED
        self._value.append(piece)
        return Progress.MORE

    def _end_value(self, character: str) -> Progress:
        try:
            value, _ = value_of("".join(self._value).strip())
        except ValueError:
            return Progress.FAILED
        self._value.clear()
        start = "{" if self._num_arguments == 0 else ", "
        self._writer.add_arguments(f"{start}{json.dumps(self._key, ensure_ascii=False)}: {value}")
        self._num_arguments += 1
        self._place = _Place.KEY
        return self._end_call() if character == ")" else Progress.MORE

    def _end_call(self) -> Progress:
        self._writer.add_arguments("}" if self._num_arguments else "{}")
        self._writer.complete()
        self._place = _Place.BEHIND
        return Progress.MORE if self._is_list else Progress.DONE

    def _take_behind(self, character: str) -> Progress:
        if character == "]":
            self._writer.complete()
            return Progress.DONE
        if character == ",":
            self._place = _Place.CALL
            return Progress.MORE
        return Progress.MORE if character.isspace() else Progress.FAILED
