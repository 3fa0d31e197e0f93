"""What a client can meet, as one tree, and the one function from gRPC statuses to it.

    OctavoError
    ├── InvalidRequestError        the request is wrong; has field; do not retry
    ├── RequestExistsError         a live request has the same id
    ├── OverloadedError            the waiting queue is full; has retry_after_s
    ├── ResourceExhaustedError     it needs more KV cache than there is, or a larger message; send less
    ├── UnavailableError           draining, no executor yet, or the connection broke; retry later
    │   ├── NotConnectedError      nothing answers at the address
    │   ├── LostTooOftenError      the request seems to break executors; do not retry
    │   └── TlsHandshakeError      something answers, but the two sides do not agree on TLS
    ├── UnauthenticatedError       the token is missing or unknown
    ├── PermissionDeniedError      the token is another tenant's, or not an operator's
    ├── ConnectionOptionsError     a certificate file or the token cannot be used; nothing was sent
    ├── RequestAbortedError        the request was ended by a call or an operator
    ├── DeadlineError              the time limit passed, or is far too short for the answer
    ├── InternalError              the model's logits are not finite; a bug; or not an Octavo scheduler at the other end
    ├── LocalServiceError          a service of this machine did not start, or not again
    │   └── SettingsError          a setting is wrong, so nothing was started; has mistakes
    └── ClosedError                the client or the LLM was closed before

Each message is one sentence that may be shown to a person as it is: it is cut, and cannot steer a terminal.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2

from octavo.values.status_details import DRAINING, LOST_TOO_OFTEN, names_us, packed_details, reason_of, unpack_detail
from octavo.values.wording import sentence

if TYPE_CHECKING:
    from octavo.values.outputs import Output

TIME_LIMIT_PASSED = "the answer was not complete within the time limit"


class OctavoError(Exception):
    """Any failure that a caller of this package can expect.

    Attributes:
        outputs: What had come of the answer when it failed; empty if nothing had.
    """

    outputs: "tuple[Output, ...]" = ()

    def __init__(self, message: str = "") -> None:
        super().__init__(sentence(message))  # a peer may have written it

    def keep(self, outputs: "tuple[Output, ...]") -> None:
        """Note what had come."""
        if outputs:
            self.outputs = outputs


class InvalidRequestError(OctavoError):
    """The request is wrong as it stands; sending it again will fail again.

    Args:
        message: What is wrong, with the value and the limit.
        field: Path of the field in `GenerateRequest`, such as `sampling_params.top_p`; None: the
            message as a whole.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        self.field = field
        super().__init__(message)


class RequestExistsError(OctavoError):
    """A live request has the same request_id."""


class OverloadedError(OctavoError):
    """The scheduler's waiting queue is full; the same request may be sent again.

    Args:
        message: The scheduler's sentence.
        retry_after_s: When to try again, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class ResourceExhaustedError(OctavoError):
    """The request is valid and needs more than there is: of the KV cache, or of the room in one message.

    Sent again as it is, it would fail again; a smaller one may be served.
    """


class UnavailableError(OctavoError):
    """The request cannot be served now; it may be sent again later.

    Attributes:
        goes_away: Whether the scheduler says that it goes away, or was there before and answers no more: another one
            may be there in a moment.
    """

    goes_away = False

    def but(self, further: str) -> "UnavailableError":
        """Return the same error with a longer sentence."""
        return UnavailableError(f"{self}{further}")


class NotConnectedError(UnavailableError):
    """Nothing answers at the scheduler's address.

    Args:
        address: Of the scheduler.
        further: The rest of the sentence.
    """

    def __init__(self, address: str, further: str = "") -> None:
        self.address = address
        super().__init__(f"no scheduler is reachable at {address}{further}")

    def but(self, further: str) -> "NotConnectedError":
        """Return the same error with a longer sentence."""
        return NotConnectedError(self.address, further)


class LostTooOftenError(UnavailableError):
    """The request lost its executor again and again while it ran: it seems to break them. Do not send it again."""


class TlsHandshakeError(UnavailableError):
    """Something answers at the scheduler's address, but no TLS connection came about.

    Args:
        address: Of the scheduler.
        trouble: What is wrong, and the fix.
    """

    def __init__(self, address: str, trouble: str) -> None:
        self.address = address
        super().__init__(f"no connection to the scheduler at {address}: {trouble}")


class UnauthenticatedError(OctavoError):
    """The scheduler wants a token, and the call had none or an unknown one."""


class PermissionDeniedError(OctavoError):
    """The caller is known and may not do this."""


class ConnectionOptionsError(OctavoError):
    """What should secure the connection cannot be used as it was given."""


class RequestAbortedError(OctavoError):
    """The request was ended by Abort or by an operator."""


class DeadlineError(OctavoError):
    """The call's time limit passed, and the request was aborted; or it was refused, as the limit is far too short."""


