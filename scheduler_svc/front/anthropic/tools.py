"""Tools, their choice, and thinking of the Messages API, as a chat has them."""

from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.anthropic.fields import ConversationFields
from scheduler_svc.front.openai.messages import THINKING_SWITCHES
from scheduler_svc.front.openai.values import member, object_at, optional, shown
from scheduler_svc.front.text.json_text import shown_json

_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}
_THINKING = ("enabled", "disabled", "adaptive")

# Budgets from which on thinking counts as so much effort, as LiteLLM has them.
_EFFORTS = ((4096, "high"), (2048, "medium"), (0, "low"))


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
    thinking = {"type": "disabled"} if fields.thinking is None else object_at(fields.thinking, "thinking")
    kind = thinking.get("type")
    if kind not in _THINKING:
        raise InvalidFieldError("thinking.type", shown(kind), f"one of {', '.join(_THINKING)}")
    budget, display = thinking.get("budget_tokens"), thinking.get("display")
    if budget is not None and type(budget) is not int:
        raise InvalidFieldError("thinking.budget_tokens", shown(budget), "a whole number")
    if display not in (None, "summarized", "omitted"):
        raise InvalidFieldError("thinking.display", shown(display), "summarized, omitted, or unset")
    chat: dict[str, Any] = {"include_reasoning": kind != "disabled" and display != "omitted"}
    effort = optional(object_at(fields.output_config or {}, "output_config"), "output_config", "effort", str, "a text")
    switches: dict[str, Any] = {} if kind == "adaptive" else dict.fromkeys(THINKING_SWITCHES, kind == "enabled")
    if kind == "enabled" and budget is not None and effort is None:
        switches["reasoning_effort"] = next((name for least, name in _EFFORTS if budget >= least), "low")
    return {**chat, "reasoning_effort": effort, "chat_template_kwargs": switches}


def chat_format(fields: ConversationFields) -> dict[str, Any]:
    """Return the chat's fields that make an answer follow a schema. Raises InvalidFieldError: the schema is wrong."""
    if fields.output_config is None:
        return {}
    config = object_at(fields.output_config, "output_config")
    asked = config.get("format")
    if asked is None:
        return {}
    path = "output_config.format"
    if object_at(asked, path).get("type") != "json_schema":
        raise InvalidFieldError(f"{path}.type", shown(asked.get("type")), '"json_schema"')
    schema = {"name": "answer", "schema": asked.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _choice(sent: Any) -> tuple[Any, bool]:
    """Return the chat's tool choice, and whether the answer has one call at most."""
    if sent is None:
        return None, False
    kind = object_at(sent, "tool_choice").get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidFieldError("tool_choice.type", shown(kind), f"one of {', '.join(_CHOICES)}")
    is_single = optional(sent, "tool_choice", "disable_parallel_tool_use", bool, "true, false")
    choice = {"type": "function", "function": {"name": sent.get("name")}} if kind == "tool" else _CHOICES[kind]
    return choice, bool(is_single) and kind != "none"


def _tool(tool: Any, path: str) -> dict[str, Any]:
    """Return a tool as a chat has it; its name and description are checked there."""
    kind = object_at(tool, path).get("type")
    if kind not in (None, "custom"):
        rule = '"custom" or unset: the tools of Anthropic\'s servers and schemas do not exist here'
        raise InvalidFieldError(f"{path}.type", shown(kind), rule)
    schema: Any = member(tool, path, "input_schema", dict, "a JSON schema")
    strict = tool.get("strict")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    if strict is not None and strict is not False:
        function["strict"] = strict
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
