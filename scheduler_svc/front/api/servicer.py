"""GenerationService: what clients call. Checks, submits to the engine, streams what comes back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from octavo.generation.v1 import generation_pb2, generation_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from scheduler_svc.front.api.generation import CLIENT_LEFT
from scheduler_svc.front.api.generation_messages import accepted_message, event_message, finished_message
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.model_tasks import tasks_of
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.api.pooling import Pooled, pool
from scheduler_svc.front.api.pooling_validation import longest_input, pooling_limits
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_limits import RequestLimits
from scheduler_svc.front.api.request_validation import generate_request_limits
from scheduler_svc.front.api.stream_requests import StreamRequestsCall, slow_caller_deadline_s, slow_caller_limit
from scheduler_svc.front.api.tokenization import detokenize, tokenize
from scheduler_svc.front.text.text_model import check_model

M = TypeVar("M", bound=Message)
P = TypeVar("P", pb.EmbedRequest, pb.ScoreRequest)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DEADLINE_PASSED = "the call's deadline expired"


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Serves clients. Errors of the service's tree become statuses in an interceptor."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._streams: set[StreamRequestsCall] = set()
        self._reading = asyncio.Lock()  # one at a time: each thread that runs Python delays the event loop

    async def Generate(  # noqa: N802 (named by the proto)
        self,
        request: pb.GenerateRequest | RequestBody[pb.GenerateRequest],
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run one prompt; however the call ends, the request ends too."""
        with self._models.meter.request("generate") as counted:
            if isinstance(request, RequestBody):
                try:
                    request = await self.read(request, partial(generate_request_limits, content=request.content))
                except OctavoServiceError:
                    with self._models.traced(lambda: context.invocation_metadata()):
                        raise
            counted.tenant = request.tenant

            async with self._models.choose(request.model).running(
                request,
                lambda: context.invocation_metadata(),
                lambda: _why_left(context),
                time_left_s=context.time_remaining(),
            ) as response:
                counted.accept()
                yield pb.GenerateResponse(accepted=accepted_message(request, response))
                while (delta := await response.next_delta()) is not None:
                    yield event_message(delta)
                finished = finished_message(
                    response, is_lean=request.lean_finished, shows_provenance=request.include_provenance
                )
                yield pb.GenerateResponse(finished=finished)

    async def read(self, body: RequestBody[M], limits_of: Callable[[RequestLimits], Mapping[str, CountLimit]]) -> M:
        """Return the request of a call; the call counts as waiting while a thread reads it.

        Raises: CallerError: it is malformed, too large, or for a model that is not served; and what
            `EngineClient.checking` raises.
        """
        generation = self._models.choose_for(body)
        await generation.engine.wait_until_reachable()
        with generation.reading() as limits:
            if body.is_small:
                return body.decode(limits_of(limits))
            async with self._reading:
                return await asyncio.to_thread(body.decode, limits_of(limits))

    async def StreamRequests(  # type: ignore[override]  # noqa: N802 (gets bodies)
        self,
        requests: AsyncIterator[RequestBody[pb.StreamRequestsRequest]],
        context: grpc.aio.ServicerContext[pb.StreamRequestsRequest, pb.StreamRequestsResponse],
    ) -> None:
        """Run the requests of one stream; however the stream ends, they end too."""

        def read(body: RequestBody[pb.GenerateRequest]) -> Awaitable[pb.GenerateRequest]:
            return self.read(body, partial(generate_request_limits, content=body.content))

        await context.send_initial_metadata(())  # the client may write now: the call is not refused
        stream = StreamRequestsCall(self._models, read, lambda: context.invocation_metadata(), context.time_remaining)
        self._streams.add(stream)
        try:
            async with stream.served(requests, lambda: _why_left(context)):
                while (message := await stream.next_message()) is not None:
                    async with slow_caller_limit(slow_caller_deadline_s()):
                        await context.write(message)
        finally:
            self._streams.discard(stream)

    def shut_down(self) -> None:
        """End the streams that their callers keep open: no request is live any more."""
        for stream in self._streams:
            stream.shut_down()

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        """End a live request. A caller who may not act for its tenant is told that it is unknown."""
        if not request.request_id:
            raise InvalidFieldError("request_id", "empty", "the id of a request")
        return pb.AbortResponse(was_live=await self._models.abort(request.request_id))

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        """Describe a model."""
        model, limits = self._models.choose(request.model).served()
        if request.model:
            check_model(request.model, model)
        defaults, reproducibility = limits.sampling_defaults, model.reproducibility
        return pb.GetModelResponse(
            model_id=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.info.vocab_size,
            has_chat_template=model.tokenizer.has_chat_template,
            dtype=model.info.dtype,
            takes_token_ids_only=model.tokenizer.is_absent,
            default_sampling_params=generation_pb2.SamplingParams(**defaults) if defaults else None,  # type: ignore[arg-type]
            is_reproducible=not reproducibility.why_not,
            why_not_reproducible=reproducibility.why_not,
            numerics_ids=reproducibility.numerics_ids,
            weights_digest=reproducibility.weights_digest,
            tasks=tasks_of(model.info),
            embedding_size=model.info.embedding_size,
            num_scores=model.info.num_scores,
            max_encoder_tokens=model.info.max_encoder_tokens,
            prompt_names=sorted(model.tokenizer.embedding_config.prompts) if model.info.embedding_size else (),
            max_input_tokens=longest_input(model) if model.info.pooling_tasks else 0,
            speculates=model.served.speculates,
            speculation_may_change_outputs=model.served.speculation_may_change_outputs,
            adapters=model.served.adapters,
        )

    async def Embed(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.EmbedRequest],
        context: grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse],
    ) -> pb.EmbedResponse:
        """Return the vectors of texts."""
        pooled = await self._pool("embed", request, context)
        return pb.EmbedResponse(
            request_id=pooled.request_id,
            values=pooled.content,
            num_dimensions=pooled.values.shape[1],
            num_prompt_tokens=pooled.num_prompt_tokens,
        )

    async def Score(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.ScoreRequest],
        context: grpc.aio.ServicerContext[pb.ScoreRequest, pb.ScoreResponse],
    ) -> pb.ScoreResponse:
        """Return the scores of pairs."""
        pooled = await self._pool("score", request, context)
        return pb.ScoreResponse(
            request_id=pooled.request_id,
            values=pooled.content,
            num_scores=pooled.values.shape[1],
            num_prompt_tokens=pooled.num_prompt_tokens,
        )

    async def _pool(self, api: str, body: RequestBody[P], context: Context) -> Pooled:
        with self._models.meter.request(api) as counted:
            try:
                request = await self.read(body, pooling_limits)
            except OctavoServiceError:
                with self._models.traced(lambda: context.invocation_metadata()):
                    raise
            counted.tenant = request.tenant
            return await pool(
                self._models.choose(request.model),
                request,
                lambda: context.invocation_metadata(),
                time_left_s=context.time_remaining(),
                why_left=lambda: _why_left(context),
                on_queued=counted.accept,
            )

    async def Tokenize(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.TokenizeRequest],
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        """Return the tokens of a prompt."""
        with self._models.meter.request("tokenize") as counted:
            response = await self._models.choose_for(request).tokenization.answer(request, tokenize)
            counted.accept()
        return response

    async def Detokenize(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.DetokenizeRequest],
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        with self._models.meter.request("detokenize") as counted:
            response = await self._models.choose_for(request).tokenization.answer(request, detokenize)
            counted.accept()
        return response


def _why_left(context: Context) -> str:
    remaining_s = context.time_remaining()
    return DEADLINE_PASSED if remaining_s is not None and remaining_s <= 0 else CLIENT_LEFT
