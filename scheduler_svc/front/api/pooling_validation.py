"""Check an `EmbedRequest` or a `ScoreRequest`, and make one request for the engine of each of its inputs."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.step_wire.sampling_row import SamplingRow
from octavo_shared.step_wire.step import PoolingTask
from scheduler_svc.front.api.group_validation import check_account
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.model_tasks import check_task
from scheduler_svc.front.api.request_limits import (
    FrontSettings,
    InputTooLongError,
    RequestLimits,
    check_known_ids,
    require,
)
from scheduler_svc.front.api.request_validation import check_request_id
from scheduler_svc.front.api.tokenization import check_known
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel
from scheduler_svc.front.text.tokenizer import PoolingText, TokenizedInput
from scheduler_svc.request.engine_request import MAX_REQUEST_ID_LENGTH, EngineRequest
from scheduler_svc.request.parameters import StopConditions

# The most inputs of a call, as in OpenAI's API.
MAX_INPUTS = 2048

# Characters that are tokenized at a time: each token takes some hundred bytes while it is made.
_CHARS_AT_A_TIME = 2**18

# Characters that a text may have whatever the model's length is: a long word can be a single token.
_MAX_CHARS = 2**17

PoolingRequest: TypeAlias = pb.EmbedRequest | pb.ScoreRequest

# Returns the caller's name of an input, by its index.
InputNames: TypeAlias = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ValidPooling:
    """A checked call: the requests for the engine, and how many numbers of each vector are returned; 0: all."""

    request_id: str
    requests: Sequence[EngineRequest]
    num_dimensions: int = 0


def pooling_limits(limits: RequestLimits) -> dict[str, CountLimit]:
    """Return how many elements the repeated fields of both calls may have, by path."""
    fields = {"inputs": "inputs", "queries": "queries", "documents": "documents", "tokenized_pairs": "pairs"}
    # Of all inputs together; each has its own limit when it is known.
    tokens = CountLimit(MAX_INPUTS * limits.max_model_len, "tokens long", cause="as many inputs as may be, as long")
    return {
        **{field: CountLimit(MAX_INPUTS, noun, cause="send more in several calls") for field, noun in fields.items()},
        "inputs.token_ids.ids": tokens,
        "tokenized_pairs.token_ids": tokens,
    }


def own_names(request: PoolingRequest) -> InputNames:
    """Return the native API's names of inputs."""
    if isinstance(request, pb.EmbedRequest):
        field = "inputs"
    else:
        field = "tokenized_pairs" if request.tokenized_pairs else "documents"
    return lambda index: f"{field}[{index}]"


def check_pooling(
    request: PoolingRequest, model: TextModel, settings: FrontSettings, names: InputNames
) -> ValidPooling:
    """Return the call in the service's own values; for a thread, as it may take long.

    Raises: InvalidFieldError: the first wrong field, or the model cannot do it.
    """
    task = PoolingTask.EMBED if isinstance(request, pb.EmbedRequest) else PoolingTask.SCORE
    check_task(task, model)
    check_request_id(request.request_id, MAX_REQUEST_ID_LENGTH - len(str(MAX_INPUTS)) - 1)
    check_account(request, RequestLimits.of(model, settings))
    if isinstance(request, pb.EmbedRequest):
        num_dimensions = _num_dimensions(request, model)
        inputs = _inputs(request, model, names)
    else:
        num_dimensions = 0
        inputs = _pairs(request, model, names)
    tokenized = _tokenize(request, inputs, model, names)
    request_id = request.request_id or f"{task.name.lower()}-{secrets.token_hex(8)}"
    requests = [
        EngineRequest(
            request_id=request_id if len(tokenized) == 1 else f"{request_id}-{index}",
            prompt_token_ids=token_ids,
            token_type_ids=token_type_ids,
            pooling=task,
            sampling=SamplingRow(),
            stop_conditions=StopConditions(),
            priority=request.priority,
            tenant=request.tenant,
        )
        for index, (token_ids, token_type_ids) in enumerate(tokenized)
    ]
    return ValidPooling(request_id, requests, num_dimensions)


