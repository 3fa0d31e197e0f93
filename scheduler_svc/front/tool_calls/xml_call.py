"""Reads calls whose arguments are plain text between tags, such as Qwen3-Coder's.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

The text says nothing of types, so the tool's schema decides which arguments are strings. A string is reported as it
comes, and any other argument once it is complete: only then does the text say whether it fits its type.
"""

import json
import re
from collections.abc import Mapping
from enum import Enum

from scheduler_svc.front.tool_calls.argument_types import argument_json, types_of
from scheduler_svc.front.tool_calls.bodies import XmlBody
from scheduler_svc.front.tool_calls.call_reader import MAX_KEY_CHARS, CallReader, Progress
from scheduler_svc.front.tool_calls.call_writer import CallWriter

# Neither a tag nor the line break in front of one begins in it.
_PLAIN_RUN = re.compile(r"[^<\n]*")


class _Place(Enum):
    TAG = "in front of or in a tag"
    NAME = "in the name of the tool"
    KEY = "in the name of an argument"
    VALUE = "in the value of an argument"


class XmlCall(CallReader):
    """Reads one call.

    Args:
        writer: Gets the call.
        body: The tags.
        tools: The schema of each tool's arguments, by the tool's name.
    """

    def __init__(self, writer: CallWriter, body: XmlBody, tools: Mapping[str, Mapping[str, object]]) -> None:
        super().__init__(writer)
        self._body = body
        self._tools = tools
        self._place = _Place.TAG if body.function else _Place.NAME
        self._expected: tuple[str, ...] = (body.function,)
        self._tag = ""  # what has come of a tag, or of a name
        self._name = ""
        self._types: frozenset[str] = frozenset()  # that the argument may have
        self._is_string = False  # whatever its text is
        self._value: list[str] = []  # of the argument, unless it is a string
        self._is_at_start = False  # of the value
        self._num_arguments = 0

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        if self._place is not _Place.VALUE or self._tag or self._is_at_start:
            return position
        match = _PLAIN_RUN.match(text, position)
        return position if match is None else match.end()

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        match self._place:
            case _Place.TAG:
                return self._take_tag(piece)
            case _Place.NAME:
                return self._take_name(piece)
            case _Place.KEY:
                return self._take_key(piece)
            case _Place.VALUE:
                return self._take_value(piece)

    def _take_tag(self, character: str) -> Progress:
        if not self._tag and character.isspace():
            return Progress.MORE
        self._tag += character
        if self._tag not in self._expected:
            return Progress.MORE if any(tag.startswith(self._tag) for tag in self._expected) else Progress.FAILED
        tag, self._tag = self._tag, ""
        if tag == self._body.function_end:
            self._writer.add_arguments("}" if self._num_arguments else "{}")
            self._writer.complete()
            return Progress.DONE
        self._place = _Place.NAME if tag == self._body.function else _Place.KEY
        if tag == self._body.value:
            self._begin_value()
        return Progress.MORE

    def _take_name(self, character: str) -> Progress:
        if not self._body.name_end:
            if character != "<" and not character.isspace():
                self._tag += character
                return Progress.MORE if self._writer.may_become_tool(self._tag) else Progress.FAILED
            if not self._tag and character != "<":
                return Progress.MORE
            return self._end_name(self._tag, next_tag=character.strip())
        self._tag += character
        name, first, rest = self._tag.partition(self._body.name_end[0])
        if not first:
            return Progress.MORE if self._writer.may_become_tool(name) else Progress.FAILED
        if first + rest == self._body.name_end:
            return self._end_name(name, next_tag="")
        return Progress.MORE if self._body.name_end.startswith(first + rest) else Progress.FAILED

    def _end_name(self, name: str, next_tag: str) -> Progress:
        if not self._writer.is_tool(name):
            return Progress.FAILED
        self._name, self._tag, self._place = name, next_tag, _Place.TAG
        self._expected = (self._body.key, self._body.function_end)
        self._writer.begin(name)
        return Progress.MORE

    def _take_key(self, character: str) -> Progress:
        self._tag += character
        if not self._tag.endswith(self._body.key_end):
            is_too_long = len(self._tag) > MAX_KEY_CHARS + len(self._body.key_end)
            return Progress.FAILED if character.isspace() or is_too_long else Progress.MORE
        key, self._tag = self._tag.removesuffix(self._body.key_end), ""
        self._types = types_of(self._tools[self._name], key)
        self._is_string = self._types <= {"string"}
        self._place, self._expected = _Place.TAG, (self._body.value,)
        self._write(f"{'{' if self._num_arguments == 0 else ', '}{json.dumps(key, ensure_ascii=False)}: ")
        if not self._body.value:
            self._begin_value()
        return Progress.MORE

    def _begin_value(self) -> None:
        self._place, self._is_at_start = _Place.VALUE, self._body.breaks_lines
        if self._is_string:
            self._write('"')

    def _take_value(self, piece: str) -> Progress:
        if self._is_at_start and piece == "\n":
            self._is_at_start = False
            return Progress.MORE
        self._is_at_start = False
        text = self._tag + piece
        if self._may_become_end(text):
            self._tag = text
            if text.lstrip("\n") == self._body.value_end:
                self._end_value()
            return Progress.MORE
        # Of what has come, only its last character may begin an end anew.
        self._tag = piece if self._may_become_end(piece) else ""
        more = text.removesuffix(self._tag)
        if self._is_string:
            self._write(json.dumps(more, ensure_ascii=False)[1:-1])
        else:
            self._value.append(more)
        return Progress.MORE

    def _may_become_end(self, text: str) -> bool:
        end = self._body.value_end
        return end.startswith(text) or (self._body.breaks_lines and f"\n{end}".startswith(text))

    def _end_value(self) -> None:
        self._tag, self._place = "", _Place.TAG
        self._write('"' if self._is_string else argument_json("".join(self._value), self._types))
        self._value.clear()
        self._expected = (self._body.key, self._body.function_end)
        self._num_arguments += 1

    def _write(self, arguments: str) -> None:
        self._writer.add_arguments(arguments, undecided=self._tag)
