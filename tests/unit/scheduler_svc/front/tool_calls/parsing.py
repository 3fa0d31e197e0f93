"""What the tests of parsing share: tools, and the joined result of an output."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count

from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
)
from scheduler_svc.front.tool_calls.formats import TOOL_CALL_FORMATS, ToolCallFormat
from scheduler_svc.front.tool_calls.output_parser import OutputParser
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
    """The joined events of an output; `calls` are names and arguments, by index."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    reasoning: str = ""
    ids: list[str] = field(default_factory=list)

    def add(self, events: Iterable[OutputEvent]) -> None:
        for event in events:
            match event:
                case ContentDelta(text):
                    assert text
                    self.content += text
                case ReasoningDelta(text):
                    assert text
                    assert not self.content
                    assert not self.calls
                    self.reasoning += text
                case ToolCallBegin(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append((name, ""))
                    self.ids.append(call_id)
                case ToolCallArguments(index, delta):
                    assert index == len(self.calls) - 1
                    assert delta
                    name, arguments = self.calls[index]
                    self.calls[index] = (name, arguments + delta)


def format_named(name: str) -> ToolCallFormat:
    return next(row for row in TOOL_CALL_FORMATS if row.name == name)


def parse(
    call_format: str | None,
    pieces: Iterable[str],
    *,
    streams_arguments: bool = True,
    reasoning: ReasoningParser | None = None,
    end_tokens: tuple[str, ...] = (),
) -> Parsed:
    """Return the joined events of an output that arrives in `pieces`."""
    tool_calls = None
    if call_format is not None:
        numbers = count()
        tool_calls = ToolCallParser(
            format_named(call_format),
            TOOLS,
            new_call_id=lambda: f"call{next(numbers)}",
            streams_arguments=streams_arguments,
        )
    parser = OutputParser(reasoning, tool_calls, end_tokens)
    parsed = Parsed()
    for piece in pieces:
        parsed.add(parser.feed(piece))
    parsed.add(parser.finish())
    return parsed
