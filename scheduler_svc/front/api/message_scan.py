"""Counts the elements of an encoded protobuf message before anything is built from it.

A message of 4 MiB can hold two million submessages. Decoding them takes a quarter of a second, in which no other
thread runs Python, and checking them much longer. The scan reads tags and lengths only: it builds nothing, lets other
threads run, and stops soon after a field exceeds its limit. A message that passes is decoded in a few milliseconds.

Source: protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, cast

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from octavo_shared.errors import InvalidFieldError, MalformedMessageError

_LENGTH_DELIMITED = 2
_FIXED_SIZES = {
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_SFIXED32: 4,
}
_NEVER_PACKED = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)


@dataclass(frozen=True, slots=True)
class CountLimit:
    """How many elements a repeated field may have.

    Attributes:
        noun: What the elements are, behind a number.
        field: What errors call the field; empty: its path.
        cause: Where the limit comes from; empty: it is always the same.
        error: Makes a field's own error from the number in words.
    """

    most: int
    noun: str = "elements long"
    field: str = ""
    cause: str = ""
    error: Callable[[str], InvalidFieldError] | None = None


# For a repeated field without a limit of its own.
DEFAULT_LIMIT = CountLimit(1024)

# How many elements beyond a limit are counted, so that the error can give their number.
GRACE = 1024


class MessageScan:
    """Compares the counts of one message with their limits.

    A repeated field inside a repeated message is counted over all of them. Any other field may be set once in its
    message: protobuf would take the last value, and merging a million of them takes long.

    Args:
        limits: Limits of repeated fields, by path, such as `sampling_params.stop`.
        opaque: Paths of messages whose content is counted elsewhere.
    """

    def __init__(self, limits: Mapping[str, CountLimit], opaque: Collection[str] = ()) -> None:
        self._limits = limits
        self._opaque = opaque
        self._counts: dict[str, int] = {}
        self._excess = ""  # the first field with too many

    def check(self, content: bytes, message_class: type[Message]) -> None:
        """Check that no field of an encoded message has too many elements.

        Raises:
            InvalidFieldError: a field has too many, or this release does not know it.
            MalformedMessageError: the message cannot be decoded.
        """
        try:
            self._scan(content, 0, len(content), cast("Descriptor", message_class.DESCRIPTOR), "")
        except IndexError as error:  # the message ends in the middle of a number
            raise MalformedMessageError from error
        if self._excess:
            self._refuse(self._excess, self._counts[self._excess])

    def _scan(self, content: bytes, position: int, end: int, descriptor: Descriptor, prefix: str) -> None:
        """Scan the message that lies from `position` to `end`; `prefix` is its path with a dot."""
        fields, seen = descriptor.fields_by_number, set()
        while position < end:
            tag, position = _varint(content, position)
            field, wire_type = fields.get(tag >> 3), tag & 7
            if field is None:
                name = f"field {tag >> 3} of {descriptor.name}"
                raise InvalidFieldError(name, "set", "unset: this release does not support it")
            begin, position = _value(content, position, wire_type)
            if position > end:
                raise MalformedMessageError
            if field.is_repeated:
                is_packed = wire_type == _LENGTH_DELIMITED and field.type not in _NEVER_PACKED
                self._count(prefix + field.name, _num_packed(content, begin, position, field) if is_packed else 1)
            elif field.number in seen:
                raise InvalidFieldError(prefix + field.name, "repeated", "set at most once")
            seen.add(field.number)
            if (
                field.message_type is not None
                and wire_type == _LENGTH_DELIMITED
                and prefix + field.name not in self._opaque
            ):
                self._scan(content, begin, position, field.message_type, f"{prefix}{field.name}.")

    def _count(self, path: str, num: int) -> None:
        limit = self._limits.get(path, DEFAULT_LIMIT)
        count = self._counts[path] = self._counts.get(path, 0) + num
        if count <= limit.most:
            return
        self._excess = self._excess or path
        if num == 1 and count > limit.most + GRACE:
            self._refuse(path, f"more than {limit.most + GRACE}")

    def _refuse(self, path: str, shown: object) -> NoReturn:
        limit = self._limits.get(path, DEFAULT_LIMIT)
        if limit.error is not None:
            raise limit.error(str(shown))
        cause = f" ({limit.cause})" if limit.cause else ""
        raise InvalidFieldError(
            limit.field or path, f"{shown} {limit.noun}", f"at most {limit.most} {limit.noun}{cause}"
        )


def cut(content: bytes, number: int) -> tuple[bytes, bytes | None]:
    """Split a field off a message that has passed a scan: return the message without it, and the field's value.

    The value is that of a length-delimited field, such as a message; None: the field is not set.
    """
    position = 0
    while position < len(content):
        start = position
        tag, position = _varint(content, position)
        begin, position = _value(content, position, tag & 7)
        if tag >> 3 == number and tag & 7 == _LENGTH_DELIMITED:
            return content[:start] + content[position:], content[begin:position]
    return content, None


def peek(content: bytes, path: Sequence[int], most: int) -> int:
    """Return a number in a message that was not scanned, given the field numbers on the path to it.

    0: it is not set, or not among the first `most` fields of its message.
    """
    try:
        begin, end = _find(content, path, most)
        return _varint(content, begin)[0] if begin < end else 0
    except IndexError:  # the message is truncated, which the scan reports
        return 0


def peek_text(content: bytes, number: int, most: int) -> str:
    """Return a text in a message that was not scanned, given its field number.

    "": it is not set, or not among the first `most` fields.
    """
    try:
        begin, end = _find(content, (number,), most)
    except IndexError:
        return ""
    return content[begin:end].decode(errors="replace")


def _find(content: bytes, path: Sequence[int], most: int) -> tuple[int, int]:
    """Return where the value of a field begins and ends; both are equal if it is absent, or behind `most` others.

    Raises: IndexError: the content ends before it.
    """
    begin, end = 0, len(content)
    for number in path:
        position, tag, num_read = begin, 0, 0
        while tag >> 3 != number:
            if position >= end or num_read == most:
                return 0, 0
            tag, begin = _varint(content, position)
            begin, position = _value(content, begin, tag & 7)
            num_read += 1
        end = position
    return begin, end


def _value(content: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return where the value of a field begins, behind its length if it has one, and where it ends."""
    match wire_type:
        case 0:  # a varint
            return position, _varint(content, position)[1]
        case 1:
            return position, position + 8
        case 2:  # _LENGTH_DELIMITED
            length, begin = _varint(content, position)
            return begin, begin + length
        case 5:
            return position, position + 4
    raise MalformedMessageError  # a protobuf group, which our messages never have


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Return the number at a position, and the position behind it. Raises IndexError: the content ends before it."""
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise MalformedMessageError


def _num_packed(content: bytes, begin: int, end: int, field: FieldDescriptor) -> int:
    """Return the number of elements in a packed list."""
    size = _FIXED_SIZES.get(field.type)
    if size is not None:
        return (end - begin) // size
    return int(np.count_nonzero(np.frombuffer(content, np.uint8, end - begin, begin) < 0x80))
