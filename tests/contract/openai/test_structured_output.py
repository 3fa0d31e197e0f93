"""Answers that follow what was asked for, over HTTP, from a fake executor that would write anything else."""

import json
import re
from typing import Any

import pydantic
import pytest
from openai import AsyncOpenAI, pydantic_function_tool

from executor_svc.fake.worker import FakeWorker
from tests.contract.openai.api import HELLO, Api, Json, running_api
from tests.contract.openai.client_bodies import BODIES
from tests.support.each_row import each_row
from tests.support.tool_worker import ToolWorker

WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SCHEMA = {"type": "object", "properties": {"city": WORD}, "required": ["city"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
CITY = re.compile(r'\{\s*"city"\s*:\s*"[a-z]{1,8}"\s*\}')
DATE = re.compile(r"\d{4}-\d\d")

# Fields of both endpoints, and what the whole text of an answer is.
HELD: list[tuple[Json, re.Pattern[str]]] = [
    ({"response_format": FORMAT}, CITY),
    ({"response_format": FORMAT, "n": 3, "temperature": 1.5}, CITY),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, CITY),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, CITY),
    ({"structured_outputs": {"regex": r"\d{4}-\d\d"}}, DATE),
    ({"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": True}, re.compile("yes|no")),
    ({"structured_outputs": {"regex": "a{0,9}"}, "ignore_eos": True, "min_tokens": 9, "seed": 1}, re.compile("a{9}")),
    ({"structured_outputs": {"grammar": 'start: "a" b\nb: /[01]{3}/'}}, re.compile("a[01]{3}")),
    ({"guided_json": SCHEMA}, CITY),
    ({"guided_regex": r"\d{4}-\d\d", "temperature": 0}, DATE),
    ({"guided_choice": ["yes", "no"]}, re.compile("yes|no")),
    ({"guided_grammar": "start: /[a-c]{2}/", "guided_decoding_backend": "auto"}, re.compile("[a-c]{2}")),
]


@pytest.fixture
async def api() -> Any:
    async with running_api(FakeWorker(num_device_blocks=256, max_model_len=512)) as running:
        yield running


@each_row(*HELD)
async def test_an_answer_follows_what_was_asked_for(fields: Json, whole: re.Pattern[str], *, api: Api) -> None:
    for answer in (await api.chat(**fields), await api.complete(**fields, max_tokens=200)):
        assert answer.status == 200, answer.text
        assert len(answer.json["choices"]) == fields.get("n", 1)
        for choice in answer.json["choices"]:
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert whole.fullmatch(text), text
            assert choice["finish_reason"] == "stop"
    streamed = await api.chat(**fields, stream=True)
    texts: dict[int, str] = {}
    for event in streamed.events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    assert all(whole.fullmatch(text) for text in texts.values()), texts


async def test_an_object_is_json_or_cut(api: Api) -> None:
    answer = await api.chat(response_format={"type": "json_object"}, max_tokens=40, seed=3)
    [choice] = answer.json["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])


async def test_without_strict_a_schema_is_advice_in_the_prompt(api: Api) -> None:
    plain = await api.chat(max_tokens=4)
    for strict in ({}, {"strict": False}, {"strict": None}):
        asked = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**SCHEMA, "uniqueItems": True}, **strict},
        }
        answer = await api.chat(response_format=asked, max_tokens=4, return_token_ids=True)
        prompt = bytes(token for token in answer.json["prompt_token_ids"] if token < 256).decode()
        assert "hello\n\nAnswer with JSON that is valid by this JSON schema, and nothing else:\n{" in prompt
        assert '"uniqueItems":true' in prompt
        assert answer.json["usage"]["prompt_tokens"] > plain.json["usage"]["prompt_tokens"]


UNHELD = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}


def strict(schema: Any) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}}


