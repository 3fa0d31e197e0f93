"""Requests that are answered, and what is true of each answer: every field that is carried is in some row."""

from collections.abc import Callable

from tests.contract.openai.api import Json

Check = Callable[[Json], bool]
Rows = dict[str, tuple[Json, Check]]

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
COMMON: Rows = {
    "max_tokens": (SHORT, lambda a: num_output_tokens(a) == 4 and first(a)["finish_reason"] == "length"),
    "temperature 0": (GREEDY, lambda a: len(texts(a)) == 1),
    "null is unset": (
        GREEDY | dict.fromkeys(("n", "stop", "seed", "logit_bias", "top_p", "top_k", "stop_token_ids", "nobody's")),
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
    "no_repeat_ngram_size": (SHORT | {"no_repeat_ngram_size": 1}, lambda a: num_output_tokens(a) == 4),
    "min_tokens": (SHORT | {"min_tokens": 2, "ignore_eos": True}, lambda a: num_output_tokens(a) == 4),
    "skip_special_tokens": (SHORT | {"skip_special_tokens": False}, lambda a: num_output_tokens(a) == 4),
    "cache_salt": (SHORT | {"cache_salt": "x"}, lambda a: num_output_tokens(a) == 4),
    "speculate": (SHORT | {"speculate": False}, lambda a: num_output_tokens(a) == 4),
    "min_delta_interval_ms": (SHORT | {"min_delta_interval_ms": 100}, lambda a: num_output_tokens(a) == 4),
    "priority": (SHORT | {"priority": 0}, lambda a: num_output_tokens(a) == 4),
    "request_id": (SHORT | {"request_id": "mine"}, lambda a: a["id"] in ("cmpl-mine", "chatcmpl-mine")),
    "return_token_ids": (SHORT | {"return_token_ids": True}, lambda a: len(first(a)["token_ids"]) == 4),
    "beams": (
        {"max_tokens": 3, "use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": "never"},
        lambda a: len(set(texts(a))) == 3,
    ),
    "beam_width": ({"max_tokens": 3, "beam_width": 4, "early_stopping": True}, lambda a: len(texts(a)) == 1),
}

COMPLETIONS: Rows = COMMON | {
    "16 tokens by default": ({}, lambda a: num_output_tokens(a) == 16),
    "token ids": (GREEDY | {"prompt": IDS}, lambda a: a["usage"]["prompt_tokens"] == 5),
    "texts": (GREEDY | {"prompt": ["a", "b", "ab"]}, lambda a: len(texts(a)) == 3 and a["usage"]["prompt_tokens"] == 4),
    "lists of token ids": (GREEDY | {"prompt": [IDS, [65]]}, lambda a: len(texts(a)) == 2),
    "both": (GREEDY | {"prompt": [IDS, "x"], "n": 2}, lambda a: [c["index"] for c in a["choices"]] == [0, 1, 2, 3]),
    "without special tokens": (GREEDY | {"add_special_tokens": False}, lambda a: a["usage"]["prompt_tokens"] == 5),
    "best_of": (SHORT | {"best_of": 3}, lambda a: len(texts(a)) == 1 and num_output_tokens(a) == 12),
    "best_of and n": (SHORT | {"best_of": 3, "n": 2}, lambda a: len(texts(a)) == 2 and num_output_tokens(a) == 12),
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
    "token ids of several prompts": (
        GREEDY | {"return_token_ids": True, "prompt": [IDS, [65]], "n": 2},
        lambda a: [choice["prompt_token_ids"] for choice in a["choices"]] == [IDS, IDS, [65], [65]],
    ),
    "token ids of an echo": (
        {"max_tokens": 0, "echo": True, "return_token_ids": True},
        lambda a: first(a)["prompt_token_ids"] == IDS and first(a)["token_ids"] == [],
    ),
}

CHATS: Rows = COMMON | {
    "what is null inside is unset": (
        SHORT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "x": None}], "y": None}]},
        lambda a: a["usage"]["prompt_tokens"] == 24,
    ),
    "what the assistant thought": (
        SHORT
        | {
            "messages": [
                *(
                    {"role": "assistant", "content": "a", name: "thought"}
                    for name in ("reasoning", "reasoning_content")
                ),
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "a"}, {"type": "text", "text": "b"}],
                },
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}],
                },
            ]
        },
        lambda a: num_output_tokens(a) == 4,
    ),
    "without reasoning": (SHORT | {"include_reasoning": False}, lambda a: num_output_tokens(a) == 4),
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
                {"role": "developer", "content": "be kind"},
                {"role": "user", "content": "hi", "name": "bob"},
                {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
                {"role": "tool", "content": "21", "tool_call_id": "call_1"},
            ]
        },
        lambda a: num_output_tokens(a) == 4,
    ),
    "no turn of the assistant": (SHORT | {"add_generation_prompt": False}, lambda a: a["usage"]["prompt_tokens"] == 13),
    "effort and verbosity": (SHORT | {"reasoning_effort": "low", "verbosity": "low"}, lambda a: True),
    "variables of the template": (SHORT | {"chat_template_kwargs": {"thinking": False}}, lambda a: True),
    "logprobs": (
        SHORT | {"logprobs": True, "top_logprobs": 3},
        lambda a: [len(entry["top_logprobs"]) for entry in first(a)["logprobs"]["content"]] == [3] * 4,
    ),
    "logprobs alone": (
        SHORT | {"logprobs": True},
        lambda a: [entry["top_logprobs"] for entry in first(a)["logprobs"]["content"]] == [[]] * 4,
    ),
    "tokens by id": (
        SHORT | {"logprobs": True, "return_tokens_as_token_ids": True},
        lambda a: all(entry["token"].startswith("token_id:") for entry in first(a)["logprobs"]["content"]),
    ),
    "prompt_logprobs": (SHORT | {"prompt_logprobs": 0}, lambda a: len(a["prompt_logprobs"]) == 24),
    "prompt token ids": (SHORT | {"return_token_ids": True, "n": 2}, lambda a: len(a["prompt_token_ids"]) == 24),
}
