"""What decisions and results tell of groups: what was done to them, for people, and which of them can never go on.

Nothing in the planner reads it again.
"""

from dataclasses import dataclass

from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.life import EventKind


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """One thing that a decision did to a group. Counts are of its first live sequence.

    Attributes:
        group: To whom.
        kind: What.
        num_tokens: Tokens that were known, prompt and output.
        num_computed_tokens: Of these, those that needed not be computed.
        cause: Why, in words; empty: the kind says it.
    """

    group: SequenceGroup
    kind: EventKind
    num_tokens: int
    num_computed_tokens: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that can never go on, and why, in words; with the `flag` that its rows would have, if they would."""

    group: SequenceGroup
    message: str
    flag: RowFlag | None = None


@dataclass(frozen=True, slots=True)
class FlaggedGroup:
    """A group that ends because a row of it has a flag, and where that is, in words: "output 0 at token 17"."""

    group: SequenceGroup
    flag: RowFlag
    message: str
