"""Requests on one stream, so many at a time: for `Client.stream_many`, `Client.rollouts` and `octavo.LLM`.

When the stream breaks, the next one goes on with what had been accepted, and gets the rest as it was.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable

from octavo.calls.request_stream import RequestStream
from octavo.calls.resumption import ResumableRequest, ResumeWindow
from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Delta, Event, FailedRequest, Finished, Output, Prompt


class ManyRequests:
    """Requests, and how far each has come, over all streams that they take.

    Args:
        make_window: Says how long something is tried again: the stream, or one request that failed on it.
        max_in_flight: How many the scheduler has at a time.
        include_text: Whether events have text.
        has_other_addresses: Whether a stream is left when the scheduler takes no more requests.
        shows_provenance: Whether events say which executors made the tokens.

    Attributes:
        window: Of the stream.
    """

    def __init__(
        self,
        make_window: Callable[[], ResumeWindow],
        *,
        max_in_flight: int,
        include_text: bool,
        has_other_addresses: bool,
        shows_provenance: bool = False,
    ) -> None:
        self.window = make_window()
        self._make_window = make_window
        self._max_in_flight = max_in_flight
        self._include_text = include_text
        self._has_other_addresses = has_other_addresses
        self._shows_provenance = shows_provenance
        self._requests: dict[int, tuple[Prompt, ResumableRequest]] = {}  # that have not ended, by index
        self._num_added = 0
        self._takes_more = True
        self._unsent: deque[int] = deque()
        self._live: dict[int, None] = {}  # sent, and not ended
        self._stream: RequestStream | None = None
        self._numbers: dict[int, int] = {}  # of live requests on the stream
        self._changed = asyncio.Event()  # there is something to send, or room for it

    def add(self, prompt: Prompt, message: pb.GenerateRequest) -> int:
        """Take a request, with its prompt as the caller gave it; return its index, counted from 0."""
        index, self._num_added = self._num_added, self._num_added + 1
        request = ResumableRequest(message, self._make_window(), shows_provenance=self._shows_provenance)
        self._requests[index] = prompt, request
        self._unsent.append(index)
        self._changed.set()
        return index

    def close(self) -> None:
        """Say that no more requests come: `run` returns when all have ended."""
        self._takes_more = False
        self._changed.set()

    async def abort(self, index: int) -> tuple[Output, ...]:
        """End a request, which has no more events; return what had come of it. One that has ended is fine."""
        if index not in self._requests:
            return ()
        _, request = self._requests.pop(index)
        if index in self._live:
            del self._live[index]
        else:
            self._unsent.remove(index)
        if index in self._numbers and self._stream is not None:
            with contextlib.suppress(OctavoError):  # a stream that broke has ended it
                await self._stream.abort(self._numbers.pop(index))
        self._changed.set()
        return request.answer.unfinished_outputs()

    async def run(self, stream: RequestStream) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run what has not ended on a stream, and yield (index, event) for the events of all of it.

        What a full queue refuses waits and is sent again: it had not begun. What fails for a moment is continued.

        Raises:
            UnavailableError: the stream broke, or the scheduler takes no more requests; `run` goes on with another one.
            OctavoError: the stream ended otherwise; requests that had not ended have no last event.
        """
        indexes: dict[int, int] = {}
        self._stream, self._numbers = stream, {}

        async def send(index: int) -> None:
            if index not in self._requests:
                return
            prompt, request = self._requests[index]
            number = await stream.send(
                prompt, request.message(), include_text=self._include_text, answer=request.answer
            )
            indexes[number], self._numbers[index] = index, number
            if index not in self._requests:  # it was aborted meanwhile
                await stream.abort(number)

        async def send_later(index: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            with contextlib.suppress(OctavoError):  # a stream that broke tells so by itself
                await send(index)

        async def send_all() -> None:
            with contextlib.suppress(OctavoError):
                for index in list(self._live):
                    await send(index)
                while self._requests or self._takes_more:
                    self._changed.clear()
                    while self._unsent and len(self._live) < self._max_in_flight:
                        index = self._unsent.popleft()
                        self._live[index] = None
                        await send(index)
                    await self._changed.wait()
                await stream.close_submissions()

        sending = {asyncio.create_task(send_all())}
        try:
            async for number, event in stream:
                is_end = isinstance(event, Finished | FailedRequest)
                index = indexes.pop(number) if is_end else indexes[number]
                if index not in self._requests:
                    continue
                told = self._told(index, event)
                if isinstance(told, float):
                    sending.add(again := asyncio.create_task(send_later(index, told)))
                    again.add_done_callback(sending.discard)
                elif told is not None:
                    if isinstance(told, Finished | FailedRequest):
                        del self._live[index], self._requests[index], self._numbers[index]
                        self._changed.set()
                    yield index, told
        finally:
            self._stream = None
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    def _told(self, index: int, event: Event | FailedRequest) -> Event | FailedRequest | float | None:
        """Return what the caller gets for an event; None: nothing; a number: it is sent again after so many seconds.

        Raises: UnavailableError: the scheduler takes no more requests, and another one may.
        """
        _, request = self._requests[index]
        if isinstance(event, Delta | Finished):
            self.window.note_news()
        if not isinstance(event, FailedRequest):
            return request.told(event)
        error = event.error
        if isinstance(error, OverloadedError) and not request.is_accepted:
            return error.retry_after_s
        if isinstance(error, UnavailableError) and not request.is_taken and self._leaves(error):
            raise error
        try:
            return request.pause_s(error, asyncio.get_running_loop().time())
        except OctavoError as final:
            return FailedRequest(event.prompt, final)

    def _leaves(self, error: UnavailableError) -> bool:
        """Return whether to look for another scheduler, or another one at the address once nothing runs here."""
        is_idle = not any(self._requests[index][1].is_taken for index in self._live)
        return self._has_other_addresses or (error.goes_away and is_idle)
