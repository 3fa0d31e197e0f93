"""The base of our gRPC interceptors.

`grpc.aio.ServerInterceptor` gives an interceptor a way to the handler, but no way to wrap it that works for unary
calls and streams alike. `HandlerInterceptor` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import AsyncGeneratorType
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc
import grpc.aio

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of a server."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of one call. An unknown method has none; gRPC answers UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler_call_details.method, handler)

    @abstractmethod
    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return what runs in place of the handler of a method, such as `/octavo.admin.v1.AdminService/GetStep`."""


def handler_parts(handler: Handler) -> tuple[Callable[..., Any], Callable[..., Handler]]:
    """Return the function behind a handler, and what makes a handler of its type."""
    kinds: dict[tuple[bool, bool], tuple[Any, Callable[..., Handler]]] = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    return kinds[bool(handler.request_streaming), bool(handler.response_streaming)]


async def run_handler(behavior: Callable[..., Any], request: Any, context: Context) -> Any:
    """Run the function behind a handler; return its answer, None if it writes a stream.

    A stream is an async generator. It is closed as soon as the call ends: gRPC itself leaves an abandoned generator to
    the garbage collector, and its `finally` runs late.
    """
    answer = behavior(request, context)
    if not isinstance(answer, AsyncGeneratorType):
        return await answer
    async with aclosing(answer) as responses:
        await _write_all(responses, context)
    return None


async def _write_all(responses: AsyncIterator[Any], context: Context) -> None:
    async for response in responses:
        await context.write(response)


# The owner's names in a verified client certificate, as gRPC's authentication context calls them.
_NAME_PROPERTIES = ("x509_common_name", "peer_dns", "peer_uri")


def certificate_names(context: Context) -> set[str]:
    """Return the owner's names in the verified client certificate of a call; empty: none was presented."""
    properties = context.auth_context()
    values = [value for name in _NAME_PROPERTIES for value in properties.get(name, ())]
    return {value.decode("utf-8", "replace") for value in values}


def peer_address(context: Context) -> str:
    """Return the address that a call comes from, host:port; empty: a unix socket, so from this machine."""
    scheme, _, address = unquote(context.peer()).partition(":")
    return "" if scheme == "unix" else address
