"""Requests that are refused: fields, the one that is wrong, and the rest of the sentence."""

from tests.contract.anthropic.messages import NOW, WEATHER, user
from tests.contract.openai.api import Json

USE: Json = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "a", "content": "noon"}
CALLED = [user("hi"), {"role": "assistant", "content": [USE]}]


def blocks(*content: object, role: str = "user") -> Json:
    return {"role": role, "content": list(content)}


def messages(*turns: Json) -> Json:
    return {"messages": list(turns)}


# Of both endpoints.
OF_CONVERSATIONS: list[tuple[Json, str, str]] = [
    ({"model": None}, "model", "absent; it must be the name of the served model, fake"),
    (messages(), "messages", "empty; it must be at least 1 message long"),
    ({"messages": "hi"}, "messages", '"hi"; it must be an array'),
    ({"messages": None}, "messages", "absent; it must be set"),
    (messages({"role": "user"}), "messages[0].content", "absent"),
    (messages({"content": "a"}), "messages[0].role", "absent"),
    (messages({"role": "user", "content": 3}), "messages[0].content", "3; it must be"),
    (messages({"role": "system", "content": "a"}), "messages[0].role", '"system"; it must be user or assistant'),
    (messages({"role": "tool", "content": "a"}), "messages[0].role", '"tool"; it must be user or assistant'),
    (
        messages(user("a"), {"role": "assistant", "content": "I"}),
        "messages[1].role",
        '"assistant"; it must be "user": this server does not continue an answer',
    ),
    (messages({**user("a"), "name": "x"}), '"messages[0].name"', "not a field of this request"),
    (messages(blocks(3)), "messages[0].content[0]", "3; it must be a block of type text or tool_result"),
    (messages(blocks({"text": "a"})), "messages[0].content[0]", "a block of type absent"),
    (messages(blocks({"type": "text"})), "messages[0].content[0].text", "absent; it must be a text"),
    (messages(blocks({"type": "text", "text": "a", "x": 1})), '"messages[0].content[0].x"', "not a field"),
    (messages(blocks({"type": "image", "source": {}})), "messages[0].content[0]", 'a block of type "image"; it must'),
    (messages(blocks({"type": "document"})), "messages[0].content[0]", "the model accepts text only"),
    (messages(blocks(USE)), "messages[0].content[0]", 'a block of type "tool_use"; it must'),
    (messages(blocks(RESULT)), "messages[0].content[0].tool_use_id", '"a"; it must be the id of a tool_use block'),
    (
        messages(*CALLED, blocks({**RESULT, "tool_use_id": "b"})),
        "messages[2].content[0].tool_use_id",
        '"b"; it must be the id of a tool_use block',
    ),
    (messages(*CALLED, blocks(RESULT, RESULT)), "messages[2].content[1].tool_use_id", "with one result each"),
    (
        messages(*CALLED, blocks(RESULT), {"role": "assistant", "content": "ok"}, blocks(RESULT)),
        "messages[4].content[0].tool_use_id",
        "of the assistant's message before",
    ),
    (messages(*CALLED, blocks({**RESULT, "is_error": 1})), "messages[2].content[0].is_error", "1; it must be true"),
    (
        messages(*CALLED, blocks({**RESULT, "content": [{"type": "image"}]})),
        "messages[2].content[0].content[0]",
        'a block of type "image"; it must be a block of type text',
    ),
    (messages(*CALLED, blocks({**RESULT, "content": 3})), "messages[2].content[0].content", "3; it must be a string"),
    (
        messages(user("a"), blocks({**USE, "input": "x"}, role="assistant"), user("b")),
        "messages[1].content[0].input",
        '"x"; it must be an object',
    ),
    (
        messages(user("a"), blocks(USE, USE, role="assistant"), user("b")),
        "messages[1].content[1].id",
        "unlike the ids of the other calls",
    ),
    ({"system": 3}, "system", ""),
    ({"system": [{"type": "image"}]}, "system[0]", 'a block of type "image"; it must be a block of type text'),
    ({"system": [{"type": "text", "text": "a", "x": 1}]}, '"system[0].x"', "not a field"),
    ({"tools": [3]}, "tools[0]", "3; it must be an object"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "absent; it must be a JSON schema"),
    ({"tools": [{**NOW, "name": "a b"}]}, "tools[0].name", '"a b"; it must be 1 to 128 of'),
    ({"tools": [NOW, NOW]}, "tools[1].name", '"now"; it must be a unique name'),
    ({"tools": [{**NOW, "strict": 1}]}, "tools[0].strict", "1; it must be true, false, or unset"),
    ({"tools": [{**NOW, "description": 1}]}, "tools[0].description", "1; it must be a string"),
    ({"tools": [{**NOW, "x": 1}]}, '"tools[0].x"', "not a field"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", '"web_search_20250305"; it'),
    ({"tools": [NOW] * 129}, "tools", "129 tools long; it must be 1 to 128 tools long"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", '{"type": "any"}; it must be unset, or of type none'),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", '"any"; it must be an object'),
    ({"tools": [NOW], "tool_choice": {"type": "some"}}, "tool_choice.type", '"some"; it must be one of auto, any'),
    (
        {"tools": [NOW], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice.name",
        '"x"; it must be the name of a function in tools',
    ),
    (
        {"tools": [NOW], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
        "1; it must be true",
    ),
    ({"thinking": True}, "thinking", "true; it must be an object"),
    ({"thinking": {"type": "on"}}, "thinking.type", '"on"; it must be one of enabled'),
    ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens", "a whole number"),
    ({"thinking": {"type": "enabled", "x": 1}}, '"thinking.x"', "not a field"),
    ({"output_config": {"x": 1}}, '"output_config.x"', "not a field"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", '"text"; it must be "json_schema"'),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": 3}}},
        "output_config.format.schema",
        "3; it must be a JSON schema",
    ),
    ({"mesages": []}, '"mesages"', "not a field of this request; did you mean messages?"),
    ({"mcp_servers": [{}]}, "mcp_servers", "it must be unset or []: the client calls MCP servers"),
]

OF_MESSAGES: list[tuple[Json, str, str]] = [
    ({"max_tokens": None}, "max_tokens", "absent; it must be set"),
    ({"max_tokens": 0}, "max_tokens", "0; it must be"),
    ({"max_tokens": "x"}, "max_tokens", '"x"; it must be a whole number'),
    ({"temperature": -1}, "temperature", "-1; it must be from 0"),
    ({"top_p": 0}, "top_p", "0; it must be above 0"),
    ({"top_k": -3}, "top_k", "-3; it must be from 0"),
    ({"stop_sequences": "x"}, "stop_sequences", '"x"; it must be an array'),
    ({"stop_sequences": [""]}, "stop_sequences", "a list with a string of 0 characters; it must be strings of 1"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences", "17 strings; it must be at most 16 strings"),
    ({"stream": 1}, "stream", "1; it must be true or false"),
    ({"service_tier": "batch"}, "service_tier", "there are no service tiers"),
    (
        {"tools": [{**WEATHER, "strict": True, "input_schema": {"type": "object", "$ref": "http://x"}}]},
        "tools[0].input_schema",
        "",
    ),
    ({"tools": [{**WEATHER, "strict": True, "input_schema": {"type": "array"}}]}, "tools[0].input_schema", "array"),
]
