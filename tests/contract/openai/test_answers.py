"""What is answered, request by request: the shapes of OpenAI's reference, and the numbers of the native API."""

from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from octavo.generation.v1 import generation_pb2
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.openai.fields import ChatFields, CompletionFields, RequestFields
from scheduler_svc.front.openai.other_fields import NO_EFFECT, REFUSED
from scheduler_svc.front.openai.requests import asked_completion
from tests.contract.openai.answered_rows import CHATS, COMPLETIONS, SHORT, Rows, first
from tests.contract.openai.api import HELLO, Api, Json, running_api
from tests.contract.openai.shapes import check_shape, comparable, joined
from tests.support.stack import collect, token_request

# What every row has, or what tests/contract/openai/test_tools.py is about.
ELSEWHERE = {"model", "prompt", "messages", "stream", "tools", "tool_choice", "parallel_tool_calls"}
ELSEWHERE |= {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}

USAGE = {"include_usage": True}

LIMITS = RequestLimits(max_model_len=64, max_cached_tokens=64, vocab_size=100, max_num_seqs=8, max_beam_width=4)


async def test_completions_are_answered_whole_and_in_pieces_alike(api: Api) -> None:
    for name, (fields, holds) in COMPLETIONS.items():
        seeded = {"seed": 1, **fields}
        whole = await api.complete(**seeded)
        assert whole.status == 200, (name, whole.text)
        check_shape(whole.json, Completion)
        assert holds(whole.json), (name, whole.json)
        if "prompt_logprobs" not in fields:
            pieces = await api.complete(**seeded, stream=True, stream_options={"include_usage": True})
            assert joined(pieces, Completion) == comparable(whole.json), name


async def test_chats_are_answered_whole_and_in_pieces_alike(api: Api) -> None:
    for name, (fields, holds) in CHATS.items():
        seeded = {"seed": 1, **fields}
        whole = await api.chat(**seeded)
        assert whole.status == 200, (name, whole.text)
        check_shape(whole.json, ChatCompletion)
        assert holds(whole.json), (name, whole.json)
        if "prompt_logprobs" not in fields:
            pieces = await api.chat(**seeded, stream=True, stream_options={"include_usage": True})
            assert joined(pieces, ChatCompletionChunk) == comparable(whole.json), name


@pytest.mark.parametrize(("rows", "kind"), [(COMPLETIONS, CompletionFields), (CHATS, ChatFields)])
def test_every_field_that_is_carried_is_in_a_row(rows: Rows, kind: type[RequestFields]) -> None:
    fields = {name for asked, _ in rows.values() for name in asked} | ELSEWHERE | {"stream_options"}
    assert kind.model_fields.keys() - fields == set()


def test_fields_reach_the_native_request() -> None:
    same: Json = {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.25,
        "typical_p": 0.75,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "max_tokens": 7,
        "min_tokens": 3,
        "n": 2,
        "best_of": 3,
        "seed": 11,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop": ["a"],
        "stop_token_ids": [65],
        "allowed_token_ids": [66],
        "banned_token_ids": [67],
        "logprobs": 2,
        "prompt_logprobs": 1,
    }
    others: Json = {"logit_bias": {"66": 5, "67": -5.5}, "bad_words": ["b"], "priority": 9, "cache_salt": "x"}
    others["min_delta_interval_ms"] = 20
    fields = CompletionFields(model="fake", prompt=[65], **same, **others)
    [request] = asked_completion(fields, LIMITS).requests
    beams = CompletionFields(model="fake", prompt="a", use_beam_search=True, n=3, length_penalty=0.5)
    [search] = asked_completion(beams, LIMITS).requests
    biases = [generation_pb2.LogitBias(token_id=66, bias=5), generation_pb2.LogitBias(token_id=67, bias=-5.5)]
    assert request.sampling_params == generation_pb2.SamplingParams(**same, logit_bias=biases, banned_words=["b"])
    assert (request.priority, request.cache_salt, list(request.token_ids.ids)) == (9, "x", [65])
    assert request.min_delta_interval_ms == 20
    asked = search.sampling_params
    assert (asked.beam_width, asked.n, asked.length_penalty, search.text) == (3, 3, 0.5, "a")


