"""What a trusted client certificate is worth over HTTP: as much as over gRPC.

The HTTP server calls the gRPC server over a connection of its own, so the gRPC server cannot see the certificate
that a browser has shown. The HTTP server has verified it. If it names one of --trusted-clients, the call carries a
secret that only this process knows, and needs no token, as with that certificate over gRPC.

Proxies forward a certificate in a header (Envoy: x-forwarded-client-cert). Here only its worth is forwarded.
"""

# The stubs of grpc make generic what is not at run time.
from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import grpc
import grpc.aio

_KEY = "octavo-forwarded-client-cert"
_SECRET_BYTES = 32


class ForwardedClientCert:
    """Forwards to the gRPC server that the HTTP server has verified a trusted client.

    Args:
        trusted_clients: Names in client certificates whose owners need no token; none: nothing is forwarded.
    """

    def __init__(self, trusted_clients: Collection[str]) -> None:
        self._trusted_clients = frozenset(trusted_clients)
        self._secret = secrets.token_hex(_SECRET_BYTES)

    def metadata(self, names: Collection[str]) -> tuple[tuple[str, str], ...]:
        """Return what a call carries whose client has shown a verified certificate with `names`."""
        return () if self._trusted_clients.isdisjoint(names) else ((_KEY, self._secret),)

    def wrap(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> list[grpc.aio.ServerInterceptor]:
        """Return interceptors that ask who calls, unless the call carries the secret."""
        if not self._trusted_clients:
            return list(interceptors)
        return [_UnlessForwarded(interceptor, self._secret) for interceptor in interceptors]


class _UnlessForwarded(grpc.aio.ServerInterceptor):
    def __init__(self, asking: grpc.aio.ServerInterceptor, secret: str) -> None:
        self._asking = asking
        self._secret = secret.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        metadata = handler_call_details.invocation_metadata or ()
        values = [value for key, value in metadata if key == _KEY and isinstance(value, str)]
        if len(values) == 1 and hmac.compare_digest(values[0].encode(), self._secret):
            return await continuation(handler_call_details)  # as anybody: see identity.py
        return await self._asking.intercept_service(continuation, handler_call_details)
