from typing import Any

import openai
import pytest
from pydantic import BaseModel

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.tool_calls.tool_choice import MAX_TOOLS, check_tools
from tests.support.each_row import each_row


def tool(name: Any = "now", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


class Now(BaseModel):
    """The time."""

    zone: str


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@each_row(None, "auto")
def test_tools_are_taken_as_they_were_sent(choice: str | None) -> None:
    tools = [tool("get-weather_2", parameters=SCHEMA, description="d", strict=False), tool("now", description=None)]

    checked = check_tools(tools, choice, parallel_tool_calls=True)

    assert checked is not None
    assert checked.definitions == tools
    assert checked.schemas == {"get-weather_2": SCHEMA, "now": {}}


@each_row((None, None), (None, "none"), ([tool()], "none"))
def test_there_are_no_tools_without_tools_or_with_choice_none(tools: list[Any] | None, choice: str | None) -> None:
    assert check_tools(tools, choice) is None


NAMED = {"type": "function", "function": {"name": "now"}}


@each_row(
    ([tool("then")], NAMED, "tool_choice.function.name", '"now"; it must be the name of a function in tools'),
    ([tool()], {"type": "function", "function": "now"}, "tool_choice.function.name", "unset"),
    ([tool()], {"type": "allowed_tools"}, "tool_choice", '"allowed_tools"}; it must be "auto", "none", "required", or'),
    ([tool()], "any", "tool_choice", 'is "any"; it must be "auto", "none", "required", or {"type": "function"'),
    ([tool()], ["none"], "tool_choice", '"auto", "none"'),
    (None, "auto", "tool_choice", "without tools"),
    (None, NAMED, "tool_choice", "without tools"),
    ([], None, "tools", "tools is empty; it must be 1 to 128 tools long"),
    ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], None, "tools", "129 tools long"),
    (["now"], None, "tools[0]", "an object"),
    ([tool(), {"type": "custom", "custom": {"name": "x"}}], None, "tools[1].type", '"custom"; it must be "function"'),
    ([{"type": "function", "name": "now"}], None, "tools[0].function", "unset; it must be an object"),
    ([tool("get weather")], None, "tools[0].function.name", '"get weather"'),
    ([tool("f" * 129)], None, "tools[0].function.name", "1 to 128"),
    ([tool(None)], "none", "tools[0].function.name", "unset"),
    ([tool(), tool()], None, "tools[1].function.name", '"now"; it must be a unique name'),
    ([tool(description=1)], None, "tools[0].function.description", "a string"),
    ([tool(parameters=[])], None, "tools[0].function.parameters", "a JSON schema"),
    ([tool(strict="yes")], None, "tools[0].function.strict", '"yes"; it must be true, false, or unset'),
    (
        [tool(strict=True, parameters={"type": "array"})],
        None,
        "tools[0].function.parameters",
        '"type": "object", as the',
    ),
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(
    tools: list[Any] | None, choice: Any, field: str, says: str
) -> None:
    with pytest.raises(InvalidFieldError, match=says) as caught:
        check_tools(tools, choice)

    assert caught.value.field == field


def test_parallel_calls_are_no_matter_without_tools() -> None:
    with pytest.raises(InvalidFieldError, match="parallel_tool_calls"):
        check_tools(None, parallel_tool_calls=False)


STRICT = [openai.pydantic_function_tool(Now), tool("then")]


@each_row(
    ([tool()], {}, None, set()),
    ([tool()], {"tool_choice": "required"}, ("tool_choice", '"required"'), {"now"}),
    ([tool(), tool("then")], {"tool_choice": NAMED}, ("tool_choice", "a function"), {"now"}),
    ([tool()], {"parallel_tool_calls": False}, ("parallel_tool_calls", "false"), set()),
    (STRICT, {}, ("tools[0].function.strict", "true"), set()),
    (STRICT, {"tool_choice": NAMED}, ("tool_choice", "a function"), {"now"}),
)
def test_what_only_a_grammar_holds_is_told(
    tools: list[Any], fields: dict[str, Any], holds: tuple[str, str] | None, forced: set[str]
) -> None:
    tools = [{**one, "function": {**one["function"], "name": one["function"]["name"].lower()}} for one in tools]
    checked = check_tools(tools, **fields)
    assert checked is not None
    assert (checked.holds, {*checked.forced}) == (holds, forced)
