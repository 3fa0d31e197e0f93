"""Requests of the Responses API, and their streams put together as clients do it."""

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent

from tests.contract.openai.api import Answer, Api, Json
from tests.contract.openai.shapes import check_shape

_EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_FIRST = ["response.created", "response.in_progress"]

TOOLS: list[Json] = [
    {"type": "function", "name": "read", "description": "A file.", "parameters": {"type": "object"}, "strict": False},
    {"type": "function", "name": "now"},
]


async def respond(api: Api, said: str | None = None, **fields: Any) -> Answer:
    """Send a request; the model says what is `said`."""
    asked = {} if said is None else {"input": f"SAY:{said}"}
    return await api.send("POST", "/v1/responses", json={"model": "fake", **asked, **fields})


def events_of(answer: Answer) -> list[Json]:
    """Return the events of a stream, each as OpenAI's type has it, and numbered."""
    assert answer.status == 200, answer.text
    *frames, last = answer.text.split("\n\n")
    assert last == ""
    events = []
    for frame in frames:
        if not frame.startswith(":"):
            name, data = frame.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
            check_shape(events[-1], _EVENTS[events[-1]["type"]])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def put_together(events: list[Json]) -> Json:
    """Return the answer that a stream makes; what it tells twice must be the same."""
    assert [event["type"] for event in events[:2]] == _FIRST
    assert all(event["response"]["output"] == [] for event in events[:2])
    assert events[-1]["type"] in _ENDS
    items: list[Json] = []
    rest = events[2:-1]
    while rest:
        end = next(place for place, event in enumerate(rest) if event["type"] == "response.output_item.done")
        items.append(_item(rest[: end + 1], len(items)))
        rest = rest[end + 1 :]
    assert events[-1]["response"]["output"] == items
    check_shape(events[-1]["response"], Response)
    return {**events[-1]["response"], "output": items}


def _item(events: list[Json], place: int) -> Json:
    added, *inner, done = events
    item: Json = done["item"]
    assert added["type"] == "response.output_item.added"
    assert {event["output_index"] for event in events} == {place}
    assert {event["item_id"] for event in inner} == {item["id"]} == {added["item"]["id"]}
    deltas = [event for event in inner if event["type"].endswith(".delta")]
    told = "".join(event["delta"] for event in deltas)
    kinds = [event["type"].removeprefix("response.") for event in inner if event not in deltas]
    calls = {"function_call": ("arguments", "function_call_arguments"), "custom_tool_call": ("input",) * 2}
    if item["type"] in calls:
        field, kind = calls[item["type"]]
        assert kinds == [f"{kind.replace('input', 'custom_tool_call_input')}.done"]
        assert inner[-1][field] == item[field] == told
        return {**added["item"], field: told, "status": item["status"]}
    name = "summary" if item["type"] == "reasoning" and item["summary"] else "content"
    part = {"message": "output_text", "content": "reasoning_text", "summary": "reasoning_summary_text"}
    text_kind = part[item["type"] if item["type"] == "message" else name]
    part_kind = "reasoning_summary_part" if name == "summary" else "content_part"
    assert kinds == [f"{part_kind}.added", f"{text_kind}.done", f"{part_kind}.done"]
    assert {event["type"] for event in deltas} <= {f"response.{text_kind}.delta"}
    assert inner[-2]["text"] == told
    assert item[name] == [inner[-1]["part"]]
    assert inner[-1]["part"]["text"] == told
    if item["type"] == "message":
        logprobs = [entry for event in deltas for entry in event["logprobs"]]
        assert inner[-2]["logprobs"] == inner[-1]["part"]["logprobs"] == logprobs
    rest = {"encrypted_content": item["encrypted_content"]} if "encrypted_content" in item else {}
    return {**added["item"], name: [inner[-1]["part"]], "status": item["status"], **rest}


def comparable(response: Json) -> Json:
    """Return what of an answer follows from its tokens; the cache and the clock are not among it."""
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "usage": usage, "created_at": 0, "completed_at": 0}
