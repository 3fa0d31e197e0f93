"""Tools, their choice, and thinking of the Messages API, as a chat has them."""

from collections.abc import Mapping
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.anthropic.fields import ConversationFields
from scheduler_svc.front.openai.messages import THINKING_SWITCHES
from scheduler_svc.front.text.json_text import shown_json

_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}
_THINKING = ("enabled", "disabled", "adaptive")


def chat_tools(fields: ConversationFields) -> dict[str, Any]:
    """Return the chat's fields for tools. Raises InvalidFieldError: a field is wrong."""
    choice, is_single = _choice(fields.tool_choice)
    if not fields.tools:
        if choice not in (None, "none"):
            rule = "unset, or of type none, in a request without tools"
            raise InvalidFieldError("tool_choice", shown_json(fields.tool_choice), rule)
        return {}
    chat = {"tools": [_tool(tool, f"tools[{place}]") for place, tool in enumerate(fields.tools)], "tool_choice": choice}
    return {**chat, "parallel_tool_calls": False} if is_single else chat


def chat_thinking(fields: ConversationFields) -> dict[str, Any]:
    """Return the chat's fields for thinking. Raises InvalidFieldError: a field is wrong."""
    thinking = {"type": "disabled"} if fields.thinking is None else _object(fields.thinking, "thinking")
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise InvalidFieldError("thinking.type", _shown(kind), f"one of {', '.join(_THINKING)}")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None and type(budget) is not int:
        raise InvalidFieldError("thinking.budget_tokens", _shown(budget), "a whole number")
    if display not in (None, "summarized", "omitted"):
        raise InvalidFieldError("thinking.display", _shown(display), "summarized, omitted, or unset")
    chat: dict[str, Any] = {"include_reasoning": kind != "disabled" and display != "omitted"}
    effort = _object(fields.output_config or {}, "output_config").get("effort")
    if not isinstance(effort, str | None):
        raise InvalidFieldError("output_config.effort", shown_json(effort), "a text, or unset")
    switches = {} if kind == "adaptive" else dict.fromkeys(THINKING_SWITCHES, kind == "enabled")
    return {**chat, "reasoning_effort": effort, "chat_template_kwargs": switches}


def chat_format(fields: ConversationFields) -> dict[str, Any]:
    """Return the chat's fields that make an answer follow a schema. Raises InvalidFieldError: the schema is wrong."""
    if fields.output_config is None:
        return {}
    config = _object(fields.output_config, "output_config")
    asked = config.get("format")
    if asked is None:
        return {}
    path = "output_config.format"
    if _object(asked, path).get("type") != "json_schema":
        raise InvalidFieldError(f"{path}.type", _shown(asked.get("type")), '"json_schema"')
    schema = {"name": "answer", "schema": asked.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choice(sent: Any) -> tuple[Any, bool]:
    """Return the chat's tool choice, and whether the answer has one call at most."""
    if sent is None:
        return None, False
    kind = _object(sent, "tool_choice").get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidFieldError("tool_choice.type", _shown(kind), f"one of {', '.join(_CHOICES)}")
    is_single = sent.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        raise InvalidFieldError("tool_choice.disable_parallel_tool_use", _shown(is_single), "true, false, or unset")
    choice = {"type": "function", "function": {"name": sent.get("name")}} if kind == "tool" else _CHOICES[kind]
    return choice, bool(is_single) and kind != "none"


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """Return a tool as a chat has it; its name and description are checked there."""
    kind = _object(tool, path).get("type")
    if kind not in (None, "custom"):
        rule = '"custom" or unset: the tools of Anthropic\'s servers and schemas do not exist here'
        raise InvalidFieldError(f"{path}.type", _shown(kind), rule)
    schema, strict = tool.get("input_schema"), tool.get("strict")
    if not isinstance(schema, Mapping):
        raise InvalidFieldError(f"{path}.input_schema", _shown(schema), "a JSON schema")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    if strict is not None and strict is not False:
        function["strict"] = strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(path, _shown(value), "an object")
    return value


def _shown(value: object) -> str:
    return "absent" if value is None else shown_json(value)
