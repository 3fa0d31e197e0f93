"""The messages of the Messages API as chat messages: there, each tool result is a message of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pydantic_core import to_json

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.anthropic.fields import ConversationFields, Turn
from scheduler_svc.front.openai.fields import Message
from scheduler_svc.front.openai.values import object_at, optional, shown, text_of
from scheduler_svc.front.text.json_text import shown_json

_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool_result": ("text",),
}

# Between the texts of two messages of one role.
_BETWEEN_MESSAGES = "\n\n"

# Around system messages in the middle: few chat templates allow them there. Claude Code used this form.
_REMINDER = "<system-reminder>\n{}\n</system-reminder>"

# Before the message of a tool that failed: chats have no flag for a failure.
_FAILED = "Error: "


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """A conversation as a chat has it.

    Attributes:
        places: The path of each in the request, for errors.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, **values: Any) -> None:
        """Add a message."""
        self.messages.append(Message(**values))
        self.places.append(place)


def chat_conversation(fields: ConversationFields) -> ChatConversation:
    """Return the conversation of a request. Raises InvalidFieldError: a message is wrong."""
    chat = ChatConversation()
    if system := "".join(_texts(fields.system or "", "system", "system")):
        chat.add("system", role="system", content=system)
    if not fields.messages:
        raise InvalidFieldError("messages", "empty", "at least 1 message long")
    for place, turn in enumerate(fields.messages):
        if turn.role not in ("user", "assistant", "system"):
            rule = "user, assistant or system"
            raise InvalidFieldError(f"messages[{place}].role", shown_json(turn.role), rule)
    if fields.messages[-1].role == "assistant":
        rule = '"user": this server does not continue an answer that was begun (prefill)'
        raise InvalidFieldError(f"messages[{len(fields.messages) - 1}].role", '"assistant"', rule)
    calls: list[str] = []
    for is_assistant, turns in groupby(enumerate(fields.messages), lambda numbered: numbered[1].role == "assistant"):
        if is_assistant:
            calls = _add_assistant(chat, list(turns))
        else:
            _add_user(chat, list(turns), calls)
    return chat


def _add_user(chat: ChatConversation, turns: Sequence[tuple[int, Turn]], calls: Sequence[str]) -> None:
    """Add consecutive messages of user and system: first the results of the assistant's last calls, then texts."""
    texts, open_calls = [], list(calls)
    num_results = 0
    for place, turn in turns:
        said: list[str] = []
        for path, kind, block in _blocks(turn.content, turn.role, f"messages[{place}].content"):
            if kind == "text":
                said.append(text_of(block, path, "text"))
                continue
            call_id = text_of(block, path, "tool_use_id")
            if call_id not in open_calls:
                rule = "the id of a tool_use block of the assistant's message before, with one result each"
                raise InvalidFieldError(f"{path}.tool_use_id", shown_json(call_id), rule)
            open_calls.remove(call_id)
            num_results += 1
            chat.add(path, role="tool", tool_call_id=call_id, content=_result(block, path))
        text = "".join(said)
        texts.append(_REMINDER.format(text) if text and turn.role == "system" else text)
    told = _BETWEEN_MESSAGES.join(filter(None, texts))
    if told or not num_results:
        chat.add(f"messages[{turns[0][0]}]", role="user", content=told)


def _add_assistant(chat: ChatConversation, turns: Sequence[tuple[int, Turn]]) -> list[str]:
    """Add consecutive messages of the assistant; return the ids of its calls."""
    texts, thoughts, calls = [], [], {}
    for place, turn in turns:
        said: list[str] = []
        for path, kind, block in _blocks(turn.content, "assistant", f"messages[{place}].content"):
            if kind == "text":
                said.append(text_of(block, path, "text"))
            elif kind == "thinking":
                thoughts.append(text_of(block, path, "thinking"))
            elif kind == "tool_use":
                call_id, function = text_of(block, path, "id"), _function(block, path)
                if call_id in calls:
                    raise InvalidFieldError(f"{path}.id", shown_json(call_id), "unlike the ids of the other calls")
                calls[call_id] = {"id": call_id, "type": "function", "function": function}
        texts.append("".join(said))
    chat.add(
        f"messages[{turns[0][0]}]",
        role="assistant",
        content=_BETWEEN_MESSAGES.join(filter(None, texts)),
        reasoning_content="".join(thoughts) or None,
        tool_calls=list(calls.values()) or None,
    )
    return list(calls)


def _function(block: Mapping[str, Any], path: str) -> dict[str, str]:
    arguments = object_at(block.get("input"), f"{path}.input")
    return {"name": text_of(block, path, "name"), "arguments": to_json(arguments).decode()}


def _result(block: Mapping[str, Any], path: str) -> str:
    has_failed = optional(block, path, "is_error", bool, "true, false")
    text = "".join(_texts(block.get("content") or "", "tool_result", f"{path}.content"))
    return _FAILED + text if has_failed else text


def _texts(content: Any, owner: str, path: str) -> list[str]:
    return [text_of(block, place, "text") for place, _, block in _blocks(content, owner, path)]


def _blocks(content: Any, owner: str, path: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the path, the type and the fields of each block; a string is a text."""
    if isinstance(content, str):
        return [(path, "text", {"text": content})]
    if not isinstance(content, list):
        raise InvalidFieldError(path, shown(content), "a string, or an array of blocks")
    known = _BLOCKS[owner]
    blocks = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in known:
            what = f"a block of type {shown(kind)}" if isinstance(block, Mapping) else shown_json(block)
            rule = f"a block of type {' or '.join(known)}: the model accepts text only"
            raise InvalidFieldError(f"{path}[{number}]", what, rule)
        blocks.append((f"{path}[{number}]", kind, block))
    return blocks
