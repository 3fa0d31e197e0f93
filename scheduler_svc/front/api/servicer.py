"""GenerationService: what clients call. Checks, submits to the engine, streams what comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

import grpc.aio
from google.protobuf.message import Message

from octavo.generation.v1 import generation_pb2, generation_service_pb2_grpc
from octavo.generation.v1 import generation_service_pb2 as pb
from scheduler_svc.engine.interface import Alternatives, EngineClient, FinishReason
from scheduler_svc.front.access.identity import current_identity, private_deployment
from scheduler_svc.front.api.message_scan import CountLimit
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.request_counts import generate_request_limits
from scheduler_svc.front.api.request_limits import FrontSettings, RequestLimits
from scheduler_svc.front.api.request_validation import (
    ValidRequest,
    check_request_fields,
    validate_request,
)
from scheduler_svc.front.api.running_checks import RunningChecks
from scheduler_svc.front.api.text_validation import refuse_text
from scheduler_svc.front.api.token_rule_validation import tokenize_words
from scheduler_svc.front.api.tokenization import Tokenization, tokenize_prompt
from scheduler_svc.front.output import Delta, Output, PromptDelta
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.text_model import ModelTokenizer, TextModel
from shared.errors import InvalidFieldError, NoExecutorError, OctavoServiceError, RequestAbortedError
from shared.step import NO_LOGPROBS, Int32Array

if TYPE_CHECKING:  # imports opentelemetry
    from scheduler_svc.telemetry.request_tracing import RequestTrace, RequestTracer

M = TypeVar("M", bound=Message)

FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}

# For people who ask what became of a request; nobody is there any more to be told it.
CLIENT_LEFT = "the client ended the call, or its connection broke"
DEADLINE_PASSED = "the deadline that the client had set for the call passed"


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Serves clients from one engine. Errors of the service's tree become statuses outside.

    Args:
        engine: Computes the requests.
        tokenizer: That of the served model.
        settings: The front's part of the configuration.
        tracer: Makes the spans of requests; None: nothing does.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ModelTokenizer,
        settings: FrontSettings,
        tracer: "RequestTracer | None" = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self._tokenizer = tokenizer
        self._tracer = tracer
        self._checks = RunningChecks()
        self._tokenization = Tokenization(self._served)
        self._reading = asyncio.Lock()  # one at a time: each thread that runs Python makes the event loop wait

    @property
    def model(self) -> TextModel | None:
        """What is served, or was last; None: no executor has been attached yet."""
        served = self.engine.model
        return None if served is None else self._tokenizer.model(served)

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
                with self._traced(pb.GenerateRequest(), context):  # refused before anything of it was known
                    raise
        request.tenant = current_identity().tenant_for(request.tenant)
        with private_deployment(), self._traced(request, context) as trace:
            with self.engine.checking(request.request_id, request.tenant) as served, self._checks.running(request):
                model = self._tokenizer.model(served)
                valid = await asyncio.to_thread(check_request, request, model, self.settings)
            asked = valid.engine if trace is None else trace.follow(valid.engine, model.name)
            response = Response(asked, valid.answer_options, model.tokenizer)
            self.engine.submit(asked, response, checked_for=served)
        try:
            yield pb.GenerateResponse(
                accepted=pb.Accepted(request_id=asked.request_id, num_prompt_tokens=len(asked.prompt_token_ids))
            )
            while (delta := await response.next_delta()) is not None:
                yield event_message(delta)
            finished = finished_message(
                response, is_lean=request.lean_finished, shows_provenance=request.include_provenance
            )
            yield pb.GenerateResponse(finished=finished)
        finally:
            if response.ended is None:  # cancelled, past its deadline, or the connection is gone
                remaining_s = context.time_remaining()
                is_late = remaining_s is not None and remaining_s <= 0
                cause = DEADLINE_PASSED if is_late else CLIENT_LEFT
                self.engine.abort(asked.request_id, RequestAbortedError(cause))
            if trace is not None:
                trace.end(response)

    async def read(self, body: RequestBody[M], limits_of: Callable[[RequestLimits], Mapping[str, CountLimit]]) -> M:
        """Return the request of a call; it counts as waiting while it is read in a thread.

        Raises: CallerError: it is no such request, or absurd; and what `EngineClient.checking` raises.
        """
        with private_deployment(), self.engine.checking("", current_identity().tenant_for("")) as served:
            limits = limits_of(RequestLimits.of(self._tokenizer.model(served), self.settings))
            if body.is_small:
                return body.decode(limits)
            async with self._reading:
                return await asyncio.to_thread(body.decode, limits)

    def _traced(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> "RequestTrace | AbstractContextManager[None]":
        """Return what records whether the request is refused."""
        if self._tracer is None:
            return nullcontext()
        return self._tracer.receive(request, context.invocation_metadata() or ())

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        """End a live request. To a caller who may not act for its tenant it is unknown."""
        if not request.request_id:
            raise InvalidFieldError("request_id", "empty", "the id of a request")
        if self._checks.abort(request.request_id):
            return pb.AbortResponse(was_live=True)
        tenant = self.engine.tenant_of(request.request_id)
        if tenant is None or not current_identity().may_act_for(tenant):
            return pb.AbortResponse(was_live=False)
        return pb.AbortResponse(was_live=self.engine.abort(request.request_id))

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext[pb.GetModelRequest, pb.GetModelResponse]
    ) -> pb.GetModelResponse:
        """Describe the model."""
        model, limits = self._served()
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
        return await self._tokenization.tokenize(request)

    async def Detokenize(  # type: ignore[override]  # noqa: N802 (gets the body)
        self,
        request: RequestBody[pb.DetokenizeRequest],
        context: grpc.aio.ServicerContext[pb.DetokenizeRequest, pb.DetokenizeResponse],
    ) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        return await self._tokenization.detokenize(request)

    def _served(self) -> tuple[TextModel, RequestLimits]:
        """Return the model and what bounds its requests. Raises NoExecutorError: there is none yet."""
        model = self.model
        if model is None:
            with private_deployment():
                raise NoExecutorError("no executor has been attached yet", self.engine.last_trouble or "none answers")
        return model, RequestLimits.of(model, self.settings)


def check_request(request: pb.GenerateRequest, model: TextModel, settings: FrontSettings) -> ValidRequest:
    """Return the request in the service's own values; for a thread, as it may take long.

    Raises: InvalidFieldError: the first wrong field.
    """
    check_request_fields(request)
    limits = RequestLimits.of(model, settings)
    prompt_token_ids, banned_words = tokenize(request, model, limits)
    return validate_request(request, prompt_token_ids, limits, banned_words)


def tokenize(
    request: pb.GenerateRequest, model: TextModel, limits: RequestLimits
) -> tuple[Sequence[int] | Int32Array, list[list[int]]]:
    """Return the token ids of the prompt and of the banned words; may take long.

    Raises: InvalidFieldError: see `tokenize_prompt`, `tokenize_words` and `refuse_text`.
    """
    if model.tokenizer.is_absent:
        refuse_text(request)
    return tokenize_prompt(request, model, limits), tokenize_words(request.sampling_params, model.tokenizer)


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
