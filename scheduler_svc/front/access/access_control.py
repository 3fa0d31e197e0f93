"""Identifies the caller at the beginning of each call, before the request is decoded (`StatusInterceptor`).

The identity comes from a bearer token, or from the client certificate that gRPC verified. Servicers read it through
`identity.py`. Health needs none: probes have no credentials.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from grpc_health.v1 import health

from octavo_shared.errors import OctavoServiceError, PermissionDeniedError, UnauthenticatedError
from octavo_shared.grpc.grpc_status import abort
from octavo_shared.grpc.interceptor import (
    Context,
    Handler,
    HandlerInterceptor,
    certificate_names,
    handler_parts,
    run_handler,
)
from octavo_shared.grpc.watched_files import WatchedFiles
from octavo_shared.process.events import Event
from scheduler_svc.config.client_side_config import ClientSideConfig
from scheduler_svc.front.access.identity import ANYBODY, Identity, set_identity
from scheduler_svc.front.access.token_table import TokenTable, read_tokens

log = logging.getLogger(__name__)

_HOW_TO_SEND = "send the metadata authorization: Bearer TOKEN (octavo: --token-file, or OCTAVO_TOKEN)"


class AccessControl:
    """Knows which callers are let in.

    Args:
        tokens: The tokens, read again when they change; None: there are none.
        trusted_clients: Names in client certificates whose owners need no token and may act for any tenant.
    """

    def __init__(self, tokens: WatchedFiles[TokenTable] | None, trusted_clients: Collection[str]) -> None:
        self._tokens = tokens
        self._trusted_clients = frozenset(trusted_clients)

    def identify(
        self,
        authorizations: Sequence[str | bytes],
        certificate_names: Callable[[], Collection[str]],
        how_to_send: str,
        for_operators: str = "",
    ) -> Identity:
        """Return the identity of a caller.

        Args:
            authorizations: The values that the call has for the key `authorization`.
            certificate_names: Returns the names in its verified client certificate.
            how_to_send: How a call sends a token, for the error when there is none.
            for_operators: What is called, if that needs an identity for all tenants; empty: it does not.

        Raises:
            UnauthenticatedError: there is no credential, or the token is unknown.
            PermissionDeniedError: it is for operators.
        """
        if self._trusted_clients and not self._trusted_clients.isdisjoint(certificate_names()):
            return ANYBODY
        if self._tokens is None:
            raise UnauthenticatedError(
                "only clients listed in --trusted-clients may call this scheduler; use such a client's certificate"
            )
        token = _bearer_token(authorizations)
        if token is None:
            raise UnauthenticatedError(f"a bearer token is required; {how_to_send}")
        identity = self._tokens.current().find(token)
        if identity is None:
            raise UnauthenticatedError("unknown bearer token; ask the operator for a valid one")
        if for_operators and not identity.is_operator:
            raise PermissionDeniedError(
                f"the token belongs to tenant {identity.tenant!r}; {for_operators} requires a token of tenant * in "
                "--tokens-file"
            )
        return identity


class AccessInterceptor(HandlerInterceptor):
    """Lets calls of known callers through, and tells the servicers the caller's identity.

    Args:
        operator_services: Full names of services that need an identity for all tenants.
        on_refused: Called with the full name of the method and the error of each call that is refused.
    """

    def __init__(
        self,
        control: AccessControl,
        operator_services: Collection[str] = (),
        on_refused: Callable[[str, OctavoServiceError], None] = lambda method, error: None,
    ) -> None:
        self._control = control
        self._operator_services = frozenset(operator_services)
        self._on_refused = on_refused

    def wrap(self, method: str, handler: Handler) -> Handler:
        """Return the handler behind a check of its caller."""
        service = method.rpartition("/")[0].lstrip("/")
        if service == health.SERVICE_NAME:
            return handler
        behavior, rebuild = handler_parts(handler)

        async def guarded(request: Any, context: Context) -> Any:
            try:
                identity = self._control.identify(
                    [value for key, value in context.invocation_metadata() or () if key == "authorization"],
                    lambda: certificate_names(context),
                    _HOW_TO_SEND,
                    service if service in self._operator_services else "",
                )
            except OctavoServiceError as error:
                log.warning(Event("call_refused", method=method, peer=context.peer(), cause=str(error)))
                self._on_refused(method, error)
                await abort(context, error)
            set_identity(identity)
            return await run_handler(behavior, request, context)

        return rebuild(guarded, handler.request_deserializer, handler.response_serializer)


def access_control(config: ClientSideConfig) -> AccessControl | None:
    """Return the check of callers; None: all may call. Raises TokensFileError: the tokens file cannot be used."""
    path = config.tokens_file
    if path is None and not config.trusted_clients:
        return None
    tokens = None if path is None else WatchedFiles("tokens", [path], lambda: read_tokens(path))
    return AccessControl(tokens, config.trusted_clients)


def _bearer_token(authorizations: Sequence[str | bytes]) -> str | None:
    if len(authorizations) != 1 or not isinstance(authorizations[0], str):
        return None
    scheme, _, token = authorizations[0].partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
