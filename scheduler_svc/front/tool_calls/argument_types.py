"""The types that a tool's schema has for its arguments, and texts without a type as JSON."""

import json
from collections.abc import Iterator, Mapping

from scheduler_svc.front.tool_calls.python_values import value_of

_ANY_OF = ("anyOf", "oneOf", "allOf")
_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}

# Deeper than people nest types.
_MAX_DEPTH = 32


def types_of(schema: Mapping[str, object], key: str) -> frozenset[str]:
    """Return the names of the types that an argument may have; empty: the schema does not say."""
    properties = schema.get("properties")
    return frozenset(_types(properties.get(key), schema, set(), 0)) if isinstance(properties, Mapping) else frozenset()


def argument_json(value: str, types: frozenset[str]) -> str:
    """Return an argument as JSON text: a string, unless it may have another type that the text fits."""
    try:
        written, parsed = value_of(value.strip())
    except ValueError:
        return json.dumps(value, ensure_ascii=False)
    for name in types - {"string"}:
        if isinstance(parsed, _JSON_TYPES.get(name, ())) and isinstance(parsed, bool) == (name == "boolean"):
            return written
    return json.dumps(value, ensure_ascii=False)


def _types(schema: object, root: Mapping[str, object], seen: set[str], depth: int) -> Iterator[str]:
    """Yield the types that a schema names at its top, also through definitions (`$ref`) that were not seen yet."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else [name for name in _listed(named) if isinstance(name, str)]
    for keyword in _ANY_OF:
        for part in _listed(schema.get(keyword)):
            yield from _types(part, root, seen, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _types(_referred(reference, root), root, seen, depth + 1)


def _referred(reference: str, root: Mapping[str, object]) -> object:
    """Return what `#/$defs/NAME` stands for."""
    if not reference.startswith("#/"):
        return None
    found: object = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
