"""A JSON schema, checked before it is compiled: every keyword is held or a note, and every `$ref` leads somewhere.

Places are JSON pointers, such as `#/properties/city`. The work grows with the text that was sent, whatever is in it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import unquote

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.keywords import FORMATS, Inside, Verdict, keyword_of
from scheduler_svc.front.text.json_text import shown_json

# What may stand between the parts of JSON: nothing, a space, or a line break with an indent. Without a bound a model
# could write white space until its output is cut.
WHITE_SPACE = r" ?|\n {0,20}"
# With `\u` among the escapes, a property that may come behind the named ones could be one of them in disguise.
OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": 'nrbtf\\"'}

# What stays with a part of a schema that is compiled alone, so that its references lead somewhere.
_DEFINITIONS = ("$defs", "definitions")

# Constants that a required property may have to tell its object from others by.
_MAX_TAG_VALUES = 256

# Keywords that a refusal shows with their values.
_SHOWN = ("format", "multipleOf")

_INDEX = re.compile("0|[1-9][0-9]{0,8}")
_NOWHERE = object()


class Place(NamedTuple):
    """A place in a schema. Places share their beginnings: a long name above many schemas is there once.

    Attributes:
        above: The schema around it; None: it is the root.
        path: From there.
    """

    above: "Place | None" = None
    path: str = "#"

    def __str__(self) -> str:
        """Return the pointer."""
        pieces, place = [self.path], self.above
        while place is not None:
            pieces.append(place.path)
            place = place.above
        return "/".join(reversed(pieces))

    def is_in(self, other: "Place") -> bool:
        """Return whether it is another place, or one below that."""
        place: Place | None = self
        while place is not None and place is not other:
            place = place.above
        return place is not None or other.above is None


def checked_schema(schema: object, field: str) -> dict[str, Any]:
    """Return a schema as the matcher takes it, once it holds nothing that would be passed over.

    Raises: InvalidFieldError: with the place of the error.
    """
    if not isinstance(schema, dict):
        raise InvalidFieldError(field, shown_json(schema), "a JSON schema: an object")
    references = _References(schema)
    places = list(subschemas(schema))
    for place, inner in places:
        _check_keywords(inner, place, field)
    sent = [(place, inner["$ref"]) for place, inner in places if isinstance(inner, dict) and "$ref" in inner]
    for place, reference in sent:
        if references.target(reference) is _NOWHERE:
            shown = f'a schema with "$ref": {shown_json(reference)} at {place}'
            raise InvalidFieldError(
                field, shown, "one whose references lead to schemas inside it, such as #/$defs/Item"
            )
    if not any("oneOf" in reference for _, reference in sent):  # the reference would lead nowhere
        schema = _with_any_of(schema, references)
    return {**_with_exact_patterns(schema), "x-guidance": OPTIONS}


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """Yield all schemas inside one, itself first, with their places; true and false are schemas too."""
    todo: list[tuple[Place, Any]] = [(Place(), schema)]
    while todo:
        place, inner = todo.pop()
        yield place, inner
        if isinstance(inner, dict):
            found = [(Place(place, path), value) for path, value in _inside(inner)]
            todo += reversed(found)


def alone(schema: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    """Return a schema inside another one as one of its own."""
    kept = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {**kept, **(inner if isinstance(inner, dict) else {"allOf": [inner]}), "x-guidance": OPTIONS}


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas one level below, with the rest of their place."""
    for name, value in schema.items():
        inside = _inside_of(name)
        if inside is Inside.BY_NAME and isinstance(value, dict):
            yield from ((f"{name}/{_escaped(key)}", inner) for key, inner in value.items())
        elif inside in (Inside.LIST, Inside.ITEMS) and isinstance(value, list):
            yield from ((f"{name}/{index}", inner) for index, inner in enumerate(value))
        elif inside in (Inside.ONE, Inside.ITEMS):
            yield name, value


def _inside_of(name: str) -> Inside:
    known = keyword_of(name)
    return Inside.NOTHING if known is None else known.inside


def _check_keywords(schema: object, place: Place, field: str) -> None:
    if not isinstance(schema, dict | bool):
        shown = f"a schema with {shown_json(schema)} at {place}"
        raise InvalidFieldError(field, shown, "made of objects, true and false")
    if isinstance(schema, bool):
        return
    for name, value in schema.items():
        if (rule := _rule_against(name, value)) is not None:
            shown = f"{shown_json(name)}: {shown_json(value)}" if name in _SHOWN else shown_json(name)
            raise InvalidFieldError(field, f"a schema with {shown} at {place}", rule)
    required = schema.get("required")
    most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
    if isinstance(num := schema.get("minProperties"), int) and num > most:
        shown = f'a schema with "minProperties": {num} at {place}'
        rule = (
            f"one with at most {most} there: as many as are required and one; any other may come twice, and counts once"
        )
        raise InvalidFieldError(field, shown, rule)
    if "$id" in schema and place.above is not None:
        raise InvalidFieldError(field, f'a schema with "$id" at {place}', "one with `$id` at the root only")


