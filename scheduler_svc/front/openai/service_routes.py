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
from scheduler_svc.front.api.model_tasks import TASK_NAMES, tasks_of
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import ApiError, api_error
from scheduler_svc.front.openai.field_reader import Reader, name_ignored
from scheduler_svc.front.openai.fields import DetokenizeFields, TokenizeFields
from scheduler_svc.front.openai.messages import CONVERSATION_NAMES, chat_messages, unread_by_template
from scheduler_svc.front.openai.requests import extend_ids
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.front.text.text_model import TextModel, check_model


class ServiceRoutes:
    """Answers these calls.

    Args:
        models: Have the tokenizers, and know whether executors accept requests.
    """

    def __init__(self, models: Models, reader: Reader, collect: Callable[[], Iterable[Family]]) -> None:
        self._models = models
        self._reader = reader
        self._collect = collect
        self._created = int(time.time())
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            "/health": Route("GET", self._health, access=Access.ANYBODY),
            "/version": Route("GET", self._version, access=Access.ANYBODY),
            "/metrics": Route("GET", self._metrics, access=Access.OPERATORS),
            "/v1/models": Route("GET", self._list_models, "models"),
            "/v1/models/{}": Route("GET", self._show_model, "models"),
            "/tokenize": Route("POST", self._tokenize, "tokenize"),
            "/detokenize": Route("POST", self._detokenize, "detokenize"),
            "/tokenizer_info": Route("GET", self._tokenizer_info, "tokenizer_info"),
        }

    async def _health(self, call: Call) -> web.Response:
        """Say whether requests for any model find an executor; the reason is for operators only."""
        engines = [generation.engine for generation in self._models.all.values()]
        if not all(engine.why_not_ready for engine in engines):
            return call.answer({"status": "ok"})
        is_draining = all(engine.is_draining for engine in engines)
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
        models = self._models.all.items()
        if not speaks_anthropic(call.request):
            data = [self._entry(name, generation) for name, generation in models]
            data += [self._entry_of_adapter(name, parent) for name, parent in self._models.adapters.items()]
            return call.answer({"object": "list", "data": data})
        entries = [self._entry_of_anthropic(name, generation) for name, generation in models]
        parents = self._models.adapters.items()
        entries += [self._entry_of_anthropic(name, self._models.choose(parent)) for name, parent in parents]
        ends = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False}
        return call.answer({"data": entries, **ends})

    async def _show_model(self, call: Call) -> web.Response:
        name = call.request.path.removeprefix("/v1/models/")
        generation = self._models.choose(name)
        parent = self._models.adapters.get(name)
        if parent is not None and not speaks_anthropic(call.request):
            return call.answer(self._entry_of_adapter(name, parent))
        if parent is None and name not in self._models.names:
            check_model(name, generation.served()[0])
        entry = self._entry_of_anthropic if speaks_anthropic(call.request) else self._entry
        return call.answer(entry(name, generation))

    def _entry(self, name: str, generation: Generation) -> dict[str, object]:
        """Describe a model; one with a name of its own is listed before it has executors.

        Raises: NoExecutorError: its name is not known yet.
        """
        model = generation.model if name else generation.served()[0]
        why_not_reproducible = model and model.reproducibility.why_not
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": model and model.max_model_len,
            **(
                {"max_encoder_tokens": model.info.max_encoder_tokens} if model and model.info.max_encoder_tokens else {}
            ),
            "tasks": model and [TASK_NAMES[task] for task in tasks_of(model.info)],
            **({"embedding_size": model.info.embedding_size} if model and model.info.embedding_size else {}),
            **({"why_not_reproducible": why_not_reproducible} if why_not_reproducible else {}),
        }

    def _entry_of_adapter(self, name: str, parent: str) -> dict[str, object]:
        return {**self._entry(parent, self._models.choose(parent)), "id": name, "parent": parent}

    def _entry_of_anthropic(self, name: str, generation: Generation) -> dict[str, object]:
        entry = self._entry(name, generation)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": entry["max_model_len"],
            "max_tokens": entry["max_model_len"],
        }

    async def _tokenize(self, call: Call) -> web.Response:
        """Return the tokens that a completion would make of a prompt."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, TokenizeFields, call.headers))
        has_prompt, has_messages = fields.prompt is not None, fields.messages is not None
        if has_prompt == has_messages:
            raise InvalidFieldError("prompt", "set" if has_prompt else "absent", "set, or messages, but not both")

        def tokenize(model: TextModel, limits: RequestLimits) -> dict[str, Any]:
            request = pb.TokenizeRequest()
            if fields.messages is None:
                request.text = fields.prompt or ""
            else:
                request.messages.CopyFrom(chat_messages(fields.messages, fields))
                name_ignored(call.headers, unread_by_template(fields, model))
            if fields.add_special_tokens is not None:
                request.add_special_tokens = fields.add_special_tokens
            ids = list(tokenization.tokenize(request, model, limits).token_ids)
            tokens = [model.tokenizer.token_of(token_id) for token_id in ids] if fields.return_token_strs else None
            return {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": tokens}

        return await self._run(call, fields.model, tokenize)

    async def _detokenize(self, call: Call) -> web.Response:
        """Return the text of tokens, special ones included."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, DetokenizeFields, call.headers))

        def detokenize(model: TextModel, limits: RequestLimits) -> dict[str, Any]:
            limit = tokenization.count_limits(model)["token_ids"]
            if len(fields.tokens) > limit.most:
                rule = f"at most {limit.most} tokens long ({limit.cause})"
                raise InvalidFieldError("tokens", f"{len(fields.tokens)} tokens long", rule)
            request = pb.DetokenizeRequest(skip_special_tokens=False)
            extend_ids(request.token_ids, "tokens", fields.tokens, limits)
            return {"prompt": tokenization.detokenize(request, model, limits).text}

        return await self._run(call, fields.model, detokenize)

    async def _tokenizer_info(self, call: Call) -> web.Response:
        """Return what a client needs beside /tokenize to make prompts by itself, as in vLLM; of several, of ?model=."""
        asked = call.request.query.get("model")
        model, _ = self._models.choose(asked or "").served()
        _check_name(asked, model)
        template = model.tokenizer.chat_template
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token"))
        shown = {**names, **model.tokenizer.special_tokens, "chat_template": template and template.source}
        return call.answer({**shown, "model_max_length": model.max_model_len})

    async def _run(
        self, call: Call, asked: str | None, work: Callable[[TextModel, RequestLimits], dict[str, Any]]
    ) -> web.Response:
        def check_and_work(model: TextModel, limits: RequestLimits) -> dict[str, Any]:
            _check_name(asked, model)
            return work(model, limits)

        tokenization = self._models.choose(asked or "").tokenization
        try:
            return call.answer(await tokenization.run(check_and_work, is_small=call.is_small))
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
