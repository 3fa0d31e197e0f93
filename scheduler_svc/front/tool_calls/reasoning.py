"""Separates a model's reasoning from its answer while the text arrives, in pieces of any size.

Reasoning comes first or not at all. Whitespace behind a marker belongs to it.
"""

import re
from enum import Enum

from scheduler_svc.front.tool_calls.events import OutputEvent, ReasoningDelta
from scheduler_svc.front.tool_calls.formats import ReasoningFormat
from scheduler_svc.front.tool_calls.marker_search import find_marker, match_marker

# More whitespace in front of the first marker is content.
MAX_LEADING_CHARS = 32
_WHITESPACE = " \t\r\n"
_SPACE = re.compile(f"[{_WHITESPACE}]*")


class _Place(Enum):
    BEGINNING = "before the first word"
    REASONING = "between the markers"
    BEHIND = "behind the end marker"
    ANSWER = "in the answer"


class ReasoningParser:
    """Parses one output.

    Args:
        starts_inside: Whether the prompt ends with the marker in front; see `opens_reasoning`.
    """

    def __init__(self, reasoning_format: ReasoningFormat, *, starts_inside: bool) -> None:
        self._format = reasoning_format
        self._is_inside = starts_inside  # the marker in front has come
        self._place = _Place.BEGINNING
        self._text = ""  # not decided yet

    @property
    def is_open(self) -> bool:
        """Whether the end marker has not come yet."""
        return self._place is _Place.REASONING or (self._place is _Place.BEGINNING and self._is_inside)

    def feed(self, text: str) -> tuple[list[OutputEvent], str]:
        """Add text; return the reasoning that it makes certain, and the text of the answer."""
        if self._place is _Place.ANSWER:
            return [], text
        self._text += text
        reasoning = ""
        if self._place is _Place.BEGINNING:
            self._pass_beginning()
        if self._place is _Place.REASONING:
            end, marker = find_marker(self._text, (self._format.end,))
            reasoning, self._text = self._text[:end], self._text[end:]
            if marker is not None:
                self._text, self._place = self._text[len(marker) :], _Place.BEHIND
        if self._place is _Place.BEHIND:
            self._text = self._text.lstrip(_WHITESPACE)
            if self._text:
                self._place = _Place.ANSWER
        return [ReasoningDelta(reasoning)] if reasoning else [], self._take_answer()

    def finish(self) -> tuple[list[OutputEvent], str]:
        """Return the rest: the output has ended."""
        rest, self._text = self._text, ""
        if self.is_open:
            return [ReasoningDelta(rest)] if rest else [], ""
        return [], rest

    def _pass_beginning(self) -> None:
        """Skip whitespace and the begin marker. Some models write it though the prompt has it already."""
        position, text = 0, self._text
        while True:
            space = _SPACE.match(text, position)
            start = position if space is None else space.end()
            is_far_in = start - position > MAX_LEADING_CHARS
            marker, may_come = match_marker(text, start, (self._format.begin,))
            if marker is None or (is_far_in and not self._is_inside):
                break
            self._is_inside, position = True, start + len(marker)
        if not self._is_inside and is_far_in:
            self._place = _Place.ANSWER
        elif not may_come:
            self._place = _Place.REASONING if self._is_inside else _Place.ANSWER
        self._text = text[start if self._is_inside else position :]

    def _take_answer(self) -> str:
        if self._place is not _Place.ANSWER:
            return ""
        answer, self._text = self._text, ""
        return answer


def opens_reasoning(reasoning_format: ReasoningFormat, prompt: str) -> bool:
    """Return whether a rendered chat prompt ends with the marker in front of reasoning."""
    return prompt.rstrip(_WHITESPACE).endswith(reasoning_format.begin)
