"""`VllmEngine`: each RPC in the terms of GenerationService. Read `requests.py` and `responses.py` first."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Never, cast

import grpc
import grpc.aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from octavo.generation.v1 import generation_service_pb2
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.servicer import GenerationServicer
from scheduler_svc.front.api.vllm_engine.description import loads, model_info, server_info
from scheduler_svc.front.api.vllm_engine.requests import engine_request_limits, generation_request
from scheduler_svc.front.api.vllm_engine.responses import Answer
from scheduler_svc.front.api.vllm_engine.tokenizer_archive import TokenizerArchive
from scheduler_svc.front.text.text_model import TOKENIZER_FIX, TextModel
from shared.errors import RequestAbortedError, UnavailableError, UnknownNameError

Context = grpc.aio.ServicerContext[Any, Any]


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves a gateway from GenerationService's servicer. Errors of the service's tree become statuses outside.

    Args:
        generation: Runs the requests.
        tenant: The tenant of all of them.
    """

    def __init__(self, generation: GenerationServicer, tenant: str) -> None:
        self._engine = generation.engine
        self._generation = generation
        self._tenant = tenant
        self._tokenizer = TokenizerArchive()
        self._started_at_s = self._received_at_s = time.time()

    async def Generate(  # noqa: N802 (named by the proto)
        self, request: RequestBody[pb.GenerateRequest], context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run one prompt. The request ends with the call, or by `Abort`, which is answered with what there is."""
        self._received_at_s = time.time()
        message = await self._generation.read(request, engine_request_limits)
        if request.is_small:
            octavo_request = generation_request(message, self._tenant)
        else:
            octavo_request = await asyncio.to_thread(generation_request, message, self._tenant)
        answer = Answer(message)
        try:
            async with aclosing(self._octavo_events(octavo_request, context)) as events:
                async for event in events:
                    for response in answer.responses(event):
                        yield response
        except RequestAbortedError:
            for response in answer.aborted():
                yield response

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:  # noqa: N802
        """End requests; unknown and finished ids are accepted, and empty ones skipped."""
        for request_id in filter(None, request.request_ids):
            await self._generation.Abort(generation_service_pb2.AbortRequest(request_id=request_id), context)
        return pb.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: Context
    ) -> pb.HealthCheckResponse:
        """Say whether requests find an executor, and if not, why."""
        why_not = self._engine.why_not_ready
        return pb.HealthCheckResponse(healthy=not why_not, message=why_not)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """Describe the model."""
        return model_info(self._model())

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """Describe the scheduler."""
        return server_info(self._engine, self._model(), self._started_at_s, self._received_at_s)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:  # noqa: N802
        """Return the load of the fleet; `include` is not read: there is one section."""
        return loads(self._engine)

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the tokenizer's files."""
        model = self._model()
        if model.tokenizer.is_absent:
            raise UnknownNameError(f"model {model.info.model_id!r} has no tokenizer; {TOKENIZER_FIX}")
        for chunk in await self._tokenizer.chunks(model):
            yield chunk

    async def _unimplemented(self, request: object, context: Context) -> Never:
        """End the call as gRPC ends one of a service that it does not know: gateways go on without."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this scheduler generates text and nothing else")

    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _unimplemented

    def _octavo_events(
        self, octavo_request: generation_service_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_service_pb2.GenerateResponse]:
        """Run a request of GenerationService; whoever closes the generator ends the request."""
        return cast(
            "AsyncGenerator[generation_service_pb2.GenerateResponse]",
            self._generation.Generate(octavo_request, context),
        )

    def _model(self) -> TextModel:
        model = self._generation.model
        if model is None:
            raise UnavailableError(f"{self._engine.why_not_ready}; retry in a moment")
        return model
