"""Values of the link as messages, and back: requests, their ends, errors, and how the engine is."""

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.v1 import core_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared import errors
from octavo_shared.errors import OctavoServiceError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grpc.grpc_status import status_code
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import NO_LOGPROBS, PoolingTask
from octavo_shared.step_wire.wire import FLOAT32, INT32, decode_sampling, encode_sampling
from octavo_shared.step_wire.wire_info import decode_info, encode_info
from octavo_shared.step_wire.wire_rules import decode_rules, encode_rules
from scheduler_svc.request.continuation_message import (
    adapter_fields,
    decode_adapter,
    decode_continuation,
    encode_continuation,
)
from scheduler_svc.request.engine_client import EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes
from scheduler_svc.request.losses import NO_LOSSES, Losses
from scheduler_svc.request.outputs import FinishReason, Float32Array, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from scheduler_svc.request.provenance import Numerics, Progress, Provenance, Span
from scheduler_svc.request.served_model import Reproducibility, ServedModel

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


_COUNTS = (
    *("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_draft_tokens", "num_preemptions"),
    "num_losses",
)


def encode_ended(ended: EndedRequest) -> pb.EndedRequest:
    """Return the message of what is known of a request at its end; its times are told by their distance from it."""
    times = ended.times
    assert times.ended_at_s is not None, "it has ended"
    end_s = times.ended_at_s

    def before(at_s: float | None) -> float | None:
        return None if at_s is None else end_s - at_s

    return pb.EndedRequest(
        **{name: getattr(ended, name) for name in _COUNTS},
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
        **adapter_fields(span.adapter),
        keeps_cache=span.numerics.keeps_cache,
    )


def decode_span(message: pb.ProvenanceSpan) -> Span:
    """Return the span in a message."""
    numerics = Numerics(message.numerics_id, message.weights_digest, message.keeps_cache)
    return Span(numerics, Progress(tuple(message.num_tokens), message.num_prompt_logprobs), decode_adapter(message))


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
        **{name: getattr(message, name) for name in _COUNTS},
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


_KINDS: dict[str, type[OctavoServiceError]] = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, OctavoServiceError)
}


def encode_failure(error: OctavoServiceError) -> pb.Failure:
    """Return the message of an error."""
    kind, *base_kinds = (base.__name__ for base in type(error).__mro__ if base.__name__ in _KINDS)
    attributes = json.dumps(vars(error), default=str)
    return pb.Failure(kind=kind, message=str(error), attributes_json=attributes, base_kinds=base_kinds)


def decode_failure(message: pb.Failure) -> OctavoServiceError:
    """Return the error in a message; one of a class that is not known here is one of the nearest class that is."""
    kinds = (_KINDS[name] for name in (message.kind, *message.base_kinds) if name in _KINDS)
    kind = next(kinds, OctavoServiceError)
    error = kind.__new__(kind)
    error.args = (message.message,)
    vars(error).update(json.loads(message.attributes_json or "{}"))
    return error


def encode_submission(
    number: int, request: EngineRequest, model_hash: str, max_model_len: int, *, was_queued: bool = False
) -> pb.Submission:
    """Return the message of a request that was checked for a model and its longest sequence."""
    conditions, search = request.stop_conditions, request.beam_search
    return pb.Submission(
        number=number,
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids.astype(INT32, copy=False).tobytes(),
        sampling=encode_sampling(request.sampling),
        token_rules=None if request.token_rules is None else encode_rules(request.token_rules),
        max_tokens=conditions.max_tokens,
        stop_token_ids=sorted(conditions.stop_token_ids),
        ignore_eos=conditions.ignore_eos,
        num_sequences=request.num_sequences,
        beam_search=None if search is None else _encode_search(search),
        priority=request.priority,
        cache_salt=request.cache_salt,
        speculate=None if request.speculate else False,
        num_prompt_logprobs=None if request.num_prompt_logprobs == NO_LOGPROBS else request.num_prompt_logprobs,
        has_stop_strings=request.has_stop_strings,
        trace_id=request.trace_id or "",
        traceparent=request.traceparent or "",
        model_hash=model_hash,
        max_model_len=request.longest_sequence(max_model_len),
        was_queued=was_queued,
        requires_same_numerics=request.requires_same_numerics,
        time_left_us=None if request.deadline_s is None else int(1e6 * max(0.0, request.deadline_s - monotonic_s())),
        received_before_us=0 if request.received_at_s is None else int(1e6 * (monotonic_s() - request.received_at_s)),
        continuation=None if request.continuation is None else encode_continuation(request.continuation),
        grammar=b"" if request.grammar is None else request.grammar.body,
        matcher_id=request.matcher_id,
        lora_adapter=request.lora_adapter,
        pooling_task=None if request.pooling is None else step_pb2.PoolingTask.ValueType(request.pooling),
        token_type_ids=request.token_type_ids,
        encoder_token_ids=b""
        if request.encoder_token_ids is None
        else request.encoder_token_ids.astype(INT32, copy=False).tobytes(),
        losses=None if request.losses == NO_LOSSES else encode_losses(request.losses),
    )


