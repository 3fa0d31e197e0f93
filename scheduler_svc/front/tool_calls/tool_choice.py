"""What a chat request says of tools, checked: `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.json_text import shown_json

MAX_TOOLS = 128  # as at OpenAI
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = '"auto" or "none"'
_CANNOT_FORCE = "this server cannot force a model to call a tool"


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The tools of a request.

    Attributes:
        definitions: As the client sent them; the chat template gets them like this.
        schemas: The JSON schema of each tool's arguments, by name.
    """

    definitions: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, object]]


def check_tools(
    tools: Sequence[Any] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
) -> RequestedTools | None:
    """Return the tools that the model may call; None: there are none, or `tool_choice` is none.

    With `tool_choice` none the template gets no tools either, as nothing else keeps a model from calling them.

    Raises: InvalidFieldError: a field is wrong, or asks for what this server does not do.
    """
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidFieldError("tool_choice", _shown(tool_choice), 'unset or "none" in a request without tools')
        if parallel_tool_calls is not None:
            shown = _shown(parallel_tool_calls)
            raise InvalidFieldError("parallel_tool_calls", shown, "unset in a request without tools")
        return None
    if not 1 <= len(tools) <= MAX_TOOLS:
        shown = f"{len(tools)} tools long" if tools else "empty"
        raise InvalidFieldError("tools", shown, f"1 to {MAX_TOOLS} tools long, or unset")
    schemas: dict[str, Mapping[str, object]] = {}
    for place, tool in enumerate(tools):
        name, schema = _check_tool(tool, f"tools[{place}]")
        if name in schemas:
            rule = "a unique name"
            raise InvalidFieldError(f"tools[{place}].function.name", shown_json(name), rule)
        schemas[name] = schema
    if not _check_choice(tool_choice):
        return None
    if parallel_tool_calls is False:
        rule = "unset or true: this server cannot prevent parallel tool calls"
        raise InvalidFieldError("parallel_tool_calls", "false", rule)
    return RequestedTools(tools, schemas)


def _check_choice(tool_choice: object) -> bool:
    """Return whether the model may call tools."""
    if isinstance(tool_choice, Mapping):
        shown = f"an object of type {shown_json(tool_choice.get('type'))}"
        raise InvalidFieldError("tool_choice", shown, f"{_CHOICES}: {_CANNOT_FORCE}")
    if tool_choice == "required":
        raise InvalidFieldError("tool_choice", '"required"', f"{_CHOICES}: {_CANNOT_FORCE}")
    if tool_choice not in (None, "auto", "none"):
        raise InvalidFieldError("tool_choice", _shown(tool_choice), _CHOICES)
    return tool_choice != "none"


def _check_tool(tool: Any, field: str) -> tuple[str, Mapping[str, object]]:
    """Return the name of a tool and the schema of its arguments."""
    if not isinstance(tool, Mapping):
        raise InvalidFieldError(field, _shown(tool), "an object")
    if tool.get("type") != "function":
        raise InvalidFieldError(f"{field}.type", _shown(tool.get("type")), '"function"')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidFieldError(f"{field}.function", _shown(function), "an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidFieldError(f"{field}.function.name", _shown(name), "1 to 64 of a-z, A-Z, 0-9, _ and -")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise InvalidFieldError(f"{field}.function.description", _shown(description), "a string, or unset")
    schema = function.get("parameters")
    if not isinstance(schema, Mapping | None):
        raise InvalidFieldError(f"{field}.function.parameters", _shown(schema), "a JSON schema, or unset")
    if function.get("strict"):
        rule = (
            "unset or false: this server cannot enforce a schema. openai.pydantic_function_tool sets it: "
            'set tool["function"]["strict"] = False afterwards, and validate the arguments of calls'
        )
        raise InvalidFieldError(f"{field}.function.strict", "true", rule)
    return name, schema or {}


def _shown(value: Any) -> str:
    return "unset" if value is None else shown_json(value)
