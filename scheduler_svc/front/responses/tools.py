"""Tools, their choice, the format of the text, and reasoning of the Responses API, as a chat has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.responses.fields import TOOL_FIELDS, ResponseFields
from scheduler_svc.front.text.json_text import shown_json

_CHOICES = '"auto", "none", "required", {"type": "function", "name": ...}, or {"type": "allowed_tools", ...}'


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request as a chat has them.

    Attributes:
        chat: The fields of the chat.
        places: Which tool of the request each of the chat's is.
        left_out: The paths of the tools that do not exist here, with their types.
    """

    chat: Mapping[str, Any]
    places: list[int]
    left_out: list[str]


def chat_tools(fields: ResponseFields) -> ChatTools:
    """Return the tools of a request. Raises InvalidFieldError: one is wrong, or `tool_choice` is."""
    functions: dict[int, dict[str, Any]] = {}
    left_out = []
    for place, tool in enumerate(fields.tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise InvalidFieldError(f"tools[{place}]", _shown(tool), "an object with a type")
        if kind == "function":
            values = {name: tool[name] for name in TOOL_FIELDS[1:] if tool.get(name) is not None}
            functions[place] = {"type": "function", "function": values}
        else:
            left_out.append(f"tools[{place}].{kind}")
    choice, allowed = _choice(fields.tool_choice, functions)
    places = [place for place in functions if allowed is None or functions[place]["function"].get("name") in allowed]
    if not places:
        if choice not in (None, "auto", "none"):
            rule = "auto, none or unset: no tool of the request is a function"
            raise InvalidFieldError("tool_choice", shown_json(fields.tool_choice), rule)
        return ChatTools({}, [], left_out)
    chat = {
        "tools": [functions[place] for place in places],
        "tool_choice": choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
    }
    return ChatTools(chat, places, left_out)


def _choice(sent: Any, functions: Mapping[int, Mapping[str, Any]]) -> tuple[Any, set[str] | None]:
    """Return the choice of a chat, and the names of the only tools that the model gets; None: it gets all."""
    if sent is None or sent in ("auto", "none", "required"):
        return sent, None
    kind = sent.get("type") if isinstance(sent, Mapping) else None
    if kind == "function":
        return {"type": "function", "function": {"name": sent.get("name")}}, None
    if kind != "allowed_tools":
        raise InvalidFieldError("tool_choice", shown_json(sent), f"{_CHOICES}: other tools do not exist here")
    mode, tools = sent.get("mode"), sent.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidFieldError("tool_choice.mode", _shown(mode), '"auto" or "required"')
    if not isinstance(tools, list) or not tools:
        raise InvalidFieldError("tool_choice.tools", _shown(tools), "an array of tools")
    known = {tool["function"].get("name") for tool in functions.values()}
    for place, tool in enumerate(tools):
        is_function = isinstance(tool, Mapping) and tool.get("type") == "function"
        if not is_function or not isinstance(tool.get("name"), str) or tool["name"] not in known:
            raise InvalidFieldError(f"tool_choice.tools[{place}]", _shown(tool), "a function in tools")
    return mode, {tool["name"] for tool in tools}


def chat_format(fields: ResponseFields) -> tuple[dict[str, Any], list[str]]:
    """Return the format of a chat's answer, and the paths of what is left out. Raises InvalidFieldError."""
    text = _object(fields.text, "text")
    left_out = [f"text.{name}" for name, value in text.items() if name != "format" and value is not None]
    asked = _object(text.get("format"), "text.format")
    if not asked:
        return {}, left_out
    kind = asked.get("type")
    if kind == "json_schema":
        rest = {name: value for name, value in asked.items() if name != "type"}
        return {"response_format": {"type": kind, "json_schema": rest}}, left_out
    return {"response_format": asked}, left_out


def chat_reasoning(fields: ResponseFields) -> dict[str, Any]:
    """Return the variables of the chat template that say how much to think. Raises InvalidFieldError: it is wrong."""
    reasoning = _object(fields.reasoning, "reasoning")
    for name in ("effort", "summary"):
        if not isinstance(reasoning.get(name), str | None):
            raise InvalidFieldError(f"reasoning.{name}", shown_json(reasoning[name]), "a text, or unset")
    effort = reasoning.get("effort")
    asked = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    variables = {**asked, **(fields.chat_template_kwargs or {})}
    return {"chat_template_kwargs": variables} if variables else {}


def _object(value: Any, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidFieldError(path, shown_json(value), "an object")
    return value


def _shown(value: object) -> str:
    return "absent" if value is None else shown_json(value)
