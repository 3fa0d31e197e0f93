"""Tools and reasoning over HTTP, with OpenAI's own client: a model that says what it is told to, one byte a token."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.contract.openai.api import Api, Json, running_api
from tests.contract.openai.shapes import check_shape
from tests.support.echo_worker import THIRD_TOKEN, EchoWorker

TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": {}}},
    {"type": "function", "function": {"name": "now"}},
]
ZURICH = '{"city": "Zürich 🦊", "text": "\\u00fc \\"]}</tool_call>"}'
CALLS = [("get_weather", ZURICH), ("now", "{}")]

# What the model says in each format.
SAID = {
    "hermes": f'Ünd\n<tool_call>\n{{"name": "get_weather", "arguments": {ZURICH}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": f"Ünd\n[TOOL_CALLS]get_weather[ARGS]{ZURICH}[TOOL_CALLS]now[ARGS]{{}}",
    "llama3_json": f'Ünd\n<|python_tag|>{{"name": "get_weather", "parameters": {ZURICH}}}; {{"name": "now"}}',
}


def say(text: str) -> Json:
    return {"role": "user", "content": f"SAY:{text}"}


def client(api: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


async def ask(api: Api, text: str, **fields: Any) -> list[ChatCompletion]:
    """Return the answer, as it comes whole and as it comes in pieces, in the same shape."""
    request: Json = {"model": "fake", "messages": [say(text)], "tools": TOOLS, **fields}
    async with client(api) as sdk:
        whole: ChatCompletion = await sdk.chat.completions.create(**request)
        check_shape(whole.model_dump(exclude_unset=True), ChatCompletion)
        chunks: list[ChatCompletionChunk] = [
            chunk async for chunk in await sdk.chat.completions.create(**request, stream=True)
        ]
    for chunk in chunks:
        check_shape(chunk.model_dump(exclude_unset=True), ChatCompletionChunk)
    return [whole, joined(chunks)]


def joined(chunks: list[ChatCompletionChunk]) -> ChatCompletion:
    """Return the answer that the chunks of a stream make, as clients join them."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(
                part.index,
                {"index": part.index, "message": {"role": "assistant", "content": ""}, "finish_reason": None},
            )
            message, delta = choice["message"], part.delta.model_dump(exclude_unset=True)
            for name in ("content", "reasoning_content", "reasoning"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            choice["finish_reason"] = part.finish_reason or choice["finish_reason"]
    whole = {"id": "x", "created": 0, "model": "fake", "object": "chat.completion", "choices": list(choices.values())}
    return ChatCompletion.model_validate(whole)


def told(answer: ChatCompletion, index: int = 0) -> tuple[str, list[tuple[str, str]], str]:
    """Return content, calls and finish reason of a choice."""
    choice = answer.choices[index]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]  # type: ignore[union-attr]
    return choice.message.content or "", calls, choice.finish_reason


def prompt_tokens(answer: ChatCompletion) -> int:
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("tool_call_parser", "marker"),
    [
        ("hermes", THIRD_TOKEN),  # the model writes the markers byte by byte
        ("hermes", "<tool_call>"),
        ("mistral", "[TOOL_CALLS]"),
        ("llama3_json", "<|python_tag|>"),
    ],
)
async def test_calls_of_each_family_reach_the_client(tool_call_parser: str, marker: str) -> None:
    async with running_api(EchoWorker(marker=marker), tool_call_parser=tool_call_parser) as api:
        said = SAID[tool_call_parser]
        for answer in await ask(api, said, n=2, temperature=0):
            for index in range(2):
                assert told(answer, index) == ("Ünd\n", CALLS, "tool_calls")
            ids = [call.id for call in answer.choices[0].message.tool_calls or []]
            assert len(set(ids)) == 2
            assert all(len(call_id) == (9 if tool_call_parser == "mistral" else 29) for call_id in ids)
        for answer in await ask(api, f"<think>\nHm.</think>\n\n{said}"):
            assert told(answer) == ("Ünd\n", CALLS, "tool_calls")
            assert answer.choices[0].message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}


async def test_reasoning_comes_apart_and_the_prompt_may_open_it() -> None:
    async with running_api(EchoWorker()) as api:
        opened = await ask(
            api, f"Hm.</think>\n\n{SAID['hermes']}", extra_body={"chat_template_kwargs": {"enable_thinking": True}}
        )
        written = await ask(api, "<think>\nHm.</think>\n\nYes.", tools=openai.omit)
        for answer in opened:
            assert told(answer) == ("Ünd\n", CALLS, "tool_calls")
        for answer in written:
            assert told(answer) == ("Yes.", [], "stop")
        for answer in opened + written:
            assert answer.choices[0].message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}


async def test_tools_are_refused_where_nothing_looks_for_calls() -> None:
    async with running_api(EchoWorker(), tool_call_parser="none") as api:
        refused = await api.chat(tools=TOOLS)
        without = await api.chat(tools=TOOLS, tool_choice="none", max_tokens=1)
    assert (refused.status, refused.error["param"]) == (400, "tools")
    assert "this server was started with --tool-call-parser none" in refused.error["message"]
    assert without.status == 200


