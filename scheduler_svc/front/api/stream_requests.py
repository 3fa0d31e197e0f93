"""One call of `StreamRequests`: any number of requests of one caller, and one stream of messages for all of them.

    bodies ──> read ──> submissions ──> Generation.accept, one at a time
                │ abort, credits              │ Response, which announces news
                v                             v
            StreamRequestsCall ── next_message ──> the news of all requests, as one message

The engine reports the results of a step for all requests at once, so one message has them all. The writer waits for
its own caller only: while the caller reads nothing, news wait in the responses, and the next message is larger.
Next: `stream_batch.py`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import (
    DrainingError,
    InvalidFieldError,
    OctavoServiceError,
    QueueFullError,
    RequestAbortedError,
    SlowCallerError,
    TooManyUntakenError,
)
from octavo_shared.process.concurrency import in_turns
from octavo_shared.process.events import Event
from octavo_shared.step_wire.message_bytes import decode
from scheduler_svc.front.api.generation import Metadata
from scheduler_svc.front.api.message_scan import MessageScan, cut
from scheduler_svc.front.api.models import Models
from scheduler_svc.front.api.request_body import RequestBody
from scheduler_svc.front.api.stream_batch import StreamBatch, StreamedRequest

log = logging.getLogger(__name__)

# How long a caller may leave a message unread.
SLOW_CALLER_S = 60.0

# Limits of the requests of one stream that wait for their check: their number, and their bytes unless it is one.
MAX_UNCHECKED_REQUESTS = 1024
MAX_UNCHECKED_BYTES = 32 * 2**20
RETRY_AFTER_S = 1.0

# Requests of one stream whose end the caller has not read, however they ended; they hold their results.
MAX_UNTAKEN_REQUESTS = 16_384

# A message is sent once it has this many values; the rest comes in the next one, behind other callers' messages.
MAX_VALUES_PER_MESSAGE = 16_384

# Requests that are aborted before the event loop runs again: each takes some twenty microseconds.
ABORTS_AT_ONCE = 16

_SUBMIT = pb.StreamRequestsRequest.DESCRIPTOR.fields_by_name["submit"].number


# Returns the request in a body.
ReadRequest: TypeAlias = Callable[[RequestBody[pb.GenerateRequest]], Awaitable[pb.GenerateRequest]]

Bodies: TypeAlias = AsyncIterable[RequestBody[pb.StreamRequestsRequest]]


class StreamRequestsCall:
    """Runs the requests of one call.

    Args:
        time_left_s: Returns how long the caller still waits; None: without limit.
    """

    def __init__(
        self,
        models: Models,
        read: ReadRequest,
        metadata: Metadata,
        time_left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._models = models
        self._read = read
        self._metadata = metadata
        self._time_left_s = time_left_s
        self._requests: dict[int, StreamedRequest] = {}  # until the caller has read their ends
        self._unchecked: asyncio.Queue[StreamedRequest] = asyncio.Queue()
        self._num_unchecked_bytes = 0
        self._news: deque[StreamedRequest] = deque()
        self._changed = asyncio.Event()
        self._last_number = -1
        self._credits: int | None = None
        self._is_half_closed = False
        self._is_shut_down = False
        self._error: BaseException | None = None

    @asynccontextmanager
    async def served(self, bodies: Bodies, why_left: Callable[[], str]) -> AsyncIterator[None]:
        """Read what the caller sends while this context is open; leaving it ends all requests."""
        tasks = [asyncio.create_task(self._take(bodies)), asyncio.create_task(self._check_all())]
        for task in tasks:
            task.add_done_callback(self._on_end)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for request in self._requests.values():
                request.stop_resting()
                request.counted.end()
            accepted = [request.accepted for request in self._requests.values() if request.accepted is not None]
            self._requests.clear()
            await in_turns(accepted, lambda request: request.close(why_left), ABORTS_AT_ONCE)

    def shut_down(self) -> None:
        """End once the caller has read the ends of all requests, even if it sends more: the scheduler shuts down."""
        self._is_shut_down = True
        self._changed.set()

    async def next_message(self) -> pb.StreamRequestsResponse | None:
        """Wait until there is news and the caller reads it; None: all requests have ended, and none will come.

        Raises: OctavoServiceError: the caller broke a rule of the stream, or the scheduler shuts down.
        """
        deadline_s: float | None = None
        while True:
            if self._error is not None:
                raise self._error
            if self._news and self._credits != 0:
                if self._credits is not None:
                    self._credits -= 1
                return self._message()
            if self._is_half_closed and not self._requests:
                return None
            if self._is_shut_down and not self._requests:
                raise DrainingError("the scheduler shut down; send further requests to another scheduler")
            if self._news and deadline_s is None:
                deadline_s = slow_caller_deadline_s()  # messages from the caller do not extend it
            self._changed.clear()
            async with slow_caller_limit(deadline_s):
                await self._changed.wait()

    # What the caller sends ------------------------------------------------------------------------------------------

    async def _take(self, bodies: Bodies) -> None:
        is_first = True
        async for body in bodies:
            message, submitted = split(body) if body.is_small else await asyncio.to_thread(split, body)
            if message.HasField("credits") and (is_first or self._credits is not None):
                self._credits = (self._credits or 0) + message.credits
                self._changed.set()
            is_first = False
            if submitted is not None:
                self._submit(message, submitted)
            elif message.number or message.include_text:
                raise InvalidFieldError("submit", "absent", "set with number and include_text")
            await in_turns(message.abort, self._abort, ABORTS_AT_ONCE)
        self._is_half_closed, self._credits = True, None
        self._changed.set()

    def _submit(self, message: pb.StreamRequestsRequest, body: RequestBody[pb.GenerateRequest]) -> None:
        if message.number <= self._last_number:
            raise InvalidFieldError("number", message.number, f"larger than {self._last_number}, the one before it")
        if len(self._requests) >= MAX_UNTAKEN_REQUESTS:
            raise TooManyUntakenError(MAX_UNTAKEN_REQUESTS)
        self._last_number = message.number
        counted = self._models.meter.request("stream_requests")
        request = StreamedRequest(
            message.number, body, includes_text=message.include_text, tell=self._announced, counted=counted
        )
        self._requests[request.number] = request
        num_waiting, num_bytes = self._unchecked.qsize(), self._num_unchecked_bytes + len(body.content)
        if num_waiting >= MAX_UNCHECKED_REQUESTS or (num_waiting and num_bytes > MAX_UNCHECKED_BYTES):
            request.fail(QueueFullError(num_waiting, RETRY_AFTER_S, queue="the queue of this stream"))
        else:
            self._num_unchecked_bytes = num_bytes
            self._unchecked.put_nowait(request)

    def _abort(self, number: int) -> None:
        request = self._requests.get(number)
        if request is None or request.error is not None:
            return
        request.is_aborted = True
        if request.accepted is not None:
            request.accepted.abort(_aborted(number))

    async def _check_all(self) -> None:
        """Check and submit the requests in order: one at a time, so that all callers get their turn."""
        while True:
            request = await self._unchecked.get()
            try:
                await self._check(request)
            except OctavoServiceError as error:
                request.fail(error)
            except Exception as error:
                request_id = "" if request.asked is None else request.asked.request_id
                log.exception(
                    Event("rpc_failed", method="StreamRequests", request_id=request_id, number=request.number)
                )
                request.fail(error)

    async def _check(self, request: StreamedRequest) -> None:
        body, request.body = request.body, None
        assert body is not None, "a request is checked once"
        self._num_unchecked_bytes -= len(body.content)
        if not request.is_aborted:
            request.asked = asked = await self._read(body)
            request.counted.tenant = asked.tenant
            request.accepted = await self._models.choose(asked.model).accept(
                asked,
                self._metadata,
                returns_text=request.includes_text,
                listener=request.announce,
                time_left_s=self._time_left_s(),
            )
            request.counted.accept()
            request.announce()
        if request.is_aborted and request.accepted is None:
            raise RequestAbortedError(_aborted(request.number))
        if request.is_aborted and request.accepted is not None:
            request.accepted.abort(_aborted(request.number))

    def _on_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
            self._changed.set()

    # What the caller gets -------------------------------------------------------------------------------------------

    def _announced(self, request: StreamedRequest) -> None:
        self._news.append(request)
        if len(self._news) == 1:  # with more news before it, the writer waits for a credit
            self._changed.set()

    def _message(self) -> pb.StreamRequestsResponse:
        """Return the news of the requests that have waited longest, up to the size of a message."""
        batch = StreamBatch()
        while self._news and batch.num_values < MAX_VALUES_PER_MESSAGE:
            request = self._news.popleft()
            request.is_announced = False
            if batch.add(request):
                request.stop_resting()
                request.counted.end()
                del self._requests[request.number]
                if request.accepted is not None:
                    request.accepted.close()
        return batch.message()


def split(
    body: RequestBody[pb.StreamRequestsRequest],
) -> tuple[pb.StreamRequestsRequest, RequestBody[pb.GenerateRequest] | None]:
    """Return the message in a body without the request that it submits, and that request's body; None: it has none.

    Raises: InvalidFieldError, MalformedMessageError: the body is no such message.
    """
    MessageScan({}, opaque=("submit",)).check(body.content, pb.StreamRequestsRequest)
    rest, submitted = cut(body.content, _SUBMIT)
    message = decode(pb.StreamRequestsRequest.FromString, rest)
    return message, None if submitted is None else RequestBody(submitted, pb.GenerateRequest)


def slow_caller_deadline_s() -> float:
    """Return the time of the event loop by which the caller must have read what there is now."""
    return asyncio.get_running_loop().time() + SLOW_CALLER_S


@asynccontextmanager
async def slow_caller_limit(deadline_s: float | None) -> AsyncIterator[None]:
    """Bound the time that a caller takes to read a message; None: there is none.

    Raises: SlowCallerError: it took longer.
    """
    try:
        async with asyncio.timeout_at(deadline_s):
            yield
    except TimeoutError as error:
        raise SlowCallerError(SLOW_CALLER_S) from error


def _aborted(number: int) -> str:
    return f"the caller aborted request {number}"
