"""What libraries send for structured output: bodies of chat completions without the model, and what they expect.

"content": the text is a report; the name of a function: one call of it; "free": any text.
"""

from typing import Any

_HELLO = [{"role": "user", "content": "How is the weather?"}]
_PROPERTIES = {
    "kind": {"pattern": "^(sun|rain)$", "title": "Kind", "type": "string"},
    "degrees": {"maximum": 50, "minimum": -40, "title": "Degrees", "type": "integer"},
}
_REPORT = {
    "description": "A report.",
    "properties": _PROPERTIES,
    "required": ["kind", "degrees"],
    "title": "Weather",
    "type": "object",
}
_CLOSED = {**_REPORT, "additionalProperties": False}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "description": "A report.", "parameters": schema, **more}
    return {"type": "function", "function": function}


def _choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "Weather", "schema": schema, **more}}


BODIES: dict[str, tuple[dict[str, Any], str]] = {
    "openai, chat.completions.parse": (
        {"messages": _HELLO, "response_format": _format(_CLOSED, strict=True)},
        "content",
    ),
    "openai, a strict function": (
        {"messages": _HELLO, "tools": [_tool("Weather", _CLOSED, strict=True)], "tool_choice": "required"},
        "Weather",
    ),
    "instructor, TOOLS": (
        {"messages": _HELLO, "tools": [_tool("Weather", _REPORT)], "tool_choice": _choice("Weather")},
        "Weather",
    ),
    "instructor, TOOLS_STRICT": (
        {"messages": _HELLO, "tools": [_tool("Weather", _CLOSED, strict=True)], "tool_choice": _choice("Weather")},
        "Weather",
    ),
    "instructor, JSON_SCHEMA": ({"messages": _HELLO, "response_format": _format(_REPORT, strict=True)}, "content"),
    "instructor, without strict": ({"messages": _HELLO, "response_format": _format(_REPORT), "max_tokens": 8}, "free"),
    "pydantic-ai, an output tool": (
        {
            "messages": _HELLO,
            "stream": False,
            "tools": [_tool("final_result", _CLOSED, strict=True)],
            "tool_choice": "required",
        },
        "final_result",
    ),
    "pydantic-ai, NativeOutput": (
        {"messages": _HELLO, "stream": False, "response_format": _format(_CLOSED, strict=True)},
        "content",
    ),
    "langchain-openai, with_structured_output": (
        {"messages": _HELLO, "stream": False, "response_format": _format(_CLOSED, strict=True)},
        "content",
    ),
    "langchain-openai, function_calling": (
        {
            "messages": _HELLO,
            "stream": False,
            "tools": [_tool("Weather", _REPORT)],
            "tool_choice": _choice("Weather"),
            "parallel_tool_calls": False,
        },
        "Weather",
    ),
    "openai-agents, output_type": (
        {
            "messages": [{"role": "system", "content": "Be brief."}, *_HELLO],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "final_output", "strict": True, "schema": {**_CLOSED, "$schema": _DRAFT}},
            },
            "store": False,
        },
        "content",
    ),
    "openai-agents, a strict tool that is required": (
        {
            "messages": [{"role": "system", "content": "Be brief."}, *_HELLO],
            "tools": [_tool("get_weather", _CLOSED, strict=True)],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        "get_weather",
    ),
}
