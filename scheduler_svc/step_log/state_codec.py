"""Objects as rows of plain values and arrays, and back: data only, whose form is declared by type hints in code.

A row has the values of the declared fields of one object, in their order. Another object is the distance to its row. An
array is its shape: arrays follow each other in one string of bytes as they do in the rows; one that was there before is
its number. Names of blocks follow each other in another string. A file says neither a class nor a field by name, and
what it says is read with the checks of the declared type, so that the worst that it can hold is a wrong value of the
right kind. Nothing here recurses with the content, and what is read takes memory in proportion to it.
"""

import collections
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo_shared.step_wire.step import BLOCK_NAME_BYTES

# A score or log-probability, which may be infinite. A plain `float` is not, and far from overflow.
Score = NewType("Score", float)
# Names of blocks, one after the other.
BlockNames = NewType("BlockNames", bytes)
MAX_FLOAT = 1e100
# The rows of a snapshot, which take some thirty times as much as objects.
MAX_ROW_BYTES = 2**25
_NO_NAME = bytes(BLOCK_NAME_BYTES)

_Array: TypeAlias = npt.NDArray[Any]
_Put: TypeAlias = Callable[["StateWriter", Any], Any]
_Take: TypeAlias = Callable[["StateReader", Any], Any]


class SnapshotError(Exception):
    """A snapshot cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the objects of a class are written.

    Attributes:
        kind: The class.
        hints: Types of what is written, by name.
        get: Returns those values of an object.
        put: Gives them to an object, which was made without a call of its class.
    """

    kind: type
    hints: Mapping[str, Any]
    get: Callable[[Any], Iterable[Any]]
    put: Callable[[Any, list[Any]], None]

    @classmethod
    def of(cls, kind: type, hints: Mapping[str, Any] | None = None) -> "Form":
        """Return the form of a class whose values are its attributes; `hints` None: those of a dataclass."""
        known = typing.get_type_hints(kind) if hints is None else hints
        names = tuple(known)
        return cls(kind, known, _getter(names), functools.partial(_set_attributes, names))


def _getter(names: tuple[str, ...]) -> Callable[[Any], Iterable[Any]]:
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def _set_attributes(names: tuple[str, ...], value: Any, items: list[Any]) -> None:
    for name, item in zip(names, items, strict=True):
        object.__setattr__(value, name, item)  # frozen ones too


Forms: TypeAlias = Mapping[type, Form]


# Writing ---------------------------------------------------------------------------------------------


