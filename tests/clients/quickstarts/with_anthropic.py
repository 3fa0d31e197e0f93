"""Quickstarts of anthropic: its README; guides on streams, tools, thinking, structured outputs, counting tokens."""

import json

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from checks import MODEL, run
from pydantic import BaseModel

HELLO = {"role": "user", "content": "Hello, Claude"}
WEATHER = {"role": "user", "content": "What is the weather like in Paris?"}
TOOL = {
    "name": "get_weather",
    "description": "Get the current weather in a given location",
    "input_schema": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
        "required": ["location"],
    },
}


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


def create() -> None:
    client = Anthropic()
    message = client.messages.create(max_tokens=1024, messages=[HELLO], model=MODEL)
    assert message.content[0].text == "Hello! 🦊"
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len("Hello! 🦊".encode()) + 1


async def create_async() -> None:
    client = AsyncAnthropic()
    message = await client.messages.create(max_tokens=1024, messages=[HELLO], model=MODEL)
    assert message.content[0].text == "Hello! 🦊"


def create_stream() -> None:
    client = Anthropic()
    stream = client.messages.create(max_tokens=1024, messages=[HELLO], model=MODEL, stream=True)
    assert [event.type for event in stream][::5][0] == "message_start"


async def stream_helper_async() -> None:
    client = AsyncAnthropic()
    async with client.messages.stream(max_tokens=1024, messages=[HELLO], model=MODEL) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == message.content[0].text == "Hello! 🦊"


def stream_helper() -> None:
    client = Anthropic()
    with client.messages.stream(max_tokens=1024, messages=[WEATHER], tools=[TOOL], model=MODEL) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert "input_json" in kinds
    assert message.content[-1].input == {"location": "Paris"}


def tools() -> None:
    client = Anthropic()
    for more in ({}, {"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "get_weather"}}):
        message = client.messages.create(model=MODEL, max_tokens=1024, tools=[TOOL], messages=[WEATHER], **more)
        assert message.stop_reason == "tool_use"
        [call] = [block for block in message.content if block.type == "tool_use"]
        assert call.input == {"location": "Paris"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny and 21"}]}
    messages = [WEATHER, {"role": "assistant", "content": message.content}, result]
    message = client.messages.create(model=MODEL, max_tokens=1024, tools=[TOOL], messages=messages)
    assert message.content[0].text == "It is sunny and 21 degrees in Paris."


def tool_runner() -> None:
    @beta_tool
    def get_weather(location: str) -> str:
        """Get the weather of a location.

        Args:
            location: The city.
        """
        return f"sunny and 21 in {location}"

    client = Anthropic()
    runner = client.beta.messages.tool_runner(max_tokens=1024, model=MODEL, tools=[get_weather], messages=[WEATHER])
    assert runner.until_done().content[0].text == "It is sunny and 21 degrees in Paris."


def thinking() -> None:
    client = Anthropic()
    message = client.messages.create(
        model=MODEL,
        max_tokens=16000,
        thinking={"type": "enabled", "budget_tokens": 10000},
        messages=[{"role": "user", "content": "Think about the weather"}],
    )
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "I think so."


def structured_output() -> None:
    client = Anthropic()
    message = client.messages.parse(
        model=MODEL,
        max_tokens=1024,
        messages=[{"role": "user", "content": "Alice and Bob are going to a science fair on Friday."}],
        output_format=CalendarEvent,
    )
    assert message.parsed_output.participants == ["Alice", "Bob"]


def strict_tool() -> None:
    client = Anthropic()
    strict = {**TOOL, "strict": True, "input_schema": {**TOOL["input_schema"], "additionalProperties": False}}
    message = client.messages.create(model=MODEL, max_tokens=1024, tools=[strict], messages=[WEATHER])
    assert message.content[-1].input == {"location": "Paris"}


def count_tokens() -> None:
    client = Anthropic()
    count = client.messages.count_tokens(model=MODEL, messages=[HELLO])
    message = client.messages.create(max_tokens=1024, messages=[HELLO], model=MODEL)
    assert json.loads(count.model_dump_json())["input_tokens"] == count.input_tokens > 0
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def count_tokens_async() -> None:
    client = AsyncAnthropic()
    assert (await client.messages.count_tokens(model=MODEL, messages=[HELLO], tools=[TOOL])).input_tokens > 0


def models() -> None:
    assert [model.id for model in Anthropic().models.list()] == [MODEL]


run(
    create,
    create_async,
    create_stream,
    stream_helper,
    stream_helper_async,
    tools,
    tool_runner,
    thinking,
    structured_output,
    strict_tool,
    count_tokens,
    count_tokens_async,
    models,
)
