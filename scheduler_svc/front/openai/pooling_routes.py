"""/v1/embeddings, and /v1/rerank and /v1/score in the shapes of Jina, Cohere and vLLM."""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from pydantic_core import to_json

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.sampling_params_table import INT32_MAX, UINT32_MAX
from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from scheduler_svc.front.api.pooling import Pooled, pool
from scheduler_svc.front.api.pooling_validation import MAX_INPUTS, InputNames, PoolingRequest
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.openai.answering import Answering, answer_id
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import api_error
from scheduler_svc.front.openai.field_reader import in_place_of
from scheduler_svc.front.openai.fields import EmbeddingFields, PoolingFields, RerankFields, ScoreFields
from scheduler_svc.front.openai.requests import extend_ids, prompts_of, set_priority
from scheduler_svc.front.openai.routing import Route
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.text_model import TextModel

_Fields = TypeVar("_Fields", bound=PoolingFields)

# Writing this many numbers takes a few milliseconds.
_FEW_NUMBERS = 2**14


@dataclass(slots=True)
class _Asked:
    """What a call asks for, in the terms of the native API.

    Attributes:
        request: The native request, without its id.
        inputs: The caller's names of the inputs.
        names: OpenAI's names of fields that the native API calls otherwise.
        numbers: Numbers as they were sent.
    """

    request: PoolingRequest
    inputs: InputNames
    names: Mapping[str, str]
    numbers: dict[str, float] = field(default_factory=dict)


