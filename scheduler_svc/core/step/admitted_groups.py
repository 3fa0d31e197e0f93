"""The groups that a planner has admitted, and how they end or go back to the queue.

An admitted group runs, is swapped out, or was preempted and waits for its last tokens in flight. Each of these states
has its own resources to give back. From there the group ends, or goes back to the queue.
"""

from collections.abc import Generator, Iterable, Iterator
from typing import Protocol

from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step.batch import BY_ORDER
from scheduler_svc.core.step.preemption import PreemptedGroups
from scheduler_svc.core.step.running_groups import RunningGroups
from scheduler_svc.core.step.step_plan import StepPlan
from scheduler_svc.core.step.swapping import SwappedGroups
from scheduler_svc.request.life import EventKind


class AdmissionQueue(Protocol):
    """The queue that a planner takes groups from, and gives them back to; `WaitingQueue` is one."""

    @property
    def has_solo(self) -> bool:
        """Whether a group waits for a step of its own; `in_order` does not yield it, `solo` does."""

    def solo(self) -> Generator[SequenceGroup]:
        """Yield the group that waits for a step of its own; it may be removed. Closed at the end."""

    def in_order(self) -> Generator[SequenceGroup]:
        """Yield the waiting groups in order of admission; the yielded group may be removed. Closed at the end."""

    def wanted_elsewhere(self, groups: Iterable[SequenceGroup], now_s: float) -> Iterator[SequenceGroup]:
        """Yield, in order, the groups of a planner for which other planners have room now."""

    def add(self, group: SequenceGroup) -> None:
        """Queue a group that has to be computed again."""

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group that is admitted."""

    def counter_of(self, group: SequenceGroup) -> float:
        """Return the virtual token counter of the tenant of a group on its level: the smaller one goes first."""

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that are computed for a tenant."""


class AdmittedGroups:
    """Knows the state of each admitted group; removes groups that end or are to be computed again."""

    def __init__(
        self,
        running: RunningGroups,
        swapped: SwappedGroups,
        preempted: PreemptedGroups,
        queue: AdmissionQueue,
    ) -> None:
        self._running = running
        self._batch = running.batch
        self._swapped = swapped
        self._preempted = preempted
        self._queue = queue

    def __contains__(self, group: object) -> bool:
        """Return whether the group was admitted and has not ended."""
        return group in self._batch or group in self._swapped.groups or group in self._preempted.groups

    def __len__(self) -> int:
        return len(self._batch.running) + len(self._swapped) + len(self._preempted.groups)

    @property
    def returning(self) -> list[SequenceGroup]:
        """Preempted groups that are to come back here."""
        return [*self._swapped.groups, *self._preempted.groups]

    def turn_of(self, group: SequenceGroup) -> tuple[int, float]:
        """Return the level and the counter of a group: its order among the groups of other tenants."""
        return group.order[0], self._queue.counter_of(group)

    @property
    def first_return(self) -> tuple[int, float] | None:
        """The first turn of the groups that are to come back: groups with later turns wait. None: there is none.

        Groups that wait for a load do not count.
        """
        if not (returning := self.returning):
            return None
        waits = self._batch.things.waits_for_load
        return min((self.turn_of(group) for group in returning if not waits(group)), default=None)

    # Ends ----------------------------------------------------------------------------------------

    def finish_sequence(self, sequence: Sequence) -> None:
        """End one sequence of a group, and the group with its last one.

        If it is still being computed again, its siblings may wait for blocks that it was to compute: then they
        are preempted, and computed again without it.
        """
        group = sequence.group
        if group.is_last(sequence):
            self.finish_group(group)
            return
        if self._running.prefills.is_catching_up(sequence):
            self._preempted.take(group, self._running)
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.register_blocks(sequence.slot)
            self._batch.free_blocks(sequence.slot)
            self._batch.vacate(sequence)
        else:
            self._swapped.drop_sequence(sequence)
        self._preempted.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._batch.give_up_claim(group)

    def finish_group(self, group: SequenceGroup) -> None:
        """End a group, which may stand in the queue again."""
        if group in self._batch:
            self._running.free_blocks(group)
            self._running.remove(group, SequenceStatus.FINISHED)
        elif group in self._swapped.groups:
            self._swapped.drop(group)
        elif group in self._preempted.groups:
            self._preempted.groups.remove(group)
        else:
            self._queue.remove(group)
        for sequence in group.sequences:
            self._preempted.forget(sequence)
        group.end()

    # To be computed again ------------------------------------------------------------------------

    def requeue(self) -> None:
        """Give preempted groups that have all their tokens back to the queue."""
        for group in self._preempted.take_complete():
            self._queue.add(group)

    def recompute_swapped(self, plan: StepPlan, group: SequenceGroup, cause: str = "") -> None:
        """Free the blocks of a swapped group, on both sides; it is computed again. `cause`: why, if not for room."""
        plan.note(group, EventKind.DROPPED, cause=cause)
        self._swapped.drop(group)
        for sequence in group.live_sequences:
            sequence.status = SequenceStatus.WAITING
        self._queue.add(group)

    def recompute_last_swapped(self, plan: StepPlan) -> bool:
        """Free the blocks of the last swapped group; return False if there is none."""
        if self._swapped.groups:
            self.recompute_swapped(plan, self._swapped.groups[-1])
            return True
        return False

    def evacuate(self) -> list[SequenceGroup]:
        """Remove and return all groups, in order, with their known tokens.

        Their blocks are not freed: the executor is lost, and the planner ends.
        """
        groups = sorted([*self._batch.running, *self.returning], key=BY_ORDER)
        for group in list(self._batch.running):
            self._running.remove(group, SequenceStatus.WAITING)
        for group in groups:
            for sequence in group.live_sequences:
                sequence.status = SequenceStatus.WAITING
                sequence.num_inflight_rows = 0
        return groups
