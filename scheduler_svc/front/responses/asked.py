"""The chat that a request of the Responses API asks for; errors of that chat in the words of this API."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from scheduler_svc.front.api.request_limits import PromptTooLongError, RequestLimits
from scheduler_svc.front.openai.errors import api_error
from scheduler_svc.front.openai.fields import ChatFields, DecodingFields
from scheduler_svc.front.openai.requests import Asked, asked_chat
from scheduler_svc.front.responses.conversation import chat_conversation
from scheduler_svc.front.responses.fields import INCLUDABLE, LOGPROBS, ResponseFields
from scheduler_svc.front.responses.tools import ChatTools, chat_format, chat_reasoning, chat_tools
from scheduler_svc.front.text.json_text import shown_json

_T = TypeVar("_T")

_NAMES = {"max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "messages": "input"}
_NAMES |= {name: name for name in ("text", "prompt")}  # elsewhere they are prompts
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