def has_text(request: PoolingRequest) -> bool:
    """Return whether a call has text to tokenize."""
    if isinstance(request, pb.ScoreRequest):
        return bool(request.documents)
    return any(each.WhichOneof("input") == "text" for each in request.inputs)


def longest_input(model: TextModel) -> int:
    """Return the longest input that a model takes, in tokens: it is computed whole, in one step."""
    return min(model.info.max_model_len, model.info.max_num_batched_tokens)


def _num_dimensions(request: pb.EmbedRequest, model: TextModel) -> int:
    """Return how many numbers of each vector are returned."""
    size, config = model.info.embedding_size, model.tokenizer.embedding_config
    if not request.HasField("dimensions"):
        return 0
    is_right = config.can_cut_to(request.dimensions, size)
    require(is_right, "dimensions", request.dimensions, config.sizes(size))
    return request.dimensions


def _inputs(request: pb.EmbedRequest, model: TextModel, names: InputNames) -> list[PoolingText | TokenizedInput]:
    """Return texts with their prompt before them, and token ids."""
    _check_count("inputs", len(request.inputs))
    prompt, config = "", model.tokenizer.embedding_config
    name = request.prompt_name if request.HasField("prompt_name") else config.default_prompt_name
    if name:
        known = " or ".join(map(repr, sorted(config.prompts)))
        rule = known or "unset: the model's files name no prompts; put its instructions into the texts"
        require(name in config.prompts, "prompt_name", repr(name), rule)
        prompt = config.prompts[name]
    inputs: list[PoolingText | TokenizedInput] = []
    for index, each in enumerate(request.inputs):
        if each.WhichOneof("input") == "text":
            require(bool(each.text), names(index), "empty", "at least 1 character long")
            inputs.append(prompt + each.text)
            continue
        require(each.HasField("token_ids"), names(index), "absent", "a text or token_ids")
        if request.prompt_name:
            raise InvalidFieldError("prompt_name", repr(name), "unset with token ids: it stands before texts")
        inputs.append(TokenizedInput(np.array(each.token_ids.ids, np.int32)))
    return inputs


def _pairs(request: pb.ScoreRequest, model: TextModel, names: InputNames) -> list[PoolingText | TokenizedInput]:
    """Return pairs of texts, or pairs that are tokenized."""
    num_queries, num_documents = len(request.queries), len(request.documents)
    if not request.tokenized_pairs:
        _check_count("documents", num_documents)
        rule = "1 query for all documents" + (f", or {num_documents}: one for each" if num_documents > 1 else "")
        require(num_queries in (1, num_documents), "queries", f"{num_queries} long", rule)
        queries = list(request.queries) * (num_documents if num_queries == 1 else 1)
        for index, (query, document) in enumerate(zip(queries, request.documents, strict=True)):
            name = "queries" if num_queries == 1 else f"queries[{index}]"
            require(bool(query), name, "empty", "at least 1 character long")
            require(bool(document), names(index), "empty", "at least 1 character long")
        return list(zip(queries, request.documents, strict=True))
    if num_queries or num_documents:
        raise InvalidFieldError("queries" if num_queries else "documents", "set", "unset with tokenized_pairs")
    _check_count("tokenized_pairs", len(request.tokenized_pairs))
    pairs: list[PoolingText | TokenizedInput] = []
    for index, pair in enumerate(request.tokenized_pairs):
        types, num_tokens = pair.token_type_ids, len(pair.token_ids)
        field, most = f"{names(index)}.token_type_ids", model.info.num_token_types - 1
        require(len(types) in (0, num_tokens), field, f"{len(types)} long", f"empty, or {num_tokens} long as token_ids")
        require(max(types, default=0) <= most, field, f"a list with {max(types, default=0)}", f"of 0 to {most}")
        pairs.append(TokenizedInput(np.array(pair.token_ids, np.int32), types))
    return pairs