REFUSED: list[tuple[Json, str, str]] = [
    (
        strict(UNHELD),
        "response_format.json_schema.schema",
        '"uniqueItems" at #/properties/tags; it must be one without it',
    ),
    (strict({"$ref": "#"}), "response_format.json_schema.schema", "no text satisfies it"),
    (strict({"type": "x"}), "response_format.json_schema.schema", "Invalid type: x"),
    (strict({"enum": ["x" * 300_000]}), "response_format.json_schema.schema", "a JSON schema of at most 262144 bytes"),
    (strict(None), "response_format.json_schema.schema", "absent; it must be a JSON schema"),
    ({"response_format": []}, "response_format", "an object"),
    ({"response_format": {}}, "response_format.type", 'absent; it must be "text", "json_object" or "json_schema"'),
    ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type", '"structural_tag"'),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "response_format has type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
        "1",
    ),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "unclosed character class"),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "with structured_outputs.regex",
    ),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "follows one of json, regex",
    ),
    ({"structured_outputs": {"choice": "ab"}}, "structured_outputs.choice", "an array of texts"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "5; it must be a JSON schema, or its text"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "unset with guided_regex"),
    ({"guided_regex": 5}, "guided_regex", "a text"),
    ({"guided_choice": []}, "guided_choice", "0 texts long"),
    ({"guided_grammar": "root ::= a"}, "guided_grammar", "a grammar in Lark's notation that outputs can follow: "),
    ({"guided_regex": "a", "use_beam_search": True, "n": 2}, "guided_regex", "unset with beam_width"),
]


@each_row(*REFUSED)
async def test_what_cannot_be_held_is_refused_by_its_name(fields: Json, param: str, says: str, *, api: Api) -> None:
    for answer in (await api.chat(**fields), await api.complete(**fields)):
        assert (answer.status, answer.error["param"]) == (400, param)
        assert says in answer.error["message"]
    assert (await api.chat(max_tokens=2)).status == 200


async def test_a_completion_cannot_be_asked_by_advice(api: Api) -> None:
    answer = await api.complete(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert (answer.status, answer.error["param"]) == (400, "response_format.json_schema.strict")


async def test_where_no_executor_offers_grammars_a_sentence_says_so() -> None:
    async with running_api(FakeWorker(num_device_blocks=64, max_grammar_slots=0)) as api:
        answer = await api.chat(response_format=FORMAT)
        assert (answer.status, answer.error["param"]) == (400, "response_format.json_schema.schema")
        assert "no executor of this model offers grammars" in answer.error["message"]


class Weather(pydantic.BaseModel):
    """A report."""

    kind: str = pydantic.Field(pattern="^(sun|rain)$")
    degrees: int = pydantic.Field(ge=-40, le=50)


@pytest.fixture
async def with_tools() -> Any:
    async with running_api(ToolWorker(num_device_blocks=512, max_model_len=4096, eos_probability=0.5)) as running:
        yield running


async def test_the_first_examples_of_openai_run_unchanged(with_tools: Api) -> None:
    messages: Any = HELLO
    async with AsyncOpenAI(base_url=f"{with_tools.url}/v1", api_key="none") as client:
        parsed = await client.chat.completions.parse(model="fake", messages=messages, response_format=Weather)
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        tools: Any = [pydantic_function_tool(Weather)]
        called = await client.chat.completions.parse(
            model="fake", messages=messages, tools=tools, tool_choice="required"
        )
        call, *_ = called.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        assert called.choices[0].finish_reason == "tool_calls"
        named: Any = {"type": "function", "function": {"name": "Weather"}}
        async with client.chat.completions.stream(
            model="fake", messages=messages, tools=tools, tool_choice=named
        ) as stream:
            last = await stream.get_final_completion()
        call, *_ = last.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)


@each_row(*BODIES)
async def test_the_bodies_of_libraries_are_answered_as_they_expect(name: str, *, with_tools: Api) -> None:
    body, kind = BODIES[name]
    answer = await with_tools.send("POST", "/v1/chat/completions", json={**body, "model": "fake"})
    assert answer.status == 200, answer.text
    message = answer.json["choices"][0]["message"]
    if kind == "content":
        Weather.model_validate_json(message["content"])
    elif kind == "free":
        assert "tool_calls" not in message
    else:
        call, *others = message["tool_calls"]
        assert not others or body.get("parallel_tool_calls") is not False
        assert call["function"]["name"] == kind
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
