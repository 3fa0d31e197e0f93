"""A list of requests on one stream, so many at a time: for `Client.stream_many` and `octavo.LLM`."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from octavo.errors import OctavoError, OverloadedError
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.outputs import Event, FailedRequest, Finished, Prompt
from octavo.request_stream import RequestStream


async def run_many(
    stream: RequestStream,
    requests: Sequence[tuple[Prompt, pb.GenerateRequest]],
    *,
    max_in_flight: int,
    include_text: bool = True,
) -> AsyncGenerator[tuple[int, Event | FailedRequest], None]:
    """Run requests on a stream, so many at a time, and yield (index, event) for the events of all of them.

    What a full queue refuses waits and is sent again: it had not begun.

    Raises: OctavoError: the stream broke; requests that had not ended have no last event.
    """
    indexes: dict[int, int] = {}
    unsent = deque(range(len(requests)))
    num_left = len(requests)

    async def send(index: int) -> None:
        indexes[await stream.send(*requests[index], include_text=include_text)] = index

    async def send_later(index: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(OctavoError):  # a stream that broke tells so by itself
            await send(index)

    sent_later: set[asyncio.Task[None]] = set()
    try:
        for _ in range(min(max_in_flight, num_left)):
            await send(unsent.popleft())
        if not num_left:
            await stream.close_submissions()
        async for number, event in stream:
            index = indexes.pop(number) if isinstance(event, Finished | FailedRequest) else indexes[number]
            if isinstance(event, FailedRequest) and isinstance(event.error, OverloadedError):
                again = asyncio.create_task(send_later(index, event.error.retry_after_s))
                sent_later.add(again)
                again.add_done_callback(sent_later.discard)
                continue
            yield index, event
            if isinstance(event, Finished | FailedRequest):
                num_left -= 1
                if unsent:
                    await send(unsent.popleft())
                elif not num_left:
                    await stream.close_submissions()
    finally:
        for task in sent_later:
            task.cancel()
        await asyncio.gather(*sent_later, return_exceptions=True)
