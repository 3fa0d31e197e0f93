"""What is answered, request by request: the shapes of OpenAI's reference, and the numbers of the native API."""

from collections.abc import Callable
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from executor_svc.fake.tokenizer import EOS_TOKEN_ID
from executor_svc.fake.worker import FakeWorker
from tests.contract.openai.api import Answer, Api, Json, running_api
from tests.support.stack import collect, token_request

Check = Callable[[Json], bool]

TEXT = "hello"
IDS = list(TEXT.encode())
SHORT: Json = {"max_tokens": 4}
GREEDY: Json = {"max_tokens": 4, "temperature": 0}


def first(answer: Json) -> Json:
    choice: Json = answer["choices"][0]
    return choice


def texts(answer: Json) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


def num_output_tokens(answer: Json) -> int:
    number: int = answer["usage"]["completion_tokens"]
    return number


# What both endpoints answer: fields, and what is true of the answer.
COMMON: dict[str, tuple[Json, Check]] = {
    "max_tokens": (SHORT, lambda a: num_output_tokens(a) == 4 and first(a)["finish_reason"] == "length"),
    "temperature 0": (GREEDY, lambda a: len(texts(a)) == 1),
    "null is unset": (
        SHORT | {"n": None, "stop": None, "seed": None, "logit_bias": None},
        lambda a: len(texts(a)) == 1,
    ),
    "n": (SHORT | {"n": 3}, lambda a: [c["index"] for c in a["choices"]] == [0, 1, 2] and len(set(texts(a))) == 3),
    "n of a greedy request": (GREEDY | {"n": 3}, lambda a: len(set(texts(a))) == 1 and num_output_tokens(a) == 12),
    "seed": (SHORT | {"seed": 7}, lambda a: num_output_tokens(a) == 4),
    "a negative seed": (SHORT | {"seed": -1}, lambda a: num_output_tokens(a) == 4),
    "stop token": (
        {"max_tokens": 4000, "stop_token_ids": list(range(65, 129))},
        lambda a: first(a)["finish_reason"] == "stop" and 65 <= first(a)["stop_reason"] <= 128,
    ),
    "stop": ({"max_tokens": 4000, "stop": ["e", "a"]}, lambda a: first(a)["stop_reason"] in ("e", "a")),
    "one stop": ({"max_tokens": 4000, "stop": "e"}, lambda a: "e" not in texts(a)[0]),
    "the stop string stays": (
        {"max_tokens": 4000, "stop": "e", "include_stop_str_in_output": True},
        lambda a: texts(a)[0].endswith("e"),
    ),
    "penalties": (
        SHORT | {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        lambda a: num_output_tokens(a) == 4,
    ),
    "filters": (
        SHORT | {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "typical_p": 0.9},
        lambda a: num_output_tokens(a) == 4,
    ),
    "top_k -1": (SHORT | {"top_k": -1}, lambda a: num_output_tokens(a) == 4),
    "logit_bias": (SHORT | {"logit_bias": {"66": 5, "67": -5.5}}, lambda a: num_output_tokens(a) == 4),
    "allowed_token_ids": (SHORT | {"allowed_token_ids": [65]}, lambda a: num_output_tokens(a) == 4),
    "banned": (SHORT | {"banned_token_ids": [66], "bad_words": ["b"]}, lambda a: num_output_tokens(a) == 4),
    "min_tokens": (SHORT | {"min_tokens": 2, "ignore_eos": True}, lambda a: num_output_tokens(a) == 4),
    "skip_special_tokens": (SHORT | {"skip_special_tokens": False}, lambda a: num_output_tokens(a) == 4),
    "cache_salt": (SHORT | {"cache_salt": "x"}, lambda a: num_output_tokens(a) == 4),
    "request_id": (SHORT | {"request_id": "mine"}, lambda a: a["id"] in ("cmpl-mine", "chatcmpl-mine")),
    "return_token_ids": (SHORT | {"return_token_ids": True}, lambda a: len(first(a)["token_ids"]) == 4),
    "beams": (
        {"max_tokens": 3, "use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": "never"},
        lambda a: len(set(texts(a))) == 3,
    ),
    "beam_width": ({"max_tokens": 3, "beam_width": 4, "early_stopping": True}, lambda a: len(texts(a)) == 1),
    "labels": (
        SHORT | {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        lambda a: num_output_tokens(a) == 4,
    ),
    "what asks for nothing": (
        SHORT | {"response_format": {"type": "text"}, "store": False, "service_tier": "auto", "suffix": None},
        lambda a: num_output_tokens(a) == 4,
    ),
}

COMPLETIONS: dict[str, tuple[Json, Check]] = COMMON | {
    "16 tokens by default": ({}, lambda a: num_output_tokens(a) == 16),
    "token ids": (GREEDY | {"prompt": IDS}, lambda a: a["usage"]["prompt_tokens"] == 5),
    "texts": (GREEDY | {"prompt": ["a", "b", "ab"]}, lambda a: len(texts(a)) == 3 and a["usage"]["prompt_tokens"] == 4),
    "lists of token ids": (GREEDY | {"prompt": [IDS, [65]]}, lambda a: len(texts(a)) == 2),
    "both": (GREEDY | {"prompt": [IDS, "x"], "n": 2}, lambda a: [c["index"] for c in a["choices"]] == [0, 1, 2, 3]),
    "without special tokens": (GREEDY | {"add_special_tokens": False}, lambda a: a["usage"]["prompt_tokens"] == 5),
    "best_of": (SHORT | {"best_of": 3}, lambda a: len(texts(a)) == 1 and num_output_tokens(a) == 12),
    "best_of of a greedy request": (GREEDY | {"best_of": 3}, lambda a: num_output_tokens(a) == 4),
    "echo": (GREEDY | {"echo": True}, lambda a: texts(a)[0].startswith(TEXT) and len(texts(a)[0]) > len(TEXT)),
    "echo of token ids": (GREEDY | {"echo": True, "prompt": IDS}, lambda a: texts(a)[0].startswith(TEXT)),
    "echo alone": (
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        lambda a: texts(a) == [TEXT] and num_output_tokens(a) == 0 and len(first(a)["logprobs"]["tokens"]) == 5,
    ),
    "logprobs": (SHORT | {"logprobs": 2}, lambda a: len(first(a)["logprobs"]["top_logprobs"]) == 4),
    "logprobs without alternatives": (SHORT | {"logprobs": 0}, lambda a: first(a)["logprobs"]["top_logprobs"] is None),
    "logprobs of the prompt too": (
        SHORT | {"logprobs": 2, "echo": True},
        lambda a: (
            first(a)["logprobs"]["token_logprobs"][0] is None
            and len(first(a)["logprobs"]["top_logprobs"][1]) >= 2
            and len(first(a)["logprobs"]["token_logprobs"]) == 9
            and first(a)["logprobs"]["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
        ),
    ),
    "tokens by id": (
        SHORT | {"logprobs": 1, "echo": True, "return_tokens_as_token_ids": True},
        lambda a: first(a)["logprobs"]["tokens"][0] == "token_id:104",
    ),
    "prompt_logprobs": (
        SHORT | {"prompt_logprobs": 1},
        lambda a: first(a)["prompt_logprobs"][0] is None and len(first(a)["prompt_logprobs"]) == 5,
    ),
    "prompt token ids": (SHORT | {"return_token_ids": True}, lambda a: first(a)["prompt_token_ids"] == IDS),
}

CHATS: dict[str, tuple[Json, Check]] = COMMON | {
    "max_completion_tokens": ({"max_completion_tokens": 2}, lambda a: num_output_tokens(a) == 2),
    "both lengths, equal": ({"max_completion_tokens": 2, "max_tokens": 2}, lambda a: num_output_tokens(a) == 2),
    "parts": (
        SHORT | {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("hel", "lo")]}]},
        lambda a: a["usage"]["prompt_tokens"] == 24,
    ),
    "roles": (
        SHORT
        | {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hi", "name": "bob"},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
                {"role": "tool", "content": "21", "tool_call_id": "call_1"},
            ]
        },
        lambda a: num_output_tokens(a) == 4,
    ),
    "no turn of the assistant": (SHORT | {"add_generation_prompt": False}, lambda a: a["usage"]["prompt_tokens"] == 13),
    "variables of the template": (SHORT | {"chat_template_kwargs": {"thinking": False}}, lambda a: True),
    "logprobs": (
        SHORT | {"logprobs": True, "top_logprobs": 3},
        lambda a: [len(entry["top_logprobs"]) for entry in first(a)["logprobs"]["content"]] == [3] * 4,
    ),
    "logprobs alone": (
        SHORT | {"logprobs": True},
        lambda a: [entry["top_logprobs"] for entry in first(a)["logprobs"]["content"]] == [[]] * 4,
    ),
    "prompt_logprobs": (SHORT | {"prompt_logprobs": 0}, lambda a: len(a["prompt_logprobs"]) == 24),
    "prompt token ids": (SHORT | {"return_token_ids": True}, lambda a: len(a["prompt_token_ids"]) == 24),
}


