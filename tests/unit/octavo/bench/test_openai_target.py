"""The target that speaks OpenAI's API, against a server of this process."""

import asyncio
import json
import time
from itertools import product
from typing import Any

import pytest

from octavo.bench.config import BenchError
from octavo.bench.load import Load
from octavo.bench.openai_target import OpenAIApi, OpenAITarget, check_url
from octavo.bench.plan import plan_load
from octavo.bench.record import Outcome, RequestRecord, TargetInfo
from octavo.errors import OctavoError
from tests.support.each_row import each_row
from tests.unit.octavo.bench.openai_server import OpenAIServer, openai_server
from tests.unit.octavo.bench.settings import bench_config


def target_of(url: str, **fields: Any) -> OpenAITarget:
    defaults: dict[str, Any] = {
        "api": OpenAIApi.COMPLETIONS,
        "api_key": None,
        "model": None,
        "temperature": 0.0,
        "ignore_eos": True,
        "timeout_s": 30.0,
    }
    return OpenAITarget(url, **{**defaults, **fields})


async def describe(url: str, **fields: Any) -> TargetInfo:
    async with target_of(url, **fields) as target:
        return await target.describe()


async def answer(server: OpenAIServer, **fields: Any) -> RequestRecord:
    """Return the record of one request for 5 tokens."""
    async with target_of(server.url, **fields) as target:
        info = await target.describe()
        plan = plan_load(bench_config(concurrency=1, num_requests=1, input_len="6", output_len="5"), info, ())
        [record] = (await Load(target, plan, asyncio.Event()).run()).records
        return record


@each_row(*product(list(OpenAIApi), [1, 7, 10_000]))
async def test_a_stream_is_read_however_it_is_cut(api: OpenAIApi, chunk_bytes: int) -> None:
    async with openai_server(chunk_bytes=chunk_bytes) as server:
        record = await answer(server, api=api)
    assert (record.outcome, record.error) == (Outcome.COMPLETED, None)
    assert record.event_num_tokens.tolist() == [1] * 5
    assert record.usage is not None
    assert record.usage[:2] == (6, 5)
    assert record.ttft_s is not None
    assert 0 < record.ttft_s <= record.e2e_s


async def test_the_request_asks_for_what_was_planned() -> None:
    async with openai_server() as server:
        await answer(server, model="large", temperature=0.5)
        await answer(server, api=OpenAIApi.CHAT, ignore_eos=False)
        text, chat = server.bodies
    assert (text["model"], text["max_tokens"], text["temperature"], text["ignore_eos"]) == ("large", 5, 0.5, True)
    assert (text["stream"], text["stream_options"]) == (True, {"include_usage": True})
    assert len(text["prompt"].split()) == 6
    assert (chat["model"], "ignore_eos" in chat, chat["messages"][0]["role"]) == ("small", False, "user")


@each_row(
    ({"refusal": (500, "text/html", "<html>")}, "HTTP 500: an answer of type text/html"),
    ({"refusal": (429, "application/json", '{"message": "slow down."}')}, "HTTP 429: slow down"),
    ({"refusal": (404, "application/json", '{"detail": "no model"}')}, "HTTP 404: no model; the URL usually ends"),
    ({"refusal": (400, "application/json", '{"detail": "too long"}')}, "HTTP 400: too long"),
    ({"refusal": (200, "application/json", "{}")}, "answered with application/json instead of a stream"),
    ({"knows_ignore_eos": False}, "a server that does not know ignore_eos needs --no-ignore-eos"),
    ({"events": ['{"choices": [{"text": "a"}]}']}, "the stream ended early"),
    ({"events": ['{"error": {"message": "out of memory"}}']}, "the stream ended in an error: out of memory"),
    ({"events": ["{"]}, "an event that is not JSON"),
    ({"breaks": True}, "the connection broke before the answer was complete"),
)
async def test_what_goes_wrong_is_said(fields: dict[str, Any], why: str) -> None:
    async with openai_server(**fields) as server:
        record = await answer(server)
    assert record.outcome is Outcome.FAILED
    assert record.error is not None
    assert why in record.error
    assert ("--no-ignore-eos" in record.error) == ("knows_ignore_eos" in fields)


