"""One HTTP request, as the handlers of its path get it."""

import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from aiohttp import web
from pydantic_core import to_json

from scheduler_svc.front.api_meter import ApiRequest
from scheduler_svc.front.openai.body import Bodies

_T = TypeVar("_T")

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
