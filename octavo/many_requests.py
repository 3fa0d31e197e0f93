"""A list of requests on one stream, so many at a time: for `Client.stream_many` and `octavo.LLM`."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from octavo.errors import OctavoError, OverloadedError, UnavailableError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.outputs import Accepted, Event, FailedRequest, Finished, Prompt
from octavo.request_stream import RequestStream
from octavo.resumption import Losses, ResumableRequest, ResumePolicy


class ManyRequests:
    """Requests, and how far each has come, over all streams that they take.

    Args:
        requests: Their prompts, as callers gave them, and their messages.
        max_in_flight: How many the scheduler has at a time.
        include_text: Whether events have text.
        policy: How long to try when a stream breaks, or a request on it.

    Attributes:
        losses: Of streams.
    """

    def __init__(
        self,
        requests: Sequence[tuple[Prompt, pb.GenerateRequest]],
        *,
        max_in_flight: int,
        include_text: bool,
        policy: ResumePolicy,
    ) -> None:
        self._prompts = [prompt for prompt, _ in requests]
        self._requests = [ResumableRequest(message, policy) for _, message in requests]
        self._max_in_flight = max_in_flight
        self._include_text = include_text
        self._unsent = deque(range(len(requests)))
        self._live: dict[int, None] = {}  # sent, and not ended
        self.losses = Losses(policy)

    async def run(self, stream: RequestStream) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
        """Run what has not ended on a stream, and yield (index, event) for the events of all of it.

        What a full queue refuses waits and is sent again: it had not begun. What fails for a moment is continued.

        Raises: OctavoError: the stream broke; requests that had not ended have no last event.
        """
        indexes: dict[int, int] = {}

        async def send(index: int) -> None:
            request = self._requests[index]
            message, prompt = request.message(), self._prompts[index]
            self._live[index] = None
            number = await stream.send(prompt, message, include_text=self._include_text, answer=request.answer)
            indexes[number] = index

        async def send_later(index: int, after_s: float) -> None:
            await asyncio.sleep(after_s)
            with contextlib.suppress(OctavoError):  # a stream that broke tells so by itself
                await send(index)

        sent_later: set[asyncio.Task[None]] = set()
        try:
            for index in list(self._live):
                await send(index)
            while self._unsent and len(self._live) < self._max_in_flight:
                await send(self._unsent.popleft())
            if not self._live:
                await stream.close_submissions()
            async for number, event in stream:
                index = indexes.pop(number) if isinstance(event, Finished | FailedRequest) else indexes[number]
                if (pause_s := self._pause_s(index, event)) is not None:
                    again = asyncio.create_task(send_later(index, pause_s))
                    sent_later.add(again)
                    again.add_done_callback(sent_later.discard)
                    continue
                if isinstance(event, Finished | FailedRequest):
                    del self._live[index]
                for told in self._told(index, event):
                    yield index, told
                if isinstance(event, Finished | FailedRequest):
                    if self._unsent:
                        await send(self._unsent.popleft())
                    elif not self._live:
                        await stream.close_submissions()
        finally:
            for task in sent_later:
                task.cancel()
            await asyncio.gather(*sent_later, return_exceptions=True)

    def _pause_s(self, index: int, event: Event | FailedRequest) -> float | None:
        """Return how long to wait before a request is sent again that has failed; None: its caller gets the event."""
        if not isinstance(event, FailedRequest):
            return None
        if isinstance(event.error, OverloadedError):
            return event.error.retry_after_s
        request = self._requests[index]
        if not isinstance(event.error, UnavailableError) or not request.can_go_on:
            return None
        try:
            return request.losses.pause_s(event.error)
        except UnavailableError:
            return None

    def _told(self, index: int, event: Event | FailedRequest) -> Sequence[Event | FailedRequest]:
        """Return what the caller gets for an event of a request."""
        request = self._requests[index]
        if isinstance(event, Accepted):
            return () if request.num_resumptions else (event,)
        self.losses.forget()
        request.losses.forget()
        if isinstance(event, FailedRequest):
            return (FailedRequest(event.prompt, request.refused(event.error)),)
        if isinstance(event, Finished):
            return (replace(event, num_resumptions=request.num_resumptions),)
        return (event,)
