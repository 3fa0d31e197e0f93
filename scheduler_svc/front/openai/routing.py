"""What every answer needs: the path, access, errors, and the count of answers."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus

from aiohttp import HttpVersion10, HttpVersion11, web

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from octavo_shared.process.histogram import Histogram
from octavo_shared.process.metric import Family, LabelValues, Metric
from scheduler_svc.front.access.access_control import AccessControl
from scheduler_svc.front.access.http_access import HOW_TO_SEND, identify
from scheduler_svc.front.access.identity import ANYBODY, set_identity
from scheduler_svc.front.api_meter import OTHER_API, ApiMeter
from scheduler_svc.front.openai.call import Bodies, Call
from scheduler_svc.front.openai.errors import CLOSE, ApiError, api_error, refusal_of
from scheduler_svc.http.origin_checks import is_cross_site, is_local_host

log = logging.getLogger(__name__)

ANSWERS = Metric(
    "octavo_http_responses_total",
    "counter",
    "Responses of the OpenAI-compatible API, by path and HTTP status; status 499: the client disconnected before its "
    "answer was complete.",
    ("path", "status"),
)
HANDLING = Metric(
    "octavo_http_handling_seconds",
    "histogram",
    "Time from the request's headers to the end of its response, in seconds.",
    ("path",),
)
METRICS = (ANSWERS, HANDLING)

# From a short answer to a long one: doubling from 1 ms to 131 s.
_HANDLING_BOUNDS = tuple(0.001 * 2**power for power in range(18))

# The status of a client that left, as nginx logs it; it is never sent.
_CLIENT_LEFT = 499

# Unknown paths share a label: clients could make up any number of them.
_OTHER = "other"

_HOW_TO_SEND = f"{HOW_TO_SEND} (openai: api_key), or x-api-key: TOKEN"

_SAFE_HEADERS = {"Cache-Control": "no-store", "Server": "octavo", "X-Content-Type-Options": "nosniff"}


# The method of a route that only says why it is not there.
ANY_METHOD = ""


class Access(Enum):
    """Who may call a path, where callers are checked."""

    ANYBODY = auto()
    CLIENTS = auto()
    OPERATORS = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path.

    `api`: its name in the metrics of requests; None: it is not counted there. `is_page`: other web sites may link to
    it.
    """

    method: str
    answer: Callable[[Call], Awaitable[web.StreamResponse]]
    api: str | None = None
    access: Access = Access.CLIENTS
    is_page: bool = False


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """The settings of a port.

    `max_bytes`: longest body. `is_local`: whether the port listens on this machine only, so that a foreign name in the
    header Host was given to it by a web site. `speaks_tls`: whether it requires TLS.
    """

    max_bytes: int
    is_local: bool
    speaks_tls: bool


class Routes:
    """Answers requests.

    Args:
        routes: By path; a path that ends with /{} stands for all that begin like it.
        access: Checks callers; None: all may call.
        in_shape_of: Returns an error in the shape that the caller reads; without it, OpenAI's.
    """

    def __init__(
        self,
        routes: Mapping[str, Route],
        access: AccessControl | None,
        settings: RouteSettings,
        meter: ApiMeter,
        in_shape_of: Callable[[Call, ApiError], ApiError] = lambda call, error: error,
    ) -> None:
        self._meter = meter
        self._routes = routes
        self._in_shape_of = in_shape_of
        self._access = access
        self._settings = settings
        self._bodies = Bodies(settings.max_bytes)
        self._num_answers: Counter[LabelValues] = Counter()
        self._handling: dict[LabelValues, Histogram] = {}

    def families(self) -> Iterator[Family]:
        """Yield the metrics as they are now."""
        yield ANSWERS.family(self._num_answers)
        yield HANDLING.histogram_family(self._handling)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request; an exception becomes an error in the shape that the client reads."""
        began_s, status = time.monotonic(), _CLIENT_LEFT
        path = self._path_of(request.path)
        set_identity(ANYBODY)  # until it is known: the connection may have served another caller
        api = self._routes[path].api if path in self._routes else OTHER_API
        counted = None if api is None else self._meter.request(api)
        call = Call(request, self._bodies, counted)
        call.headers |= _SAFE_HEADERS
        try:
            response = await self._answer(call, path)
            status = response.status
            if counted is not None:
                counted.accept()
        except ConnectionError as error:  # while the answer was sent: the connection is about to cancel this call
            raise asyncio.CancelledError from error
        except Exception as error:
            if not isinstance(error, OctavoServiceError):
                log.exception(Event("http_call_failed", path=path, request_id=call.request_id))
            if counted is not None:
                counted.refuse(refusal_of(error))
            refusal = self._in_shape_of(call, api_error(error))
            status = refusal.status
            response = refuse(refusal, call.headers)
            # It may be the error itself, whose traceback holds this frame with the body: a cycle of megabytes.
            refusal.__traceback__ = None
        finally:
            if counted is not None:
                counted.end()
            self._num_answers[path, str(status)] += 1
            self._handling.setdefault((path,), Histogram(_HANDLING_BOUNDS)).observe(time.monotonic() - began_s)
        return response

    def _path_of(self, path: str) -> str:
        """Return the path as it was declared."""
        if path in self._routes:
            return path
        return next((known for known in self._routes if known.endswith("/{}") and path.startswith(known[:-2])), _OTHER)

    async def _answer(self, call: Call, path: str) -> web.StreamResponse:
        request = call.request
        if request.version not in (HttpVersion10, HttpVersion11):
            raise ApiError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this port speaks HTTP/1.1", headers=CLOSE)
        route = self._routes.get(path)
        self._check_origin(request, may_be_foreign=route is not None and route.is_page)
        if route is None:
            paths = ", ".join(path for path, route in self._routes.items() if route.method).replace("{}", "NAME")
            raise ApiError(HTTPStatus.NOT_FOUND, f"unknown path; the paths are {paths}")
        if request.method != route.method != ANY_METHOD and not (request.method == "HEAD" and route.method == "GET"):
            headers = {"Allow": route.method}
            message = f"{request.path} answers {route.method}, and not this method"
            raise ApiError(HTTPStatus.METHOD_NOT_ALLOWED, message, headers=headers)
        access = None if route.access is Access.ANYBODY else self._access
        identify(access, request, is_for_operators=route.access is Access.OPERATORS, how_to_send=_HOW_TO_SEND)
        return await route.answer(call)

    def _check_origin(self, request: web.BaseRequest, *, may_be_foreign: bool) -> None:
        """Refuse a browser's request for another web site, and plaintext where TLS is required."""
        if self._settings.speaks_tls and not request.secure:
            raise ApiError(HTTPStatus.BAD_REQUEST, "this port uses TLS; call it with https://")
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1:
            raise ApiError(HTTPStatus.BAD_REQUEST, "a request needs one Host header")
        if self._settings.is_local and self._access is None and not is_local_host(hosts):
            raise ApiError(
                HTTPStatus.FORBIDDEN,
                "without --tokens-file a loopback port accepts only an IP address or localhost as Host: use its IP "
                "address",
            )
        if not may_be_foreign and is_cross_site(request.headers.get("Sec-Fetch-Site")):
            raise ApiError(HTTPStatus.FORBIDDEN, "other web sites may not call this port")


def refuse(error: ApiError, headers: Mapping[str, str]) -> web.Response:
    """Return an error as an answer."""
    response = web.Response(
        status=error.status, body=error.body, content_type="application/json", headers={**headers, **error.headers}
    )
    if error.headers.get("Connection") == "close":
        response.force_close()
    return response
