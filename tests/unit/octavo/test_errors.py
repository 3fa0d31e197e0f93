import inspect

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from octavo import errors
from octavo.errors import (
    DeadlineError,
    InternalError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    PermissionDeniedError,
    RequestAbortedError,
    RequestExistsError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
)
from tests.support.each_row import each_row


def rpc_error(code: grpc.StatusCode, details: str = "why", packed: bytes | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata() if packed is None else grpc.aio.Metadata(("grpc-status-details-bin", packed))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


@each_row(
    (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhaustedError),
    (grpc.StatusCode.ALREADY_EXISTS, RequestExistsError),
    (grpc.StatusCode.UNAVAILABLE, UnavailableError),
    (grpc.StatusCode.CANCELLED, UnavailableError),
    (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
    (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
    (grpc.StatusCode.ABORTED, RequestAbortedError),
    (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineError),
    (grpc.StatusCode.UNIMPLEMENTED, InternalError),
    (grpc.StatusCode.INTERNAL, InternalError),
    (grpc.StatusCode.DATA_LOSS, InternalError),
)
def test_each_code_has_its_error(code: grpc.StatusCode, expected: type[OctavoError]) -> None:
    assert type(from_rpc_error(rpc_error(code))) is expected


def test_what_a_peer_says_has_a_bounded_length_and_cannot_steer_a_terminal() -> None:
    said = str(from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "\x1b[2J\x7f\x9b" + "x" * 1_000_000)))
    assert said.startswith(r"\x1b[2J\x7f\x9bxxx")
    assert len(said) < 3_000


def test_bad_request_names_the_field() -> None:
    status = status_pb2.Status()
    violation = error_details_pb2.BadRequest.FieldViolation(field="prompt")
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))

    error = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "prompt is empty", status.SerializeToString()))

    assert isinstance(error, InvalidRequestError)
    assert (error.field, str(error)) == ("prompt", "prompt is empty")


def test_retry_info_makes_an_exhausted_resource_an_overload() -> None:
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="QUEUE"))
    retry_info = error_details_pb2.RetryInfo()
    retry_info.retry_delay.FromMilliseconds(1250)
    status.details.add().Pack(retry_info)

    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, packed=status.SerializeToString()))

    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == 1.25


@each_row(
    ("the request needs 40 blocks", True, "the request needs 40 blocks"),
    (
        "SERVER: Received message larger than max (70 vs. 64)",
        False,
        "the message exceeds a size limit (Received message larger than max (70 vs. 64)); "
        "send or request less: the scheduler's --max-request-bytes limits requests",
    ),
)
def test_an_exhausted_resource_without_retry_info_says_what_was_too_large(
    details: str, is_own: bool, sentence: str
) -> None:
    status = status_pb2.Status()
    # A proxy in between marks its own errors too.
    domain = "octavo" if is_own else "proxy.example"
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="RESOURCE_EXHAUSTED", domain=domain))
    packed = status.SerializeToString()
    error = from_rpc_error(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details, packed))
    assert type(error) is ResourceExhaustedError
    assert str(error) == sentence


def test_a_call_that_grpc_ended_for_the_server_says_what_to_do() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.CANCELLED, "CANCELLED"))
    assert isinstance(error, UnavailableError)
    assert "retry in a moment" in str(error)


def test_details_that_cannot_be_read_leave_code_and_message() -> None:
    error = from_rpc_error(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "wrong", b"\xff\xff not a status"))
    assert isinstance(error, InvalidRequestError)
    assert (error.field, str(error)) == (None, "wrong")


def test_an_error_without_a_reason_still_makes_a_sentence() -> None:
    assert "ABORTED" in str(from_rpc_error(rpc_error(grpc.StatusCode.ABORTED, "")))


def test_the_tree_at_the_top_of_the_module_is_complete() -> None:
    assert errors.__doc__ is not None
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    own = [name for name in classes if name.endswith("Error") and name != "DecodeError"]
    assert len(own) == 18
    assert all(name in errors.__doc__ for name in own)
