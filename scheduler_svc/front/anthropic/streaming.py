"""A message in pieces: Anthropic's events, in their order.

    message_start, {content_block_start, content_block_delta..., content_block_stop}..., message_delta, message_stop

A ping follows the first content_block_start. The text of an event that comes with every token is written once.
"""

import logging
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from octavo_shared.errors import OctavoServiceError
from octavo_shared.process.events import Event
from scheduler_svc.front.anthropic.blocks import SIGNATURE, BlockBegin, BlockDelta, BlockEvent, Blocks
from scheduler_svc.front.anthropic.errors import in_shape_of, messages_error
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.chat_outputs import ChatOutputs
from scheduler_svc.front.openai.sse import EventStream
from scheduler_svc.front.output import Output, PromptDelta
from scheduler_svc.front.response import Response
from scheduler_svc.front.tool_calls.events import ContentDelta, OutputEvent
from scheduler_svc.front.tool_calls.output_parser import OutputParser
from scheduler_svc.request.outputs import FinishReason

log = logging.getLogger(__name__)

_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream:
    """Sends one answer as it comes.

    Args:
        call: What is answered.
        identifier: Of the answer.
        model_name: Of the model.
        response: Brings the deltas.
        outputs: Parses them.
    """

    def __init__(self, call: Call, identifier: str, model_name: str, response: Response, outputs: ChatOutputs) -> None:
        self._call = call
        self._id = identifier
        self._model_name = model_name
        self._response = response
        self._parser = None if outputs.are_plain else outputs.parser(response)
        self._blocks = Blocks(tells_thinking=outputs.tells_reasoning)
        self._stream = EventStream(call)

    async def send_all(self) -> web.StreamResponse:
        """Send it; what fails from now on is an event."""
        await self._stream.open()
        try:
            await self._send_all()
        except ConnectionError:
            raise
        except Exception as error:
            if not isinstance(error, OctavoServiceError):
                log.exception(Event("http_stream_failed", request_id=self._response.request_id))
            return await self._stream.end(_frame("error", in_shape_of(self._call, messages_error(error)).body))
        return await self._stream.end(_event({"type": "message_stop"}))

    async def _send_all(self) -> None:
        response, stream, blocks = self._response, self._stream, self._blocks
        await stream.send(self._start())
        while (delta := await response.next_delta()) is not None:
            if isinstance(delta, PromptDelta) or not delta.text:
                continue
            if events := self._written(blocks.add(parsed_events(self._parser, delta.text))):
                await stream.send(events)
        [output] = response.outputs
        last = self._written([*blocks.add(parsed_events(self._parser, "", output)), *blocks.end()])
        end = {"type": "message_delta", "delta": ended_by(output, blocks), "usage": usage(response)}
        await stream.send(last + _event(end))

    def _start(self) -> bytes:
        """Return the first event; what was in the prefix cache is known at the end."""
        message = {"id": self._id, "type": "message", "role": "assistant", "model": self._model_name, "content": []}
        ending = {"stop_reason": None, "stop_sequence": None}
        counts = _usage(len(self._response.request.prompt_token_ids), 0, 0)
        return _event({"type": "message_start", "message": {**message, **ending, "usage": counts}})

    def _written(self, events: list[BlockEvent]) -> bytes:
        return b"".join(map(_block_event, events))


def parsed_events(parser: OutputParser | None, text: str, ended: Output | None = None) -> list[OutputEvent]:
    """Return what more text of an output means, and with `ended` its rest; `parser` None: all text is content."""
    if parser is None:
        return [ContentDelta(text)] if text else []
    events = parser.feed(text)
    if ended is not None:
        events += parser.finish(is_cut=ended.finish_reason is FinishReason.LENGTH)
    return events


def ended_by(output: Output, blocks: Blocks) -> dict[str, str | None]:
    """Return why an output ended."""
    reason = "tool_use" if blocks.has_calls else "end_turn"
    if output.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif output.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": output.stop_string}


def usage(response: Response) -> dict[str, int]:
    """Return the counts of a request that has ended."""
    ended = response.ended
    assert ended is not None, "it has ended"
    return _usage(ended.num_prompt_tokens, ended.num_cached_tokens, ended.num_output_tokens)


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Return counts as Anthropic has them: the tokens from the cache are not among the input tokens."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


def _block_event(event: BlockEvent) -> bytes:
    if isinstance(event, BlockDelta):
        kind, name = _DELTAS[event.kind]
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
            b"\n\n" % (event.index, kind, name, to_json(event.text))
        )
    if isinstance(event, BlockBegin):
        begun = _event({"type": "content_block_start", "index": event.index, "content_block": _empty_block(event)})
        return begun + _PING if event.index == 0 else begun
    signed = b""
    if event.kind == "thinking":
        delta = {"type": "signature_delta", "signature": SIGNATURE}
        signed = _event({"type": "content_block_delta", "index": event.index, "delta": delta})
    return signed + _event({"type": "content_block_stop", "index": event.index})


def _empty_block(event: BlockBegin) -> dict[str, Any]:
    if event.kind == "tool_use":
        return {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
    if event.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _event(content: dict[str, Any]) -> bytes:
    return _frame(content["type"], to_json(content))


def _frame(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)
