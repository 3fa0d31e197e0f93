"""A list of requests on one stream, so many at a time: for `Client.stream_many` and `octavo.LLM`.

When the stream breaks, the next one goes on with what had been accepted, and gets the rest as it was.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

from octavo.calls.request_stream import RequestStream
from octavo.calls.resumption import ResumableRequest, ResumeWindow
from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.outputs import Delta, Event, FailedRequest, Finished, Prompt


class ManyRequests:
    """Requests, and how far each has come, over all streams that they take.

    Args:
        requests: Their prompts, as callers gave them, and their messages.
        make_window: Says how long something is tried again: the stream, or one request that failed on it.
        max_in_flight: How many the scheduler has at a time.
        include_text: Whether events have text.
        has_other_addresses: Whether a stream is left when the scheduler takes no more requests.

    Attributes:
        window: Of the stream.
    """

    def __init__(
        self,
        requests: Sequence[tuple[Prompt, pb.GenerateRequest]],
        make_window: Callable[[], ResumeWindow],
        *,
        max_in_flight: int,
        include_text: bool,
        has_other_addresses: bool,
    ) -> None:
        self.window = make_window()
        self._prompts = [prompt for prompt, _ in requests]
        self._requests = [ResumableRequest(message, make_window()) for _, message in requests]
        self._max_in_flight = max_in_flight
        self._include_text = include_text
        self._has_other_addresses = has_other_addresses
        self._unsent = deque(range(len(requests)))
        self._live: dict[int, None] = {}  # sent, and not ended

    async def run(self, stream: RequestStream) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run what has not ended on a stream, and yield (index, event) for the events of all of it.

        What a full queue refuses waits and is sent again: it had not begun. What fails for a moment is continued.

        Raises:
            UnavailableError: the stream broke, or the scheduler takes no more requests; `run` goes on with another one.
            OctavoError: the stream ended otherwise; requests that had not ended have no last event.
        """
        indexes: dict[int, int] = {}

        async def send(index: int) -> None:
            request = self._requests[index]
            self._live[index] = None
            number = await stream.send(
                self._prompts[index], request.message(), include_text=self._include_text, answer=request.answer
            )
            indexes[number] = index

        async def send_later(index: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            with contextlib.suppress(OctavoError):  # a stream that broke tells so by itself
                await send(index)

        async def send_next() -> None:
            if self._unsent:
                await send(self._unsent.popleft())
            elif not self._live:
                await stream.close_submissions()

        sent_later: set[asyncio.Task[None]] = set()
        try:
            for index in list(self._live):
                await send(index)
            while self._unsent and len(self._live) < self._max_in_flight:
                await send_next()
            if not self._live:
                await stream.close_submissions()
            async for number, event in stream:
                index = indexes.pop(number) if isinstance(event, Finished | FailedRequest) else indexes[number]
                told = self._told(index, event)
                if isinstance(told, float):
                    again = asyncio.create_task(send_later(index, told))
                    sent_later.add(again)
                    again.add_done_callback(sent_later.discard)
                elif told is not None:
                    yield index, told
                if isinstance(told, Finished | FailedRequest):
                    await send_next()
        finally:
            for task in sent_later:
                task.cancel()
            await asyncio.gather(*sent_later, return_exceptions=True)

    def _told(self, index: int, event: Event | FailedRequest) -> Event | FailedRequest | float | None:
        """Return what the caller gets for an event; None: nothing; a number: it is sent again after so many seconds.

        Raises: UnavailableError: the scheduler takes no more requests, and another one may.
        """
        request = self._requests[index]
        if isinstance(event, Delta | Finished):
            self.window.note_news()
        if not isinstance(event, FailedRequest):
            if isinstance(event, Finished):
                del self._live[index]
            return request.told(event)
        error = event.error
        if isinstance(error, OverloadedError) and not request.is_accepted:
            return error.retry_after_s
        if isinstance(error, UnavailableError) and not request.is_taken and self._leaves(error):
            raise error
        try:
            return request.pause_s(error, asyncio.get_running_loop().time())
        except OctavoError as final:
            del self._live[index]
            return FailedRequest(event.prompt, final)

    def _leaves(self, error: UnavailableError) -> bool:
        """Return whether to look for another scheduler, or another one at the address once nothing runs here."""
        is_idle = not any(self._requests[index].is_taken for index in self._live)
        return self._has_other_addresses or (error.goes_away and is_idle)