async def test_completions_are_answered_whole_and_in_pieces_alike(api: Api) -> None:
    for name, (fields, holds) in COMPLETIONS.items():
        seeded = {**fields, "seed": fields.get("seed") or 1}
        whole = await api.complete(**seeded)
        assert whole.status == 200, (name, whole.text)
        if not ("echo" in fields and "logprobs" in fields):  # OpenAI's types do not know the null of the first token
            Completion.model_validate(whole.json)
        assert holds(whole.json), (name, whole.json)
        if "prompt_logprobs" not in fields:
            pieces = await api.complete(**seeded, stream=True, stream_options={"include_usage": True})
            assert joined(pieces, Completion) == comparable(whole.json), name


async def test_chats_are_answered_whole_and_in_pieces_alike(api: Api) -> None:
    for name, (fields, holds) in CHATS.items():
        seeded = {**fields, "seed": fields.get("seed") or 1}
        whole = await api.chat(**seeded)
        assert whole.status == 200, (name, whole.text)
        ChatCompletion.model_validate(whole.json)
        assert holds(whole.json), (name, whole.json)
        if "prompt_logprobs" not in fields:
            pieces = await api.chat(**seeded, stream=True, stream_options={"include_usage": True})
            assert joined(pieces, ChatCompletionChunk) == comparable(whole.json), name


