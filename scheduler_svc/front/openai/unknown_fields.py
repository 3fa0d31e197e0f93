"""Unknown fields, wherever they are in a request, and what was probably meant by them."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus

from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.fields import ChatFields, CompletionFields, Message, RequestFields
from scheduler_svc.front.openai.messages import PART_NOTES, REFUSED_IN_MESSAGES, TEXT_PARTS, is_empty

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
