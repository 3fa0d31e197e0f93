"""What is refused: by status and field, in one sentence, in the shape of OpenAI's errors."""

import asyncio
import io
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from scheduler_svc.front.openai import body
from tests.contract.openai.api import HELLO, Api, Json, running_api
from tests.support.stack import WithoutTokenizer, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# Fields, the one that is wrong, and the rest of the sentence.
OF_BOTH: list[tuple[Json, str, str]] = [
    ({"model": None}, "model", "absent; it must be the name of the served model, fake"),
    ({"model": 3}, "model", "3; it must be a text"),
    ({"temperature": -1}, "temperature", "-1; it must be from 0 to 100"),
    ({"temperature": "hot"}, "temperature", "'hot'; it must be a number"),
    ({"temperature": True}, "temperature", "true; it must be a number"),
    ({"temperature": 10**400}, "temperature", ""),
    ({"top_p": 0}, "top_p", "0; it must be above 0 and at most 1"),
    ({"top_k": -2}, "top_k", "-2; it must be from 0 to 2147483647"),
    ({"n": 0}, "n", "0; it must be from 1 to"),
    ({"n": 0, "temperature": 0}, "n", "0; it must be from 1 to 128"),
    ({"n": 129, "temperature": 0}, "n", "129; it must be from 1 to 128"),
    ({"n": 1.5}, "n", "1.5; it must be a whole number"),
    ({"n": 10**30}, "n", ""),
    ({"max_tokens": 0}, "max_tokens", "0; it must be"),
    ({"max_tokens": -5}, "max_tokens", "-5; it must be"),
    ({"seed": 2**64}, "seed", f"{2**64}; it must be a whole number of 64 bits"),
    ({"stop": [""]}, "stop", "a list with a string of 0 characters; it must be strings of 1 to 1024 characters"),
    ({"stop": ["a"] * 17}, "stop", "17 strings; it must be at most 16 strings"),
    ({"stop": [1]}, "stop", "[1]; it must be a text, or an array of texts"),
    ({"stop": 5}, "stop", "5; it must be a text, or an array of texts"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "a list with token id 300; it must be ids from 0 to 258"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids", "a list with a number of more than 32 bits"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "an object with the name 'x'; it must be biases by token id"),
    ({"logit_bias": {"65": 101}}, "logit_bias", "a list with bias 101 for token id 65"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "301 ids long; it must be at most 300 ids long"),
    ({"bad_words": [""]}, "bad_words", "a list with a word of 0 characters"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "21; it must be from 0 to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "1; it must be unset with stream"),
    ({"priority": 1}, "priority", "1; it must be 0: this server serves in order of arrival"),
    ({"priority": 2**40}, "priority", f"{2**40}; it must be a whole number of 32 bits"),
    ({"cache_salt": "x" * 300}, "cache_salt", "300 characters long; it must be at most 256 characters long"),
    ({"request_id": "x" * 300}, "request_id", "characters long; it must be at most 256 characters long"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens", "9; it must be from 0 to 4 (max_tokens)"),
    ({"stream": "yes"}, "stream", "'yes'; it must be true or false"),
    ({"stream_options": {}}, "stream_options", "set; it must be unset without stream true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "set; it must be unset"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "true; it must be false or unset",
    ),
    ({"length_penalty": 1}, "length_penalty", "1; it must be unset without beam_width"),
    ({"use_beam_search": True}, "beam_width", "1; it must be from 2 to 16"),
    ({"use_beam_search": True, "n": 2, "temperature": 1.5}, "temperature", "1.5; it must be 0 or unset"),
    ({"early_stopping": "maybe"}, "early_stopping", ""),
    ({"response_format": {"type": "json_object"}}, "response_format", "this release does not constrain"),
    ({"store": True}, "store", "true; it must be unset or false: nothing is stored"),
    ({"service_tier": "flex"}, "service_tier", "'flex'; it must be unset or 'auto' or 'default'"),
    ({"guided_regex": "a+"}, "guided_regex", "'a+'; it must be unset: this release does not constrain"),
    ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "refused, never cut"),
    ({"logits_processors": ["x"]}, "logits_processors", "programs of callers are never run"),
    ({"nonsense": 1}, "nonsense", "is not a field of this request"),
    ({"\n" * 9: 1}, "\n" * 9, "is not a field of this request"),
]

OF_COMPLETIONS: list[tuple[Json, str, str]] = [
    ({"prompt": None}, "prompt", "absent; it must be a text, an array of token ids"),
    ({"prompt": 5}, "prompt", "of type number; it must be"),
    ({"prompt": ""}, "prompt", "empty; it must be at least 1 token long"),
    ({"prompt": []}, "prompt", "an empty array; it must be"),
    ({"prompt": [[]]}, "prompt", "empty; it must be at least 1 token long"),
    ({"prompt": ["a", ""]}, "prompt", "empty; it must be at least 1 token long"),
    ({"prompt": [[65], 65]}, "prompt.1", "of type number; it must be a text or an array of token ids"),
    ({"prompt": [65, "a"]}, "prompt", "an array with something else than whole numbers"),
    ({"prompt": [65, True]}, "prompt", "an array with something else than whole numbers"),
    ({"prompt": [300]}, "prompt", "a list with token id 300; it must be ids from 0 to 258"),
    ({"prompt": [2**33]}, "prompt", "a list with a number of more than 32 bits"),
    ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts; it must be at most 1024 prompts"),
    ({"logprobs": 21}, "logprobs", "21; it must be from 0 to 20"),
    ({"logprobs": -1}, "logprobs", "-1; it must be"),
    ({"logprobs": True}, "logprobs", "true; it must be a whole number"),
    ({"logprobs": 21, "echo": True}, "logprobs", "21; it must be from 0 to 20"),
    ({"best_of": 2, "n": 3}, "best_of", "2; it must be from 3 (n) to"),
    ({"best_of": 2, "n": 3, "temperature": 0}, "best_of", "2; it must be at least 3 (n)"),
    ({"suffix": "end"}, "suffix", "'end'; it must be unset or ''"),
    ({"messages": HELLO}, "messages", "is not a field of this request"),
]

OF_CHATS: list[tuple[Json, str, str]] = [
    ({"messages": None}, "messages", "None; it must be an array"),
    ({"messages": []}, "messages", "empty; it must be at least 1 message long"),
    ({"messages": ["hi"]}, "messages.0", "'hi'; it must be an object"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role", "absent; it must be set"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "absent; it must be a text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "5; it must be"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0",
        "a part of type image_url; it must be a part of type text",
    ),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0", "no object; it must be a part"),
    (
        {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]},
        "messages.0.audio",
        "set; it must be unset",
    ),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "3; it must be unset with max_completion_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0; it must be"),
    ({"top_logprobs": 1}, "top_logprobs", "1; it must be 0 or unset without logprobs true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21; it must be from 0 to 20"),
    ({"logprobs": 1}, "logprobs", "1; it must be true or false"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "an object with the name 'messages'"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "an object with the name 'a b'"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "programs of callers are never run"),
    ({"modalities": ["audio"]}, "modalities", "['audio']; it must be unset or ['text']"),
    ({"prompt": "hi"}, "prompt", "is not a field of this request"),
    ({"best_of": 2}, "best_of", "is not a field of this request"),
]


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
    for answer in (
        await api.complete(prompt="x" * 9000),
        await api.complete(prompt=[65] * 9000),
        await api.chat(messages=[{"role": "user", "content": "x" * 9000}]),
        await api.chat(messages=[{"role": "user", "content": "x" * 900_000}]),
    ):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_another_model_is_not_found(api: Api) -> None:
    answer = await api.chat(model="gpt-5")
    assert answer.status == 404
    assert answer.error == {
        "message": "model is gpt-5; it must be fake, the one that is served here",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


async def test_unknown_fields_are_told_in_a_header_where_they_are_ignored() -> None:
    async with running_api(openai_unknown_fields="ignore") as api:
        answer = await api.complete(nonsense=1, **{"more\r\nx-evil: 1": 2, "\0,\x7f\xe9": 3}, max_tokens=1)
        refused = await api.complete(suffix="x", nonsense=1)
    assert answer.status == 200
    assert answer.headers["x-octavo-ignored-fields"] == "nonsense, more??x-evil: 1, ????"
    assert (refused.status, refused.error["param"]) == (400, "suffix")


# Method, path, what aiohttp sends; status, words.
ODD_CALLS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", "/v1/embeddings", {"json": {}}, 404, "there is nothing at this path"),
    ("GET", "/", {}, 404, "there is nothing at this path"),
    ("GET", CHAT, {}, 405, "answers POST"),
    ("PUT", CHAT, {"json": {}}, 405, "answers POST"),
    ("OPTIONS", CHAT, {"headers": {"Origin": "http://evil"}}, 405, "answers POST"),
    ("POST", "/health", {}, 405, "answers GET"),
    ("POST", CHAT, {"data": "{}"}, 415, "Content-Type: application/json"),
    ("POST", CHAT, {"data": {"a": "b"}}, 415, "Content-Type: application/json"),
    ("POST", CHAT, {"json": {}, "headers": {"Content-Encoding": "gzip"}}, 415, "compressed"),
    ("POST", CHAT, {"json": []}, 400, "must be a JSON object"),
    ("POST", CHAT, {"json": {}, "headers": {"Host": "evil.example"}}, 403, "call it by its IP address"),
    ("POST", CHAT, {"json": {}, "headers": {"Sec-Fetch-Site": "cross-site"}}, 403, "other web sites"),
    ("POST", "/tokenize", {"json": {}}, 400, "it must be set, or messages"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "messages": HELLO}}, 400, "it must be set, or messages"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "model": "x"}}, 404, "model is x"),
    ("POST", "/detokenize", {"json": {"tokens": [999]}}, 400, "tokens is a list with token id 999"),
    ("POST", "/detokenize", {"json": {"tokens": [65] * 9000}}, 400, "at most 8192 tokens long"),
    ("POST", "/detokenize", {"json": {"tokens": ["a"]}}, 400, "a whole number"),
    ("GET", "/v1/models/other", {}, 404, "model is other"),
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
    "nothing": b"",
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
    assert answer.error["message"].startswith("the body is not JSON")
    assert len(answer.text) < 1000


async def test_a_text_may_have_as_many_commas_as_it_likes(api: Api) -> None:
    answer = await api.complete(prompt="," * 600_000)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_a_body_that_is_too_long_or_too_slow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.1)
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
    assert (taken.status, len(taken.json["choices"][0]["token_ids"])) == (200, 2)
    assert (text.status, text.error["param"]) == (400, "prompt")
    assert (chat.status, chat.error["param"]) == (400, "messages")
    assert "no tokenizer" in tokens.error["message"]


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
    assert answer.error["message"] == "the server failed with KeyError; its log says more"
    assert answer.headers["x-should-retry"] == "false"
