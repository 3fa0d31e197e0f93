"""GenerationService: what clients call. Checks, submits to the engine, streams what comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.message import Message

from octavo.generation.v1 import generation_pb2, generation_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.engine.interface import Alternatives, EngineClient, FinishReason
from scheduler_svc.front.api.generation import CLIENT_LEFT, Generation
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_counts import generate_request_limits
from scheduler_svc.front.api.request_limits import FrontSettings, RequestLimits
from scheduler_svc.front.output import Delta, Output, PromptDelta
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import TextModel
from shared.errors import InvalidFieldError, OctavoServiceError
from shared.step import NO_LOGPROBS

M = TypeVar("M", bound=Message)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}

DEADLINE_PASSED = "the deadline that the client had set for the call passed"


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Serves clients. Errors of the service's tree become statuses outside.

    Args:
        generation: Runs the requests.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._reading = asyncio.Lock()  # one at a time: each thread that runs Python makes the event loop wait

    @property
    def engine(self) -> EngineClient:
        """Computes the requests."""
        return self._generation.engine

    @property
    def settings(self) -> FrontSettings:
        """The front's part of the configuration."""
        return self._generation.settings

    @property
    def model(self) -> TextModel | None:
        """What is served, or was last; None: no executor has been attached yet."""
        return self._generation.model

    async def Generate(  # noqa: N802 (named by the proto)
        self,
        request: pb.GenerateRequest | RequestBody[pb.GenerateRequest],
        context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Run one prompt; the call's end, however it comes, ends the request."""
        if isinstance(request, RequestBody):
            try:
                request = await self.read(request, generate_request_limits)
            except OctavoServiceError:
                with self._generation.traced(
                    pb.GenerateRequest(), lambda: context.invocation_metadata()
                ):  # unknown yet
                    raise

        async with self._generation.running(
            request, lambda: context.invocation_metadata(), lambda: _why_left(context)
        ) as response:
            asked = response.request
            yield pb.GenerateResponse(
                accepted=pb.Accepted(request_id=asked.request_id, num_prompt_tokens=len(asked.prompt_token_ids))
            )
            while (delta := await response.next_delta()) is not None:
                yield event_message(delta)
            finished = finished_message(
                response, is_lean=request.lean_finished, shows_provenance=request.include_provenance
            )
            yield pb.GenerateResponse(finished=finished)

    async def read(self, body: RequestBody[M], limits_of: Callable[[RequestLimits], Mapping[str, CountLimit]]) -> M:
        """Return the request of a call; it counts as waiting while it is read in a thread.

        Raises: CallerError: it is no such request, or absurd; and what `EngineClient.checking` raises.
        """
        with self._generation.reading() as limits:
            if body.is_small:
                return body.decode(limits_of(limits))
            async with self._reading:
                return await asyncio.to_thread(body.decode, limits_of(limits))

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        """End a live request. To a caller who may not act for its tenant it is unknown."""
        if not request.request_id:
            raise InvalidFieldError("request_id", "empty", "the id of a request")
        return pb.AbortResponse(was_live=self._generation.abort(request.request_id))

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        """Describe the model."""
        model, limits = self._generation.served()
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
        )

    async def Tokenize(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.TokenizeRequest],
        context: grpc.aio.ServicerContext[pb.TokenizeRequest, pb.TokenizeResponse],
    ) -> pb.TokenizeResponse:
        """Return the tokens of a prompt."""
        return await self._generation.tokenization.tokenize(request)

    async def Detokenize(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.DetokenizeRequest],
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        return await self._generation.tokenization.detokenize(request)


def _why_left(context: Context) -> str:
    remaining_s = context.time_remaining()
    return DEADLINE_PASSED if remaining_s is not None and remaining_s <= 0 else CLIENT_LEFT


def event_message(delta: Delta | PromptDelta) -> pb.GenerateResponse:
    """Return the event of something new."""
    if isinstance(delta, PromptDelta):
        return pb.GenerateResponse(prompt_logprobs=prompt_message(delta.logprobs, delta.alternatives))
    message = pb.OutputDelta(
        output_index=delta.output_index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs,
        alternative_token_ids=delta.alternatives.token_ids,
        alternative_logprobs=delta.alternatives.logprobs,
    )
    return pb.GenerateResponse(delta=message)


def prompt_message(logprobs: list[float], alternatives: Alternatives) -> generation_pb2.PromptLogprobs:
    """Return the message of log-probabilities of the prompt."""
    return generation_pb2.PromptLogprobs(
        logprobs=logprobs,
        alternative_token_ids=alternatives.token_ids,
        alternative_logprobs=alternatives.logprobs,
    )


def finished_message(response: Response, *, is_lean: bool, shows_provenance: bool = False) -> pb.RequestFinished:
    """Return the last event of a request that has finished; a lean one leaves out what the deltas brought."""
    ended = response.ended
    assert ended is not None, "it has finished"
    usage = generation_pb2.Usage(
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
    )
    finished = pb.RequestFinished(
        outputs=[output_message(output, is_lean=is_lean) for output in response.outputs],
        usage=usage,
        continued_on_other_numerics=response.was_continued_on_other_numerics,
    )
    if shows_provenance:
        for message, output in zip(finished.outputs, response.outputs, strict=True):
            message.provenance.extend(
                generation_pb2.Provenance(first_token=first_token, **numerics._asdict())
                for first_token, numerics in response.provenance_of(output)
            )
    has_prompt_logprobs = response.request.num_prompt_logprobs != NO_LOGPROBS
    if has_prompt_logprobs and is_lean:
        finished.prompt_logprobs.SetInParent()
    elif has_prompt_logprobs:
        finished.prompt_logprobs.CopyFrom(prompt_message(response.prompt_logprobs, response.prompt_alternatives))
    return finished


def output_message(output: Output, *, is_lean: bool) -> generation_pb2.Output:
    """Return a finished output's message; a lean one leaves out what the deltas brought."""
    assert output.finish_reason is not None, "a request ends after its last output"
    message = generation_pb2.Output(
        output_index=output.output_index,
        finish_reason=FINISH_REASONS[output.finish_reason],
        cumulative_logprob=output.cumulative_logprob,
        beam_score=output.beam_score,
    )
    if not is_lean:
        message.text = output.text
        message.token_ids.extend(output.token_ids)
        message.logprobs.extend(output.logprobs)
        message.alternative_token_ids.extend(output.alternatives.token_ids)
        message.alternative_logprobs.extend(output.alternatives.logprobs)
    if output.stop_string is not None:
        message.stop_string = output.stop_string
    elif output.stop_token_id is not None:
        message.stop_token_id = output.stop_token_id
    return message
