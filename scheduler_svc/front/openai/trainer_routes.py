"""What trainers and tools call to change what is served, in vLLM's shapes, for operators: --trainer-api.

Each route makes a call of AdminService at the engine of the model that `model` or `?model=` names.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus

from aiohttp import web

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo_shared.errors import AdapterNotLoadedError, FencedError, InvalidFieldError, OctavoServiceError
from octavo_shared.step_wire.executor_info import is_digest
from scheduler_svc.front.api.generation import Generation
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.openai.answering import (
    Answering,
    answer_id,
    answered_model,
    finish_reason,
    in_openai_words,
    usage_of,
)
from scheduler_svc.front.openai.call import BODY_TIMEOUT_S, Call
from scheduler_svc.front.openai.errors import CLOSE, ApiError, api_error
from scheduler_svc.front.openai.field_reader import Reader
from scheduler_svc.front.openai.fields import (
    GenerateFields,
    LoadAdapterFields,
    UnloadAdapterFields,
    UpdateWeightsFields,
    WeightTransferFields,
)
from scheduler_svc.front.openai.logprobs import LEAST, alternatives_at
from scheduler_svc.front.openai.requests import Asked, asked_completion
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.front.output import Output
from scheduler_svc.front.text.json_text import shown_json
from scheduler_svc.front.text.text_model import TextModel, check_model

# vLLM's names of AdminService's fields.
_NAMES = {"name": "lora_name", "source": "lora_path", "in_place": "load_inplace"}

# What executors say of an adapter that they do not find.
_MISSING = ("is not there", "is no name of --lora", "cannot be found")

# The same of an update from a folder; executors tell a wrong field in words alone.
_NAMES_OF_FOLDER = {"source": "weight_dir", "weights_digest": "weight_version"}

# By vLLM's mode and clear_cache.
_MODES: Mapping[tuple[str, bool | None], "pb.PauseMode.ValueType"] = {
    ("abort", None): pb.PAUSE_MODE_ABORT,
    ("wait", None): pb.PAUSE_MODE_WAIT,
    ("keep", False): pb.PAUSE_MODE_KEEP,
    ("keep", True): pb.PAUSE_MODE_RECOMPUTE,
}
_TAGS = {"weights", "kv_cache"}
_SOURCES = ["disk", "http"]
_PIECE_BYTES = 2**20

# How long an answer waits until this front has heard of the adapter from its engine, in seconds.
_HEARING_S = 1


class TrainerRoutes:
    """Answers these calls."""

    def __init__(self, models: Models, reader: Reader, answering: Answering) -> None:
        self._models = models
        self._reader = reader
        self._answering = answering
        self._made_from_folder: dict[Generation, str] = {}  # digests, until the next update is begun

    def routes(self) -> Mapping[str, Route]:
        """Return the routes by path."""
        return {
            "/v1/load_lora_adapter": Route("POST", self._load_adapter, access=Access.OPERATORS),
            "/v1/unload_lora_adapter": Route("POST", self._unload_adapter, access=Access.OPERATORS),
            "/pause": Route("POST", self._pause, access=Access.OPERATORS),
            "/resume": Route("POST", self._resume, access=Access.OPERATORS),
            "/is_paused": Route("GET", self._is_paused, access=Access.OPERATORS),
            "/server_info": Route("GET", self._server_info, access=Access.OPERATORS),
            "/get_world_size": Route("GET", self._world_size, access=Access.OPERATORS),
            "/init_weight_transfer_engine": Route("POST", self._init_transfer, access=Access.OPERATORS),
            "/start_weight_update": Route("POST", self._start_update, access=Access.OPERATORS),
            "/update_weights": Route("POST", self._update, access=Access.OPERATORS),
            "/finish_weight_update": Route("POST", self._finish_update, access=Access.OPERATORS),
            "/weight_info": Route("GET", self._weight_info, access=Access.OPERATORS),
            "/reset_prefix_cache": Route("POST", self._reset_prefix_cache, access=Access.OPERATORS),
            "/sleep": Route("POST", self._sleep, access=Access.OPERATORS),
            "/wake_up": Route("POST", self._wake_up, access=Access.OPERATORS),
            "/is_sleeping": Route("GET", self._is_sleeping, access=Access.OPERATORS),
            "/inference/v1/generate": Route("POST", self._generate, "completions"),
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

    # Pauses --------------------------------------------------------------------------------------

    async def _pause(self, call: Call) -> web.Response:
        """Pause; of vLLM's modes, keep without clear_cache alone keeps keys and values over an update."""
        mode, clears_cache = call.request.query.get("mode", "abort"), _flag(call, "clear_cache", default=True)
        if (asked := _MODES.get((mode, clears_cache)) or _MODES.get((mode, None))) is None:
            raise InvalidFieldError("mode", mode, "abort, wait or keep")
        admin = self._choose(call).engine.admin
        await admin.Pause(pb.PauseRequest(mode=asked))
        if clears_cache:
            await admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        return call.answer({"status": "paused", "mode": mode})

    async def _resume(self, call: Call) -> web.Response:
        await self._choose(call).engine.admin.Resume(pb.ResumeRequest())
        return call.answer({"status": "resumed"})

    async def _is_paused(self, call: Call) -> web.Response:
        return call.answer({"is_paused": (await self._version(call)).is_paused})

    async def _server_info(self, call: Call) -> web.Response:
        """Say of vLLM's configuration what TRL asks for: the number format, and that no engine transfers weights."""
        served = self._choose(call).engine.model
        dtype = None if served is None else f"torch.{served.info.dtype}"
        return call.answer({"vllm_config": {"model_config": {"dtype": dtype}, "weight_transfer_config": None}})

    async def _world_size(self, call: Call) -> web.Response:
        return call.answer({"world_size": (await self._version(call)).world_size})

    async def _version(self, call: Call) -> pb.GetWeightVersionResponse:
        return await self._choose(call).engine.admin.GetWeightVersion(pb.GetWeightVersionRequest())

    # Weights -------------------------------------------------------------------------------------

    async def _init_transfer(self, call: Call) -> web.Response:
        """Say which sources there are. Raises InvalidFieldError: another one was asked for."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, WeightTransferFields, call.headers))
        info = fields.init_info or {}
        backend = str(info.get("backend") or ("nccl" if info else "http"))
        if backend not in _SOURCES:
            rule = (
                "disk (/update_weights with weight_dir) or http (/update_weights with safetensors files): weights over "
                "NCCL or CUDA IPC are not supported"
            )
            raise InvalidFieldError("init_info.backend", backend, rule)
        return call.answer({"message": "nothing is to be set up", "backends": _SOURCES})

    async def _start_update(self, call: Call) -> web.Response:
        """Begin an update whose files come in several calls."""
        fields = await call.read(lambda parsed: self._reader.read(parsed, WeightTransferFields, call.headers))
        if fields.is_checkpoint_format is False:
            raise InvalidFieldError("is_checkpoint_format", "false", "true: tensors have the names of the checkpoint")
        self._made_from_folder.pop(self._choose(call), None)
        await self._send(call, pb.UpdateWeightsRequest(stays_open=True, is_last=True))
        return call.answer({"message": "send safetensors files to /update_weights, then call /finish_weight_update"})

    async def _update(self, call: Call) -> web.Response:
        """Take weights from a folder, or a safetensors file: it is the whole, unless an update was begun."""
        if call.request.content_type == "application/octet-stream":
            stays_open = (await self._version(call)).has_open_update
            return call.answer({"weight_version": await self._send(call, body=call, stays_open=stays_open)})
        fields = await call.read(lambda parsed: self._reader.read(parsed, UpdateWeightsFields, call.headers))
        folder = fields.weight_dir or (fields.update_info or {}).get("weight_dir")
        if not folder:
            rule = (
                "set, or the body a safetensors file with Content-Type application/octet-stream: weights over NCCL or "
                "CUDA IPC are not supported"
            )
            raise InvalidFieldError("weight_dir", "absent", rule)
        if not isinstance(folder, str):
            raise InvalidFieldError("update_info.weight_dir", shown_json(folder), "a text")
        digest = fields.weight_version if is_digest(fields.weight_version or "") else ""
        request = pb.UpdateWeightsRequest(source=folder, weights_digest=digest or "")
        with _of_folder():
            made = await self._send(call, request)
        self._made_from_folder[self._choose(call)] = made
        return call.answer({"weight_version": made})

    async def _finish_update(self, call: Call) -> web.Response:
        """Make the update that was begun, unless a folder has ended it. Raises FencedError: none is open."""
        version = await self._version(call)
        digest = version.weights_digest
        if version.has_open_update:
            digest = await self._send(call, pb.UpdateWeightsRequest(is_last=True))
        elif not digest or self._made_from_folder.get(self._choose(call)) != digest:
            raise FencedError("no update is open; begin again with /start_weight_update")
        return call.answer({"weight_version": digest})

    async def _send(
        self, call: Call, *messages: pb.UpdateWeightsRequest, body: Call | None = None, stays_open: bool = False
    ) -> str:
        async def sent() -> AsyncIterator[pb.UpdateWeightsRequest]:
            for message in messages:
                yield message
            if body is not None:
                yield pb.UpdateWeightsRequest(begins_file=True, stays_open=stays_open)
                while content := await _next_piece(body):
                    yield pb.UpdateWeightsRequest(content=content)
                yield pb.UpdateWeightsRequest(is_last=True)

        return (await self._choose(call).engine.admin.UpdateWeights(sent())).weights_digest

    async def _weight_info(self, call: Call) -> web.Response:
        version = await self._version(call)
        return call.answer({"weight_version": version.weights_digest, "num_updates": version.num_updates})

    async def _reset_prefix_cache(self, call: Call) -> web.Response:
        await self._choose(call).engine.admin.ResetPrefixCache(pb.ResetPrefixCacheRequest())
        return call.answer({"success": True})

    async def _sleep(self, call: Call) -> web.Response:
        level = call.request.query.get("level", "1")
        if level not in ("1", "2"):
            raise InvalidFieldError("level", level, "1 or 2")
        await self._choose(call).engine.admin.Sleep(pb.SleepRequest(level=int(level)))
        return call.answer({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, call: Call) -> web.Response:
        """Wake the executors; for weights alone they sleep on: they take new ones asleep, and kv_cache follows."""
        tags = set(call.request.query.getall("tags", ()))
        if unknown := sorted(tags - _TAGS):
            raise InvalidFieldError("tags", unknown[0], "weights or kv_cache, or both")
        if tags == {"weights"}:
            return call.answer({"status": "sleeping" if (await self._version(call)).sleep_level else "awake"})
        await self._choose(call).engine.admin.WakeUp(pb.WakeUpRequest())
        return call.answer({"status": "awake"})

    async def _is_sleeping(self, call: Call) -> web.Response:
        return call.answer({"is_sleeping": (await self._version(call)).sleep_level > 0})

    # Tokens in, tokens out -----------------------------------------------------------------------

    async def _generate(self, call: Call) -> web.StreamResponse:
        fields, asked, model = await self._answering.read(call, GenerateFields, asked_completion, needs_model=False)
        if fields.stream:
            raise InvalidFieldError("stream", "true", "false: /v1/completions streams, with return_token_ids")
        return await in_openai_words(asked, self._answer(call, fields, asked, model))

    async def _answer(self, call: Call, fields: GenerateFields, asked: Asked, model: TextModel) -> web.Response:
        identifier = answer_id("gen", call, fields)
        async with self._answering.running(call, identifier, asked) as responses:
            for response in responses:
                await response.wait_until_ended()
            choices = [
                _choice(output, output.output_index * asked.num_copies + copy, asked.num_alternatives)
                for response in responses
                for output in response.outputs
                for copy in range(asked.num_copies)
            ]
            counts = usage_of(responses, asked.num_copies)
            name = answered_model(model, responses[0])
        return call.answer({"request_id": identifier, "model": name, "choices": choices, "usage": counts})


async def _next_piece(call: Call) -> bytes:
    """Return the next bytes of a body; empty: there are no more. Raises ApiError: they do not come."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await call.request.content.read(_PIECE_BYTES)
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"no byte of the body arrived for {BODY_TIMEOUT_S:g} s, and the update is cancelled; begin it again",
            headers={"x-should-retry": "false", **CLOSE},
        ) from None


