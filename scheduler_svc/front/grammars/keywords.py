"""The keywords of JSON Schema: which are held, which say nothing about a value, which are refused, and why.

The matcher's library ignores keywords that it does not know. So a schema may have only these.
docs/structured-output.md has the table; a test asks the library about every row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What becomes of a keyword."""

    HELD = "held"
    NOTE = "a note"
    REFUSED = "refused"


class Inside(Enum):
    """Which schemas the value of a keyword has."""

    NOTHING = "none"
    ONE = "a schema"
    ITEMS = "a schema, or a list of them"
    LIST = "a list of schemas"
    BY_NAME = "schemas by name"


@dataclass(frozen=True, slots=True)
class Keyword:
    """A keyword.

    Attributes:
        verdict: What becomes of it.
        why: Of a held one: within which bounds, if there are any. Of a note: what it is. Of a refused one: why.
        inside: The schemas in its value.
    """

    verdict: Verdict
    why: str = ""
    inside: Inside = Inside.NOTHING


def _held(why: str = "", inside: Inside = Inside.NOTHING) -> Keyword:
    return Keyword(Verdict.HELD, why, inside)


def _note(why: str) -> Keyword:
    return Keyword(Verdict.NOTE, why)


def _refused(why: str) -> Keyword:
    return Keyword(Verdict.REFUSED, why)


# The values of `format` that are held.
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")

_FOR_PEOPLE = "for people"
_LATER_TOKENS = "it depends on values that came before"
_EVALUATED = "which properties or items other keywords have seen is not known; use `additionalProperties` or `items`"
_DYNAMIC = "the target of the reference is not known beforehand; use `$ref`"
_CONDITION = "write the cases as `anyOf`"

_CONTROLS = "without control characters that have no short escape, such as `\\n`"

KEYWORDS: Mapping[str, Keyword] = {
    "type": _held(),
    "enum": _held(_CONTROLS),
    "const": _held(_CONTROLS),
    "properties": _held("they come in the order of the schema", Inside.BY_NAME),
    "required": _held(),
    "additionalProperties": _held("they come behind the named ones; absent: any may come", Inside.ONE),
    "patternProperties": _held(inside=Inside.BY_NAME),
    "minProperties": _held("up to 1 more than `required` has; from 2 on only if all of `properties` are required"),
    "maxProperties": _held("only if all of `properties` are required"),
    "items": _held(inside=Inside.ITEMS),
    "prefixItems": _held(inside=Inside.LIST),
    "additionalItems": _held("behind a list in `items`", Inside.ONE),
    "minItems": _held(),
    "maxItems": _held(),
    "minLength": _held(),
    "maxLength": _held(),
    "pattern": _held("without look-around and back-references; it may match anywhere in the string"),
    "format": _held(
        ", ".join(f"`{name}`" for name in FORMATS) + "; any other is refused. Dates exist, and seconds are 00 to 59"
    ),
    "minimum": _held(),
    "maximum": _held(),
    "exclusiveMinimum": _held("a number, or true as in draft 4"),
    "exclusiveMaximum": _held("a number, or true as in draft 4"),
    "multipleOf": _held("above 0"),
    "anyOf": _held(inside=Inside.LIST),
    "allOf": _held("as far as the schemas can be joined into one", Inside.LIST),
    "oneOf": _held("if no value fits two: other types, or a required property with other constants", Inside.LIST),
    "$ref": _held("to a place in the schema, such as `#/$defs/Item` or `#`"),
    "$defs": _held(inside=Inside.BY_NAME),
    "definitions": _held(inside=Inside.BY_NAME),
    "title": _note(_FOR_PEOPLE),
    "description": _note(_FOR_PEOPLE),
    "default": _note(_FOR_PEOPLE),
    "examples": _note(_FOR_PEOPLE),
    "example": _note("OpenAPI's `examples`"),
    "deprecated": _note(_FOR_PEOPLE),
    "readOnly": _note(_FOR_PEOPLE),
    "writeOnly": _note(_FOR_PEOPLE),
    "$comment": _note(_FOR_PEOPLE),
    "$schema": _note("a draft from 4 to 2020-12; all are read alike"),
    "$id": _note("at the root only"),
    "$anchor": _note("no `$ref` leads to it"),
    "contentEncoding": _note("of what the string holds"),
    "contentMediaType": _note("of what the string holds"),
    "contentSchema": _note("of what the string holds"),
    "discriminator": _note("OpenAPI's, beside `oneOf`, which tells the cases apart itself"),
    "externalDocs": _note("OpenAPI's, for people"),
    "not": _refused("write what is allowed"),
    "if": _refused(_CONDITION),
    "then": _refused(_CONDITION),
    "else": _refused(_CONDITION),
    "uniqueItems": _refused(_LATER_TOKENS),
    "contains": _refused(_LATER_TOKENS),
    "minContains": _refused(_LATER_TOKENS),
    "maxContains": _refused(_LATER_TOKENS),
    "dependentRequired": _refused(_CONDITION),
    "dependentSchemas": _refused(_CONDITION),
    "dependencies": _refused(_CONDITION),
    "propertyNames": _refused("use `patternProperties` with `additionalProperties` false"),
    "unevaluatedProperties": _refused(_EVALUATED),
    "unevaluatedItems": _refused(_EVALUATED),
    "$dynamicRef": _refused(_DYNAMIC),
    "$dynamicAnchor": _refused(_DYNAMIC),
    "$recursiveRef": _refused(_DYNAMIC),
    "$recursiveAnchor": _refused(_DYNAMIC),
    "nullable": _refused('OpenAPI 3.0\'s; write `"type": ["string", "null"]`'),
    "x-guidance": _refused("no request sets the options of the matcher"),
}

# Extensions of OpenAPI, for other programs; `x-guidance` is a row of its own.
NOTE_PREFIX = "x-"


def keyword_of(name: str) -> Keyword | None:
    """Return what is known of a keyword; None: it is unknown."""
    known = KEYWORDS.get(name)
    if known is None and name.startswith(NOTE_PREFIX):
        return _note("an extension")
    return known
