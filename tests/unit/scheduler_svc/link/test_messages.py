"""What goes over the link comes back as it was."""

import inspect
from dataclasses import fields, replace

import numpy as np

from executor_svc.fake.worker import FakeWorker
from octavo.core.v1 import core_service_pb2 as pb
from octavo_shared import errors
from octavo_shared.errors import (
    DeadlineTooShortError,
    InvalidFieldError,
    LostTooOftenError,
    NoExecutorError,
    OctavoServiceError,
    QueueFullError,
    RequestExistsError,
    TokenQuotaError,
    UnavailableError,
)
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.grpc.grpc_status import rpc_status
from octavo_shared.step_wire.step import PoolingTask, SamplingRow
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.link.messages import (
    UNREACHABLE,
    EngineState,
    decode_ended,
    decode_failure,
    decode_pooled,
    decode_search_end,
    decode_span,
    decode_state,
    decode_submission,
    encode_ended,
    encode_failure,
    encode_pooled,
    encode_search_end,
    encode_span,
    encode_state,
    encode_submission,
)
from scheduler_svc.request.continuation import Continuation
from scheduler_svc.request.engine_client import EngineLoad
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.life import EndedRequest, EventKind, LifeEvent, RequestTimes
from scheduler_svc.request.losses import Losses
from scheduler_svc.request.outputs import FinishReason, Hypothesis
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from scheduler_svc.request.provenance import ENDED, Numerics, Progress, Span
from scheduler_svc.request.served_model import Reproducibility, ServedModel
from tests.support.each_row import each_row

PLAIN = EngineRequest("a", np.arange(5, dtype=np.int32), SamplingRow(), StopConditions())

REQUESTS = {
    "plain": PLAIN,
    "all": replace(
        PLAIN,
        sampling=SamplingRow(temperature=0.5, top_k=3, seed=7, num_logprobs=2),
        stop_conditions=StopConditions(max_tokens=9, stop_token_ids=frozenset({1, 4}), ignore_eos=True),
        num_sequences=3,
        priority=-2,
        tenant="red",
        cache_salt=2**63 + 1,
        speculate=False,
        num_prompt_logprobs=0,
        has_stop_strings=True,
        trace_id="0" * 32,
        traceparent="00-1-2-01",
    ),
    "no limit of tokens": replace(PLAIN, stop_conditions=StopConditions(max_tokens=None)),
    "continued": replace(PLAIN, continuation=Continuation(num_prompt_logprobs=2, attempt=3)),
    "continued after losses": replace(PLAIN, losses=Losses(3, 2, "a:1")),
    "guided": replace(PLAIN, grammar=Grammar(b"g"), matcher_id="of a release"),
    "a vector": replace(PLAIN, pooling=PoolingTask.EMBED),
    "scores of a pair": replace(PLAIN, pooling=PoolingTask.SCORE, token_type_ids=b"\0\0\0\1\1"),
    "a search": replace(PLAIN, beam_search=BeamSearchParams(4, 2, -0.5, EarlyStopping.NEVER)),
}


@each_row(*REQUESTS.values())
def test_a_submission_is_the_request(request_: EngineRequest) -> None:
    message = pb.Submission.FromString(encode_submission(7, request_, "hash", 99).SerializeToString())
    assert (message.number, message.model_hash, message.max_model_len) == (7, "hash", 99)
    decoded = decode_submission(message)
    assert _fields(decoded) == _fields(request_)


def _fields(request: EngineRequest) -> dict[str, object]:
    """Return what is compared of a request: arrays, which have no truth, as lists."""
    given = {field.name: getattr(request, field.name) for field in fields(request) if field.compare}
    return {**given, "prompt_token_ids": request.prompt_token_ids.tolist()}


def test_a_submission_that_goes_on_has_the_length_that_it_was_first_accepted_for() -> None:
    request = replace(PLAIN, continuation=Continuation(max_model_len=5000))
    message = encode_submission(7, request, "hash", 99)
    assert message.max_model_len == 5000
    assert decode_submission(message).continuation == request.continuation


def test_a_submission_has_the_rules_on_tokens() -> None:
    rules = TokenRules(banned_token_ids=np.array([3, 5], np.int32), allowed_mask=b"\xff")
    decoded = decode_submission(encode_submission(1, replace(PLAIN, token_rules=rules), "", 9)).token_rules
    assert decoded is not None
    assert (decoded.banned_token_ids.tolist(), decoded.allowed_mask) == ([3, 5], b"\xff")


