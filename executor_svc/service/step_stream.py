"""One open step stream: requests into the runner's queue, responses out in the same order.

Reading and writing are apart: a step is queued as soon as it arrives, so that the worker goes on
with it while the response before is still being written.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from executor_svc.service.step_runner import Response, StepRunner
from octavo.execution.v1 import execution_service_pb2, step_pb2
from octavo_shared.errors import InvalidFieldError

Request = execution_service_pb2.StreamStepsRequest


class StepStream:
    """The server's side of one StreamSteps call after its `start`.

    Args:
        runner: Where steps go.
        admit: Called with each step as it arrives; raises to end the stream (stale epoch).
    """

    def __init__(self, runner: StepRunner, admit: Callable[[step_pb2.ExecuteModelRequest], None]) -> None:
        self._runner = runner
        self._admit = admit
        # Responses, then at most one thing that ends the stream: an error, or None at the half-close.
        self._outbox: asyncio.Queue[Response | Exception | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None

    def end(self, error: Exception) -> None:
        """End the stream with `error` after the responses that are ready now; read nothing more."""
        self._outbox.put_nowait(error)
        if self._reader is not None:
            self._reader.cancel()

    async def responses(self, requests: AsyncIterator[Request]) -> AsyncIterator[Response]:
        """Yield the response of each step until the caller closes its side. Raises what ends the stream."""
        reader = self._reader = asyncio.create_task(self._read(requests))
        try:
            while (item := await self._outbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reader.cancel()
            await asyncio.wait({reader})

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("message") != "step":
                    raise InvalidFieldError("message", request.WhichOneof("message"), "step, after the first message")
                self._admit(request.step)
                self._runner.submit(request.step, self._outbox.put_nowait)
            # The caller closed its side: the stream ends behind the steps that are still queued.
            await self._runner.between_steps(lambda _worker, _log: None)
        except Exception as error:  # belongs to the reader of `responses`, which raises it
            self._outbox.put_nowait(error)
        else:
            self._outbox.put_nowait(None)


async def first_message(requests: AsyncIterator[Request]) -> execution_service_pb2.StreamStart:
    """Return the `start` that opens a stream. Raises: InvalidFieldError: it is something else."""
    request = await anext(requests, None)
    kind = None if request is None else request.WhichOneof("message")
    if request is None or kind != "start":
        raise InvalidFieldError("message", kind, "start, in the first message of a stream")
    return request.start
