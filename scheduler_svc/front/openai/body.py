"""The body of a request, read within limits."""

import asyncio
from http import HTTPStatus
from typing import Any

from aiohttp import web

from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.text.json_text import MalformedJsonError, load_json

# How long a body may take, in seconds.
BODY_TIMEOUT_S = 30.0

# Whatever is in so many bytes, it is parsed and checked in a few milliseconds.
SMALL_BODY_BYTES = 16 * 2**10


async def read_body(request: web.BaseRequest, max_bytes: int) -> bytes:
    """Return the JSON text of a request.

    Raises: ApiError: it is no JSON by its headers, too long, or does not come.
    """
    if request.content_type != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "the body must be JSON; send it with the header Content-Type: application/json",
        )
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "compressed bodies are not accepted; leave out Content-Encoding"
        )
    too_long = ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the body is longer than {max_bytes} bytes, the limit of --max-request-bytes; send a shorter one",
        headers={"Connection": "close"},
    )
    if request.content_length is not None and request.content_length > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise too_long
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not come in {BODY_TIMEOUT_S:g} s; send it at once",
            headers={"Connection": "close", "x-should-retry": "false"},
        ) from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError: it is none, or has too many elements."""
    try:
        parsed = load_json(body)
    except MalformedJsonError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"the body is not JSON that this server takes: {error}") from error
    if not isinstance(parsed, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object, such as {}")
    return parsed
