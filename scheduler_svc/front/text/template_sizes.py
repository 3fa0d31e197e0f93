"""Bounds on the size of an operation's result in a chat template, known before it runs: nothing can stop it midway.

Each function here returns an upper bound in characters, except for escapes, which lengthen a text up to twelvefold.
Operators, filters and methods that are not here make nothing longer than their input. `template_sandbox.py` uses this.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from jinja2.utils import Namespace

# Anything longer is not measured to its end.
MAX_TEXT_CHARS = 16 * 1024 * 1024
_MAX_LISTS = 100_000  # as many as the numbers of a range in Jinja's sandbox
_MAX_DIGITS = 100
_LINK_CHARS = 200  # the HTML around a link

# Flags, width and precision of a field; a name before them ends with a bracket.
_PERCENT_FIELD = re.compile(r"[%)][#0\- +]*(\d+|\*)?(?:\.(\d+|\*))?")


def text_size(value: object) -> int:
    """Return the length of a value as a text, counting each thing in it as often as it appears."""
    return _text_size(value, {})


def _text_size(value: object, known: dict[int, int]) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")  # its only readable attribute
    if not isinstance(value, Collection):
        return 32
    if id(value) not in known:
        known[id(value)] = 0  # a value that contains itself is written once
        size = 4
        for item in [*value.keys(), *value.values()] if isinstance(value, Mapping) else value:
            size += 2 + _text_size(item, known)
            if size > MAX_TEXT_CHARS:
                break
        known[id(value)] = size
    return known[id(value)]


def repeated_size(left: object, right: object) -> int:
    """Return the size of `left * right`, one of which is a text, a list or a tuple; of numbers 0."""
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, str | bytes | list | tuple) and isinstance(right, int) else 0


def percent_size(text: object, values: object) -> float:
    """Return the size of `text % values`; infinite if a width is among the values."""
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    numbers = [number for field in _PERCENT_FIELD.findall(text) for number in field if number]
    if "*" in numbers or any(len(number) > _MAX_DIGITS for number in numbers):
        return math.inf
    often = text.count("%") if isinstance(values, Mapping) else 1
    return len(text) + sum(map(int, numbers)) + often * text_size(values)


def _replaced(text: object, old: object, new: object, count: object = None, **_: object) -> int:
    text, old, new = (value if isinstance(value, bytes) else str(value) for value in (text, old, new))
    most = text.count(old)  # type: ignore[arg-type]  # of one kind, or the method fails
    return text_size(text) + most * len(new)


def _indented(text: str, width: int | str = 4, *_: object, **__: object) -> int:
    return len(text) + (len(text.splitlines()) + 1) * (len(width) if isinstance(width, str) else width)


def _joined(items: Collection[object], separator: object = "", *_: object, **__: object) -> int:
    return text_size(items) + len(items) * len(str(separator))


def _wrapped(
    text: object,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    *_: object,
    **__: object,
) -> int:
    return text_size(text) * (1 + len(wrapstring or ""))


def _linked(
    text: object, trim: object = None, nofollow: object = False, target: object = "", rel: object = "", *_: object
) -> int:
    text = str(text)
    return len(text) + len(text.split()) * (_LINK_CHARS + len(str(target)) + len(str(rel)))


def _whole(value: object, *_: object, **__: object) -> int:
    return text_size(value)


def _lists(value: object, count: int, *_: object, **__: object) -> float:
    return 0 if count <= _MAX_LISTS else math.inf


def _rounded(value: object, precision: int = 0, *_: object, **__: object) -> float:
    return 0 if abs(precision) <= _MAX_DIGITS else math.inf


def _as_json(
    value: object, ensure_ascii: bool = False, indent: object = None, separators: Any = None, sort_keys: bool = False
) -> int:
    return text_size(value) * (1 + sum(map(len, separators or ())))  # indents are measured as they are made


FILTERS: Final[Mapping[str, Callable[..., float]]] = MappingProxyType(
    {
        # These turn any value into a text.
        **dict.fromkeys(("capitalize", "e", "escape", "forceescape", "lower", "string", "striptags", "title"), _whole),
        **dict.fromkeys(("trim", "truncate", "upper", "urlencode", "wordcount", "xmlattr"), _whole),
        # And these keep another copy of each item.
        **dict.fromkeys(("dictsort", "groupby", "sort", "sum", "unique"), _whole),
        "batch": _lists,
        "center": lambda value, width=80: text_size(value) + width,
        "format": lambda text, *values, **named: percent_size(text, named or values),
        "indent": _indented,
        "join": _joined,
        "pprint": lambda value: text_size(value) ** 2,  # each line may be indented as far as the text is long
        "replace": _replaced,
        "round": _rounded,
        "slice": _lists,
        "tojson": _as_json,
        "urlize": _linked,
        "wordwrap": _wrapped,
    }
)
"""By filter: what returns the size of its result, given its arguments."""

METHODS: Final[Mapping[str, Callable[..., float]]] = MappingProxyType(
    {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), lambda text, width, *_: len(text) + width),
        "expandtabs": lambda text, tabsize=8: len(text) + len(text) * tabsize,
        "join": lambda separator, items: _joined(items, separator),
        "replace": _replaced,
        "translate": lambda text, table, **_: len(text) * max([1, *map(text_size, _values(table))]),
    }
)
"""By method of texts and bytes: the same, given the text and the arguments."""


def _values(table: object) -> Collection[object]:
    return table.values() if isinstance(table, Mapping) else table if isinstance(table, list | tuple) else ()
