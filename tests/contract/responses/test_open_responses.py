"""The compliance cases of Open Responses (openresponses.org) that a server of texts over HTTP can pass.

Not among them: WebSocket, /compact and images. The keys are those that its schema requires, null or not.
"""

import time

from tests.contract.openai.api import Api, Json
from tests.contract.responses.answers import events_of, put_together, respond

_RESPONSE = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage"),
    *("max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
_ITEMS = {
    "message": {"type", "id", "status", "role", "content"},
    "function_call": {"type", "id", "call_id", "name", "arguments", "status"},
    "reasoning": {"type", "id", "summary"},
}
_PART = {"type", "text", "annotations", "logprobs"}
_TOOL = {"type", "name", "description", "parameters", "strict"}
_USAGE = {"input_tokens", "output_tokens", "total_tokens", "input_tokens_details", "output_tokens_details"}

# Those that may not be null, and their types.
_TYPES = {
    **dict.fromkeys(("top_p", "presence_penalty", "frequency_penalty", "temperature"), float),
    **dict.fromkeys(("created_at", "top_logprobs"), int),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), bool),
    **dict.fromkeys(("id", "status", "model", "truncation", "service_tier"), str),
}

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]},
}
_CALL = '<tool_call>{"name": "get_weather", "arguments": {"location": "Rome"}}</tool_call>'


def message(role: str, content: str, **rest: str) -> Json:
    return {"type": "message", "role": role, "content": content, **rest}


# By the names that the suite has for them; the last message says what the model answers, a call where there are tools.
CASES: dict[str, Json] = {
    "basic-response": {"input": [message("user", "SAY:Hello to you.")]},
    "assistant-phase": {
        "input": [
            message("assistant", "I should answer with the saved number.", phase="commentary"),
            message("assistant", "The number is four.", phase="final_answer"),
            message("user", "SAY:Four."),
        ]
    },
    "system-prompt": {"input": [message("system", "You are a pirate."), message("user", "SAY:Ahoy.")]},
    "tool-calling": {"input": [message("user", f"SAY:{_CALL}")], "tools": [WEATHER]},
    "multi-turn": {"input": [message("user", "I am Alice."), message("assistant", "Hello."), message("user", "SAY:A")]},
    "what is sent stands in the answer": {
        "input": [message("user", "SAY:Hello")],
        "max_tool_calls": 2,
        "safety_identifier": "a",
        "prompt_cache_key": "b",
        "user": "c",
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "temperature": 0.5,
    },
}


def check(response: Json, tools: list[Json]) -> None:
    """Fail if a response is not as the schema has it."""
    assert response.keys() >= _RESPONSE, _RESPONSE - response.keys()
    for name, kind in _TYPES.items():
        assert isinstance(response[name], kind), (name, response[name])
    assert all(item.keys() >= _ITEMS[item["type"]] for item in response["output"]), response["output"]
    assert all(part.keys() >= _PART for item in response["output"] for part in item.get("content", ()))
    assert len(response["tools"]) == len(tools)
    assert all(tool.keys() >= _TOOL for tool in response["tools"]), response["tools"]


async def test_the_cases_pass_whole_and_streamed(api: Api) -> None:
    for name, fields in CASES.items():
        before = int(time.time())
        whole = (await respond(api, **fields)).json
        events = events_of(await respond(api, **fields, stream=True))
        for response in (whole, put_together(events)):
            check(response, fields.get("tools", []))
            assert response["status"] == "completed", name
            assert before <= response["created_at"] <= response["completed_at"] <= time.time()
            assert response["usage"].keys() >= _USAGE
            kinds = [item["type"] for item in response["output"]]
            assert kinds == ["function_call" if "tools" in fields else "message"], name
            sent = {key: value for key, value in fields.items() if key not in ("input", "tools")}
            assert {key: response[key] for key in sent} == sent
        for event in events[:2]:
            check(event["response"], fields.get("tools", []))
            assert event["response"]["completed_at"] is None
