"""One StreamRequests call of a client for all its requests to a scheduler that run at the time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from octavo.calls.request_stream import RequestStream
from octavo.errors import DeadlineError, InternalError, OctavoError
from octavo.values.outputs import Event, FailedRequest, Finished
from tests.simulation.services import SimulatedClient


class SharedStream:
    """Opened by the first request, and half-closed behind the last one: the next opens another.

    Args:
        client: Of the scheduler.
    """

    def __init__(self, client: SimulatedClient) -> None:
        self._client = client
        self._stream: RequestStream | None = None  # for further requests
        self._events: dict[tuple[RequestStream, int], asyncio.Queue[Event | OctavoError]] = {}
        self._readers: set[asyncio.Task[None]] = set()

    async def events(self, prompt: list[int], timeout_s: float | None, **arguments: Any) -> AsyncGenerator[Event, None]:
        """As `Client.stream`, on the stream: who leaves, or has no time left, aborts the request by its number."""
        stream = await self._open()
        number, events = await stream.submit(prompt, **arguments), asyncio.Queue[Event | OctavoError]()
        self._events[stream, number] = events
        deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        event: Event | OctavoError | None = None
        try:
            while not isinstance(event, Finished):
                async with asyncio.timeout_at(deadline_s):  # not around `yield`: it would cancel whoever iterates
                    event = await events.get()
                if isinstance(event, OctavoError):
                    raise event
                yield event
        except TimeoutError:
            raise DeadlineError("the time limit passed") from None
        finally:
            if self._events.pop((stream, number), None) is not None:
                with suppress(OctavoError):  # of a stream that has ended
                    await stream.abort(number)

    async def _open(self) -> RequestStream:
        if self._stream is None:
            self._stream = stream = await self._client.request_stream().__aenter__()
            reader = asyncio.get_running_loop().create_task(self._read(stream))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        return self._stream

    async def _read(self, stream: RequestStream) -> None:
        error: OctavoError = InternalError("the stream ended before its requests")
        try:
            async for number, event in stream:
                if events := self._events.get((stream, number)):
                    events.put_nowait(event.error if isinstance(event, FailedRequest) else event)
                if isinstance(event, Finished | FailedRequest):
                    self._events.pop((stream, number), None)
                    if not stream.num_live and self._stream is stream:
                        self._stream = None
                        await stream.close_submissions()
        except OctavoError as broken:
            error = broken
        if self._stream is stream:
            self._stream = None
        await stream.__aexit__()
        for key in [key for key in self._events if key[0] is stream]:
            self._events.pop(key).put_nowait(error)
