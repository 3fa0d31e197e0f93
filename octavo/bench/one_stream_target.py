"""A target that has all its requests on one `StreamRequests` call, as token ids only."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from octavo.bench.errors import RequestFailedError
from octavo.bench.record import RequestRecord, TargetInfo, TokenUsage
from octavo.calls.request_stream import RequestStream
from octavo.client import Client
from octavo.errors import TIME_LIMIT_PASSED, DeadlineError, InvalidRequestError, OctavoError
from octavo.values.outputs import Delta, FailedRequest, Finished
from octavo.values.sampling_params import SamplingParams


class OneStreamTarget:
    """A scheduler; see `Target`. Use it as `async with OneStreamTarget(...) as target`.

    Args:
        client: Not open yet.
        temperature: 0: greedy.
        ignore_eos: Whether outputs go on after the end-of-sequence token.
        timeout_s: Longest that one request may take; it is aborted then.
        account: Whose requests they are: further arguments of `RequestStream.submit`.
        in_words: Returns what the scheduler says of a field in the words of whoever set it.
    """

    def __init__(
        self,
        client: Client,
        *,
        temperature: float,
        ignore_eos: bool,
        timeout_s: float,
        account: Mapping[str, Any],
        in_words: Callable[[str], str] = str,
    ) -> None:
        self._client = client
        self._temperature = temperature
        self._ignore_eos = ignore_eos
        self._timeout_s = timeout_s
        self._account = account
        self._in_words = in_words
        self._stream: RequestStream | None = None
        self._reading: asyncio.Task[None] | None = None
        self._running: dict[int, tuple[RequestRecord, asyncio.Future[None]]] = {}

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        self._stream = await self._client.request_stream().__aenter__()
        self._reading = asyncio.create_task(self._read(self._stream))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None and self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            await self._stream.__aexit__()
        await self._client.close()

    async def describe(self) -> TargetInfo:
        """Ask which model is served. Raises OctavoError: those of `Client.get_model`."""
        model = await self._client.get_model()
        return TargetInfo("octavo-stream", self._client.address, model.model_id, model.max_model_len, model.vocab_size)

    async def send(self, record: RequestRecord) -> None:
        """Run one request. Raises OctavoError: those of `Client.stream`, or somebody aborted it."""
        assert self._stream is not None, "use it as `async with OneStreamTarget(...) as target`"
        planned = record.planned
        params = SamplingParams(
            temperature=self._temperature, max_tokens=planned.max_tokens, ignore_eos=self._ignore_eos
        )
        number, ended = None, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                number = await self._stream.submit(planned.prompt, params, include_text=False, **self._account)
                self._running[number] = (record, ended)
                await ended
        except TimeoutError:
            raise DeadlineError(TIME_LIMIT_PASSED) from None
        except InvalidRequestError as error:
            raise InvalidRequestError(self._in_words(str(error)), field=error.field) from error
        finally:
            if number is not None and self._running.pop(number, None) is not None:
                with contextlib.suppress(OctavoError):  # of a stream that has ended
                    await self._stream.abort(number)

    async def _read(self, stream: RequestStream) -> None:
        """Note what comes, each event with its time, and end the requests."""
        try:
            async for number, event in stream:
                record, ended = self._running.get(number, (None, None))
                if record is None or ended is None:
                    continue  # its time limit has passed
                if isinstance(event, Delta):
                    record.add_event(time.perf_counter(), len(event.token_ids))
                elif isinstance(event, Finished):
                    usage = event.usage
                    record.usage = TokenUsage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)
                    self._end(number, None)
                elif isinstance(event, FailedRequest):
                    self._end(number, event.error)
        except OctavoError as error:
            self._end_all(error)
        else:
            self._end_all(RequestFailedError("the scheduler ended the stream"))

    def _end(self, number: int, error: OctavoError | None) -> None:
        record, ended = self._running.pop(number)
        record.ended_s = time.perf_counter()
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def _end_all(self, error: OctavoError) -> None:
        for number in list(self._running):
            self._end(number, error)
