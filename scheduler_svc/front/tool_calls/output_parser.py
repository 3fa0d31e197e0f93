"""The text of one chat output as the events of `events.py`: reasoning first, then content and tool calls."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from scheduler_svc.front.tool_calls.events import (
    ContentDelta,
    OutputEvent,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallBegin,
    merged,
)
from scheduler_svc.front.tool_calls.parser import ToolCallParser
from scheduler_svc.front.tool_calls.reasoning import ReasoningParser


class OutputParser:
    """Parses one output.

    The joined deltas are the same for any split of the text. Calls inside the reasoning are thoughts. But a model that
    ends its output behind such a call, with the reasoning still open, waits for the result: so its last calls count.

    Args:
        reasoning: Separates the reasoning; None: there is none.
        tool_calls: Finds tool calls; None: the request has no tools, or `tool_choice` is none.
        end_tokens: The texts of the special tokens that may end the output. One of them at the very end is left out.
            They are in the text if `skip_special_tokens` is off, which the markers of some families need.
    """

    def __init__(
        self, reasoning: ReasoningParser | None, tool_calls: ToolCallParser | None, end_tokens: Collection[str] = ()
    ) -> None:
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._end_tokens = tuple(filter(None, end_tokens))
        self._tail = ""  # may be an end token
        self._thoughts: list[str] = []  # the reasoning, which may contain calls

    def feed(self, text: str) -> list[OutputEvent]:
        """Add text; return the events that it makes certain."""
        return self._parse(self._without_tail(text))

    def finish(self, *, is_cut: bool = False) -> list[OutputEvent]:
        """Return the remaining events: the output has ended; `is_cut`: at a limit, so the model had more to say."""
        events = self._parse("" if self._tail in self._end_tokens else self._tail)
        is_open = self._reasoning is not None and self._reasoning.is_open
        if self._reasoning is not None:
            reasoning, answer = self._reasoning.finish()
            events += self._noted(reasoning)
            events += self._parse_answer(answer)
        if self._tool_calls is not None:
            thoughts = "".join(self._thoughts) if is_open and not is_cut else ""
            rest = [*self._tool_calls.feed(thoughts), *self._tool_calls.finish()]
            events += _last_calls(rest) if is_open else rest
        return merged(events)

    def _without_tail(self, text: str) -> str:
        """Return the text up to what may be an end token at the end of the output."""
        if not self._end_tokens:
            return text
        text = self._tail + text
        longest = max(map(len, self._end_tokens))
        for start in range(max(0, len(text) - longest), len(text)):
            if any(token.startswith(text[start:]) for token in self._end_tokens):
                self._tail = text[start:]
                return text[:start]
        self._tail = ""
        return text

    def _parse(self, text: str) -> list[OutputEvent]:
        if self._reasoning is None:
            return self._parse_answer(text)
        reasoning, answer = self._reasoning.feed(text)
        return merged(self._noted(reasoning) + self._parse_answer(answer))

    def _noted(self, reasoning: list[OutputEvent]) -> list[OutputEvent]:
        if self._tool_calls is not None:
            self._thoughts += [event.text for event in reasoning if isinstance(event, ReasoningDelta)]
        return reasoning

    def _parse_answer(self, text: str) -> list[OutputEvent]:
        if self._tool_calls is not None:
            return self._tool_calls.feed(text)
        return [ContentDelta(text)] if text else []


def _last_calls(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """Return the whole calls that only whitespace follows, with indices from 0."""
    last: list[ToolCallBegin | ToolCallArguments] = []
    for event in events:
        match event:
            case ToolCallBegin() | ToolCallArguments():
                last.append(event)
            case ContentDelta(text) if not text.strip():
                pass
            case _:
                last.clear()
    return [replace(event, index=event.index - last[0].index) for event in last]
