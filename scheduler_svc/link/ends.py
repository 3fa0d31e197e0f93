"""How outputs and requests end, on the way from the engine to a front."""

from collections.abc import Sequence

import numpy as np

from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.grpc_status import status_code
from octavo_shared.step_wire.wire import FLOAT32, INT32
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes
from scheduler_svc.request.outputs import FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.provenance import Numerics, Progress, Provenance, Span

REASONS = {FinishReason.STOP: pb.END_REASON_STOP, FinishReason.LENGTH: pb.END_REASON_LENGTH}
_FINISH_REASONS = {value: reason for reason, value in REASONS.items()}


def decode_reason(value: int) -> FinishReason:
    """Return a reason. Raises KeyError: the value is none."""
    return _FINISH_REASONS[pb.EndReason.ValueType(value)]


def encode_search_end(number: int, hypotheses: Sequence[Hypothesis]) -> pb.SearchEnd:
    """Return the message of what a beam search found."""
    found = [
        pb.Hypothesis(
            token_ids=hypothesis.token_ids.astype(INT32, copy=False).tobytes(),
            logprobs=hypothesis.logprobs.astype(FLOAT32, copy=False).tobytes(),
            score=hypothesis.score,
            reason=REASONS[hypothesis.finish_reason],
        )
        for hypothesis in hypotheses
    ]
    return pb.SearchEnd(number=number, hypotheses=found)


def decode_search_end(message: pb.SearchEnd) -> list[Hypothesis]:
    """Return what a beam search found."""
    return [
        Hypothesis(
            np.frombuffer(found.token_ids, INT32).astype(np.int32),
            np.frombuffer(found.logprobs, FLOAT32).astype(np.float32),
            score=found.score,
            finish_reason=decode_reason(found.reason),
        )
        for found in message.hypotheses
    ]


def encode_pooled(number: int, values: Float32Array) -> pb.PooledAnswer:
    """Return the message of the answer to a pooling request."""
    return pb.PooledAnswer(number=number, values=values.astype(FLOAT32, copy=False).tobytes())


def decode_pooled(message: pb.PooledAnswer) -> Float32Array:
    """Return the vector or the scores of a pooling request. Raises ValueError: they are none."""
    return np.frombuffer(message.values, FLOAT32).astype(np.float32)


def encode_ended(ended: EndedRequest) -> pb.EndedRequest:
    """Return the message of what is known of a request at its end; its times are told by their distance from it."""
    times = ended.times
    assert times.ended_at_s is not None, "it has ended"
    end_s = times.ended_at_s

    def before(at_s: float | None) -> float | None:
        return None if at_s is None else end_s - at_s

    return pb.EndedRequest(
        num_prompt_tokens=ended.num_prompt_tokens,
        num_output_tokens=ended.num_output_tokens,
        num_cached_tokens=ended.num_cached_tokens,
        num_preemptions=ended.num_preemptions,
        num_losses=ended.num_losses,
        arrived_before_s=end_s - times.arrived_at_s,
        first_scheduled_before_s=before(times.first_scheduled_at_s),
        first_token_before_s=before(times.first_token_at_s),
        last_token_before_s=before(times.last_token_at_s),
        ended_at_unix_s=ended.ended_at_unix_s,
        events=[
            pb.LifeEvent(kind=event.kind.value, before_s=end_s - event.at_s, executor=event.executor)
            for event in ended.events
        ],
        reason=None if ended.finish_reason is None else REASONS[ended.finish_reason],
    )


def encode_span(span: Span) -> pb.ProvenanceSpan:
    """Return the message of a span."""
    return pb.ProvenanceSpan(
        numerics_id=span.numerics.numerics_id,
        weights_digest=span.numerics.weights_digest,
        num_tokens=span.begin.num_tokens,
        num_prompt_logprobs=span.begin.num_prompt_logprobs,
    )


def decode_span(message: pb.ProvenanceSpan) -> Span:
    """Return the span in a message."""
    numerics = Numerics(message.numerics_id, message.weights_digest)
    return Span(numerics, Progress(tuple(message.num_tokens), message.num_prompt_logprobs))


def decode_ended(
    message: pb.EndedRequest,
    now_s: float,
    error: OctavoServiceError | None,
    *,
    request_id: str,
    tenant: str,
    priority: int,
    trace_id: str | None,
) -> EndedRequest:
    """Return what is known of a request that has ended now, on our clock; the keywords are what its front knows."""

    def at(before_s: float, is_known: bool) -> float | None:
        return now_s - before_s if is_known else None

    return EndedRequest(
        request_id=request_id,
        tenant=tenant,
        priority=priority,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_preemptions=message.num_preemptions,
        num_losses=message.num_losses,
        times=RequestTimes(
            arrived_at_s=now_s - message.arrived_before_s,
            first_scheduled_at_s=at(message.first_scheduled_before_s, message.HasField("first_scheduled_before_s")),
            first_token_at_s=at(message.first_token_before_s, message.HasField("first_token_before_s")),
            last_token_at_s=at(message.last_token_before_s, message.HasField("last_token_before_s")),
            ended_at_s=now_s,
        ),
        events=tuple(
            LifeEvent(EventKind(event.kind), now_s - event.before_s, event.executor) for event in message.events
        ),
        ended_at_unix_s=message.ended_at_unix_s,
        finish_reason=decode_reason(message.reason) if message.HasField("reason") else None,
        error_code=None if error is None else status_code(error).name,
        error_message="" if error is None else str(error),
        trace_id=trace_id,
        provenance=Provenance(),  # the front was told it span by span
    )
