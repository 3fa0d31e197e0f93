"""The shapes that OpenAI's reference promises, as the response types of its own client know them, and strictly so.

Their types let unknown keys pass, and call keys optional that the reference promises with null.
"""

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage, Model, responses
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
    chat_completion_token_logprob,
)
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from openai.types.responses import response_text_delta_event, response_text_done_event
from pydantic import BaseModel

from tests.contract.openai.api import Answer, Json

_Shape = TypeVar("_Shape", bound=BaseModel)

_ANSWER = {"id", "object", "created", "model", "choices", "system_fingerprint"}
_LOGPROB = {"token", "logprob", "bytes"}

# What each object has besides what pydantic requires, null or not.
PROMISED: dict[type[BaseModel], set[str]] = {
    Completion: _ANSWER,
    CompletionChoice: {"index", "text", "logprobs", "finish_reason"},
    Logprobs: {"text_offset", "token_logprobs", "tokens", "top_logprobs"},
    ChatCompletion: _ANSWER,
    chat_completion.Choice: {"index", "message", "logprobs", "finish_reason"},
    chat_completion.ChoiceLogprobs: {"content", "refusal"},
    ChatCompletionMessage: {"role", "content", "refusal"},
    ChatCompletionTokenLogprob: _LOGPROB | {"top_logprobs"},
    chat_completion_token_logprob.TopLogprob: _LOGPROB,
    ChatCompletionChunk: _ANSWER,
    chat_completion_chunk.Choice: {"index", "delta", "logprobs", "finish_reason"},
    chat_completion_chunk.ChoiceLogprobs: {"content", "refusal"},
    ChatCompletionMessageFunctionToolCall: {"id", "type", "function"},
    chat_completion_chunk.ChoiceDeltaToolCall: {"index", "function"},
    CompletionUsage: {"prompt_tokens", "completion_tokens", "total_tokens"},
    PromptTokensDetails: {"cached_tokens"},
    Model: {"id", "object", "created", "owned_by"},
}

# What it may have beside OpenAI's keys: vLLM's names.
OTHERS: dict[type[BaseModel], set[str]] = {
    CompletionChoice: {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"},
    ChatCompletion: {"prompt_token_ids", "prompt_logprobs"},
    ChatCompletionChunk: {"prompt_token_ids"},
    chat_completion.Choice: {"stop_reason", "token_ids"},
    chat_completion_chunk.Choice: {"stop_reason", "token_ids"},
    ChatCompletionMessage: {"reasoning_content", "reasoning"},
    chat_completion_chunk.ChoiceDelta: {"reasoning_content", "reasoning"},
    Model: {"max_model_len", "tasks", "embedding_size", "why_not_reproducible"},
    responses.Response: {"store", "frequency_penalty", "presence_penalty"},
    responses.ResponseCustomToolCall: {"status"},
    response_text_delta_event.Logprob: {"bytes"},
    response_text_delta_event.LogprobTopLogprob: {"bytes"},
    response_text_done_event.Logprob: {"bytes"},
    response_text_done_event.LogprobTopLogprob: {"bytes"},
}


def check_shape(content: Json, shape: type[_Shape], *, is_piece: bool = False) -> _Shape:
    """Return a JSON object as OpenAI's type; fail if a key is missing, unknown, or of another type."""
    known = _without_nulls(content, is_piece=is_piece) if shape is Completion else content
    checked = shape.model_validate(known, strict=True)
    for node in _nodes(checked):
        assert PROMISED.get(type(node), set()) <= node.model_fields_set, (type(node), content)
        assert (node.model_extra or {}).keys() <= OTHERS.get(type(node), set()), (type(node), content)
    return checked


def _without_nulls(completion: Json, *, is_piece: bool) -> Json:
    """Return a completion without the nulls that OpenAI's type does not know, and its API sends.

    They are the log-probability of the first token of a prompt, and the finish reason before the end of a stream.
    """
    completion = copy.deepcopy(completion)
    for choice in completion["choices"]:
        if is_piece and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
        if (logprobs := choice["logprobs"]) and logprobs["token_logprobs"][:1] == [None]:
            logprobs["token_logprobs"][0] = 0.0
            if logprobs["top_logprobs"] is not None:
                assert logprobs["top_logprobs"][0] is None
                logprobs["top_logprobs"][0] = {}
    return completion


def _nodes(value: Any) -> Iterator[BaseModel]:
    """Yield all objects of a validated answer."""
    if isinstance(value, BaseModel):
        yield value
        for name in value.model_fields_set & type(value).model_fields.keys():
            yield from _nodes(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _nodes(item)


def comparable(answer: Json) -> Json:
    """Return what a stream tells, too."""
    choices = {
        choice["index"]: {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice.get("stop_reason"),
            "token_ids": choice.get("token_ids") or None,
            "prompt_token_ids": choice.get("prompt_token_ids", answer.get("prompt_token_ids")),
        }
        for choice in answer["choices"]
    }
    return {"choices": choices, "usage": _counts(answer)}


def joined(answer: Answer, shape: type[Completion | ChatCompletionChunk]) -> Json:
    """Return the pieces of a stream with `include_usage` as one answer."""
    assert answer.status == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    for event in answer.events:
        check_shape(event, shape, is_piece=True)
    assert len({(event["id"], event["created"], event["model"]) for event in answer.events}) == 1
    *pieces, last = answer.events
    assert last["choices"] == []
    choices: dict[int, Json] = {}
    for piece in pieces:
        assert piece["usage"] is None
        [choice] = piece["choices"]
        if (told := choices.get(choice["index"])) is None:
            told = dict.fromkeys(("logprobs", "finish_reason", "stop_reason", "token_ids")) | {"text": ""}
            told["prompt_token_ids"] = choice.get("prompt_token_ids", pieces[0].get("prompt_token_ids"))
            choices[choice["index"]] = told
            assert choice.get("delta", {"role": "assistant"}).get("role") == "assistant"
        else:
            assert "prompt_token_ids" not in choice
            assert "role" not in choice.get("delta", {})
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
    return {"choices": choices, "usage": _counts(last)}


def _counts(answer: Json) -> Json:
    return {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