async def test_fields_that_are_not_carried_are_refused_unless_they_ask_for_nothing(api: Api) -> None:
    for send in (api.complete, api.chat):
        plain = comparable((await send(**SHORT, seed=1)).json)
        for name, rule in REFUSED.items():
            refused = await send(**SHORT, **{name: {"asks": "for something"}})
            assert (refused.status, refused.error["param"]) == (400, name)
            assert refused.error["code"] == "unsupported_parameter"
            for neutral in (None, *rule.neutral):
                assert comparable((await send(**SHORT, seed=1, **{name: neutral})).json) == plain, (name, neutral)
        for name in NO_EFFECT:
            for value in (None, "x", {"x": [1]}):
                assert comparable((await send(**SHORT, seed=1, **{name: value})).json) == plain, (name, value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_is_told_as_the_stream_options_say(api: Api, path: str) -> None:
    body: Json = {"model": "fake", "stream": True, "max_tokens": 3, "include_stop_str_in_output": None}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": HELLO}

    async def usages(**options: bool) -> list[Any]:
        answer = await api.send("POST", path, json={**body, "stream_options": options or None})
        return [event.get("usage", "absent") for event in answer.events]

    assert set(map(str, await usages())) == {"absent"}
    assert set(map(str, await usages(include_usage=False, include_obfuscation=False))) == {"absent"}
    *before, last = await usages(include_usage=True)
    assert set(before) == {None}
    assert last["completion_tokens"] == 3
    counts = [usage["completion_tokens"] for usage in await usages(continuous_usage_stats=True)]
    assert counts == sorted(counts)
    assert counts[-1] == 3


async def test_models_and_the_state_of_the_service_have_their_shapes(api: Api) -> None:
    listed, shown = await api.get("/v1/models"), await api.get("/v1/models/fake")
    assert listed.json == {"object": "list", "data": [shown.json]}
    check_shape(shown.json, Model)
    assert (await api.get("/health")).json == {"status": "ok"}
    assert set((await api.get("/version")).json) == {"version"}
    assert "octavo_" in (await api.get("/metrics")).text


async def test_tokens_of_texts_are_told_as_in_vllm(api: Api) -> None:
    async def post(path: str, **fields: Any) -> Json:
        return (await api.send("POST", path, json=fields)).json

    asked: Json = {"prompt": "hello", "return_token_strs": True, "add_special_tokens": False}
    told = await post("/tokenize", model="fake", **asked)
    assert told == {"count": 5, "max_model_len": 8192, "tokens": list(b"hello"), "token_strs": list("hello")}
    assert (await post("/detokenize", tokens=told["tokens"])) == {"prompt": "hello"}
    chat = await post("/tokenize", messages=HELLO)
    assert chat["tokens"] == (await api.chat(**SHORT, return_token_ids=True)).json["prompt_token_ids"]
    unfinished = await post("/tokenize", messages=HELLO, add_generation_prompt=False)
    assert unfinished["count"] < chat["count"]
    info = (await api.get("/tokenizer_info")).json
    assert {"bos_token", "eos_token", "pad_token", "model_max_length"} < info.keys()
    [end] = (await post("/tokenize", prompt=info["eos_token"], add_special_tokens=False))["tokens"]
    assert end == EOS_TOKEN_ID
    assert "message" in info["chat_template"]


async def test_tokens_and_logprobs_are_those_of_the_native_api(api: Api) -> None:
    native = await collect(api.stack, token_request(20, 8, temperature=0.9, seed=3, logprobs=2, first_id=65))
    prompt = [33 + (65 + i) % 94 for i in range(20)]
    fields: Json = {"prompt": prompt, "max_tokens": 8, "temperature": 0.9, "seed": 3, "logprobs": 2}
    answer = first((await api.complete(**fields, return_token_ids=True, return_tokens_as_token_ids=True)).json)
    assert answer["token_ids"] == native.token_ids
    assert answer["text"] == native.text
    assert answer["logprobs"]["token_logprobs"] == native.logprobs
    named = [f"token_id:{token_id}" for token_id in native.alternative_token_ids]
    likeliest = [list(top.items())[:2] for top in answer["logprobs"]["top_logprobs"]]
    assert [pair for top in likeliest for pair in top] == list(zip(named, native.alternative_logprobs, strict=True))


async def test_the_end_of_the_sequence_is_the_reason_of_the_end() -> None:
    async with running_api(FakeWorker(eos_probability=0.5)) as api:
        answer = (await api.chat(temperature=0, return_token_ids=True)).json
    choice = first(answer)
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == EOS_TOKEN_ID
    assert "stop_reason" not in choice, "the model ended by itself"


async def test_logprobs_of_a_chat_end_with_its_text() -> None:
    async with running_api(FakeWorker(eos_probability=0.5)) as api:
        for seed in range(3):
            fields: Json = {"temperature": 0, "logprobs": True, "return_token_ids": True, "cache_salt": str(seed)}
            fields |= {"messages": [{"role": "user", "content": str(seed)}]}
            whole = first((await api.chat(**fields)).json)
            pieces = joined(await api.chat(**fields, stream=True, stream_options=USAGE), ChatCompletionChunk)
            assert whole["token_ids"][-1] == EOS_TOKEN_ID
            assert len(whole["logprobs"]["content"]) == len(whole["token_ids"]) - 1
            assert pieces["choices"][0]["logprobs"] == whole["logprobs"]
            shown = first((await api.chat(**fields, skip_special_tokens=False)).json)
            assert len(shown["logprobs"]["content"]) == len(shown["token_ids"]), "the end token is in the text"


async def test_offsets_begin_behind_a_prompt_that_is_not_echoed(api: Api) -> None:
    for prompt in ("héllo", list("héllo".encode())):
        fields: Json = {"prompt": prompt, "logprobs": 0, **SHORT, "temperature": 0}
        plain, echo = [first((await api.complete(**fields, echo=echo)).json)["logprobs"] for echo in (False, True)]
        assert plain["text_offset"] == echo["text_offset"][-4:]
        assert plain["text_offset"][0] == len("héllo")


async def test_cached_tokens_are_counted(api: Api) -> None:
    long = {"prompt": "a prompt of more than one block of tokens, so that it is found again", "max_tokens": 1}
    counts = [(await api.complete(**long)).json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts == [0, 64]


async def test_bytes_of_tokens_that_are_no_text_are_told(api: Api) -> None:
    euro = list("é€".encode())
    answer = await api.complete(prompt=euro, echo=True, max_tokens=0, logprobs=0)
    told = first(answer.json)["logprobs"]
    assert first(answer.json)["text"] == "é€"
    assert told["tokens"] == [f"bytes:\\x{byte:02x}" for byte in euro]
    assert told["text_offset"] == [0, 0, 1, 1, 1]


async def test_the_request_is_known_here_by_the_id_that_its_client_sees(api: Api) -> None:
    answer = await api.send(
        "POST", "/v1/completions", json={"model": "fake", "prompt": ["a", "b"]}, headers={"X-Request-Id": "from-proxy"}
    )
    assert answer.json["id"] == "cmpl-from-proxy"
    assert answer.headers["x-request-id"] == "from-proxy"
    assert {request_id for _, request_id in api.stack.engine.ended} == {"cmpl-from-proxy-0", "cmpl-from-proxy-1"}
