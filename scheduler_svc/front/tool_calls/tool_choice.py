"""Checks what a chat request says of tools: `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's API."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.json_text import shown_json

MAX_TOOLS = 128  # as at OpenAI
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_CHOICES = '"auto", "none", "required", or {"type": "function", "function": {"name": ...}}'


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The tools of a request.

    Attributes:
        definitions: As the client sent them, and as the chat template gets them.
        schemas: The JSON schema of each tool's arguments, by name.
        fields: The name of each schema's field in errors.
        strict: The tools whose arguments must be valid by their schema.
        forced: The tools of which the model must call one; empty: it may answer.
        is_parallel: Whether the model may call several.
    """

    definitions: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Mapping[str, object]]
    fields: Mapping[str, str] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    forced: frozenset[str] = frozenset()
    is_parallel: bool = True

    @property
    def holds(self) -> tuple[str, str] | None:
        """The field that asks for what only a grammar can enforce, and its value; None: there is none."""
        if self.forced:
            return "tool_choice", '"required"' if len(self.forced) == len(self.schemas) else "a function"
        if self.strict:
            first = next(name for name in self.schemas if name in self.strict)
            return self.fields[first].replace("parameters", "strict"), "true"
        return None if self.is_parallel else ("parallel_tool_calls", "false")


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
    paths: dict[str, str] = {}
    for place, tool in enumerate(tools):
        name, schema = _check_tool(tool, f"tools[{place}]")
        if name in schemas:
            rule = "a unique name"
            raise InvalidFieldError(f"tools[{place}].function.name", shown_json(name), rule)
        schemas[name], paths[name] = schema, f"tools[{place}].function.parameters"
    forced = _forced(tool_choice, schemas)
    if tool_choice == "none":
        return None
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    for name in strict:
        if schemas[name] and schemas[name].get("type") != "object":
            rule = 'a schema with "type": "object", as the function is strict'
            raise InvalidFieldError(paths[name], shown_json(schemas[name]), rule)
    return RequestedTools(tools, schemas, paths, strict, forced, is_parallel=parallel_tool_calls is not False)


def _forced(tool_choice: object, names: Collection[str]) -> frozenset[str]:
    """Return the tools of which the model must call one."""
    if tool_choice in (None, "auto", "none"):
        return frozenset()
    if tool_choice == "required":
        return frozenset(names)
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "function":
        raise InvalidFieldError("tool_choice", _shown(tool_choice), _CHOICES)
    function = tool_choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in names:
        raise InvalidFieldError("tool_choice.function.name", _shown(name), "the name of a function in tools")
    return frozenset([name])


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
        raise InvalidFieldError(f"{field}.function.name", _shown(name), "1 to 128 of a-z, A-Z, 0-9, _ and -")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise InvalidFieldError(f"{field}.function.description", _shown(description), "a string, or unset")
    schema = function.get("parameters")
    if not isinstance(schema, Mapping | None):
        raise InvalidFieldError(f"{field}.function.parameters", _shown(schema), "a JSON schema, or unset")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidFieldError(f"{field}.function.strict", _shown(function["strict"]), "true, false, or unset")
    return name, schema or {}


def _shown(value: Any) -> str:
    return "unset" if value is None else shown_json(value)
