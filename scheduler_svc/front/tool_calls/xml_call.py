"""Reads Qwen3-Coder's calls, whose arguments are plain text between tags.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

The text says nothing of types, so the tool's schema decides which arguments are strings. An argument is reported once
it is complete.
"""

import json
from collections.abc import Iterator, Mapping

from scheduler_svc.front.tool_calls.call_reader import CallReader, Progress
from scheduler_svc.front.tool_calls.call_writer import CallWriter

FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"

_ANY_OF = ("anyOf", "oneOf", "allOf")
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


class XmlCall(CallReader):
    """Reads one call.

    Args:
        writer: Gets the call.
        tools: The schema of each tool's arguments, by the tool's name.
    """

    def __init__(self, writer: CallWriter, tools: Mapping[str, Mapping[str, object]]) -> None:
        super().__init__(writer)
        self._tools = tools
        self._expected: tuple[str, ...] = (FUNCTION,)
        self._tag = ""  # what has come of a tag
        self._name = ""
        self._key = ""
        self._value: list[str] | None = None
        self._num_arguments = 0

    def plain_run(self, text: str, position: int) -> int:
        """See CallReader."""
        if self._value is None or self._tag:
            return position
        end = text.find("<", position)
        return len(text) if end < 0 else end

    def take(self, piece: str) -> Progress:
        """See CallReader."""
        if self._value is not None:
            return self._take_value(piece)
        if not self._tag and piece.isspace():
            return Progress.MORE
        self._tag += piece
        if not any(_fits(self._tag, tag) for tag in self._expected):
            return Progress.FAILED
        if self._tag.startswith(FUNCTION):
            return self._take_function_name(piece)
        if self._tag.startswith(PARAMETER):
            return self._take_key(piece)
        return self._end() if self._tag == FUNCTION_END else Progress.MORE

    def _take_function_name(self, character: str) -> Progress:
        name = self._tag[len(FUNCTION) :]
        if character != ">":
            return Progress.MORE if self._writer.may_become_tool(name) else Progress.FAILED
        if not self._writer.is_tool(name[:-1]):
            return Progress.FAILED
        self._name, self._tag = name[:-1], ""
        self._writer.begin(self._name)
        self._expected = (PARAMETER, FUNCTION_END)
        return Progress.MORE

    def _take_key(self, character: str) -> Progress:
        if character == ">":
            self._key, self._tag, self._value = self._tag[len(PARAMETER) : -1], "", []
        return Progress.FAILED if character.isspace() else Progress.MORE

    def _take_value(self, piece: str) -> Progress:
        assert self._value is not None
        self._tag += piece
        if not PARAMETER_END.startswith(self._tag):
            # Of what has come, only its last character may begin the tag anew: there is no other `<` in it.
            is_new_tag = len(self._tag) > 1 and piece == "<"
            self._value.append(self._tag[:-1] if is_new_tag else self._tag)
            self._tag = "<" if is_new_tag else ""
        elif self._tag == PARAMETER_END:
            self._write_argument("".join(self._value))
            self._tag, self._value = "", None
        return Progress.MORE

    def _write_argument(self, value: str) -> None:
        # Each line break next to the tags belongs to them.
        value = value.removeprefix("\n").removesuffix("\n")
        schema = _property(self._tools[self._name], self._key)
        start = "{" if self._num_arguments == 0 else ", "
        self._writer.add_arguments(
            f"{start}{json.dumps(self._key, ensure_ascii=False)}: {argument_json(value, schema)}"
        )
        self._num_arguments += 1

    def _end(self) -> Progress:
        self._writer.add_arguments("}" if self._num_arguments else "{}")
        self._writer.complete()
        return Progress.DONE


def argument_json(value: str, schema: object) -> str:
    """Return an argument as JSON text: a string, unless its schema has another type that the text fits."""
    types = set(_types(schema))
    text = value.strip()
    if "boolean" in types and text in ("True", "False"):
        return text.lower()
    parsed = _parsed(text)
    for name in types - {"string"}:
        if isinstance(parsed, _JSON_TYPES.get(name, ())) and isinstance(parsed, bool) == (name == "boolean"):
            return text
    return json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _types(schema: object) -> Iterator[str]:
    """Yield the types that a schema names, at its top."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else [name for name in named or () if isinstance(name, str)]
    for keyword in _ANY_OF:
        for part in schema.get(keyword) or ():
            yield from _types(part)


def _property(schema: Mapping[str, object], key: str) -> object:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _fits(beginning: str, tag: str) -> bool:
    return tag.startswith(beginning) or (tag.endswith("=") and beginning.startswith(tag))