def _rule_against(name: str, value: object) -> str | None:
    """Return the rule that a keyword breaks; None: it breaks none."""
    known = keyword_of(name)
    if known is None:
        return "one without unknown keywords: they would not be held"
    if known.verdict is Verdict.REFUSED:
        return f"one without it: {known.why}"
    if name == "format" and value not in FORMATS:
        return f"one without it: the formats are {', '.join(FORMATS)}"
    if name == "multipleOf" and not (type(value) in (int, float) and value > 0):  # type: ignore[operator]
        return "one with a number above 0 there"
    control = _control(name, value)
    return None if control is None else f"one without the control character {control} there"


def _control(name: str, value: object) -> str | None:
    """Return a control character in the value of a keyword that no text of JSON has, as it is shown."""
    match name, value:
        case ("pattern", str()):
            control = lone_control(value)
        case ("patternProperties", dict()):
            control = next(filter(None, map(lone_control, value)), None)
        case ("const" | "enum", _):
            control = control_in(value)
        case _:
            return None
    return control if control is None or len(control) > 1 else f"\\u{ord(control):04x}"


class _References:
    """Where the references of a schema lead. A chain of them is followed once, however many lead into it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._ends: dict[str, Any] = {}  # by reference, after following all references
        self._tags: dict[int, dict[str, tuple[str, ...]]] = {}  # by id of the schema

    def target(self, reference: object) -> Any:
        """Return the schema that a reference leads to; `_NOWHERE`: none, or it is no text."""
        root, *names = unquote(reference).split("/") if isinstance(reference, str) else [""]
        schema: Any = self._schema if root == "#" else _NOWHERE
        pieces = iter([name.replace("~1", "/").replace("~0", "~") for name in names])
        for name in pieces:
            if not isinstance(schema, dict) or name not in schema:
                return _NOWHERE
            value = schema[name]
            match _inside_of(name), value:
                case (Inside.BY_NAME, dict()):
                    schema = value.get(next(pieces, None), _NOWHERE)
                case (Inside.LIST | Inside.ITEMS, list()):
                    index = next(pieces, "")
                    is_index = _INDEX.fullmatch(index) and int(index) < len(value)
                    schema = value[int(index)] if is_index else _NOWHERE
                case (Inside.ONE | Inside.ITEMS, _):
                    schema = value
                case _:
                    return _NOWHERE
        return schema

    def tags(self, schema: Any) -> dict[str, tuple[str, ...]]:
        """Return the texts that each required property of an object may be, where it is one of some texts."""
        end = self._end(schema)
        if (known := self._tags.get(id(end))) is None:
            known = self._tags[id(end)] = _tags(end)
        return known

    def _end(self, schema: Any) -> Any:
        followed: dict[str, None] = {}
        while isinstance(schema, dict) and "$ref" in schema:
            reference = schema["$ref"]
            if reference in self._ends or reference in followed:  # the latter: the reference leads to itself
                schema = self._ends.get(reference)
                break
            followed[reference] = None
            schema = self.target(reference)
        self._ends.update(dict.fromkeys(followed, schema))
        return schema


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _with_any_of(schema: Any, references: _References) -> Any:
    """Return a schema whose `oneOf`s are `anyOf`s where that is the same, as no value can fit two of their schemas.

    The library sees that only of types, not of the constants behind references that tell pydantic's unions apart.
    """
    if not isinstance(schema, dict):
        return schema
    changed = _mapped(schema, partial(_with_any_of, references=references))
    is_same = "oneOf" in schema and "anyOf" not in schema and _are_apart(schema["oneOf"], references)
    return {"anyOf" if name == "oneOf" and is_same else name: value for name, value in changed.items()}


def _with_exact_patterns(schema: Any) -> Any:
    """Return a schema whose patterns and formats mean the same to the matcher as to validators."""
    if not isinstance(schema, dict):
        return schema
    result = {**schema}
    if isinstance(schema.get("pattern"), str):
        result["pattern"] = with_ascii_classes(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        result["patternProperties"] = {
            with_ascii_classes(key): value for key, value in schema["patternProperties"].items()
        }
    if (of_format := FORMAT_PATTERNS.get(schema.get("format", ""))) is not None:
        del result["format"]
        if "pattern" not in schema:
            result["pattern"] = of_format
        elif isinstance(schemas := schema.get("allOf", []), list):  # else the library refuses it
            result["allOf"] = [*schemas, {"pattern": of_format}]
    return _mapped(result, _with_exact_patterns)


def _mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with those one level below changed."""
    result: dict[str, Any] = {}
    for name, value in schema.items():
        match _inside_of(name), value:
            case (Inside.BY_NAME, dict()):
                result[name] = {key: change(inner) for key, inner in value.items()}
            case (Inside.LIST | Inside.ITEMS, list()):
                result[name] = [change(inner) for inner in value]
            case (Inside.ONE | Inside.ITEMS, _):
                result[name] = change(value)
            case _:
                result[name] = value
    return result


