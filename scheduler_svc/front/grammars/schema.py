"""A JSON schema, checked before it is compiled: every keyword is held or a note, and every `$ref` leads somewhere.

Places are JSON pointers, such as `#/properties/city`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.keywords import FORMATS, Inside, Verdict, keyword_of
from scheduler_svc.front.grammars.patterns import control_in, lone_control, with_ascii_classes
from scheduler_svc.front.text.json_text import shown_json

# What may stand between the parts of JSON: nothing, a space, or a line break with an indent. Without a bound a model
# could write white space until its output is cut.
WHITE_SPACE = r" ?|\n {0,20}"
# With `\u` among the escapes, a property that may come behind the named ones could be one of them in disguise.
OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, "json_allowed_escapes": 'nrbtf\\"'}

# What stays with a part of a schema that is looked at alone, so that its references lead somewhere.
_DEFINITIONS = ("$defs", "definitions")


def checked_schema(schema: object, field: str) -> dict[str, Any]:
    """Return a schema as the matcher takes it, once it holds nothing that would be passed over.

    Args:
        schema: What the client sent.
        field: What errors call it.

    Raises: InvalidFieldError: with the place of what is wrong.
    """
    if not isinstance(schema, dict):
        raise InvalidFieldError(field, shown_json(schema), "a JSON schema: an object")
    places: dict[str, Any] = {}
    for place, inner in subschemas(schema):
        places[place] = inner
        _check_keywords(inner, place, field)
    for place, inner in places.items():
        _check_reference(inner, place, places, field)
    references = (inner["$ref"] for inner in places.values() if isinstance(inner, dict) and "$ref" in inner)
    if not any("oneOf" in reference for reference in references):  # it would lead nowhere
        schema = _with_any_of(schema, places)
    return {**_with_ascii_patterns(schema), "x-guidance": OPTIONS}


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all schemas inside one, itself first, with their places; true and false are schemas too."""
    todo: list[tuple[str, Any]] = [("#", schema)]
    while todo:
        place, inner = todo.pop()
        yield place, inner
        if isinstance(inner, dict):
            found = [(f"{place}/{path}", value) for path, value in _inside(inner)]
            todo += reversed(found)


