"""What is refused: by status and field, in one sentence, in the shape of OpenAI's errors."""

import asyncio
import io
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.front.openai import call
from tests.contract.openai.api import HELLO, Api, running_api
from tests.contract.openai.refused_rows import OF_BOTH, OF_CHATS, OF_COMPLETIONS
from tests.support.stack import WithoutTokenizer, until

CHAT = "/v1/chat/completions"


async def test_wrong_fields_are_named(api: Api) -> None:
    for rows, send in (
        (OF_BOTH + OF_COMPLETIONS, api.complete),
        (OF_BOTH + OF_CHATS, api.chat),
    ):
        for fields, param, words in rows:
            answer = await send(**fields)
            assert answer.status == 400, (fields, answer.text)
            assert answer.error["param"] == param, (fields, answer.error)
            assert words in answer.error["message"], (fields, answer.error)
            assert answer.error["type"] == "invalid_request_error"
            assert "sampling_params" not in answer.text, "clients here know no such thing"
    assert not api.stack.engine.requests


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(api: Api) -> None:
    for answer, name in (
        (await api.complete(prompt="x" * 9000), "prompt"),
        (await api.complete(prompt=["x", "x" * 9000]), "prompt[1]"),
        (await api.complete(prompt=[65] * 9000), "prompt"),
        (await api.chat(messages=[{"role": "user", "content": "x" * 9000}]), "messages"),
        (await api.chat(messages=[{"role": "user", "content": "x" * 900_000}]), "messages"),
    ):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "context_length_exceeded", name)
        message = answer.error["message"]
        assert message.startswith(("prompt is too long: it has ", "prompt[1] is too long: it has "))
        assert "; this model's maximum context length is 8192 tokens, and one is reserved for the output" in message
        # As LiteLLM and LangChain see it: the client's error in words.
        assert "this model's maximum context length is" in message.lower()
        assert "context_length_exceeded" in str(answer.error)


async def test_another_model_is_not_found(api: Api) -> None:
    answer = await api.chat(model="gpt-5")
    assert answer.status == 404
    assert answer.error == {
        "message": 'model is "gpt-5"; it must be "fake", the served model',
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_unknown_fields_are_told_in_a_header_where_they_are_ignored() -> None:
    async with running_api(openai_unknown_fields="ignore") as api:
        answer = await api.complete(nonsense=1, **{"more\r\nx-evil: 1": 2, "\0,\x7f\xe9": 3}, max_tokens=1)
        refused = await api.complete(suffix="x", nonsense=1)
        part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "y": 1}
        messages = [{"role": "user", "content": "hi", "cache_control": {"type": "ephemeral"}}]
        inner = await api.chat(
            messages=[*messages, {"role": "user", "content": [part]}],
            stream=True,
            stream_options={"x": 1},
            max_tokens=1,
        )
        audio = await api.chat(messages=[{"role": "assistant", "content": "a", "audio": {"id": "x"}}])
        absent = await api.complete(prompt=None, messages=[])
    assert answer.status == 200
    assert answer.headers["x-octavo-ignored-fields"] == "nonsense, more??x-evil: 1, ????"
    assert inner.status == 200
    assert inner.headers["x-octavo-ignored-fields"] == (
        "stream_options.x, messages[0].cache_control, messages[1].content[0].cache_control, messages[1].content[0].y"
    )
    assert (audio.status, audio.error["param"]) == (400, "messages[0].audio")
    assert absent.error["message"].endswith('the request has "messages", a field of /v1/chat/completions')
    assert (refused.status, refused.error["param"]) == (400, "suffix")


# Method, path, what aiohttp sends; status, words.
ODD_CALLS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "/v1", {}, 404, "/v1/models/NAME, "),
    ("GET", CHAT, {}, 405, "answers POST"),
    ("PUT", CHAT, {"json": {}}, 405, "answers POST"),
    ("OPTIONS", CHAT, {"headers": {"Origin": "http://evil"}}, 405, "answers POST"),
    ("POST", "/health", {}, 405, "answers GET"),
    ("POST", CHAT, {"data": "{}"}, 415, "Content-Type: application/json"),
    ("POST", CHAT, {"data": {"a": "b"}}, 415, "Content-Type: application/json"),
    ("POST", CHAT, {"json": {}, "headers": {"Content-Encoding": "gzip"}}, 415, "compressed"),
    ("POST", CHAT, {"json": []}, 400, "must be a JSON object"),
    ("POST", CHAT, {"json": {}, "headers": {"Host": "evil.example"}}, 403, "use its IP address"),
    ("POST", CHAT, {"json": {}, "headers": {"Sec-Fetch-Site": "cross-site"}}, 403, "other web sites"),
    ("POST", "/tokenize", {"json": {}}, 400, "it must be set, or messages"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "messages": HELLO}}, 400, "it must be set, or messages"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "model": "x"}}, 404, 'model is "x"'),
    ("POST", "/detokenize", {"json": {"tokens": [999]}}, 400, "tokens is a list with token id 999"),
    ("POST", "/detokenize", {"json": {"tokens": [65] * 9000}}, 400, "at most 8192 tokens long"),
    ("POST", "/detokenize", {"json": {"tokens": ["a"]}}, 400, "a whole number"),
    ("GET", "/v1/models/other", {}, 404, 'model is "other"'),
    ("GET", "/v1/models/", {}, 404, 'model is ""; it must be "fake"'),
    (
        "POST",
        CHAT,
        {"data": " ", "headers": {"Content-Type": "application/json"}},
        400,
        "the body is empty; it must be",
    ),
    ("POST", CHAT, {"json": {"mesages": HELLO}}, 400, 'messages is absent; it must be set: the request has "mesages"'),
    ("POST", CHAT, {"json": {"prompt": "a"}}, 400, 'the request has "prompt", a field of /v1/completions'),
]


