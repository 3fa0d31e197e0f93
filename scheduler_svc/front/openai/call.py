"""One HTTP request, as the handlers of its path get it, and its body, read within limits."""

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web
from pydantic_core import to_json

from scheduler_svc.front.api_meter import ApiRequest
from scheduler_svc.front.openai.errors import CLOSE, ApiError
from scheduler_svc.front.text.json_text import MalformedJsonError, load_json

# How long a body may take, in seconds.
BODY_TIMEOUT_S = 30.0

# A body of this size is parsed and checked in a few milliseconds, whatever it holds.
SMALL_BODY_BYTES = 16 * 2**10

# Bodies of maximum size that may be read at once, together with all shorter ones.
MAX_BODIES = 32

_T = TypeVar("_T")


class Bodies:
    """Reads the bodies of one port, and bounds the memory that they take together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes_left = MAX_BODIES * max_bytes
        self._large_ones = asyncio.Lock()  # one at a time: each thread that runs Python delays the event loop

    async def read(self, request: web.BaseRequest, make: Callable[[dict[str, Any]], _T]) -> tuple[_T, bool]:
        """Return what `make` makes of the JSON object in a body, and whether the body was small.

        Raises: ApiError: there is no such body. What `make` raises.
        """
        _check_headers(request)
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_long()
        await _ask_for(request)
        body = bytearray()
        try:
            await self._fill(body, request)
            if len(body) <= SMALL_BODY_BYTES:
                return make(parse_object(bytes(body))), True
            async with self._large_ones:
                return await asyncio.to_thread(lambda: make(parse_object(bytes(body)))), False
        finally:
            self._num_bytes_left += len(body)

    async def _fill(self, body: bytearray, request: web.BaseRequest) -> None:
        """Read a body; its bytes count until the caller gives them back."""
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self._num_bytes_left -= len(chunk)
                    if len(body) > self._max_bytes:
                        raise self._too_long()
                    if self._num_bytes_left < 0:
                        raise ApiError(
                            HTTPStatus.TOO_MANY_REQUESTS,
                            f"more than {MAX_BODIES} request bodies of maximum size are being read; retry in 1 s",
                            "rate_limit_error",
                            code="rate_limit_exceeded",
                            headers={"Retry-After": "1", **CLOSE},
                        )
        except TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s",
                headers={"x-should-retry": "false", **CLOSE},
            ) from None

    def _too_long(self) -> ApiError:
        return ApiError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is longer than {self._max_bytes} bytes, the limit set by --max-request-bytes",
            headers=CLOSE,
        )


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError: it is none, or has too many elements."""
    if not body.strip():
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body is empty; it must be a JSON object, such as {}")
    try:
        parsed = load_json(body)
    except MalformedJsonError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object, such as {}")
    return parsed


def _check_headers(request: web.BaseRequest) -> None:
    if request.content_type != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON; send it with the header Content-Type: application/json",
        )
    codings = (*request.headers.getall("Content-Encoding", ()), *request.headers.getall("Transfer-Encoding", ()))
    if any(coding.lower() not in ("identity", "chunked") for coding in codings):
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "compressed bodies are not supported; remove Content-Encoding, and any Transfer-Encoding except chunked",
        )


async def _ask_for(request: web.BaseRequest) -> None:
    """Send 100 Continue to a client that waits for it before it sends the body (RFC 9110, section 10.1.1).

    Raises: ApiError: the client expects something else.
    """
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise ApiError(HTTPStatus.EXPECTATION_FAILED, "the header Expect must be 100-continue or absent", headers=CLOSE)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun


# Proxies and clients send it, and the log shows it.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_PROPAGATED = ("traceparent", "tracestate")


class Call:
    """A request and what every answer to it has.

    Args:
        request: As aiohttp has it.
        counted: Reports the request to the metrics; None: it is not counted.

    Attributes:
        request_id: From the header X-Request-Id, or made here; every answer has it.
        headers: The answer's.
        is_small: Whether the content may be handled on the event loop.
    """

    def __init__(self, request: web.BaseRequest, bodies: Bodies, counted: ApiRequest | None = None) -> None:
        self.request = request
        self.counted = counted
        sent = request.headers.get("X-Request-Id", "")
        self.request_id = sent if _REQUEST_ID.fullmatch(sent) else secrets.token_hex(16)
        self.headers: dict[str, str] = {"x-request-id": self.request_id}
        self.is_small = True
        self._bodies = bodies

    async def read(self, make: Callable[[dict[str, object]], _T]) -> _T:
        """Return what `make` makes of the JSON object in the body; in a thread, unless the body is small.

        Raises: ApiError: there is no such body. What `make` raises.
        """
        made, self.is_small = await self._bodies.read(self.request, make)
        return made

    def trace_metadata(self) -> Iterator[tuple[str, str]]:
        """Yield the request's trace headers."""
        for name in _PROPAGATED:
            for value in self.request.headers.getall(name, ()):
                yield name, value

    def answer(self, content: Mapping[str, object], status: int = 200) -> web.Response:
        """Return a JSON answer."""
        return self.answer_bytes(to_json(content, inf_nan_mode="null"), status)

    def answer_bytes(self, body: bytes, status: int = 200, content_type: str = "application/json") -> web.Response:
        """Return an answer of a content type."""
        return web.Response(body=body, status=status, content_type=content_type, headers=self.headers)
