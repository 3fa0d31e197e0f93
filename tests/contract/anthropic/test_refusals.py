"""What is refused: by status and field, in one sentence, in the shape of Anthropic's errors."""

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from tests.contract.anthropic.messages import HEADERS, NOW, events_of, post, say, user
from tests.contract.anthropic.refused_rows import OF_CONVERSATIONS, OF_MESSAGES
from tests.contract.openai.api import Answer, Api, Json, running_api
from tests.support.each_row import each_row
from tests.support.echo_worker import EchoWorker
from tests.support.stack import until

MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"


def error_of(answer: Answer) -> tuple[int, str, str]:
    body = answer.json
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    return answer.status, body["error"]["type"], body["error"]["message"]


@each_row(*((MESSAGES, *row) for row in OF_CONVERSATIONS + OF_MESSAGES), *((COUNT, *row) for row in OF_CONVERSATIONS))
async def test_wrong_fields_are_named(path: str, fields: Json, name: str, words: str, *, api: Api) -> None:
    status, kind, message = error_of(await post(api, path, **fields))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(f"{name} is ")
    assert words in message
    assert not api.stack.engine.requests


async def test_a_thread_is_refused_with_the_code_by_which_clients_send_the_whole_conversation(api: Api) -> None:
    """As the tool runner of anthropic 2.14 sends it; it reads `details`, and asks again without `thread`."""
    answer = await post(api, thread={"type": "create"})
    error = answer.json["error"]
    assert answer.status == 400
    assert error["message"].startswith("thread is ")
    assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_a_prompt_that_is_too_long_has_the_words_that_clients_look_for(api: Api) -> None:
    for path in (MESSAGES, COUNT):
        status, kind, message = error_of(await post(api, path, messages=[user("x" * 9000)]))
        assert (status, kind) == (400, "invalid_request_error")
        assert message == f"prompt is too long: {message.split()[4]} tokens > 8191 maximum"
        assert int(message.split()[4]) > 9000
        huge = await post(api, path, messages=[user("x" * 900_000)])
        assert error_of(huge)[2].startswith("prompt is too long: it has ")


