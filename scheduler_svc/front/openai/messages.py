"""The messages of OpenAI's API as those of the native one."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.openai.fields import Message, TemplateFields
from scheduler_svc.front.openai.values import text_of
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.text_model import TextModel

# Values that OpenAI's own answers have in these fields; clients send them back unchanged.
_EMPTY: tuple[object, ...] = (None, "", [], {})

# OpenAI's names of the fields that the native API has JSON texts for.
CONVERSATION_NAMES = {
    "messages.tools_json": "tools",
    "messages.template_kwargs_json": "chat_template_kwargs",
}

TEXT_PARTS = ("text", "refusal")

# The type of a part with the assistant's reasoning.
THINKING = "thinking"

# Fields of parts without effect: prefixes are found by their content.
PART_NOTES = ("prompt_cache_breakpoint", "cache_control")

# Fields of OpenAI's messages that say something and are not carried. Any other field is unknown.
REFUSED_IN_MESSAGES = ("audio", "function_call", "refusal")


# The names of the switch of thinking in chat templates: most read the first, DeepSeek's and Granite's the second.
THINKING_SWITCHES = ("enable_thinking", "thinking")

# Fields that the template gets, with the variables of which it must read one.
_GIVEN = {"reasoning_effort": ("reasoning_effort", *THINKING_SWITCHES), "verbosity": ("verbosity",)}


def unread_by_template(fields: TemplateFields, model: TextModel) -> list[str]:
    """Return the fields that the chat template does not read."""
    template = model.tokenizer.chat_template
    known = template.variables if template else frozenset[str]()
    return [name for name, names in _GIVEN.items() if getattr(fields, name) is not None and not known & set(names)]


def _variables(fields: TemplateFields) -> dict[str, Any]:
    """Return the variables that a request gives to the chat template beside the conversation."""
    effort = fields.reasoning_effort
    thinking = {} if effort is None else dict.fromkeys(THINKING_SWITCHES, effort != "none")
    given = {name: value for name in _GIVEN if (value := getattr(fields, name)) is not None}
    return {**thinking, **given, **(fields.chat_template_kwargs or {})}


def chat_messages(messages: Sequence[Message], fields: TemplateFields) -> pb.ChatMessages:
    """Return a conversation for the native API. Raises InvalidFieldError: a message has content other than text."""
    chat = pb.ChatMessages(messages=[_chat_message(message, place) for place, message in enumerate(messages)])
    if fields.tools:
        chat.tools_json = to_json(fields.tools).decode()
    if variables := _variables(fields):
        chat.template_kwargs_json = to_json(variables).decode()
    if fields.add_generation_prompt is not None:
        chat.add_generation_prompt = fields.add_generation_prompt
    return chat


def _chat_message(message: Message, place: int) -> pb.ChatMessage:
    extra = message.model_extra or {}
    for name in REFUSED_IN_MESSAGES:
        if not is_empty(extra.get(name)):
            rule = f"unset: this release has {', '.join(Message.model_fields)}"
            raise InvalidFieldError(f"messages[{place}].{name}", "set", rule)
    if message.content is None and not message.tool_calls and message.role != "assistant":
        raise InvalidFieldError(f"messages[{place}].content", "absent", "a string, or an array of text parts")
    content, thinking = _text(message, place)
    return pb.ChatMessage(
        role=message.role,
        content=content,
        name=message.name or "",
        tool_call_id=message.tool_call_id or "",
        tool_calls_json=to_json(message.tool_calls).decode() if message.tool_calls else "",
        reasoning_content=message.reasoning_content or message.reasoning or thinking,
    )


def is_empty(value: object) -> bool:
    """Return whether a value says nothing; LiteLLM sends objects of nulls back."""
    return value in _EMPTY or (isinstance(value, dict) and all(inner in _EMPTY for inner in value.values()))


def _text(message: Message, place: int) -> tuple[str, str]:
    """Return the text of a message and the assistant's reasoning; parts are joined as they are."""
    if not isinstance(message.content, list):
        return message.content or "", ""
    texts, thoughts = [], []
    for number, part in enumerate(message.content):
        path = f"messages[{place}].content[{number}]"
        if message.role == "assistant" and isinstance(part, dict) and part.get("type") == THINKING:
            thoughts.append(_thought(part, path))
        else:
            texts.append(_part(part, path))
    return "".join(texts), "".join(thoughts)


def _thought(part: dict[str, Any], path: str) -> str:
    """Return the text of a part of type thinking: a text, or as Mistral's API has it parts of type text."""
    thought = part.get(THINKING)
    if not isinstance(thought, list):
        return text_of(part, path, THINKING)
    return "".join(_part(inner, f"{path}.{THINKING}[{number}]") for number, inner in enumerate(thought))


def _part(part: object, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in TEXT_PARTS:
        shown = f"a part of type {shown_json(kind)}" if isinstance(part, dict) else shown_json(part)
        whose = ": only the assistant has reasoning" if kind == THINKING else ": the model accepts text only"
        raise InvalidFieldError(path, shown, f'a part of type text, such as {{"type": "text", "text": "..."}}{whose}')
    return text_of(part, path, str(kind))
