"""AdminService as a front calls it, wherever the engine is: the generated stub, on a channel that is none of gRPC's.

Every method of the service with one answer can be called; methods that the service gets later need no code here.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from octavo.admin.v1 import admin_service_pb2_grpc
from octavo_shared.errors import UnavailableError

if TYPE_CHECKING:  # only the type stub of the generated module has it
    from octavo.admin.v1.admin_service_pb2_grpc import AdminServiceAsyncStub

# Calls a method by its name, such as `LoadAdapter`, with its message or an iterator of those; gives its answer.
Call: TypeAlias = Callable[[str, Any], Awaitable[Any]]


def admin_stub(call: Call) -> "AdminServiceAsyncStub":
    """Return the service behind a function."""
    channel: Any = _Channel(call)
    stub: AdminServiceAsyncStub = admin_service_pb2_grpc.AdminServiceStub(channel)
    return stub


def admin_of(servicer: admin_service_pb2_grpc.AdminServiceServicer) -> "AdminServiceAsyncStub":
    """Return a servicer of this process; calls raise what it raises."""

    async def call(method: str, request: Any) -> Any:
        return await getattr(servicer, method)(request, None)

    return admin_stub(call)


def no_admin() -> "AdminServiceAsyncStub":
    """Return a service that nobody serves."""

    async def call(method: str, request: Any) -> Any:
        raise UnavailableError(f"nobody answers {method} here")

    return admin_stub(call)


class _Channel:
    """What the generated stub asks for its methods, by their full names."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def unary_unary(self, method: str, **_: Any) -> Callable[[Any], Awaitable[Any]]:
        """Return what calls a method."""
        name = method.rpartition("/")[2]
        return lambda request: self._call(name, request)

    stream_unary = unary_unary
