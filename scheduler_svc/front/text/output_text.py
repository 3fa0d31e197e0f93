"""The text of one output: takes tokens, returns text to deliver, and ends the output at a stop string.

Puts `detokenizer.py` before `stop_strings.py`; both may hold text back.
"""

from dataclasses import dataclass

from scheduler_svc.front.text.detokenizer import Detokenizer
from scheduler_svc.front.text.stop_strings import StopStringMatcher
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
        return self._matcher.push(self._detokenizer.push_one(token_id), may_stop=not is_early)

    def finish(self) -> str:
        """Return the rest of the text; the output has ended for another reason than a stop string.

        Should the last, broken character complete a stop string, the text ends there all the same.
        """
        text, stop_string = self._matcher.push(self._detokenizer.finish())
        return text if stop_string is not None else text + self._matcher.finish()