ERRORS = [
    InvalidFieldError("sampling_params.top_p", 2.0, "at most 1"),
    QueueFullError(4, 1.5, "red"),
    QueueFullError(4, 1.5, "red", gives_way=True),
    TokenQuotaError("red", 9, 60, 3, 6.0),
    DeadlineTooShortError("take", 20.0, 1.0),
    RequestExistsError("mine"),
    LostTooOftenError(4),
    NoExecutorError("no executor is attached", "127.0.0.1:1: refused"),
    UnavailableError("gone"),
    *(
        kind("a sentence")
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, OctavoServiceError) and kind.__init__ is OctavoServiceError.__init__
    ),
]


@each_row(*ERRORS)
def test_an_error_ends_a_call_as_it_would_have_without_the_link(error: OctavoServiceError) -> None:
    decoded = decode_failure(pb.Failure.FromString(encode_failure(error).SerializeToString()))
    assert type(decoded) is type(error)
    assert (str(decoded), vars(decoded)) == (str(error), vars(error))
    assert rpc_status(decoded) == rpc_status(error)


def test_an_error_of_a_later_release_is_one_of_the_nearest_class_that_is_known() -> None:
    message = encode_failure(LostTooOftenError(4))
    message.kind = "LaterError"
    decoded = decode_failure(message)
    assert (type(decoded), str(decoded)) == (UnavailableError, message.message)
    del message.base_kinds[:]
    assert type(decode_failure(message)) is OctavoServiceError


def test_what_a_search_found() -> None:
    found = Hypothesis(np.array([3, 4], np.int32), np.array([-0.5, -1.0], np.float32), -0.75, FinishReason.LENGTH)
    [decoded] = decode_search_end(pb.SearchEnd.FromString(encode_search_end(3, [found]).SerializeToString()))
    assert decoded.token_ids.tolist() == [3, 4]
    assert decoded.logprobs.tolist() == [-0.5, -1.0]
    assert (decoded.score, decoded.finish_reason) == (found.score, found.finish_reason)


def test_the_answer_to_a_pooling_request() -> None:
    values = np.array([0.25, -1e-30, 3.0], np.float32)
    message = pb.PooledAnswer.FromString(encode_pooled(3, values).SerializeToString())
    assert (message.number, decode_pooled(message).tolist()) == (3, values.tolist())


@each_row(None, UnavailableError("gone"))
def test_the_end_of_a_request_on_another_clock(error: OctavoServiceError | None) -> None:
    ended = EndedRequest(
        "a",
        "red",
        1,
        num_prompt_tokens=5,
        num_output_tokens=6,
        num_cached_tokens=4,
        num_preemptions=1,
        num_losses=2,
        times=RequestTimes(10.0, 11.0, None, 12.5, 14.0),
        events=(LifeEvent(EventKind.PARKED, 10.5, "127.0.0.1:1"),),
        ended_at_unix_s=1e9,
        finish_reason=None if error is not None else FinishReason.STOP,
        error_code=None if error is None else "UNAVAILABLE",
        error_message="" if error is None else "gone",
        trace_id="0" * 32,
        num_draft_tokens=3,
    )
    message = pb.EndedRequest.FromString(encode_ended(ended).SerializeToString())
    decoded = decode_ended(message, 114.0, error, request_id="a", tenant="red", priority=1, trace_id="0" * 32)
    assert decoded.times == RequestTimes(110.0, 111.0, None, 112.5, 114.0)
    assert decoded.events == (LifeEvent(EventKind.PARKED, 110.5, "127.0.0.1:1"),)
    same = {"times": ended.times, "events": ended.events, "provenance": ended.provenance}
    assert replace(decoded, **same) == ended  # type: ignore[arg-type]


def test_a_span() -> None:
    span = Span(Numerics("id", "digest"), Progress((0, ENDED), 3))
    assert decode_span(pb.ProvenanceSpan.FromString(encode_span(span).SerializeToString())) == span


def test_the_state_of_a_core() -> None:
    info = FakeWorker().info
    model = ServedModel(info, 99, 8, "mine", Reproducibility(("id",), "digest", "why"), speculates=True)
    load = EngineLoad(1, 2, 3, 4, 5, 6, 7)
    told = EngineState(model, "", False, "trouble", True, 3, 9, 1.5, load, 12, tenants_at_share=frozenset({"", "red"}))
    for state in (told, UNREACHABLE):
        assert decode_state(pb.CoreState.FromString(encode_state(state).SerializeToString())) == state
