"""Requests of the Messages API, and answers as Anthropic's clients put them together."""

import json
from typing import Any

from tests.contract.openai.api import Answer, Api, Json

HEADERS = {"anthropic-version": "2023-06-01", "x-api-key": "none"}

MESSAGE = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
USAGE = {"input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens"}
BLOCKS = {
    "text": {"type", "text"},
    "thinking": {"type", "thinking", "signature"},
    "tool_use": {"type", "id", "name", "input"},
}
DELTAS = {
    ("text", "text_delta"): "text",
    ("thinking", "thinking_delta"): "thinking",
    ("thinking", "signature_delta"): "signature",
    ("tool_use", "input_json_delta"): "partial_json",
}

WEATHER: Json = {
    "name": "get_weather",
    "description": "Of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW: Json = {"name": "now", "input_schema": {"type": "object"}}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def say(text: str) -> list[Json]:
    """Messages for the echo worker."""
    return [user(f"SAY:{text}")]


async def post(api: Api, path: str = "/v1/messages", **fields: Any) -> Answer:
    """Send a request; a field that is None is left out."""
    body = {"model": "fake", "messages": [user("hello")], **fields}
    if path == "/v1/messages":
        body = {"max_tokens": 400, **body}
    body = {name: value for name, value in body.items() if value is not None}
    return await api.send("POST", path, json=body, headers=HEADERS)


async def whole(api: Api, **fields: Any) -> Json:
    answer = await post(api, **fields)
    assert answer.status == 200, answer.text
    message = answer.json
    assert set(message) == MESSAGE
    assert set(message["usage"]) == USAGE
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    for block in message["content"]:
        assert set(block) == BLOCKS[block["type"]]
    return message


async def streamed(api: Api, **fields: Any) -> Json:
    answer = await post(api, **fields, stream=True)
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return joined(events_of(answer.text))


def events_of(text: str) -> list[Json]:
    """Return the events of a stream, whose names and types are equal; comments are left out."""
    frames = text.split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        if lines:
            name, data = lines
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def joined(events: list[Json]) -> Json:
    """Return the message that the events make, as Anthropic's client does, and strictly in their order."""
    start, *events = events
    assert start["type"] == "message_start", start
    message: Json = start["message"]
    assert set(message) == MESSAGE
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"], events[-3:]
    end = events[-2]
    texts: list[str] = []
    is_open = has_ping = False
    content = message["content"]
    for event in events[:-2]:
        match event["type"]:
            case "ping":
                has_ping = True
            case "content_block_start":
                assert (is_open, event["index"]) == (False, len(content))
                is_open, texts = True, []
                content.append(event["content_block"])
                assert set(content[-1]) == BLOCKS[content[-1]["type"]]
            case "content_block_delta":
                assert (is_open, event["index"]) == (True, len(content) - 1)
                block, delta = content[-1], event["delta"]
                name = DELTAS[block["type"], delta["type"]]
                assert set(delta) == {"type", name}
                if name == "partial_json":
                    texts.append(delta[name])
                else:
                    block[name] += delta[name]
            case "content_block_stop":
                assert (is_open, event["index"]) == (True, len(content) - 1)
                is_open = False
                if texts:
                    content[-1]["input"] = json.loads("".join(texts))
            case other:
                raise AssertionError(other)
    assert not is_open
    assert has_ping == bool(content)
    assert set(end["usage"]) == USAGE
    return {**message, **end["delta"], "usage": end["usage"]}


def told(message: Json) -> Json:
    """Return what does not depend on when a request came: no ids, and tokens from the cache among the others."""
    usage = message["usage"]
    content = [{**block, "id": ""} if "id" in block else block for block in message["content"]]
    num_input = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**message, "id": "", "content": content, "usage": [num_input, usage["output_tokens"]]}