async def test_what_a_tool_template_does_not_know_is_refused() -> None:
    async with running_api(FakeWorker()) as api:
        tools = error_of(await post(api, tools=[NOW]))
        use = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "a", "content": "noon"}
        turns = [user("a"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        calls = error_of(await post(api, messages=turns))
        others = error_of(await post(api, COUNT, tools=[NOW]))
    assert tools == others
    assert tools[2].startswith("tools is set; it must be unset: this model's chat template does not support tools")
    assert calls[2].startswith("messages[1].tool_use is set; it must be unset")


async def test_a_format_without_json_holds_no_choice() -> None:
    async with running_api(EchoWorker(), tool_call_parser="pythonic") as api:
        for choice, name in (
            ({"type": "any"}, 'tool_choice.type is "any"'),
            ({"type": "tool", "name": "now"}, 'tool_choice.type is "any"'),
            ({"type": "auto", "disable_parallel_tool_use": True}, "tool_choice.disable_parallel_tool_use is true"),
        ):
            message = error_of(await post(api, tools=[NOW], tool_choice=choice))[2]
            assert message.startswith(f"{name}; it must be unset: the format pythonic of this model"), choice


# Method, path, what aiohttp sends; status, type, words.
JSON = {"Content-Type": "application/json"}
CLAUDE = {"model": "claude", "max_tokens": 1, "messages": say("a")}
ODD_CALLS: list[tuple[str, str, dict[str, Any], int, str, str]] = [
    ("GET", MESSAGES, {}, 405, "invalid_request_error", "answers POST"),
    ("POST", f"{MESSAGES}/batches", {"json": {}}, 404, "not_found_error", "unknown path"),
    ("GET", "/v1/models/x", {"headers": HEADERS}, 404, "not_found_error", 'model is "x"'),
    ("POST", MESSAGES, {"json": CLAUDE}, 404, "not_found_error", 'model is "claude"; it must be "fake"'),
    ("POST", MESSAGES, {"data": "{}"}, 415, "invalid_request_error", "Content-Type: application/json"),
    ("POST", MESSAGES, {"data": "{", "headers": JSON}, 400, "invalid_request_error", "the body is not valid JSON"),
    ("POST", MESSAGES, {"data": "[]", "headers": JSON}, 400, "invalid_request_error", "must be a JSON object"),
    ("POST", MESSAGES, {"json": {}, "headers": {"Host": "evil.example"}}, 403, "permission_error", "use its IP"),
]


@each_row(*ODD_CALLS)
async def test_odd_calls_are_answered_in_the_same_shape(
    method: str, path: str, options: dict[str, Any], status: int, kind: str, words: str, *, api: Api
) -> None:
    told = error_of(await api.send(method, path, **options))
    assert told[:2] == (status, kind)
    assert words in told[2]


async def test_unknown_fields_are_told_in_a_header_where_they_are_ignored() -> None:
    async with running_api(openai_unknown_fields="ignore") as api:
        block = {"type": "text", "text": "a", "x": 1}
        answer = await post(api, messages=[{"role": "user", "content": [block]}], nonsense=1, context_management={})
    assert answer.status == 200, answer.text
    assert answer.headers["x-octavo-ignored-fields"] == "nonsense, messages[0].content[0].x"


async def test_a_key_is_a_bearer_token(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("blue blue-token-0123456\n")
    statuses = {}
    async with running_api(tokens_file=tokens) as api:
        body = {"model": "fake", "max_tokens": 1, "messages": say("a")}
        for name, headers in {
            "none": {},
            "wrong": {"x-api-key": "x" * 20},
            "key": {"x-api-key": "blue-token-0123456"},
            "token": {"Authorization": "Bearer blue-token-0123456"},
            "both": {"Authorization": "Bearer blue-token-0123456", "x-api-key": "x"},
        }.items():
            answer = await api.send("POST", MESSAGES, json=body, headers=headers)
            statuses[name] = answer.status
            if answer.status != 200:
                assert error_of(answer)[1] == "authentication_error"
        tenants = {ended.tenant for ended in api.stack.engine.ended.values()}
    assert statuses == {"none": 401, "wrong": 401, "key": 200, "token": 200, "both": 200}
    assert tenants == {"blue"}


async def test_who_comes_too_early_or_too_late_is_told_when_to_come_again() -> None:
    async with running_api(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_requests=1) as api:
        waiting = []
        for number in range(2):
            waiting.append(asyncio.create_task(post(api, messages=[user(f"{number}")], max_tokens=4000)))
            await until(
                lambda: api.stack.engine.load.num_running == 1 and len(api.stack.engine.requests) == len(waiting)
            )
        full = await post(api)
        for task in waiting:
            task.cancel()
        await until(lambda: not api.stack.engine.requests)
    async with running_api(ready=False) as api:
        await api.stack.engine.start_draining()
        draining = await post(api)
    assert error_of(full)[:2] == (429, "rate_limit_error")
    assert error_of(draining)[:2] == (529, "overloaded_error")
    assert full.headers["retry-after"] == draining.headers["retry-after"] == "1"


async def test_a_client_that_leaves_ends_its_request() -> None:
    async with running_api(FakeWorker(step_ms=1)) as api:
        asking = asyncio.create_task(post(api, max_tokens=8000, stream=True))
        await until(lambda: api.stack.engine.load.num_running)
        asking.cancel()
        await until(lambda: not api.stack.engine.requests)
        [ended] = api.stack.engine.ended.values()
    assert ended.error_message == "the client cancelled the call or disconnected"


async def test_a_stream_that_fails_ends_with_an_error() -> None:
    async with running_api(FakeWorker(step_ms=1)) as api:
        asking = asyncio.create_task(post(api, max_tokens=4000, stream=True))
        await until(lambda: any(request.num_output_tokens for request in api.stack.engine.requests.values()))
        [request_id] = [request.request_id for request in api.stack.engine.requests.values()]
        await api.stack.engine.abort_request(request_id, None)
        answer = await asking
    *_, last = events_of(answer.text)
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    assert request_id in last["error"]["message"]
    assert last["request_id"] == answer.headers["request-id"]


TURNS = {
    "messages": b'{"role":"user","content":""},',
    "blocks": b'{"role":"user","content":[{"type":"text","text":""}]},',
    "no messages": b"0,",
}


@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
async def test_a_body_full_of_messages_is_refused(api: Api, turn: bytes) -> None:
    begin = b'{"model":"fake","max_tokens":1,"messages":['
    number = (4 * 2**20 - 64 - len(begin)) // len(turn)
    body = begin + turn * number + turn[:-1] + b"]}"
    answer = await api.send("POST", MESSAGES, data=io.BytesIO(body), headers=JSON)
    assert error_of(answer)[:2] == (400, "invalid_request_error")


async def test_a_body_that_is_too_long_is_refused(api: Api) -> None:
    answer = await api.send("POST", MESSAGES, data=io.BytesIO(b" " * (4 * 2**20 + 1)), headers=JSON)
    assert error_of(answer)[:2] == (413, "request_too_large")


async def test_a_bug_is_told_without_what_it_says(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("scheduler_svc.front.api.generation.tokenize", stumble)
    told = error_of(await post(api))
    assert told == (500, "api_error", "the server failed with KeyError; see its log")
