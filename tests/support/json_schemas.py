"""JSON schemas of every kind, by name, and the check that a text is what its schema says."""

import json
import re
from datetime import datetime
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(least: int = 0, most: int = 99, **more: Any) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, **more}


def array(items: Schema, most: int = 3, **more: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": most, **more}


def closed(properties: dict[str, Any], **more: Any) -> Schema:
    """Return an object with these properties and no other; all are required unless `more` says otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


def nested(depth: int) -> Schema:
    return closed({"name": text(4)} if not depth else {"level": {"const": depth}, "inner": nested(depth - 1)})


# No output of these is longer than this many bytes, so each of them ends by itself.
MOST_BYTES = 2000
BOUNDED: dict[str, Schema] = {
    "flat": closed({"city": text(12), "people": whole(), "is_capital": {"type": "boolean"}}),
    "nothing required": closed({"a": whole(), "b": text(), "c": {"type": "null"}}, required=[]),
    "some required": closed({"a": whole(), "b": text(), "c": whole(), "d": text()}, required=["b", "d"]),
    "nested": nested(4),
    "enum": {"enum": ["red", "green", 5, None, True, [1, "a"], {"k": "v"}]},
    "enum of text": closed({"colour": {"enum": ["röd", "grün", "青", 'q"uote', "back\\slash"]}}),
    "const": closed({"version": {"const": 3}, "kind": {"const": "a\nb\t/"}, "empty": {"const": {}}}),
    "pattern": closed({"code": text(40, pattern=r"^[A-Z]{2}-\d{4}$"), "hex": text(9, pattern="^#([0-9a-f]{3}){1,2}$")}),
    "pattern anywhere": text(6, pattern="a|b"),
    "pattern of words": text(20, pattern=r"^\w+(\s\w+){0,2}$"),
    "lengths": closed({"two": text(2, minLength=2), "few": text(5, minLength=1), "none": text(0)}),
    "integers": array(whole(-5, 5), 4, minItems=4),
    "exclusive bounds": closed({"a": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 12}}),
    "multiples": array(whole(0, 900, multipleOf=7), 3, minItems=1),
    "array of arrays": array(array(whole(), 3, minItems=1), 3, minItems=2),
    "tuple": {"type": "array", "prefixItems": [whole(), text(), {"type": "boolean"}], "items": False, "minItems": 3},
    "tuple with a tail": array(whole(), 4, prefixItems=[text(3)], minItems=1),
    "empty array": array(whole(), 0),
    "union": {"anyOf": [text(5), whole(), {"type": "null"}, closed({"a": whole()})]},
    "types": {"type": ["boolean", "null", "string"], "maxLength": 4},
    "tagged union": {
        "oneOf": [closed({"kind": {"const": "dot"}, "x": whole()}), closed({"kind": {"const": "line"}, "to": text(3)})]
    },
    "optional by union": closed({"a": {"anyOf": [whole(), {"type": "null"}]}, "b": {"anyOf": [text(), {"const": 0}]}}),
    "all of": {"allOf": [text(9), {"minLength": 3}, {"pattern": "^[a-f]*$"}]},
    "references": closed(
        {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        **{"$defs": {"point": closed({"x": whole(), "y": whole()})}},
    ),
    "escaped reference": {"$ref": "#/definitions/a~1b", "definitions": {"a/b": array(text(2), 2)}},
    "unicode keys": closed({"größe": whole(), "ключ": text(3), "键": {"type": "boolean"}, "🔑": {"type": "null"}}),
    "keys with marks": closed({'a"b': whole(), "c\\d": whole(), "e/f": whole(), "g\nh": whole(), "": whole()}),
    "dates": closed({"day": text(10, format="date"), "id": text(36, format="uuid")}),
    "addresses": closed({"v4": text(15, format="ipv4"), "v6": text(45, format="ipv6")}),
    "names of the net": closed({"host": text(20, format="hostname"), "mail": text(24, format="email")}),
    "deep required list": closed({f"field_{i}": whole(0, 1) for i in range(20)}),
    "wide choice": {"enum": [f"option {i}" for i in range(300)]},
    "properties by pattern": {
        "type": "object",
        "patternProperties": {"^[ab]{1,3}$": whole()},
        "additionalProperties": False,
        "maxProperties": 3,
    },
}
# These may go on for ever.
ENDLESS: dict[str, Schema] = {
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed({"v": whole(), "next": array({"$ref": "#/$defs/node"})})},
    },
    "list by reference": closed({"v": whole(), "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "others beside named": closed({"a": whole()}, additionalProperties=text(3), maxProperties=2, minProperties=2),
    "any object": {"type": "object"},
    "any others": {"type": "object", "properties": {"a": whole(), "ä": whole()}, "required": ["ä"]},
    "numbers": array({"type": "number", "minimum": -1.5, "maximum": 2.25}, 9),
    "moments": closed({"at": {"type": "string", "format": "date-time"}, "site": {"type": "string", "format": "uri"}}),
}
SCHEMAS = BOUNDED | ENDLESS

FORMATS = FormatChecker(("date", "ipv4", "ipv6", "uuid", "email"))


@FORMATS.checks("date-time", ValueError)
def _is_moment(value: object) -> bool:
    value = str(value)
    datetime.fromisoformat(value[:10])
    return re.fullmatch(r"\S{10}[Tt ][0-2]\d:[0-5]\d:[0-6]\d(\.\d+)?([Zz]|[+-][0-2]\d:[0-5]\d)", value) is not None


@FORMATS.checks("hostname")
def _is_host(value: object) -> bool:
    return all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", label) for label in str(value).split("."))


@FORMATS.checks("uri")
def _is_uri(value: object) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*$", str(value)) is not None


def require_valid(schema: Schema, output: str) -> None:
    """Fail unless a text is JSON that a schema allows."""
    Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(output))
