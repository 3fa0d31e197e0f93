"""OpenAI's own client, and what agents send."""

import json

import openai
from openai.types.responses import Response
from pydantic import BaseModel

from scheduler_svc.front.responses.conversation import chat_conversation
from scheduler_svc.front.responses.fields import ResponseFields
from scheduler_svc.front.responses.tools import chat_tools
from tests.contract.openai.api import Api, Json, running_api
from tests.contract.openai.shapes import check_shape
from tests.contract.responses.answers import TOOLS, comparable, events_of, put_together, respond
from tests.support.tool_worker import ToolWorker

KINDS = ("function", "custom")
READ = '<tool_call>{"name": "read", "arguments": {"path": "a.txt"}}</tool_call>'


class Point(BaseModel):
    """What is asked for."""

    x: int
    name: str


def client(api: Api) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


async def test_openais_client_gets_texts_streams_and_objects(api: Api) -> None:
    async with client(api) as sdk:
        whole = await sdk.responses.create(model="fake", input="SAY:Ünd 🦊", metadata={"a": "b"}, store=True)
        assert (whole.output_text, whole.status, whole.metadata) == ("Ünd 🦊", "completed", {"a": "b"})
        assert whole.model_dump()["store"] is False
        assert whole.usage is not None
        assert whole.usage.output_tokens == len("Ünd 🦊".encode()) + 1
        async with sdk.responses.stream(model="fake", input="SAY:Ünd 🦊") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            assert deltas == list("Ünd 🦊")
            assert (await stream.get_final_response()).output_text == "Ünd 🦊"
        parsed = await sdk.responses.parse(model="fake", input='SAY:{"x": 3, "name": "ü"}', text_format=Point)
        assert parsed.output_parsed == Point(x=3, name="ü")


async def test_strict_schemas_and_tools_hold_where_the_model_writes_noise() -> None:
    strict = {
        **TOOLS[0],
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
        "strict": True,
    }
    async with running_api(ToolWorker()) as api, client(api) as sdk:
        parsed = await sdk.responses.parse(model="fake", input="hello", text_format=Point)
        assert isinstance(parsed.output_parsed, Point)
        for choice in ("required", {"type": "function", "name": "read"}):
            answer = await respond(api, "", tools=[strict], tool_choice=choice, max_output_tokens=500)
            calls = [item for item in answer.json["output"] if item["type"] == "function_call"]
            assert calls, answer.text
            assert all(json.loads(call["arguments"]).keys() == {"n"} for call in calls)


async def test_an_agent_sends_back_what_it_got(api: Api) -> None:
    said = f"<think>Which file?</think>I look.{READ}"
    first = (await respond(api, said, tools=TOOLS, include=["reasoning.encrypted_content"])).json
    thought, text, call = first["output"]
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    del thought["content"]  # as Codex does
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "hello"},
        *(thought, text, call),
        {"type": "function_call_output", "call_id": call["call_id"], "output": "SAY:It is 42."},
    ]
    answer = await respond(api, instructions="You are Codex.", input=items, tools=TOOLS)
    assert answer.json["output"][0]["content"][0]["text"] == "It is 42."
    chat = chat_conversation(ResponseFields(instructions="You are Codex.", input=items))
    assert [message.model_dump(exclude_none=True) for message in chat.messages] == [
        {"role": "system", "content": "You are Codex.\n\nBe brief."},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Which file?",
            "tool_calls": [
                {
                    "id": call["call_id"],
                    "type": "function",
                    "function": {"name": "read", "arguments": call["arguments"]},
                }
            ],
        },
        {"role": "tool", "content": "SAY:It is 42.", "tool_call_id": call["call_id"]},
    ]


async def test_reasoning_of_other_servers_is_left_out_and_named(api: Api) -> None:
    for encrypted in ("gAAAA", "octavo:%"):
        reasoning = {"type": "reasoning", "summary": [], "encrypted_content": encrypted}
        answer = await respond(api, input=[{"role": "user", "content": "SAY:a"}, reasoning])
        assert answer.status == 200, answer.text
        assert answer.headers["x-octavo-ignored-fields"] == "input[1].encrypted_content"


LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}

# What Codex CLI sends, but for its long texts.
CODEX: Json = {
    "instructions": "You are Codex.",
    "tools": [
        TOOLS[0],
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "description": "", "format": LARK},
        {"type": "namespace", "name": "multi_agent_v1", "description": "", "tools": [TOOLS[0]]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"x-codex-installation-id": "a"},
    "text": {"verbosity": "low"},
}


PATCH = '*** Begin Patch\n+ü "🦊"\n*** End Patch'


