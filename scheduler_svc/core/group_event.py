"""What the planner reports of groups: events, for people, and groups that end. The planner never reads them again."""

from dataclasses import dataclass

from octavo_shared.step_wire.step import RowFlag
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.request.life import EventKind


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """What a decision did to a group. Counts are of its first live sequence.

    Attributes:
        num_tokens: Tokens that were known, prompt and output.
        num_computed_tokens: How many of these needed no computation.
        cause: Why, in words; empty: `kind` says it.
    """

    group: SequenceGroup
    kind: EventKind
    num_tokens: int
    num_computed_tokens: int = 0
    cause: str = ""


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A group that can never go on, and why, in words; with the `flag` of its rows, if they would have one."""

    group: SequenceGroup
    message: str
    flag: RowFlag | None = None


@dataclass(frozen=True, slots=True)
class FlaggedGroup:
    """A group that ends because one of its rows has a flag; `message` says where: "output 0 at token 17"."""

    group: SequenceGroup
    flag: RowFlag
    message: str
