"""Losses that count against a request: executors that were lost while they computed it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses since its last token that count against a request; it takes them along to other engines.

    Attributes:
        num_losses: How many.
        num_lone_losses: How many of them hit a step that computed nothing else.
        executor: The address of the executor that was lost last.
    """

    num_losses: int = 0
    num_lone_losses: int = 0
    executor: str = ""


NO_LOSSES = Losses()
