"""JSON in, a call, JSON out: what is offered, what is said of mistakes, which status means what."""

import asyncio
import json
from contextlib import suppress

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.generation.v1 import generation_service_pb2
from octavo_shared.errors import UnknownNameError
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
    assert [method.name for method in SERVICE.methods if not is_offered(method)] == [
        "Drain",
        "DrainExecutor",
        "LoadAdapter",
        "UnloadAdapter",
        "Pause",
        "Resume",
        "UpdateWeights",
        "ResetPrefixCache",
        "Sleep",
        "WakeUp",
    ]
    generation = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert {method.name for method in generation.methods if is_offered(method)} == {"GetModel"}


class Servicer:
    """Ends each call in its own way."""

    async def Drain(self, *_: object) -> None:  # noqa: N802
        raise AssertionError("it was called")

    async def GetRequest(self, *_: object) -> None:  # noqa: N802
        raise UnknownNameError("no request has this id")

    async def GetStep(self, *_: object) -> None:  # noqa: N802
        raise KeyError("a secret of the first line\nand of the second")

    async def ListSteps(self, *_: object) -> None:  # noqa: N802
        await asyncio.Event().wait()


@each_row(
    (
        "Drain",
        grpc.StatusCode.PERMISSION_DENIED,
        "Drain is not available over HTTP, which only reads; call it over gRPC",
    ),
    ("GetRequest", grpc.StatusCode.NOT_FOUND, "no request has this id"),
    ("GetStep", grpc.StatusCode.INTERNAL, "internal error: KeyError: 'a secret of the first line\\nand of the second'"),
    ("ListSteps", grpc.StatusCode.DEADLINE_EXCEEDED, "the call took longer than 0.01 s"),
)
async def test_a_call_that_fails_has_the_status_and_the_words_of_grpc(
    method: str, code: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(CallError) as caught:
        await JsonTranscoder(SERVICE, Servicer()).call(method, b"{}", 0.01)
    assert (caught.value.code, caught.value.message) == (code, message)


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
