"""Why a sequence ends, and when it does so by itself."""

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by itself. Stop strings need text; they come in through `finish`.

    `max_tokens` None: as many as the model's length allows. `stop_token_ids` are the request's own;
    the model's end-of-sequence tokens count as well unless `ignore_eos`.
    """

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def length_limit(self, num_prompt_tokens: int, max_model_len: int) -> int:
        """Return the most tokens of a sequence, prompt and output."""
        if self.max_tokens is None:
            return max_model_len
        return min(num_prompt_tokens + self.max_tokens, max_model_len)
