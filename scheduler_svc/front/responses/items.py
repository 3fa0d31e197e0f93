"""The items of an answer, and their events, numbered: both follow from the blocks of the answer.

    output_item.added, content_part.added, output_text.delta..., output_text.done, content_part.done, output_item.done

Reasoning has the same events, as `reasoning_text` or as a summary; a call has arguments, or the input of a custom
tool, and no part. The constant part of an event that comes with every token is built once for each item.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from scheduler_svc.front.anthropic.blocks import BlockBegin, BlockDelta, BlockEnd, BlockEvent
from scheduler_svc.front.responses.conversation import encrypted
from scheduler_svc.front.responses.tools import ToolName, custom_input

Json = dict[str, Any]

# For each kind of part: the event with a delta, the event of the part, and the name of the part's place.
_TEXT = ("response.output_text", "response.content_part", "content_index")
_REASONING = ("response.reasoning_text", "response.content_part", "content_index")
_SUMMARY = ("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index")
_ARGUMENTS = ("response.function_call_arguments", "", "")
_INPUT = ("response.custom_tool_call_input", "", "")

# The field of a call with its content.
_OF_CALLS = {_ARGUMENTS: "arguments", _INPUT: "input"}


class EventWriter:
    """Writes events with their numbers."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return an event."""
        return self.delta(b"event: %b\ndata: %b" % (kind.encode(), to_json({"type": kind, **fields})[:-1]))

    def delta(self, *begin: bytes) -> bytes:
        """Return the constant beginning of an event, up to its number."""
        number, self._number = self._number, self._number + 1
        return b"".join((*begin, b',"sequence_number":%d}\n\n' % number))


class Items:
    """Makes the items of one answer.

    Args:
        response_id: The answer's; the ids of its items derive from it.
        tools: The client's names of the tools, by their names in the chat.
        tells_summary: Whether reasoning is sent as a summary.
        encrypts: Whether reasoning is also sent in the form that clients send back unread.
    """

    def __init__(
        self,
        response_id: str,
        events: EventWriter,
        tools: Mapping[str, ToolName],
        *,
        tells_summary: bool,
        encrypts: bool,
    ) -> None:
        self.done: list[Json] = []
        self._owner = response_id.removeprefix("resp_")
        self._events = events
        self._tools = tools
        self._tells_summary = tells_summary
        self._encrypts = encrypts
        self._item: Json = {}
        self._kind = _TEXT
        self._place: Json = {}  # of the item, and of its part
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        self._delta_begin = b""

    def add(self, made: Sequence[BlockEvent], logprobs: Sequence[Json] = (), *, is_cut: bool = False) -> bytes:
        """Return the events of more of the answer.

        Args:
            made: The block events.
            logprobs: Of the tokens of the first text among them.
            is_cut: Whether these are its last ones, and the model had more to say.
        """
        last = made[-1] if made else None
        written = []
        for one in made:
            match one:
                case BlockDelta():
                    is_text = one.kind == "text"
                    written.append(self._delta(one.text, logprobs if is_text else ()))
                    logprobs = () if is_text else logprobs
                case BlockBegin():
                    written += self._begin(one)
                case BlockEnd():
                    is_incomplete = is_cut and one is last and self._kind not in _OF_CALLS
                    written += self._end("incomplete" if is_incomplete else "completed")
        return b"".join(written)

    def _begin(self, block: BlockBegin) -> list[bytes]:
        self._texts, self._logprobs = [], []
        match block.kind:
            case "tool_use":
                tool = self._tools.get(block.name, ToolName(block.name))
                self._kind = _INPUT if tool.is_custom else _ARGUMENTS
                kind, short = ("custom_tool_call", "ctc") if tool.is_custom else ("function_call", "fc")
                item = {"id": f"{short}_{self._owner}_{block.index}", "type": kind, "call_id": block.id}
                of_namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
                self._item = {**item, "name": tool.name, **of_namespace, _OF_CALLS[self._kind]: ""}
            case "thinking":
                self._kind = _SUMMARY if self._tells_summary else _REASONING
                self._item = {"id": f"rs_{self._owner}_{block.index}", "type": "reasoning", "summary": []}
            case _:
                self._kind = _TEXT
                item = {"id": f"msg_{self._owner}_{block.index}", "type": "message"}
                self._item = {**item, "role": "assistant", "content": []}
        delta, part, index = self._kind
        added = self._events.event(
            "response.output_item.added", output_index=block.index, item={**self._item, "status": "in_progress"}
        )
        self._place = {"item_id": self._item["id"], "output_index": block.index, **({index: 0} if index else {})}
        kind = f"{delta}.delta"
        self._delta_begin = b"event: %b\ndata: %b," % (kind.encode(), to_json({"type": kind, **self._place})[:-1])
        return [added, self._events.event(f"{part}.added", **self._place, part=self._part())] if part else [added]

    def _delta(self, text: str, logprobs: Sequence[Json]) -> bytes:
        if self._kind is _INPUT:  # a call is sent whole
            text = custom_input(text)
        self._texts.append(text)
        rest = b""
        if self._kind is _TEXT:
            self._logprobs += logprobs
            rest = b',"logprobs":' + to_json(logprobs)
        return self._events.delta(self._delta_begin, b'"delta":', to_json(text), rest)

    def _end(self, status: str) -> list[bytes]:
        text, event = "".join(self._texts), self._events.event
        delta, part, _ = self._kind
        told: Json = {_OF_CALLS.get(self._kind, "text"): text}
        if self._kind is _TEXT:
            told["logprobs"] = self._logprobs
        written = [event(f"{delta}.done", **self._place, **told)]
        if part:
            written.append(event(f"{part}.done", **self._place, part=self._part()))
        item = {**self._item, **self._content(text), "status": status}
        self.done.append(item)
        return [*written, event("response.output_item.done", output_index=self._place["output_index"], item=item)]

    def _part(self) -> Json:
        """Return the part as it is now."""
        text = "".join(self._texts)
        if self._kind is _TEXT:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        return {"type": "summary_text" if self._kind is _SUMMARY else "reasoning_text", "text": text}

    def _content(self, text: str) -> Mapping[str, Any]:
        """Return the fields that a complete item has in addition to those of its beginning."""
        if self._kind in _OF_CALLS:
            return {_OF_CALLS[self._kind]: text}
        name = "summary" if self._kind is _SUMMARY else "content"
        is_told = self._kind is not _TEXT and self._encrypts
        return {name: [self._part()], **({"encrypted_content": encrypted(text)} if is_told else {})}
