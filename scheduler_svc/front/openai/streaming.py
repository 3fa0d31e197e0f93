"""An answer in pieces: one task for each prompt takes deltas and sends events.

The constant part of an event is written once: a token costs one JSON text between constant bytes.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence

from aiohttp import web
from pydantic_core import to_json

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from scheduler_svc.front.openai.answering import finish_reason, stop_reason, usage, usage_of
from scheduler_svc.front.openai.errors import api_error
from scheduler_svc.front.openai.fields import SamplingFields
from scheduler_svc.front.openai.requests import Asked
from scheduler_svc.front.openai.sse import ChunkStream, EventStream
from scheduler_svc.front.output import Delta, Output, PromptDelta
from scheduler_svc.front.response import Response

log = logging.getLogger(__name__)

NULL = b"null"


class Pieces(ABC):
    """Makes the events of one prompt.

    Args:
        place: The prompt's index in its request.
        fields: The same in OpenAI's words.

    Attributes:
        indices: The indices of the prompt's choices.
    """

    def __init__(
        self, stream: ChunkStream, response: Response, place: int, asked: Asked, fields: SamplingFields
    ) -> None:
        self.response = response
        self.fields = fields
        self.num_copies = asked.num_copies
        self.num_alternatives = asked.num_alternatives
        self._stream = stream
        num_returned = asked.requests[place].sampling_params.n or 1
        self._first_index = place * num_returned * asked.num_copies
        self.indices = range(self._first_index, self._first_index + num_returned * asked.num_copies)
        self._finished: set[int] = set()
        self._num_told_tokens = 0
        options = fields.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._counts_always = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def begin(self) -> bytes:
        """Return the events that come before all others."""

    @abstractmethod
    def piece(self, delta: Delta, index: int) -> bytes:
        """Return the events of a delta, for the choice `index`; empty: there is nothing to send yet."""

    @abstractmethod
    def last_piece(self, output: Output, index: int) -> bytes:
        """Return the events that end the choice `index`."""

    def num_reasoning_tokens(self) -> int | None:
        """Return the number of reasoning tokens in all outputs; None: they are not counted."""
        return None

    async def send_all(self) -> None:
        """Send all events of the prompt but the first ones. Raises OctavoServiceError: the request failed."""
        response, send = self.response, self._stream.send
        while (delta := await response.next_delta()) is not None:
            # The response keeps the prompt's, which are complete before the first delta comes.
            if not isinstance(delta, PromptDelta) and (events := self._of_delta(delta)):
                await send(events)
        if events := b"".join(self._end(output) for output in response.outputs):
            await send(events)

    def event(self, *choice: bytes, rest: bytes = b"") -> bytes:
        """Return an event with one choice, given its JSON object in parts, and what follows the choices."""
        return self._stream.event(b',"choices":[', *choice, b"]", rest, self._usage(), b"}")

    def prompt_token_ids(self) -> bytes:
        """Return the member of a JSON object that tells the prompt's tokens."""
        return b',"prompt_token_ids":' + to_json(self.response.request.read_token_ids.tolist())

    def endings(self, output: Output) -> tuple[bytes, bytes]:
        """Return the JSON of an output's `finish_reason`, and what follows it."""
        reason = stop_reason(output, self.fields.stop_token_ids)
        return to_json(finish_reason(output)), b"" if reason is None else b',"stop_reason":' + to_json(reason)

    def _of_delta(self, delta: Delta) -> bytes:
        self._num_told_tokens += len(delta.token_ids)
        index = self._first_index + delta.output_index * self.num_copies
        events = b"".join([self.piece(delta, index + copy) for copy in range(self.num_copies)])
        output = self.response.outputs[delta.output_index]
        return events + self._end(output) if output.finish_reason is not None and not output.is_announced else events

    def _end(self, output: Output) -> bytes:
        """Return the events that end the choices of an output, once."""
        if output.output_index in self._finished:
            return b""
        self._finished.add(output.output_index)
        index = self._first_index + output.output_index * self.num_copies
        return b"".join(self.last_piece(output, index + copy) for copy in range(self.num_copies))

    def _usage(self) -> bytes:
        if self._counts_always:
            num_outputs = self._num_told_tokens * self.num_copies
            return b',"usage":' + to_json(usage(self.response.num_input_tokens, num_outputs))
        return b',"usage":null' if self._tells_usage else b""


async def stream_answer(
    stream: ChunkStream, pieces: Sequence[Pieces], names: Mapping[str, str], *, tells_outputs: bool = True
) -> web.StreamResponse:
    """Send the answers of all prompts as they come.

    Args:
        stream: Writes events.
        pieces: Make the events of each prompt.
        names: OpenAI's names of fields.
        tells_outputs: Whether the outputs count in `usage`.
    """

    async def send_all() -> None:
        if begin := b"".join(one.begin() for one in pieces):
            await stream.send(begin)
        if len(pieces) == 1:
            await pieces[0].send_all()
        else:
            async with asyncio.TaskGroup() as group:
                for one in pieces:
                    group.create_task(one.send_all())
        options = pieces[0].fields.stream_options
        if options and options.include_usage:
            counts = usage_of(
                [one.response for one in pieces],
                pieces[0].num_copies,
                tells_outputs=tells_outputs,
                num_reasoning_tokens=pieces[0].num_reasoning_tokens(),
            )
            await stream.send(stream.event(b',"choices":[],"usage":', to_json(counts), b"}"))

    return await stream_events(stream, send_all, names, pieces[0].response.request_id)


async def stream_events(
    stream: EventStream, send_all: Callable[[], Awaitable[None]], names: Mapping[str, str], request_id: str
) -> web.StreamResponse:
    """Open a stream and send all events; an error ends it in the words of the API."""
    async with stream.open():
        try:
            await send_all()
        except ConnectionError:
            raise
        except Exception as error:
            cause = _first_of(error)
            if isinstance(cause, ConnectionError):
                raise cause from error
            if not isinstance(cause, OctavoServiceError):
                log.exception(Event("http_stream_failed", request_id=request_id))
            return await stream.end(stream.failed(api_error(cause, names)))
        return await stream.end(stream.finished())


def _first_of(error: Exception) -> Exception:
    """Return the first error of a group that is one, else the error itself."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
