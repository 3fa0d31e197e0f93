"""JSON from clients: counted before it is parsed, so that no other request waits for it.

Building two million empty lists from 4 MiB of JSON takes so long that every stream would stop meanwhile.
"""

import json
import re
from typing import Any, TypeVar

from pydantic_core import from_json

from octavo_shared.errors import CallerError, InvalidFieldError

_T = TypeVar("_T", dict[str, Any], list[Any])

# Lists, objects and their elements; this many take some 10 ms. A prompt of token ids may have about as many.
MAX_ELEMENTS = 2**18

# Names in objects; this many take some 20 ms. The longest conversation may have about as many.
MAX_NAMES = 2**16

# A string, or a character that begins an element or a value with a name. A string without an end goes to the end of the
# text: searching for its end again behind each of its quotation marks would take hours.
_STRING_OR_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{,:]', re.DOTALL)


# Lazy, so that it costs no more than what is shown.
_ENCODER = json.JSONEncoder(ensure_ascii=False)

_MAX_SHOWN_CHARS = 100


class MalformedJsonError(CallerError):
    """A text is not JSON, or has too many elements; the message is the end of the sentence "it is not JSON: ..."."""


def load_json(text: bytes) -> Any:
    """Return what a JSON text holds. Raises MalformedJsonError: see there."""
    _check_counts(text)
    try:
        return from_json(text, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise MalformedJsonError(str(error)) from error


def parse_json(text: str, field: str, kind: type[_T]) -> _T:
    """Return the object or the list in a field of a request; an empty text stands for an empty one.

    Raises: InvalidFieldError: the text is not JSON of this type.
    """
    if not text:
        return kind()
    rule = "a JSON object" if kind is dict else "a JSON array"
    try:
        value = load_json(text.encode())
    except MalformedJsonError as error:
        raise InvalidFieldError(field, text, f"{rule} ({error})") from error
    if not isinstance(value, kind):
        raise InvalidFieldError(field, text, rule)
    return value


def shown_json(value: object) -> str:
    """Return the beginning of a value as JSON, for a sentence about it."""
    text = ""
    for piece in _ENCODER.iterencode(value):
        text += piece
        if len(text) > _MAX_SHOWN_CHARS:
            return f"{text[:_MAX_SHOWN_CHARS]}..."
    return text


def _check_counts(text: bytes) -> None:
    """Refuse a text with too many elements or names; what is in its strings does not count."""
    num_elements, num_names = text.count(b",") + text.count(b"[") + text.count(b"{"), text.count(b":")
    if num_elements > MAX_ELEMENTS or num_names > MAX_NAMES:
        num_elements = num_names = 0
        for match in _STRING_OR_MARK.finditer(text):  # other threads run between its turns
            mark = text[match.start()]
            num_names += mark == ord(":")
            num_elements += mark in b"[{,"
            if num_elements > MAX_ELEMENTS:
                raise MalformedJsonError(f"it has more than {MAX_ELEMENTS} elements in its lists and objects")
            if num_names > MAX_NAMES:
                raise MalformedJsonError(f"it has more than {MAX_NAMES} names in its objects")
