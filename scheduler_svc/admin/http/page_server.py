"""The port of the live page: the page at /, and calls with JSON at /SERVICE/METHOD."""

import asyncio
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

import grpc
from aiohttp import web
from google.protobuf.descriptor import ServiceDescriptor

from octavo_shared.errors import OctavoServiceError
from scheduler_svc.admin.http.json_transcoder import CALL_TIMEOUT_S, CallError, JsonTranscoder, call_error
from scheduler_svc.admin.page.bundle import load_page
from scheduler_svc.front.access.access_control import AccessControl
from scheduler_svc.front.access.http_access import identify
from scheduler_svc.http.connections import ConnectionTimes
from scheduler_svc.http.http_port import HttpPort
from scheduler_svc.http.http_tls import HttpTls
from scheduler_svc.http.origin_checks import is_cross_site, is_local_host

MAX_BODY_BYTES = 64 * 2**10

# A connection is closed if no complete request head arrives for this long, in seconds.
IDLE_S = 15.0

# How long a body may take, in seconds.
_BODY_TIMEOUT_S = 10.0

# How long a client with its answer may go on sending what it has begun, in seconds.
_LINGER_S = 2.0

# A client that reads nothing for this long is cut off, in seconds.
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

_TIMEOUT_MS = re.compile(r"[0-9]{1,10}")


class PageServer(HttpPort):
    """Serves the page, and the methods of a service that only read.

    Args:
        listen: Address to bind, host:port; port 0 takes a free one.
        access: Checks callers; None: all may call.
        tls: The port's; None: it speaks plaintext.
    """

    def __init__(
        self,
        listen: str,
        service: ServiceDescriptor,
        servicer: object,
        access: AccessControl | None,
        tls: HttpTls | None,
    ) -> None:
        times = ConnectionTimes(first_request_s=IDLE_S, idle_s=IDLE_S, linger_s=_LINGER_S, stall_s=_STALL_S)
        super().__init__(listen, "--page-listen", self._answer, tls, times, _refuse)
        self._calls = JsonTranscoder(service, servicer)
        self._path = f"/{service.full_name}/"  # in front of the name of a method
        self._access = access
        self._speaks_tls = tls is not None
        self._page = load_page()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            response = await self._route(request)
        except _Refusal as refusal:
            response = web.Response(status=refusal.status, text=f"{refusal}\n", headers=refusal.headers)
        except CallError as error:
            response = _failure(error)
        for name, value in _SAFE_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    async def _route(self, request: web.BaseRequest) -> web.Response:
        if self._speaks_tls and not request.secure:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "this port speaks TLS; open it with https://")
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            raise _Refusal(HTTPStatus.BAD_REQUEST, "a request needs one Host header")
        if self._access is None and not self._speaks_tls and not is_local_host(hosts):
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
        try:
            identify(self._access, request, is_for_operators=True)
        except OctavoServiceError as error:
            raise call_error(error) from error
        answer = await self._calls.call(method, await _body(request), _timeout_s(request))
        return web.Response(text=answer, content_type="application/json")


class _Refusal(Exception):  # noqa: N818 (an answer)
    """An answer that refuses a request, with one sentence as text."""

    def __init__(self, status: HTTPStatus, sentence: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(sentence)
        self.status = status
        self.headers = headers


def _refuse(status: int, what: str) -> web.Response:
    """Answer what is not an HTTP request."""
    return web.Response(status=status, text=f"malformed request: {what}\n", headers=_SAFE_HEADERS)


def _failure(error: CallError) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.code is grpc.StatusCode.UNAUTHENTICATED else {}
    text = json.dumps({"code": error.connect_code, "message": error.message})
    return web.Response(status=error.http_status, text=text, content_type="application/json", headers=headers)


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
    """Return how long a call may take, in seconds: the client may want less than we allow."""
    wanted_ms = request.headers.get("Connect-Timeout-Ms")
    if wanted_ms is None:
        return CALL_TIMEOUT_S
    if not _TIMEOUT_MS.fullmatch(wanted_ms):
        raise CallError(
            grpc.StatusCode.INVALID_ARGUMENT, "the header Connect-Timeout-Ms must be a number of at most 10 digits"
        )
    if not int(wanted_ms):  # a fast call would be answered all the same
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the header Connect-Timeout-Ms leaves the call no time")
    return min(int(wanted_ms) / 1000, CALL_TIMEOUT_S)
