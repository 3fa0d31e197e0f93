"""Quickstarts of pydantic-ai: hello world, function tools, output types, by both APIs of OpenAI and Anthropic's."""

from checks import MODEL, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, RunContext, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

KINDS = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}


class CityLocation(BaseModel):
    city: str
    country: str


CHICAGO = CityLocation(city="Chicago", country="USA")


def by_name() -> None:
    agent = Agent(f"openai:{MODEL}", instructions="Be concise, reply with one sentence.")
    assert agent.run_sync("What is the capital of the UK?").output == "London"


def hello(kind: str) -> None:
    agent = Agent(KINDS[kind](MODEL), instructions="Be concise, reply with one sentence.")
    assert agent.run_sync("What is the capital of the UK?").output == "London"


def output_tool(kind: str) -> None:
    for output_type in (CityLocation, ToolOutput(CityLocation, strict=True)):
        agent = Agent(KINDS[kind](MODEL), output_type=output_type)
        result = agent.run_sync("Where is the windy city?")
        assert result.output == CHICAGO
        assert result.usage.output_tokens > 0


def output_native(kind: str) -> None:
    # pydantic-ai knows by their names which of Anthropic's models can do this.
    profile = {"profile": {"supports_json_schema_output": True}} if kind == "anthropic" else {}
    agent = Agent(KINDS[kind](MODEL, **profile), output_type=NativeOutput(CityLocation))
    assert agent.run_sync("Where is the native city?").output == CHICAGO


def output_prompted(kind: str) -> None:
    agent = Agent(KINDS[kind](MODEL), output_type=PromptedOutput(CityLocation))
    assert agent.run_sync("Where is the native city?").output == CHICAGO


def function_tool(kind: str) -> None:
    agent = Agent(KINDS[kind](MODEL), deps_type=str)

    @agent.tool
    def get_weather(ctx: RunContext[str], location: str) -> str:
        """Get the weather of a city."""
        return f"{ctx.deps}: sunny and 21 in {location}"

    result = agent.run_sync("What is the weather like in Paris?", deps="today")
    assert result.output == "It is sunny and 21 degrees in Paris."


async def streamed(kind: str) -> None:
    agent = Agent(KINDS[kind](MODEL))
    async with agent.run_stream("What is the capital of the UK?") as result:
        texts = [text async for text in result.stream_text()]
    assert texts[-1] == "London"


async def streamed_output(kind: str) -> None:
    agent = Agent(KINDS[kind](MODEL), output_type=CityLocation)
    async with agent.run_stream("Where is the windy city?") as result:
        assert await result.get_output() == CHICAGO


def _of(kind: str, check: object) -> object:
    def of_kind() -> object:
        return check(kind)

    of_kind.__name__ = f"{kind}_{check.__name__}"
    return of_kind


CHECKS = (hello, function_tool, output_tool, output_native, output_prompted, streamed, streamed_output)
run(by_name, *(_of(kind, check) for kind in KINDS for check in CHECKS))