async def test_reasoning_is_counted_and_left_out_where_nobody_wants_it() -> None:
    thought, answer = "<think>\nHm.</think>\n\n", "Ünd."
    async with running_api(EchoWorker()) as api:
        for said, number in ((thought + answer, len(thought)), (answer, 0), (thought[:-4], len(thought[:-4]))):
            plain: Json = {"messages": [say(said)], "temperature": 0}
            hidden: Json = plain | {"include_reasoning": False}
            for fields in (plain, hidden):
                whole = (await api.chat(**fields)).json
                pieces = (await api.chat(**fields, stream=True, stream_options={"include_usage": True})).events
                assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": number}
                assert pieces[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": number}
                tells = bool(number) and "include_reasoning" not in fields
                deltas = [event["choices"][0]["delta"] for event in pieces[:-1]]
                assert ("reasoning" in whole["choices"][0]["message"]) is tells
                assert any("reasoning_content" in delta for delta in deltas) is tells
                content = "".join(delta.get("content") or "" for delta in deltas)
                assert content == whole["choices"][0]["message"]["content"] == (answer if said.endswith(answer) else "")


async def test_without_tools_nothing_is_a_call() -> None:
    async with running_api(EchoWorker()) as api:
        with_none = await ask(api, SAID["hermes"], tool_choice="none")
        without = await ask(api, SAID["hermes"], tools=openai.omit)

        for answer in with_none + without:
            assert told(answer) == (SAID["hermes"], [], "stop")
        assert prompt_tokens(with_none[0]) == prompt_tokens(without[0])  # the template gets no tools


async def test_a_call_that_is_cut_off_is_content_and_what_a_stream_shows_of_it_is_no_json() -> None:
    async with running_api(EchoWorker()) as api:
        said = '<tool_call>{"name": "now", "arguments": {"a": 1, "b": "x'
        first = await ask(api, said, max_tokens=said.index(","))
        stopped = await ask(api, f'{said}"}}}}', stop='"}')
        thought = f"<think>\nHm. {SAID['hermes']}"  # which nobody closes
        for answer in await ask(api, thought):
            assert told(answer) == ("", CALLS, "tool_calls")
        for answer in await ask(api, thought, max_tokens=len(thought.encode())):
            assert told(answer) == ("", [], "length")
        whole, streamed = await ask(api, said, max_tokens=len(said))

        for answer in first:
            assert told(answer) == (said[: said.index(",")], [], "length")
        assert told(whole) == (said, [], "length")
        assert told(streamed) == (said, [("now", '{"a": 1, "b": "x"]')], "length")
        assert told(stopped[0]) == (said, [], "stop")
        assert told(stopped[1]) == (said, [("now", '{"a": 1, "b": "x"]')], "stop")


BROKEN = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'
UNKNOWN = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

SHOWN = '<tool_call>{"name": "now", "arguments": {"a": 1, "b": NaN}}</tool_call>'
OF_SHOWN = ("now", '{"a": 1, "b": ]')  # no client can run it
CALL = ("now", "{}")

# What the model says; content and calls of the answer, what its stream shows before the calls, and why it ends
MALFORMED = [
    (BROKEN, BROKEN, [], [], "stop"),
    (SHOWN, SHOWN, [], [OF_SHOWN], "stop"),
    (f"{UNKNOWN}\n{NOW}", f"{UNKNOWN}\n", [CALL], [], "tool_calls"),
    (f"a {NOW} b {NOW}\n", "a  b ", [CALL] * 2, [], "tool_calls"),
    (f"{BROKEN}{NOW}", BROKEN, [CALL], [], "tool_calls"),
    (f"{NOW}{BROKEN}", BROKEN, [CALL], [], "stop"),
    (f"{SHOWN}{NOW}", SHOWN, [CALL], [OF_SHOWN], "stop"),
]


async def test_what_is_no_call_is_content_and_text_around_calls_stays() -> None:
    async with running_api(EchoWorker()) as api:
        for said, content, calls, shown, ended_by in MALFORMED:
            whole, streamed = await ask(api, said)
            assert told(whole) == (content, calls, ended_by), said
            assert told(streamed) == (content, shown + calls, ended_by), said


async def test_results_of_calls_go_back_into_the_prompt() -> None:
    async with running_api(EchoWorker()) as api, client(api) as sdk:
        [first, _] = await ask(api, SAID["hermes"])
        turn = first.choices[0].message.model_dump(exclude_none=True)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"}
            for place, call in enumerate(turn["tool_calls"])
        ]
        messages: Any = [say("x"), turn, *results, say("Done.")]
        tools: Any = TOOLS
        answer = await sdk.chat.completions.create(model="fake", messages=messages, tools=tools)
        assert answer.choices[0].message.content == "Done."