class StateWriter:
    """Writes objects.

    Args:
        forms: Of all classes.
        masks: What becomes of a value before it is written, by class and name.
    """

    def __init__(self, forms: Forms, masks: Mapping[type, Mapping[str, Callable[[Any], Any]]]) -> None:
        self._classes = {kind: number for number, kind in enumerate(forms)}
        self._plans = {form.kind: _plan(form, masks.get(form.kind, {})) for form in forms.values()}
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._row = 0
        self._arrays: dict[int, int] = {}
        self._kept: list[_Array] = []  # while its id stands for it
        self._parts: list[bytes] = []
        self._names: list[bytes] = []

    def write(self, roots: list[Any]) -> tuple[str, bytes, bytes]:
        """Return the rows of objects, which a reader has already, and of all that they refer to, arrays, and names."""
        for root in roots:
            self.number(root)
        rows: list[list[Any]] = []
        for value in self._objects:  # they grow meanwhile
            self._row = len(rows)
            get, steps = self._plans[type(value)]
            row = list(get(value))
            for index, put in steps:
                row[index] = put(self, row[index])
            rows.append(row)
        kinds = [self._classes[type(value)] for value in self._objects[len(roots) :]]
        # Some numbers are NumPy's.
        text = json.dumps([kinds, rows], separators=(",", ":"), default=np.generic.item)
        return text, b"".join(self._parts), b"".join(self._names)

    def number(self, value: Any) -> int:
        """Return the number of an object."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def relative(self, value: Any) -> int:
        """Return how many rows behind the present one an object has its own."""
        return self.number(value) - self._row

    def array(self, value: _Array) -> list[int] | int:
        """Return the shape of an array, or its number if it was there before."""
        number = self._arrays.get(id(value))
        if number is not None:
            return number
        self._arrays[id(value)] = len(self._kept)
        self._kept.append(value)
        self._parts.append(value.tobytes())
        return list(value.shape)

    def content(self, content: bytes) -> int:
        """Return the length of some bytes."""
        self._parts.append(content)
        return len(content)

    def names(self, names: bytes) -> int:
        """Return the length of some names of blocks."""
        self._names.append(names)
        return len(names)


def _plan(form: Form, masks: Mapping[str, Callable[[Any], Any]]) -> tuple[Callable[[Any], Any], list[tuple[int, _Put]]]:
    steps: list[tuple[int, _Put]] = []
    for index, (name, hint) in enumerate(form.hints.items()):
        put = _codec(hint)[0]
        if (mask := masks.get(name)) is not None:
            steps.append((index, functools.partial(_put_masked, mask, put)))
        elif put is not None:
            steps.append((index, put))
    return form.get, steps


def _put_masked(mask: Callable[[Any], Any], put: _Put | None, writer: StateWriter, value: Any) -> Any:
    masked = mask(value)
    return masked if put is None else put(writer, masked)


# Reading ---------------------------------------------------------------------------------------------


class StateReader:
    """Reads objects.

    Args:
        forms: Of all classes, as they were for the writer.
        rows, arrays, names: What the writer returned.

    Raises: SnapshotError: it is nothing that a writer returns.
    """

    def __init__(self, forms: Forms, rows: str, arrays: bytes, names: bytes) -> None:
        if len(rows) > MAX_ROW_BYTES:
            raise SnapshotError(f"its rows have {len(rows)} bytes, more than the {MAX_ROW_BYTES} that are read")
        self._forms = list(forms.values())
        self._by_kind = forms
        self._bytes = memoryview(arrays)
        self._names = memoryview(names)
        self._arrays: list[_Array] = []
        self._objects: list[Any] = []
        self._row = 0
        self._content = check_list(json.loads(rows), 2)

    def read(self, roots: list[Any]) -> list[Any]:
        """Read all objects and return them; the roots are those that the writer had, before anything happened."""
        kinds, rows = map(check_list, self._content)
        forms = [self._forms[check_int(kind, 0, len(self._forms) - 1)] for kind in kinds]
        check_list(rows, len(roots) + len(forms))
        self._objects = [*roots, *(object.__new__(form.kind) for form in forms)]
        forms = [*(self._by_kind[type(root)] for root in roots), *forms]
        for number, (value, form, row) in enumerate(zip(self._objects, forms, rows, strict=True)):
            self._row = number
            codecs = [_codec(hint)[1] for hint in form.hints.values()]
            form.put(value, [take(self, item) for take, item in zip(codecs, check_list(row, len(codecs)), strict=True)])
        return self._objects

    def object(self, distance: Any, kind: type) -> Any:
        """Return an object, which must be of a class."""
        number = check_int(distance, -self._row, len(self._objects) - 1 - self._row) + self._row
        value = self._objects[number]
        if type(value) is not kind:
            raise SnapshotError(f"object {number} is a {type(value).__name__} where a {kind.__name__} should be")
        return value

    def array(self, shape: Any, dtype: np.dtype[Any]) -> _Array:
        """Return an array that may be written to, or one that was there before."""
        if type(shape) is int:
            array = self._arrays[check_int(shape, 0, len(self._arrays) - 1)]
            if array.dtype != dtype:
                raise SnapshotError(f"an array is of {array.dtype} where one of {dtype} should be")
            return array
        if not 1 <= len(check_list(shape)) <= 2:
            raise SnapshotError(f"an array has {len(shape)} dimensions")
        length = math.prod(map(check_size, shape)) * dtype.itemsize
        self._arrays.append(np.frombuffer(bytearray(self.content(length)), dtype).reshape(shape))
        return self._arrays[-1]

    def content(self, length: Any) -> bytes:
        """Return the next bytes, which are then gone: no file is large out of nothing."""
        if check_size(length) > len(self._bytes):
            raise SnapshotError("an array is longer than what is left of the bytes")
        content, self._bytes = bytes(self._bytes[:length]), self._bytes[length:]
        return content

    def names(self, length: Any) -> bytes:
        """Return the next names of blocks, which are then gone."""
        if check_size(length) > len(self._names) or length % BLOCK_NAME_BYTES:
            raise SnapshotError(f"names of blocks have {length} bytes, and {len(self._names)} are left")
        names, self._names = bytes(self._names[:length]), self._names[length:]
        return names


def check_list(value: Any, length: int | None = None) -> list[Any]:
    """Return a list, of a length if one is said. Raises SnapshotError."""
    if type(value) is not list or (length is not None and len(value) != length):
        raise SnapshotError(f"{_shown(value)} stands where a list {'' if length is None else f'of {length} '}should")
    return value


def check_int(value: Any, least: int = -(2**63), most: int = 2**64 - 1) -> int:
    """Return an integer that is in a range. Raises SnapshotError."""
    if type(value) is not int or not least <= value <= most:
        raise SnapshotError(f"{_shown(value)} stands where an integer from {least} to {most} should")
    return value


def check_size(value: Any) -> int:
    """Return how many of something there are. Raises SnapshotError."""
    return check_int(value, 0, 2**32)


def _shown(value: Any) -> str:
    return (
        f"{type(value).__name__} {str(value)[:40]!r}" if isinstance(value, int | float | str) else type(value).__name__
    )


# One value -------------------------------------------------------------------------------------------


def _take_plain(kind: type, reader: StateReader, value: Any) -> Any:
    if type(value) is not kind:
        raise SnapshotError(f"{_shown(value)} stands where a {kind.__name__} should")
    return value


def _take_float(most: float, reader: StateReader, value: Any) -> Any:
    if type(value) not in (float, int) or not abs(value) <= most:
        raise SnapshotError(f"{_shown(value)} stands where a number of at most {most} should")
    return value


@functools.cache
def _codec(hint: Any) -> tuple[_Put | None, _Take]:
    """Return how a value of a type is written, None: as it is, and how it is read and checked."""
    kind, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if hint is int:
        return None, lambda reader, value: check_int(value)
    if hint in (float, Score):
        return None, functools.partial(_take_float, MAX_FLOAT if hint is float else math.inf)
    if hint in (bool, str, None):
        return None, functools.partial(_take_plain, types.NoneType if hint is None else hint)
    if hint is BlockNames:
        return (lambda writer, value: writer.names(value)), (lambda reader, value: reader.names(value))
    if hint is bytes:
        return (lambda writer, value: writer.content(value)), (lambda reader, value: reader.content(value))
    if kind in (types.UnionType, typing.Union):
        [inner] = [argument for argument in arguments if argument is not types.NoneType]
        return _optional(*_codec(inner))
    if kind is np.ndarray:
        dtype = np.dtype(typing.get_args(arguments[1])[0])
        return (lambda writer, value: writer.array(value)), (lambda reader, value: reader.array(value, dtype))
    if issubclass(kind, enum.Enum):
        members = list(kind)
        places = {member: number for number, member in enumerate(members)}
        return (lambda writer, value: places[value]), (
            lambda reader, value: members[check_int(value, 0, len(members) - 1)]
        )
    if kind is list and arguments == (bytes,):
        return _put_names, _take_names
    if issubclass(kind, dict):
        return _mapping(kind, *(arguments if kind is not collections.Counter else (*arguments, int)))
    if kind is tuple and arguments[-1] is not Ellipsis:
        return _fixed(lambda items: tuple(items), arguments)
    if issubclass(kind, tuple) and kind is not tuple:  # a named one
        hints = typing.get_type_hints(kind)
        return _fixed(lambda items: kind(*items), tuple(hints.values()))
    if kind in (tuple, list, set, frozenset, collections.deque) or kind is collections.abc.Sequence:
        make = list if kind is collections.abc.Sequence else kind
        put, take = _codec(arguments[0])
        return (
            (lambda writer, value: list(value))
            if put is None
            else (lambda writer, value: [put(writer, item) for item in value])
        ), (lambda reader, value: make([take(reader, item) for item in check_list(value)]))
    return (lambda writer, value: writer.relative(value)), (lambda reader, value: reader.object(value, kind))


def _optional(put: _Put | None, take: _Take) -> tuple[_Put | None, _Take]:
    return (
        None if put is None else (lambda writer, value: None if value is None else put(writer, value)),
        lambda reader, value: None if value is None else take(reader, value),
    )


def _fixed(make: Callable[[list[Any]], Any], hints: tuple[Any, ...]) -> tuple[_Put, _Take]:
    puts, takes = zip(*map(_codec, hints), strict=True)
    return (
        lambda writer, value: [
            item if put is None else put(writer, item) for put, item in zip(puts, value, strict=True)
        ],
        lambda reader, value: make(
            [take(reader, item) for take, item in zip(takes, check_list(value, len(takes)), strict=True)]
        ),
    )


def _mapping(kind: type, key: Any, value: Any) -> tuple[_Put, _Take]:
    put, take = _codec(list[tuple[key, value]])
    assert put is not None
    return (lambda writer, items: put(writer, items.items())), (lambda reader, items: kind(dict(take(reader, items))))


def _put_names(writer: StateWriter, names: list[bytes]) -> int:
    return writer.names(b"".join([name or _NO_NAME for name in names]))


def _take_names(reader: StateReader, length: Any) -> list[bytes]:
    content = reader.names(length)
    names = [content[start : start + BLOCK_NAME_BYTES] for start in range(0, len(content), BLOCK_NAME_BYTES)]
    return [b"" if name == _NO_NAME else name for name in names]