async def test_custom_tools_and_those_of_namespaces_are_called_by_their_own_names(api: Api) -> None:
    spawn = {"type": "function", "name": "spawn", "description": None, "parameters": {"type": "object"}}
    agents = {
        "type": "namespace",
        "name": "agents",
        "description": "",
        "tools": [spawn, {"type": "custom", "name": "js"}],
    }
    tools = [TOOLS[0], CODEX["tools"][3], agents]
    said = {  # by what the model writes: what the client gets
        ("read", '{"path": "a"}'): {"type": "function_call", "name": "read", "arguments": '{"path": "a"}'},
        ("agents__spawn", "{}"): {"type": "function_call", "name": "spawn", "namespace": "agents", "arguments": "{}"},
        ("apply_patch", json.dumps({"input": PATCH})): {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "input": PATCH,
        },
        ("apply_patch", json.dumps({"patch": PATCH})): {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "input": PATCH,
        },
        ("agents__js", '{"input": 3}'): {
            "type": "custom_tool_call",
            "name": "js",
            "namespace": "agents",
            "input": '{"input": 3}',
        },
    }
    written = [f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>' for name, arguments in said]
    whole = await respond(api, "".join(written), tools=tools, request_id="r")
    check_shape(whole.json, Response)
    streamed = events_of(await respond(api, "".join(written), tools=tools, request_id="r", stream=True))
    assert comparable(put_together(streamed)) == comparable(whole.json)
    told = [{name: item[name] for name in call} for item, call in zip(whole.json["output"], said.values(), strict=True)]
    assert told == list(said.values())
    assert [item.get("namespace") for item in whole.json["output"]] == [call.get("namespace") for call in said.values()]
    assert [tool["name"] for tool in whole.json["tools"]] == ["read", "apply_patch", "agents"]

    outputs = [
        {"type": f"{item['type'].removesuffix('_call')}_call_output", "call_id": item["call_id"], "output": "SAY:Done."}
        for item in whole.json["output"]
    ]
    searched = {"type": "web_search_call", "id": "ws_a", "status": "completed", "action": {"type": "search"}}
    items = [{"role": "user", "content": "x"}, searched, *whole.json["output"], *outputs]
    answer = await respond(api, input=items, tools=tools)
    assert answer.json["output"][0]["content"][0]["text"] == "Done.", answer.text
    assert answer.headers["x-octavo-ignored-fields"] == "tools[1].format, input[1].web_search_call"
    [_, turn, *_] = chat_conversation(ResponseFields(input=items)).messages
    calls = [call["function"] for call in turn.tool_calls or ()]
    assert [call["name"] for call in calls] == [name for name, _ in said]
    assert [json.loads(call["arguments"]) for call in calls[2:]] == [{"input": PATCH}] * 2 + [{"input": '{"input": 3}'}]


async def test_a_choice_finds_custom_tools_and_those_of_namespaces() -> None:
    tools = [{"type": "namespace", "name": "a", "tools": [{**TOOLS[0], "type": kind, "name": kind} for kind in KINDS]}]
    in_a = [{"type": kind, "name": kind, "namespace": "a"} for kind in KINDS]
    cases: list[tuple[Json, set[str]]] = [
        *((one, {one["name"]}) for one in in_a),
        *(({"type": "allowed_tools", "mode": "required", "tools": [one]}, {one["name"]}) for one in in_a),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "a"}]}, set(KINDS)),
    ]
    for choice, names in cases:
        chat = chat_tools(ResponseFields(input="x", tools=tools, tool_choice=choice))
        if choice["type"] == "allowed_tools":
            got = {tool["function"]["name"] for tool in chat.chat["tools"]}
        else:
            got = {chat.chat["tool_choice"]["function"]["name"]}
        assert got == {f"a__{name}" for name in names}, choice


async def test_what_codex_sends_is_answered_and_what_is_left_out_is_named(api: Api) -> None:
    for codex in (
        CODEX,
        {
            **CODEX,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "read"}]},
        },
    ):
        answer = await respond(api, f"Hm.</think>{READ}", **codex)
        assert answer.status == 200, answer.text
        thought, call = answer.json["output"]
        assert thought["summary"] == [{"type": "summary_text", "text": "Hm."}]
        assert (call["name"], call["arguments"]) == ("read", '{"path": "a.txt"}')
        left_out = "tools[1].local_shell, tools[2].web_search, tools[3].format, text.verbosity"
        assert answer.headers["x-octavo-ignored-fields"] == left_out
        assert len(answer.headers["x-request-id"]) == 32
