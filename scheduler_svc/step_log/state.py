"""Objects of the core as data, and back, whatever attributes they have: a change of the core needs none here.

A value that nothing can change, such as a number or a tuple, is written where it stands; every other object and array
once, with a number that stands for it. What two objects share they share again, an array and a view of it its bytes.

What a planner is made with is not written: its limits, what its executor said, its policy, functions. A reader makes
planners anew with these; `complete` gives them to those that were read, and compares the two.

A file is data, which anybody may have written: none of it is the name of anything that is called, and no more memory is
taken than the file has bytes, or the planners have that were made anew.
"""

import enum
import functools
import importlib
import json
import math
import pkgutil
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import octavo_shared.grammar.grammar
import octavo_shared.step_wire
import scheduler_svc.core
import scheduler_svc.request
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.step import BLOCK_NAME_BYTES, Step
from octavo_shared.step_wire.table_columns import BlockTables
from scheduler_svc.core.blocks.host_blocks import Copy
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.blocks.saved_states import Save
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.waiting.policy import FcfsPolicy, PriorityPolicy
from scheduler_svc.step_log.masking import Masks

# The rows of a snapshot, which take some thirty times as much as objects.
MAX_ROW_BYTES = 2**25
# Integers have at most so many bits: sets of planners are the longest ones.
_MAX_INT_BITS = 4096
_MAX_FLOAT = 1e100

# Rooms whose classes are read.
ROOMS = (scheduler_svc.core, scheduler_svc.request, octavo_shared.step_wire, octavo_shared.grammar.grammar)
_PLAIN = frozenset((type(None), bool, int, float, str))
_CONTAINERS: tuple[type, ...] = (list, set, dict, deque, OrderedDict, Counter, bytearray, np.ndarray)
# What is not written: see above.
_MADE_ANEW: tuple[Any, ...] = (CoreLimits, ExecutorInfo, BlockHasher, FcfsPolicy, PriorityPolicy, Callable)
# Attributes that are sets of planners; other planners are made anew.
_SETS_OF_PLANNERS = ("bit", "_bits")
# Arrays of which each row is garbage behind some length, and the attribute with these lengths.
_RAGGED = {(BatchTable, "token_ids"): "num_tokens", (BlockTables, "block_ids"): "counts"}
_DTYPES = {dtype.str: dtype for dtype in map(np.dtype, "?bBhHiIqQfd")} | {"sampling": SAMPLING_ROW}
_NO_NAME = bytes(BLOCK_NAME_BYTES)
# Attributes that have names of blocks, one after the other. In containers and tuples, bytes as long as a name are one.
_NAMES = ((Step, "block_names"), (Save, "name"), (Copy, "name"))
# Places for tokens and blocks that planners may have, most of them never touched.
_MAX_RAGGED = 2**36
# How much larger a number of a planner may be than when it was made: places in a queue move on.
_GROWTH = 4

_Array: TypeAlias = npt.NDArray[Any]


class SnapshotError(Exception):
    """A snapshot cannot be read; the message says why."""


@functools.cache
def all_classes() -> dict[str, type]:
    """Return all classes of the rooms, by name; the first call takes milliseconds."""
    modules: list[ModuleType] = []
    for room in ROOMS:
        inner = pkgutil.walk_packages(room.__path__, f"{room.__name__}.") if hasattr(room, "__path__") else ()
        modules += [room, *(importlib.import_module(module.name) for module in inner)]
    found = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    names = {module.__name__ for module in modules}
    of_rooms = {f"{kind.__module__}:{kind.__qualname__}": kind for kind in found if kind.__module__ in names}
    return of_rooms | {kind.__name__: kind for kind in _CONTAINERS}


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    names = [name for of_base in slots for name in ((of_base,) if isinstance(of_base, str) else of_base)]
    return tuple(name for name in names if not name.startswith("__"))


