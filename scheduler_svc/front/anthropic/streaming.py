"""A message in pieces: Anthropic's events, in their order.

    message_start, {content_block_start, content_block_delta..., content_block_stop}..., message_delta, message_stop

A ping follows the first content_block_start. The constant text of an event that comes with every token is built once.
"""

from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import to_json

from scheduler_svc.front.anthropic.blocks import SIGNATURE, BlockBegin, BlockDelta, BlockEvent, Blocks
from scheduler_svc.front.anthropic.errors import in_shape_of
from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.chat_outputs import ChatOutputs
from scheduler_svc.front.openai.errors import ApiError
from scheduler_svc.front.openai.sse import EventStream
from scheduler_svc.front.output import Output
from scheduler_svc.front.response import Response
from scheduler_svc.front.tool_calls.chat_format import OutputParser
from scheduler_svc.front.tool_calls.events import ContentDelta, OutputEvent
from scheduler_svc.request.outputs import FinishReason

_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageStream(EventStream):
    """Sends one answer as it comes."""

    def __init__(
        self, call: Call, waits_for: Callable[[], str], model_name: str, response: Response, outputs: ChatOutputs
    ) -> None:
        super().__init__(call, waits_for)
        self._model_name = model_name
        self._answer = response
        self._parser = None if outputs.are_plain else outputs.parser(response, 0)
        self._blocks = Blocks(tells_thinking=outputs.tells_reasoning)

    async def send_all(self) -> None:
        """Send all events but the last one. Raises OctavoServiceError: the request failed."""
        response, blocks = self._answer, self._blocks
        await self.send(self._start())
        while (deltas := await response.next_token_deltas()) is not None:
            made = [event for delta in deltas for event in blocks.add(parsed_events(self._parser, delta.text))]
            if made:
                await self.send(_written(made))
        [output] = response.outputs
        last = _written([*blocks.add(parsed_events(self._parser, "", output)), *blocks.end()])
        end = {"type": "message_delta", "delta": ended_by(output, blocks), "usage": usage(response)}
        await self.send(last + _event(end))

    def failed(self, error: ApiError) -> bytes:
        """See `EventStream`."""
        return _frame("error", in_shape_of(self._call, error).body)

    def finished(self) -> bytes:
        """See `EventStream`."""
        return _event({"type": "message_stop"})

    def _start(self) -> bytes:
        """Return the first event; how much of the prompt was cached is known only at the end."""
        head, ending = message_head(self._answer, self._model_name), {"stop_reason": None, "stop_sequence": None}
        counts = _usage(self._answer.num_input_tokens, 0, 0)
        return _event({"type": "message_start", "message": {**head, "content": [], **ending, "usage": counts}})


def message_head(response: Response, model_name: str) -> dict[str, Any]:
    """Return what a message begins with."""
    return {"id": response.request_id, "type": "message", "role": "assistant", "model": model_name}


def parsed_events(parser: OutputParser | None, text: str, ended: Output | None = None) -> list[OutputEvent]:
    """Return the events of more text, and with `ended` the last ones; `parser` None: all text is content."""
    if parser is None:
        return [ContentDelta(text)] if text else []
    events = parser.feed(text)
    if ended is not None:
        events += parser.finish(is_cut=ended.finish_reason is FinishReason.LENGTH)
    return events


def ended_by(output: Output, blocks: Blocks) -> dict[str, str | None]:
    """Return the fields that say why an output ended."""
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
    return _usage(response.num_input_tokens, ended.num_cached_tokens, ended.num_output_tokens)


def _usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Return counts as Anthropic has them: the tokens from the cache are not among the input tokens."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


def _written(events: Iterable[BlockEvent]) -> bytes:
    return b"".join(map(_block_event, events))


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
