"""Many requests on one stream: `StreamRequests`, where a request costs no call and one message has a step of all.

`Client.request_stream` opens one. Next: octavo/calls/many_requests.py, which runs a list of requests on it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio

from octavo.answer_reading import reading_answers
from octavo.calls.streamed_answer import StreamedAnswer
from octavo.errors import ClosedError, InternalError, OctavoError, UnavailableError, from_status
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo.values.output_messages import (
    alternatives_of,
    finished_from_proto,
    prompt_logprobs_from_proto,
    provenance_from_proto,
)
from octavo.values.outputs import Delta, Event, FailedRequest, Prompt, Provenance, TokenLogprob
from octavo.values.prompts import generate_request
from octavo.values.sampling_params import SamplingParams, with_keywords

# Messages that may be on their way to us: enough that steps of a few milliseconds need not wait for our word.
MAX_MESSAGES_ON_THEIR_WAY = 8

# A scheduler sends its headers at once; if none have come after this time, we write without them.
HEADERS_TIMEOUT_S = 1.0

# Requests that may wait here until gRPC takes them.
MAX_UNWRITTEN_REQUESTS = 16

_CLOSED = "the stream is closed; open a new one"
_REASON_LOST = (
    "the scheduler closed the stream during a send, and the reason was lost; it does so when it stops, or when its "
    "messages are not read for a minute"
)

_CODES = {code.value[0]: code for code in grpc.StatusCode}

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.StreamRequestsRequest, pb.StreamRequestsResponse]"


class _Request:
    """What is known here of a request of the stream."""

    __slots__ = ("answer", "prompt")

    def __init__(self, prompt: Prompt, answer: StreamedAnswer) -> None:
        self.prompt = prompt
        self.answer = answer


class RequestStream:
    """Any number of requests on one stream; made by `Client.request_stream`, used as `async with`.

    `submit` gives a request its number. Iterating yields (number, event): the events of a request are as in
    `Client.stream`, or a `FailedRequest` takes the place of the last one. The iteration ends when all requests have
    ended and `close_submissions` was called. A slow reader gets larger deltas.

    Args:
        open_call: Begins the call.
        to_error: Turns a failed call into an error of the tree.
        model: Of the requests; see `Client`.
    """

    def __init__(
        self,
        open_call: Callable[[], _Call],
        to_error: Callable[[grpc.aio.AioRpcError], OctavoError],
        model: str = "",
    ) -> None:
        self._model = model
        self._open_call = open_call
        self._to_error = to_error
        self._call: _Call | None = None
        self._requests: dict[int, _Request] = {}
        self._last_number = 0
        self._num_taken = 0
        self._takes_submissions = True
        self._unwritten: asyncio.Queue[pb.StreamRequestsRequest | None] = asyncio.Queue()  # None: no more will come
        self._untaken: asyncio.Queue[pb.StreamRequestsResponse | None] = asyncio.Queue()  # None: the call has ended
        self._room = asyncio.Semaphore(MAX_UNWRITTEN_REQUESTS)
        self._has_ended = False  # the call
        self._error: OctavoError | None = None  # what it ended with
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._call = call = self._open_call()
        self._unwritten.put_nowait(pb.StreamRequestsRequest(credits=MAX_MESSAGES_ON_THEIR_WAY))
        # Tasks of their own: gRPC ends the call if a task that waits for it is cancelled.
        self._tasks = [asyncio.create_task(self._write_all(call)), asyncio.create_task(self._read_all(call))]
        return self

    async def __aexit__(self, *_: object) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        call.cancel()  # does nothing to a call that has ended
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def num_live(self) -> int:
        """How many requests have not ended."""
        return len(self._requests)

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        lora_adapter: str = "",
        speculate: bool = True,
        encoder_prompt: str | Sequence[int] | None = None,
        include_provenance: bool = False,
        min_delta_interval_ms: int = 0,
        include_text: bool = True,
        **keywords: Any,
    ) -> int:
        """Send a request and return its number; the arguments are as in `Client.stream`.

        `include_text`: whether the events have text; without it they have token ids, which costs least.

        Raises:
            InvalidRequestError: a value does not fit its field at all.
            OctavoError: the stream has ended.
        """
        message = generate_request(
            prompt,
            with_keywords(sampling_params, keywords, function="submit"),
            request_id=request_id or "",
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            lora_adapter=lora_adapter,
            speculate=speculate,
            encoder_prompt=encoder_prompt,
            min_delta_interval_ms=min_delta_interval_ms,
            model=self._model,
        )
        message.include_provenance = include_provenance
        message.include_prompt_token_ids = message.WhichOneof("prompt") != "token_ids"
        return await self.send(prompt, message, include_text=include_text)

    async def send(
        self, prompt: Prompt, message: pb.GenerateRequest, *, include_text: bool, answer: StreamedAnswer | None = None
    ) -> int:
        """As `submit`, for a finished message; `answer` has the tokens that came before; None: nothing came."""
        if not self._takes_submissions:
            raise ClosedError("the stream accepts no more requests; open a new one")
        await self._room.acquire()
        self._raise_if_ended()
        # No other task runs from here on: the caller knows the number before any event can come.
        self._last_number += 1
        self._requests[self._last_number] = _Request(prompt, answer or StreamedAnswer(message.token_ids.ids))
        self._unwritten.put_nowait(
            pb.StreamRequestsRequest(number=self._last_number, submit=message, include_text=include_text)
        )
        return self._last_number

    async def abort(self, number: int) -> None:
        """End a request; an ended one is fine. Its last event comes as ever."""
        self._raise_if_ended()
        self._unwritten.put_nowait(pb.StreamRequestsRequest(abort=[number]))

    async def close_submissions(self) -> None:
        """Say that no more requests come; the iteration ends behind the last one."""
        self._takes_submissions = False
        self._half_close_if_over()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event | FailedRequest]]:
        """Yield the events of all requests.

        Raises: OctavoError: the stream broke, or was closed; requests that had not ended have no last event.
        """
        self._check_is_open()
        while (response := await self._untaken.get()) is not None:
            with reading_answers():
                for event in self._events(response):
                    yield event
            self._half_close_if_over()
            self._grant()
        self._untaken.put_nowait(None)  # for the next call of this method
        if self._error is not None:
            raise self._error
        if self._requests:
            raise InternalError("the scheduler closed the stream before its requests finished")

    @property
    def _is_over(self) -> bool:
        return not self._takes_submissions and not self._requests

    def _half_close_if_over(self) -> None:
        """End our side once there is nothing more to say: no request, and no credit for the messages of one."""
        if self._is_over:
            self._unwritten.put_nowait(None)

    def _grant(self) -> None:
        """A message was taken: let the scheduler send others, half of what may be on their way at once."""
        self._num_taken += 1
        if not self._is_over and self._num_taken >= MAX_MESSAGES_ON_THEIR_WAY // 2:
            self._num_taken = 0
            self._unwritten.put_nowait(pb.StreamRequestsRequest(credits=MAX_MESSAGES_ON_THEIR_WAY // 2))

    async def _write_all(self, call: _Call) -> None:
        try:
            # gRPC tells why a call was refused, as by a scheduler that does not know it, only before we write.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEADERS_TIMEOUT_S):
                    await call.initial_metadata()
            while (message := await self._unwritten.get()) is not None:
                await call.write(message)
                if message.HasField("submit"):
                    self._room.release()
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `_read_all` sees why

    async def _read_all(self, call: _Call) -> None:
        """Read messages, no more than there were credits for, and then how the call ended."""
        try:
            async for response in call:
                self._untaken.put_nowait(response)
        except grpc.aio.AioRpcError as error:
            self._error = UnavailableError(_REASON_LOST) if _has_lost_reason(error) else self._to_error(error)
        except asyncio.CancelledError:
            self._error = ClosedError(_CLOSED)
            raise
        finally:
            self._has_ended = True
            self._untaken.put_nowait(None)
            for _ in range(MAX_UNWRITTEN_REQUESTS):
                self._room.release()

    def _raise_if_ended(self) -> None:
        if self._has_ended:
            self._room.release()  # wake the next waiter too
            raise self._error or ClosedError(_CLOSED)
        self._check_is_open()

    def _check_is_open(self) -> None:
        if self._call is None:
            raise ClosedError("the stream is not open; use it as `async with client.request_stream() as stream`")

    def _events(self, response: pb.StreamRequestsResponse) -> Iterator[tuple[int, Event | FailedRequest]]:
        for accepted in response.accepted:
            yield accepted.number, self._requests[accepted.number].answer.accept(accepted.accepted)
        for prompt in response.prompt_logprobs:
            event = prompt_logprobs_from_proto(prompt.prompt_logprobs)
            yield prompt.number, self._requests[prompt.number].answer.take(event)
        yield from self._deltas(response.deltas, _by_output(response.provenance))
        for end in response.finished:
            request = self._requests.pop(end.number)
            yield end.number, request.answer.take(finished_from_proto(end.finished))
        for failed in response.failed:
            request = self._requests.pop(failed.number)
            code = _CODES.get(failed.code, grpc.StatusCode.UNKNOWN)
            error = from_status(code, failed.message, failed.details)
            error.keep(request.answer.unfinished_outputs())
            yield failed.number, FailedRequest(request.prompt, error)

    def _deltas(
        self, deltas: pb.RequestDeltas, begun: Mapping[tuple[int, int], tuple[Provenance, ...]]
    ) -> Iterator[tuple[int, Delta]]:
        num_places = len(deltas.numbers)
        token_ids, logprobs = iter(deltas.token_ids), iter(deltas.logprobs)
        alternative_ids, alternative_logprobs = iter(deltas.alternative_token_ids), iter(deltas.alternative_logprobs)
        for number, index, num_tokens, num_logprobs, num_alternatives, text in zip(
            deltas.numbers,
            deltas.output_indexes or repeat(0, num_places),
            deltas.token_counts or repeat(1, num_places),
            deltas.logprob_counts or repeat(0, num_places),
            deltas.alternative_counts or repeat(0, num_places),
            deltas.texts or repeat("", num_places),
            strict=True,
        ):
            alternatives: tuple[tuple[TokenLogprob, ...], ...] = ()
            if num_alternatives:
                ids, values = islice(alternative_ids, num_alternatives), islice(alternative_logprobs, num_alternatives)
                alternatives = alternatives_of(tuple(ids), tuple(values), num_tokens)
            new_ids, new_logprobs = tuple(islice(token_ids, num_tokens)), tuple(islice(logprobs, num_logprobs))
            delta = Delta(index, text, new_ids, new_logprobs, alternatives, begun.get((number, index), ()))
            self._requests[number].answer.take(delta)
            yield number, delta


def _by_output(begun: Iterable[pb.RequestProvenance]) -> dict[tuple[int, int], tuple[Provenance, ...]]:
    """Return the spans that begin, by number of the request and index of the output."""
    spans: dict[tuple[int, int], tuple[Provenance, ...]] = {}
    for each in begun:
        key = each.number, each.output_index
        spans[key] = (*spans.get(key, ()), provenance_from_proto(each.provenance))
    return spans


def _has_lost_reason(error: grpc.aio.AioRpcError) -> bool:
    """Return whether gRPC does not tell the status, because the call ended while we wrote."""
    return error.code() is grpc.StatusCode.INTERNAL and (error.details() or "").startswith("Internal error from Core")
