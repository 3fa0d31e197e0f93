"""The content of an answer as blocks, in order: the model's thinking, its text and its tool calls.

A call that breaks off becomes no block, and a block that was sent cannot be taken back. So a call is sent only once
it is complete, and an answer has the same blocks with and without streaming.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pydantic_core import to_json

from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
)

# Clients require one, and send it back unread. Nothing here checks that this server wrote the thinking.
SIGNATURE = "octavo"


@dataclass(frozen=True, slots=True)
class BlockBegin:
    """A block begins; `name` and `id` are those of a call."""

    index: int
    kind: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More of the last block: text, thoughts, or the JSON text of a call's input."""

    index: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    """The last block is whole."""

    index: int
    kind: str


BlockEvent: TypeAlias = BlockBegin | BlockDelta | BlockEnd


class Blocks:
    """Makes the blocks of one answer.

    Args:
        tells_thinking: Whether the answer includes the model's thinking.
    """

    def __init__(self, *, tells_thinking: bool) -> None:
        self._tells_thinking = tells_thinking
        self._index = -1
        self._kind = ""  # of the open block
        self._call: ToolCallBegin | None = None  # held until it is whole
        self._arguments: list[str] = []
        self.has_calls = False

    def add(self, events: Iterable[OutputEvent]) -> list[BlockEvent]:
        """Return the block events that the next output events make certain."""
        made: list[BlockEvent] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    self._tell_call(made)
                    self._add_text(made, "text", text)
                case ReasoningDelta(text):
                    self._tell_call(made)
                    if self._tells_thinking:
                        self._add_text(made, "thinking", text)
                case ToolCallBegin():
                    self._tell_call(made)
                    self._call = event
                case ToolCallArguments(_, delta):
                    self._arguments.append(delta)
                case ToolCallBroken(index):
                    if index is not None:
                        self._call = None
                        self._arguments.clear()
        return made

    def end(self) -> list[BlockEvent]:
        """Return the remaining events: the output has ended."""
        made: list[BlockEvent] = []
        self._tell_call(made)
        self._close(made)
        return made

    def _add_text(self, made: list[BlockEvent], kind: str, text: str) -> None:
        if self._kind != kind:
            self._open(made, kind)
        made.append(BlockDelta(self._index, kind, text))

    def _tell_call(self, made: list[BlockEvent]) -> None:
        """Send the call that is held, if any: something else follows, so it is complete."""
        if self._call is None:
            return
        self._open(made, "tool_use", self._call.id, self._call.name)
        made.append(BlockDelta(self._index, "tool_use", "".join(self._arguments)))
        self.has_calls, self._call = True, None
        self._arguments.clear()

    def _open(self, made: list[BlockEvent], kind: str, call_id: str = "", name: str = "") -> None:
        self._close(made)
        self._index, self._kind = self._index + 1, kind
        made.append(BlockBegin(self._index, kind, call_id, name))

    def _close(self, made: list[BlockEvent]) -> None:
        if self._kind:
            made.append(BlockEnd(self._index, self._kind))
            self._kind = ""


def content_json(events: Sequence[BlockEvent]) -> bytes:
    """Return the array of all blocks of an answer; the input of a call stands there as the model wrote it."""
    blocks: list[bytes] = []
    begun, texts = BlockBegin(0, ""), list[str]()
    for event in events:
        match event:
            case BlockBegin():
                begun, texts = event, []
            case BlockDelta():
                texts.append(event.text)
            case BlockEnd():
                blocks.append(_block_json(begun, "".join(texts)))
    return b"[" + b",".join(blocks) + b"]"


def _block_json(begun: BlockBegin, text: str) -> bytes:
    if begun.kind == "tool_use":
        head = to_json({"type": "tool_use", "id": begun.id, "name": begun.name})
        return head[:-1] + b',"input":' + text.encode() + b"}"
    if begun.kind == "thinking":
        return to_json({"type": "thinking", "thinking": text, "signature": SIGNATURE})
    return to_json({"type": "text", "text": text})
