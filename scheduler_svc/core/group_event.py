"""What a decision tells of groups: what was done to them, for people, and which of them can never go on.

Nothing in the core reads it again.
"""

import enum
from dataclasses import dataclass

from scheduler_svc.core.sequence import SequenceGroup


class EventKind(enum.Enum):
    """What can happen to a request between its arrival and its first token, or between two tokens."""

    ADMITTED = "admitted"
    """It got blocks and slots; of `num_tokens`, `num_computed_tokens` were in the cache."""
    PREEMPTED = "preempted"
    """It left the batch, and its blocks were freed: `num_tokens` are to be computed again."""
    SWAPPED_OUT = "swapped_out"
    """It left the batch, and its blocks went to the host pool."""
    SWAPPED_IN = "swapped_in"
    """It came back from the host pool."""
    DROPPED = "dropped"
    """Its blocks in the host pool were given up: `num_tokens` are to be computed again."""
    EXECUTOR_LOST = "executor_lost"
    """The executor that had it is gone."""
    PARKED = "parked"
    """It may have broken executors, and waits until other suspects have been computed."""


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One thing that a decision did to a group. Counts are of its first live sequence.

    Attributes:
        group: To whom.
        kind: What.
        num_tokens: Tokens that were known, prompt and output.
        num_computed_tokens: Of these, those that needed not be computed.
    """

    group: SequenceGroup
    kind: EventKind
    num_tokens: int
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that can never go on, and has ended; why, in one sentence."""

    group: SequenceGroup
    message: str
