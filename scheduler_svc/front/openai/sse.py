"""Server-sent events: an answer in pieces, over one response."""

from collections.abc import Mapping

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from pydantic_core import to_json

from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.errors import ApiError

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would keep the pieces until there are many
}

_DONE = b"data: [DONE]\n\n"


class EventStream:
    """Sends events; it waits for a client that does not read.

    Args:
        call: What is answered.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._response = web.StreamResponse(headers={**call.headers, **_HEADERS})
        self._writer: AbstractStreamWriter

    async def open(self) -> None:
        """Send the status: from now on errors are events."""
        request = self._call.request
        if request.version < HttpVersion11:  # without chunks, only the end of the connection ends the answer
            self._response.force_close()
        writer = await self._response.prepare(request)
        assert writer is not None, "it has not been sent yet"
        self._writer = writer

    async def send(self, events: bytes) -> None:
        """Send events; wait while the client has not taken those before."""
        await self._response.write(events)
        await self._writer.drain()

    async def end(self, events: bytes) -> web.StreamResponse:
        """Send the last events, and end."""
        await self._response.write(events)
        await self._response.write_eof()
        return self._response


class ChunkStream(EventStream):
    """Sends the chunks of completions and chats.

    Args:
        call: What is answered.
        head: What the JSON object of every event begins with: id, object, created, model.
    """

    def __init__(self, call: Call, head: Mapping[str, object]) -> None:
        super().__init__(call)
        self._begin = b"data: " + to_json(head)[:-1]

    def event(self, *parts: bytes) -> bytes:
        """Return an event whose JSON object goes on with these parts, the closing bracket included."""
        return b"".join((self._begin, *parts, b"\n\n"))

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End with an error; there is no [DONE], so that no client takes the answer for complete."""
        return await self.end(b"data: " + error.body + b"\n\n")

    async def finish(self) -> web.StreamResponse:
        """End."""
        return await self.end(_DONE)