def _attributes(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots_of(kind) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


def _is_object(value: Any) -> bool:
    """Return whether something is an object of the rooms that is known by its number."""
    kind = type(value)
    return kind.__module__.partition(".")[0] in ("scheduler_svc", "octavo_shared") and not isinstance(
        value, (tuple, enum.Enum, *_MADE_ANEW)
    )


# Writing ---------------------------------------------------------------------------------------------


class _Written(bytearray):
    """Bytes that stand elsewhere than the row that has them."""

    def add(self, content: bytes) -> tuple[int, int]:
        """Keep some; return where they begin, and how many they are."""
        self += content
        return len(self) - len(content), len(content)


class StateWriter:
    """Writes objects; `masks` say what becomes of attributes before."""

    def __init__(self, masks: Masks) -> None:
        self._masks = masks
        self._names_of = {kind: name for name, kind in all_classes().items()}
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []  # their ids stand for them, so they are kept
        self._heads: dict[tuple[str, ...], int] = {}
        self._masked_arrays: dict[int, _Array] = {}
        self._lengths_of: dict[int, _Array] = {}  # of the rows of ragged arrays
        self._bytes, self._names = _Written(), _Written()

    def write(self, root: Any) -> tuple[str, bytes, bytes]:
        """Return the rows of an object and of all that it refers to, the content of arrays, and names of blocks."""
        self._number(root)
        rows = [None if _dtype_name(value) else self._row(value) for value in self._objects]  # they grow meanwhile
        for number, value in enumerate(self._objects):  # now it is known which arrays are masked, and what is a view
            if rows[number] is None:
                rows[number] = self._array_row(number, value)
        text = json.dumps([list(self._heads), rows], separators=(",", ":"), default=np.generic.item)
        return text, bytes(self._bytes), bytes(self._names)

    def _number(self, value: Any) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return number

    def _head(self, kind: type, *attributes: str) -> int:
        if kind not in self._names_of:
            raise SnapshotError(f"a {kind.__name__} is no data")
        return self._heads.setdefault((self._names_of[kind], *attributes), len(self._heads))

    def _row(self, value: Any) -> list[Any]:
        kind = type(value)
        if isinstance(value, dict):
            return [self._head(kind), self._items(value), self._items(value.values())]
        if isinstance(value, deque):
            return [self._head(kind), self._items(value), value.maxlen]
        if isinstance(value, list | set):
            return [self._head(kind), self._items(value)]
        if isinstance(value, bytearray):
            return [self._head(kind), *self._bytes.add(bytes(value))]
        if isinstance(value, np.ndarray):  # of objects
            return [self._head(kind), "O", len(value), ["all", *map(self._value, value)]]
        attributes, masks, row = _attributes(value), self._masks.get(kind, {}), []
        for name, item in attributes.items():
            if isinstance(item, _MADE_ANEW):
                item = None
            elif (mask := masks.get(name)) is not None and item is not None:
                if isinstance(item, np.ndarray):
                    self._masked_arrays[self._number(item)] = mask(value, item)
                else:
                    item = mask(value, item)
            if (lengths := _RAGGED.get((kind, name))) is not None:
                self._lengths_of[self._number(item)] = attributes[lengths]
            if (kind, name) in _NAMES:
                row.append(["names", *self._names.add(item)])
            else:
                row.append(item if type(item) in _PLAIN else self._value(item))
        return [self._head(kind, *attributes), *row]

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in (tuple, frozenset):
            return ["t" if kind is tuple else "f", *map(self._member, value)]
        if kind is bytes:
            return ["b", *self._bytes.add(value)]
        if isinstance(value, tuple):
            return ["n", self._head(kind), *map(self._value, value)]
        if isinstance(value, enum.Enum):
            return ["e", self._head(kind), value.name]
        return value.item() if isinstance(value, np.generic) else [self._number(value)]

    def _member(self, value: Any) -> Any:
        """Return an item of a tuple."""
        is_name = type(value) is bytes and len(value) == BLOCK_NAME_BYTES
        return ["names", *self._names.add(value)] if is_name else self._value(value)

    def _items(self, values: Iterable[Any]) -> list[Any]:
        """Return the items of a container; many integers as an array, names of blocks among the others."""
        items = list(values)
        kinds = set(map(type, items))
        if kinds == {bytes} and {*map(len, items)} <= {0, BLOCK_NAME_BYTES}:
            return ["names", *self._names.add(b"".join([name or _NO_NAME for name in items]))]
        if kinds == {int} and len(items) > 8 and max(map(abs, items)) < 2**63:
            return ["ints", *self._bytes.add(np.array(items, "<i8").tobytes())]
        return ["all", *map(self._value, items)]

    def _array_row(self, number: int, array: _Array) -> list[Any]:
        head, dtype, shape = self._head(np.ndarray), _dtype_name(array), list(array.shape)
        masked, lengths, base = self._masked_arrays.get(number), self._lengths_of.get(number), _owner(array)
        if lengths is not None:
            content = array if masked is None else masked
            rows = [row[:length] for row, length in zip(content, lengths.tolist(), strict=True)]
            return [head, dtype, shape, *self._bytes.add(np.concatenate(rows).tobytes()), lengths.tolist()]
        if masked is not None or id(base) not in self._numbers:
            return [head, dtype, shape, *self._bytes.add((array if masked is None else masked).tobytes())]
        begin = _address(array) - _address(base)
        return [head, dtype, shape, begin, [self._number(base), *array.strides]]


def _dtype_name(value: Any) -> str:
    """Return the name of what an array is of; empty: it is of objects, or no array."""
    if type(value) is not np.ndarray or value.dtype == np.object_:
        return ""
    return "sampling" if value.dtype == SAMPLING_ROW else value.dtype.str


def _owner(array: _Array) -> Any:
    """Return what an array is a view of; None: it has its own bytes."""
    base: Any = array.base
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base.obj if isinstance(base, memoryview) else base


def _address(owner: _Array | bytearray) -> int:
    array = owner if isinstance(owner, np.ndarray) else np.frombuffer(owner, np.uint8)
    return int(array.__array_interface__["data"][0])


# Reading ---------------------------------------------------------------------------------------------


class _Read:
    """Bytes that rows have, each once: no file is large out of nothing."""

    def __init__(self, content: bytes) -> None:
        self._content = memoryview(content)
        self._num_left = len(content)

    def take(self, begin: int, length: int) -> bytes:
        """Return some of them. Raises SnapshotError: more are taken than there are."""
        self._num_left -= _index(length)
        if self._num_left < 0 or _index(begin) + length > len(self._content):
            raise SnapshotError("more bytes are used than there are")
        return bytes(self._content[begin : begin + length])


_A_VIEW = object()  # stands for a view whose array is not there yet


class StateReader:
    """Reads objects, given what the writer returned.

    Raises: SnapshotError, or another exception: it is nothing that a writer returns.
    """

    def __init__(self, rows: str, arrays: bytes, names: bytes) -> None:
        if len(rows) > MAX_ROW_BYTES:
            raise SnapshotError(f"its rows have {len(rows)} bytes, more than the {MAX_ROW_BYTES} that are read")
        heads, self._rows = json.loads(rows)
        self._kinds = [all_classes()[name] for name, *_ in heads if name in all_classes()]
        self._attributes = [attributes for _, *attributes in heads]
        if len(self._kinds) < len(heads):
            raise SnapshotError("an object is of a class that the core does not have")
        self._bytes, self._names = _Read(arrays), _Read(names)
        self._num_ragged = 0
        self.objects: list[Any] = []

    def read(self) -> Any:
        """Return the object that was written."""
        if any(not name.isidentifier() or name.startswith("__") for names in self._attributes for name in names):
            raise SnapshotError("an attribute has a name that none has")
        self.objects = [self._empty(row) for row in self._rows]
        for number, row in enumerate(self._rows):
            if self.objects[number] is _A_VIEW:
                self.objects[number] = self._view(row)
        hashed = []
        for value, row in zip(self.objects, self._rows, strict=True):
            if isinstance(value, dict | set):
                hashed.append((value, row))  # once what they hash is there
            else:
                self._fill(value, row)
        for value, row in hashed:
            if isinstance(value, set):
                value.update(self._items(row[1]))
            else:
                value.update(dict(zip(self._items(row[1]), self._items(row[2]), strict=True)))  # a Counter counts pairs
        return self.objects[0]

    def _empty(self, row: list[Any]) -> Any:
        kind = self._kinds[_index(row[0])]
        if kind is deque:
            return deque(maxlen=row[2])
        if kind is bytearray:
            return bytearray(self._bytes.take(*row[1:]))
        if kind is not np.ndarray:
            return kind() if kind in _CONTAINERS else object.__new__(kind)
        if row[1] == "O":
            return np.full(len(row[3]) - 1, None, np.object_)
        _, dtype, shape, begin, *rest = row
        if rest and isinstance(rest[0], list):
            return _A_VIEW
        content = np.frombuffer(bytearray(self._bytes.take(begin, rest[0])), _DTYPES[dtype])
        return content.reshape(shape) if len(rest) == 1 else self._ragged(shape, content, rest[1])

    def _ragged(self, shape: list[int], content: _Array, lengths: list[int]) -> _Array:
        self._num_ragged += math.prod(map(_index, shape))
        if self._num_ragged > _MAX_RAGGED:
            raise SnapshotError("its planners have more places for tokens than are read")
        array: _Array = np.zeros(shape, content.dtype)
        ends = np.cumsum(lengths).tolist()
        for row, begin, end in zip(array, [0, *ends], ends, strict=False):
            row[: end - begin] = content[begin:end]
        return array

    def _view(self, row: list[Any]) -> _Array:
        _, dtype, shape, begin, (owner, *strides) = row
        base = self.objects[_index(owner)]
        array: _Array = np.ndarray(shape, _DTYPES[dtype], base, begin, strides)
        if array.nbytes > memoryview(base).nbytes:
            raise SnapshotError("a view is larger than what it is a view of")
        return array

    def _fill(self, value: Any, row: list[Any]) -> None:
        if isinstance(value, list | deque):
            value.extend(self._items(row[1]))
        elif isinstance(value, np.ndarray):
            if value.dtype == np.object_:
                value[:] = self._items(row[3])
        elif not isinstance(value, bytearray):
            if len(row) != 1 + len(names := self._attributes[row[0]]):
                raise SnapshotError(f"a {type(value).__name__} has {len(row) - 1} attributes instead of {len(names)}")
            for name, item in zip(names, row[1:], strict=True):
                object.__setattr__(value, name, self._value(item))  # frozen ones too

    def _value(self, value: Any) -> Any:
        if type(value) is not list:
            return _checked(value)
        tag, *rest = value
        if type(tag) is int:
            if _index(tag) >= len(self.objects):
                raise SnapshotError(f"object {tag} is not there")
            return self.objects[tag]
        if tag == "b":
            return self._bytes.take(*rest)
        if tag == "names":
            return self._names.take(*rest)
        if tag in ("t", "f"):
            return (tuple if tag == "t" else frozenset)(map(self._value, rest))
        kind: Any = self._kinds[_index(rest[0])]
        if tag == "e" and issubclass(kind, enum.Enum):
            return kind[rest[1]]
        if tag == "n" and issubclass(kind, tuple):
            return kind(*map(self._value, rest[1:]))
        raise SnapshotError("a value is of no kind that is written")

    def _items(self, items: list[Any]) -> list[Any]:
        tag, *rest = items
        if tag == "names":
            names = self._names.take(*rest)
            single = [names[start : start + BLOCK_NAME_BYTES] for start in range(0, len(names), BLOCK_NAME_BYTES)]
            return [b"" if name == _NO_NAME else name for name in single]
        if tag == "ints":
            integers: list[Any] = np.frombuffer(self._bytes.take(*rest), "<i8").tolist()
            return integers
        return list(map(self._value, rest))


def _index(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise SnapshotError(f"{_shown(value)} stands where a number of something should")
    return value


def _checked(value: Any) -> Any:
    """Return a plain value that is not larger than any that is written."""
    is_huge = type(value) is int and value.bit_length() > _MAX_INT_BITS
    if is_huge or (type(value) is float and not (abs(value) <= _MAX_FLOAT or math.isinf(value))):
        raise SnapshotError(f"{_shown(value)} is no number that is written")
    if type(value) not in _PLAIN:
        raise SnapshotError(f"{_shown(value)} is no value that is written")
    return value


def _shown(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} {str(value)[:40]!r}" if isinstance(value, int | float | str) else kind


def copied(value: Any) -> Any:
    """Return a copy of an object, and of all that it refers to."""
    return StateReader(*StateWriter({}).write([value])).read()[0]


# What was read, beside what was made anew -------------------------------------------------------------


def complete(made: list[Any], read: list[Any]) -> None:
    """Give what was read what is not written, from what was made anew with the same limits, and compare the two.

    Arrays have the sizes that they have there, and numbers are not much larger: so no loop is much longer, either.

    Raises: SnapshotError: they do not fit.
    """
    pairs = list(zip(made, read, strict=True))
    read_of = {id(fresh): found for fresh, found in pairs}
    for fresh, found in pairs:  # they grow meanwhile
        if type(found) is not type(fresh):
            raise SnapshotError(f"a {type(found).__name__} stands where a {type(fresh).__name__} should")
        for name, value in _attributes(fresh).items():
            if isinstance(value, _MADE_ANEW):
                object.__setattr__(found, name, value)
                continue
            other: Any = getattr(found, name, None)
            inner = [(value, other)] if _is_object(value) or isinstance(value, np.ndarray) else []
            if isinstance(value, list | tuple) and any(map(_is_object, value)) and type(other) is type(value):
                inner = list(zip(value, other, strict=True))
            if not (inner or _may_be(name, value, other)):
                raise SnapshotError(f"{_shown(other)} stands where {name} of a {type(fresh).__name__} should")
            for one, its in inner:
                if isinstance(one, np.ndarray) and not (
                    isinstance(its, np.ndarray) and its.shape == one.shape and its.dtype == one.dtype
                ):
                    raise SnapshotError(f"{name} of a {type(fresh).__name__} has another size")
                if id(one) not in read_of and _is_object(one):
                    pairs.append((one, its))
                if read_of.setdefault(id(one), its) is not its:
                    raise SnapshotError(f"{name} of a {type(fresh).__name__} is another one")


def _may_be(name: str, value: Any, other: Any) -> bool:
    """Return whether an attribute that begins with a value may have another one."""
    if type(value) is int and type(other) is int:
        return not value or name in _SETS_OF_PLANNERS or 0 <= other <= _GROWTH * value
    if type(value) is list and type(other) is list:
        return not value or len(other) <= len(value)
    return value is None or type(other) is type(value) or (type(value), type(other)) == (float, int)
