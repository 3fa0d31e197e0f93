"""Makes the fields of a request from its JSON object, and reports what is wrong, missing or unknown."""

import difflib
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
from scheduler_svc.front.openai.fields import ChatFields, CompletionFields, Message, RequestFields, StreamOptions
from scheduler_svc.front.openai.messages import PART_NOTES, REFUSED_IN_MESSAGES, TEXT_PARTS, is_empty
from scheduler_svc.front.openai.other_fields import NO_EFFECT, NO_EFFECT_IN_COMPLETIONS, REFUSED, FieldRule
from scheduler_svc.front.text.json_text import shown_json

# How alike two names are that are one name with a slip; short names that are not alike reach 0.6.
_ALIKE = 0.75

# The names by which other servers know a variable of the chat template.
_TEMPLATE_SWITCHES = ("think", "thinking", "enable_thinking")

# Where a field belongs that was sent to the other of these two paths.
_OTHERS = {
    CompletionFields: ("/v1/chat/completions", ChatFields.model_fields),
    ChatFields: ("/v1/completions", CompletionFields.model_fields),
}


def refusal_of(name: str, kind: type[RequestFields], no_effect: Iterable[str], known_inside: Iterable[str]) -> ApiError:
    """Return the refusal of a field of a request, by its path if it is inside another."""
    outer, _, inner = name.rpartition(".")
    other_path, others = _OTHERS.get(kind, ("", ()))
    advice = "remove it"
    known = known_inside if outer else (*kind.model_fields, *no_effect)
    if not outer and name in others:
        advice = f"send it to {other_path}, which has that field, or remove it"
    elif name in _TEMPLATE_SWITCHES and "chat_template_kwargs" in kind.model_fields:
        advice = (
            'pass it to the chat template, such as "chat_template_kwargs": {"enable_thinking": false}, or remove it'
        )
    elif meant := _nearest(inner, known):
        advice = f"did you mean {meant}? Otherwise remove it"
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f'"{name[:64]}" is not a field of this request; {advice}, or start the scheduler with --openai-unknown-fields '
        "ignore",
        param=name[:64],
        code="unknown_parameter",
    )


def in_place_of(missing: str, sent: Iterable[str], kind: type[RequestFields] | None = None) -> str:
    """Return the end of the rule of a field that is missing: what was sent in its place; or "" if nothing was."""
    other_path, others = _OTHERS.get(kind, ("", ())) if kind else ("", ())
    unknown = [name for name in sent if name != missing and not (kind and name in kind.model_fields)]
    for name in unknown:
        if name in others and {name, missing} == {"prompt", "messages"}:
            return f': the request has "{name}", a field of {other_path}'
    alike = _nearest(missing, unknown)
    return f': the request has "{alike[:64]}" in its place' if alike else ""


def _nearest(name: str, candidates: Iterable[str]) -> str | None:
    by_small_letters = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name[:64].lower(), list(by_small_letters)[:256], n=1, cutoff=_ALIKE)
    return by_small_letters[close[0]] if close else None


def inside(fields: RequestFields, notes: Collection[str] = PART_NOTES) -> Iterator[str]:
    """Yield the paths of unknown fields in messages, in parts that are texts, and in options of a stream.

    Args:
        fields: Of a request.
        notes: Fields of parts that are not named.
    """
    carried = type(fields).model_fields  # the values of other fields are unchecked
    options = getattr(fields, "stream_options", None) if "stream_options" in carried else None
    for name, value in ((options and options.model_extra) or {}).items():
        if value is not None:
            yield f"stream_options.{name}"
    messages: Sequence[Message] = (getattr(fields, "messages", None) if "messages" in carried else None) or ()
    for place, message in enumerate(messages):
        for name, value in (message.model_extra or {}).items():
            if name not in REFUSED_IN_MESSAGES and not is_empty(value):
                yield f"messages[{place}].{name}"
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                yield from (f"messages[{place}].content[{number}].{name}" for name in _unknown_in_part(part, notes))


def _unknown_in_part(part: object, notes: Collection[str]) -> Iterator[str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and kind in TEXT_PARTS:
        yield from (name for name, value in part.items() if name not in ("type", kind, *notes) and value is not None)


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
