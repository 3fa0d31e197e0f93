"""Where two messages of one kind differ: the fields by their paths, with both values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MISSING = "nothing"
MAX_SHOWN = 10
# Bytes that are numbers in little endian, by the name of the field.
_NUMBERS = {"token_ids": "<i4", "logprobs": "<f4"}


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field that differs: its path, and both values as text."""

    path: str
    recorded: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: recorded {self.recorded}, now {self.found}"


def differences(recorded: Message | None, found: Message | None) -> list[FieldDifference]:
    """Return where two messages differ, at most `MAX_SHOWN` places, in the order of their fields."""
    if recorded is None or found is None:
        return [] if recorded is found else [FieldDifference("step", _presence(recorded), _presence(found))]
    places = []
    for place in _walk(recorded, found, ""):
        places.append(place)
        if len(places) == MAX_SHOWN:
            break
    return places


def _presence(message: Message | None) -> str:
    return "no step" if message is None else "a step"


def _walk(recorded: Message, found: Message, prefix: str) -> Iterator[FieldDifference]:
    for field in recorded.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        ours, theirs = getattr(recorded, field.name), getattr(found, field.name)
        if field.has_presence and recorded.HasField(field.name) != found.HasField(field.name):
            values = (
                (_text(ours) if recorded.HasField(field.name) else MISSING),
                (_text(theirs) if found.HasField(field.name) else MISSING),
            )
            yield FieldDifference(path, *values)
        elif field.is_repeated:
            yield from _walk_list(list(ours), list(theirs), path, field)
        elif field.message_type is not None:
            yield from _walk(ours, theirs, f"{path}.")
        elif field.type == FieldDescriptor.TYPE_BYTES and _numbers_of(field):
            dtype = np.dtype(_numbers_of(field))
            yield from _walk_list(_array(ours, dtype), _array(theirs, dtype), path, None)
        elif ours != theirs:
            yield FieldDifference(path, _text(ours), _text(theirs))


def _walk_list(ours: list[Any], theirs: list[Any], path: str, field: Any) -> Iterator[FieldDifference]:
    for index in range(max(len(ours), len(theirs))):
        place = f"{path}[{index}]"
        if index >= len(ours) or index >= len(theirs):
            values = [_text(side[index]) if index < len(side) else MISSING for side in (ours, theirs)]
            yield FieldDifference(place, *values)
        elif field is not None and field.message_type is not None:
            yield from _walk(ours[index], theirs[index], f"{place}.")
        elif ours[index] != theirs[index]:
            yield FieldDifference(place, _text(ours[index]), _text(theirs[index]))


def _numbers_of(field: Any) -> str:
    return next((dtype for ending, dtype in _NUMBERS.items() if field.name.endswith(ending)), "")


def _array(content: bytes, dtype: np.dtype[Any]) -> list[Any]:
    """Return numbers whose bits are compared: those of floats as integers, shown as they are."""
    return [_Bits(number) for number in np.frombuffer(content[: len(content) // 4 * 4], dtype)]


class _Bits:
    """A number that equals those with the same bits."""

    def __init__(self, number: np.generic) -> None:
        self._number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bits) and self._number.tobytes() == other._number.tobytes()

    def __hash__(self) -> int:
        return hash(self._number.tobytes())

    def __str__(self) -> str:
        number = self._number.item()
        return f"{number!r} ({self._number.view(np.uint32):#010x})" if isinstance(number, float) else str(number)


def _text(value: Any) -> str:
    if isinstance(value, Message):
        return "{" + ", ".join(f"{field.name}: {_text(item)}" for field, item in value.ListFields()) + "}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return str(value)
