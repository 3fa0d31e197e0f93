"""/v1/messages: what an answer has, and that it has the same however it comes."""

import random
from typing import Any

from tests.contract.anthropic.messages import HEADERS, NOW, WEATHER, post, say, streamed, told, user, whole
from tests.contract.openai.api import Api, Json
from tests.support.each_row import each_row

THINK: Json = {"type": "enabled", "budget_tokens": 1024}
ZURICH = '{"city": "Zürich 🦊", "text": "\\u00fc \\"]}</tool_call>"}'


def call(name: str = "get_weather", arguments: str = ZURICH) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def both(api: Api, said: str, **fields: Any) -> Json:
    """Return an answer, which is the same whole and in pieces."""
    asked = {"messages": say(said), "tools": [WEATHER, NOW], **fields}
    message = await whole(api, **asked)
    assert told(await streamed(api, **asked)) == told(message)
    return message


async def test_an_answer_has_thoughts_text_and_calls(*, api: Api) -> None:
    said = f"Hm, ü.</think>\n\nI look.\n{call()}\n{call('now', '{}')}"
    message = await both(api, said, thinking=THINK)
    *others, first, second = message["content"]
    assert others == [
        {"type": "thinking", "thinking": "Hm, ü.", "signature": "octavo"},
        {"type": "text", "text": "I look.\n"},
    ]
    text = 'ü "]}</tool_call>'
    assert (first["name"], first["input"]) == ("get_weather", {"city": "Zürich 🦊", "text": text})
    assert (second["name"], second["input"]) == ("now", {})
    assert first["id"] != second["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["id"].startswith("msg_")


@each_row(
    ("Hello.", {}, ["Hello."], "end_turn", None),
    ("Hello.", {"max_tokens": 3}, ["Hel"], "max_tokens", None),
    ("Hello you.", {"stop_sequences": ["xx", "you"]}, ["Hello "], "stop_sequence", "you"),
    ("", {}, [], "end_turn", None),
    (f"{call()}", {}, [{}], "tool_use", None),
    # Half a call is text: nobody runs it.
    (f"Ok. {call()}", {"max_tokens": 50}, [("Ok. " + call()).encode()[:50].decode()], "max_tokens", None),
    (
        f"{call()}\n{call('now', '{}')}",
        {"max_tokens": len(call().encode()) + 20},
        [{}, "\n" + call("now", "")[:19]],
        "max_tokens",
        None,
    ),
    (f"{call()} and {call('now', '{')}", {}, [{}, f" and {call('now', '{')}"], "tool_use", None),
    (f"{call('unknown')}", {}, [call("unknown")], "end_turn", None),
    (f"{call()}", {"tool_choice": {"type": "none"}}, [call()], "end_turn", None),
    # Thoughts that nobody asked for are not told.
    ("<think>Hm.</think>Yes.", {}, ["Yes."], "end_turn", None),
    ("Hm.</think>Yes.", {"thinking": {**THINK, "display": "omitted"}}, ["Yes."], "end_turn", None),
    ("<think>Hm.</think>Yes.", {"thinking": {"type": "adaptive"}}, [("thinking", "Hm."), "Yes."], "end_turn", None),
    ("Hm.", {"thinking": THINK}, [("thinking", "Hm.")], "end_turn", None),
)
async def test_an_answer_ends(
    said: str, fields: Json, content: list[Any], reason: str, sequence: str | None, *, api: Api
) -> None:
    message = await both(api, said, **fields)
    shown = [
        {"text": block.get("text"), "tool_use": {}, "thinking": ("thinking", block.get("thinking"))}[block["type"]]
        for block in message["content"]
    ]
    assert shown == content
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


async def test_streams_equal_whole_answers_of_any_kind(*, api: Api) -> None:
    pieces = ["Ünd ", call(), call("now", "{}"), call("now", "{"), "\n", "<think>", "</think>", "🦊", "stop ", "<tool_"]
    for seed in range(25):
        rng = random.Random(seed)
        said = "".join(rng.choices(pieces, k=rng.randint(0, 6)))
        fields: Json = {"max_tokens": rng.choice([5, 40, 90, 400])}
        fields |= rng.choice([{}, {"stop_sequences": ["stop"]}, {"stop_sequences": ["Zür", "nd"]}])
        fields |= rng.choice([{}, {"thinking": THINK}, {"thinking": {"type": "adaptive"}}, {"tools": None}])
        await both(api, said, **fields)


async def test_a_conversation_becomes_a_prompt(*, api: Api) -> None:
    """What the template writes for a chat with the same content."""
    use = {"type": "tool_use", "id": "a", "name": "now", "input": {"zone": "ü"}, "cache_control": None}
    result = {"type": "tool_result", "tool_use_id": "a"}
    mark = {"cache_control": {"type": "ephemeral"}}
    conversation: list[Json] = [
        user("first"),
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two", **mark}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "octavo"},
                {"type": "redacted_thinking", "data": "EmwKA"},
                {"type": "text", "text": "I look."},
                use,
                {**use, "id": "b"},
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "late"}]},
                {**result, "content": "noon", **mark},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be ", **mark}, {"type": "text", "text": "brief."}]
    counted = await post(
        api, "/v1/messages/count_tokens", messages=conversation, system=system, tools=[NOW], thinking=THINK
    )
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "now", "arguments": '{"zone":"ü"}'}}
        for call_id in ("a", "b")
    ]
    chat = [
        {"role": "system", "content": "Be brief."},
        user("first\n\none two"),
        {"role": "assistant", "content": "I look.", "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "b", "content": "Error: late"},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        user("So?"),
    ]
    function = {"name": "now", "parameters": {"type": "object"}}
    kwargs = {"enable_thinking": True, "thinking": True}
    body = {"messages": chat, "tools": [{"type": "function", "function": function}], "chat_template_kwargs": kwargs}
    tokens = await api.send("POST", "/tokenize", json=body)
    assert counted.json == {"input_tokens": tokens.json["count"]}
    asked = {"messages": conversation, "system": system, "tools": [NOW], "thinking": THINK, "max_tokens": 1}
    usages = [(await whole(api, **asked))["usage"] for _ in range(2)]
    assert [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages] == [tokens.json["count"]] * 2
    assert usages[1]["cache_read_input_tokens"] > 0


async def test_tools_that_are_not_to_be_called_are_not_in_the_prompt(*, api: Api) -> None:
    counts = [
        (await post(api, "/v1/messages/count_tokens", **fields)).json["input_tokens"]
        for fields in ({}, {"tools": [NOW], "tool_choice": {"type": "none"}}, {"tools": [NOW]})
    ]
    assert counts[0] == counts[1] < counts[2]


async def test_answers_name_their_request(*, api: Api) -> None:
    body = {"model": "fake", "max_tokens": 4, "messages": say("Yes.")}
    for stream in (False, True):
        headers = {**HEADERS, "X-Request-Id": f"mine-{stream}"}
        answer = await api.send("POST", "/v1/messages?beta=true", json={**body, "stream": stream}, headers=headers)
        assert answer.headers["request-id"] == f"mine-{stream}"
        assert f'"id":"msg_mine-{stream}"' in answer.text


async def test_models_come_in_the_shape_of_the_caller(*, api: Api) -> None:
    theirs = (await api.get("/v1/models", headers=HEADERS)).json
    [model] = theirs["data"]
    assert theirs == {"data": [model], "first_id": "fake", "last_id": "fake", "has_more": False}
    assert (model["type"], model["id"], model["display_name"]) == ("model", "fake", "fake")
    assert model["created_at"].endswith("Z")
    assert (await api.get("/v1/models/fake", headers=HEADERS)).json == model
    assert (await api.get("/v1/models")).json["object"] == "list"
