"""What clients and operators ask beside completions: health, version, metrics, models, tokens of texts."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

import octavo
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from octavo_shared.process.metric import Family
from scheduler_svc.front.anthropic.errors import speaks_anthropic
from scheduler_svc.front.api import tokenization
from scheduler_svc.front.api.generation import Generation
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import ApiError, api_error
from scheduler_svc.front.openai.field_reader import Reader
from scheduler_svc.front.openai.fields import DetokenizeFields, TokenizeFields
from scheduler_svc.front.openai.messages import CONVERSATION_NAMES, chat_messages
from scheduler_svc.front.openai.models import check_model
from scheduler_svc.front.openai.requests import extend_ids
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.front.text.text_model import TextModel


class ServiceRoutes:
    """Answers them.

    Args:
        generation: Knows the model, its tokenizer, and whether requests find an executor.
        reader: Reads the fields of requests.
        collect: Returns the metrics of the scheduler.
    """

    def __init__(self, generation: Generation, reader: Reader, collect: Callable[[], Iterable[Family]]) -> None:
        self._generation = generation
        self._reader = reader
        self._collect = collect
        self._created = int(time.time())
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def routes(self) -> Mapping[str, Route]:
        """Return them by path."""
        return {
            "/health": Route("GET", self._health, Access.ANYBODY),
            "/version": Route("GET", self._version, Access.ANYBODY),
            "/metrics": Route("GET", self._metrics, Access.OPERATORS),
            "/v1/models": Route("GET", self._list_models),
            "/v1/models/{}": Route("GET", self._show_model),
            "/tokenize": Route("POST", self._tokenize),
            "/detokenize": Route("POST", self._detokenize),
            "/tokenizer_info": Route("GET", self._tokenizer_info),
        }

    async def _health(self, call: Call) -> web.Response:
        """Say whether requests find an executor; why not is the operators' business."""
        if not self._generation.engine.why_not_ready:
            return call.answer({"status": "ok"})
        is_draining = self._generation.engine.is_draining
        what = "the scheduler is draining" if is_draining else "no executor accepts requests"
        raise ApiError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"{what}; retry in a moment", "server_error", headers={"Retry-After": "1"}
        )

    async def _version(self, call: Call) -> web.Response:
        return call.answer({"version": octavo.__version__})

    async def _metrics(self, call: Call) -> web.Response:
        """Return what --metrics-listen serves: collected on the event loop, written in a thread."""
        families = list(self._collect())

        def write() -> bytes:
            registry = CollectorRegistry()
            registry.register(_Collected(families))
            return generate_latest(registry) + generate_latest(self._process)

        return web.Response(
            body=await asyncio.to_thread(write), headers={**call.headers, "Content-Type": CONTENT_TYPE_LATEST}
        )

    async def _list_models(self, call: Call) -> web.Response:
        model, _ = self._generation.served()
        if speaks_anthropic(call.request):
            entry = self._entry_of_anthropic(model)
            ends = {"first_id": model.name, "last_id": model.name, "has_more": False}
            return call.answer({"data": [entry], **ends})
        return call.answer({"object": "list", "data": [self._entry(model)]})

    async def _show_model(self, call: Call) -> web.Response:
        model, _ = self._generation.served()
        check_model(call.request.path.removeprefix("/v1/models/"), model)
        is_anthropics = speaks_anthropic(call.request)
        return call.answer(self._entry_of_anthropic(model) if is_anthropics else self._entry(model))

    def _entry(self, model: TextModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": model.max_model_len,
        }

    def _entry_of_anthropic(self, model: TextModel) -> dict[str, object]:
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": model.max_model_len,
            "max_tokens": model.max_model_len,
        }

    async def _tokenize(self, call: Call) -> web.Response:
        """Return the tokens that a completion would make of a prompt."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, TokenizeFields, call.headers))
        has_prompt, has_messages = fields.prompt is not None, fields.messages is not None
        if has_prompt == has_messages:
            raise InvalidFieldError("prompt", "set" if has_prompt else "absent", "set, or messages, but not both")

        def tokenize(model: TextModel, limits: RequestLimits) -> dict[str, Any]:
            _check_name(fields.model, model)
            request = pb.TokenizeRequest()
            if fields.messages is None:
                request.text = fields.prompt or ""
            else:
                request.messages.CopyFrom(chat_messages(fields.messages, fields))
            if fields.add_special_tokens is not None:
                request.add_special_tokens = fields.add_special_tokens
            ids = list(tokenization.tokenize(request, model, limits).token_ids)
            tokens = [model.tokenizer.token_of(token_id) for token_id in ids] if fields.return_token_strs else None
            return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": tokens}

        return await self._run(call, tokenize)

    async def _detokenize(self, call: Call) -> web.Response:
        """Return the text of tokens, special ones included."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, DetokenizeFields, call.headers))

        def detokenize(model: TextModel, limits: RequestLimits) -> dict[str, Any]:
            _check_name(fields.model, model)
            limit = tokenization.count_limits(model)["token_ids"]
            if len(fields.tokens) > limit.most:
                rule = f"at most {limit.most} tokens long ({limit.cause})"
                raise InvalidFieldError("tokens", f"{len(fields.tokens)} tokens long", rule)
            request = pb.DetokenizeRequest(skip_special_tokens=False)
            extend_ids(request.token_ids, "tokens", fields.tokens, limits)
            return {"prompt": tokenization.detokenize(request, model, limits).text}

        return await self._run(call, detokenize)

    async def _tokenizer_info(self, call: Call) -> web.Response:
        """Return what a client needs beside /tokenize to make prompts by itself, as in vLLM."""
        model, _ = self._generation.served()
        template = model.tokenizer.chat_template
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
        shown = {**names, **model.tokenizer.special_tokens, "chat_template": template and template.source}
        return call.answer({**shown, "model_max_length": model.max_model_len})

    async def _run(self, call: Call, work: Callable[[TextModel, RequestLimits], dict[str, Any]]) -> web.Response:
        try:
            return call.answer(await self._generation.tokenization.run(work, is_small=call.is_small))
        except InvalidFieldError as error:
            raise api_error(error, {"token_ids": "tokens", **CONVERSATION_NAMES}) from error


class _Collected(Collector):
    """Metrics that were collected already."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        """Return them."""
        return self._families


def _check_name(asked: str | None, model: TextModel) -> None:
    if asked is not None:
        check_model(asked, model)
