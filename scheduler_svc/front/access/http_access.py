"""Identifies the sender of an HTTP request, as `access_control.py` does for gRPC."""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from scheduler_svc.front.access.access_control import AccessControl
from scheduler_svc.front.access.identity import ANYBODY, set_identity
from scheduler_svc.http.http_tls import certificate_names

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

HOW_TO_SEND = "send the header Authorization: Bearer TOKEN"


def identify(
    access: AccessControl | None, request: "web.BaseRequest", *, is_for_operators: bool, how_to_send: str = HOW_TO_SEND
) -> None:
    """Identify the sender of a request for the servicers.

    Args:
        access: Checks callers; None: all may call.
        request: The request.
        is_for_operators: Whether the request needs an identity for all tenants.
        how_to_send: How a request sends a token.

    Raises: OctavoServiceError: the caller is refused; this is logged.
    """
    if access is None:
        set_identity(ANYBODY)
        return
    try:
        identity = access.identify(
            _authorizations(request), lambda: _names_of(request), how_to_send, request.path if is_for_operators else ""
        )
    except OctavoServiceError as error:
        log.warning(Event("http_call_refused", path=request.path, peer=request.remote, cause=str(error)))
        raise
    set_identity(identity)


def _authorizations(request: "web.BaseRequest") -> list[str]:
    """Return the credentials of a request; Anthropic's clients send them in a header of their own."""
    keys = (f"Bearer {key}" for key in request.headers.getall("x-api-key", []))
    return request.headers.getall("Authorization", []) or list(keys)


def _names_of(request: "web.BaseRequest") -> Collection[str]:
    certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
    return certificate_names(certificate or {})
