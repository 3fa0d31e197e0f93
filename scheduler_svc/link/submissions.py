"""Checked requests on their way from a front to the engine."""

import numpy as np

from octavo.core.v1 import core_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.process.clock import monotonic_s
from octavo_shared.step_wire.step import NO_LOGPROBS, PoolingTask
from octavo_shared.step_wire.wire import INT32, decode_sampling, encode_sampling
from octavo_shared.step_wire.wire_rules import decode_rules, encode_rules
from scheduler_svc.request.continuation_message import decode_continuation, encode_continuation
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.losses import NO_LOSSES, Losses
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions


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
        pooling_task=None if request.pooling is None else step_pb2.PoolingTask.ValueType(request.pooling),
        token_type_ids=request.token_type_ids,
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
        token_rules=decode_rules(message.token_rules) if message.HasField("token_rules") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else NO_LOGPROBS,
        has_stop_strings=message.has_stop_strings,
        continuation=decode_continuation(message.continuation) if message.HasField("continuation") else None,
        losses=decode_losses(message.losses),
        requires_same_numerics=message.requires_same_numerics,
        grammar=Grammar(message.grammar) if message.grammar else None,
        matcher_id=message.matcher_id,
        pooling=PoolingTask(message.pooling_task) if message.HasField("pooling_task") else None,
        token_type_ids=message.token_type_ids,
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
