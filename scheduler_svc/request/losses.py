"""What speaks against a request: executors that were lost while they computed it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses since its last token that count against a request; it keeps them wherever it goes on.

    Attributes:
        num_losses: How many.
        num_lone_losses: Those of them in which the executor computed nothing else.
        executor: The address of the one that was lost last.
    """

    num_losses: int = 0
    num_lone_losses: int = 0
    executor: str = ""


NO_LOSSES = Losses()
