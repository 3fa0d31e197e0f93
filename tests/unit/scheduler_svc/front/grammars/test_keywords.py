"""Every row of the table of keywords, asked of llguidance itself."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from octavo_shared.errors import InvalidFieldError
from octavo_shared.grammar.matcher import check_grammar
from scheduler_svc.front.grammars.keywords import FORMATS, KEYWORDS, Verdict
from scheduler_svc.front.grammars.parts import schema_part, whole
from scheduler_svc.front.grammars.reading import read_grammar
from scheduler_svc.front.grammars.schema import checked_schema
from tests.support.each_row import each_row
from tests.support.grammars import byte_matcher, is_followed

STRING = {"type": "string"}
OBJECT = {"type": "object"}
A = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}


# By keyword: a schema with it, a text that fits, and one that would fit without it.
HELD: dict[str, tuple[dict[str, Any], str, str]] = {
    "type": ({"type": ["string", "null"]}, "null", "1"),
    "enum": ({"enum": ["é", 1, None]}, '"é"', '"e"'),
    "const": ({"const": {"a": [1]}}, '{"a": [1]}', '{"a": [2]}'),
    "properties": (A, '{"a": 1}', '{"a": "1"}'),
    "required": ({**A, "required": ["a"]}, '{"a": 1}', "{}"),
    "additionalProperties": ({**A, "additionalProperties": False}, '{"a": 1}', '{"a": 1, "b": 2}'),
    "patternProperties": ({**OBJECT, "patternProperties": {"^n": {"type": "integer"}}}, '{"n1": 1}', '{"n1": "1"}'),
    "minProperties": ({**A, "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 2}', '{"a": 1}'),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, '{"a": 1}', '{"a": 1, "b": 2}'),
    "items": ({"type": "array", "items": {"type": "integer"}}, "[1, 2]", '["1"]'),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "integer"}]}, '[1, "2"]', '["1"]'),
    "additionalItems": ({"type": "array", "items": [STRING], "additionalItems": False}, '["a"]', '["a", 1]'),
    "minItems": ({"type": "array", "minItems": 2}, "[1, 2]", "[1]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1, 2]"),
    "minLength": ({**STRING, "minLength": 2}, '"éé"', '"é"'),
    "maxLength": ({**STRING, "maxLength": 1}, '"é"', '"éé"'),
    "pattern": ({**STRING, "pattern": "a|b"}, '"xbx"', '"xcx"'),
    "format": ({**STRING, "format": "date"}, '"2026-02-28"', '"2026-02-30"'),
    "minimum": ({"type": "integer", "minimum": 7}, "7", "6"),
    "maximum": ({"type": "integer", "maximum": 7}, "7", "8"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 7}, "8", "7"),
    "exclusiveMaximum": ({"type": "integer", "maximum": 7, "exclusiveMaximum": True}, "6", "7"),
    "multipleOf": ({"type": "integer", "multipleOf": 7}, "14", "15"),
    "anyOf": ({"anyOf": [STRING, {"type": "null"}]}, "null", "1"),
    "allOf": ({"allOf": [STRING, {"maxLength": 1}]}, '"a"', '"aa"'),
    "oneOf": (
        {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": tagged("x"), "y": tagged("y")}},
        '{"kind": "y"}',
        '{"kind": "z"}',
    ),
    "$ref": ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]", "[1]"),
    "$defs": ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": STRING}}, '"a"', "1"),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": STRING}}, '"a"', "1"),
}

# By keyword: a value, for the schemas that it is beside.
NOTES: dict[str, Any] = {
    **dict.fromkeys(("title", "description", "$comment", "contentEncoding", "contentMediaType"), "x"),
    **dict.fromkeys(("deprecated", "readOnly", "writeOnly"), True),
    "default": 5,
    "examples": [5],
    "example": 5,
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/a",
    "$anchor": "here",
    "contentSchema": {"type": "integer"},
    "discriminator": {"propertyName": "kind"},
    "externalDocs": {"url": "https://example.com"},
    "x-order": 1,
}

# By keyword: a value. The library says nothing of the last ones, and would not hold them.
REFUSED: dict[str, Any] = {
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems"), STRING),
    "uniqueItems": True,
    "minContains": 1,
    "maxContains": 1,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "$dynamicAnchor": "a",
    "$recursiveRef": "#",
    "$recursiveAnchor": True,
    "nullable": True,
    "x-guidance": {"lenient": True},
}
SILENT = {"nullable", "x-guidance"}


def words_of_library(schema: dict[str, Any]) -> str:
    """Return what llguidance says of a schema as it is; empty: nothing."""
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher.validate_grammar(grammar, byte_matcher().loaded)


def test_the_rows_are_those_of_the_table() -> None:
    rows = {Verdict.HELD: {*HELD}, Verdict.NOTE: {*NOTES} - {"x-order"}, Verdict.REFUSED: {*REFUSED}}
    for verdict, names in rows.items():
        assert {name for name, known in KEYWORDS.items() if known.verdict is verdict} == names


@each_row(*HELD)
def test_a_keyword_that_is_held_lets_through_what_fits_and_nothing_else(name: str) -> None:
    schema, fitting, other = HELD[name]
    grammar = read_grammar(whole(schema_part(schema, "schema")))[1]
    assert is_followed(grammar, fitting)
    assert not is_followed(grammar, other)


@each_row(*NOTES)
def test_a_note_changes_nothing(name: str) -> None:
    grammar = read_grammar(whole(schema_part({**STRING, name: NOTES[name]}, "schema")))[1]
    assert is_followed(grammar, '"any text"')
    assert not is_followed(grammar, "5")


@each_row(*REFUSED)
def test_a_refused_keyword_is_named_with_its_place_and_not_left_to_the_library(name: str) -> None:
    schema = {"type": "object", "properties": {"a/b": {"anyOf": [STRING, {name: REFUSED[name]}]}}}
    with pytest.raises(InvalidFieldError) as caught:
        checked_schema(schema, "schema")
    sentence = f'schema is a schema with "{name}" at #/properties/a~1b/anyOf/1; it must be one without it'
    assert str(caught.value).startswith(sentence)
    says = words_of_library({name: REFUSED[name]})
    assert ("Unimplemented keys" in says) == (name not in SILENT)


def test_the_formats_are_those_of_the_library() -> None:
    others = (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex", "binary", "byte", "int32", "float", "password", "path", "json-string"),
    )
    for name in FORMATS:
        assert not words_of_library({**STRING, "format": name}), name
    for name in others:
        assert "Unknown format" in words_of_library({**STRING, "format": name}), name
    for name in (*others, "unknown"):
        with pytest.raises(InvalidFieldError, match=f'"format": "{name}" at #; it must be one without it: the formats'):
            checked_schema({**STRING, "format": name}, "schema")


@each_row(
    ({"foo": 1}, 'a schema with "foo" at #; it must be one without unknown'),
    ({"$defs": {"a": {"Type": "string"}}}, 'a schema with "Type" at #/$defs/a; it must be one without unknown'),
    ({"items": [{}, {"foo": 1}]}, 'a schema with "foo" at #/items/1; '),
    ({"properties": {"a": 1}}, "a schema with 1 at #/properties/a; it must be made of objects, true and false"),
    ({"$ref": "#/$defs/a"}, 'a schema with "$ref": "#/$defs/a" at #; it must be one whose references lead to schemas'),
    ({"$ref": "#/properties/a/default", "properties": {"a": {"default": {}}}}, 'a schema with "$ref": '),
    ({"$ref": "https://example.com/x"}, 'a schema with "$ref": "https://example.com/x" at #; '),
    ({"$ref": 5}, 'a schema with "$ref": 5 at #; '),
    ({"properties": {"a": {"$id": "x"}}}, 'a schema with "$id" at #/properties/a; it must be one with `$id` at the ro'),
    ({"multipleOf": -1}, 'a schema with "multipleOf": -1 at #; it must be one with a number above 0 there'),
    ({"minProperties": 2}, 'a schema with "minProperties": 2 at #; it must be one with at most 1 there: as many as '),
    ({"const": {"a": ["\x01"]}}, 'a schema with "const" at #; it must be one without the control character \\u0001'),
    ({"enum": ["a", {"b\x7f": 1}]}, 'a schema with "enum" at #; it must be one without the control character \\u007f'),
    ({"pattern": "^a\x01"}, 'a schema with "pattern" at #; it must be one without the control character \\u0001'),
    ({"pattern": r"^a\\\x1f"}, 'a schema with "pattern" at #; it must be one without the control character \\x1f'),
    ({"pattern": r"[\u0001]x"}, 'a schema with "pattern" at #; it must be one without the control character \\u0001'),
    ({"patternProperties": {r"\v": {}}}, 'a schema with "patternProperties" at #; it must be one without the control'),
    (["string"], '["string"]; it must be a JSON schema: an object'),
    (True, "true; it must be a JSON schema: an object"),
)
def test_what_the_library_would_pass_over_or_tell_without_a_place_is_refused(schema: Any, sentence: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        checked_schema(schema, "schema")
    assert str(caught.value).startswith(f"schema is {sentence}")


@each_row(
    {"oneOf": [STRING, {"type": "string", "maxLength": 1}]},
    {"oneOf": [tagged("x"), tagged("x")]},
    {"oneOf": [{**tagged("x"), "required": []}, {**tagged("y"), "required": []}]},
    {"oneOf": [{"$ref": "#/oneOf/1"}, tagged("y")]},
)
def test_alternatives_that_a_value_may_fit_two_of_stay_refused(schema: dict[str, Any]) -> None:
    assert check_grammar(byte_matcher(), read_grammar(whole(schema_part(schema, "schema")))[1])


@each_row(
    ({**A, "additionalProperties": STRING}, r'{"\u0061":"x"}', '{"b":"x"}'),
    ({**A, "patternProperties": {"^x": {"type": "integer"}}}, r'{"\u0078":"x"}', '{"x":1}'),
    (STRING, r'"\ud83d"', r'"\b\f\n\r\t\"\\é😀"'),
    ({**STRING, "pattern": r"^[^\x00-\x1f]\\x1f$"}, r'"\u001f\\x1f"', r'"a\\x1f"'),
)
def test_a_character_has_one_spelling_so_no_name_or_text_comes_in_disguise(
    schema: dict[str, Any], disguised: str, plain: str
) -> None:
    grammar = read_grammar(whole(schema_part(schema, "schema")))[1]
    assert is_followed(grammar, plain)
    assert not is_followed(grammar, disguised)


def test_white_space_is_bounded() -> None:
    grammar = read_grammar(whole(schema_part({**A, "required": ["a"], "additionalProperties": False}, "schema")))[1]
    for text in ('{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{ "a" : 1 }'):
        assert is_followed(grammar, text), text
    for text in ('{  "a":1}', '{\n\n"a":1}', "{\n" + " " * 21 + '"a":1}', ' {"a":1}', '{"a":1} '):
        assert not is_followed(grammar, text), text


@each_row(
    (r"^\d+$", ["12"], ["1\N{ARABIC-INDIC DIGIT TWO}", ""]),
    (r"^[\d-]\D$", ["-a", "1a"], ["\N{ARABIC-INDIC DIGIT TWO}a", "11"]),
    (r"^\w[^\w]$", ["a é"[:1] + "-"], ["é-", "aa"]),
    (r"^a\sb\\d$", [r"a b\\d"], ["a\N{NO-BREAK SPACE}b\\\\d", r"a b\\1"]),
)
def test_classes_of_characters_are_those_of_ascii(pattern: str, fitting: list[str], others: list[str]) -> None:
    grammar = read_grammar(whole(schema_part({**STRING, "pattern": pattern}, "schema")))[1]
    for text in fitting:
        assert is_followed(grammar, f'"{text}"'), text
    for text in others:
        assert not is_followed(grammar, f'"{text}"'), text


@each_row(
    ("date", "2023-02-28 2024-02-29 2000-02-29 0000-02-29 2023-01-31 2023-04-30 2023-12-31",
     "2023-02-29 1900-02-29 2023-02-30 2024-02-30 2023-04-31 2023-11-31 2023-01-32 2023-00-01 2023-13-01 2023-01-00"),
    ("time", "00:00:00Z 23:59:59.125+23:59 12:00:00-00:00",
     "24:00:00Z 12:60:00Z 12:00:60Z 12:00:60 12:00:00 12:00Z 12:00:00.Z 12:00:00+24:00 12:00:00+01:60 12:00:00+0100"),
    ("date-time", "2024-02-29T23:59:59Z 2023-12-31T00:00:00.5-08:00",
     "2023-02-29T00:00:00Z 2023-01-01T24:00:00Z 2023-06-30T23:59:60Z 2023-01-01T00:00:00 2023-01-01T00:00Z"),
)  # fmt: skip
def test_dates_and_times_are_those_that_exist(name: str, fitting: str, others: str) -> None:
    grammar = read_grammar(whole(schema_part({"items": {**STRING, "format": name}}, "schema")))[1]
    for text in fitting.split():
        assert is_followed(grammar, f'["{text}"]'), text
    for text in others.split():
        assert not is_followed(grammar, f'["{text}"]'), text


@each_row({"pattern": "^2023"}, {"pattern": "^2", "allOf": [{"pattern": "^.023"}]}, {"allOf": [{"pattern": "^2023"}]})
def test_a_date_holds_beside_patterns(beside: dict[str, Any]) -> None:
    grammar = read_grammar(whole(schema_part({**STRING, "format": "date", **beside}, "schema")))[1]
    assert is_followed(grammar, '"2023-02-28"')
    for text in ("2023-02-29", "2024-02-29", "2023"):
        assert not is_followed(grammar, f'"{text}"'), text
