"""Reads calls whose arguments are plain text between tags, such as Qwen3-Coder's.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

The text has no types, so the tool's schema decides which arguments are strings. A string is reported as it comes, any
other argument once it is complete: only then does the text show whether it fits its type.

Models forget the end of an argument. Where the next argument of the schema begins, the one before it is complete. Where
the whole call seems to end, these tags might be the argument's own text, so the call counts as broken off.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

from scheduler_svc.front.tool_calls.call_writer import MAX_KEY_CHARS, CallReader, CallWriter, Progress
from scheduler_svc.front.tool_calls.formats import XmlBody
from scheduler_svc.front.tool_calls.python_values import value_of

# Neither a tag nor the line break in front of one begins in it.
_PLAIN_RUN = re.compile(r"[^<\n]*")
_MAY_BEGIN_END = re.compile(r"[<\n]")
_ANY_KEY = re.compile(rf"[^\s<]{{0,{MAX_KEY_CHARS}}}")
# More whitespace between two tags is no template's.
_MAX_SPACE_CHARS = 32


class _Place(Enum):
    TAG = "in front of or in a tag"
    NAME = "in the name of the tool"
    KEY = "in the name of an argument"
    VALUE = "in the value of an argument"


class _Ending(Enum):
    """What the text behind a value is."""

    MAY_COME = "the beginning of one of the others"
    VALUE = "the value's own end"
    NEXT_KEY = "the next argument, and the value's end is missing"
    CALL = "the end of the call and the tag behind it, and the value's end is missing"


class XmlCall(CallReader):
    """Reads one call.

    Args:
        tools: The schema of each tool's arguments, by the tool's name.
        followers: What may stand behind a call.
    """

    def __init__(
        self,
        writer: CallWriter,
        body: XmlBody,
        tools: Mapping[str, Mapping[str, object]],
        followers: Sequence[str],
    ) -> None:
        super().__init__(writer)
        self._body = body
        self._tools = tools
        self._followers = followers
        self._place = _Place.TAG if body.function else _Place.NAME
        self._expected: tuple[str, ...] = (body.function,)
        self._tag = ""  # what has come of a tag, or of a name
        self._name = ""
        self._types: frozenset[str] = frozenset()  # that the argument may have
        self._is_string = False  # true or false whatever its text is
        self._value: list[str] = []  # of the argument, unless it is a string
        self._is_at_start = False  # of the value
        self._keys: list[str] = []  # of the arguments so far
        self._next_keys: list[str] | None = None  # that the schema has besides, with `key_end`; None: it names none

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
            self._writer.add_arguments("}" if self._keys else "{}")
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
        self._begin_argument(self._tag.removesuffix(self._body.key_end))
        return Progress.MORE

    def _begin_argument(self, key: str) -> None:
        schema = self._tools[self._name]
        self._types = types_of(schema, key)
        self._is_string = self._types <= {"string"}
        self._tag, self._place, self._expected = "", _Place.TAG, (self._body.value,)
        if self._keys:
            self._writer.show()
        self._writer.add_arguments(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        properties = schema.get("properties")
        if not self._keys and isinstance(properties, Mapping) and properties:
            self._next_keys = sorted(f"{name}{self._body.key_end}" for name in properties)
        self._keys.append(key)
        if self._next_keys and self._nearest_key(tag := f"{key}{self._body.key_end}") == [tag]:
            del self._next_keys[bisect_left(self._next_keys, tag)]
        if not self._body.value:
            self._begin_value()

    def _begin_value(self) -> None:
        self._place, self._is_at_start = _Place.VALUE, self._body.breaks_lines
        if self._is_string:
            self._writer.add_arguments('"')

    def _take_value(self, piece: str) -> Progress:
        if self._is_at_start and piece == "\n":
            self._is_at_start = False
            return Progress.MORE
        self._is_at_start = False
        text = self._tag + piece
        start, ending = self._find_ending(text)
        more, self._tag = text[:start], text[start:]
        if not self._is_string:
            self._value.append(more)
        elif more:
            self._writer.add_arguments(json.dumps(more, ensure_ascii=False)[1:-1])
        if ending is _Ending.CALL:
            return Progress.FAILED
        if ending is _Ending.NEXT_KEY:
            key = self._tag.removeprefix("\n").removeprefix(self._body.key).removesuffix(self._body.key_end)
            self._end_value()
            self._begin_argument(key)
        elif ending is _Ending.VALUE:
            self._end_value()
        return Progress.MORE

    def _find_ending(self, text: str) -> tuple[int, _Ending | None]:
        """Return where the end of a value begins in the text, and what it is."""
        for match in _MAY_BEGIN_END.finditer(text):
            ending = self._ending(text[match.start() :])
            if ending is not None:
                return match.start(), ending
        return len(text), None

    def _ending(self, text: str) -> _Ending | None:
        tag = text.removeprefix("\n")
        if (tag == text or self._body.breaks_lines) and self._body.value_end.startswith(tag):
            return _Ending.VALUE if tag == self._body.value_end else _Ending.MAY_COME
        return self._next_key(tag) or self._end_of_call(tag)

    def _next_key(self, tag: str) -> _Ending | None:
        if self._body.key.startswith(tag):
            return _Ending.MAY_COME
        if not tag.startswith(self._body.key):
            return None
        name = tag.removeprefix(self._body.key)
        if self._next_keys is not None:
            nearest = self._nearest_key(name)
            return _Ending.NEXT_KEY if nearest == [name] else _may_come(name, nearest)
        name, first, rest = name.partition(self._body.key_end[0])
        if not _ANY_KEY.fullmatch(name):
            return None
        end = first + rest
        return _Ending.NEXT_KEY if name and end == self._body.key_end else _may_come(end, [self._body.key_end])

    def _nearest_key(self, beginning: str) -> list[str]:
        """Return the first of `_next_keys` from this text on, which begins so if any does; there may be thousands."""
        assert self._next_keys is not None, "the schema names some"
        place = bisect_left(self._next_keys, beginning)
        return self._next_keys[place : place + 1]

    def _end_of_call(self, tag: str) -> _Ending | None:
        if not tag.startswith(self._body.function_end):
            return _may_come(tag, [self._body.function_end])
        behind = tag.removeprefix(self._body.function_end)
        follower = behind.lstrip()
        if len(behind) - len(follower) > _MAX_SPACE_CHARS:
            return None
        if follower not in self._followers:
            return _may_come(follower, self._followers)
        self.num_unread = len(follower)
        return _Ending.CALL

    def _end_value(self) -> None:
        self._tag, self._place = "", _Place.TAG
        self._writer.add_arguments('"' if self._is_string else argument_json("".join(self._value), self._types))
        self._value.clear()
        self._expected = (self._body.key, self._body.function_end)


def _may_come(text: str, tags: Sequence[str]) -> _Ending | None:
    return _Ending.MAY_COME if any(tag.startswith(text) for tag in tags) else None


_ANY_OF = ("anyOf", "oneOf", "allOf")
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}

# Deeper than people nest types.
_MAX_DEPTH = 32


def types_of(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """Return the names of the types that an argument may have; empty: the schema does not say."""
    properties = schema.get("properties")
    return frozenset(_types(properties.get(key), schema, set(), 0)) if isinstance(properties, Mapping) else frozenset()


def argument_json(value: str, types: frozenset[str]) -> str:
    """Return an argument as JSON text: a string, unless it may have another type that the text fits."""
    try:
        written, parsed = value_of(value.strip())
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    for name in types - {"string"}:
        if isinstance(parsed, _JSON_TYPES.get(name, ())) and isinstance(parsed, bool) == (name == "boolean"):
            return written
    return json.dumps(value, ensure_ascii=False)


def _types(schema: object, root: Mapping[str, object], seen: set[str], depth: int) -> Iterator[str]:
    """Yield the types that a schema names at its top, also through definitions (`$ref`) that were not seen yet."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else [name for name in _listed(named) if isinstance(name, str)]
    for keyword in _ANY_OF:
        for part in _listed(schema.get(keyword)):
            yield from _types(part, root, seen, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _types(_referred(reference, root), root, seen, depth + 1)


def _referred(reference: str, root: Mapping[str, object]) -> object:
    """Return what `#/$defs/NAME` stands for."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
