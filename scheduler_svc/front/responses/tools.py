"""Tools, their choice, the format of the text, and reasoning of the Responses API, as fields of a chat."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json, to_json

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.openai.values import member, object_or_empty, optional, shown, text_of
from scheduler_svc.front.responses.fields import TOOL_FIELDS, ResponseFields
from scheduler_svc.front.text.json_text import shown_json

_CHOICES = (
    '"auto", "none", "required", {"type": "function" or "custom", "name": ...}, or {"type": "allowed_tools", ...}'
)

# Between a namespace and a name in a chat, as in vLLM.
_OF_NAMESPACE = "__"

# The only argument of the function that stands for a custom tool, as Codex names it for servers without custom tools.
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class ToolName:
    """A client's name of a tool: `namespace` if it is in one, `is_custom` if it takes a text and no JSON."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def in_chat(self) -> str:
        """The tool's name in a chat."""
        return self.name if self.namespace is None else f"{self.namespace}{_OF_NAMESPACE}{self.name}"


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of a request as fields of a chat.

    Attributes:
        places: The path of each tool of the chat in the request.
        names: The client's names of the tools, by their names in the chat.
        told: The tools that are carried, as an answer repeats them.
        left_out: The paths of the tools that do not exist here, with their types, and of formats that are not held.
    """

    chat: Mapping[str, Any] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    told: list[Mapping[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def chat_tools(fields: ResponseFields) -> ChatTools:
    """Return the tools of a request. Raises InvalidFieldError: one is wrong, or `tool_choice` is."""
    tools, functions = ChatTools(), dict[str, dict[str, Any]]()  # by place
    for place, tool in enumerate(fields.tools or ()):
        path = f"tools[{place}]"
        if _kind(tool, path) != "namespace":
            _add(tool, path, None, tools, functions)
            continue
        namespace = text_of(tool, path, "name")
        for number, one in enumerate(member(tool, path, "tools", list, "an array of tools")):
            _add(one, f"{path}.tools[{number}]", namespace, tools, functions)
        tools.told.append(tool)
    choice, allowed = _choice(fields.tool_choice, tools.names)
    places = [place for place, function in functions.items() if allowed is None or function.get("name") in allowed]
    if not places:
        if choice not in (None, "auto", "none"):
            rule = "auto, none or unset: no tool of the request is a function"
            raise InvalidFieldError("tool_choice", shown_json(fields.tool_choice), rule)
        return tools
    chat = {
        "tools": [{"type": "function", "function": functions[place]} for place in places],
        "tool_choice": choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
    }
    return replace(tools, chat=chat, places=places)


def _add(tool: Any, path: str, namespace: str | None, tools: ChatTools, functions: dict[str, dict[str, Any]]) -> None:
    """Add a tool, unless its type does not exist here."""
    kind = _kind(tool, path)
    if kind not in ("function", "custom"):
        tools.left_out.append(f"{path}.{kind}")
        return
    if kind == "custom":
        values = _function_of_custom(tool, path, tools.left_out)
    else:
        values = {name: tool[name] for name in TOOL_FIELDS[1:] if tool.get(name) is not None}
    functions[path] = values
    if namespace is None:
        of_function = {"type": kind, "name": "", "description": None, "parameters": None, "strict": False, **values}
        tools.told.append(of_function if kind == "function" else tool)
    if isinstance(values.get("name"), str):
        name = ToolName(values["name"], namespace, kind == "custom")
        values["name"] = name.in_chat
        tools.names[name.in_chat] = name


def _function_of_custom(tool: Mapping[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    """Return the function that stands for a tool that takes a text; the model reads its grammar, nothing holds it."""
    text = {"type": "string"}
    asked = object_or_empty(tool.get("format"), f"{path}.format")
    if asked.get("type") not in (None, "text"):
        left_out.append(f"{path}.format")
        text["description"] = f"Follows this {asked.get('syntax')} grammar:\n{asked.get('definition')}"
    values = {name: tool[name] for name in ("name", "description") if tool.get(name) is not None}
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    return {**values, "parameters": parameters}


def custom_arguments(text: str) -> str:
    """Return the arguments of a call of the function that stands for a custom tool."""
    return to_json({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a call: the only argument, else all that the model wrote."""
    try:
        parsed = from_json(arguments)
    except ValueError:
        return arguments
    if not isinstance(parsed, dict):
        return arguments
    values = [parsed[_INPUT]] if _INPUT in parsed else list(parsed.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


def _kind(tool: Any, path: str) -> str:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidFieldError(path, shown(tool), "an object with a type")
    return kind


def _choice(sent: Any, names: Mapping[str, ToolName]) -> tuple[Any, set[str] | None]:
    """Return the chat's tool choice, and the names of the only tools that the model gets; None: it gets all."""
    if sent is None or sent in ("auto", "none", "required"):
        return sent, None
    kind = sent.get("type") if isinstance(sent, Mapping) else None
    if kind in ("function", "custom"):
        [name, *_] = [*_named(sent, names), sent.get("name")]
        return {"type": "function", "function": {"name": name}}, None
    if kind != "allowed_tools":
        raise InvalidFieldError("tool_choice", shown_json(sent), f"{_CHOICES}: other tools do not exist here")
    mode, tools = sent.get("mode"), sent.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidFieldError("tool_choice.mode", shown(mode), '"auto" or "required"')
    if not isinstance(tools, list) or not tools:
        raise InvalidFieldError("tool_choice.tools", shown(tools), "an array of tools")
    allowed = set[str]()
    for place, tool in enumerate(tools):
        found = _named(tool, names) if isinstance(tool, Mapping) else []
        if not found:
            raise InvalidFieldError(f"tool_choice.tools[{place}]", shown(tool), "a function in tools")
        allowed |= set(found)
    return mode, allowed


def _named(tool: Mapping[str, Any], names: Mapping[str, ToolName]) -> list[str]:
    """Return the chat's names of what a choice names: a tool, or all of a namespace."""
    kind, sent, namespace = tool.get("type"), tool.get("name"), tool.get("namespace")
    if kind == "namespace":
        return [flat for flat, name in names.items() if name.namespace == sent]
    wanted = (sent, namespace, kind == "custom")
    return [flat for flat, name in names.items() if (name.name, name.namespace, name.is_custom) == wanted]


_OF_TEXT = ("format", "verbosity")


def chat_format(fields: ResponseFields) -> tuple[dict[str, Any], list[str]]:
    """Return the format and verbosity of a chat, and the paths of what is left out. Raises InvalidFieldError."""
    text = object_or_empty(fields.text, "text")
    verbosity = optional(text, "text", "verbosity", str, "a text")
    left_out = [f"text.{name}" for name, value in text.items() if name not in _OF_TEXT and value is not None]
    asked = object_or_empty(text.get("format"), "text.format")
    if not asked:
        return {"verbosity": verbosity}, left_out
    kind = asked.get("type")
    if kind == "json_schema":
        rest = {name: value for name, value in asked.items() if name != "type"}
        return {"response_format": {"type": kind, "json_schema": rest}, "verbosity": verbosity}, left_out
    return {"response_format": asked, "verbosity": verbosity}, left_out


def chat_reasoning(fields: ResponseFields) -> dict[str, Any]:
    """Return the chat's fields for reasoning effort. Raises InvalidFieldError: it is wrong."""
    reasoning = object_or_empty(fields.reasoning, "reasoning")
    effort, _ = (optional(reasoning, "reasoning", name, str, "a text") for name in ("effort", "summary"))
    return {"reasoning_effort": effort, "chat_template_kwargs": fields.chat_template_kwargs}
