"""What the Responses API refuses: by status and field, in one sentence, in the shape of OpenAI's errors."""

import io

from tests.contract.openai.api import Api, Json
from tests.contract.responses.answers import TOOLS, respond

CALL = {"type": "function_call", "call_id": "a", "name": "read", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "a", "name": "js", "input": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "x"}
AGENTS = {"type": "namespace", "name": "a", "tools": [TOOLS[0]]}
USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "json_schema", "name": "a", "strict": True}

REFUSED: list[tuple[Json, str, str]] = [
    ({}, "input", "absent; it must be set"),
    ({"input": None}, "input", "null; it must be"),
    ({"input": []}, "input", "empty; it must be a string, or at least 1 item long"),
    ({"input": 3}, "input", "3; it must be"),
    ({"input": ["x"]}, "input[0]", '"x"; it must be an object'),
    ({"input": [USER, {"type": "item_reference", "id": "a"}]}, "input[1].type", "with `store` false agents send items"),
    ({"input": [USER, {"id": "a"}]}, "input[1].type", '"item_reference"; it must be the item itself'),
    ({"input": [{"type": "compaction", "encrypted_content": "a"}]}, "input[0].type", "the items that it stands for"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", '"computer_call"; it must be one of message, function'),
    ({"input": [{**CUSTOM, "input": {}}]}, "input[0].input", "{}; it must be a text"),
    ({"input": [{**CALL, "namespace": 3}]}, "input[0].namespace", "3; it must be a text"),
    ({"input": [{"type": None, "role": "user", "content": ""}]}, "input[0].type", "absent; it must be one of"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", '"tool"; it must be one of user, assistant'),
    ({"input": [{"content": "x"}]}, "input[0].role", "absent; it must be one of"),
    ({"input": [{"role": "user"}]}, "input[0].content", "absent; it must be a string, or an array of text parts"),
    ({"input": [{**USER, "content": [3]}]}, "input[0].content[0]", "3; it must be a part of type input_text"),
    (
        {"input": [{**USER, "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0]",
        'a part of type "input_image"; it must be a part of type input_text or output_text: the model',
    ),
    (
        {"input": [{**USER, "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "absent; it must be a text",
    ),
    ({"input": [USER, OUTPUT]}, "input[1].call_id", '"a"; it must be the call_id of a function_call or custom'),
    ({"input": [OUTPUT, CALL]}, "input[0].call_id", "in front of it"),
    ({"input": [CALL, CALL]}, "input[1].call_id", '"a"; it must be unlike the ids of the calls before'),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "{}; it must be a text"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name", "absent; it must be a text"),
    ({"input": [CALL, {**OUTPUT, "output": 3}]}, "input[1].output", "3; it must be a string"),
    ({"input": [{**USER, "colour": "red"}]}, "input[0].colour", '"input[0].colour" is not a field'),
    (
        {"input": [{**USER, "content": [{"type": "input_text", "text": "", "x": 1}]}]},
        "input[0].content[0].x",
        "not a field",
    ),
    ({"input": "x", "colour": "red"}, "colour", '"colour" is not a field of this request'),
    ({"input": "x", "max_tokens": 5}, "max_tokens", '"max_tokens" is not a field of this request'),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "0; it must be"),
    ({"input": "x", "temperature": -1}, "temperature", "-1; it must be from 0 to 100"),
    (
        {"input": "x", "top_logprobs": 2},
        "top_logprobs",
        "2; it must be 0 or unset without message.output_text.logprobs",
    ),
    ({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "21; it must be"),
    ({"input": "x", "include": ["all"]}, "include[0]", '"all"; it must be one of message.output_text.logprobs'),
    ({"input": "x", "truncation": "auto"}, "truncation", '"auto"; it must be "disabled" or unset'),
    ({"input": "x", "metadata": {"a": 1}}, "metadata.a", "1; it must be a text"),
    ({"input": "x", "previous_response_id": "a"}, "previous_response_id", "nothing is stored"),
    ({"input": "x", "conversation": "a"}, "conversation", "nothing is stored"),
    ({"input": "x", "background": True}, "background", "true; it must be unset or false: nothing is stored"),
    ({"input": "x", "prompt": {"id": "a"}}, "prompt", "there are no stored prompts"),
    ({"input": "x", "tools": [3]}, "tools[0]", "3; it must be an object with a type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "unset; it must be 1 to"),
    ({"input": "x", "tools": [{"type": "mcp"}, {**TOOLS[0], "parameters": 3}]}, "tools[1].parameters", "3; it must be"),
    ({"input": "x", "tools": [{"type": "namespace", "tools": []}]}, "tools[0].name", "absent; it must be a text"),
    ({"input": "x", "tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "absent; it must be an array"),
    ({"input": "x", "tools": [{**AGENTS, "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name", "unset; it must"),
    ({"input": "x", "tools": [{**AGENTS, "tools": [{**TOOLS[0], "x": 1}]}]}, "tools[0].tools[0].x", "not a field"),
    (
        {"input": "x", "tools": [{"type": "custom", "name": "a", "format": 3}]},
        "tools[0].format",
        "3; it must be an obj",
    ),
    (
        {"input": "x", "tools": [AGENTS, {**TOOLS[0], "name": "a__read"}]},
        "tools[1].name",
        '"a__read"; it must be a uni',
    ),
    ({"input": "x", "tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name", '"read"; it must be a unique name'),
    ({"input": "x", "tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "no tool of the request is"),
    (
        {"input": "x", "tools": TOOLS, "tool_choice": {"type": "web_search"}},
        "tool_choice",
        "other tools do not exist here",
    ),
    (
        {"input": "x", "tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        '"x"; it must',
    ),
    (
        {"input": "x", "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "all"}},
        "tool_choice.mode",
        '"all"',
    ),
    (
        {
            "input": "x",
            "tools": TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        },
        "tool_choice.tools[0]",
        "it must be a function in tools",
    ),
    ({"input": "x", "text": "json"}, "text", '"json"; it must be an object'),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", '"xml"; it must be "text"'),
    ({"input": "x", "text": {"format": SCHEMA}}, "text.format.schema", "absent; it must be a JSON schema"),
    ({"input": "x", "text": {"format": {**SCHEMA, "schema": {"type": 3}}}}, "text.format.schema", "it must be"),
    ({"input": "x", "reasoning": "high"}, "reasoning", '"high"; it must be an object'),
    ({"input": "x", "reasoning": {"effort": 3}}, "reasoning.effort", "3; it must be a text"),
]


async def test_wrong_fields_are_named(api: Api) -> None:
    for fields, param, words in REFUSED:
        answer = await respond(api, **fields)
        assert answer.status == 400, (fields, answer.text)
        assert answer.error["param"] == param, (fields, answer.error)
        assert words in answer.error["message"], (fields, answer.error)
        assert "messages[" not in answer.text, (fields, answer.error)
    assert not api.stack.engine.requests


async def test_endpoints_that_are_not_there_say_why(api: Api) -> None:
    for method, path, words in (
        ("GET", "resp_a", "GET /v1/responses/resp_a is not here: responses are not stored"),
        ("DELETE", "resp_a", "responses are not stored"),
        ("GET", "resp_a/input_items", "send the whole conversation as `input`"),
        ("POST", "resp_a/cancel", "close it to cancel"),
        ("POST", "compact", "nothing is compacted"),
        ("POST", "input_tokens", "/tokenize counts those of chats"),
    ):
        answer = await api.send(method, f"/v1/responses/{path}")
        assert answer.status == 404, (path, answer.text)
        assert words in answer.error["message"], (path, answer.error)


async def test_bodies_that_are_none_are_refused_and_others_go_on(api: Api) -> None:
    for body, status in ((b"", 400), (b"{", 400), (b"[]", 400), (b'{"input": "' + b"x" * 5_000_000 + b'"}', 413)):
        answer = await api.send(
            "POST", "/v1/responses", data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        )
        assert (answer.status, answer.error["type"]) == (status, "invalid_request_error")
    answer = await respond(api, input="x" * 100_000)
    assert (answer.error["param"], answer.error["code"]) == ("input", "context_length_exceeded")
    assert (await api.get("/v1/responses")).status == 405
    assert (await respond(api, "fine")).json["status"] == "completed"
