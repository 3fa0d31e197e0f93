"""Arguments whose text says nothing of their types: the tool's schema does."""

import json
from typing import Any, Literal

import openai
from pydantic import BaseModel

from scheduler_svc.front.tool_calls.tool_choice import check_tools
from scheduler_svc.front.tool_calls.xml_call import types_of
from tests.support.each_row import each_row
from tests.unit.scheduler_svc.front.tool_calls.parsing import parse


@each_row(
    ("city", "\n 12 \n", " 12 "),
    ("days", "\n12\n", 12),
    ("days", "12.5", "12.5"),
    ("days", "true", "true"),
    ("share", "1", 1),
    ("share", "null", None),
    ("share", "NaN", "NaN"),
    ("exact", "True", True),
    ("exact", "0", "0"),
    ("places", '["a"]', ["a"]),
    ("places", "[a", "[a"),
    ("places", "12", "12"),
    ("unknown", "12", "12"),
    ("city", "True", "True"),
    ("city", "a <", "a <"),
    ("city", '"<a> </param" \\n', '"<a> </param" \\n'),
    ("share", "None", None),
    ("places", "('a', 1)", ["a", 1]),
    ("places", "{'a'}", "{'a'}"),
)
def test_schema_says_which_arguments_of_xml_are_strings(key: str, text: str, value: object) -> None:
    call = f"<tool_call><function=get_weather><parameter={key}>{text}</parameter></function></tool_call>"

    ((_, arguments),) = parse("qwen3_coder", [call]).calls

    assert json.loads(arguments) == {key: value}


class Place(BaseModel):
    name: str
    inside: "Place | None" = None


class Trip(BaseModel):
    """Plan a trip."""

    to: Place
    stops: list[Place] | None = None
    mode: Literal["train", "1"] = "train"


def test_types_are_found_in_the_schemas_of_pydantic() -> None:
    tool: Any = openai.pydantic_function_tool(Trip)
    schema = tool["function"]["parameters"]

    types = {key: types_of(schema, key) for key in ("to", "stops", "mode", "none")}

    assert types == {"to": {"object"}, "stops": {"array", "null"}, "mode": {"string"}, "none": set()}
    tool["function"]["strict"] = False  # as the refusal says
    assert check_tools([tool]) is not None


@each_row(
    {},
    {"properties": []},
    {"properties": {"a": {"$ref": "#/properties/a"}}},  # without an end
    {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 2000}}},
    {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(2000)}},
    {"properties": {"a": {"$ref": "https://example.com/x"}}},
    {"properties": {"a": {"$ref": 5, "type": 5, "anyOf": 5}}},
)
def test_schemas_that_say_nothing_of_an_argument(schema: dict[str, object]) -> None:
    assert types_of(schema, "a") == frozenset()
