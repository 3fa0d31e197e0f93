"""Makes the fields of a request from its JSON object, and says what is wrong with one."""

import re
from enum import Enum
from http import HTTPStatus
from reprlib import Repr
from typing import Any, TypeVar

from pydantic import ValidationError

from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.fields import RequestFields
from scheduler_svc.front.openai.other_fields import NO_EFFECT, REFUSED
from shared.errors import InvalidFieldError

_Fields = TypeVar("_Fields", bound=RequestFields)

IGNORED_HEADER = "x-octavo-ignored-fields"

# All but ASCII that prints, and the comma, which is between names.
_NOT_IN_HEADERS = re.compile(r"[^\x20-\x2b\x2d-\x7e]")

_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 100


class UnknownFields(Enum):
    """What becomes of fields that nobody knows."""

    REFUSE = "refuse"
    IGNORE = "ignore"


class Reader:
    """Makes the fields of requests from JSON objects.

    Args:
        unknown: What becomes of fields that nobody knows.
    """

    def __init__(self, unknown: UnknownFields) -> None:
        self._unknown = unknown

    def read(self, parsed: dict[str, Any], kind: type[_Fields], headers: dict[str, str]) -> _Fields:
        """Return the fields; the names of unknown ones that are ignored go into `headers`.

        Raises: OctavoServiceError: one is refused, unknown, or of a wrong type.
        """
        try:
            fields = kind.model_validate(parsed)
        except ValidationError as error:
            raise _first_of(error) from error
        ignored = [name for name in fields.model_extra or () if not _is_known(name, parsed[name])]
        if ignored and self._unknown is UnknownFields.REFUSE:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"{ignored[0][:64]!r} is not a field of this request; leave it out, or start the scheduler with "
                "--openai-unknown-fields ignore",
                param=ignored[0][:64],
                code="unknown_parameter",
            )
        if ignored:
            headers[IGNORED_HEADER] = ", ".join(map(_header_name, ignored[:32]))
        return fields


def _is_known(name: str, value: object) -> bool:
    """Return whether a field that is not carried is known. Raises ApiError: it is refused."""
    if name in NO_EFFECT:
        return True
    rule = REFUSED.get(name)
    if rule is None:
        return False
    if value is None or any(value == neutral and type(value) is type(neutral) for neutral in rule.neutral):
        return True
    allowed = " or ".join(["unset", *map(_shown, rule.neutral)])
    raise ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{name} is {_shown(value)}; it must be {allowed}: {rule.why}",
        param=name,
        code="unsupported_parameter",
    )


# What pydantic calls a mistake, and the end of the sentence "... must be".
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
    "literal_error": "one of the values that the API names",
}


def _first_of(error: ValidationError) -> InvalidFieldError:
    """Return what is wrong first, in our words."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = [str(part)[:64] for part in problem["loc"]]
    # Behind a field that has several types comes the type that was tried.
    path = [part for part in place if not part.endswith("]") and part not in ("str", "bool", "function-before")]
    value = "absent" if problem["type"] == "missing" else _shown(problem["input"])
    rule = _RULES.get(problem["type"], problem["msg"])
    if path == ["stop"] or (path and path[0] == "stop"):
        rule = "a text, or an array of texts"
    return InvalidFieldError(".".join(path), value, rule)


def _shown(value: object) -> str:
    """Return the beginning of a value, however large it is."""
    if isinstance(value, bool):
        return str(value).lower()
    return _REPR.repr(value)


def _header_name(name: str) -> str:
    """Return a name as a header can hold it, in a list."""
    return _NOT_IN_HEADERS.sub("?", name[:64])