def _check_count(field: str, num_inputs: int) -> None:
    rule = f"from 1 to {MAX_INPUTS:,} of them in one call; send more in several calls"
    require(1 <= num_inputs <= MAX_INPUTS, field, f"{num_inputs:,} long" if num_inputs else "empty", rule)


def _tokenize(
    request: PoolingRequest, inputs: Sequence[PoolingText | TokenizedInput], model: TextModel, names: InputNames
) -> list[TokenizedInput]:
    """Return all inputs as tokens that the model knows; none is too long."""
    longest, tokenizer = longest_input(model), model.tokenizer
    cut_to = _cut_to(request, model)
    if tokenizer.is_absent and has_text(request):
        is_pair = isinstance(request, pb.ScoreRequest)
        rule = f"token ids: this model has no tokenizer; send {'tokenized_pairs' if is_pair else 'token_ids'}, or "
        raise InvalidFieldError("documents" if is_pair else "inputs", "text", rule + TOKENIZER_FIX)
    texts, tokenized = dict[int, PoolingText](), dict[int, TokenizedInput]()
    max_chars = max(longest * tokenizer.max_token_length, _MAX_CHARS)
    for index, each in enumerate(inputs):
        if isinstance(each, TokenizedInput):
            require(len(each.token_ids) > 0, names(index), "empty", "at least 1 token long")
            token_ids = check_known_ids(each.token_ids, names(index), model.info.vocab_size)
            tokenized[index] = TokenizedInput(token_ids[:cut_to], each.token_type_ids[:cut_to])
        elif (num_chars := _num_chars(each)) <= max_chars:
            texts[index] = each
        elif cut_to is None:
            shown = f"{num_chars} characters, for at most {max_chars}"
            raise InputTooLongError(names(index), shown, longest, _cause(model))
        else:
            texts[index] = each[:max_chars] if isinstance(each, str) else (each[0][:max_chars], each[1][:max_chars])
    for batch in _batches(texts):
        encoded = tokenizer.encode_inputs([texts[index] for index in batch], cut_to)
        for index, found in zip(batch, encoded, strict=True):
            if tokenizer.largest_id >= model.info.vocab_size:
                check_known(names(index), found.token_ids.tolist(), model)
            tokenized[index] = found if model.info.num_token_types > 1 else TokenizedInput(found.token_ids)
    for index, found in sorted(tokenized.items()):
        if len(found.token_ids) > longest:
            raise InputTooLongError(names(index), f"{len(found.token_ids)} tokens", longest, _cause(model))
    return [tokenized[index] for index in range(len(inputs))]


def _cut_to(request: PoolingRequest, model: TextModel) -> int | None:
    """Return the length in tokens to which longer inputs are cut; None: they are refused."""
    if not request.HasField("truncate_prompt_tokens"):
        return None
    longest, is_pair = longest_input(model), isinstance(request, pb.ScoreRequest)
    if request.truncate_prompt_tokens == -1:
        return longest
    least = model.tokenizer.num_special_tokens(is_pair=is_pair) + (2 if is_pair else 1)
    is_right = least <= request.truncate_prompt_tokens <= longest
    rule = f"from {least} to {longest}, or -1: as many as the model takes"
    require(is_right, "truncate_prompt_tokens", request.truncate_prompt_tokens, rule)
    return request.truncate_prompt_tokens


def _batches(texts: dict[int, PoolingText]) -> Iterator[list[int]]:
    """Yield the indexes of texts, in batches of few characters."""
    batch, num_chars = list[int](), 0
    for index, text in texts.items():
        batch.append(index)
        num_chars += _num_chars(text)
        if num_chars >= _CHARS_AT_A_TIME:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def _num_chars(text: PoolingText) -> int:
    return len(text) if isinstance(text, str) else sum(map(len, text))


def _cause(model: TextModel) -> str:
    """Return where the limit of an input comes from, if it is not the model."""
    if model.info.max_model_len <= model.info.max_num_batched_tokens:
        return ""
    return ", as many as an executor computes in one step (max_num_batched_tokens)"
