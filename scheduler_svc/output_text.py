"""The text of one output: tokens in, text to deliver out, and the end if a stop string comes.

Puts `detokenizer.py` before `stop_strings.py`; both may hold text back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.detokenizer import Detokenizer
from scheduler_svc.stop_strings import StopStringMatcher
from scheduler_svc.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text, and where it ends; the fields are those of `SamplingParams`.

    `stop_strings` is its `stop`: checked already, none empty.
    """

    stop_strings: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What pushed tokens brought.

    `num_tokens_used` says how many of them belong to the output: all, or those up to the one that
    completed `stop_string`.
    """

    text: str
    stop_string: str | None
    num_tokens_used: int


class OutputText:
    """Turns the tokens of one output into text.

    Args:
        tokenizer: The model's tokenizer.
        options: How to do it.
    """

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._matcher = StopStringMatcher(options.stop_strings, options.include_stop_str_in_output)
        self._has_stop_strings = bool(options.stop_strings)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens; return the text that may be delivered now. Push nothing after a stop string."""
        if not self._has_stop_strings:
            return TextDelta(self._detokenizer.push(token_ids), None, len(token_ids))
        released = []
        for num_tokens_used, token_id in enumerate(token_ids, start=1):
            text, stop_string = self._matcher.push(self._detokenizer.push((token_id,)))
            released.append(text)
            if stop_string is not None:
                return TextDelta("".join(released), stop_string, num_tokens_used)
        return TextDelta("".join(released), None, len(token_ids))

    def finish(self) -> str:
        """Return the rest of the text; the output has ended for another reason than a stop string.

        Should the last, broken character complete a stop string, the text ends there all the same.
        """
        text, stop_string = self._matcher.push(self._detokenizer.finish())
        return text if stop_string is not None else text + self._matcher.finish()
