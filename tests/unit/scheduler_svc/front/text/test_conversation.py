"""What a conversation of the native API holds: turns with all that their roles have, tools, and variables."""

import json

import pytest

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.json_text import MAX_ELEMENTS
from tests.support.each_row import each_row

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def chat(**fields: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")], **fields)  # type: ignore[arg-type]


def test_a_turn_has_what_it_was_given_and_no_more() -> None:
    told = pb.ChatMessage(
        role="assistant", name="bob", reasoning_content="hm", tool_calls_json=json.dumps([CALL]), tool_call_id="x"
    )
    conversation = Conversation.of_message(pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a"), told]))
    assert conversation.messages == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "",
            "name": "bob",
            "reasoning_content": "hm",
            "tool_call_id": "x",
            "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ]
    assert (conversation.tools, conversation.add_generation_prompt, conversation.template_kwargs) == ([], True, {})


@each_row(("cab", "abc"), ("ba", "ab"), ("cxa", "cxa"), ("aab", "aab"), ("", ""), ("b", "b"))
def test_results_come_in_the_order_of_their_calls(sent: str, seen: str) -> None:
    calls = [{**CALL, "id": "a"}, {**CALL, "id": "b"}, {**CALL, "id": ["no text"]}, 7, {**CALL, "id": "c"}]
    turns = [
        pb.ChatMessage(role="assistant", tool_calls_json=json.dumps(calls)),
        *(pb.ChatMessage(role="tool", tool_call_id=call_id, content=call_id) for call_id in sent),
        pb.ChatMessage(role="user", content="?"),
    ]

    messages = Conversation.of_message(pb.ChatMessages(messages=[*turns, *turns])).messages

    assert "".join(turn["content"] for turn in messages) == f"{seen}?" * 2


@each_row("no JSON", "[1]", 5)
def test_arguments_that_are_no_object_stay_as_they_are(arguments: object) -> None:
    calls = [{"function": {"arguments": arguments}}, {"function": None}, 7]
    message = pb.ChatMessage(role="assistant", tool_calls_json=json.dumps(calls))
    [turn] = Conversation.of_message(pb.ChatMessages(messages=[message])).messages
    assert turn["tool_calls"] == calls


@each_row(
    ({"tools_json": "{}"}, "messages.tools_json", "it must be a JSON array"),
    ({"tools_json": "["}, "messages.tools_json", "a JSON array (EOF"),
    ({"tools_json": "[" * MAX_ELEMENTS + "[["}, "messages.tools_json", "it has more than 262144 elements"),
    ({"template_kwargs_json": "[]"}, "messages.template_kwargs_json", "it must be a JSON object"),
    ({"template_kwargs_json": '{"tools": 1}'}, "messages.template_kwargs_json", "does not already define"),
    ({"template_kwargs_json": '{"bos_token": 1}'}, "messages.template_kwargs_json", "does not already define"),
    ({"template_kwargs_json": '{"render deadline": 1}'}, "messages.template_kwargs_json", "does not already define"),
    ({"template_kwargs_json": '{"_x": 1}'}, "messages.template_kwargs_json", "does not already define"),
)
def test_what_is_no_such_json_is_refused(fields: dict[str, str], field: str, words: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Conversation.of_message(chat(**fields))
    assert caught.value.field == field
    assert words in str(caught.value)


@each_row("name", "tool_call_id")
def test_a_long_name_is_refused(field: str) -> None:
    message = pb.ChatMessage(role="user", content="a", **{field: "x" * 257})
    with pytest.raises(
        InvalidFieldError, match=rf"messages\[0\].{field} is 257 characters long; it must be at most 256"
    ):
        Conversation.of_message(pb.ChatMessages(messages=[message]))
