"""Quickstarts of instructor: its README, and its modes for OpenAI and Anthropic."""

import instructor
from checks import MODEL, run
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


JOHN = [{"role": "user", "content": "John is 25 years old"}]
JSON_JOHN = [{"role": "user", "content": "as JSON: John is 25 years"}]
USER = {"name": "John", "age": 25}


def from_provider() -> None:
    client = instructor.from_provider(f"openai/{MODEL}")
    user = client.chat.completions.create(response_model=User, messages=JOHN)
    assert user.model_dump() == USER


async def from_provider_async() -> None:
    client = instructor.from_provider(f"openai/{MODEL}", async_client=True)
    user = await client.chat.completions.create(response_model=User, messages=JOHN)
    assert user.model_dump() == USER


def from_provider_anthropic() -> None:
    client = instructor.from_provider(f"anthropic/{MODEL}")
    user = client.chat.completions.create(response_model=User, messages=JOHN, max_tokens=1024)
    assert user.model_dump() == USER


def partial() -> None:
    client = instructor.from_provider(f"openai/{MODEL}")
    messages = [{"role": "user", "content": "in parts: John is 25"}]
    users = client.chat.completions.create(response_model=instructor.Partial[User], messages=messages, stream=True)
    last = list(users)[-1]
    assert (last.name, last.age) == ("John", 25)


def create_with_completion() -> None:
    client = instructor.from_openai(OpenAI())
    user, completion = client.chat.completions.create_with_completion(model=MODEL, response_model=User, messages=JOHN)
    assert user.model_dump() == USER
    assert completion.usage.completion_tokens > 0


async def from_openai_async() -> None:
    client = instructor.from_openai(AsyncOpenAI())
    user = await client.chat.completions.create(model=MODEL, response_model=User, messages=JOHN)
    assert user.model_dump() == USER


def _mode(name: str) -> object:
    def check() -> None:
        client = instructor.from_openai(OpenAI(), mode=instructor.Mode[name])
        messages = JSON_JOHN if "JSON" in name else JOHN
        user = client.chat.completions.create(model=MODEL, response_model=User, messages=messages)
        assert user.model_dump() == USER

    check.__name__ = f"mode_{name}"
    return check


MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS")
run(
    from_provider,
    from_provider_async,
    from_provider_anthropic,
    partial,
    create_with_completion,
    from_openai_async,
    *map(_mode, MODES),
)
