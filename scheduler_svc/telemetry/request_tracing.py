"""The spans of requests: one for each, with its phases as children. Imported only with --tracing.

    text_completion smollm2      the request: from the call to its end
    ├── tokenize                 fields are checked, the prompt is tokenized
    ├── queue                    until the first step that admits it
    ├── prefill                  until its first token
    ├── decode                   until its end
    └── execute                  made by each executor that has it: `executor_svc/service/traced_worker.py`

A call for vectors or scores is one span, `embeddings` or `score`, however many inputs it has.

Names of attributes that begin with gen_ai. are those of OpenTelemetry's semantic conventions for generative
AI (status: development); docs/tracing.md has the list. No attribute holds a prompt or anything written by a
model, and nothing is recorded for a token.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import TracebackType
from typing import Self, TypeAlias

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from octavo.generation.v1 import generation_service_pb2
from octavo_shared.errors import InvalidFieldError, OctavoServiceError
from octavo_shared.grpc.grpc_status import status_code
from octavo_shared.process.tracing import traceparent_of
from scheduler_svc.front.response import Response
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import RequestTimes

# A refused request may have an id or a tenant of any length.
MAX_NAME_CHARS = 256

PROPAGATED_KEYS = ("traceparent", "tracestate")

Metadata = Iterable[tuple[str, str | bytes]]

TracedRequest: TypeAlias = (
    generation_service_pb2.GenerateRequest | generation_service_pb2.EmbedRequest | generation_service_pb2.ScoreRequest
)


class RequestTrace:
    """The span of one request.

    As a context manager it stands around all that may refuse the request; an exception there ends the
    span. A request that was queued ends it with `end`.

    Args:
        span: The request's, just begun, with the name of the operation.
        begin_ns: When it began, in nanoseconds since 1970.
        begin_s: The same moment in the monotonic seconds of `RequestTimes`.
    """

    def __init__(self, tracer: Tracer, span: Span, operation: str, begin_ns: int, begin_s: float) -> None:
        self._tracer = tracer
        self._span = span
        self._operation = operation
        self._begin_ns = begin_ns
        self._begin_s = begin_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._set_error(error)
            self._span.end()

    @property
    def trace_id(self) -> str | None:
        """The request's trace, 32 hexadecimal digits, sampled or not; None: OTEL_SDK_DISABLED is set."""
        context = self._span.get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    def follow(self, request: EngineRequest, model_id: str) -> EngineRequest:
        """Return the request, which is about to be queued, with its span, which its executors are to name."""
        span, conditions = self._span, request.stop_conditions
        if not span.is_recording():
            return replace(request, trace_id=self.trace_id)
        span.update_name(f"{self._operation} {model_id}")
        attributes: dict[str, AttributeValue] = {
            "gen_ai.request.model": model_id,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "octavo.request_id": request.request_id,
            "octavo.tenant": request.tenant,
        }
        if conditions.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = conditions.max_tokens
        span.set_attributes(attributes)
        return replace(request, trace_id=self.trace_id, traceparent=traceparent_of(span.get_span_context()))

    def follow_inputs(self, requests: Sequence[EngineRequest], request_id: str, model_id: str) -> list[EngineRequest]:
        """Return the inputs of a call, which are about to be queued, with its span."""
        span, traceparent = self._span, None
        if span.is_recording():
            span.update_name(f"{self._operation} {model_id}")
            num_tokens = sum(len(request.prompt_token_ids) for request in requests)
            attributes: dict[str, AttributeValue] = {
                "gen_ai.request.model": model_id,
                "gen_ai.usage.input_tokens": num_tokens,
                "octavo.num_inputs": len(requests),
                "octavo.request_id": request_id,
                "octavo.tenant": requests[0].tenant,
            }
            span.set_attributes(attributes)
            traceparent = traceparent_of(span.get_span_context())
        return [replace(request, trace_id=self.trace_id, traceparent=traceparent) for request in requests]

    def end_inputs(self) -> None:
        """End the span of a call: all inputs are answered."""
        self._span.end()

    def end(self, response: Response) -> None:
        """Make the spans of the request's phases, and end its own: the request has ended."""
        span, ended = self._span, response.ended
        if not span.is_recording():
            return
        assert ended is not None, "the request has ended"
        times = ended.times
        assert times.ended_at_s is not None
        parent = set_span_in_context(span, Context())
        for name, begin_s, end_s in phases(times, self._begin_s):
            phase = self._tracer.start_span(name, context=parent, start_time=self._ns(begin_s))
            phase.end(self._ns(end_s))
        for event in ended.events:
            where = {"octavo.executor": event.executor} if event.executor else None
            span.add_event(event.kind.value, where, self._ns(event.at_s))
        span.set_attributes(outcome(response))
        if times.first_token_at_s is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", times.first_token_at_s - self._begin_s)
        if response.error is not None:
            self._set_error(response.error)
        span.end(self._ns(times.ended_at_s))

    def _set_error(self, error: BaseException) -> None:
        self._span.set_attribute("error.type", error_type(error))
        self._span.set_status(StatusCode.ERROR, describe(error))

    def _ns(self, at_s: float) -> int:
        """Return a monotonic time as nanoseconds since 1970."""
        return self._begin_ns + round((at_s - self._begin_s) * 1e9)


