"""The text of one output: takes tokens, returns text to deliver, and ends the output at a stop string.

Puts `detokenizer.py` before the search for stop strings; both may hold text back.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text, and where the text ends; the fields are those of `SamplingParams`.

    `stop_strings` is its `stop`: checked already, none empty.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0


class OutputText:
    """Turns the tokens of one output into text.

    Args:
        options: How tokens become text.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._matcher = StopStringMatcher(options.stop_strings, options.include_stop_str_in_output)
        self._num_early_tokens = options.min_tokens - 1  # a stop string that ends with one of these does not count

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Add a token; return the text that may be delivered now, and the stop string if the token completed one.

        Push nothing after a stop string.
        """
        is_early, self._num_early_tokens = self._num_early_tokens > 0, self._num_early_tokens - 1
        return self._matcher.push(self._detokenizer.push(token_id), may_stop=not is_early)

    def finish(self) -> str:
        """Return the rest of the text; the output has ended for another reason than a stop string.

        Should the last, broken character complete a stop string, the text ends there all the same.
        """
        text, stop_string = self._matcher.push(self._detokenizer.finish())
        return text if stop_string is not None else text + self._matcher.finish()


class StopStringMatcher:
    """Finds stop strings in the text of one output, which arrives in pieces, and holds back what may become one.

    The stop string that counts is the one whose last character comes first; of several that end there, the longest. So
    the answer does not depend on how the text was cut into pieces.

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
