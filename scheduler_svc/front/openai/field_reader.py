"""Makes the fields of a request from its JSON object, and reports what is wrong."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.fields import Message, RequestFields, StreamOptions
from scheduler_svc.front.openai.messages import PART_NOTES
from scheduler_svc.front.openai.other_fields import NO_EFFECT, NO_EFFECT_IN_COMPLETIONS, REFUSED, FieldRule
from scheduler_svc.front.openai.unknown_fields import in_place_of, inside, refusal_of
from scheduler_svc.front.text.json_text import shown_json

_Fields = TypeVar("_Fields", bound=RequestFields)

IGNORED_HEADER = "x-octavo-ignored-fields"

# All but printable ASCII, and the comma, which separates names.
_NOT_IN_HEADERS = re.compile(r"[^\x20-\x2b\x2d-\x7e]")


# How many ignored fields an answer names.
_MAX_NAMED = 32


class UnknownFields(Enum):
    """What becomes of unknown fields."""

    REFUSE = "refuse"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class OtherFields:
    """The fields of an API that are not carried, and where unknown ones may be inside others.

    Attributes:
        no_effect: By name.
        refused: By name.
        inside: Yields the paths of unknown fields inside the fields of a request, but for the notes in parts.
        known_inside: The names that are known there.
    """

    no_effect: Mapping[str, FieldRule]
    refused: Mapping[str, FieldRule]
    inside: Callable[[RequestFields, Collection[str]], Iterator[str]]
    known_inside: Iterable[str]


OPENAI = OtherFields(
    {**NO_EFFECT, **NO_EFFECT_IN_COMPLETIONS}, REFUSED, inside, (*Message.model_fields, *StreamOptions.model_fields)
)


class Reader:
    """Makes the fields of requests from JSON objects.

    Args:
        unknown: What becomes of unknown fields.
        others: The fields of the API that are not carried.
    """

    def __init__(self, unknown: UnknownFields, others: OtherFields = OPENAI) -> None:
        self._unknown = unknown
        self._others = others

    def read(self, parsed: dict[str, Any], kind: type[_Fields], headers: dict[str, str]) -> _Fields:
        """Return the fields; the names of unknown ones that are ignored go into `headers`.

        Raises: OctavoServiceError: one is refused, unknown, or of a wrong type.
        """
        try:
            fields = kind.model_validate(parsed)
        except ValidationError as error:
            raise _first_of(error, kind) from error
        # A field that is null is unset, known or not.
        ignored = [name for name, value in (fields.model_extra or {}).items() if not self._is_known(name, value)]
        refuses = self._unknown is UnknownFields.REFUSE
        ignored += islice(self._others.inside(fields, PART_NOTES if refuses else ()), _MAX_NAMED)
        if ignored and refuses:
            raise refusal_of(ignored[0], kind, self._others.no_effect, self._others.known_inside)
        name_ignored(headers, [*self._told(fields.model_extra or {}), *ignored])
        return fields

    def _told(self, extra: Mapping[str, object]) -> Iterator[str]:
        """Yield the fields without effect that an answer names."""
        for name, value in extra.items():
            rule = self._others.no_effect.get(name)
            if rule is not None and rule.is_told and value is not None and value not in rule.neutral:
                yield name

    def _is_known(self, name: str, value: object) -> bool:
        """Return whether a field that is not carried is known. Raises ApiError: it is refused."""
        if name in self._others.no_effect or value is None:
            return True
        rule = self._others.refused.get(name)
        if rule is None:
            return False
        if any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
            return True
        allowed = " or ".join(["unset", *map(shown_json, rule.neutral)])
        raise ApiError(
            HTTPStatus.BAD_REQUEST,
            f"{name} is {shown_json(value)}; it must be {allowed}: {rule.why}",
            param=name,
            code="unsupported_parameter",
        )


# Pydantic's types of errors, and the end of the sentence "... must be".
_RULES = {
    "missing": "set",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "literal_error": "one of the values in the API's specification",
}


def _first_of(error: ValidationError, kind: type[RequestFields]) -> InvalidFieldError:
    """Return the first error, in our words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [part if isinstance(part, int) else str(part)[:64] for part in problem["loc"]]
    # After a field that has several types, pydantic names the type that it tried.
    path = [
        part
        for part in place
        if isinstance(part, int) or (not part.endswith("]") and part not in ("str", "bool", "function-before"))
    ]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    rule = _RULES.get(problem["type"], problem["msg"])
    if problem["type"] == "missing":
        rule += in_place_of(str(path[-1]), problem["input"], kind if len(path) == 1 else None)
        return InvalidFieldError(name, "absent", rule)
    if path and path[0] == "stop":
        rule = "a string, or an array of strings"
    return InvalidFieldError(name, shown_json(problem["input"]), rule)


def name_ignored(headers: dict[str, str], names: Sequence[str]) -> None:
    """Add the names of fields that are ignored to the headers of an answer."""
    if names:
        shown = [headers[IGNORED_HEADER]] if IGNORED_HEADER in headers else []
        headers[IGNORED_HEADER] = ", ".join((*shown, *map(_header_name, names[:_MAX_NAMED])))


def _header_name(name: str) -> str:
    """Return a name as a header can hold it, in a list."""
    return _NOT_IN_HEADERS.sub("?", name[:64])