def comparable(answer: Json) -> Json:
    """Return what a stream tells, too."""
    choices = {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
            "token_ids": choice.get("token_ids"),
        }
        for choice in answer["choices"]
    }
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": choices, "usage": usage}


def joined(answer: Answer, shape: Any) -> Json:
    """Return the pieces of a stream as one answer."""
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *pieces, last = answer.events
    assert last["choices"] == []
    choices: dict[int, Json] = {}
    for piece in pieces:
        if shape is ChatCompletionChunk:
            shape.model_validate(piece)
        assert piece["usage"] is None
        [choice] = piece["choices"]
        told = choices.setdefault(
            choice["index"],
            {"text": "", "logprobs": None, "finish_reason": None, "stop_reason": None, "token_ids": None},
        )
        assert told["finish_reason"] is None, "nothing comes behind the end of a choice"
        told["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        told["finish_reason"] = choice["finish_reason"]
        told["stop_reason"] = choice.get("stop_reason")
        if "token_ids" in choice:
            told["token_ids"] = [*(told["token_ids"] or []), *choice["token_ids"]]
        if choice["logprobs"] is not None:
            known = told["logprobs"] or {}
            told["logprobs"] = {
                name: known.get(name) if values is None else [*(known.get(name) or []), *values]
                for name, values in choice["logprobs"].items()
            }
    usage = {name: last["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return {"choices": choices, "usage": usage}


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
    assert set(api.stack.engine.ended) == {"cmpl-from-proxy-0", "cmpl-from-proxy-1"}