def _choice(output: Output, index: int, num_alternatives: int | None) -> dict[str, object]:
    logprobs = None
    if num_alternatives is not None:
        content: list[dict[str, object]] = []
        for place, (token_id, logprob) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            top = [_entry(*each) for each in alternatives_at(output.alternatives, place, num_alternatives)]
            content.append({**_entry(token_id, logprob), "top_logprobs": top})
        logprobs = {"content": content}
    return {
        "index": index,
        "token_ids": output.token_ids,
        "logprobs": logprobs,
        "finish_reason": finish_reason(output),
    }


def _entry(token_id: int, logprob: float) -> dict[str, object]:
    return {"token": f"token_id:{token_id}", "logprob": max(logprob, LEAST), "bytes": None}


def _flag(call: Call, name: str, *, default: bool) -> bool:
    """Return a flag of the query. Raises InvalidFieldError: it is none."""
    sent = call.request.query.get(name)
    if sent is None:
        return default
    if (value := {"true": True, "1": True, "false": False, "0": False}.get(sent.lower())) is None:
        raise InvalidFieldError(name, sent, "true or false")
    return value


@contextmanager
def _in_vllms_words() -> Iterator[None]:
    """Raise errors of AdminService with vLLM's names and statuses."""
    try:
        yield
    except OctavoServiceError as error:
        answer = api_error(error, _NAMES)
        if isinstance(error, AdapterNotLoadedError):  # as in vLLM: nothing is there, or it cannot be loaded
            is_missing = any(words in answer.message for words in _MISSING)
            status = HTTPStatus.NOT_FOUND if is_missing else HTTPStatus.BAD_REQUEST
            answer = replace(answer, status=status, kind="invalid_request_error")
        raise replace(answer, message=answer.message.replace("(in_place)", "(load_inplace)")) from error


@contextmanager
def _of_folder() -> Iterator[None]:
    """Raise errors of an update from a folder with vLLM's names."""
    try:
        yield
    except OctavoServiceError as error:
        answer = api_error(error, _NAMES_OF_FOLDER)
        first, _, rest = answer.message.partition(" ")
        if answer.param is None and (param := _NAMES_OF_FOLDER.get(first)) is not None:
            answer = replace(answer, message=f"{param} {rest}", param=param)
        raise answer from error


def _told(call: Call, sentence: str) -> web.Response:
    return call.answer_bytes(sentence.encode(), content_type="text/plain")