class InternalError(OctavoError):
    """The scheduler failed in a way that its interface does not promise."""


class LocalServiceError(OctavoError):
    """A service on this machine did not start, or stopped and could not be started again."""


class SettingsError(LocalServiceError):
    """A setting of the services is wrong, and nothing was started.

    Args:
        mistakes: One sentence for each mistake.
    """

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__("; ".join(mistakes))


class ClosedError(OctavoError):
    """The client or the LLM was used after it was closed."""


def from_rpc_error(error: grpc.aio.AioRpcError) -> OctavoError:
    """Turn a failed call into the error of the tree."""
    return from_status(error.code(), error.details() or "", list(packed_details(error)))


def from_status(status_code: grpc.StatusCode, message: str, details: Sequence[any_pb2.Any]) -> OctavoError:
    """Turn a status into the error of the tree; the details of google.rpc become attributes."""
    message = message or f"the scheduler returned {status_code.name} without a message"
    match status_code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return InvalidRequestError(message, field=_bad_field(details))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            # A full queue says when to come back. Without that, the request outgrew the KV cache, or gRPC
            # itself refused a message that is too large, and to wait would not help.
            retry_after_s = _retry_after_s(details)
            if retry_after_s is not None:
                return OverloadedError(message, retry_after_s=retry_after_s)
            if names_us(details):
                return ResourceExhaustedError(message)
            reason = message.removeprefix("SERVER: ").removeprefix("CLIENT: ")
            return ResourceExhaustedError(
                f"the message exceeds a size limit ({reason}); send or request less: the scheduler's "
                "--max-request-bytes limits requests"
            )
        case grpc.StatusCode.FAILED_PRECONDITION:
            return InvalidRequestError(message)
        case grpc.StatusCode.ALREADY_EXISTS:
            return RequestExistsError(message)
        case grpc.StatusCode.UNAVAILABLE if reason_of(details) == LOST_TOO_OFTEN:
            return LostTooOftenError(message)
        case grpc.StatusCode.UNAVAILABLE:
            error = UnavailableError(message)
            error.goes_away = reason_of(details) == DRAINING
            return error
        case grpc.StatusCode.CANCELLED:
            # A call that the caller cancels raises asyncio.CancelledError, so CANCELLED is the server's. gRPC
            # itself answers so, without a reason, when more calls wait than a server has taken up.
            return UnavailableError(
                "the scheduler closed the call before answering: it stopped, or has too many calls; retry in a moment"
            )
        case grpc.StatusCode.UNAUTHENTICATED:
            return UnauthenticatedError(message)
        case grpc.StatusCode.PERMISSION_DENIED:
            return PermissionDeniedError(message)
        case grpc.StatusCode.ABORTED:
            return RequestAbortedError(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineError(message if names_us(details) else TIME_LIMIT_PASSED)
        case grpc.StatusCode.UNIMPLEMENTED:
            return InternalError(f"the server is not an Octavo scheduler of a compatible release: {message}")
        case code:
            return InternalError(f"{message} ({code.name})")


def _bad_field(details: Sequence[any_pb2.Any]) -> str | None:
    bad_request = error_details_pb2.BadRequest()
    if not unpack_detail(details, bad_request) or not bad_request.field_violations:
        return None
    return bad_request.field_violations[0].field or None


def _retry_after_s(details: Sequence[any_pb2.Any]) -> float | None:
    retry_info = error_details_pb2.RetryInfo()
    if not unpack_detail(details, retry_info):
        return None
    return retry_info.retry_delay.ToTimedelta().total_seconds()
