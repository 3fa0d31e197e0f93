"""A conversation as chat templates see it: messages, tools, and the template's own switches."""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Self

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.json_text import parse_json

# Variables that the conversation itself or the model's files set.
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})

# Digits pass unchanged through whatever a template does to a text: JSON, escapes, capital letters.
_NUM_MARK_DIGITS = 32

# For names of speakers and of functions.
MAX_NAME_LENGTH = 256

_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from.

    Attributes:
        messages: Each with `role` and `content`, and what else its role has, as transformers' templates know it.
        tools: In the shape of OpenAI's.
        add_generation_prompt: Whether the prompt ends with the beginning of the assistant's next turn.
        template_kwargs: Further variables of the template.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    add_generation_prompt: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_turns(cls, turns: Iterable[tuple[str, str]]) -> Self:
        """Return a conversation of roles and contents."""
        return cls([{"role": role, "content": content} for role, content in turns])

    @classmethod
    def of_message(cls, chat: pb.ChatMessages) -> Self:
        """Return the conversation of a request. Raises InvalidFieldError: what should be JSON is not."""
        kwargs = parse_json(chat.template_kwargs_json, "messages.template_kwargs_json", dict)
        for name in kwargs:
            if name in _OWN_VARIABLES or name.endswith("_token") or not _VARIABLE.fullmatch(name):
                rule = "an object whose names the chat template does not already define"
                raise InvalidFieldError("messages.template_kwargs_json", f"an object with the name {name[:64]!r}", rule)
        return cls(
            _in_call_order([_turn(message, place) for place, message in enumerate(chat.messages)]),
            parse_json(chat.tools_json, "messages.tools_json", list),
            chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
            kwargs,
        )


def num_characters(chat: pb.ChatMessages) -> int:
    """Return how much text a conversation holds."""
    return len(chat.tools_json) + len(chat.template_kwargs_json) + sum(map(_num_characters, chat.messages))


def _num_characters(message: pb.ChatMessage) -> int:
    texts = (message.role, message.content, message.name, message.tool_call_id, message.reasoning_content)
    return len(message.tool_calls_json) + sum(map(len, texts))


def _turn(message: pb.ChatMessage, place: int) -> dict[str, Any]:
    for label, name in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if len(name) > MAX_NAME_LENGTH:
            rule = f"at most {MAX_NAME_LENGTH} characters long"
            raise InvalidFieldError(f"messages[{place}].{label}", f"{len(name)} characters long", rule)
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    for label in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, label):
            turn[label] = value
    if message.tool_calls_json:
        calls = parse_json(message.tool_calls_json, f"messages[{place}].tool_calls_json", list)
        turn["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return turn


def _in_call_order(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Put the results of tools into the order of their calls: most templates leave out the ids that tell them apart."""
    ordered: list[Mapping[str, Any]] = []
    places: dict[object, int] = {}  # of the last calls, by id
    for is_result, group in groupby(turns, lambda turn: turn["role"] == "tool"):
        turns_of_group = list(group)
        if not is_result:
            calls = turns_of_group[-1].get("tool_calls") or ()
            ids = [call.get("id") if isinstance(call, Mapping) else None for call in calls]
            places = {call_id: place for place, call_id in enumerate(ids) if isinstance(call_id, str)}
        elif all(turn.get("tool_call_id") in places for turn in turns_of_group):
            turns_of_group.sort(key=lambda turn: places[turn["tool_call_id"]])
        ordered += turns_of_group
    return ordered


def _with_parsed_arguments(call: Any) -> Any:
    """Return a call with its arguments as templates want them: an object, which OpenAI's API sends as a text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"], "messages.tool_calls_json", dict)
    except InvalidFieldError:  # the model may have written no JSON; the template may show it all the same
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class SpecialTokenBreaker:
    """Makes ordinary text of the special tokens in a conversation; the template's own stay special.

    A tokenizer reads `<|im_end|>` as a special token wherever it stands. So an unguessable mark is put into each one in
    the conversation. The rendered prompt is cut wherever the mark appears, and each piece is tokenized by itself.

    Args:
        special_tokens: As written in text; a token of a single character cannot be broken up.
    """

    def __init__(self, special_tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in special_tokens if len(token) > 1), key=len, reverse=True)
        # A token may begin inside another one, so the search also finds tokens behind the first character.
        starts = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in longest_first)
        self._starts = re.compile(starts) if starts else None

    def break_up(self, conversation: Conversation) -> tuple[Conversation, str]:
        """Return the conversation with a mark in each special token, and the mark."""
        mark = "".join(secrets.choice("0123456789") for _ in range(_NUM_MARK_DIGITS))
        if self._starts is None:
            return conversation, mark

        def broken(value: Any) -> Any:
            match value:
                case str():
                    return self._starts.sub(lambda start: start[0] + mark, value)  # type: ignore[union-attr]
                case list() | tuple():
                    return [broken(item) for item in value]
                case dict():
                    return {broken(key): broken(item) for key, item in value.items()}
            return value

        return replace(
            conversation,
            messages=broken(conversation.messages),
            tools=broken(conversation.tools),
            template_kwargs=broken(conversation.template_kwargs),
        ), mark
