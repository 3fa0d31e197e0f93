"""Messages of AdminService as plain values for JSON: fields by their names in protos/, whole numbers as numbers.

protobuf's own JSON form shows 64-bit numbers as strings and leaves out what is 0, which scripts would have to undo.
"""

import re
from collections.abc import Iterable, Sequence
from typing import cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

Value = None | bool | int | float | str | list["Value"] | dict[str, "Value"]


def to_values(message: Message) -> dict[str, Value]:
    """Return all fields of a message: None for an absent one, words in lower case for enums, times in RFC 3339."""
    values: dict[str, Value] = {}
    for field in cast("Iterable[FieldDescriptor]", message.DESCRIPTOR.fields):
        value = getattr(message, field.name)
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            values[field.name] = [_to_value(item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            values[field.name] = None
        elif field.type == FieldDescriptor.TYPE_ENUM:
            values[field.name] = enum_word(message, field.name)
        else:
            values[field.name] = _to_value(value)
    return values


def enum_word(message: Message, field_name: str) -> str:
    """Return REQUEST_STATUS_WAITING of a field as "waiting"; of a value of a later release its number."""
    enum, number = message.DESCRIPTOR.fields_by_name[field_name].enum_type, getattr(message, field_name)
    assert enum is not None
    if number not in enum.values_by_number:
        return str(number)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper() + "_"
    return enum.values_by_number[number].name.removeprefix(prefix).lower()


def _time_value(time: Timestamp) -> str | None:
    """Return a time in RFC 3339; None: no calendar has it."""
    try:
        return time.ToJsonString()
    except (ValueError, OverflowError):
        return None


def _to_value(value: object) -> Value:
    if isinstance(value, Timestamp):
        return _time_value(value)
    if isinstance(value, Message):
        return to_values(value)
    if isinstance(value, bytes):
        return list(value)
    return cast("Value", value)