def decode_submission(message: pb.Submission) -> EngineRequest:
    """Return the request in a message. Raises ValueError, AssertionError: it is none."""
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=np.frombuffer(message.prompt_token_ids, INT32).astype(np.int32),
        sampling=decode_sampling(message.sampling),
        stop_conditions=StopConditions(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
        ),
        num_sequences=message.num_sequences,
        beam_search=_decode_search(message.beam_search) if message.HasField("beam_search") else None,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        speculate=message.speculate if message.HasField("speculate") else True,
        token_rules=decode_rules(message.token_rules) if message.HasField("token_rules") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else NO_LOGPROBS,
        has_stop_strings=message.has_stop_strings,
        continuation=decode_continuation(message.continuation) if message.HasField("continuation") else None,
        losses=decode_losses(message.losses),
        requires_same_numerics=message.requires_same_numerics,
        grammar=Grammar(message.grammar) if message.grammar else None,
        matcher_id=message.matcher_id,
        lora_adapter=message.lora_adapter,
        pooling=PoolingTask(message.pooling_task) if message.HasField("pooling_task") else None,
        token_type_ids=message.token_type_ids,
        encoder_token_ids=np.frombuffer(message.encoder_token_ids, INT32).astype(np.int32)
        if message.encoder_token_ids
        else None,
        trace_id=message.trace_id or None,
        traceparent=message.traceparent or None,
        deadline_s=monotonic_s() + message.time_left_us / 1e6 if message.HasField("time_left_us") else None,
    )


def encode_losses(losses: Losses) -> pb.Losses:
    """Return the message of what speaks against a request."""
    return pb.Losses(num_losses=losses.num_losses, num_lone_losses=losses.num_lone_losses, executor=losses.executor)


def decode_losses(message: pb.Losses) -> Losses:
    """Return what speaks against a request."""
    return Losses(message.num_losses, message.num_lone_losses, message.executor)


def _encode_search(search: BeamSearchParams) -> pb.BeamSearch:
    return pb.BeamSearch(
        beam_width=search.beam_width,
        num_outputs=search.num_outputs,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping.value,
    )


def _decode_search(message: pb.BeamSearch) -> BeamSearchParams:
    return BeamSearchParams(
        beam_width=message.beam_width,
        num_outputs=message.num_outputs,
        length_penalty=message.length_penalty,
        early_stopping=EarlyStopping(message.early_stopping),
    )


@dataclass(frozen=True, slots=True)
class EngineState:
    """See the message of this name."""

    model: ServedModel | None
    why_not_ready: str
    is_draining: bool
    last_trouble: str
    has_executor: bool
    num_waiting: int
    max_waiting: int
    retry_after_s: float
    load: EngineLoad
    max_requests: int | None
    max_waiting_tokens: int | None = None
    orphan_timeout_s: float = 0.0
    tenants_at_share: frozenset[str] = frozenset()


UNREACHABLE = EngineState(
    model=None,
    why_not_ready="the engine does not answer",
    is_draining=False,
    last_trouble="the engine does not answer",
    has_executor=False,
    num_waiting=0,
    max_waiting=0,
    retry_after_s=1.0,
    load=EngineLoad(0, 0, 0, 0, 0, 0, 0),
    max_requests=None,
)


_LOAD_FIELDS = tuple(EngineLoad.__dataclass_fields__)
_PLAIN_STATE = (
    *("why_not_ready", "is_draining", "last_trouble", "has_executor", "num_waiting", "max_waiting", "retry_after_s"),
    "orphan_timeout_s",
)


def encode_state(state: EngineState) -> pb.CoreState:
    """Return the message of a state."""
    return pb.CoreState(
        model=None if state.model is None else encode_model(state.model),
        load=pb.Load(**{name: getattr(state.load, name) for name in _LOAD_FIELDS}),
        max_requests=state.max_requests,
        max_waiting_tokens=state.max_waiting_tokens,
        tenants_at_share=sorted(state.tenants_at_share),
        **{name: getattr(state, name) for name in _PLAIN_STATE},
    )


def decode_state(message: pb.CoreState) -> EngineState:
    """Return the state in a message."""
    return EngineState(
        model=decode_model(message.model) if message.HasField("model") else None,
        load=EngineLoad(*(getattr(message.load, name) for name in _LOAD_FIELDS)),
        max_requests=message.max_requests if message.HasField("max_requests") else None,
        max_waiting_tokens=message.max_waiting_tokens if message.HasField("max_waiting_tokens") else None,
        tenants_at_share=frozenset(message.tenants_at_share),
        **{name: getattr(message, name) for name in _PLAIN_STATE},
    )


def encode_model(model: ServedModel) -> pb.ServedModel:
    """Return the message of the served model."""
    return pb.ServedModel(
        info=encode_info(model.info),
        max_model_len=model.max_model_len,
        max_num_seqs=model.max_num_seqs,
        served_name=model.served_name or "",
        numerics_ids=model.reproducibility.numerics_ids,
        weights_digest=model.reproducibility.weights_digest,
        former=[pb.FormerWeights(model_hash=known, weights_digest=digest) for known, digest in model.former],
        why_not_reproducible=model.reproducibility.why_not,
        speculates=model.speculates,
        speculation_may_change_outputs=model.speculation_may_change_outputs,
        adapters=model.adapters,
    )


def decode_model(message: pb.ServedModel) -> ServedModel:
    """Return the served model."""
    return ServedModel(
        decode_info(message.info),
        message.max_model_len,
        message.max_num_seqs,
        message.served_name or None,
        Reproducibility(tuple(message.numerics_ids), message.weights_digest, message.why_not_reproducible),
        speculates=message.speculates,
        speculation_may_change_outputs=message.speculation_may_change_outputs,
        adapters=tuple(message.adapters),
        former=tuple((former.model_hash, former.weights_digest) for former in message.former),
    )