async def test_tokens_before_an_error_are_noted() -> None:
    async with openai_server(events=[json.dumps({"choices": [{"text": "a"}]}), '{"error": "gone"}']) as server:
        record = await answer(server)
    assert (record.error, len(record.event_times_s)) == ("the stream ended in an error: gone", 1)


async def test_an_answer_that_takes_too_long_is_a_failure() -> None:
    async with openai_server(chunk_bytes=1) as server, target_of(server.url, timeout_s=1e-4) as target:
        target._model = "small"
        plan = plan_load(bench_config(num_requests=1), TargetInfo("chat", "here", "small"), ())
        record = RequestRecord(next(plan.requests()), None)
        with pytest.raises(OctavoError, match=r"no complete answer within 0\.0001 s"):
            await target.send(record)


async def test_the_answer_ends_with_its_last_event_also_if_the_connection_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("octavo.bench.openai_target._REST_TIMEOUT_S", 0.1)
    async with openai_server(lingers=True) as server:
        record = await answer(server)
        returned_s = time.perf_counter()
    assert record.outcome is Outcome.COMPLETED
    assert returned_s - record.ended_s >= 0.1
    assert record.ended_s >= record.event_times_s[-1]


async def test_the_first_model_is_taken_unless_one_is_named() -> None:
    models = [{"id": "small", "max_model_len": 512}, {"id": "large"}, {"id": "t5", "max_encoder_tokens": 60}]
    async with openai_server(models=models) as server:
        assert await describe(f"{server.url}/") == TargetInfo("completions", server.url, "small", 512)
        assert await describe(server.url, model="large") == TargetInfo("completions", server.url, "large", None)
        assert (await describe(server.url, model="t5")).max_encoder_tokens == 60
        assert (await describe(server.url, model="alias")).model_id == "alias"


async def test_the_key_is_sent() -> None:
    async with openai_server(key="secret") as server:
        assert (await describe(server.url, api_key="secret")).model_id == "small"
        with pytest.raises(BenchError, match="HTTP 401: wrong key; the key comes from --api-key or OPENAI_API_KEY"):
            await describe(server.url)


@each_row(
    (None, "has no OpenAI-compatible API .*text/html.*; the URL usually ends in /v1"), ([], "lists no model: name one")
)
async def test_a_server_without_models_is_refused(models: list[dict[str, Any]] | None, why: str) -> None:
    async with openai_server(models=models) as server:
        with pytest.raises(BenchError, match=why):
            await describe(server.url)


async def test_a_wrong_path_is_said_and_a_named_model_does_without_a_list() -> None:
    async with openai_server() as server:
        root = server.url.removesuffix("/v1")
        with pytest.raises(BenchError, match=r"HTTP 404: .*the URL usually ends in /v1"):
            await describe(root)
        assert (await describe(root, model="any")).model_id == "any"


async def test_nobody_there_is_said() -> None:
    async with openai_server() as server:
        url = server.url
    with pytest.raises(BenchError, match=r"no OpenAI-compatible server answers at http.*: connection refused"):
        await describe(url)


async def test_plaintext_at_an_https_url_is_said() -> None:
    async with openai_server() as server:
        with pytest.raises(BenchError, match=r"the server does not speak TLS.*is it http://\?"):
            await describe(server.url.replace("http:", "https:"))


def test_a_key_of_the_environment_does_not_travel_in_the_clear() -> None:
    with pytest.raises(ValueError, match=r"would travel to gpu\.lan unencrypted"):
        check_url("http://gpu.lan/v1", "key", is_key_explicit=False)
    with pytest.raises(ValueError, match=r"would travel to 127\.gpu\.lan unencrypted"):
        check_url("http://127.gpu.lan/v1", "key", is_key_explicit=False)
    for url in ("http://gpu.lan/v1", "https://gpu.lan/v1", "http://127.0.0.1:8/v1", "http://[::1]:8/v1"):
        check_url(url, "key", is_key_explicit=url.startswith("http://gpu"))


@each_row("", "gpu:8000", "ftp://gpu/v1", "http://", "http://gpu:x/v1", "http://gpu:99999")
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        check_url(url, None, is_key_explicit=False)
