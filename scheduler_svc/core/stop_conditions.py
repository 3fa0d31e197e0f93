"""Why a sequence ends, and when it does so by itself."""

import enum
from dataclasses import dataclass, replace


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by itself. Stop strings need text; they come in through `finish`.

    `max_tokens` None: as many as the length allows. `accepted_len`: most tokens of a sequence, prompt and output, as
    they were promised when the request was accepted; it runs only where so many fit. None: nothing was promised, and
    the executor's length decides. `stop_token_ids` are the request's own; the model's end-of-sequence tokens count
    as well unless `ignore_eos`.
    """

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    accepted_len: int | None = None

    def length_limit(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        longest = max_model_len if self.accepted_len is None else min(self.accepted_len, max_model_len)
        return longest if self.max_tokens is None else min(num_prompt_tokens + self.max_tokens, longest)

    def accept(self, num_prompt_tokens: int, max_model_len: int) -> "StopConditions":
        """Return the conditions with what is promised to a request where sequences have at most `max_model_len`."""
        return replace(self, accepted_len=self.length_limit(num_prompt_tokens, max_model_len))
