"""Bodies as Anthropic's clients and Claude Code send them, written down after their sources; and held answers."""

import json
from typing import Any

from tests.contract.anthropic.messages import post, streamed, told, user, whole
from tests.contract.openai.api import Json, running_api
from tests.support.each_row import each_row
from tests.support.echo_worker import EchoWorker
from tests.support.tool_worker import ToolWorker

ONE = {"disable_parallel_tool_use": True}
MARK = {"cache_control": {"type": "ephemeral"}}
SCHEMA: Json = {
    "type": "object",
    "properties": {"file_path": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 9}},
    "required": ["file_path", "count"],
    "additionalProperties": False,
}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


def tool(name: str, **more: Any) -> Json:
    return {"name": name, "description": f"{name}s a file. " * 4, "input_schema": {**DRAFT, **SCHEMA}, **more}


READ = {"type": "tool_use", "id": "toolu_01A09q90qw90lq917835lq9", "name": "Read", "input": {"file_path": "/a"}}

# Claude Code: a session with two rounds, many tools, and what it sends for titles and for counts.
CLAUDE_CODE: Json = {
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cc_entrypoint=cli;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **MARK},
        {"type": "text", "text": "\nYou are an interactive CLI tool.\n" * 100, **MARK},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nAs you answer...\n</system-reminder>\n"},
                {"type": "text", "text": "Fix the bug.", **MARK},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "octavo"},
                {"type": "text", "text": "I read it."},
                READ,
                {**READ, "id": "toolu_2", "name": "Bash", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": READ["id"], "content": "     1\u2192import os\n"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": [{"type": "text", "text": "<tool_use_error>no</tool_use_error>"}],
                    "is_error": True,
                    **MARK,
                },
            ],
        },
        user("[Request interrupted by user]"),
        user("SAY:I read on."),
    ],
    "tools": [tool(name) for name in ("Read", "Edit", "Write", "Bash", "Glob", "Grep", "Task", "TodoWrite")]
    + [tool(f"mcp__a_server_with_a_long_name__{'x' * 60}{number}", eager_input_streaming=True) for number in range(40)],
    "metadata": {"user_id": "user_0_account__session_0"},
    "max_tokens": 32_000,
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 1,
}

BODIES: dict[str, Json] = {
    "Claude Code": CLAUDE_CODE,
    "Claude Code, a title": {
        "system": [{"type": "text", "text": "Write a title."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "SAY:A title"}]}],
        "tools": [],
        "max_tokens": 512,
        "temperature": 0,
        "metadata": {"user_id": "x"},
    },
    "anthropic, the quickstart": {"messages": [user("SAY:Hello")], "max_tokens": 16},
    "langchain-anthropic": {"messages": [user("SAY:Hi")], "max_tokens": 16, "stop_sequences": None, "thinking": None},
    "pydantic-ai": {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "SAY:Hi"}]}],
        "tools": [{"name": "final", "description": "", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 16,
    },
}


@each_row(*BODIES.items())
async def test_what_clients_send_is_answered(name: str, body: Json) -> None:
    async with running_api(EchoWorker(max_model_len=65_536, num_device_blocks=5000)) as api:
        message = await whole(api, **body)
        assert told(await streamed(api, **body)) == told(message)
        counted = {name: body.get(name) for name in ("system", "messages", "tools", "thinking", "tool_choice")}
        count = await post(api, "/v1/messages/count_tokens", **counted)
    assert count.json["input_tokens"] == told(message)["usage"][0]


@each_row(
    ({"tool_choice": {"type": "any", **ONE}}, "Read"),
    ({"tool_choice": {"type": "tool", "name": "Read", **ONE}}, "Read"),
    ({"tools": [tool("Read", strict=True)], "tool_choice": {"type": "any", **ONE}}, "Read, by its schema"),
    ({"tools": None, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text, by the schema"),
)
async def test_what_is_asked_for_holds(fields: Json, expected: str) -> None:
    """The model writes noise; the grammar makes it say this."""
    async with running_api(ToolWorker()) as api:
        asked = {"messages": [user("hi")], "tools": [tool("Read")], "max_tokens": 2000, "seed": 1, **fields}
        message = await whole(api, **asked)
        assert told(await streamed(api, **asked)) == told(message)
    block = message["content"][0]
    if expected.startswith("Read"):
        assert (block["name"], message["stop_reason"]) == ("Read", "tool_use")
        arguments = block["input"]
    else:
        arguments = json.loads(block["text"])
    if "schema" in expected:
        assert set(arguments) == {"file_path", "count"}
        assert arguments["count"] <= 9
