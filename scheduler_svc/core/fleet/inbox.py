"""The inbox of a planner: groups that were dispatched to it and that its next step is to admit.

They still wait, held by the queue of the fleet, where they are counted and aborted. A group that the planner's next
step does not admit goes back into the line, where it stood.

Pure. Read next: `dispatcher.py`.
"""

import bisect
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.waiting.tenant_shares import TenantShares
from scheduler_svc.core.waiting.waiting_queue import Turn

_BY_TURN = attrgetter("turn")


class Assignment(NamedTuple):
    """A group that was dispatched to a planner, and what it is expected to take there.

    Attributes:
        turn: Its turn when it was dispatched.
        num_slots: Slots of the batch.
        num_blocks: Free blocks of each cache group, that of an encoder behind the others.
        num_tokens: Tokens to compute.
        is_long: Whether it is a long prefill.
    """

    turn: Turn
    num_slots: int
    num_blocks: tuple[int, ...]
    num_tokens: int
    is_long: bool

    @property
    def group(self) -> SequenceGroup:
        """The group."""
        return self.turn.group


class Inbox:
    """The assignments of one planner, and their sums.

    Args:
        limits: The planner's limits.

    Attributes:
        planner: The planner; set as soon as it exists.
        kind: Equal for planners on which a group needs the same blocks: of one size, and kept as long in each cache
            group. Equal kinds of one dispatcher are the same object.
        assignments: In the order of their turns.
        refused: Groups that the planner did not admit; they are not dispatched to it again before its next decision, or
            the end of a load.
    """

    planner: ExecutorPlanner

    def __init__(self, limits: CoreLimits) -> None:
        windows = [pool.sliding_window for pool in limits.groups]
        num_chunk_tokens = limits.max_num_batched_tokens if any(windows) else 0
        self.kind = limits.block_size, num_chunk_tokens, limits.prefix_caching, *windows
        self.assignments: list[Assignment] = []
        self.refused: set[SequenceGroup] = set()
        self.num_slots = self.num_tokens = self.num_long = 0
        self.num_blocks = [0] * (len(limits.groups) + (limits.max_encoder_tokens > 0))

    def __len__(self) -> int:
        return len(self.assignments)

    def put(self, assignment: Assignment) -> None:
        """Add an assignment."""
        if not self.assignments or self.assignments[-1].turn < assignment.turn:
            self.assignments.append(assignment)
        else:
            bisect.insort(self.assignments, assignment, key=_BY_TURN)
        self._count(assignment, 1)

    def take(self, index: int) -> Assignment:
        """Remove and return the assignment at an index."""
        assignment = self.assignments.pop(index)
        self._count(assignment, -1)
        return assignment

    @property
    def first_in_company(self) -> int | None:
        """Index of the first group that does not run alone; None: there is none."""
        return next((index for index, given in enumerate(self.assignments) if not given.group.runs_alone), None)

    def take_group(self, group: SequenceGroup) -> None:
        """Remove the assignment of a group, if it has one here."""
        for index, assignment in enumerate(self.assignments):
            if assignment.group is group:
                self.take(index)
                return

    def _count(self, assignment: Assignment, sign: int) -> None:
        self.num_slots += sign * assignment.num_slots
        for index, num_taken in enumerate(assignment.num_blocks):
            self.num_blocks[index] += sign * num_taken
        self.num_tokens += sign * assignment.num_tokens
        self.num_long += sign * assignment.is_long


class TenantCap:
    """How many sequences of each tenant run, over all planners, and how many may: for one pass through the line.

    Counts the sequences that run, are to come back to their planner, or were dispatched to one. O(their groups).

    Args:
        shares: The caps. A group of more sequences, accepted under a larger cap, may run if its tenant has no other.
        inboxes: The inboxes of all planners.
    """

    def __init__(self, shares: TenantShares, inboxes: Iterable[Inbox]) -> None:
        self._shares = shares
        self._num_seqs_of: Counter[str] = Counter()
        for inbox in inboxes:
            for group in (*inbox.planner.batch.running, *inbox.planner.groups.returning):
                self._num_seqs_of[group.tenant] += group.num_slots
            for assignment in inbox.assignments:
                self.count(assignment)

    def count(self, assignment: Assignment, sign: int = 1) -> None:
        """Count a group that was dispatched, or with `sign` -1 taken back; one that is to be ended gets no slots."""
        if assignment.num_slots:
            self._num_seqs_of[assignment.group.tenant] += sign * assignment.group.num_slots

    def obstacle(self, group: SequenceGroup) -> Obstacle | None:
        """Return why a group is not dispatched because of its tenant's cap; None: it may be."""
        num_seqs, most = self._num_seqs_of[group.tenant], self._shares.of(group.tenant).max_num_seqs
        if most is None or not (num_seqs and group.num_slots) or num_seqs + group.num_slots <= most:
            return None
        return Obstacle(
            Wait.SKIPPED,
            f"tenant {group.tenant!r} runs {num_seqs} of at most {most} sequences (its slots in --tenants-file, or "
            f"--max-num-seqs-per-tenant), and this request needs {group.num_slots}",
        )
