"""How an output ends: the planner knows its tokens, the front its text, and here is the rule for both.

              ┌─ planner: a stop token or a length ─> ENDED_BY_TOKENS ─┐
    RUNNING ──┤                                                        ├─> CONFIRMED
              └─ front: a stop string ──────────────> ENDED_BY_TEXT ───┘

The end that comes first in the tokens wins; of two with the same token, the text's. The front of a request with stop
strings reads the tokens in order, so it decides, and says so by `RequestHandle.finish_output`; without stop strings the
planner decides. The engine and the front have one `OutputEnd` each for an output, and each confirms its own: the front
once it has told the engine, the engine once the front has agreed and the planner computes the output no more.
"""

import enum

from scheduler_svc.request.outputs import FinishReason


class EndState(enum.Enum):
    """How far the end of an output is."""

    RUNNING = "running"
    """Its tokens count."""
    ENDED_BY_TOKENS = "ended by tokens"
    """The planner has its last token. In a request with stop strings the text may still end it before that."""
    ENDED_BY_TEXT = "ended by text"
    """Its text holds a stop string. The planner still computes it; further tokens do not count."""
    CONFIRMED = "confirmed"
    """Nothing changes any more."""


class OutputEnd:
    """The end of one output, as the engine or as the front knows it.

    Args:
        has_stop_strings: Whether the front looks for stop strings, and so decides.

    Attributes:
        has_stop_strings: As above.
        num_tokens: Tokens that count; those of a beam search are known at its end.
        reason: Why it ended; None: it runs.
        state: See `EndState`.
        is_settled: Whether `num_tokens` and `reason` are final: further tokens do not count.
    """

    __slots__ = ("has_stop_strings", "is_settled", "num_tokens", "reason", "state")

    def __init__(self, *, has_stop_strings: bool = False) -> None:
        self.has_stop_strings = has_stop_strings
        self.num_tokens = 0
        self._enter(EndState.RUNNING, None)

    def end_by_tokens(self, reason: FinishReason) -> None:
        """A stop token or a length ends it, unless something has; its last tokens may still be on their way here."""
        if self.reason is None:
            self._enter(EndState.ENDED_BY_TOKENS, reason)

    def end_by_text(self) -> None:
        """Its last token has completed a stop string."""
        assert self.reason is None, "an output ends once"
        self._enter(EndState.ENDED_BY_TEXT, FinishReason.STOP)

    def settle(self, num_tokens: int, reason: FinishReason) -> bool:
        """The front has decided; return whether that is new.

        Raises: ValueError: it has not so many tokens, or its front has nothing to decide.
        """
        if self.is_settled:
            return False
        if not self.has_stop_strings or num_tokens > self.num_tokens:
            raise ValueError(f"an output of {self.num_tokens} tokens cannot end with {num_tokens} by its front's word")
        self.num_tokens = num_tokens
        self._enter(EndState.ENDED_BY_TEXT if self.reason is None else EndState.CONFIRMED, reason)
        return True

    def confirm(self) -> None:
        """Both sides agree."""
        self._enter(EndState.CONFIRMED, self.reason)

    def set_to(self, num_tokens: int, reason: FinishReason | None) -> None:
        """Take what a call that was cut, a beam search or a pooled text has ended with; `reason` None: it runs."""
        self.num_tokens = num_tokens
        self._enter(EndState.RUNNING if reason is None else EndState.CONFIRMED, reason)

    def _enter(self, state: EndState, reason: FinishReason | None) -> None:
        self.state, self.reason = state, reason
        self.is_settled = state in (EndState.ENDED_BY_TEXT, EndState.CONFIRMED)
