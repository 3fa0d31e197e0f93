"""Grammars of which one mask would hold up a step are refused; others are not."""

import json
from typing import Any

import pytest

from octavo_shared.grammar.matcher import GrammarLimitError
from scheduler_svc.front.grammars.mask_cost import MAX_OPTIONAL, MAX_OPTIONAL_IN_FRONT, too_dear
from scheduler_svc.front.grammars.parts import schema_part, whole
from scheduler_svc.front.grammars.reading import read_grammar
from tests.support.each_row import each_row
from tests.support.grammars import num_followed


def within(pattern: str) -> dict[str, Any]:
    """Return rules whose first position says nothing of the expression."""
    return {"json_schema": {"type": "object", "properties": {"a": {"pattern": pattern}}, "required": ["a"]}}


def lark(text: str) -> dict[str, Any]:
    return {"lark_grammar": text}


def of_properties(num: int, **keywords: Any) -> dict[str, Any]:
    """Return rules of an object with so many properties."""
    return {"json_schema": {"properties": {f"p{index}": {} for index in range(num)}, **keywords}}


OPTIONAL, LOOSE = "the squares of their numbers", "alternatives and parts"


@each_row(
    (within("^" + "a?" * 40_000 + "$"), OPTIONAL),
    (within("^" + "a{0,1}" * 1300), OPTIONAL),
    (within("^" + "(a|)" * 1300), OPTIONAL),
    (within("^" + "(?:|a)" * 1300), OPTIONAL),
    (within("^" + r"\(?" * 1300), OPTIONAL),
    (within("(?x)" + "(a|#\n)" * 1300), OPTIONAL),
    ({"json_schema": {"patternProperties": {f"^{'a?' * 300}{number}$": {} for number in range(20)}}}, OPTIONAL),
    (lark('start: "x" T\nA: "a"?\nB: ' + "A " * 100 + "\nT: " + "B " * 100), OPTIONAL),
    (lark('start: "x" T\nT\n : ' + '"a"? ' * 1300), OPTIONAL),
    (lark("start: /x/ /" + "a?" * 1300 + "/"), OPTIONAL),
    (lark('start: "xy" ' + "a " * 50_000 + '\na: "a"?'), LOOSE),
    (of_properties(6000, required=["p0"]), LOOSE),
    (of_properties(499), "the object at # has 499 optional properties and none that is required; the limit is 498"),
    ({"json_schema": {"items": of_properties(499)["json_schema"]}}, "at #/items has 499"),
    (of_properties(669, required=["p668"]), "668 optional properties in front of its first required one; the"),
    ({"json_schema": {"items": {"anyOf": [{"const": number} for number in range(6000)]}}}, LOOSE),
)
def test_what_may_be_absent_too_often_is_refused(rules: dict[str, Any], words: str) -> None:
    assert words in too_dear(rules)


@each_row(
    within("a" * 200_000),
    within("|".join(f"k{number}" for number in range(20_000))),
    within("(.{0,100000}a){0,50}"),
    {"json_schema": {"enum": [f"text {number}" for number in range(16_000)]}},
    {"json_schema": {"type": "array", "minItems": 10_000, "maxItems": 20_000}},
    {"json_schema": {"properties": {f"p{number}": {"pattern": "^a?b*$"} for number in range(498)}}},
    of_properties(1000, required=["p0"]),
    lark("start: " + " | ".join(json.dumps(f"text {number}?") for number in range(1024))),
    lark('start: a "b"? b*\na: A | B\nb: a?\nA: /x?/\nB: A A'),
)
def test_large_grammars_whose_masks_are_cheap_pass(rules: dict[str, Any]) -> None:
    assert too_dear(rules) == ""


def test_terminals_that_lead_to_themselves_or_double_end_the_count() -> None:
    assert too_dear(lark('start: A\nA: B "a"?\nB: A A')) == ""
    doubling = "".join(f"A{number}: A{number + 1} A{number + 1}\n" for number in range(9000))
    assert OPTIONAL in too_dear(lark(f'start: A0\n{doubling}A9000: "a"?'))


@each_row(
    (of_properties(MAX_OPTIONAL), '{"p3": 1, "', True),
    (of_properties(MAX_OPTIONAL + 3), '{"p3": 1, "', False),
    (of_properties(MAX_OPTIONAL_IN_FRONT + 1, required=[f"p{MAX_OPTIONAL_IN_FRONT}"]), '{"p3": 1, "', True),
    (of_properties(MAX_OPTIONAL_IN_FRONT + 2, required=[f"p{MAX_OPTIONAL_IN_FRONT + 1}"]), '{"p3": 1, "', False),
)
def test_the_limits_of_properties_in_a_row_are_those_of_the_matcher(
    rules: dict[str, Any], text: str, can_follow: bool
) -> None:
    """A newer library may have others."""
    schema = {**rules["json_schema"], "type": "object", "additionalProperties": False}
    _, grammar = read_grammar(whole(schema_part(schema, "schema")))
    if can_follow:
        assert num_followed(grammar, text)[0] == len(text)
    else:
        with pytest.raises(GrammarLimitError):
            num_followed(grammar, text)