def _are_apart(options: object, references: _References) -> bool:
    """Return whether a required property has other constants in each of these objects."""
    if not isinstance(options, list) or not options:
        return False
    tags = [references.tags(option) for option in options]
    if len(set(map(id, tags))) < len(tags):  # two are the same object
        return False
    for name in tags[0]:
        if all(name in one for one in tags):
            values = [value for one in tags for value in one[name]]
            if len(set(values)) == len(values):
                return True
    return False


def _tags(schema: Any) -> dict[str, tuple[str, ...]]:
    """See `_References.tags`; of a schema that is no reference. What has too many texts is not among them."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    tags, num_values = {}, 0
    names = {name for name in required if isinstance(name, str)}
    for name, inner in properties.items():
        values = ([inner["const"]] if "const" in inner else inner.get("enum")) if isinstance(inner, dict) else None
        if not isinstance(values, list) or num_values + len(values) > _MAX_TAG_VALUES:
            continue
        if name in names and all(isinstance(value, str) for value in values):
            tags[name] = tuple(values)
            num_values += max(1, len(values))
    return tags


# The matcher's `\d` has the digits of all scripts, in a newer Unicode version than validators have; JSON Schema's is
# 0 to 9. So these three become the characters of ASCII, which fit by either rule.
_ASCII = {r"\d": "0-9", r"\w": "A-Za-z0-9_", r"\s": r" \t\n\r\f\v"}

# A control character without a short escape, as it is and as expressions spell it: the matcher would leave it out where
# it alone may stand.
_CONTROL = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"
_ESCAPED = r"\\(?:[av0]|c.|[xu]\{?0*(?:[01][0-9a-fA-F]|[0-9a-fA-F]|7[fF])(?![0-9a-fA-F])\}?)"
_SHORT_ESCAPE = re.compile(r"\\[xu]\{?0*[89aAcCdD]\}?")
# A class without an end goes to the end of the text, so that its end is not searched again behind each bracket.
_CLASS = r"\[\^?\]?(?:\\.|[^\\\]])*+(?:\]|\\?\Z)"
_PIECE = re.compile(rf"(?P<control>{_CONTROL}|{_ESCAPED}|\[(?:{_CONTROL}|{_ESCAPED})\])|{_CLASS}|\\.|.", re.DOTALL)

# RFC 3339's dates and times, without leap seconds. The matcher's own have 29 February in every year, and second 60.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_HOUR_MINUTE})"
FORMAT_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# A character behind a backslash, or a bracket that begins or ends a class.
_MARK = re.compile(r"\\.|[\[\]]", re.DOTALL)


def with_ascii_classes(regex: str) -> str:
    """Return a regular expression in which these three stand for ASCII only."""
    depth = 0  # classes may stand in classes

    def replace(match: re.Match[str]) -> str:
        nonlocal depth
        mark = match[0]
        if mark in "[]":
            depth = max(0, depth + (1 if mark == "[" else -1))
        characters = _ASCII.get(mark)
        if characters is None:
            return mark
        return characters if depth else f"[{characters}]"

    return _MARK.sub(replace, regex)


def lone_control(regex: str) -> str | None:
    """Return a control character as it is spelled where a text must have it, if JSON has no short escape for it."""
    for piece in _PIECE.finditer(regex):
        if (control := piece["control"]) is not None and not _SHORT_ESCAPE.fullmatch(control.strip("[]")):
            return control.strip("[]")
    return None


def control_in(value: object) -> str | None:
    """Return a control character in the texts of a JSON value for which JSON has no short escape."""
    if isinstance(value, str):
        control = re.search(_CONTROL, value)
        return None if control is None else control[0]
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for inner in inside if (found := control_in(inner)) is not None), None)
