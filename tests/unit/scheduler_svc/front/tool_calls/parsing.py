"""What the tests of parsing share: tools, and the joined result of an output."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from scheduler_svc.front.tool_calls.chat_format import OutputParser
from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallBroken,
)
from scheduler_svc.front.tool_calls.formats import TOOL_CALL_FORMATS, ToolCallFormat
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser

TOOLS: Mapping[str, Mapping[str, object]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "exact": {"type": "boolean"},
            "places": {"anyOf": [{"type": "array"}, {"type": "string"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Parsed:
    """The joined events of an output; `calls` are names and arguments of the whole ones, by index.

    `remains` are those of the ones that broke off when events had told of them, and `ends_broken` says whether the last
    one that began broke off.
    """

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    ids: list[str] = field(default_factory=list)
    remains: list[tuple[str, str]] = field(default_factory=list)
    ends_broken: bool = False
    thinks_first: bool = True

    def add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    assert text
                    self.content += text
                case ReasoningDelta(text):
                    assert text
                    assert not self.thinks_first or not (self.content or self.calls)
                    self.reasoning += text
                case ToolCallBegin(index, call_id, name):
                    assert index == len(self.calls) + len(self.remains)
                    self.ends_broken = False
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ToolCallArguments(index, delta):
                    assert index == len(self.calls) + len(self.remains) - 1
                    assert delta
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + delta)
                case ToolCallBroken(index):
                    self.ends_broken = True
                    if index is not None:
                        assert index == len(self.calls) + len(self.remains) - 1
                        self.remains.append(self.calls.pop())
                        self.ids.pop()
                        assert cannot_be_completed(self.remains[-1][1])


def cannot_be_completed(text: str) -> bool:
    """Return whether a bracket closes nothing that is open: no text behind it, and no clean-up, makes this JSON."""
    is_open: list[str] = []
    for bracket in re.sub(r'"([^"\\]|\\.)*("|\\?\Z)', "", text, flags=re.DOTALL):
        if bracket in "{[":
            is_open.append("}" if bracket == "{" else "]")
        elif bracket in "}]" and (not is_open or is_open.pop() != bracket):
            return True
    return False


def format_named(name: str) -> ToolCallFormat:
    return next(row for row in TOOL_CALL_FORMATS if row.name == name)


def parse(
    call_format: str | None,
    pieces: Iterable[str],
    *,
    reasoning: ReasoningParser | None = None,
    end_tokens: tuple[str, ...] = (),
    is_cut: bool = False,
) -> Parsed:
    """Return the joined events of an output that arrives in `pieces`."""
    tool_calls = None
    if call_format is not None:
        tool_calls = ToolCallParser(format_named(call_format), TOOLS, "a")
    parser = OutputParser(reasoning, tool_calls, end_tokens)
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish(is_cut=is_cut))
    return parsed