class RequestTracer:
    """Begins the spans of requests.

    Args:
        clock_ns: Nanoseconds since 1970.
        clock: Monotonic time in seconds, that of `RequestTimes`.
    """

    def __init__(
        self,
        tracer: Tracer,
        clock_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()

    def receive(self, request: TracedRequest, metadata: Metadata) -> RequestTrace:
        """Begin the span of a request, as a child of the span that the call's metadata names, if any.

        A malformed `traceparent` counts as none. OTEL_TRACES_SAMPLER decides whether the span is sampled, by default as
        the caller's was.
        """
        begin_ns, begin_s = self._clock_ns(), self._clock()
        operation = _operation(request)
        span = self._tracer.start_span(
            operation,
            context=self._propagator.extract(propagated(metadata), Context()),
            kind=SpanKind.SERVER,
            start_time=begin_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "octavo",
                "octavo.request_id": request.request_id[:MAX_NAME_CHARS],
                "octavo.tenant": request.tenant[:MAX_NAME_CHARS],
            },
        )
        return RequestTrace(self._tracer, span, operation, begin_ns, begin_s)


def _operation(request: TracedRequest) -> str:
    if isinstance(request, generation_service_pb2.EmbedRequest):
        return "embeddings"
    if isinstance(request, generation_service_pb2.ScoreRequest):
        return "score"
    return "chat" if request.WhichOneof("prompt") == "messages" else "text_completion"


def propagated(metadata: Metadata) -> dict[str, list[str]]:
    """Return the trace headers in the metadata of a call."""
    carrier: dict[str, list[str]] = {}
    for key, value in metadata:
        if key in PROPAGATED_KEYS and isinstance(value, str):
            carrier.setdefault(key, []).append(value)
    return carrier


def phases(times: RequestTimes, received_at_s: float) -> Iterator[tuple[str, float, float]]:
    """Yield name, begin and end of the phases that a request went through; each begins where the last one ended.

    Phases that took no time are left out: a single token has no decode.
    """
    begins = [
        ("tokenize", received_at_s),
        ("queue", times.arrived_at_s),
        ("prefill", times.first_scheduled_at_s),
        ("decode", times.first_token_at_s),
        ("end", times.ended_at_s),
    ]
    reached = [(name, at_s) for name, at_s in begins if at_s is not None]
    for (name, begin_s), (_, end_s) in pairwise(reached):
        if begin_s < end_s:
            yield name, begin_s, end_s


def outcome(response: Response) -> dict[str, AttributeValue]:
    """Return the attributes that are known at the end."""
    ended = response.ended
    assert ended is not None, "the request has ended"
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": ended.num_input_tokens,
        "gen_ai.usage.output_tokens": ended.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.num_cached_tokens,
        "octavo.num_preemptions": ended.num_preemptions,
        "octavo.num_losses": ended.num_losses,
    }
    reasons = [output.finish_reason.value for output in response.outputs if output.finish_reason is not None]
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if len(response.outputs) > 1:
        attributes["gen_ai.request.choice.count"] = len(response.outputs)
    return attributes


def error_type(error: BaseException) -> str:
    """Return the name of the status with which this error ends a call."""
    return status_code(error).name if isinstance(error, Exception) else "CANCELLED"


def describe(error: BaseException) -> str:
    """Return the reason in words, without anything of a prompt: only our own errors are quoted."""
    if isinstance(error, InvalidFieldError):  # its message shows what was sent
        return f"{error.field} is invalid"
    return str(error) if isinstance(error, OctavoServiceError) else type(error).__name__
