"""How many sequences of each tenant run, over all planners, and how many may.

Pure. Used by `dispatcher.py`, for one pass through the line.
"""

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.fleet.inbox import Inbox
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.waiting.tenant_shares import TenantShares


class TenantCap:
    """Counts the sequences that run, are to come back to their planner, or were dispatched to one. O(their groups).

    Args:
        shares: The caps. A group of more sequences, accepted under a larger cap, may run if its tenant has no other.
        inboxes: The inboxes of all planners.
    """

    def __init__(self, shares: TenantShares, inboxes: Iterable[Inbox]) -> None:
        self._shares = shares
        self._num_seqs_of: Counter[str] = Counter()
        for inbox in inboxes:
            for group in (*inbox.planner.batch.running, *inbox.planner.groups.returning):
                self.count(group)
            for assignment in inbox.assignments:
                self.count(assignment.group)

    def count(self, group: SequenceGroup, sign: int = 1) -> None:
        """Count a group that was dispatched, or with `sign` -1 taken back."""
        self._num_seqs_of[group.tenant] += sign * group.num_slots

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
