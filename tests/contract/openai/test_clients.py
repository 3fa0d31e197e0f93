"""What common clients send, and what their helpers make of the answers; docs/openai.md says which were tried."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.contract.openai.api import Api, Json, running_api
from tests.contract.openai.shapes import check_shape
from tests.support.echo_worker import EchoWorker

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'


def say(text: str) -> Any:
    return {"role": "user", "content": f"SAY:{text}"}


def called(**others: object) -> Json:
    """Return an assistant's turn with a call, as a client sends it back."""
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    return {"role": "assistant", "tool_calls": [call], **others}


# Recorded bodies, but for the model; each is answered with "Done".
BODIES: dict[str, Json] = {
    "LiteLLM 1.106, what a tool said": {
        "messages": [
            say(CALL),
            called(provider_specific_fields={"refusal": None}),
            {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "21"},
            say("Done"),
        ],
        "tools": TOOLS,
    },
    "LiteLLM 1.106, reasoning sent back": {
        "messages": [
            say("x"),
            {
                "content": "Yes",
                "role": "assistant",
                "reasoning_content": "hm",
                "provider_specific_fields": {"refusal": None},
            },
            say("Done"),
        ],
    },
    "langchain-openai 1.7, what a tool said": {
        "messages": [
            {"content": "be brief", "role": "system"},
            say(CALL),
            called(content=None),
            {"content": "21", "role": "tool", "tool_call_id": "call_1"},
            say("Done"),
        ],
        "stream": False,
        "tools": TOOLS,
    },
    "langchain-openai 1.7, options": {
        "messages": [say("Done")],
        "logprobs": True,
        "max_completion_tokens": 5,
        "n": 2,
        "seed": 1,
        "stop": ["x"],
        "stream": False,
        "temperature": 0.0,
        "top_logprobs": 2,
    },
    "instructor 1.17, parallel tools": {"messages": [say("Done")], "tool_choice": "auto", "tools": TOOLS},
}


async def test_what_clients_send_is_answered() -> None:
    async with running_api(EchoWorker()) as api:
        for name, body in BODIES.items():
            answer = await api.chat(**body)
            assert answer.status == 200, (name, answer.text)
            told = check_shape(answer.json, ChatCompletion)
            assert {choice.message.content for choice in told.choices} == {"Done"}, name
        # langchain-openai 1.7, its class of completions
        unset = {"logprobs": None, "seed": None, "frequency_penalty": 0, "presence_penalty": 0, "top_p": 1, "n": 1}
        answer = await api.complete(prompt=["hello"], max_tokens=4, temperature=0.7, **unset)
        assert answer.json["choices"][0]["text"] == "hell"


@pytest.fixture
async def echo() -> Any:
    async with running_api(EchoWorker()) as running:
        yield running


async def test_the_helpers_of_the_official_client_understand_the_answers(echo: Api) -> None:
    async with openai.AsyncOpenAI(base_url=f"{echo.url}/v1", api_key="none", max_retries=0) as client:
        chats = client.chat.completions
        async with chats.stream(
            model="fake", messages=[say(CALL)], tools=TOOLS, stream_options={"include_usage": True}
        ) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
        [call] = final.choices[0].message.tool_calls or []
        assert call.function.arguments == ARGUMENTS
        assert final.usage is not None
        assert final.usage.completion_tokens == len(CALL) + 1  # the end of the sequence
        parsed = await chats.parse(model="fake", messages=[say("Hi")])
        assert parsed.choices[0].message.content == "Hi"
        raw = await chats.with_raw_response.create(model="fake", messages=[say("Hi")])
        assert f"chatcmpl-{raw.headers['x-request-id']}" == raw.parse().id
        assert (await client.models.retrieve("fake")).id == "fake"
