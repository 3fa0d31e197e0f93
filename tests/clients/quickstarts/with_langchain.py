"""Quickstarts of langchain-openai and langchain-anthropic: chat models, tools, `with_structured_output`."""

from checks import MODEL, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

TRANSLATION = [("system", "You are a helpful assistant."), ("human", "What is the capital of the UK?")]


class Joke(BaseModel):
    """Joke to tell user."""

    setup: str = Field(description="The setup of the joke")
    punchline: str = Field(description="The punchline to the joke")
    rating: int | None = Field(default=None, description="How funny the joke is, from 1 to 10")


@tool
def get_weather(location: str) -> str:
    """Get the current weather in a given location."""
    return f"sunny and 21 in {location}"


MODELS = {
    "chat": lambda: ChatOpenAI(model=MODEL),
    "responses": lambda: ChatOpenAI(model=MODEL, use_responses_api=True),
    "anthropic": lambda: ChatAnthropic(model=MODEL, max_tokens=1024),
}


def invoke(kind: str) -> None:
    message = MODELS[kind]().invoke(TRANSLATION)
    assert message.text == "London"
    assert message.usage_metadata["output_tokens"] == len("London") + 1


def stream(kind: str) -> None:
    assert "".join(chunk.text for chunk in MODELS[kind]().stream(TRANSLATION)) == "London"


async def asynchronous(kind: str) -> None:
    llm = MODELS[kind]()
    assert (await llm.ainvoke(TRANSLATION)).text == "London"
    assert "".join([chunk.text async for chunk in llm.astream(TRANSLATION)]) == "London"
    assert [message.text for message in await llm.abatch([TRANSLATION, TRANSLATION])] == ["London", "London"]


def bind_tools(kind: str) -> None:
    for strict in (None, True):
        llm = MODELS[kind]().bind_tools([get_weather], **({} if strict is None else {"strict": strict}))
        messages = [HumanMessage("What is the weather like in Paris?")]
        answer = llm.invoke(messages)
        messages.append(answer)
        for call in answer.tool_calls:
            assert call["args"] == {"location": "Paris"}
            messages.append(get_weather.invoke(call))
        assert llm.invoke(messages).text == "It is sunny and 21 degrees in Paris."


def structured_default(kind: str) -> None:
    prompt = "Tell me a joke about cats" if kind != "anthropic" else "Tell me a joke on cats"
    joke = MODELS[kind]().with_structured_output(Joke).invoke(prompt)
    assert joke == Joke(setup="Why do cats sit?", punchline="They can.", rating=7)


def structured_json_schema(kind: str) -> None:
    joke = MODELS[kind]().with_structured_output(Joke, method="json_schema").invoke("Tell me a joke about cats")
    assert joke.rating == 7


def structured_function_calling(kind: str) -> None:
    structured = MODELS[kind]().with_structured_output(Joke, method="function_calling", include_raw=True)
    answer = structured.invoke("Tell me a joke on cats")
    assert answer["parsed"] == Joke(setup="Why do cats sit?", punchline="They can.", rating=7)


def structured_json_mode(kind: str) -> None:
    if kind != "anthropic":  # which has no such mode
        structured = MODELS[kind]().with_structured_output(Joke, method="json_mode")
        assert structured.invoke("Tell me in JSON a joke about cats").rating == 7


def completion() -> None:
    assert OpenAI(model=MODEL).invoke("What is the capital of the UK?") == "London"


def _of(kind: str, check: object) -> object:
    def of_kind() -> object:
        return check(kind)

    of_kind.__name__ = f"{kind}_{check.__name__}"
    return of_kind


CHECKS = (
    invoke,
    stream,
    asynchronous,
    bind_tools,
    structured_default,
    structured_json_schema,
    structured_function_calling,
    structured_json_mode,
)
run(*(_of(kind, check) for kind in MODELS for check in CHECKS), completion)
