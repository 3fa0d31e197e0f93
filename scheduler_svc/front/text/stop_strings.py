"""Finds stop strings in text that arrives in pieces, and holds back what may become one.

The stop string that counts is the one whose last character comes first; of several that end there, the
longest. Reading the text one character at a time, that is the first moment at which the output
holds a stop string, so the answer does not depend on how the text was cut into pieces.
"""

from array import array
from collections.abc import Sequence


class StopStringMatcher:
    """Watches the text of one output.

    Args:
        stop_strings: The stop strings, none empty; there may be none at all.
        include_stop_str_in_output: Whether the stop string itself is released.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop_str_in_output: bool) -> None:
        self._progresses = [_Progress(stop) for stop in stop_strings]
        self._first_characters = frozenset(stop[0] for stop in stop_strings)
        self._include_stop_str_in_output = include_stop_str_in_output
        self._held = ""
        self._has_stopped = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return what may be released now, and the stop string if one is complete.

        Nothing may be pushed after a stop string was found. Text behind it is dropped. With `may_stop`
        False a stop string that is complete with this text is text like any other.
        """
        assert not self._has_stopped, "text after the stop string"
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None  # almost all text: no stop string has begun
        matches = []
        for progress in self._progresses:
            if not may_stop:
                progress.pass_over(text)
            elif (end := progress.advance(text)) is not None:
                matches.append((end, -len(progress.stop), progress.stop))
        buffer = self._held + text
        if matches:
            end, _, stop = min(matches)
            cut = len(self._held) + end - (0 if self._include_stop_str_in_output else len(stop))
            self._held = ""
            self._has_stopped = True
            return buffer[:cut], stop
        num_held = max((p.num_matched for p in self._progresses), default=0)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """Release the held text: the output ended and it became no stop string."""
        held, self._held = self._held, ""
        return held


class _Progress:
    """How much of one stop string the text seen so far ends with (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string would stop before the first token"
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def pass_over(self, text: str) -> None:
        """Read `text`; a match in it does not count, but what follows it may begin inside it."""
        while (end := self.advance(text)) is not None:
            self.num_matched = self._borders[-1]
            text = text[end:]

    def advance(self, text: str) -> int | None:
        """Read `text`; return the position behind the first match's end in it, if there is one."""
        stop, borders = self.stop, self._borders
        matched, position = self.num_matched, 0
        while position < len(text):
            if matched == 0:
                # Almost all text is here: skip it at the speed of C.
                position = text.find(stop[0], position)
                if position < 0:
                    break
                matched = 1
            else:
                while matched and text[position] != stop[matched]:
                    matched = borders[matched - 1]
                if text[position] == stop[matched]:
                    matched += 1
            position += 1
            if matched == len(stop):
                return position
        self.num_matched = matched
        return None


def _borders(stop: str) -> "array[int]":
    """Return, for each non-empty prefix, the length of its longest proper prefix that also ends it."""
    borders = array("H", [0]) * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        if stop[i] == stop[length]:
            length += 1
        borders[i] = length
    return borders
