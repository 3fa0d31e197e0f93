"""Targets that speak octavo.generation.v1: a call for each request, or one call for all."""

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from octavo.bench.config import RequestFailedError
from octavo.bench.record import RequestRecord, TargetInfo, TokenUsage
from octavo.calls.request_stream import RequestStream
from octavo.client import Client
from octavo.errors import TIME_LIMIT_PASSED, DeadlineError, InvalidRequestError, OctavoError
from octavo.values.outputs import Delta, Event, FailedRequest, Finished, FinishReason
from octavo.values.sampling_params import SamplingParams


class _SchedulerTarget:
    """A scheduler; see `Target`. Use it as `async with OctavoTarget(...) as target`.

    Args:
        client: Not open yet.
        temperature: 0: greedy.
        ignore_eos: Whether outputs go on after the end-of-sequence token.
        timeout_s: Longest that one request may take; it is aborted then.
        account: Further arguments of `Client.stream` or `RequestStream.submit`, such as the tenant.
        in_words: Replaces the names of fields in a scheduler's sentence by names that the user knows.
    """

    api: str

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
        self._sampling: dict[str, Any] = {"temperature": temperature, "ignore_eos": ignore_eos}
        self._timeout_s = timeout_s
        self._account = account
        self._in_words = in_words

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def describe(self) -> TargetInfo:
        """Ask which model is served. Raises OctavoError: as `Client.get_model`."""
        model = await self._client.get_model()
        limits, can = (model.max_model_len, model.vocab_size), (model.has_chat_template, model.speculates)
        encodes = model.max_encoder_tokens
        return TargetInfo(self.api, self._client.address, model.model_id, *limits, *can, max_encoder_tokens=encodes)

    async def send(self, record: RequestRecord) -> None:
        """Run one request. Raises OctavoError: as `Client.stream`, or the request was aborted."""
        try:
            planned = record.planned
            how: dict[str, Any] = {
                "max_tokens": planned.max_tokens,
                "json_schema": planned.json_schema,
                **self._sampling,
            }
            await self._run(record, SamplingParams(**how))
        except InvalidRequestError as error:
            raise InvalidRequestError(self._in_words(str(error)), field=error.field) from error

    def _account_of(self, record: RequestRecord) -> Mapping[str, Any]:
        speculate = record.planned.speculate
        return self._account if speculate is None else {**self._account, "speculate": speculate}

    @abstractmethod
    async def _run(self, record: RequestRecord, params: SamplingParams) -> None: ...


class OctavoTarget(_SchedulerTarget):
    """A scheduler with a call for each request."""

    api = "octavo"

    async def _run(self, record: RequestRecord, params: SamplingParams) -> None:
        prompt, account = record.planned.prompt, self._account_of(record)
        stream = self._client.stream(prompt, params, timeout_s=self._timeout_s, **account)
        async with aclosing(stream) as events:
            async for event in events:
                if (error := _note(record, event)) is not None:
                    raise error


class OneStreamTarget(_SchedulerTarget):
    """A scheduler that has all requests on one `StreamRequests` call, as token ids only."""

    api = "octavo-stream"
    _stream: RequestStream
    _reading: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._running: dict[int, tuple[RequestRecord, asyncio.Future[None]]] = {}
        self._stream = await self._client.request_stream().__aenter__()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._stream.__aexit__()
        await super().__aexit__(kind, error, trace)

    async def _run(self, record: RequestRecord, params: SamplingParams) -> None:
        number, ended = None, asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s):
                prompt, account = record.planned.prompt, self._account_of(record)
                number = await self._stream.submit(prompt, params, include_text=False, **account)
                self._running[number] = (record, ended)
                await ended
        except TimeoutError:
            raise DeadlineError(TIME_LIMIT_PASSED) from None
        finally:
            if number is not None and self._running.pop(number, None) is not None:
                with contextlib.suppress(OctavoError):  # of a stream that has ended
                    await self._stream.abort(number)

    async def _read(self) -> None:
        """Record each event with its time, and end the requests."""
        lost: OctavoError = RequestFailedError("the scheduler ended the stream")
        try:
            async for number, event in self._stream:
                if number not in self._running:
                    continue  # its time limit has passed
                if isinstance(event, FailedRequest):
                    self._end(number, event.error)
                    continue
                error = _note(self._running[number][0], event)
                if isinstance(event, Finished):
                    self._end(number, error)
        except OctavoError as failure:
            lost = failure
        for number in list(self._running):
            self._end(number, lost)

    def _end(self, number: int, error: OctavoError | None) -> None:
        record, ended = self._running.pop(number)
        record.ended_s = time.perf_counter()
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)


def _note(record: RequestRecord, event: Event) -> OctavoError | None:
    """Record an event; return why the request failed, if the event says that it was aborted."""
    if isinstance(event, Delta) and event.token_ids:
        record.add_event(time.perf_counter(), len(event.token_ids))
        if record.token_ids is not None:
            record.token_ids += event.token_ids
    if not isinstance(event, Finished):
        return None
    usage = event.usage
    num_input_tokens = usage.num_prompt_tokens + usage.num_encoder_tokens
    record.usage = TokenUsage(num_input_tokens, usage.num_output_tokens, usage.num_cached_tokens)
    was_aborted = event.outputs[0].finish_reason is FinishReason.ABORT
    return RequestFailedError("the request was aborted") if was_aborted else None
