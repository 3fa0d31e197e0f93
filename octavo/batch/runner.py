"""Sends the requests of a batch over HTTP, a few at a time, until each has an answer."""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import aiohttp

from octavo.batch.answer_file import Answer, AnswerFile
from octavo.batch.batch_file import TOO_DEEP, BatchError, BatchFile, InvalidLineError, Request
from octavo.values.wording import printable

# How long a server may be away, or refuse because it is busy, before it is given up.
PATIENCE_S = 300.0

# Between two tries; a server that says when to come back is asked then, but not later than this.
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0

# After this many broken connections to a server that answers, the request is held to be the cause.
_MOST_BREAKS = 3

_CONNECT_TIMEOUT_S = 10.0
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, *range(HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT + 1))
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(slots=True)
class Server:
    """A server of OpenAI's API; use it as `async with`.

    Attributes:
        url: Without the /v1 that the requests have in their paths.
        headers: With the token, if there is one.
        tls: How to speak TLS.
        say: Tells a person that the server is away.
    """

    url: str
    headers: dict[str, str]
    tls: ssl.SSLContext
    say: Callable[[str], None]
    _session: aiohttp.ClientSession = field(init=False)
    _probing: asyncio.Lock = field(init=False)

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, ssl=self.tls)
        self._session = aiohttp.ClientSession(headers=self.headers, timeout=timeout, connector=connector)
        self._probing = asyncio.Lock()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def only_model(self) -> str | None:
        """Return the name of the served model; None: there are several.

        Raises: BatchError: no such server answers, or it does not let us in.
        """
        try:
            status, _, body = await self._send("GET", "/v1/models")
            deadline_s = time.monotonic() + PATIENCE_S
            if status in _BUSY:
                self.say(f"the server at {self.url} is not ready: {_message(body)}; waiting up to {PATIENCE_S:g} s")
            while status in _BUSY and time.monotonic() < deadline_s:
                await asyncio.sleep(_FIRST_WAIT_S)
                status, _, body = await self._send("GET", "/v1/models")
        except _BROKEN as error:
            reason = _reason(error)
            raise BatchError(f'no server answers at {self.url} ({reason}); start one with "octavo up"') from error
        if status != HTTPStatus.OK:
            raise BatchError(f"the server at {self.url} refuses /v1/models: HTTP {status}: {_message(body)}")
        match body:
            case {"data": [{"id": str(name)}]}:
                return name
            case {"data": [*_]}:
                return None
        raise BatchError(f"the server at {self.url} has no OpenAI-compatible API: its /v1/models is no list of models")

    async def ask(self, request: Request) -> Answer:
        """Return the answer; while the server is away or busy, wait. Raises BatchError: it stays away."""
        wait_s, num_breaks, busy_since_s = _FIRST_WAIT_S, 0, None
        while True:
            try:
                status, headers, body = await self._send("POST", request.path, json=request.body)
            except _BROKEN as error:
                await self._wait_until_back(_reason(error))
                if (num_breaks := num_breaks + 1) < _MOST_BREAKS:
                    wait_s, busy_since_s = _FIRST_WAIT_S, None  # whoever is back may be another one
                    continue
                return Answer(error={"code": "connection_failed", "message": _reason(error)})
            busy_since_s = busy_since_s or time.monotonic()
            if status not in _BUSY or time.monotonic() > busy_since_s + PATIENCE_S:
                response = {"status_code": status, "request_id": headers.get("x-request-id"), "body": body}
                return Answer(response)
            asked_s = headers.get("Retry-After", "")
            await asyncio.sleep(min(float(asked_s) if asked_s.isdecimal() else wait_s, _LONGEST_WAIT_S))
            wait_s *= 2

    async def _send(self, method: str, path: str, **options: Any) -> tuple[int, Any, Any]:
        """Return the status, the headers and what is in the body."""
        async with self._session.request(method, self.url + path, **options) as response:
            content = await response.read()
        try:
            return response.status, response.headers, json.loads(content)
        except (ValueError, RecursionError):
            return response.status, response.headers, content.decode(errors="replace")

    async def _wait_until_back(self, reason: str) -> None:
        """Return once the server answers anything; one of the waiting requests asks it."""
        async with self._probing:
            deadline_s, is_said = time.monotonic() + PATIENCE_S, False
            while True:
                try:
                    await self._send("GET", "/v1/models")
                except _BROKEN:
                    if time.monotonic() > deadline_s:
                        raise BatchError(
                            f"the server at {self.url} has not answered for {PATIENCE_S:g} s ({reason})"
                        ) from None
                    if not is_said:
                        self.say(f"the server at {self.url} does not answer ({reason}); waiting up to {PATIENCE_S:g} s")
                    is_said = True
                    await asyncio.sleep(_FIRST_WAIT_S)
                else:
                    return


async def run_batch(
    batch: BatchFile,
    answers: AnswerFile,
    server: Server,
    *,
    model: str | None,
    max_in_flight: int,
    on_answer: Callable[[Answer], None],
) -> None:
    """Send the requests that have no answer yet, and write each answer as it comes.

    Args:
        batch: The requests.
        answers: Where the answers go, and which there are.
        server: Where they go.
        model: The model for every request; None: the one that it names, or else the only one of the server.
        max_in_flight: How many requests run at a time.
        on_answer: Called with each answer.

    Raises: BatchError: the server stays away, or an answer cannot be written.
    """
    left = (custom_id for custom_id in batch if custom_id not in answers.done)
    only = await server.only_model()

    async def work(left: Iterator[str]) -> None:
        for custom_id in left:
            try:
                request = batch.read(custom_id, model)
                if only is not None:
                    request.body.setdefault("model", only)
                answer = await server.ask(request)
            except InvalidLineError as error:
                answer = Answer(error={"code": "invalid_request", "message": str(error)})
            except RecursionError:  # it could be read and cannot be written
                answer = Answer(error={"code": "invalid_request", "message": TOO_DEEP})
            answers.add(custom_id, answer)
            on_answer(answer)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(work(left))
    except* BatchError as errors:
        raise errors.exceptions[0] from None


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    said = error.get("message") if isinstance(error, dict) else body
    return printable(" ".join(str(said).split()))[:300]


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not trusted: {getattr(error.certificate_error, 'verify_message', error)}"
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno and error.errno > 0:
        return os.strerror(error.errno).lower()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "the connection broke before the answer was complete"
    return printable(" ".join(str(error).split())) or type(error).__name__
