"""What the port answers over HTTP/1.1: the page at /, and calls with JSON at /SERVICE/METHOD."""

import asyncio
import json
import logging
import re
import socket
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import grpc
from aiohttp import web

from octavo_shared.process.events import Event
from scheduler_svc.admin.http.forwarded_client_cert import ForwardedClientCert
from scheduler_svc.admin.http.json_transcoder import CALL_TIMEOUT_S, CallError, JsonTranscoder
from scheduler_svc.admin.page.bundle import load_page
from scheduler_svc.http.connections import ConnectionTimes, HttpConnections
from scheduler_svc.http.http_tls import HttpTls, certificate_names
from scheduler_svc.http.origin_checks import is_cross_site, is_local_host

MAX_BODY_BYTES = 64 * 2**10

# A connection without a whole head of a request for so long is closed, in seconds.
IDLE_S = 15.0

# How long a body may take, in seconds.
_BODY_TIMEOUT_S = 10.0

# A client that has its answer may send what it has begun for so long, in seconds.
_LINGER_S = 2.0

# A client that takes nothing of what is sent to it for so long is cut off, in seconds.
_STALL_S = 30.0

_SAFE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "octavo",
    "X-Content-Type-Options": "nosniff",
}

# What is left of the visible ASCII characters is no metadata for gRPC.
_METADATA_VALUE = re.compile(r"[ -~]*")
_TIMEOUT_MS = re.compile(r"[0-9]{1,10}")

_logger = logging.getLogger(__name__)


class HttpServer:
    """Serves connections that speak HTTP/1.1.

    Args:
        calls: Calls the methods.
        path: Where they are: /SERVICE/ in front of the name of the method.
        forwarded_cert: Forwards that a client is trusted.
        tls: For connections over TLS; None: there are none.
        asks_for_tokens: Whether a call without a token is refused.
    """

    def __init__(
        self,
        calls: JsonTranscoder,
        path: str,
        forwarded_cert: ForwardedClientCert,
        tls: HttpTls | None,
        *,
        asks_for_tokens: bool,
    ):
        self._calls = calls
        self._path = path
        self._forwarded_cert = forwarded_cert
        self._tls = tls
        self._allows_any_name = asks_for_tokens or tls is not None
        self._page = load_page()
        times = ConnectionTimes(first_request_s=IDLE_S, idle_s=IDLE_S, linger_s=_LINGER_S, stall_s=_STALL_S)
        self._connections = HttpConnections(self._answer, tls, times)

    async def serve(self, connection: socket.socket, peer: str, *, over_tls: bool) -> None:
        """Own a connection; return as soon as requests can come, or it has failed.

        Args:
            connection: Accepted, not blocking.
            peer: Whose it is, for the log.
            over_tls: Whether it begins with a handshake.
        """
        await self._connections.serve(connection, peer, over_tls=over_tls)

    async def stop(self, grace_s: float) -> None:
        """Close idle connections, end calls that run after `grace_s` seconds, then close the rest."""
        await self._connections.stop(grace_s)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            response = await self._route(request)
        except _Refusal as refusal:
            response = web.Response(status=refusal.status, text=f"{refusal}\n", headers=refusal.headers)
        except CallError as error:
            response = self._failure(request, error)
        for name, value in _SAFE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _route(self, request: web.BaseRequest) -> web.Response:
        if self._tls is not None and not request.secure:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "this port speaks TLS; open it with https://")
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "a request needs one Host header")
        if not self._allows_any_name and not is_local_host(hosts):
            raise _Refusal(
                HTTPStatus.FORBIDDEN,
                "without --tokens-file this port answers to an IP address or localhost only, not to other names: open "
                "it by its IP address",
            )
        if request.path == "/":
            return self._show_page(request)
        method = request.path.removeprefix(self._path)
        if not request.path.startswith(self._path) or not self._calls.has(method):
            raise _Refusal(
                HTTPStatus.NOT_FOUND, f"there is a page at /, and methods at {self._path}METHOD, and nothing else"
            )
        return await self._call(request, method)

    def _show_page(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "read the page with GET", {"Allow": "GET, HEAD"})
        return web.Response(
            body=self._page.html,
            content_type="text/html",
            charset="utf-8",
            headers={"Content-Security-Policy": self._page.content_security_policy},
        )

    async def _call(self, request: web.BaseRequest, method: str) -> web.Response:
        if request.method != "POST":
            raise _Refusal(HTTPStatus.METHOD_NOT_ALLOWED, "call methods with POST and a JSON body", {"Allow": "POST"})
        if request.content_type != "application/json":
            raise _Refusal(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "methods take JSON; send the header Content-Type: application/json"
            )
        if is_cross_site(request.headers.get("Sec-Fetch-Site")):
            raise _Refusal(HTTPStatus.FORBIDDEN, "other web sites may not call this port")
        answer = await self._calls.call(method, await _body(request), self._metadata(request), _timeout_s(request))
        return web.Response(text=answer, content_type="application/json")

    def _metadata(self, request: web.BaseRequest) -> list[tuple[str, str]]:
        """Return what a call carries: the client's tokens as they are, and what its certificate is worth."""
        tokens = request.headers.getall("Authorization", [])
        if not all(map(_METADATA_VALUE.fullmatch, tokens)):
            raise CallError(grpc.StatusCode.UNAUTHENTICATED, "the header Authorization has characters outside of ASCII")
        certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
        forwarded = self._forwarded_cert.metadata(certificate_names(certificate or {}))
        return [*(("authorization", token) for token in tokens), *forwarded]

    def _failure(self, request: web.BaseRequest, error: CallError) -> web.Response:
        headers = {}
        if error.code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            # What the gRPC server logs of it lacks the address of the client.
            event = Event("http_call_refused", path=request.path, peer=request.remote, cause=error.message)
            _logger.warning(event)
        if error.code is grpc.StatusCode.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = "Bearer"
        text = json.dumps({"code": error.connect_code, "message": error.message})
        return web.Response(status=error.http_status, text=text, content_type="application/json", headers=headers)


class _Refusal(Exception):  # noqa: N818 (an answer)
    """A request is answered with one sentence as text."""

    def __init__(self, status: HTTPStatus, sentence: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


async def _body(request: web.BaseRequest) -> bytes:
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise CallError(grpc.StatusCode.UNIMPLEMENTED, "compressed bodies are not accepted; leave out Content-Encoding")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _Refusal(
                        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {MAX_BODY_BYTES} bytes"
                    )
    except TimeoutError:
        raise _Refusal(
            HTTPStatus.REQUEST_TIMEOUT, f"the body did not come in {_BODY_TIMEOUT_S:g} s", {"Connection": "close"}
        ) from None
    return bytes(body)


def _timeout_s(request: web.BaseRequest) -> float:
    """Return until when a call runs, in seconds: the client may want less than we allow."""
    wanted_ms = request.headers.get("Connect-Timeout-Ms")
    if wanted_ms is None:
        return CALL_TIMEOUT_S
    if not _TIMEOUT_MS.fullmatch(wanted_ms):
        raise CallError(
            grpc.StatusCode.INVALID_ARGUMENT, "the header Connect-Timeout-Ms must be a number of at most 10 digits"
        )
    if not int(wanted_ms):  # a call that is quick enough would be answered all the same
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the header Connect-Timeout-Ms leaves the call no time")
    return min(int(wanted_ms) / 1000, CALL_TIMEOUT_S)
