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
    ([tool()], "required", "tool_choice", "cannot force"),
    ([tool()], NAMED, "tool_choice", 'an object of type "function"; it must be "auto" or "none"'),
    ([tool()], {"type": "allowed_tools"}, "tool_choice", '"allowed_tools"'),
    ([tool()], "any", "tool_choice", 'is "any"; it must be "auto" or "none"$'),
    ([tool()], ["none"], "tool_choice", '"auto" or "none"'),
    (None, "auto", "tool_choice", "without tools"),
    (None, NAMED, "tool_choice", "without tools"),
    ([], None, "tools", "tools is empty; it must be 1 to 128 tools long"),
    ([tool(f"f{n}") for n in range(MAX_TOOLS + 1)], None, "tools", "129 tools long"),
    ([openai.pydantic_function_tool(Now)], None, "tools[0].function.strict", r'\["strict"\] = False afterwards'),
    (["now"], None, "tools[0]", "an object"),
    ([tool(), {"type": "custom", "custom": {"name": "x"}}], None, "tools[1].type", '"custom"; it must be "function"'),
    ([{"type": "function", "name": "now"}], None, "tools[0].function", "unset; it must be an object"),
    ([tool("get weather")], None, "tools[0].function.name", '"get weather"'),
    ([tool("f" * 65)], None, "tools[0].function.name", "1 to 64"),
    ([tool(None)], "none", "tools[0].function.name", "unset"),
    ([tool(), tool()], None, "tools[1].function.name", '"now"; it must be another name'),
    ([tool(description=1)], None, "tools[0].function.description", "a text"),
    ([tool(parameters=[])], None, "tools[0].function.parameters", "a JSON schema"),
    ([tool(strict=True)], None, "tools[0].function.strict", "true"),
)
def test_what_is_wrong_or_cannot_be_done_is_refused_by_name(
    tools: list[Any] | None, choice: Any, field: str, says: str
) -> None:
    with pytest.raises(InvalidFieldError, match=says) as caught:
        check_tools(tools, choice)

    assert caught.value.field == field


@each_row(None, [tool()])
def test_parallel_calls_cannot_be_switched_off(tools: list[Any] | None) -> None:
    with pytest.raises(InvalidFieldError, match="parallel_tool_calls"):
        check_tools(tools, parallel_tool_calls=False)
