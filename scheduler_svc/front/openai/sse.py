"""Server-sent events: an answer in pieces, over one response, and comments while there is nothing to send."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from pydantic_core import to_json

from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import ApiError

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer the events
}

_DONE = b"data: [DONE]\n\n"

# Seconds of silence before a comment says what the stream waits for: at first, and later. Proxies cut silent streams.
FIRST_SILENCE_S = 1.0
SILENCE_S = 5.0


class EventStream(ABC):
    """Sends events, and waits while the client does not read.

    Args:
        waits_for: Returns what the answer waits for; empty: for the next token.
    """

    def __init__(self, call: Call, waits_for: Callable[[], str]) -> None:
        self._call = call
        self._waits_for = waits_for
        self._response = web.StreamResponse(headers={**call.headers, **_HEADERS})
        self._writer: AbstractStreamWriter
        self._comments: asyncio.Task[None]
        self._is_silent = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Send the status: from now on errors are events, and comments fill the silence."""
        request = self._call.request
        if request.version < HttpVersion11:  # without chunks, only the end of the connection ends the answer
            self._response.force_close()
        writer = await self._response.prepare(request)
        assert writer is not None, "it has not been sent yet"
        self._writer = writer
        self._comments = asyncio.create_task(self._fill_silence())
        try:
            yield
        finally:
            self._comments.cancel()

    async def send(self, events: bytes) -> None:
        """Send events; wait while the client has not taken those before."""
        self._is_silent = False
        await self._response.write(events)
        await self._writer.drain()

    async def end(self, events: bytes) -> web.StreamResponse:
        """Send the last events."""
        self._comments.cancel()
        await self._response.write(events)
        await self._response.write_eof()
        return self._response

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Return the last event of an answer that fails: no client takes it for complete."""

    @abstractmethod
    def finished(self) -> bytes:
        """Return the last event of an answer that is complete."""

    async def _fill_silence(self) -> None:
        with suppress(ConnectionError):  # `send` meets it too
            for silence_s in chain([FIRST_SILENCE_S], repeat(SILENCE_S)):
                self._is_silent = True
                await asyncio.sleep(silence_s)
                if self._is_silent:
                    why = self._waits_for()
                    await self._response.write(
                        f": waiting, {why}\n\n".encode() if why else b": waiting for the next token\n\n"
                    )


class ChunkStream(EventStream):
    """The events of completions and chats.

    Args:
        head: What the JSON object of every event begins with: id, object, created, model.
    """

    def __init__(self, call: Call, waits_for: Callable[[], str], head: Mapping[str, object]) -> None:
        super().__init__(call, waits_for)
        self._begin = b"data: " + to_json(head)[:-1]

    def event(self, *parts: bytes) -> bytes:
        """Return an event whose JSON object goes on with these parts, the closing bracket included."""
        return b"".join((self._begin, *parts, b"\n\n"))

    def failed(self, error: ApiError) -> bytes:
        """See `EventStream`."""
        return b"data: " + error.body + b"\n\n"

    def finished(self) -> bytes:
        """See `EventStream`."""
        return _DONE
