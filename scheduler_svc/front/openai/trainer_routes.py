"""What trainers and tools call to change what is served, in vLLM's shapes, for operators: --trainer-api.

Each route makes a call of AdminService at the engine of the model that `model` or `?model=` names.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import AdapterNotLoadedError, OctavoServiceError
from scheduler_svc.front.api.generation import Generation
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import api_error
from scheduler_svc.front.openai.field_reader import Reader
from scheduler_svc.front.openai.fields import LoadAdapterFields, UnloadAdapterFields
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.front.text.text_model import check_model

# vLLM's names of AdminService's fields.
_NAMES = {"name": "lora_name", "source": "lora_path", "in_place": "load_inplace"}

# How long an answer waits until this front has heard of the adapter from its engine, in seconds.
_HEARING_S = 1


class TrainerRoutes:
    """Answers these calls."""

    def __init__(self, models: Models, reader: Reader) -> None:
        self._models = models
        self._reader = reader

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            "/v1/load_lora_adapter": Route("POST", self._load_adapter, access=Access.OPERATORS),
            "/v1/unload_lora_adapter": Route("POST", self._unload_adapter, access=Access.OPERATORS),
        }

    def _choose(self, call: Call, model: str | None = None) -> Generation:
        """Return the model of a call. Raises UnknownModelError: none has the name, or several and no name was sent."""
        asked = model or call.request.query.get("model", "")
        generation = self._models.choose(asked)
        if asked and asked not in self._models.names:
            check_model(asked, generation.served()[0])
        return generation

    # Adapters ------------------------------------------------------------------------------------

    async def _load_adapter(self, call: Call) -> web.Response:
        fields = await call.read(lambda parsed: self._reader.read(parsed, LoadAdapterFields, call.headers))
        engine = self._choose(call, fields.model).engine
        request = pb.LoadAdapterRequest(
            name=fields.lora_name, source=fields.lora_path, in_place=bool(fields.load_inplace)
        )
        with _in_vllms_words():
            await engine.admin.LoadAdapter(request)
        for _ in range(_HEARING_S * 100):
            if engine.model is None or fields.lora_name in engine.model.adapters:
                break
            await asyncio.sleep(0.01)
        return _told(call, f"Success: LoRA adapter '{fields.lora_name}' added successfully.")

    async def _unload_adapter(self, call: Call) -> web.Response:
        fields = await call.read(lambda parsed: self._reader.read(parsed, UnloadAdapterFields, call.headers))
        with _in_vllms_words():
            request = pb.UnloadAdapterRequest(name=fields.lora_name)
            await self._choose(call, fields.model).engine.admin.UnloadAdapter(request)
        return _told(call, f"Success: LoRA adapter '{fields.lora_name}' removed successfully.")


@contextmanager
def _in_vllms_words() -> Iterator[None]:
    """Raise errors of AdminService with vLLM's names and statuses."""
    try:
        yield
    except OctavoServiceError as error:
        answer = api_error(error, _NAMES)
        if isinstance(error, AdapterNotLoadedError):  # vLLM's: what was asked for cannot be loaded
            answer = replace(answer, status=HTTPStatus.BAD_REQUEST, kind="invalid_request_error")
        raise replace(answer, message=answer.message.replace("(in_place)", "(load_inplace)")) from error


def _told(call: Call, sentence: str) -> web.Response:
    return call.answer_bytes(sentence.encode(), content_type="text/plain")