def alone(schema: Mapping[str, Any], inner: Any) -> dict[str, Any]:
    """Return a schema inside another one as one of its own."""
    kept = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {**kept, **(inner if isinstance(inner, dict) else {"allOf": [inner]}), "x-guidance": OPTIONS}


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas one level below, with the rest of their place."""
    for name, value in schema.items():
        known = keyword_of(name)
        inside = Inside.NOTHING if known is None else known.inside
        if inside is Inside.BY_NAME and isinstance(value, dict):
            yield from ((f"{name}/{_escaped(key)}", inner) for key, inner in value.items())
        elif inside in (Inside.LIST, Inside.ITEMS) and isinstance(value, list):
            yield from ((f"{name}/{index}", inner) for index, inner in enumerate(value))
        elif inside in (Inside.ONE, Inside.ITEMS):
            yield name, value


def _check_keywords(schema: object, place: str, field: str) -> None:
    if not isinstance(schema, dict | bool):
        shown = f"a schema with {shown_json(schema)} at {place}"
        raise InvalidFieldError(field, shown, "made of objects, true and false")
    if isinstance(schema, bool):
        return
    for name, value in schema.items():
        known, shown = keyword_of(name), f"a schema with {shown_json(name)} at {place}"
        if known is None:
            raise InvalidFieldError(field, shown, "one without keywords that nobody knows: they would not be held")
        if known.verdict is Verdict.REFUSED:
            raise InvalidFieldError(field, shown, f"one without it: {known.why}")
        if name == "format" and value not in FORMATS:
            shown = f'a schema with "format": {shown_json(value)} at {place}'
            raise InvalidFieldError(field, shown, f"one without it: the formats are {', '.join(FORMATS)}")
        if name == "multipleOf" and not (type(value) in (int, float) and value > 0):
            shown = f'a schema with "multipleOf": {shown_json(value)} at {place}'
            raise InvalidFieldError(field, shown, "one with a number above 0 there")
        if (control := _control(name, value)) is not None:
            raise InvalidFieldError(field, shown, f"one without the control character {control} there")
    required = schema.get("required")
    most = 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)
    if isinstance(num := schema.get("minProperties"), int) and num > most:
        shown = f'a schema with "minProperties": {num} at {place}'
        rule = (
            f"one with at most {most} there: as many as are required and one; any other may come twice, and counts once"
        )
        raise InvalidFieldError(field, shown, rule)
    if "$id" in schema and place != "#":
        raise InvalidFieldError(field, f'a schema with "$id" at {place}', "one with `$id` at the root only")


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


def _check_reference(schema: object, place: str, places: Mapping[str, Any], field: str) -> None:
    if isinstance(schema, dict) and "$ref" in schema and _target(schema["$ref"]) not in places:
        shown = f'a schema with "$ref": {shown_json(schema["$ref"])} at {place}'
        raise InvalidFieldError(field, shown, "one whose references lead to schemas inside it, such as #/$defs/Item")


def _target(reference: object) -> str | None:
    """Return the place that a reference leads to, spelled as `subschemas` does; None: it is no text."""
    if not isinstance(reference, str):
        return None
    parts = unquote(reference).split("/")
    return "/".join((parts[0], *(_escaped(part.replace("~1", "/").replace("~0", "~")) for part in parts[1:])))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _with_any_of(schema: Any, places: Mapping[str, Any]) -> Any:
    """Return a schema whose `oneOf`s are `anyOf`s where that is the same, as no value can fit two of their schemas.

    The library sees that only of types, not of the constants behind references that tell pydantic's unions apart.
    """
    if not isinstance(schema, dict):
        return schema
    changed = _mapped(schema, partial(_with_any_of, places=places))
    is_same = "oneOf" in schema and "anyOf" not in schema and _are_apart(schema["oneOf"], places)
    return {"anyOf" if name == "oneOf" and is_same else name: value for name, value in changed.items()}


def _with_ascii_patterns(schema: Any) -> Any:
    """Return a schema whose patterns mean the same to the matcher as to those who validate."""
    if not isinstance(schema, dict):
        return schema
    result = {**schema}
    if isinstance(schema.get("pattern"), str):
        result["pattern"] = with_ascii_classes(schema["pattern"])
    if isinstance(schema.get("patternProperties"), dict):
        result["patternProperties"] = {
            with_ascii_classes(key): value for key, value in schema["patternProperties"].items()
        }
    return _mapped(result, _with_ascii_patterns)


def _mapped(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema with those one level below changed."""
    result: dict[str, Any] = {}
    for name, value in schema.items():
        known = keyword_of(name)
        match known.inside if known is not None else Inside.NOTHING, value:
            case (Inside.BY_NAME, dict()):
                result[name] = {key: change(inner) for key, inner in value.items()}
            case (Inside.LIST | Inside.ITEMS, list()):
                result[name] = [change(inner) for inner in value]
            case (Inside.ONE | Inside.ITEMS, _):
                result[name] = change(value)
            case _:
                result[name] = value
    return result


def _are_apart(options: object, places: Mapping[str, Any]) -> bool:
    """Return whether a required property has other constants in each of these objects."""
    if not isinstance(options, list) or not options:
        return False
    tags = [_tags(option, places) for option in options]
    for name in tags[0]:
        if all(name in one for one in tags):
            values = [value for one in tags for value in one[name]]
            if len(set(values)) == len(values):
                return True
    return False


def _tags(schema: Any, places: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the texts that each required property of an object may be, where it is one of some texts."""
    seen: set[str | None] = set()
    while isinstance(schema, dict) and "$ref" in schema and (target := _target(schema["$ref"])) not in seen:
        seen.add(target)
        schema = places.get(target or "")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    tags = {}
    for name, inner in properties.items():
        values = ([inner["const"]] if "const" in inner else inner.get("enum")) if isinstance(inner, dict) else None
        if name in required and isinstance(values, list) and all(isinstance(value, str) for value in values):
            tags[name] = tuple(values)
    return tags
