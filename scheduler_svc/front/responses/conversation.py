"""The input of the Responses API as the messages of a chat.

Consecutive items of the assistant, its reasoning, texts and calls, become one message.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.openai.fields import Message
from scheduler_svc.front.responses.fields import ITEM_FIELDS, ITEMS_LEFT_OUT, TEXT_PARTS, ResponseFields
from scheduler_svc.front.responses.tools import ToolName, custom_arguments
from scheduler_svc.front.text.json_text import shown_json

_ROLES = ("user", "assistant", "system", "developer")
_INSTRUCTIONS = ("system", "developer")

# Before reasoning that this server wrote; that of other servers is unreadable.
_READABLE = "octavo:"

# What must be sent in place of items that stand for what another server keeps.
_INSTEAD = {
    "item_reference": "the item itself, as nothing is stored: with `store` false agents send items whole (Vercel's AI "
    "SDK: providerOptions.openai.store)",
    "compaction": "the items that it stands for, or a message that sums them up: only the server that made it reads it",
}


@dataclass(slots=True)
class ChatConversation:
    """A conversation as a chat has it.

    Attributes:
        places: The path of each in the request, for errors.
        left_out: The paths of what is unreadable, and not needed.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _call_ids: set[str] = field(default_factory=set)

    def add(self, place: str, **values: Any) -> None:
        """Add a message."""
        self.messages.append(Message(**values))
        self.places.append(place)

    def turn(self, place: str) -> Message:
        """Return the assistant's message that the next item belongs to."""
        if not self.messages or self.messages[-1].role != "assistant":
            self.add(place, role="assistant", content="")
        return self.messages[-1]

    def add_item(self, item: Any, path: str) -> None:
        """Add an item of the input. Raises InvalidFieldError: it is wrong."""
        if not isinstance(item, Mapping):
            raise InvalidFieldError(path, _shown(item), "an object")
        match _kind(item):
            case "message":
                self._add_message(item, path)
            case "function_call" | "custom_tool_call":
                self._add_call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, path)
            case "reasoning":
                self._add_reasoning(item, path)
            case str(kind) if kind in ITEMS_LEFT_OUT:
                self.left_out.append(f"{path}.{kind}")
            case str(kind) if kind in _INSTEAD:
                raise InvalidFieldError(f"{path}.type", _shown(kind), _INSTEAD[kind])
            case kind:
                rule = f"one of {', '.join(ITEM_FIELDS)}: the others are of tools or of storage that do not exist here"
                raise InvalidFieldError(f"{path}.type", _shown(kind), rule)

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidFieldError(f"{path}.role", _shown(role), f"one of {', '.join(_ROLES)}")
        text = _text(item.get("content"), f"{path}.content")
        if role == "assistant":
            turn = self.turn(path)
            turn.content = f"{turn.content}{text}"
        elif role in _INSTRUCTIONS and len(self.messages) == 1 and self.places[0] == "instructions":
            # Most templates take one system message, in front.
            self.messages[0].content = f"{self.messages[0].content}\n\n{text}"
        else:
            self.add(path, role=role, content=text)

    def _add_call(self, item: Mapping[str, Any], path: str) -> None:
        call_id, name = (_string(item, path, field) for field in ("call_id", "name"))
        if item["type"] == "custom_tool_call":
            arguments = custom_arguments(_string(item, path, "input"))
        else:
            arguments = _string(item, path, "arguments")
        if item.get("namespace") is not None:
            name = ToolName(name, _string(item, path, "namespace")).in_chat
        if call_id in self._call_ids:
            raise InvalidFieldError(f"{path}.call_id", shown_json(call_id), "unlike the ids of the calls before")
        self._call_ids.add(call_id)
        turn = self.turn(path)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _add_output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = _string(item, path, "call_id")
        if call_id not in self._call_ids:
            rule = "the call_id of a function_call or custom_tool_call in front of it"
            raise InvalidFieldError(f"{path}.call_id", shown_json(call_id), rule)
        self.add(path, role="tool", tool_call_id=call_id, content=_text(item.get("output"), f"{path}.output"))

    def _add_reasoning(self, item: Mapping[str, Any], path: str) -> None:
        text = _text(item.get("content") or "", f"{path}.content") or _text(
            item.get("summary") or "", f"{path}.summary"
        )
        encrypted = item.get("encrypted_content")
        if not text and encrypted:
            text = _decoded(encrypted)
            if not text:
                self.left_out.append(f"{path}.encrypted_content")
        turn = self.turn(path)
        if turn.content or turn.tool_calls:
            self.add(path, role="assistant", content="")
            turn = self.messages[-1]
        turn.reasoning_content = f"{turn.reasoning_content or ''}{text}" or None


def chat_conversation(fields: ResponseFields) -> ChatConversation:
    """Return the conversation of a request. Raises InvalidFieldError: an item is wrong."""
    chat = ChatConversation()
    if fields.instructions:
        chat.add("instructions", role="system", content=fields.instructions)
    if isinstance(fields.input, str):
        chat.add("input", role="user", content=fields.input)
        return chat
    if not fields.input:
        raise InvalidFieldError("input", "empty", "a string, or at least 1 item long")
    for place, item in enumerate(fields.input):
        chat.add_item(item, f"input[{place}]")
    return chat


def encrypted(reasoning: str) -> str:
    """Return reasoning in the form that clients send back unread."""
    return _READABLE + base64.b64encode(reasoning.encode()).decode()


def _kind(item: Mapping[str, Any]) -> object:
    """Return the type of an item; messages and references may have none."""
    is_reference = item.get("type") is None and "id" in item and not item.keys() - {"type", "id"}
    return "item_reference" if is_reference else item.get("type", "message")


def _decoded(content: object) -> str:
    """Return the reasoning in `encrypted_content`; empty: another server wrote it."""
    if not isinstance(content, str) or not content.startswith(_READABLE):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_READABLE), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _text(content: Any, path: str) -> str:
    """Return the text of a string, or of parts that are texts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidFieldError(path, _shown(content), "a string, or an array of text parts")
    return "".join(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        shown = f"a part of type {_shown(kind)}" if isinstance(part, Mapping) else _shown(part)
        raise InvalidFieldError(path, shown, "a part of type input_text or output_text: the model accepts text only")
    return _string(part, path, TEXT_PARTS[kind])


def _string(owner: Mapping[str, Any], path: str, name: str) -> str:
    value = owner.get(name)
    if not isinstance(value, str):
        raise InvalidFieldError(f"{path}.{name}", _shown(value), "a text")
    return value


def _shown(value: object) -> str:
    return "absent" if value is None else shown_json(value)
