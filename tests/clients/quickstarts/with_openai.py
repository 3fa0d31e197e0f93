"""Quickstarts of openai: its README, helpers.md, and the guides on structured outputs and function calling."""

import json

import openai
from checks import MODEL, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

PYTHON = "How do I check if a Python object is an instance of a class?"
UNICORN = "Write a one-sentence bedtime story about a unicorn."
WEATHER = "What is the weather like in Paris today?"


class CalendarEvent(BaseModel):
    name: str
    date: str
    participants: list[str]


class Step(BaseModel):
    explanation: str
    output: str


class MathResponse(BaseModel):
    steps: list[Step]
    final_answer: str


class GetWeather(BaseModel):
    location: str


PARAMETERS = {
    "type": "object",
    "properties": {"location": {"type": "string", "description": "City and country e.g. Bogotá, Colombia"}},
    "required": ["location"],
    "additionalProperties": False,
}
DESCRIPTION = "Get current temperature for a given location."


def responses_create() -> None:
    client = OpenAI()
    response = client.responses.create(
        model=MODEL,
        instructions="You are a coding assistant that talks like a pirate.",
        input=PYTHON,
    )
    assert response.output_text == "Arr, use isinstance()."


def responses_create_stream() -> None:
    client = OpenAI()
    stream = client.responses.create(model=MODEL, input=UNICORN, stream=True)
    events = list(stream)
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == "A unicorn slept. 🦄"
    )
    assert events[-1].type == "response.completed"


async def responses_create_async() -> None:
    client = AsyncOpenAI()
    assert (await client.responses.create(model=MODEL, input=UNICORN)).output_text == "A unicorn slept. 🦄"
    stream = await client.responses.create(model=MODEL, input=UNICORN, stream=True)
    deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "A unicorn slept. 🦄"


def responses_stream_helper() -> None:
    client = OpenAI()
    with client.responses.stream(
        input="solve 8x + 31 = 2",
        model=MODEL,
        text_format=MathResponse,
    ) as stream:
        kinds = [event.type for event in stream]
        parsed = stream.get_final_response().output_parsed
    assert "response.output_text.delta" in kinds
    assert parsed is not None
    assert parsed.final_answer == "x = -29/8"


async def responses_stream_helper_async() -> None:
    client = AsyncOpenAI()
    async with client.responses.stream(input="solve 8x + 31 = 2", model=MODEL, text_format=MathResponse) as stream:
        async for _ in stream:
            pass
        parsed = (await stream.get_final_response()).output_parsed
    assert parsed is not None
    assert parsed.final_answer == "x = -29/8"


def responses_parse() -> None:
    client = OpenAI()
    response = client.responses.parse(
        model=MODEL,
        input=[
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        text_format=CalendarEvent,
    )
    assert response.output_parsed == CalendarEvent(name="Science Fair", date="Friday", participants=["Alice", "Bob"])


async def responses_parse_async() -> None:
    client = AsyncOpenAI()
    response = await client.responses.parse(model=MODEL, input="solve 8x + 31 = 2", text_format=MathResponse)
    assert response.output_parsed is not None
    assert response.output_parsed.final_answer == "x = -29/8"


def responses_function_calling() -> None:
    client = OpenAI()
    tools = [
        {
            "type": "function",
            "name": "get_weather",
            "description": DESCRIPTION,
            "parameters": PARAMETERS,
            "strict": True,
        }
    ]
    input_list = [{"role": "user", "content": WEATHER}]
    response = client.responses.create(model=MODEL, tools=tools, input=input_list)
    input_list += response.output
    for item in response.output:
        if item.type == "function_call":
            assert json.loads(item.arguments) == {"location": "Paris"}
            input_list.append({"type": "function_call_output", "call_id": item.call_id, "output": "sunny and 21"})
    response = client.responses.create(
        model=MODEL, instructions="Respond only with the weather.", tools=tools, input=input_list
    )
    assert response.output_text == "It is sunny and 21 degrees in Paris."


def responses_parse_pydantic_tool() -> None:
    client = OpenAI()
    response = client.responses.parse(
        model=MODEL, input=WEATHER, tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")]
    )
    [call] = response.output
    assert call.parsed_arguments == GetWeather(location="Paris")


def chat_create() -> None:
    client = OpenAI()
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Talk like a pirate."},
            {"role": "user", "content": PYTHON},
        ],
    )
    assert completion.choices[0].message.content == "Arr, use isinstance()."


def chat_parse() -> None:
    client = OpenAI()
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[
            {"role": "system", "content": "You are a helpful math tutor."},
            {"role": "user", "content": "solve 8x + 31 = 2"},
        ],
        response_format=MathResponse,
    )
    message = completion.choices[0].message
    assert message.parsed is not None
    assert message.parsed.steps[0].output == "8x = -29"


async def chat_parse_async() -> None:
    client = AsyncOpenAI()
    completion = await client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "solve 8x + 31 = 2"}], response_format=MathResponse
    )
    assert completion.choices[0].message.parsed is not None


def chat_parse_strict_tools() -> None:
    client = OpenAI()
    completion = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
    )
    [call] = completion.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(location="Paris")


def chat_tools_and_results() -> None:
    client = OpenAI()
    tools = [
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "description": DESCRIPTION,
                "parameters": PARAMETERS,
                "strict": True,
            },
        }
    ]
    messages = [{"role": "user", "content": WEATHER}]
    completion = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    [call] = completion.choices[0].message.tool_calls
    messages.append(completion.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny and 21"})
    completion = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
    assert completion.choices[0].message.content == "It is sunny and 21 degrees in Paris."


def chat_stream_helper() -> None:
    client = OpenAI()
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": WEATHER}],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")],
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == GetWeather(location="Paris")


run(
    responses_create,
    responses_create_stream,
    responses_create_async,
    responses_stream_helper,
    responses_stream_helper_async,
    responses_parse,
    responses_parse_async,
    responses_function_calling,
    responses_parse_pydantic_tool,
    chat_create,
    chat_parse,
    chat_parse_async,
    chat_parse_strict_tools,
    chat_tools_and_results,
    chat_stream_helper,
)
