"""The chat that a request of the Responses API asks for; errors of that chat in the words of this API.

Consecutive items of the assistant, its reasoning, texts and calls, become one message.
"""

import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits
from scheduler_svc.front.openai.errors import api_error
from scheduler_svc.front.openai.fields import ChatFields, DecodingFields, Message
from scheduler_svc.front.openai.requests import Asked, asked_chat
from scheduler_svc.front.openai.values import object_at, shown, text_of
from scheduler_svc.front.responses.fields import (
    INCLUDABLE,
    ITEM_FIELDS,
    ITEMS_LEFT_OUT,
    LOGPROBS,
    TEXT_PARTS,
    ResponseFields,
)
from scheduler_svc.front.responses.tools import (
    ChatTools,
    ToolName,
    chat_format,
    chat_reasoning,
    chat_tools,
    custom_arguments,
)
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
        match _kind(object_at(item, path)):
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
                raise InvalidFieldError(f"{path}.type", shown(kind), _INSTEAD[kind])
            case kind:
                rule = f"one of {', '.join(ITEM_FIELDS)}: the others are of tools or of storage that do not exist here"
                raise InvalidFieldError(f"{path}.type", shown(kind), rule)

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise InvalidFieldError(f"{path}.role", shown(role), f"one of {', '.join(_ROLES)}")
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
        call_id, name = (text_of(item, path, field) for field in ("call_id", "name"))
        if item["type"] == "custom_tool_call":
            arguments = custom_arguments(text_of(item, path, "input"))
        else:
            arguments = text_of(item, path, "arguments")
        if item.get("namespace") is not None:
            name = ToolName(name, text_of(item, path, "namespace")).in_chat
        if call_id in self._call_ids:
            raise InvalidFieldError(f"{path}.call_id", shown_json(call_id), "unlike the ids of the calls before")
        self._call_ids.add(call_id)
        turn = self.turn(path)
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        turn.tool_calls = [*(turn.tool_calls or ()), call]

    def _add_output(self, item: Mapping[str, Any], path: str) -> None:
        call_id = text_of(item, path, "call_id")
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
        raise InvalidFieldError(path, shown(content), "a string, or an array of text parts")
    return "".join(_part(part, f"{path}[{number}]") for number, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        what = f"a part of type {shown(kind)}" if isinstance(part, Mapping) else shown(part)
        raise InvalidFieldError(path, what, "a part of type input_text or output_text: the model accepts text only")
    return text_of(part, path, TEXT_PARTS[kind])


_T = TypeVar("_T")

# This API's names of the fields that the chat template gets.
PATHS = {"reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity"}

_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input"}
_NAMES |= {name: name for name in ("text", "prompt")}  # elsewhere they are prompts
_NAMES |= PATHS
_OF_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_OF_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")

# Fields without effect that answers have all the same, as the schema of Open Responses asks.
_ECHOED_AS_SENT = ("max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
_FORMATS = ("response_format.json_schema", "response_format")


@dataclass(frozen=True, slots=True)
class AskedChat:
    """The chat that a request asks for.

    Attributes:
        fields: As fields of chats.
        asked: As native requests.
        left_out: The paths of what is left out, as the answer does not need it.
        rename: Returns the name that this API has for a field of the chat.
    """

    fields: ChatFields
    asked: Asked
    tools: ChatTools
    left_out: Sequence[str]
    rename: Callable[[str], str]


def asked_response(fields: ResponseFields, limits: RequestLimits) -> AskedChat:
    """Return the chat that a request asks for. Raises ApiError: a field is wrong."""
    try:
        return _asked_chat(fields, limits)
    except InvalidFieldError as error:
        raise api_error(error, _NAMES) from error


def _asked_chat(fields: ResponseFields, limits: RequestLimits) -> AskedChat:
    _check(fields)
    conversation, tools = chat_conversation(fields), chat_tools(fields)
    text_format, left_out = chat_format(fields)
    values: dict[str, Any] = {name: getattr(fields, name) for name in DecodingFields.model_fields}
    values |= {**tools.chat, **text_format, **chat_reasoning(fields)}
    if LOGPROBS in (fields.include or ()):
        values |= {"logprobs": True, "top_logprobs": fields.top_logprobs}
    chat = ChatFields(**values, messages=conversation.messages, max_completion_tokens=fields.max_output_tokens)

    def rename(name: str) -> str:
        if found := _OF_MESSAGE.fullmatch(name):
            return conversation.places[int(found[1])] + found[2].replace("_json", "")
        if found := _OF_TOOL.fullmatch(name):
            return f"{tools.places[int(found[1])]}{found[2]}"
        for prefix in _FORMATS:
            if name.startswith(prefix):
                return "text.format" + name.removeprefix(prefix)
        return "tool_choice.name" if name == "tool_choice.function.name" else _NAMES.get(name, name)

    try:
        asked = asked_chat(chat, limits)
    except InvalidFieldError as error:
        raise InvalidFieldError(rename(error.field), error.value, error.limit) from error
    asked = replace(asked, names={**asked.names, **_NAMES})
    return AskedChat(chat, asked, tools, [*tools.left_out, *left_out, *conversation.left_out], rename)


async def in_own_words(chat: AskedChat, doing: Awaitable[_T]) -> _T:
    """Return the result of an awaitable; errors have the names of this API, and numbers as they were sent."""
    try:
        return await doing
    except PromptTooLongError as error:
        raise api_error(error, chat.asked.names) from error
    except InvalidFieldError as error:
        named = InvalidFieldError(chat.rename(error.field), error.value, error.limit)
        raise api_error(named, chat.asked.names, chat.asked.numbers) from error
    except OctavoServiceError as error:
        raise api_error(error, chat.asked.names) from error


def _check(fields: ResponseFields) -> None:
    for place, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            raise InvalidFieldError(f"include[{place}]", shown_json(name), f"one of {', '.join(INCLUDABLE)}")
    if fields.top_logprobs and LOGPROBS not in (fields.include or ()):
        raise InvalidFieldError("top_logprobs", fields.top_logprobs, f"0 or unset without {LOGPROBS} in include")
    if fields.truncation not in (None, "disabled"):
        rule = '"disabled" or unset: a prompt that is too long is rejected, never truncated'
        raise InvalidFieldError("truncation", shown_json(fields.truncation), rule)


def echoed(fields: ResponseFields, tools: ChatTools) -> Mapping[str, Any]:
    """Return what an answer repeats of its request: what was carried, and defaults for the rest."""
    reasoning = fields.reasoning or {}
    text_format = (fields.text or {}).get("format") or {"type": "text"}
    return {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "text": {"format": text_format},
        "tool_choice": fields.tool_choice or "auto",
        "tools": tools.told,
        "top_logprobs": fields.top_logprobs or 0,
        "truncation": "disabled",
        **dict.fromkeys(_ECHOED_AS_SENT),
        **{name: value for name, value in (fields.model_extra or {}).items() if name in _ECHOED_AS_SENT},
        "previous_response_id": None,
        "background": False,
        "store": False,
        "service_tier": "default",
    }
