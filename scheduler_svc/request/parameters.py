"""Parameters of a request beside its sampling: stop conditions and beam search."""

import enum
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from scheduler_svc.request.outputs import FinishReason


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When a sequence ends by itself. Stop strings need text; the front looks for them.

    `max_tokens` None: as many as the length allows. `accepted_len`: most tokens of a sequence, prompt and output, as
    promised when the request was accepted; it runs only where so many fit. None: no length was promised, and
    the executor's limit holds. `stop_token_ids` are the request's own; the model's end-of-sequence tokens count
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

    def end_with(
        self,
        token_id: int,
        num_tokens: int,
        num_prompt_tokens: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
    ) -> FinishReason | None:
        """Return why a sequence of `num_tokens`, prompt and output, ends with its last token; None: it goes on."""
        if token_id in self.stop_token_ids or (token_id in eos_token_ids and not self.ignore_eos):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.length_limit(num_prompt_tokens, max_model_len) else None

    def accept(self, num_prompt_tokens: int, max_model_len: int) -> "StopConditions":
        """Return the conditions with the length that is promised where sequences have at most `max_model_len`."""
        return replace(self, accepted_len=self.length_limit(num_prompt_tokens, max_model_len))


class EarlyStopping(enum.Enum):
    """When a search with all the hypotheses that it wants is over.

    TRUE: at once. FALSE: when the best live beam, ended as it is, would not beat the worst hypothesis.
    NEVER: the same, but a positive length_penalty judges the beam as if it had grown to the length
    limit without losing score, which is the best case.
    """

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """A search of width `beam_width` for the best `num_outputs` hypotheses.

    `length_penalty` above 0 favours long hypotheses, below 0 short ones (log-probabilities are negative).
    """

    beam_width: int
    num_outputs: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.FALSE

    def __post_init__(self) -> None:
        assert 1 <= self.num_outputs <= self.beam_width
        assert math.isfinite(self.length_penalty)
