"""Reads calls that are JSON: `{"name": ..., "arguments": {...}}`, or a list of such objects."""

import json

from scheduler_svc.front.tool_calls.call_writer import CallReader, CallWriter, Progress
from scheduler_svc.front.tool_calls.json_scanner import JsonObjectScanner, Part, is_json_object

ARGUMENTS_KEYS = ("arguments", "parameters")
# Keys that may also come before the name. Any other key shows that the object is the answer itself.
OTHER_KEYS = ("id", "type")
NO_ARGUMENTS = "{}"


class JsonCalls(CallReader):
    """Reads one object, or a list of them."""

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer)
        self._object: JsonCallObject | None = None
        self._is_list = False
        self._expected = "{["

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        return position if self._object is None else self._object.plain_run(text, position)

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        if self._object is None:
            return self._take_between(piece)
        progress = self._object.take(piece)
        if progress is not Progress.DONE or not self._is_list:
            return progress
        self._object = None
        self._expected = ",]"
        return Progress.MORE

    def _take_between(self, character: str) -> Progress:
        if character.isspace():
            return Progress.MORE
        if character not in self._expected:
            return Progress.FAILED
        if character == "{":
            self._object = JsonCallObject(self._writer)
            return self._object.take(character)
        if character == "]":
            self._writer.complete()
            return Progress.DONE
        self._is_list = True
        self._expected = "{"
        return Progress.MORE


class JsonCallObject(CallReader):
    """Reads one object. The keys may be in any order; arguments that come before the name wait for it.

    Arguments may be missing or null, which means none, or a string that holds the JSON text.
    """

    def __init__(self, writer: CallWriter) -> None:
        super().__init__(writer)
        self._scanner = JsonObjectScanner()
        self._name = ""
        self._arguments = ""  # complete, while there is no name yet
        self._seen: set[str] = set()
        self._value: list[str] = []  # the value that is being read, unless it is streamed
        self._is_streaming = False
        self._has_arguments = False

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        return self._scanner.plain_run(text, position)

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        is_next_argument = self._is_streaming and piece == '"' and self._scanner.expects_another_key(depth=2)
        part = self._scanner.take(piece)
        if is_next_argument:
            self._writer.show()
        if part is Part.VALUE or part is Part.VALUE_END:
            return self._take_value(piece, is_end=part is Part.VALUE_END)
        if part is Part.END:
            return self._end()
        if part is Part.INVALID or (part is Part.KEY_END and not self._fits(self._meaning)):
            return Progress.FAILED
        return Progress.MORE

    @property
    def _meaning(self) -> str:
        """What the last key stands for: the name, the arguments, or nothing of interest."""
        return "arguments" if self._scanner.key in ARGUMENTS_KEYS else self._scanner.key

    def _fits(self, meaning: str) -> bool:
        """Return whether a key with this meaning may come now."""
        if meaning not in ("name", "arguments"):
            return bool(self._name) or meaning in OTHER_KEYS
        is_new = meaning not in self._seen
        self._seen.add(meaning)
        return is_new

    def _take_value(self, piece: str, *, is_end: bool) -> Progress:
        if self._meaning not in ("name", "arguments"):
            return Progress.MORE
        if self._is_streaming:
            if not is_end:  # the end waits for the end of the call; later values do not matter
                self._writer.add_arguments(piece)
            return Progress.MORE
        if self._meaning == "name":
            return self._take_name(piece, is_end=is_end)
        return self._take_arguments(piece, is_end=is_end)

    def _take_name(self, piece: str, *, is_end: bool) -> Progress:
        self._value.append(piece)
        if self._value[0] != '"':
            return Progress.FAILED
        if not is_end:
            return Progress.MORE
        name: str = json.loads("".join(self._value))
        self._value.clear()
        if not self._writer.is_tool(name):
            return Progress.FAILED
        self._name = name
        self._writer.begin(name)
        if self._arguments:
            self._write(self._arguments)
        return Progress.MORE

    def _take_arguments(self, piece: str, *, is_end: bool) -> Progress:
        if not self._value:
            if piece not in ("{", '"', "n"):
                return Progress.FAILED
            if piece == "{" and self._name:
                self._write(piece)
                self._is_streaming = True
                return Progress.MORE
        self._value.append(piece)
        if not is_end:
            return Progress.MORE
        text = "".join(self._value)
        self._value.clear()
        arguments = json.loads(text).strip() if text[0] == '"' else NO_ARGUMENTS if text == "null" else text
        if not is_json_object(arguments):
            return Progress.FAILED
        self._arguments = arguments
        if self._name:
            self._write(arguments)
        return Progress.MORE

    def _end(self) -> Progress:
        if not self._name:
            return Progress.FAILED
        if self._is_streaming:
            self._write("}")
        elif not self._has_arguments:
            self._write(NO_ARGUMENTS)
        self._writer.complete()
        return Progress.DONE

    def _write(self, arguments: str) -> None:
        self._writer.add_arguments(arguments)
        self._has_arguments = True