class PoolingRoutes:
    """Answers these endpoints."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        embed, rerank = Route("POST", self._embed, "embeddings"), Route("POST", self._rerank, "rerank")
        return {
            "/v1/embeddings": embed,
            "/embeddings": embed,  # text-embeddings-inference's and llama.cpp's clients
            "/rerank": rerank,
            "/v1/rerank": rerank,
            "/v2/rerank": rerank,  # Cohere's newer client
            "/v1/score": Route("POST", self._score, "score"),
        }

    async def _embed(self, call: Call) -> web.Response:
        fields, model, pooled = await self._pool(call, EmbeddingFields, _asked_embedding, "embd")

        def write() -> bytes:
            rows = pooled.values.astype("<f4", copy=False)
            is_base64 = fields.encoding_format == "base64"
            vectors = [base64.b64encode(row).decode() for row in rows] if is_base64 else rows.tolist()
            data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
            return to_json({"object": "list", "data": data, "model": model.name, "usage": _usage(pooled)})

        is_short = pooled.values.size <= _FEW_NUMBERS
        return call.answer_bytes(write() if is_short else await asyncio.to_thread(write))

    async def _rerank(self, call: Call) -> web.Response:
        fields, model, pooled = await self._pool(call, RerankFields, _asked_rerank, "rerank")
        if pooled.values.shape[1] != 1:
            num_scores = pooled.values.shape[1]
            rule = f"one with one score for each pair; this one has {num_scores}: use /v1/score"
            raise api_error(InvalidFieldError("model", shown_json(model.name), rule))
        scores = pooled.values[:, 0]
        best_first = np.argsort(-scores, kind="stable")[: fields.top_n]
        results: list[dict[str, object]] = []
        for index in best_first.tolist():
            result = {"index": index, "relevance_score": float(scores[index])}
            if fields.return_documents is not False:
                result["document"] = {"text": _text_of(fields.documents[index], index)}
            results.append(result)
        head = {"id": pooled.request_id, "model": model.name}
        return call.answer({**head, "results": results, "usage": _usage(pooled), "meta": {}})

    async def _score(self, call: Call) -> web.Response:
        _, model, pooled = await self._pool(call, ScoreFields, _asked_score, "score")
        is_single = pooled.values.shape[1] == 1
        scores = (pooled.values[:, 0] if is_single else pooled.values).tolist()
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        head = {"id": pooled.request_id, "object": "list", "created": int(time.time()), "model": model.name}
        return call.answer({**head, "data": data, "usage": _usage(pooled)})

    async def _pool(
        self, call: Call, kind: type[_Fields], ask: Callable[[_Fields, RequestLimits], _Asked], prefix: str
    ) -> tuple[_Fields, TextModel, Pooled]:
        """Read a call and compute what it asks for. Raises OctavoServiceError: it is refused, or fails."""

        def ask_all(fields: _Fields, limits: RequestLimits) -> _Asked:
            asked = ask(fields, limits)
            _set_common(asked, fields, limits)
            return asked

        fields, asked, model = await self._answering.read(call, kind, ask_all)
        asked.request.request_id = answer_id(prefix, call, fields)
        on_queued = (lambda: None) if call.counted is None else call.counted.accept
        generation = self._answering.models.choose(asked.request.model)
        try:
            pooled = await pool(generation, asked.request, call.trace_metadata, names=asked.inputs, on_queued=on_queued)
            return fields, model, pooled
        except OctavoServiceError as error:
            raise api_error(error, asked.names, asked.numbers) from error


def _asked_embedding(fields: EmbeddingFields, limits: RequestLimits) -> _Asked:
    request = pb.EmbedRequest()
    in_its_place = in_place_of("input", fields.model_extra or (), EmbeddingFields)
    inputs = prompts_of(fields.input, in_its_place, "input", MAX_INPUTS)
    is_one = isinstance(fields.input, str) or (bool(inputs) and inputs[0] is fields.input)

    def name(index: int) -> str:
        return "input" if is_one else f"input[{index}]"

    for index, each in enumerate(inputs):
        if isinstance(each, str):
            request.inputs.add(text=each)
        else:
            token_ids = request.inputs.add().token_ids
            token_ids.SetInParent()
            extend_ids(token_ids.ids, name(index), each, limits)
    if fields.prompt_name is not None:
        request.prompt_name = fields.prompt_name
    asked = _Asked(request, name, {"inputs": "input"})
    if fields.dimensions is not None:
        asked.numbers["dimensions"] = fields.dimensions
        request.dimensions = fields.dimensions if 0 <= fields.dimensions <= UINT32_MAX else UINT32_MAX
    return asked


def _asked_rerank(fields: RerankFields, limits: RequestLimits) -> _Asked:
    del limits
    _require_few(fields.documents, "documents")
    if fields.top_n is not None and fields.top_n < 1:
        raise InvalidFieldError("top_n", fields.top_n, "at least 1")
    documents = [_text_of(document, index) for index, document in enumerate(fields.documents)]
    request = pb.ScoreRequest(queries=[fields.query], documents=documents)
    return _Asked(request, lambda index: f"documents[{index}]", {"queries": "query"})


def _asked_score(fields: ScoreFields, limits: RequestLimits) -> _Asked:
    del limits
    is_one = isinstance(fields.text_2, str)
    queries = [fields.text_1] if isinstance(fields.text_1, str) else fields.text_1
    documents = [fields.text_2] if isinstance(fields.text_2, str) else fields.text_2
    _require_few(queries, "text_1")
    _require_few(documents, "text_2")
    request = pb.ScoreRequest(queries=queries, documents=documents)
    names = {"queries": "text_1", "documents": "text_2"}
    return _Asked(request, lambda index: "text_2" if is_one else f"text_2[{index}]", names)


def _require_few(inputs: list[Any], name: str) -> None:
    if len(inputs) > MAX_INPUTS:
        raise InvalidFieldError(name, f"{len(inputs)} long", f"at most {MAX_INPUTS} long; send more in several calls")


def _text_of(document: object, index: int) -> str:
    """Return the text of a document, which is a string or an object that has it."""
    text = document.get("text") if isinstance(document, dict) else document
    if not isinstance(text, str):
        raise InvalidFieldError(
            f"documents[{index}]", shown_json(document), 'a string, or an object such as {"text": ""}'
        )
    return text


def _set_common(asked: _Asked, fields: PoolingFields, limits: RequestLimits) -> None:
    """Set the fields that all three share."""
    asked.request.model = fields.model or ""
    if fields.truncate_prompt_tokens is not None:
        asked.numbers["truncate_prompt_tokens"] = fields.truncate_prompt_tokens
        asked.request.truncate_prompt_tokens = min(max(fields.truncate_prompt_tokens, -2), INT32_MAX)
    set_priority(asked.request, fields.priority, limits)


def _usage(pooled: Pooled) -> dict[str, int]:
    return {"prompt_tokens": pooled.num_prompt_tokens, "total_tokens": pooled.num_prompt_tokens}
