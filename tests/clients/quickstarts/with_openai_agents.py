"""Quickstarts of openai-agents: its README, and its pages on tools, structured outputs, streams and handoffs."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_api,
    set_tracing_disabled,
)
from checks import MODEL, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(disabled=True)  # traces go to OpenAI's own server

HAIKU = "Write a haiku about recursion in programming."
WEATHER = "What is the weather like in Paris?"


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


@function_tool
def get_weather(location: str) -> str:
    """Get the weather of a city."""
    return f"The weather in {location} is sunny and 21."


def hello_world() -> None:
    agent = Agent(name="Assistant", instructions="You are a helpful assistant", model=MODEL)
    result = Runner.run_sync(agent, HAIKU)
    assert result.final_output.startswith("Code within the code,")


async def _tools(**settings: object) -> None:
    agent = Agent(name="Hello", instructions="You are a helpful agent.", tools=[get_weather], **settings)
    result = await Runner.run(agent, input=WEATHER)
    assert result.final_output == "It is sunny and 21 degrees in Paris."


async def tools() -> None:
    await _tools(model=MODEL)


async def tools_required() -> None:
    await _tools(model=MODEL, model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False))


async def output_type() -> None:
    agent = Agent(
        name="Calendar extractor",
        instructions="Extract calendar events from text",
        output_type=CalendarEvent,
        model=MODEL,
    )
    result = await Runner.run(agent, "Alice and Bob are going to a science fair on Friday.")
    assert result.final_output.participants == ["Alice", "Bob"]


async def streamed() -> None:
    agent = Agent(name="Joker", instructions="You are a helpful assistant.", tools=[get_weather], model=MODEL)
    result = Runner.run_streamed(agent, input=WEATHER)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == "It is sunny and 21 degrees in Paris."


async def a_second_turn() -> None:
    agent = Agent(name="Assistant", instructions="Reply very concisely.", model=MODEL)
    result = await Runner.run(agent, "What is the capital of the UK?")
    assert result.final_output == "London"
    new_input = [*result.to_input_list(), {"role": "user", "content": HAIKU}]
    assert (await Runner.run(agent, new_input)).final_output.startswith("Code within")


async def chat_model() -> None:
    model = OpenAIChatCompletionsModel(model=MODEL, openai_client=AsyncOpenAI())
    await _tools(model=model)
    agent = Agent(name="Extractor", instructions="Extract.", output_type=CalendarEvent, model=model)
    result = await Runner.run(agent, "Alice and Bob are going to a science fair on Friday.")
    assert result.final_output.date == "Friday"


async def chat_by_default() -> None:
    set_default_openai_api("chat_completions")
    await streamed()


run(hello_world, tools, tools_required, output_type, streamed, a_second_turn, chat_model, chat_by_default)