async def test_odd_calls_are_answered_in_the_same_shape(api: Api) -> None:
    for method, path, options, status, words in ODD_CALLS:
        answer = await api.send(method, path, **options)
        assert answer.status == status, (method, path, options, answer.text)
        assert words in answer.error["message"], answer.text
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["x-request-id"]


# Bodies that are no JSON that is taken.
BODIES = {
    "no JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "half a character": b'{"model": "\\ud800"}',
    "no number": b'{"temperature": NaN}',
    "deep": b"[" * 100_000,
    "many lists": b"[" + b"[]," * 700_000 + b"[]]",
    "many objects": b'{"x":[' + b"{}," * 700_000 + b"{}]}",
    "many names": b"{" + b",".join(b'"%x":0' % number for number in range(300_000)) + b"}",
}


@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
async def test_what_is_no_json_is_refused(api: Api, content: bytes) -> None:
    answer = await api.send("POST", CHAT, data=io.BytesIO(content), headers={"Content-Type": "application/json"})
    assert answer.status == 400
    assert answer.error["message"].startswith("the body is not valid JSON")
    assert len(answer.text) < 1000


async def test_a_text_may_have_as_many_commas_as_it_likes(api: Api) -> None:
    answer = await api.complete(prompt="," * 600_000)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_a_body_that_is_too_long_or_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "BODY_TIMEOUT_S", 0.1)
    async with running_api(max_request_bytes=2**16) as api:
        assert (await api.complete(prompt="x" * 2**16)).status == 413

        async def endless() -> Any:
            yield b"{"
            await asyncio.Event().wait()

        headers = {"Content-Type": "application/json"}
        answer = await api.send("POST", CHAT, data=endless(), headers=headers)
        assert (answer.status, answer.headers["connection"]) == (408, "close")

        async def long() -> Any:
            for _ in range(100):
                yield b" " * 1024

        assert (await api.send("POST", CHAT, data=long(), headers=headers)).status == 413


async def test_a_model_without_tokenizer_takes_token_ids() -> None:
    async with running_api(WithoutTokenizer()) as api:
        taken = await api.complete(prompt=[65, 66], max_tokens=2, return_token_ids=True)
        text = await api.complete()
        chat = await api.chat()
        tokens = await api.send("POST", "/tokenize", json={"prompt": "a"})
        info = await api.get("/tokenizer_info")
    assert (taken.status, len(taken.json["choices"][0]["token_ids"])) == (200, 2)
    assert (text.status, text.error["param"]) == (400, "prompt")
    assert (chat.status, chat.error["param"]) == (400, "messages")
    assert "no tokenizer; send token ids to /v1/completions, or" in chat.error["message"]
    assert "no tokenizer" in tokens.error["message"]
    assert (info.json["eos_token"], info.json["chat_template"]) == (None, None)


async def test_a_full_queue_says_when_to_come_again() -> None:
    async with running_api(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_requests=1) as api:
        waiting = []
        for number in range(2):
            waiting.append(asyncio.create_task(api.complete(prompt=[65 + number], max_tokens=4000)))
            await until(
                lambda: api.stack.engine.load.num_running == 1 and len(api.stack.engine.requests) == len(waiting)
            )
        answer = await api.complete()
        for task in waiting:
            task.cancel()
        await until(lambda: not api.stack.engine.requests)
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    assert (answer.error["type"], answer.error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


async def test_more_prompts_than_can_ever_be_here_are_refused_for_good() -> None:
    async with running_api(FakeWorker(step_ms=1), max_num_seqs=1, max_waiting_requests=2) as api:
        answer = await api.complete(prompt=[[65]] * 4)
        fewer = await api.complete(prompt=[[65]] * 3, max_tokens=1)
        assert not api.stack.engine.requests
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert answer.error["message"].startswith("prompt is 4 prompts; it must be at most 3 prompts: ")
    assert fewer.status in (200, 429), "whether it fits depends on how soon the first one is admitted"


async def test_a_live_request_keeps_its_id_and_who_is_aborted_hears_it() -> None:
    async with running_api(FakeWorker(step_ms=1)) as api:
        first = asyncio.create_task(api.complete(max_tokens=4000, request_id="mine"))
        await until(lambda: api.stack.engine.requests)
        second = await api.complete(request_id="mine")
        await api.stack.engine.abort_request("cmpl-mine", None)
        aborted = await first
    for answer in (second, aborted):
        assert (answer.status, answer.headers["x-should-retry"]) == (409, "false")
        assert answer.error["type"] == "invalid_request_error"
        assert "cmpl-mine" in answer.error["message"]
    assert (second.error["param"], aborted.error["param"]) == ("request_id", None)


async def test_without_executors_requests_are_refused_for_now() -> None:
    async with running_api(ready=False) as api:
        await api.stack.engine.start_draining()
        answer, health = await api.complete(), await api.get("/health")
    for refused in (answer, health):
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert refused.error["type"] == "server_error"
        assert "draining" in refused.error["message"]


async def test_a_bug_is_told_without_what_it_says(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("scheduler_svc.front.api.generation.tokenize", stumble)
    answer = await api.complete()
    assert answer.status == 500
    assert answer.error["message"] == "the server failed with KeyError; see its log"
    assert answer.headers["x-should-retry"] == "false"
