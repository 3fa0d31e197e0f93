"""Spoils protobuf messages, field by field as their descriptor has them."""

import random
import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz.target import flipped

_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}
_SIGNED = {FieldDescriptor.CPPTYPE_INT32: 32, FieldDescriptor.CPPTYPE_INT64: 64, FieldDescriptor.CPPTYPE_ENUM: 32}
_TEXTS = ("", "x", "\x00", "a\nb", "\u202e", "{", "[]", "null", "x" * 5000, "{{ 1 }}", "-1", "1e999", "../x")


def changed(kind: type[Message], content: bytes, chance: random.Random) -> bytes:
    """Return a message with some other fields; seldom with other bytes."""
    message = kind()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return flipped(content, chance)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        _change_a_field(message, chance)
    spoiled = message.SerializeToString()
    return flipped(spoiled, chance) if chance.random() < 0.1 else spoiled


def _change_a_field(message: Any, chance: random.Random) -> None:
    if not (fields := message.DESCRIPTOR.fields):
        return
    field = chance.choice([each for each, _ in message.ListFields()] or fields) if chance.random() < 0.8 else None
    field = field or chance.choice(fields)
    if chance.random() < 0.05:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_a_list(getattr(message, field.name), field, chance)
    elif field.message_type is None:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), chance))
    else:
        inner = getattr(message, field.name)
        inner.SetInParent()
        _change_a_field(inner, chance)


def _change_a_list(values: Any, field: FieldDescriptor, chance: random.Random) -> None:
    is_message = field.message_type is not None
    add: Callable[[Any], None] = (lambda value: values.add().CopyFrom(value)) if is_message else values.append
    if not values:
        if is_message:
            values.add()
        else:
            values.append(_scalar(field, field.default_value or 0, chance) if not _is_text(field) else "x")
    place = chance.randrange(len(values))
    match chance.randrange(8):
        case 0:
            del values[place]
        case 1:
            for _ in range(chance.choice([1, 2, 1000])):
                add(values[place])
        case 2:
            kept = [*values]
            chance.shuffle(kept)
            copies = [type(each).FromString(each.SerializeToString()) for each in kept] if is_message else kept
            del values[:]
            for each in copies:
                add(each)
        case _ if is_message:
            _change_a_field(values[place], chance)
        case _:
            values[place] = _scalar(field, values[place], chance)


def _is_text(field: FieldDescriptor) -> bool:
    return field.cpp_type == FieldDescriptor.CPPTYPE_STRING


def _scalar(field: FieldDescriptor, value: Any, chance: random.Random) -> Any:
    """Return another value of a field."""
    kind = field.cpp_type
    if kind in _UNSIGNED or kind in _SIGNED:
        signs = int(kind in _SIGNED)
        most = 2 ** ((_UNSIGNED | _SIGNED)[kind] - signs) - 1
        least = -most - 1 if signs else 0
        found = chance.choice([0, 1, 2, 7, 99, least, most, most // 2, value - 1, value + 1, value + 100, value * 2])
        return min(max(found, least), most)
    if kind == FieldDescriptor.CPPTYPE_FLOAT or kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return chance.choice([0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, float("nan"), float("inf"), -float("inf")])
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice([b"", value[:-1], value * 2, flipped(value, chance), _numbers(value, chance)])
    return chance.choice([*_TEXTS, value * 2, value[:-1]])


def _numbers(value: bytes, chance: random.Random) -> bytes:
    """Return an array of 4-byte numbers of which one is another."""
    if len(value) < 4:
        return b"\xff" * 4
    number = chance.choice(
        [struct.pack("<i", chance.choice([-1, 2**31 - 1, -(2**31), 0])), struct.pack("<f", 1e39 * 0)]
    )
    nan = chance.choice([number, struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))])
    place = 4 * chance.randrange(len(value) // 4)
    return value[:place] + nan + value[place + 4 :]
