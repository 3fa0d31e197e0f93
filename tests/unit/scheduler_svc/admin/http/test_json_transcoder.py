"""JSON in, a call over gRPC, JSON out: what is offered, what is said of mistakes, which status means what."""

import json
from contextlib import suppress

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2
from scheduler_svc.admin.http.json_transcoder import CallError, JsonTranscoder, _read, is_offered
from tests.support.each_row import each_row

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]

# connectrpc.com/docs/protocol, "Error codes".
STATUSES = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "out_of_range": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "data_loss": 500,
    "unauthenticated": 401,
}


def test_every_status_has_the_name_and_the_number_of_the_protocol() -> None:
    errors = [CallError(code, "") for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    assert {error.connect_code: error.http_status for error in errors} == STATUSES


def test_what_looks_is_offered_and_what_acts_or_streams_is_not() -> None:
    assert [method.name for method in SERVICE.methods if not is_offered(method)] == ["Drain", "DrainExecutor"]
    generation = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert {method.name for method in generation.methods if is_offered(method)} == {"GetModel"}


async def test_what_is_not_offered_is_not_called() -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        with pytest.raises(CallError) as caught:
            await JsonTranscoder(SERVICE, channel).call("Drain", b"{}", (), 10)
    assert caught.value.code is grpc.StatusCode.PERMISSION_DENIED
    assert "call it over gRPC" in caught.value.message


async def test_nobody_there_is_an_error_of_the_call() -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        with pytest.raises(CallError) as caught:
            await JsonTranscoder(SERVICE, channel).call("GetSchedulerState", b"{}", (), 10)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


@each_row(b'{"requestId": "a"}', b'{"request_id": "a"}', b' {\n"requestId":"a"}\n')
def test_fields_have_either_name(body: bytes) -> None:
    assert _read(body, pb.GetRequestRequest()) == pb.GetRequestRequest(request_id="a")


@each_row(
    *(b"", b"null", b"[]", b"[1]", b"1", b'"x"', b"{", b"\xff", b'{"requestId": 1}', b'{"nobody": 1}', b"[" * 50_000),
    *(b'{"requestId": "\\ud800"}', b'{"requestId": {}}'),
)
def test_a_body_that_is_no_message_is_refused_in_one_sentence(body: bytes) -> None:
    with pytest.raises(CallError) as caught:
        _read(body, pb.GetRequestRequest())
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message.startswith("the body is not a octavo.admin.v1.GetRequestRequest as JSON, such as {}: ")
    assert "\n" not in caught.value.message


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["pageSize", "x"]), inner, max_size=2),
    max_leaves=5,
)


@given(st.binary(max_size=50) | values.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_a_message_or_a_call_error(body: bytes) -> None:
    with suppress(CallError):
        assert isinstance(_read(body, pb.ListQueueRequest()), pb.ListQueueRequest)
