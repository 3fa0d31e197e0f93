"""What travels with a status beyond its code and message: `google.rpc.Status` in the trailing metadata.

Both services write it (`octavo_shared/grpc/grpc_status.py`). Clients read it; the scheduler reads its executors'.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

# gRPC's own name for the key that carries google.rpc.Status.
DETAILS_KEY = "grpc-status-details-bin"

# The domain in google.rpc.ErrorInfo.
ERROR_DOMAIN = "octavo"

# The reason in ErrorInfo of a request that seems to break executors: UNAVAILABLE, and not to be sent again.
LOST_TOO_OFTEN = "LOST_TOO_OFTEN"

# The reason of a service that goes away and takes nothing new: UNAVAILABLE, and another may be there in a moment.
DRAINING = "DRAINING"


def is_from_service(error: grpc.aio.AioRpcError) -> bool:
    """Return whether a service of Octavo ended the call, rather than gRPC for a broken connection, or a proxy."""
    return names_us(packed_details(error))


def names_us(details: Iterable[any_pb2.Any]) -> bool:
    """Return whether the details of a status say that it is a service of Octavo's."""
    return reason_of(details) is not None


def reason_of(details: Iterable[any_pb2.Any]) -> str | None:
    """Return the reason in the ErrorInfo of a service of Octavo's, the name of its status or more exact; None: none."""
    info = error_details_pb2.ErrorInfo()
    return next((info.reason for packed in details if packed.Unpack(info) and info.domain == ERROR_DOMAIN), None)


def unpack_detail(details: Iterable[any_pb2.Any], detail: Message) -> bool:
    """Fill `detail` from the details of a status; False: it has none of that type."""
    return any(packed.Unpack(detail) for packed in details)


def packed_details(error: grpc.aio.AioRpcError) -> Iterator[any_pb2.Any]:
    """Yield the details of the status that a call ended with."""
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        with suppress(DecodeError):  # a proxy's own error page; the code and the message still stand
            yield from status_pb2.Status.FromString(value).details
